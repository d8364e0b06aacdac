"""SPDL with its pool of shared memory, which needs the size of the items."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from spdl.pipeline import SharedMemorySegmentPool

from contestants import Setup, spdl_

_MORE = 64 * 1024  # bytes, for labels and for alignment
# Items outside of the queue: the consumer has one, and one is being written.
_HELD = 2


def open(setup: Setup) -> AbstractContextManager[Any]:
    """Give the items of `setup`."""
    arena = SharedMemorySegmentPool(setup.item_bytes + _MORE, setup.queue_size + _HELD)
    return spdl_.open(setup, arena)
