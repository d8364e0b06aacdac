"""The description of an HDF5 file: its datasets, sizes and a few statistics."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from enqueuer.datasets.hdf5.files import opened
from enqueuer.datasets.hdf5.rows import ColumnLayout, Layout, RowReader

# `describe` makes its statistics of as many blocks.
_SAMPLE_BLOCKS = 16


@dataclass(frozen=True)
class Column:
    """One dataset of a file.

    Attributes:
        name: Its path in the file, such as `"x"` or `"train/x"`.
        shape: Its shape; the first number is that of the rows.
        dtype: Name of the dtype in numpy; `"text"` or `"ragged int32"` for rows of variable length.
        chunk: Number of rows in a chunk; 0 if it is stored in one piece.
        compression: Compression such as `"gzip"`, or None.
        stored: Size in the file, or in all files of a virtual dataset, in bytes.
        is_virtual: Whether its rows lie in other files.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk: int
    compression: str | None
    stored: int
    is_virtual: bool


@dataclass(frozen=True)
class Summary:
    """A few statistics of a column; None where they make no sense.

    Attributes:
        rows: Number of rows that the statistics are of.
        minimum: Smallest number.
        mean: Mean of all numbers.
        maximum: Largest number.
        not_finite: Number of values that are NaN or infinite; they are left out of the others.
    """

    rows: int
    minimum: float | None = None
    mean: float | None = None
    maximum: float | None = None
    not_finite: int = 0


@dataclass(frozen=True)
class Description:
    """The description of a file.

    Attributes:
        path: Path of the file.
        bytes: Size of the file and of all files that hold rows of its virtual datasets.
        files: Number of these files.
        columns: All its datasets.
        summaries: A summary for each column.
        attributes: Attributes of the file.
        column_attributes: Attributes of each column that has some.
        outside: Files that hold rows, and that are not in the folder of the file.
    """

    path: str
    bytes: int
    files: int
    columns: tuple[Column, ...]
    summaries: tuple[Summary, ...]
    attributes: dict[str, Any]
    column_attributes: dict[str, dict[str, Any]]
    outside: tuple[str, ...]


def describe(
    path: str | os.PathLike[str],
    full: bool = False,
    progress: Callable[[int], object] | None = None,
    allow_outside: bool = True,
) -> Description:
    """Describe an HDF5 file: its datasets, how they are stored, and a few statistics.

    Args:
        path: Path of the file.
        full: Whether the statistics are of all rows; by default of 16 chunks, evenly spread.
        progress: Function that is called with the number of rows whenever some were read.
        allow_outside: Whether rows may be read from files that are not in the folder of the file;
            True by default. A file that you do not trust can show you any file of yours.

    Raises:
        DataFileError: The file or one of its parts is missing, broken or being written, or a
            part lies outside of its folder, and `allow_outside` is False.

    Example:
        >>> import os, tempfile, h5py
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "a.h5")
        ...     with h5py.File(path, "w") as file:
        ...         file["x"] = [[1.0, 2.0], [3.0, 6.0]]
        ...     found = describe(path)
        >>> found.columns[0].name, found.columns[0].shape, found.summaries[0].mean
        ('x', (2, 2), 3.0)
    """
    layout = Layout(os.path.abspath(path), allow_outside=allow_outside)
    with opened(layout.path) as file:
        attributes = dict(file.attrs)
        own = {name: dict(file[name].attrs) for name in layout.columns if file[name].attrs}
    return Description(
        path=str(path),
        bytes=sum(size for size, _ in layout.stamps.values()),
        files=len(layout.stamps),
        columns=tuple(itertools.starmap(_column, layout.columns.items())),
        summaries=tuple(_summary(layout, name, full, progress) for name in layout.columns),
        attributes=attributes,
        column_attributes=own,
        outside=tuple(filter(layout.is_outside, layout.stamps)),
    )


def _column(name: str, found: ColumnLayout) -> Column:
    datasets = list(dict.fromkeys(at.dataset for at in found.stretches))
    chunk, compression = (datasets[0].chunk, datasets[0].compression) if datasets else (0, None)
    stored = sum(dataset.size for dataset in datasets)
    return Column(name, found.shape, found.kind, chunk, compression, stored, found.is_virtual)


def _summary(
    layout: Layout, name: str, full: bool, progress: Callable[[int], object] | None
) -> Summary:
    column = layout.columns[name]
    if not column.stretches or column.dtype.kind not in "biuf":
        return Summary(0)
    blocks = list(itertools.pairwise([*column.starts(), column.shape[0]]))
    if not full and len(blocks) > _SAMPLE_BLOCKS:
        picked = np.linspace(0, len(blocks) - 1, _SAMPLE_BLOCKS).astype(int)
        blocks = [blocks[at] for at in picked]
    rows, numbers, total, bad = 0, 0, 0.0, 0
    least, most = math.inf, -math.inf
    with contextlib.closing(RowReader(layout, {name: column})) as reader:
        for start, stop in blocks:
            block = reader.read([(start, stop)])[name]
            finite = block[np.isfinite(block)]
            rows += len(block)
            bad += block.size - finite.size
            if finite.size:
                numbers += finite.size
                total += float(finite.sum(dtype=np.float64))
                least, most = min(least, float(finite.min())), max(most, float(finite.max()))
            if progress is not None:
                progress(stop - start)
    if not numbers:
        return Summary(rows, not_finite=bad)
    return Summary(rows, least, total / numbers, most, bad)
