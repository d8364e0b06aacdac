"""Items of a source -> columns of rows -> whole chunks in an HDF5 file.

by_name:    a dict, a tuple or an array -> its content by key
column_of:  the rows of a key -> an array that HDF5 can store
Writer:     batches, or samples -> columns -> as many rows as chunks have -> file
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from enqueuer.common.text import an
from enqueuer.datasets.hdf5.files import (
    CHUNK_BYTES,
    RowKind,
    assign,
    by_offset,
    guarded,
    h5py,
    row_kind,
)
from enqueuer.errors import DataFileError

# Estimated size of a row of variable length, in bytes.
_APART = {"text": 64, "ragged": 4096}
# With more rows in a chunk, shuffled chunks would leave too many neighbours together.
_MAX_CHUNK_ROWS = 1024


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


def by_name(item: Any, keys: tuple[str, ...] | None) -> dict[str, Any]:
    """Return the content of an item by names.

    Raises:
        ValueError: The item lacks a name of `keys`.
        TypeError: The item is nested.
    """
    if isinstance(item, Mapping):
        found = {str(key): value for key, value in item.items()}
        if len(found) < len(item):
            raise ValueError(f"the source yields keys that are alike as texts: {list(item)}")
        if missing := [key for key in keys or () if key not in found]:
            raise ValueError(f"the source yields no {missing}, only {sorted(found)}")
        found = found if keys is None else {key: found[key] for key in keys}
    else:
        members = item if isinstance(item, tuple) else (item,)
        names = getattr(item, "_fields", map(str, range(len(members))))
        names = keys or tuple(names if isinstance(item, tuple) else ["data"])
        if len(names) != len(members):
            raise ValueError(f"keys={list(names)} do not name the {len(members)} arrays of an item")
        found = dict(zip(names, members, strict=True))
    for key, value in found.items():
        if isinstance(value, (Mapping, tuple)):
            raise TypeError(
                f"{key!r} is {an(type(value).__name__)}, and only a flat dict or tuple of arrays "
                "can be packed; give its members keys of their own"
            )
    return found


def column_of(key: str, rows: Any, is_ragged: bool) -> np.ndarray:
    """Return rows of one key as an array: of numbers, of `str`, or of arrays if `is_ragged`.

    Raises:
        TypeError: HDF5 has no type for them; the message proposes a remedy.
        ValueError: There is no axis of rows.
    """
    if np.ma.is_masked(rows):
        raise TypeError(
            f"{key!r} is masked, and HDF5 has no masks; yield .filled(...), and the mask as a "
            "key of its own"
        )
    if is_ragged:
        return _ragged(key, rows)
    try:
        # As a text array, each text would take the room of the longest, and numbers beside texts
        # would become texts. Of bytes, zeros at the end would be lost.
        array = np.asarray(rows, object if _holds_texts(rows) else None)
    except ValueError:
        # They differ in shape.
        array = np.fromiter(rows, object, len(rows))
    if array.ndim == 0:
        raise ValueError(
            f"{key!r} is a single {type(rows).__name__} and has no axis of rows; if the source "
            "yields one sample at a time, give batched=False"
        )
    if len(array) and not array.size:
        raise ValueError(f"the rows of {key!r} are empty, their shape is {array.shape[1:]}")
    return _storable(key, array)


def _storable(key: str, array: np.ndarray) -> np.ndarray:
    """Return an array with a dtype that HDF5 has."""
    if array.dtype.kind == "U":
        return array.astype(object)
    if array.dtype.names and by_offset(array.dtype) != array.dtype:
        found = np.empty(array.shape, by_offset(array.dtype))
        assign(found, array)
        return found
    if array.dtype.kind == "O":
        others = {type(row).__name__ for row in array.flat if not isinstance(row, str)}
        if others:
            raise TypeError(
                f"{key!r} holds Python objects ({', '.join(sorted(others))}); only numbers, "
                "strings and arrays of them can be packed: if the rows differ in shape, pad them, "
                f"or give ragged=[{key!r}] if they are 1-D arrays of different length, such as "
                "numpy.frombuffer(..., 'uint8') of bytes"
            )
    return array


def _holds_texts(rows: Any) -> bool:
    # HDF5 has a type for numpy's bytes of fixed length.
    if isinstance(rows, np.ndarray) and rows.dtype.kind != "O":
        return False
    some = rows if isinstance(rows, (list, np.ndarray)) else [rows]
    return any(isinstance(row, (str, bytes)) for row in some)


def _ragged(key: str, rows: Any) -> np.ndarray:
    # These are copies, as a source may reuse its arrays.
    arrays = [np.array(row) for row in rows]
    for array in arrays:
        if array.ndim != 1 or array.dtype.kind not in "biuf":
            raise TypeError(
                f"{key!r} is ragged, so its rows must be 1-D arrays of numbers, got shape "
                f"{array.shape} and dtype {array.dtype}; flatten them and give their shape a key "
                "of its own"
            )
    if len({array.dtype for array in arrays}) > 1:
        raise TypeError(
            f"the rows of {key!r} differ in dtype; yield arrays that all have the same (an empty "
            "list has float64)"
        )
    # np.array() would make rows of the items of arrays of equal length.
    return np.fromiter(arrays, object, len(arrays))


def kind_of_column(column: np.ndarray, is_ragged: bool) -> RowKind:
    """Return the type of a column in HDF5."""
    dtype = column.dtype
    if is_ragged:
        dtype = h5py.vlen_dtype(column[0].dtype)
    elif dtype.kind == "O":
        dtype = h5py.string_dtype()
    return row_kind(dtype, column.shape)


class Writer:
    """Write items to an open file, in whole chunks.

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
        self.kinds: dict[str, RowKind] = {}
        self._file = file
        self._format = format
        self._where = where
        self._datasets: dict[str, Any] = {}
        self._pending: dict[str, list[np.ndarray]] = {}
        self._written = 0
        self._chunk = 0

    def write(self, items: Iterable[Any]) -> Iterator[int]:
        """Write all items; yield the number of rows of each batch of them."""
        batches = items if self._format.batched else self._gathered(items)
        for batch in batches:
            before = self.rows
            self._add(by_name(batch, self._format.keys))
            yield self.rows - before
        # The last rows fill no whole chunk.
        self._flush(self.rows - self._written)

    def _gathered(self, items: Iterable[Any]) -> Iterator[dict[str, list[Any]]]:
        """Yield as many samples as a chunk has, or one as long as that is not known."""
        columns: dict[str, list[Any]] = {}
        for item in items:
            found = by_name(item, self._format.keys)
            count = len(next(iter(columns.values()), ()))
            if count and (count >= self._chunk or found.keys() != columns.keys()):
                yield columns
                columns = {}
            for key, value in found.items():
                # A source may reuse its arrays.
                columns.setdefault(key, []).append(copy.deepcopy(value))
        yield columns

    def _add(self, batch: Mapping[str, Any]) -> None:
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

    def _check(self, kinds: dict[str, RowKind]) -> None:
        if not self.kinds:
            if unknown := set(self._format.ragged) - set(kinds):
                raise ValueError(
                    f"ragged names {sorted(unknown)}, but the source yields {sorted(kinds)}"
                )
            # The keys are read together, so all have as many rows in a chunk.
            largest = max(
                math.prod(kind.shape)
                * (_APART.get(kind.name.split()[0]) or int(kind.dtype.itemsize))
                for kind in kinds.values()
            )
            usual = min(max(1, CHUNK_BYTES // max(1, largest)), _MAX_CHUNK_ROWS)
            self._chunk = self._format.chunk_rows or usual
            self.kinds, self._pending = kinds, {key: [] for key in kinds}
        elif kinds != self.kinds:
            raise ValueError(
                f"after {self.rows} rows the source yields {kinds}, and before it was "
                f"{self.kinds}; all rows of a key must be alike"
            )

    def _flush(self, count: int) -> None:
        """Write so many of the rows that are pending."""
        if not count:
            return
        # A chunk takes its whole size on the disk, so few rows get a small one.
        chunk = min(self._chunk, count)
        if not self._datasets:
            for key, kind in self.kinds.items():
                with _storing(key):
                    self._datasets[key] = self._file.create_dataset(
                        key,
                        shape=(0, *kind.shape),
                        maxshape=(None, *kind.shape),
                        dtype=kind.dtype,
                        chunks=(chunk, *kind.shape),
                        compression=self._format.compression,
                        shuffle=self._format.compression is not None,
                        # What is stored apart has no filters.
                        fletcher32=self._format.checksum and not kind.dtype.hasobject,
                    )
        for key, dataset in self._datasets.items():
            pending = self._pending[key]
            rows = pending[0] if len(pending) == 1 else np.concatenate(pending)
            self._pending[key] = [rows[count:]]
            with _storing(key), guarded(self._where):
                dataset.resize(self._written + count, axis=0)
                _put(dataset, self._written, rows[:count])
        self._written += count


@contextlib.contextmanager
def _storing(key: str) -> Iterator[None]:
    """Convert an error of h5py that a value has caused to a ValueError with its key."""
    try:
        yield
    except DataFileError:
        raise
    # A chunk of more than 4 GiB is refused, for example.
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        raise ValueError(f"{key!r} cannot be stored in HDF5: {error}") from error


def _put(dataset: Any, start: int, rows: np.ndarray) -> None:
    if h5py.check_vlen_dtype(dataset.dtype) is None:
        dataset[start:] = rows
        return
    # An assignment would make one array of rows of equal length, and fail for empty ones.
    dataset.write_direct(rows.astype(dataset.dtype), dest_sel=np.s_[start : start + len(rows)])
