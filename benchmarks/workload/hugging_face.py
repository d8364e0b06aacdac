"""A Hugging Face dataset of tokens, in its order: batches of 256 rows as arrays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from workload import Epochs, Workload

_TOKENS = 128


def _prepare(folder: Path, items: int) -> Any:
    import datasets

    path = folder / "dataset"
    if not path.exists():
        rng = np.random.default_rng(7)
        rows = {"ids": rng.integers(0, 30_000, (items, _TOKENS)), "label": range(items)}
        datasets.Dataset.from_dict(rows).save_to_disk(str(path))
    return datasets.load_from_disk(str(path)).with_format("numpy")


WORKLOAD = Workload(
    "hugging-face",
    f"a dataset of {_TOKENS} tokens a row, with the format of numpy; batches of 256; 2 processes",
    unit="rows",
    items=51_200,
    batch_size=256,
    prepare=_prepare,
    size_of=lambda batch: len(batch["label"]),
    why="A row costs far more than its share of a slice, so that rows and slices are "
    "compared apart.",
    needs="datasets",
)


@WORKLOAD.contestant("plain loop")
def _plain(dataset: Any, items: int) -> Epochs:
    while True:
        yield _slices(dataset, items)


def _slices(dataset: Any, items: int) -> Iterator[Any]:
    return (dataset[at : at + 256] for at in range(0, items, 256))


@WORKLOAD.contestant("enqueuer")
def _enqueuer(dataset: Any, items: int) -> Epochs:
    from enqueuer import OrderedEnqueuer

    with OrderedEnqueuer(dataset, batch_size=256, workers=2, backend="process") as batches:
        while True:
            yield batches


@WORKLOAD.contestant("enqueuer, 2 threads")
def _threads(dataset: Any, items: int) -> Epochs:
    from enqueuer import OrderedEnqueuer

    with OrderedEnqueuer(dataset, batch_size=256, workers=2) as batches:
        while True:
            yield batches


@WORKLOAD.contestant("enqueuer, slices")
def _enqueuer_slices(dataset: Any, items: int) -> Epochs:
    from enqueuer import OrderedEnqueuer

    starts = range(0, items, 256)
    options = dict(workers=2, backend="process")
    with OrderedEnqueuer(starts, lambda at: dataset[at : at + 256], **options) as batches:
        while True:
            yield batches


@WORKLOAD.contestant("torch", needs="torch")
def _torch(dataset: Any, items: int) -> Epochs:
    from torch.utils.data import DataLoader

    batches = DataLoader(
        dataset.with_format("torch"), batch_size=256, num_workers=2, persistent_workers=True
    )
    while True:
        yield batches


@WORKLOAD.contestant("torch, slices", needs="torch")
def _torch_slices(dataset: Any, items: int) -> Epochs:
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

    rows = dataset.with_format("torch")
    # Without a batch size, the list of indices is what the dataset gets.
    sampler = BatchSampler(SequentialSampler(rows), 256, False)
    options = dict(num_workers=2, persistent_workers=True)
    batches = DataLoader(rows, batch_size=None, sampler=sampler, **options)
    while True:
        yield batches


@WORKLOAD.contestant("plain loop, iter")
def _iter(dataset: Any, items: int) -> Epochs:
    while True:
        yield dataset.iter(batch_size=256)


@WORKLOAD.contestant("iterable dataset, torch", needs="torch", compare=False)
def _iterable(dataset: Any, items: int) -> Epochs:
    from torch.utils.data import DataLoader

    rows = dataset.with_format("torch").to_iterable_dataset(num_shards=8)
    batches = DataLoader(rows, batch_size=256, num_workers=2, persistent_workers=True)
    while True:
        yield batches
