"""prefetch_generator: one thread and a `queue.Queue`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefetch_generator import BackgroundGenerator

from contestants import Setup


@contextmanager
def open(setup: Setup) -> Iterator[Iterator[Any]]:
    """Give the items of `setup`."""
    yield BackgroundGenerator(setup.source(), max_prefetch=setup.queue_size)
