"""Random rows of an .npy file: batches of 256 small rows of a shuffled epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from workload import Epochs, Workload, parse_flags

_COLUMNS, _BATCH = 16, 256


def _prepare(folder: Path, items: int) -> str:
    path = folder / "rows.npy"
    if not path.exists():
        np.save(path, np.random.default_rng(7).normal(size=(items, _COLUMNS)).astype("f4"))
    return str(path)


WORKLOAD = Workload(
    "random-rows",
    f"shuffled rows of {_COLUMNS} float32 in an .npy file; batches of {_BATCH}; 2 workers",
    unit="rows",
    items=100 * 1024,
    batch_size=_BATCH,
    prepare=_prepare,
    size_of=len,
    why="One call reads the rows of a batch with `ArraySource` and with lists of "
    "indices. The others read row by row.",
    has_order=False,
)


@WORKLOAD.contestant("plain loop")
def _plain(path: str, items: int) -> Epochs:
    rows = np.load(path, mmap_mode="r")
    while True:
        yield _batches(rows)


def _batches(rows: Any) -> Iterator[Any]:
    order = np.random.permutation(len(rows))
    return (rows[order[at : at + _BATCH]] for at in range(0, len(rows), _BATCH))


@WORKLOAD.contestant("enqueuer")
def _enqueuer(path: str, items: int) -> Epochs:
    from enqueuer import GeneratorEnqueuer
    from enqueuer.datasets.arrays import ArraySource

    source = ArraySource(path, _BATCH, shuffle=True)
    with GeneratorEnqueuer(source, workers=2, backend="process") as batches:
        while True:
            yield batches


@WORKLOAD.contestant("enqueuer, threads")
def _threads(path: str, items: int) -> Epochs:
    from enqueuer import GeneratorEnqueuer
    from enqueuer.datasets.arrays import ArraySource

    with GeneratorEnqueuer(ArraySource(path, _BATCH, shuffle=True), workers=2) as batches:
        while True:
            yield batches


class Rows:
    """The rows of the file as a torch dataset: one of an index, or several of a list of them."""

    def __init__(self, path: str) -> None:
        self.rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]


@WORKLOAD.contestant("torch", "torch", (Rows,))
def _torch(path: str, items: int) -> Epochs:
    from torch.utils.data import DataLoader

    options = dict(num_workers=2, persistent_workers=True)
    batches = DataLoader(Rows(path), batch_size=_BATCH, shuffle=True, **options)
    while True:
        yield batches


@WORKLOAD.contestant("torch, lists of indices", "torch", (Rows,))
def _lists(path: str, items: int) -> Epochs:
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    rows = Rows(path)
    sampler = BatchSampler(RandomSampler(rows), _BATCH, False)
    options = dict(num_workers=2, persistent_workers=True)
    batches = DataLoader(rows, batch_size=None, sampler=sampler, **options)
    while True:
        yield batches


@WORKLOAD.contestant("Grain", "grain", (Rows,))
def _grain(path: str, items: int) -> Epochs:
    import grain

    parse_flags()
    # By default it prepares 500 batches, which would be most of the next epoch.
    read = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    dataset = grain.MapDataset.source(Rows(path)).seed(7).shuffle().batch(_BATCH)
    dataset = dataset.repeat().to_iter_dataset(read)
    batches = iter(dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=2)))
    while True:
        yield itertools.islice(batches, items // _BATCH)


@WORKLOAD.contestant("tf.data, in memory", "tensorflow")
def _tensorflow(path: str, items: int) -> Epochs:
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(np.load(path))
    dataset = dataset.shuffle(items).batch(_BATCH).prefetch(4)
    while True:
        yield dataset.as_numpy_iterator()
