"""Rows of a table -> normalized numbers and a category, row by row; batches of 256."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from workload import Epochs, Workload, mapped
from workload.mapped import Mapped

_NUMBERS, _BATCH = 8, 256
_CITIES = ("Aarhus", "Bergen", "Cork", "Delft", "Essen")


def _prepare(folder: Path, items: int) -> Mapped:
    import pyarrow
    import pyarrow.parquet

    path = folder / "table.parquet"
    if not path.exists():
        rng = np.random.default_rng(7)
        columns: dict[str, Any] = {f"x{n}": rng.normal(5, 3, items) for n in range(_NUMBERS)}
        columns["city"] = [_CITIES[n] for n in rng.integers(0, len(_CITIES), items)]
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return Mapped(range(items), functools.partial(load, str(path)), _BATCH)


WORKLOAD = Workload(
    "table-rows",
    f"rows of a Parquet file: {_NUMBERS} numbers, a city; batches of {_BATCH}; 2 workers",
    unit="rows",
    items=40 * 1024,
    batch_size=_BATCH,
    prepare=_prepare,
    size_of=lambda batch: len(batch["city"]),
    why="Rows are made in microseconds, so that batches and their transport take a large part.",
    needs="pyarrow",
)


@functools.cache
def _table(path: str) -> Any:
    """Return the numbers as an array, and the cities as a list."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    numbers = np.stack([table[f"x{n}"].to_numpy() for n in range(_NUMBERS)], axis=1)
    return numbers, table["city"].to_pylist()


def load(path: str, index: int) -> Any:
    """Return the row of an index."""
    numbers, cities = _table(path)
    return {"x": (numbers[index] - 5) / 3, "city": _CITIES.index(cities[index])}


mapped.add(WORKLOAD)


def _transform(rows: Any) -> Any:
    numbers = np.stack([rows[f"x{n}"] for n in range(_NUMBERS)], axis=1)
    return {"x": list((numbers - 5) / 3), "city": [_CITIES.index(c) for c in rows["city"]]}


@WORKLOAD.contestant("Hugging Face, torch", "datasets", (_transform,))
def _datasets(data: Mapped, items: int) -> Epochs:
    import datasets
    from torch.utils.data import DataLoader

    path = data.load.args[0]
    folder = str(Path(path).parent / "cache")
    dataset = datasets.Dataset.from_parquet(path, cache_dir=folder).with_transform(_transform)
    options = dict(num_workers=2, persistent_workers=True)
    batches = DataLoader(dataset, batch_size=_BATCH, **options)
    while True:
        yield batches
