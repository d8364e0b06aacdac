"""The contestants of workloads that load each element with a function and make batches.

Each loader is used as its documentation advises, with two workers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workload import Epochs, Workload, parse_flags


@dataclass(frozen=True)
class Mapped:
    """What these contestants get.

    Attributes:
        elements: Elements of an epoch.
        load: Function of an element, which a worker calls.
        batch_size: Number of elements in a batch.
        collate: Function of the results of a batch; None for the default of each loader.
    """

    elements: Sequence[Any]
    load: Callable[[Any], Any]
    batch_size: int
    collate: Callable[[list[Any]], Any] | None = None


def add(workload: Workload, leave_out: Sequence[str] = ()) -> None:
    """Add the contestants of this module to a workload, whose data are `Mapped`."""
    for name, (open, needs, uses) in _CONTESTANTS.items():
        if name not in leave_out:
            workload.contestant(name, needs, uses, compare=name not in _UNORDERED)(open)


def stack(results: list[Any]) -> Any:
    """Stack arrays and numbers, also those of dicts."""
    if isinstance(results[0], dict):
        return {key: np.stack([one[key] for one in results]) for key in results[0]}
    return np.stack(results)


def _plain(data: Mapped, items: int) -> Epochs:
    while True:
        yield _batches(data)


def _batches(data: Mapped) -> Iterator[Any]:
    collate = data.collate or stack
    for at in range(0, len(data.elements), data.batch_size):
        yield collate([data.load(one) for one in data.elements[at : at + data.batch_size]])


def _enqueuer(data: Mapped, items: int) -> Epochs:
    from enqueuer import OrderedEnqueuer

    options = dict(batch_size=data.batch_size, collate=data.collate, workers=2)
    with OrderedEnqueuer(data.elements, data.load, backend="process", **options) as batches:
        while True:
            yield batches


def _endless(data: Mapped, items: int) -> Epochs:
    from enqueuer import OrderedEnqueuer

    options = dict(batch_size=data.batch_size, collate=data.collate, workers=2)
    with OrderedEnqueuer(data.elements, data.load, backend="process", **options) as enqueuer:
        batches = enqueuer.get()
        while True:
            yield itertools.islice(batches, -(-items // data.batch_size))


def _threads(data: Mapped, items: int) -> Epochs:
    from enqueuer import OrderedEnqueuer

    options = dict(batch_size=data.batch_size, collate=data.collate, workers=2)
    with OrderedEnqueuer(data.elements, data.load, **options) as batches:
        while True:
            yield batches


class Samples:
    """The loaded elements as a torch dataset."""

    def __init__(self, data: Mapped) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data.elements)

    def __getitem__(self, index: int) -> Any:
        return self.data.load(self.data.elements[index])


def _torch(data: Mapped, items: int) -> Epochs:
    from torch.utils.data import DataLoader

    options = dict(batch_size=data.batch_size, collate_fn=data.collate)
    batches = DataLoader(Samples(data), num_workers=2, persistent_workers=True, **options)
    while True:
        yield batches


class Fetch:
    """The function of torchdata's guide: indices -> a batch."""

    def __init__(self, data: Mapped, collate: Callable[[list[Any]], Any]) -> None:
        self.data, self.collate = data, collate

    def __call__(self, indices: list[int]) -> Any:
        return self.collate([self.data.load(self.data.elements[i]) for i in indices])


def _nodes(data: Mapped, items: int) -> Epochs:
    from torch.utils.data import SequentialSampler, default_collate
    from torchdata import nodes

    fetch = Fetch(data, data.collate or default_collate)
    node = nodes.SamplerWrapper(SequentialSampler(data.elements))
    node = nodes.Batcher(node, batch_size=data.batch_size, drop_last=False)
    node = nodes.ParallelMapper(node, fetch, num_workers=2, method="process")
    batches = nodes.Loader(nodes.Prefetcher(node, prefetch_factor=2))
    while True:
        yield batches


def _grain(data: Mapped, items: int) -> Epochs:
    import grain

    parse_flags()
    # By default it prepares 500 batches, which would be most of the next epoch.
    read = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    dataset = grain.MapDataset.source(data.elements).map(data.load)
    dataset = dataset.batch(data.batch_size, batch_fn=data.collate).repeat().to_iter_dataset(read)
    batches = iter(dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=2)))
    while True:
        yield itertools.islice(batches, -(-items // data.batch_size))


def _load_many(load: Any, collate: Any, elements: list[Any]) -> Any:
    return collate([load(one) for one in elements])


# By batches: a call of a pipe for each element costs more than many elements do.
def _spdl(data: Mapped, items: int) -> Epochs:
    from spdl.pipeline import PipelineBuilder

    load = functools.partial(_load_many, data.load, data.collate or stack)
    pipeline = PipelineBuilder().add_source(data.elements, continuous=True)
    pipeline = pipeline.aggregate(data.batch_size)
    pipeline = pipeline.pipe(load, concurrency=2, output_order="input").add_sink(4)
    batches = pipeline.build(num_threads=2)
    with batches.auto_stop():
        while True:
            yield batches


def _spdl_processes(data: Mapped, items: int) -> Epochs:
    from concurrent.futures import ProcessPoolExecutor

    from spdl.pipeline import PipelineBuilder

    load = functools.partial(_load_many, data.load, data.collate or stack)
    options: Any = dict(concurrency=2, output_order="input", executor=ProcessPoolExecutor(2))
    pipeline = PipelineBuilder().add_source(data.elements, continuous=True)
    pipeline = pipeline.aggregate(data.batch_size).pipe(load, **options).add_sink(4)
    batches = pipeline.build(num_threads=1)
    with batches.auto_stop():
        while True:
            yield batches


def _tensorflow(data: Mapped, items: int) -> Epochs:
    import tensorflow as tf

    assert data.collate is None, "it batches by itself"
    example = data.load(data.elements[0])
    keys = list(example) if isinstance(example, dict) else None
    dtypes = [np.asarray(one).dtype for one in (example.values() if keys else [example])]

    def load(index: Any) -> Any:
        loaded = data.load(data.elements[index])
        return [loaded[key] for key in keys] if keys else [loaded]

    def call(index: Any) -> Any:
        parts = tf.numpy_function(load, [index], dtypes)
        return dict(zip(keys, parts, strict=True)) if keys else parts[0]

    dataset = tf.data.Dataset.range(len(data.elements)).map(call, num_parallel_calls=2)
    dataset = dataset.batch(data.batch_size).prefetch(4)
    while True:
        yield dataset.as_numpy_iterator()


# Each of its processes makes batches of its own elements.
def _webdataset(data: Mapped, items: int) -> Epochs:
    import webdataset

    dataset = webdataset.DataPipeline(
        functools.partial(iter, data.elements),
        webdataset.split_by_worker,
        webdataset.map(data.load),
        webdataset.batched(data.batch_size, collation_fn=data.collate or stack),
    )
    batches = webdataset.WebLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    while True:
        yield batches


# Names of contestants whose batches come in another order.
_UNORDERED = frozenset({"WebDataset"})
_CONTESTANTS: dict[str, tuple[Any, str | None, tuple[Any, ...]]] = {
    "plain loop": (_plain, None, (_batches,)),
    "enqueuer": (_enqueuer, None, ()),
    "enqueuer, get()": (_endless, None, ()),
    "enqueuer, threads": (_threads, None, ()),
    "torch": (_torch, "torch", (Samples,)),
    "torchdata.nodes": (_nodes, "torchdata", (Fetch,)),
    "Grain": (_grain, "grain", ()),
    "SPDL": (_spdl, "spdl", (_load_many,)),
    "SPDL, 2 processes": (_spdl_processes, "spdl", (_load_many,)),
    "tf.data, numpy_function": (_tensorflow, "tensorflow", ()),
    "WebDataset": (_webdataset, "webdataset", ()),
}
