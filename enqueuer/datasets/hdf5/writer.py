"""Columns of rows -> whole chunks in an HDF5 file.

batches, or samples -> columns -> Writer: as many rows as chunks have -> file
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from enqueuer.datasets.hdf5.columns import by_name, column_of
from enqueuer.datasets.hdf5.files import CHUNK_BYTES, guarded, h5py, kind_of

# Estimated size of a row of variable length, in bytes.
_APART = {"text": 64, "ragged": 4096}
# With more rows in a chunk, shuffled chunks would leave too many neighbours together.
_MOST_CHUNK_ROWS = 1024


@dataclass(frozen=True)
class Format:
    """How rows are written; with the source and the seed it decides the content of the file.

    Attributes:
        keys: Names of a tuple's members, or the keys of a dict to take; None: all.
        batched: Whether an item is many rows, or one.
        ragged: Keys whose rows are 1-D arrays of any length.
        chunk_rows: Number of rows in a chunk; None: as many as make 1 MiB of the largest key.
        compression: Compression of a chunk, as in h5py.
        checksum: Whether each chunk of numbers has a checksum.
    """

    keys: tuple[str, ...] | None
    batched: bool
    ragged: tuple[str, ...]
    chunk_rows: int | None
    compression: str | int | None
    checksum: bool


@dataclass(frozen=True)
class Kind:
    """The type that all rows of a key have in common.

    Attributes:
        name: Name of the dtype. For rows of objects it includes their type, which numpy does not
            compare.
        dtype: The dtype in HDF5.
        shape: Shape of a row.
    """

    name: str
    dtype: Any = field(compare=False)
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} of shape {self.shape}"

    @property
    def is_inside(self) -> bool:
        """Whether the rows lie in the chunks; others are stored apart, without filters."""
        return self.name.split()[0] not in _APART

    @property
    def bytes(self) -> int:
        """The size of a row; an estimate for rows of variable length."""
        item = _APART.get(self.name.split()[0]) or int(self.dtype.itemsize)
        return int(np.prod(self.shape, dtype=int)) * item


def kind_of_column(column: np.ndarray, is_ragged: bool) -> Kind:
    """Return the type of a column in HDF5."""
    if is_ragged:
        dtype, shape = h5py.vlen_dtype(column[0].dtype), ()
    else:
        dtype = h5py.string_dtype() if column.dtype.kind == "O" else column.dtype
        shape = column.shape[1:]
    return Kind(kind_of(dtype), dtype, shape)


def chunk_rows(kinds: Iterable[Kind], wanted: int | None) -> int:
    """Return the number of rows in a chunk of any key; the keys are read together."""
    if wanted is not None:
        return wanted
    largest = max(1, *(kind.bytes for kind in kinds))
    return int(min(max(1, CHUNK_BYTES // largest), _MOST_CHUNK_ROWS))


class Writer:
    """Write items to an open file, in whole chunks; `finish` writes the last rows.

    Args:
        file: An `h5py.File`, open for writing.
        format: Format of the rows.
        where: Path of the file, for messages.

    Attributes:
        rows: Number of rows that were added.
        kinds: Types of the keys, once there are rows.
    """

    def __init__(self, file: Any, format: Format, where: str) -> None:
        self.rows = 0
        self.kinds: dict[str, Kind] = {}
        self._file = file
        self._format = format
        self._where = where
        self._datasets: dict[str, Any] = {}
        self._pending: dict[str, list[np.ndarray]] = {}
        self._written = 0
        self._chunk = 0

    def write(self, items: Iterable[Any]) -> Iterator[int]:
        """Write all items; yield the number of rows after each batch of them."""
        batches = items if self._format.batched else self._gathered(items)
        for batch in batches:
            self.add(by_name(batch, self._format.keys))
            yield self.rows
        self.finish()

    def _gathered(self, items: Iterable[Any]) -> Iterator[dict[str, list[Any]]]:
        """Yield as many samples as a chunk has, or one as long as that is not known."""
        samples: list[dict[str, Any]] = []
        for item in items:
            found = by_name(item, self._format.keys)
            samples.append({key: _own(value) for key, value in found.items()})
            if len(samples) >= (self._chunk or 1):
                yield _transposed(samples)
                samples = []
        if samples:
            yield _transposed(samples)

    def add(self, batch: Mapping[str, Any]) -> None:
        """Take the rows of a batch; write as many as make whole chunks."""
        ragged = self._format.ragged
        columns = {key: column_of(key, rows, key in ragged) for key, rows in batch.items()}
        lengths = {key: len(column) for key, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the keys of a batch have different numbers of rows: {lengths}")
        count = next(iter(lengths.values()), 0)
        if not count:
            return
        self._check({key: kind_of_column(column, key in ragged) for key, column in columns.items()})
        for key, column in columns.items():
            self._pending[key].append(column)
        self.rows += count
        self._flush((self.rows - self._written) // self._chunk * self._chunk)
        # A source may reuse its arrays.
        for pending in self._pending.values():
            pending[-1] = pending[-1].copy()

    def _check(self, kinds: dict[str, Kind]) -> None:
        if not self.kinds:
            if unknown := set(self._format.ragged) - set(kinds):
                raise ValueError(
                    f"ragged names {sorted(unknown)}, but the source yields {sorted(kinds)}"
                )
            self._chunk = chunk_rows(kinds.values(), self._format.chunk_rows)
            self.kinds, self._pending = kinds, {key: [] for key in kinds}
        elif kinds.keys() != self.kinds.keys():
            raise ValueError(
                f"after {self.rows} rows the source yields {sorted(kinds)}, "
                f"and before it was {sorted(self.kinds)}"
            )
        for key, kind in kinds.items():
            if kind != self.kinds[key]:
                raise ValueError(
                    f"after {self.rows} rows {key!r} is {kind}, and before it was "
                    f"{self.kinds[key]}; all rows of a key must be alike"
                )

    def _create(self, key: str, kind: Kind, chunk: int) -> Any:
        try:
            return self._file.create_dataset(
                key,
                shape=(0, *kind.shape),
                maxshape=(None, *kind.shape),
                dtype=kind.dtype,
                chunks=(chunk, *kind.shape),
                compression=self._format.compression,
                shuffle=self._format.compression is not None,
                fletcher32=self._format.checksum and kind.is_inside,
            )
        # A chunk of more than 4 GiB is refused, for example.
        except (TypeError, ValueError) as error:
            raise type(error)(f"{key!r} cannot be stored in HDF5: {error}") from error

    def _flush(self, count: int) -> None:
        if not count:
            return
        if not self._datasets:
            # A chunk takes its whole size on the disk, so few rows get a small one.
            chunk = min(self._chunk, count)
            self._datasets = {
                key: self._create(key, kind, chunk) for key, kind in self.kinds.items()
            }
        for key, dataset in self._datasets.items():
            pending = self._pending[key]
            rows = pending[0] if len(pending) == 1 else np.concatenate(pending)
            self._pending[key] = [rows[count:]]
            try:
                with guarded(self._where):
                    dataset.resize(self._written + count, axis=0)
                    _put(dataset, self._written, rows[:count])
            except (ValueError, UnicodeError) as error:
                raise ValueError(f"{key!r} cannot be stored in HDF5: {error}") from error
        self._written += count

    def finish(self) -> None:
        """Write the last rows, which fill no whole chunk."""
        self._flush(self.rows - self._written)


def _put(dataset: Any, start: int, rows: np.ndarray) -> None:
    if h5py.check_vlen_dtype(dataset.dtype) is None:
        dataset[start:] = rows
        return
    # An assignment would make one array of rows of equal length, and fail for empty ones.
    dataset.write_direct(rows.astype(dataset.dtype), dest_sel=np.s_[start : start + len(rows)])


def _own(value: Any) -> Any:
    """Return a copy of a value that a source may reuse."""
    if isinstance(value, list):
        return list(value)
    if isinstance(value, np.generic) or not hasattr(value, "__array__"):
        return value
    return np.array(value)


def _transposed(samples: list[dict[str, Any]]) -> dict[str, list[Any]]:
    for sample in samples:
        if sample.keys() != samples[0].keys():
            raise ValueError(
                f"the source yields {sorted(sample)}, and before it was {sorted(samples[0])}"
            )
    return {key: [sample[key] for sample in samples] for key in samples[0]}
