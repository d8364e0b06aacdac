"""Stragglers: elements that wait 3 ms, but each 20th waits 60 ms; single items, in order."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workload import Epochs, Workload, parse_flags

_THREADS = 16
# Items that wait, for loaders that count these; others count those on their way.
_QUEUE = 48
_WINDOW = _QUEUE + _THREADS


def _prepare(folder: Path, items: int) -> range:
    return range(items)


WORKLOAD = Workload(
    "stragglers",
    "3 ms of waiting an item, but 60 ms for each 20th; single items in order, 16 threads",
    items=1000,
    batch_size=1,
    prepare=_prepare,
    size_of=lambda item: 1,
    why=f"The number of items on their way, {_WINDOW} for all: so a few that take 60 ms wait at "
    "once.",
)


def work(index: int) -> int:
    """Wait, and return the index."""
    time.sleep(0.003 if index % 20 else 0.06)
    return index


@WORKLOAD.contestant("plain loop")
def _plain(indices: Any, items: int) -> Epochs:
    while True:
        yield map(work, indices)


@WORKLOAD.contestant("enqueuer")
def _enqueuer(indices: Any, items: int) -> Epochs:
    from enqueuer import OrderedEnqueuer

    with OrderedEnqueuer(indices, work, concurrency=_THREADS, max_queue_size=_QUEUE) as results:
        while True:
            yield results


@WORKLOAD.contestant("enqueuer, get()")
def _endless(indices: Any, items: int) -> Epochs:
    from enqueuer import OrderedEnqueuer

    with OrderedEnqueuer(indices, work, concurrency=_THREADS, max_queue_size=_QUEUE) as enqueuer:
        results = enqueuer.get()
        while True:
            yield itertools.islice(results, items)


@WORKLOAD.contestant("enqueuer, 16 workers")
def _workers(indices: Any, items: int) -> Epochs:
    from enqueuer import OrderedEnqueuer

    with OrderedEnqueuer(indices, work, workers=_THREADS, max_queue_size=_QUEUE) as results:
        while True:
            yield results


def _window(indices: Any) -> Iterator[int]:
    """Keep as many results waiting as the queues of the others do."""
    with ThreadPoolExecutor(_THREADS) as pool:
        left = iter(indices)
        futures = [pool.submit(work, i) for i in itertools.islice(left, _WINDOW)]
        while futures:
            yield futures.pop(0).result()
            futures += [pool.submit(work, i) for i in itertools.islice(left, 1)]


@WORKLOAD.contestant("ThreadPoolExecutor", uses=(_window,))
def _pool(indices: Any, items: int) -> Epochs:
    while True:
        yield _window(indices)


@WORKLOAD.contestant("Grain", needs="grain")
def _grain(indices: Any, items: int) -> Epochs:
    import grain

    parse_flags()
    read = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_WINDOW)
    results = iter(grain.MapDataset.range(items).map(work).repeat().to_iter_dataset(read))
    while True:
        yield itertools.islice(results, items)


class Items:
    """The indices as a torch dataset."""

    def __init__(self, indices: Any) -> None:
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> int:
        return work(self.indices[index])


# Four for each of its processes.
@WORKLOAD.contestant("torch, 16 processes", needs="torch", uses=(Items,))
def _torch(indices: Any, items: int) -> Epochs:
    from torch.utils.data import DataLoader

    options: Any = dict(batch_size=None, num_workers=_THREADS, prefetch_factor=4)
    results = DataLoader(Items(indices), persistent_workers=True, **options)
    while True:
        yield results


@WORKLOAD.contestant("tf.data, numpy_function", needs="tensorflow")
def _tensorflow(indices: Any, items: int) -> Epochs:
    import tensorflow as tf

    def call(index: Any) -> Any:
        return tf.numpy_function(work, [index], tf.int64)

    dataset = tf.data.Dataset.range(items).map(call, num_parallel_calls=_THREADS).prefetch(_QUEUE)
    while True:
        yield dataset.as_numpy_iterator()


@WORKLOAD.contestant("SPDL", needs="spdl")
def _spdl(indices: Any, items: int) -> Epochs:
    from spdl.pipeline import PipelineBuilder

    pipeline = PipelineBuilder().add_source(indices, continuous=True)
    pipeline = pipeline.pipe(work, concurrency=_THREADS, output_order="input").add_sink(
        _WINDOW - _THREADS
    )
    results = pipeline.build(num_threads=_THREADS)
    with results.auto_stop():
        while True:
            yield results
