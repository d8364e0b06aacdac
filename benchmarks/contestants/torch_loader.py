"""The DataLoader of torch as it is: arrays become tensors in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from contestants import Setup


class Stream(IterableDataset):
    """A generator function as torch wants it."""

    def __init__(self, source: Callable[[], Iterator[Any]]) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return self._source()


@contextmanager
def open(setup: Setup, **options: Any) -> Iterator[Iterator[Any]]:
    """Give the items of `setup`."""
    loader = DataLoader(
        Stream(setup.source),
        batch_size=None,  # the source yields whole batches
        num_workers=setup.workers,
        prefetch_factor=max(1, setup.queue_size // setup.workers),
        multiprocessing_context=setup.start_method,
        **options,
    )
    iterator = iter(loader)
    try:
        yield iterator
    finally:
        iterator._shutdown_workers()  # what its `__del__` does
