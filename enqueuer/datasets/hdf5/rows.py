"""The content of an HDF5 file: the files and datasets that hold its rows, and reading them.

    Layout:     path -> its datasets, and for each of them stretches of rows in files
    RowReader:  rows 10 to 30 --stretches--> 10 to 20 here, 0 to 10 there --> one array
    describe:   path -> its datasets, and how they are stored

For rows of a virtual dataset whose file is missing or cannot be opened, HDF5 gives zeros without an
error. So the virtual datasets that `pack` makes are not read through HDF5. Their mappings are read
once, by the layout, and the reader opens the parts itself, when rows of them are needed. Any other
virtual dataset is read through HDF5, as one stretch.

HDF5 also gives zeros for rows that were cut off an open file. So after a file was read, and before
its rows are returned, it is checked that the file is unchanged.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import math
import operator
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from enqueuer.common.text import size
from enqueuer.datasets.hdf5 import files
from enqueuer.datasets.hdf5.files import OpenFiles, by_offset, guarded, h5py, kind_of, raw_name
from enqueuer.errors import DataFileError

# Blocks of a file. Each takes some hundred bytes here and in every worker.
_MAX_BLOCKS = 1 << 16
# Below this size, another copy costs less than the work of h5py to avoid it.
_DIRECT_BYTES = 1 << 16
# The row behind the last one of a stretch.
_STOP = operator.attrgetter("stop")


class StoredDataset(NamedTuple):
    """A dataset of a file that is read through HDF5.

    Attributes:
        path: Path of the file.
        name: Name of the dataset.
        chunk: Number of rows in a chunk; 0 if it is stored in one piece.
        compression: Compression, or None.
        size: Size in the file, in bytes.
        axis: Axis of the rows.
    """

    path: str
    name: str
    chunk: int
    compression: str | None
    size: int
    axis: int


class Stretch(NamedTuple):
    """Rows of a column that are those of one dataset of a file, from its first one on.

    Attributes:
        start: First row.
        stop: Row behind the last one.
        dataset: The dataset.
    """

    start: int
    stop: int
    dataset: StoredDataset


# Rows of a dataset: the first, and the one behind the last, are counted in its file.
Part: TypeAlias = tuple[StoredDataset, int, int]
Axis: TypeAlias = int | Mapping[str, int]


@dataclass(frozen=True)
class ColumnLayout:
    """One dataset of a file, and where its rows lie.

    Attributes:
        shape: Its shape with the axis of the rows in front.
        kind: Name of its dtype, as `kind_of` has it.
        dtype: Dtype of an array of its rows.
        is_virtual: Whether its rows lie in other files.
        stretches: Stretches, which together are its rows in their order.
    """

    shape: tuple[int, ...]
    kind: str
    dtype: np.dtype[Any]
    is_virtual: bool
    stretches: Sequence[Stretch]

    @property
    def row_bytes(self) -> int:
        """The size of a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def starts(self) -> list[int]:
        """Return the first rows of the blocks: chunks, or groups of small ones."""
        usual = max(1, files.CHUNK_BYTES // max(1, self.row_bytes))
        sized = [(at, at.dataset.chunk or usual) for at in self.stretches]
        count = sum((at.stop - at.start) // rows for at, rows in sized)
        together = count // _MAX_BLOCKS + 1
        found: list[int] = []
        for at, rows in sized:
            found += range(at.start, at.stop, rows * together)
        return found

    def between(self, start: int, stop: int, step: int) -> Iterator[Part]:
        """Yield the parts with some rows, each from the first row that is wanted on."""
        stretches = self.stretches
        for nth in range(bisect.bisect_right(stretches, start, key=_STOP), len(stretches)):
            begin, end, dataset = stretches[nth]
            if begin >= stop:
                return
            low, high = max(start, begin), min(stop, end)
            low += (start - low) % step
            if low < high:
                yield dataset, low - begin, high - begin


class Layout:
    """The facts that a reader needs before it opens a file; all files with its rows are inspected.

    Args:
        path: Path of the file.
        names: Names of the datasets; None: all.
        allow_outside: Whether rows may lie in files outside of its folder.
        axis: Axis of the rows; or those of some datasets, by name, for which it is not the first.

    Attributes:
        path: Path of the file.
        columns: Its datasets, by name.
        stamps: Size and time of change of each file that holds rows.
        unreadable: Why other datasets or groups cannot be read, by their names.

    Raises:
        DataFileError: The file or one of its parts is missing or broken, a name is missing, or a
            part lies outside.
    """

    def __init__(
        self,
        path: str,
        names: Sequence[str] | None = None,
        allow_outside: bool = True,
        axis: Axis = 0,
    ) -> None:
        self.path = path
        self.columns: dict[str, ColumnLayout] = {}
        self.unreadable: dict[str, str] = {}
        self._allow_outside = allow_outside
        self._axis = axis
        # None is open once the layout is made.
        self._files = OpenFiles()
        with contextlib.closing(self._files), files.opened(path) as file, guarded(path):
            self.stamps = {path: _stamp(path)}
            for name, dataset in _datasets(path, file, names):
                try:
                    self.columns[name] = self._column(name, dataset, file)
                except DataFileError:
                    raise
                except Exception as error:
                    self.unreadable[name] = _reason(error)
        if names is not None and self.unreadable:
            raise DataFileError(f"{path}: {self.complaint()}", path)

    def complaint(self) -> str:
        """Return why datasets cannot be read."""
        return "; ".join(
            f"{name!r} cannot be read: {reason}" for name, reason in self.unreadable.items()
        )

    def _column(self, name: str, dataset: Any, file: Any) -> ColumnLayout:
        """Return the facts about a dataset, or raise the error of a damaged one."""
        if isinstance(dataset, Exception):
            raise dataset
        kind, dtype = kind_of(dataset.dtype), by_offset(dataset.dtype)
        if kind == "text":
            # h5py's text has metadata, of which numpy warns when it saves a batch.
            dtype = np.dtype(object)
        shape = list(map(int, dataset.shape or ()))
        axis = self._axis.get(name, 0) if isinstance(self._axis, Mapping) else self._axis
        if shape and (type(axis) is not int or not -len(shape) <= axis < len(shape)):
            raise DataFileError(
                f"{self.path}: {name!r} of shape {tuple(shape)} has no axis {axis!r}", self.path
            )
        axis %= max(1, len(shape))
        stretches = self._stretches(dataset, file, self.path, axis)
        # The axis of the rows comes first.
        shape[: axis + 1] = shape[axis : axis + 1] + shape[:axis]
        return ColumnLayout(tuple(shape), kind, dtype, bool(dataset.is_virtual), stretches)

    def _is_outside(self, path: str) -> bool:
        """Return whether a file does not lie in the folder of the whole."""
        real = os.path.realpath(path)
        # The path of the whole may be a link to a file in another folder, beside its parts.
        folders = {
            os.path.realpath(os.path.dirname(self.path)),
            os.path.dirname(os.path.realpath(self.path)),
        }
        return not any(os.path.commonpath([real, folder]) == folder for folder in folders)

    def check_unchanged(self, path: str) -> None:
        """Raise DataFileError if a file has changed since this layout was made."""
        try:
            if _stamp(path) == self.stamps[path]:
                return
            change = "it was changed since the source was made; make a new one"
        except FileNotFoundError:
            change = "it was there before and is gone"
        # An error of a network, for example.
        except OSError as error:
            change = f"it can no longer be read: {error}"
        raise DataFileError(f"{path}: {change}", path)

    def _inspect(self, path: str) -> None:
        """Note a file that holds rows; refuse it if it is outside and must not be."""
        if not self._allow_outside and self._is_outside(path):
            raise DataFileError(
                f"{self.path}: some of its rows lie in {path}, outside of its folder, which "
                "allow_outside=False refuses; move that file there, or allow it if you trust "
                "the author of the file",
                self.path,
            )
        self.stamps.setdefault(path, _stamp(path))

    def _stretches(self, dataset: Any, file: Any, path: str, axis: int = 0) -> list[Stretch]:
        """Return the stretches of a dataset, found in an open file of this path."""
        # A link may lead to another file. The name in a handle is the one of its first reader.
        if dataset.file.filename != file.filename:
            path = dataset.file.filename
        self._inspect(path)
        if dataset.is_virtual:
            if (parts := self._parts(dataset, path)) is not None and not axis:
                return parts
            if not self._allow_outside:
                raise DataFileError(
                    f"{path}: {dataset.name!r} is a virtual dataset that pack has not made, and "
                    "may show any file, which allow_outside=False refuses; copy it into a dataset "
                    "of its own, or allow it if you trust the author of the file",
                    path,
                )
        for raw, _, _ in dataset.external or ():
            self._inspect_raw(dataset, path, raw)
        chunk = dataset.chunks[axis] if dataset.chunks else 0
        rows = dataset.shape[axis] if dataset.shape else 0
        size = int(dataset.id.get_storage_size())
        name = files.name_of(dataset)
        stored = StoredDataset(path, name, chunk, files.compression_of(dataset), size, axis)
        return [Stretch(0, rows, stored)] if rows else []

    def _parts(self, dataset: Any, whole: str) -> list[Stretch] | None:
        """Return the stretches of a virtual dataset of whole parts, as of `pack`; else None."""
        sources = dataset.virtual_sources()
        if any(_is_pattern(source) for source in sources):
            return None
        paths = [self._path_of_part(whole, source.file_name) for source in sources]
        found: list[Stretch] = []
        end = 0
        for path, source in zip(paths, sources, strict=True):
            rows = _rows(source, dataset.shape)
            if rows is None or rows.start != end:
                return None
            file = self._files[path].file
            part = file.get(_unescaped(source.dset_name))
            if not isinstance(part, h5py.Dataset):
                raise DataFileError(f"{path}: there is no dataset {source.dset_name!r}", path)
            if part.is_virtual or _row_of(part) != _row_of(dataset):
                return None
            if len(part) < len(rows):
                raise DataFileError(
                    f"{path}: {part.name[1:]!r} has {len(part)} rows, but {whole} reads "
                    f"{len(rows)} of it",
                    path,
                )
            (stretch,) = self._stretches(part, file, path)
            end = rows.stop
            found.append(Stretch(rows.start, end, stretch.dataset))
        return found if end == len(dataset) else None

    def _path_of_part(self, whole: str, name: str) -> str:
        """Return the path of a file to which a virtual dataset in the file `whole` refers."""
        path = whole if name == "." else _beside(whole, _unescaped(name))
        if not os.path.exists(path):
            raise DataFileError(
                f"{whole}: its part {_unescaped(name)} is missing; the file and its parts belong "
                "together and must be moved together (merge=True packs into one file)",
                whole,
            )
        self._inspect(path)
        return path

    def _inspect_raw(self, dataset: Any, path: str, raw: str) -> None:
        """Inspect a file of raw numbers that holds the rows of a dataset."""
        # As in HDF5: beside the file only if the variable says so, else in the current directory.
        prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace(
            "${ORIGIN}", os.path.dirname(os.path.abspath(path))
        )
        where = os.path.abspath(os.path.join(prefix, raw))
        try:
            self._inspect(where)
        except FileNotFoundError:
            raise DataFileError(
                f"{path}: the raw data of {dataset.name!r} lie in {where}, which is missing", path
            ) from None


def joined(files: Sequence[tuple[str, Mapping[str, ColumnLayout]]]) -> dict[str, ColumnLayout]:
    """Return the datasets of several files as one, of the rows of each file in turn.

    Args:
        files: The path of each file, and its datasets.

    Raises:
        DataFileError: A file has other datasets than the first one.
    """
    (first, alike), *_ = files
    for path, columns in files:
        for name in {**alike, **columns}:
            here, there = (
                None if found is None else f"{found.kind} of shape {found.shape[1:]}"
                for found in (columns.get(name), alike.get(name))
            )
            if here != there:
                raise DataFileError(
                    f"{path}: {name!r} is {here or 'missing'}, but in {first} it is "
                    f"{there or 'missing'}; files that are read as one must be alike",
                    path,
                )
    whole = {}
    for name, column in alike.items():
        count, stretches = 0, []
        for _, columns in files:
            for start, stop, dataset in columns[name].stretches:
                stretches.append(Stretch(count + start, count + stop, dataset))
            count += columns[name].shape[0]
        shape = count, *column.shape[1:]
        whole[name] = dataclasses.replace(column, shape=shape, stretches=stretches)
    return whole


def _datasets(path: str, file: Any, names: Sequence[str] | None) -> Iterator[tuple[str, Any]]:
    """Yield the datasets of these names, or all; for what is damaged, its error."""
    if names is None:
        # A single value without a type has no shape.
        yield from (one for one in files.walk(file) if getattr(one[1], "shape", 0) is not None)
        return
    missing = []
    for name in names:
        # These are opened by name, since links to datasets are not visited.
        raw = raw_name(name.strip("/") or "/")
        item = None
        try:
            item = file[raw]
        except (KeyError, OSError, RuntimeError, ValueError) as error:
            if (link := _link(file, raw)) is not None:
                what = f"{name!r}{link} cannot be opened: "
                raise files.data_file_error(path, error, what) from error
        if isinstance(item, h5py.Dataset):
            yield name, item
        else:
            missing.append(name)
    if missing:
        there = sorted(name for name, item in files.walk(file) if isinstance(item, h5py.Dataset))
        raise DataFileError(
            f"{path}: there is no dataset {', '.join(map(repr, missing))}; "
            f"it has {', '.join(map(repr, there)) or 'none'}",
            path,
        )


def _link(file: Any, raw: bytes) -> str | None:
    """Return where the last link in a path leads to, for a message; None if nothing is there."""
    leads = ""
    parts = raw.split(b"/")
    for count in range(1, len(parts) + 1):
        try:
            found = file.id.links.get_val(b"/".join(parts[:count]))
        except TypeError:
            # It is an object.
            continue
        except (KeyError, OSError, RuntimeError):
            return leads or None
        places = (found,) if isinstance(found, bytes) else reversed(found)
        leads = f" (a link to {' in '.join(os.fsdecode(place) for place in places)})"
    return leads


def _reason(error: Exception) -> str:
    """Return why a dataset cannot be read, for a message."""
    if isinstance(error, (TypeError, ValueError)):
        return f"its type has none like it in numpy ({error})"
    return files.text_of(error)


def _rows(source: Any, shape: tuple[int, ...]) -> range | None:
    """Return the rows that show the whole dataset of a mapping; None if it shows less."""
    if source.src_space.get_select_type() != h5py.h5s.SEL_ALL:
        return None
    lows, highs = source.vspace.get_select_bounds()
    rows = range(int(lows[0]), int(highs[0]) + 1)
    is_whole = source.vspace.get_select_npoints() == len(rows) * math.prod(shape[1:])
    return rows if is_whole else None


def _row_of(dataset: Any) -> tuple[int, tuple[int, ...], str]:
    """Return what the rows of a part must have in common."""
    return dataset.ndim, dataset.shape[1:], kind_of(dataset.dtype)


def _beside(whole: str, name: str) -> str:
    """Return the path of a file that another refers to, by the rules of HDF5."""
    path = os.path.join(os.path.dirname(whole), name)
    if os.path.exists(path):
        return path
    behind = os.path.join(os.path.dirname(os.path.realpath(whole)), name)
    return behind if os.path.exists(behind) else path


def escaped(name: str) -> str:
    """Return the name of a file or dataset as it is written in mappings of virtual datasets."""
    return name.replace("%", "%%")


def _unescaped(name: str) -> str:
    return name.replace("%%", "%")


def _is_pattern(source: Any) -> bool:
    """Return whether the names in a mapping have places for numbers."""
    return "%" in f"{source.file_name}/{source.dset_name}".replace("%%", "")


def _stamp(path: str) -> tuple[int, int]:
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns


class RowReader:
    """Read the same rows of several columns. A reader belongs to the process that made it.

    Any thread may call any method; the threads take turns, as in h5py itself.

    Args:
        layout: Layout of the file.
        columns: Those of its columns that are read.
    """

    def __init__(self, layout: Layout, columns: Mapping[str, ColumnLayout]) -> None:
        layout.check_unchanged(layout.path)
        self.pid = os.getpid()
        self._layout = layout
        self._columns = columns
        self._files = OpenFiles(self._cache_bytes())
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close all files; they are opened again when they are needed."""
        with self._lock:
            self._files.close()

    def read(
        self,
        pieces: Sequence[tuple[int, int]],
        step: int = 1,
        rest: Mapping[str, np.ndarray] | None = None,
    ) -> dict[str, Any]:
        """Return the rows of several pieces of each column.

        Args:
            pieces: The first row of each, and the row behind its last one.
            step: Distance of the rows that are read.
            rest: Rows that come before these in what is returned.
        """
        found: dict[str, Any] = {}
        paths: set[str] = set()
        for name, column in self._columns.items():
            parts = [part for piece in pieces for part in column.between(*piece, step)]
            paths.update([dataset.path for dataset, _, _ in parts])
            found[name] = self._column(name, parts, step, None if rest is None else rest[name])
        for path in paths:
            self._layout.check_unchanged(path)
        return found

    def _cache_bytes(self) -> int:
        """Return the size of the cache of each dataset; many files share the size for one."""
        stretches = [(column, at) for column in self._columns.values() for at in column.stretches]
        count = len({at.dataset.path for _, at in stretches})
        chunks = (at.dataset.chunk * column.row_bytes for column, at in stretches)
        share = files.CACHE_BYTES // max(1, min(count, files.MAX_OPEN))
        # A cache below the size of a chunk has no effect, and each row would unpack its chunk.
        return max(share, min(files.CACHE_BYTES, max(chunks, default=0)))

    def _column(
        self, name: str, parts: Sequence[Part], step: int, rest: np.ndarray | None
    ) -> np.ndarray:
        column = self._columns[name]
        counts = [len(range(low, high, step)) for _, low, high in parts]
        filled = 0 if rest is None else len(rest)
        rows = filled + sum(counts)
        try:
            pool = np.empty((rows, *column.shape[1:]), column.dtype)
            if rest is not None:
                pool[:filled] = rest
            for part, count in zip(parts, counts, strict=True):
                self.take(*part, step, pool[filled : filled + count])
                filled += count
        except MemoryError as error:
            path, needed = self._layout.path, size(rows * column.row_bytes)
            raise DataFileError(
                f"{path}: {rows:,} rows of {name!r} need {needed}, which could not be allocated; "
                "whole chunks are read, so pack it with smaller chunks (h5repack -l), or give a "
                "smaller window",
                path,
            ) from error
        return pool

    def take(self, at: StoredDataset, low: int, high: int, step: int, into: np.ndarray) -> None:
        """Read some rows of a dataset into an array."""
        with self._lock:
            dataset = None
            try:
                dataset, view = self._opened(at)
                if at.axis:
                    found = view[(*np.s_[:,] * at.axis, np.s_[low:high:step])]
                    files.assign(into, np.moveaxis(found, at.axis, 0))
                elif into.nbytes < _DIRECT_BYTES or not _is_plain(dataset.dtype):
                    files.assign(into, view[low:high:step])
                else:
                    dataset.read_direct(into, np.s_[low:high:step])
            except DataFileError:
                raise
            except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
                # A change of the file would explain the error.
                self._layout.check_unchanged(at.path)
                rows = f"row {low}" if high == low + 1 else f"rows {low} to {high}"
                what = f"{rows} of {at.name[1:]!r} cannot be read: "
                raise files.data_file_error(at.path, error, what, dataset) from error

    def _opened(self, at: StoredDataset) -> tuple[Any, Any]:
        """Return a dataset, and an object whose slices are its rows."""
        if at.path not in self._files:
            self._layout.check_unchanged(at.path)
        return self._files[at.path].dataset(at.name)


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Return whether HDF5 can read rows of a type into an array of numpy."""
    return not dtype.hasobject and dtype.subdtype is None


@dataclass(frozen=True)
class Column:
    """One dataset of a file.

    Attributes:
        name: Its path in the file, such as `"x"` or `"train/x"`.
        shape: Its shape; the first number is that of the rows.
        dtype: Name of the dtype in numpy; `"text"` or `"ragged int32"` for rows of variable length;
            `"unreadable: "` and the reason for what is damaged, or has a type that numpy lacks.
        chunk: Number of rows in a chunk; 0 if it is stored in one piece.
        compression: Compression such as `"gzip"`, or None.
        stored: Size in the file, or in all parts of a packed file, in bytes.
        is_virtual: Whether its rows lie in other files.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk: int
    compression: str | None
    stored: int
    is_virtual: bool


def describe(path: str | os.PathLike[str]) -> tuple[Column, ...]:
    """Return the datasets of an HDF5 file, and how they are stored; no rows are read.

    Args:
        path: Path of the file.

    Raises:
        DataFileError: The file or one of its parts is missing, broken or being written.

    Example:
        >>> import os, tempfile, h5py
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "a.h5")
        ...     with h5py.File(path, "w") as file:
        ...         file["x"] = [[1.0, 2.0], [3.0, 6.0]]
        ...     (found,) = describe(path)
        >>> found.name, found.shape, found.dtype
        ('x', (2, 2), 'float64')
    """
    layout = Layout(os.path.abspath(path))
    broken = [
        Column(name, (), f"unreadable: {reason}", 0, None, 0, False)
        for name, reason in layout.unreadable.items()
    ]
    return *itertools.starmap(_column, layout.columns.items()), *broken


def _column(name: str, found: ColumnLayout) -> Column:
    datasets = list(dict.fromkeys(at.dataset for at in found.stretches))
    chunk, compression = (datasets[0].chunk, datasets[0].compression) if datasets else (0, None)
    stored = sum(dataset.size for dataset in datasets)
    return Column(name, found.shape, found.kind, chunk, compression, stored, found.is_virtual)
