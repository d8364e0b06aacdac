"""What a source yields -> columns of rows -> whole chunks in an HDF5 file.

    batch, or samples ==> columns (name -> array) ==> Writer: as many rows as chunks have ==> file

Knows neither workers nor shards: `Writer` is given an open file, and `whole` sees to it that a
file appears under its name only when everything is in it and on the disk.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from enqueuer.datasets.h5files import CHUNK_BYTES, guarded, h5py, kind_of
from enqueuer.formats import an

_APART = {"text": 64, "ragged": 4096}  # bytes that are taken for the size of such a row
_MOST_CHUNK_ROWS = 1024  # or whole chunks in random order would leave neighbours together


@dataclass(frozen=True)
class Format:
    """How rows are written; with the source and the seed it decides what the file contains.

    Attributes:
        keys: Names of a tuple's members, or which of a dict's are taken; None: all.
        batched: Whether an item is many rows, or one.
        ragged: Keys whose rows are 1-D arrays of any length.
        chunk_rows: Of a chunk; None: as many as make a chunk of 1 MiB of the largest key.
        compression: As h5py has it.
        checksum: Whether each chunk of numbers has one.
    """

    keys: tuple[str, ...] | None
    batched: bool
    ragged: tuple[str, ...]
    chunk_rows: int | None
    compression: str | int | None
    checksum: bool


# --- items -> columns ---------------------------------------------------------------------------


def named(item: Any, keys: tuple[str, ...] | None) -> dict[str, Any]:
    """Return what an item of a source holds, by names.

    Raises:
        ValueError: It does not have what `keys` names.
        TypeError: It is nested.
    """
    if isinstance(item, Mapping):
        found = {str(key): value for key, value in item.items()}
        if len(found) < len(item):
            raise ValueError(f"the source yields keys that are alike as texts: {list(item)}")
        if keys is not None:
            if missing := [key for key in keys if key not in found]:
                raise ValueError(f"the source yields no {missing}, only {sorted(found)}")
            found = {key: found[key] for key in keys}
    elif isinstance(item, tuple):
        names = keys or getattr(item, "_fields", None) or tuple(map(str, range(len(item))))
        if len(names) != len(item):
            raise ValueError(f"keys={list(names)} do not name the {len(item)} members of a tuple")
        found = dict(zip(names, item, strict=True))
    else:
        if keys is not None and len(keys) != 1:
            raise ValueError(
                f"the source yields one {type(item).__name__} at a time, and keys has {len(keys)} "
                "names; yield dicts or tuples"
            )
        found = {keys[0] if keys else "data": item}
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
        TypeError: HDF5 has no type for them; the message says what to do.
        ValueError: They differ in shape, or there is no axis of rows.
    """
    if np.ma.is_masked(rows):
        raise TypeError(
            f"{key!r} is masked, which HDF5 has not; yield .filled(...), and the mask as a key of "
            "its own"
        )
    if is_ragged:
        return _ragged(key, rows)
    if _holds(rows, bytes):
        raise TypeError(
            f"{key!r} holds bytes; yield numpy.frombuffer(..., 'uint8') of each and give "
            f"ragged=[{key!r}]"
        )
    try:
        # numpy would give each text the room of the longest, and make texts of numbers beside it
        array = np.asarray(rows, object if _holds(rows, str) else None)
    except ValueError:
        raise ValueError(_of_different_shapes(key)) from None
    if array.ndim == 0:
        raise ValueError(
            f"{key!r} is a single {type(rows).__name__} and has no axis of rows; if the source "
            "yields one sample at a time, give batched=False"
        )
    if len(array) and not array.size:
        raise ValueError(f"the rows of {key!r} are empty, their shape is {array.shape[1:]}")
    if array.dtype.kind == "U":
        return array.astype(object)
    if array.dtype.kind in "mM":
        raise TypeError(
            f"{key!r} has dtype {array.dtype}, which HDF5 has not; yield .astype('int64')"
        )
    if array.dtype.kind == "O":
        if any(isinstance(row, (np.ndarray, list)) for row in array.flat):
            raise ValueError(_of_different_shapes(key))
        strangers = {type(row).__name__ for row in array.flat if not isinstance(row, str)}
        if strangers:
            raise TypeError(
                f"{key!r} holds Python objects ({', '.join(sorted(strangers))}); only numbers, "
                "strings and arrays of them can be packed"
            )
    return array


def _of_different_shapes(key: str) -> str:
    return (
        f"the rows of {key!r} differ in shape; pad them, or give ragged=[{key!r}] if they are "
        "1-D arrays of different length"
    )


def _holds(rows: Any, kind: type) -> bool:
    if isinstance(rows, np.ndarray) and rows.dtype.kind != "O":
        return False  # fixed-length bytes of numpy's have a type in HDF5
    return isinstance(rows, kind) or (
        isinstance(rows, (list, np.ndarray)) and any(isinstance(row, kind) for row in rows)
    )


def _ragged(key: str, rows: Any) -> np.ndarray:
    arrays = [np.array(row) for row in rows]  # copies: a source may fill the same ones again
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
    column = np.empty(len(arrays), object)
    for at, array in enumerate(arrays):  # at once, numpy would take their items for rows
        column[at] = array
    return column


# --- columns -> file ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What all rows of a key have in common."""

    name: str  #: of the dtype, with what numpy does not compare: of what rows of objects are
    dtype: Any = field(compare=False)
    shape: tuple[int, ...]  #: of a row

    def __str__(self) -> str:
        return f"{self.name} of shape {self.shape}"

    @property
    def is_inside(self) -> bool:
        """Whether the rows lie in the chunks; others are kept apart, where no filter sees them."""
        return self.name.split()[0] not in _APART

    @property
    def bytes(self) -> int:
        """The size of a row, or what it is taken for."""
        item = _APART.get(self.name.split()[0]) or int(self.dtype.itemsize)
        return int(np.prod(self.shape, dtype=int)) * item


def kind(column: np.ndarray, is_ragged: bool) -> Kind:
    """Return what a column is in HDF5."""
    if is_ragged:
        dtype, shape = h5py.vlen_dtype(column[0].dtype), ()
    else:
        dtype = h5py.string_dtype() if column.dtype.kind == "O" else column.dtype
        shape = column.shape[1:]
    return Kind(kind_of(dtype), dtype, shape)


def chunk_rows(kinds: Iterable[Kind], wanted: int | None) -> int:
    """Return how many rows a chunk has, the same for all keys, so that they are read together."""
    if wanted is not None:
        return wanted
    largest = max(1, *(kind.bytes for kind in kinds))
    return int(min(max(1, CHUNK_BYTES // largest), _MOST_CHUNK_ROWS))


class Writer:
    """Writes items to an open file, in whole chunks; `finish` writes what is left.

    Args:
        file: An `h5py.File`, open for writing.
        format: How.
        where: Of the file, for messages.
    """

    def __init__(self, file: Any, format: Format, where: str) -> None:
        self.rows = 0  # that were handed over
        self.kinds: dict[str, Kind] = {}  # of the keys, once there are rows
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
            self.add(named(batch, self._format.keys))
            yield self.rows
        self.finish()

    def _gathered(self, items: Iterable[Any]) -> Iterator[dict[str, list[Any]]]:
        """Yield as many samples as a chunk has, or a few as long as nobody knows that."""
        samples: list[dict[str, Any]] = []
        for item in items:
            found = named(item, self._format.keys)
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
        self._check({key: kind(column, key in ragged) for key, column in columns.items()})
        for key, column in columns.items():
            self._pending[key].append(column)
        self.rows += count
        self._flush((self.rows - self._written) // self._chunk * self._chunk)
        for pending in self._pending.values():
            pending[-1] = pending[-1].copy()  # a source may fill the same array again

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
        for key, is_now in kinds.items():
            if is_now != self.kinds[key]:
                raise ValueError(
                    f"after {self.rows} rows {key!r} is {is_now}, and before it was "
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
        except (TypeError, ValueError) as error:  # a chunk of more than 4 GiB, for example
            raise type(error)(f"{key!r} cannot be stored in HDF5: {error}") from error

    def _flush(self, count: int) -> None:
        if not count:
            return
        if not self._datasets:
            # a chunk takes its whole place on the disk, so few rows get a small one
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
        """Write the last rows, which make no whole chunk."""
        self._flush(self.rows - self._written)


def _put(dataset: Any, start: int, rows: np.ndarray) -> None:
    if h5py.check_vlen_dtype(dataset.dtype) is None:
        dataset[start:] = rows
        return
    # an assignment would make one array of rows of equal length, and stumble over empty ones
    dataset.write_direct(rows.astype(dataset.dtype), dest_sel=np.s_[start : start + len(rows)])


def _own(value: Any) -> Any:
    """Return what stays as it is when the source fills the same array or list again."""
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


# --- a file that is whole -----------------------------------------------------------------------


@contextlib.contextmanager
def whole(path: Path, folder: Path) -> Iterator[Any]:
    """Give an `h5py.File` that appears under its name only when all is in it and on the disk.

    Args:
        path: Of the file.
        folder: For the file while it is written; on the same file system.
    """
    temporary = folder / f"{path.name}.{os.getpid()}.tmp"
    try:
        with guarded(temporary):
            file = h5py.File(temporary, "w")
        try:
            yield file
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to be told
                _discard(file)
            raise
        with guarded(temporary):
            file.close()
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _discard(file: Any) -> None:
    """Close a file whose content is of no use any more."""
    # HDF5 writes on closing what it has not written yet; if it cannot, as the disk is full, it
    # crashes when the file's memory is freed. So that goes nowhere.
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, file.id.get_vfd_handle(), inheritable=False)
    os.close(nowhere)
    file.close()


def sync(path: Path) -> None:
    """Have the disk hold what is in a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
