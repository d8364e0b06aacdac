"""batchgenerators: a `multiprocessing.Queue` for each process and a thread that reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from batchgenerators.dataloading.multi_threaded_augmenter import MultiThreadedAugmenter

from contestants import Setup


class _Loader:
    def __init__(self, source: Callable[[], Iterator[Any]]) -> None:
        self._source = source

    def set_thread_id(self, number: int) -> None:  # called in the worker
        self._items = self._source()

    def __next__(self) -> Any:
        return next(self._items)


@contextmanager
def open(setup: Setup) -> Iterator[Iterator[Any]]:
    """Give the items of `setup`."""
    augmenter = MultiThreadedAugmenter(
        _Loader(setup.source),
        None,
        num_processes=setup.workers,
        num_cached_per_queue=max(1, setup.queue_size // setup.workers),
        pin_memory=False,
    )
    try:
        yield augmenter
    finally:
        augmenter._finish()  # what its `__del__` does
