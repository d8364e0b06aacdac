"""The DataLoader of torch as it is: arrays become tensors in shared memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from contestants import Setup, Tasks


class Stream(IterableDataset):
    """A generator function as torch wants it."""

    def __init__(self, source: Callable[[], Iterator[Any]]) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return self._source()


class Indexed(Dataset):
    """A function of an index as torch wants it."""

    def __init__(self, call: Callable[[int], Any], count: int) -> None:
        self._call = call
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._call(index)


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


@contextmanager
def open_tasks(
    tasks: Tasks, kind: Any = DataLoader, **options: Any
) -> Iterator[Callable[[], Iterator[Any]]]:
    """Give the epochs of `tasks`."""
    loader = kind(
        Indexed(tasks.call, tasks.count),
        batch_size=tasks.batch_size,
        num_workers=tasks.workers,
        prefetch_factor=max(1, tasks.queue_size // tasks.workers),
        persistent_workers=True,
        **options,
    )
    try:
        yield functools.partial(iter, loader)
    finally:
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()
