"""The content of an HDF5 file: the files and datasets that hold its rows, and reading them.

    Layout:     path -> its datasets, and for each of them a stretch of rows
    joined:     layouts of several files -> one, in which a dataset has a stretch in each file
    RowReader:  rows 10 to 30 --stretches--> 10 to 20 here, 0 to 10 there --> one array
    describe:   path -> its datasets, and how they are stored

For rows of a virtual dataset whose file is missing or cannot be opened, HDF5 gives zeros without an
error. So a file that `pack` has made is read as the list of its parts, which the reader opens when
rows of them are needed. Any other virtual dataset is read through HDF5.

HDF5 also gives zeros for rows that were cut off an open file. So after a file was read, and before
its rows are returned, it is checked that the file is unchanged.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from enqueuer.common.text import size
from enqueuer.datasets.hdf5 import files
from enqueuer.datasets.hdf5.files import OpenFiles, RowKind, guarded, h5py, raw_name, row_kind
from enqueuer.errors import DataFileError

# An attribute of each file that `pack` has made.
PACKED = "enqueuer.shards"
# Blocks of a file. Each takes some hundred bytes here and in every worker.
_MAX_BLOCKS = 1 << 16
# Below this size, another copy costs less than the work of h5py to avoid it.
_DIRECT_BYTES = 1 << 16
# The row behind the last one of a stretch.
_STOP = operator.attrgetter("stop")


class Stretch(NamedTuple):
    """Rows of a column that are those of one dataset of a file, from its first one on.

    Attributes:
        start: First row.
        stop: Row behind the last one.
        path: Path of the file.
        name: Name of the dataset.
        chunk: Number of rows in a chunk; 0 if it is stored in one piece.
        compression: Compression, or None.
        size: Size in the file, in bytes.
        axis: Axis of the rows.
        is_virtual: Whether HDF5 reads the rows from other files.
    """

    start: int
    stop: int
    path: str
    name: str
    chunk: int
    compression: str | None
    size: int
    axis: int
    is_virtual: bool


# Rows of a stretch: the first, and the one behind the last, are counted in its file.
Part: TypeAlias = tuple[Stretch, int, int]
Axis: TypeAlias = int | Mapping[str, int]


class ColumnLayout(NamedTuple):
    """One dataset, and where its rows lie.

    Attributes:
        shape: Its shape with the axis of the rows in front.
        kind: Type of its rows.
        stretches: Stretches, which together are its rows in their order.
    """

    shape: tuple[int, ...]
    kind: RowKind
    stretches: Sequence[Stretch]

    @property
    def row_bytes(self) -> int:
        """The size of a row."""
        return math.prod(self.shape[1:]) * int(self.kind.dtype.itemsize)

    def starts(self) -> list[int]:
        """Return the first rows of the blocks: chunks, or groups of small ones."""
        usual = max(1, files.CHUNK_BYTES // max(1, self.row_bytes))
        sized = [(at, at.chunk or usual) for at in self.stretches]
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
            at = stretches[nth]
            if at.start >= stop:
                return
            low, high = max(start, at.start), min(stop, at.stop)
            low += (start - low) % step
            if low < high:
                yield at, low - at.start, high - at.start


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
        parts: Files with all rows, if `pack` has made this one to show them; else none.

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
        self.parts: list[str] = []
        self._allow_outside = allow_outside
        with files.opened(path) as file, guarded(path):
            self.stamps = {path: _stamp(path)}
            is_packed = PACKED in file.attrs
            for name, dataset in _datasets(path, file, names):
                along = axis.get(name, 0) if isinstance(axis, Mapping) else axis
                try:
                    is_packed = self._add(name, dataset, file, along) and is_packed
                except DataFileError:
                    raise
                except (TypeError, ValueError) as error:
                    self.unreadable[name] = f"its type has none like it in numpy ({error})"
                except Exception as error:
                    self.unreadable[name] = files.text_of(error)
        if not is_packed:
            self.parts = []

    def _add(self, name: str, dataset: Any, file: Any, axis: int) -> bool:
        """Note a dataset; return whether its rows are those of the datasets of this name in parts.

        Raises:
            Exception: The error of a damaged one.
        """
        if isinstance(dataset, Exception):
            raise dataset
        shape = list(map(int, dataset.shape or ()))
        if shape and (type(axis) is not int or not -len(shape) <= axis < len(shape)):
            raise DataFileError(
                f"{self.path}: {name!r} of shape {tuple(shape)} has no axis {axis!r}", self.path
            )
        axis %= max(1, len(shape))
        # The axis of the rows comes first.
        shape[: axis + 1] = shape[axis : axis + 1] + shape[:axis]
        kind = row_kind(dataset.dtype, tuple(shape))
        # A link may lead to another file. The name in a handle is the one of its first reader.
        is_linked = dataset.file.filename != file.filename
        path = dataset.file.filename if is_linked else self.path
        self._inspect(path)
        sources = dataset.virtual_sources() if dataset.is_virtual else []
        parts = [self._part(path, one.file_name) for one in sources if not _is_pattern(one)]
        if dataset.external and not self._allow_outside:
            raise _refusal(self.path, f"the rows of {name!r} lie in {dataset.external[0][0]}")
        stretch = Stretch(
            start=0,
            stop=shape[0] if shape else 0,
            path=path,
            name=files.name_of(dataset),
            chunk=dataset.chunks[axis] if dataset.chunks else 0,
            compression=files.compression_of(dataset),
            size=int(dataset.id.get_storage_size()),
            axis=axis,
            is_virtual=bool(dataset.is_virtual),
        )
        self.columns[name] = ColumnLayout(tuple(shape), kind, [stretch])
        is_same, self.parts = self.parts in ([], parts), parts
        return bool(parts and is_same and not axis) and all(
            one.dset_name.strip("/") == escaped(name).strip("/") for one in sources
        )

    def _part(self, whole: str, name: str) -> str:
        """Return the path of a file to which a virtual dataset in the file `whole` refers."""
        name = name.replace("%%", "%")
        # As in HDF5: beside the file, or beside the file to which a link leads.
        paths = [os.path.join(os.path.dirname(at), name) for at in (whole, os.path.realpath(whole))]
        path = whole if name == "." else next(filter(os.path.exists, paths), None)
        if path is None:
            raise DataFileError(
                f"{whole}: its part {name} is missing; the file and its parts belong together and "
                "must be moved together (merge=True packs into one file)",
                whole,
            )
        self._inspect(path)
        return path

    def _inspect(self, path: str) -> None:
        """Note a file that holds rows; refuse it if it is outside and must not be."""
        whole = Path(self.path)
        # The path of the whole may be a link to a file in another folder, beside its parts.
        if not self._allow_outside and not any(
            Path(path).resolve().is_relative_to(folder)
            for folder in (whole.parent.resolve(), whole.resolve().parent)
        ):
            raise _refusal(self.path, f"some of its rows lie in {path}, outside of its folder")
        self.stamps.setdefault(path, _stamp(path))

    @property
    def rows(self) -> int:
        """The number of rows of the first dataset."""
        return next((column.shape[0] for column in self.columns.values()), 0)

    @property
    def has_virtual(self) -> bool:
        """Whether HDF5 reads some rows from files that it does not name."""
        return any(at.is_virtual for one in self.columns.values() for at in one.stretches)

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

    def check_readable(self) -> None:
        """Raise DataFileError if there are datasets that cannot be read."""
        if self.unreadable:
            reasons = (f"{name!r} cannot be read: {why}" for name, why in self.unreadable.items())
            raise DataFileError(
                f"{self.path}: {'; '.join(reasons)}; name those that you want with keys=", self.path
            )


def layout_of(
    path: str, names: Sequence[str] | None = None, allow_outside: bool = True, axis: Axis = 0
) -> Layout:
    """Return the layout of a file; the rows of one that `pack` has made lie in its parts.

    The arguments are those of `Layout`.
    """
    found = Layout(path, names, allow_outside, axis)
    if found.parts:
        parts = joined([Layout(part, [*found.columns], allow_outside) for part in found.parts])
        if parts.rows != found.rows:
            raise DataFileError(
                f"{path}: it shows {found.rows} rows, but its parts have {parts.rows}", path
            )
        found.columns, found.stamps = parts.columns, {**parts.stamps, **found.stamps}
    if not allow_outside and found.has_virtual:
        raise _refusal(
            path, "it has a virtual dataset that pack has not made, and may show any file"
        )
    return found


def joined(layouts: Sequence[Layout]) -> Layout:
    """Return the first layout, with the rows of all files, those of each file in turn.

    Raises:
        DataFileError: A file has other datasets than the first one.
    """
    whole = layouts[0]
    for layout in layouts:
        layout.check_readable()
        here, there = (
            {name: str(column.kind) for name, column in one.columns.items()}
            for one in (layout, whole)
        )
        for name in {**there, **here}:
            if here.get(name) != there.get(name):
                raise DataFileError(
                    f"{layout.path}: {name!r} is {here.get(name, 'missing')}, but in {whole.path} "
                    f"it is {there.get(name, 'missing')}; files that are read as one must be alike",
                    layout.path,
                )
    for name, column in whole.columns.items():
        columns = [layout.columns[name] for layout in layouts]
        firsts = [0, *itertools.accumulate(one.shape[0] for one in columns)]
        stretches = [
            at._replace(start=first + at.start, stop=first + at.stop)
            for first, one in zip(firsts, columns, strict=False)
            for at in one.stretches
        ]
        whole.columns[name] = ColumnLayout((firsts[-1], *column.shape[1:]), column.kind, stretches)
    for layout in layouts:
        whole.stamps.update(layout.stamps)
    return whole


def _refusal(path: str, what: str) -> DataFileError:
    return DataFileError(
        f"{path}: {what}, which allow_outside=False refuses; move the rows into the file or its "
        "folder, or allow it if you trust the author of the file",
        path,
    )


def _datasets(path: str, file: Any, names: Sequence[str] | None) -> Iterator[tuple[str, Any]]:
    """Yield the datasets of these names, or all; for what is damaged, its error."""
    if names is None:
        # A single value without a type has no shape.
        yield from (one for one in files.walk(file) if getattr(one[1], "shape", 0) is not None)
        return
    for name in names:
        # These are opened by name, since links to datasets are not visited.
        item, link = file, file
        for part in filter(None, raw_name(name).split(b"/")):
            link = item.get(part, getlink=True) if isinstance(item, h5py.Group) else None
            try:
                item = item[part] if link else None
            except (KeyError, OSError, RuntimeError, ValueError) as error:
                what = "" if isinstance(link, h5py.HardLink) else f" (a link, {link!r})"
                what = f"{name!r}{what} cannot be opened: "
                raise files.data_file_error(path, error, what) from error
        if not isinstance(item, h5py.Dataset):
            there = (repr(name) for name, one in files.walk(file) if isinstance(one, h5py.Dataset))
            raise DataFileError(
                f"{path}: there is no dataset {name!r}; it has {', '.join(there) or 'none'}", path
            )
        yield name, item


def escaped(name: str) -> str:
    """Return the name of a file or dataset as it is written in mappings of virtual datasets."""
    return name.replace("%", "%%")


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
        layout: Layout of the files; all of its columns are read.
    """

    def __init__(self, layout: Layout) -> None:
        self.pid = os.getpid()
        self._layout = layout
        self._files = OpenFiles(self._cache_bytes())
        # Which of the files HDF5 reads for rows of a virtual dataset is not known.
        self._behind = [*layout.stamps] if layout.has_virtual else []
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
        paths = set(self._behind)
        for name, column in self._layout.columns.items():
            parts = [part for piece in pieces for part in column.between(*piece, step)]
            paths.update([at.path for at, _, _ in parts])
            found[name] = self._column(name, parts, step, None if rest is None else rest[name])
        for path in paths:
            self._layout.check_unchanged(path)
        return found

    def _cache_bytes(self) -> int:
        """Return the size of the cache of each dataset; many files share the size for one."""
        columns = self._layout.columns.values()
        count = len({at.path for column in columns for at in column.stretches})
        chunks = (at.chunk * column.row_bytes for column in columns for at in column.stretches)
        share = files.CACHE_BYTES // max(1, min(count, files.MAX_OPEN))
        # A cache below the size of a chunk has no effect, and each row would unpack its chunk.
        return max(share, min(files.CACHE_BYTES, max(chunks, default=0)))

    def _column(
        self, name: str, parts: Sequence[Part], step: int, rest: np.ndarray | None
    ) -> np.ndarray:
        column = self._layout.columns[name]
        counts = [len(range(low, high, step)) for _, low, high in parts]
        filled = 0 if rest is None else len(rest)
        rows = filled + sum(counts)
        # h5py's text has metadata, of which numpy warns when it saves a batch.
        dtype = np.dtype(object) if column.kind.name == "text" else column.kind.dtype
        try:
            pool = np.empty((rows, *column.shape[1:]), dtype)
            if rest is not None:
                pool[:filled] = rest
            for part, count in zip(parts, counts, strict=True):
                self.take(*part, step, pool[filled : filled + count])
                filled += count
        except MemoryError as error:
            path, needed = self._layout.path, size(rows * column.row_bytes)
            raise DataFileError(
                f"{path}: {rows:,} rows of {name!r} need {needed}, which could not be allocated; "
                "pack it in smaller chunks (h5repack -l), or give a smaller window",
                path,
            ) from error
        return pool

    def take(self, at: Stretch, low: int, high: int, step: int, into: np.ndarray) -> None:
        """Read some rows of a dataset into an array."""
        dataset, rows = None, slice(low, high, step)
        with self._lock:
            try:
                if at.path not in self._files:
                    self._layout.check_unchanged(at.path)
                dataset, view = self._files[at.path].dataset(at.name)
                is_large = into.nbytes >= _DIRECT_BYTES and not at.axis
                # HDF5 cannot read objects, or items that are arrays, into an array of numpy.
                if is_large and not dataset.dtype.hasobject and dataset.dtype.subdtype is None:
                    dataset.read_direct(into, rows)
                else:
                    found = view[(*np.s_[:,] * at.axis, rows)] if at.axis else view[rows]
                    files.assign(into, np.moveaxis(found, at.axis, 0) if at.axis else found)
            except DataFileError:
                raise
            except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
                # A change of the file would explain the error.
                self._layout.check_unchanged(at.path)
                where = f"row {low}" if high == low + 1 else f"rows {low} to {high}"
                what = f"{where} of {at.name[1:]!r} cannot be read: "
                raise files.data_file_error(at.path, error, what, dataset) from error


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
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    chunk: int = 0
    compression: str | None = None
    stored: int = 0


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
    layout = layout_of(os.path.abspath(path))
    return (
        *(
            Column(name, shape, kind.name, at[0].chunk, at[0].compression, sum(s.size for s in at))
            for name, (shape, kind, at) in layout.columns.items()
        ),
        *(Column(name, dtype=f"unreadable: {why}") for name, why in layout.unreadable.items()),
    )
