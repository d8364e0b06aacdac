"""Random rows of an HDF5 file: batches of 256 small rows of a shuffled epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from workload import Epochs, Workload, parse_flags

_COLUMNS, _BATCH = 16, 256


def _prepare(folder: Path, items: int) -> str:
    import h5py

    path = folder / "rows.h5"
    if not path.exists():
        with h5py.File(path, "w") as file:
            rows = np.random.default_rng(7).normal(size=(items, _COLUMNS)).astype("f4")
            file.create_dataset("x", data=rows, chunks=(1024, _COLUMNS))
    return str(path)


WORKLOAD = Workload(
    "random-rows-hdf5",
    f"shuffled rows of {_COLUMNS} float32 in an HDF5 file; batches of {_BATCH}; 2 workers",
    unit="rows",
    items=20 * 1024,
    batch_size=_BATCH,
    prepare=_prepare,
    size_of=len,
    why="`HDF5Source` reads the rows of a batch together. The others read single rows, "
    "or sort them.",
    needs="h5py",
    has_order=False,
)


@WORKLOAD.contestant("plain loop")
def _plain(path: str, items: int) -> Epochs:
    import h5py

    rows = h5py.File(path)["x"]
    while True:
        yield _batches(rows)


def _batches(rows: Any) -> Iterator[Any]:
    order = np.random.permutation(len(rows))
    # h5py wants the indices in order.
    return (rows[np.sort(order[at : at + _BATCH])] for at in range(0, len(rows), _BATCH))


@WORKLOAD.contestant("enqueuer")
def _enqueuer(path: str, items: int) -> Epochs:
    from enqueuer import GeneratorEnqueuer
    from enqueuer.datasets.hdf5 import HDF5Source

    source = HDF5Source(path, "x", _BATCH, shuffle=True)
    with GeneratorEnqueuer(source, workers=2, backend="process") as batches:
        while True:
            yield batches


class Rows:
    """The rows of the file as a torch dataset, which each worker opens."""

    def __init__(self, path: str, items: int) -> None:
        self.path, self.items = path, items
        self.rows: Any = None

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: Any) -> Any:
        if self.rows is None:
            import h5py

            self.rows = h5py.File(self.path)["x"]
        return self.rows[index]


class ManyRows(Rows):
    """The same with torch's protocol for fetching many rows at once."""

    def __getitems__(self, indices: list[int]) -> Any:
        return list(self[np.sort(indices)])


@WORKLOAD.contestant("torch", "torch", (Rows,))
def _torch(path: str, items: int) -> Epochs:
    from torch.utils.data import DataLoader

    options = dict(num_workers=2, persistent_workers=True)
    batches = DataLoader(Rows(path, items), batch_size=_BATCH, shuffle=True, **options)
    while True:
        yield batches


@WORKLOAD.contestant("torch, __getitems__", "torch", (Rows, ManyRows))
def _many(path: str, items: int) -> Epochs:
    from torch.utils.data import DataLoader

    options = dict(num_workers=2, persistent_workers=True)
    batches = DataLoader(ManyRows(path, items), batch_size=_BATCH, shuffle=True, **options)
    while True:
        yield batches


@WORKLOAD.contestant("Grain", "grain", (Rows,))
def _grain(path: str, items: int) -> Epochs:
    import grain

    parse_flags()
    # By default it prepares 500 batches, which would be most of the next epoch.
    read = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
    dataset = grain.MapDataset.source(Rows(path, items)).seed(7).shuffle().batch(_BATCH)
    dataset = dataset.repeat().to_iter_dataset(read)
    batches = iter(dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=2)))
    while True:
        yield itertools.islice(batches, items // _BATCH)
