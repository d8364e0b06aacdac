"""Remote files: 35 ms of waiting and about 3 ms of Python for each; two processes where possible.

The loaders differ in how many files each of their processes loads at once.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np

from workload import Epochs, Workload, parse_flags

_WAIT_S = 0.035
_ROUNDS = 40_000


def _prepare(folder: Path, items: int) -> range:
    return range(items)


WORKLOAD = Workload(
    "remote-files",
    "35 ms of waiting and about 3 ms of Python a file; batches of 32",
    unit="files",
    items=640,
    batch_size=32,
    prepare=_prepare,
    size_of=len,
    # An epoch takes 1.3 s, so few batches more or less would count.
    timed_s=5.0,
    why="Python on two CPUs, once enough files are on their way. The row of the limit "
    "does not wait at all.",
)


def parse(index: int) -> Any:
    """Compute in Python, as the parser of a file does."""
    state = index
    for _ in range(_ROUNDS):
        state = (state * 31 + 7) & 0xFFFFFFFF
    return np.full(64, state, np.int64)


def load(index: int) -> Any:
    """Wait for a file, and parse it."""
    time.sleep(_WAIT_S)
    return parse(index)


@WORKLOAD.contestant("plain loop")
def _plain(files: Any, items: int) -> Epochs:
    while True:
        yield (np.stack([load(i) for i in files[at : at + 32]]) for at in range(0, items, 32))


@WORKLOAD.contestant("limit: no waiting")
def _limit(files: Any, items: int) -> Epochs:
    from enqueuer import OrderedEnqueuer

    with OrderedEnqueuer(files, parse, batch_size=32, workers=2, backend="process") as batches:
        while True:
            yield batches


@WORKLOAD.contestant("enqueuer")
def _enqueuer(files: Any, items: int) -> Epochs:
    from enqueuer import OrderedEnqueuer

    options = dict(batch_size=32, workers=2, backend="process", concurrency=16)
    with OrderedEnqueuer(files, load, **options) as batches:
        while True:
            yield batches


@WORKLOAD.contestant("enqueuer, get()")
def _endless(files: Any, items: int) -> Epochs:
    from enqueuer import OrderedEnqueuer

    options = dict(batch_size=32, workers=2, backend="process", concurrency=16)
    with OrderedEnqueuer(files, load, **options) as enqueuer:
        batches = enqueuer.get()
        while True:
            yield itertools.islice(batches, items // 32)


@WORKLOAD.contestant("enqueuer, 32 processes")
def _processes(files: Any, items: int) -> Epochs:
    from enqueuer import OrderedEnqueuer

    options = dict(batch_size=32, workers=32, backend="process", max_queue_size=32)
    with OrderedEnqueuer(files, load, **options) as batches:
        while True:
            yield batches


class Files:
    """The files as a torch dataset."""

    def __init__(self, items: int) -> None:
        self.items = items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> Any:
        return load(index)


@WORKLOAD.contestant("torch, 32 processes", needs="torch", uses=(Files,))
def _torch(files: Any, items: int) -> Epochs:
    from torch.utils.data import DataLoader

    batches = DataLoader(Files(items), batch_size=32, num_workers=32, persistent_workers=True)
    while True:
        yield batches


# Each of its processes makes batches of its own files.
@WORKLOAD.contestant("Grain, 2 x 16", needs="grain", compare=False)
def _grain(files: Any, items: int) -> Epochs:
    import grain

    parse_flags()
    read = grain.ReadOptions(num_threads=16, prefetch_buffer_size=64)
    dataset = grain.MapDataset.source(files).map(load).repeat().to_iter_dataset(read).batch(32)
    batches = iter(dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=2)))
    while True:
        yield itertools.islice(batches, items // 32)


@WORKLOAD.contestant("SPDL, 32 threads", needs="spdl")
def _spdl(files: Any, items: int) -> Epochs:
    from spdl.pipeline import PipelineBuilder

    pipeline = PipelineBuilder().add_source(files, continuous=True)
    pipeline = pipeline.pipe(load, concurrency=32, output_order="input")
    batches = pipeline.aggregate(32).pipe(np.stack).add_sink(4).build(num_threads=32)
    with batches.auto_stop():
        while True:
            yield batches
