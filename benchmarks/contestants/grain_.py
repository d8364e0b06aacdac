"""Grain: spawned processes, and a fresh piece of shared memory for each array."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import grain
from absl import flags

from contestants import Setup, Tasks

_SHARED_FROM = 64 * 1024  # bytes; smaller arrays are faster in the pickle
_ENDLESS = 1 << 40

# Grain reads flags of absl, which a program must parse first.
if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()


class _Items:
    """A generator function as Grain wants it: something with indices. The indices are ignored."""

    def __init__(self, source: Callable[[], Iterator[Any]]) -> None:
        self._source = source
        self._items: Iterator[Any] | None = None

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> Any:
        if self._items is None:
            self._items = self._source()
        return next(self._items)


@contextmanager
def open(setup: Setup) -> Iterator[Iterator[Any]]:
    """Give the items of `setup`."""
    data = grain.MapDataset.source(_Items(setup.source))
    with closing(_in_processes(data, setup.workers, setup.queue_size)) as items:
        yield items


@contextmanager
def open_threads(setup: Setup) -> Iterator[Iterator[Any]]:
    """Give what `setup.call` returns, called by threads."""
    data = grain.MapDataset.source(range(1_000_000)).map(setup.call)
    options = grain.ReadOptions(
        num_threads=setup.workers, prefetch_buffer_size=max(setup.workers, setup.queue_size)
    )
    with closing(iter(data.to_iter_dataset(options))) as items:
        yield items


@contextmanager
def open_tasks(tasks: Tasks) -> Iterator[Callable[[], Iterator[Any]]]:
    """Give the epochs of `tasks`, which follow each other on the same workers."""
    data = grain.MapDataset.range(tasks.count).map(tasks.call)
    if tasks.batch_size is not None:
        data = data.batch(tasks.batch_size)
    with closing(_in_processes(data.repeat(), tasks.workers, tasks.queue_size)) as items:
        yield lambda: itertools.islice(items, tasks.steps)


def _in_processes(data: Any, workers: int, queue_size: int) -> Any:
    read = data.to_iter_dataset(
        grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # one reader in each process
    )
    read = grain.experimental.WithOptionsIterDataset(
        read, grain.experimental.DatasetOptions(min_shm_size=_SHARED_FROM)
    )
    options = grain.MultiprocessingOptions(
        num_workers=workers, per_worker_buffer_size=max(1, queue_size // workers)
    )
    return iter(read.mp_prefetch(options))
