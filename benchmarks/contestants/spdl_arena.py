"""SPDL with its pool of shared memory, which must be told the size of the items."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from spdl.pipeline import SharedMemorySegmentPool

from contestants import Setup, spdl_

_MORE = 64 * 1024  # bytes, for labels and for alignment
_HELD = 2  # items that are in nobody's queue: one with the consumer, one being written


def open(setup: Setup) -> AbstractContextManager[Any]:
    """Give the items of `setup`."""
    arena = SharedMemorySegmentPool(setup.item_bytes + _MORE, setup.queue_size + _HELD)
    return spdl_.open(setup, arena)
