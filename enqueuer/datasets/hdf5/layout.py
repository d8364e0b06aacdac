"""The files and datasets that hold the rows of an HDF5 file: itself, or those that it shows.

    layout_of:  path -> its datasets, and for each of them stretches of rows in files

For rows of a virtual dataset whose file is missing or cannot be opened, HDF5 gives zeros without an
error. So virtual datasets are not read through HDF5. Their mappings are read once, here, and the
reader opens the files itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from enqueuer.datasets.hdf5.files import CHUNK_BYTES, OpenFiles, datasets_in, h5py, kind_of, opened
from enqueuer.errors import DataFileError

# Blocks of a file. Each takes some hundred bytes here and in every worker.
_MOST_BLOCKS = 1 << 16
# Levels of virtual datasets of virtual datasets. Each takes a few frames of Python's stack.
_DEEPEST = 32


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
class Stretch:
    """Rows of a column that lie in one dataset of a file.

    Attributes:
        start: First row.
        stop: Row behind the last one.
        path: Path of the file.
        dataset: Name of the dataset.
        first: Number of the first row in the dataset.
        chunk: Number of rows in a chunk of the dataset; 0 if it is stored in one piece.
    """

    start: int
    stop: int
    path: str
    dataset: str
    first: int
    chunk: int


@dataclass(frozen=True)
class Layout:
    """The facts that a reader needs before it opens a file.

    Attributes:
        path: Path of the file.
        columns: Its datasets, by name.
        dtypes: Dtype of each column.
        stretches: Stretches of each column, which together are its rows in their order.
        unreadable: Reason why a column has no stretches.
        stamps: Size and time of change of each file that holds rows.
        outside: Those of these files that are not in the folder of the file.
    """

    path: str
    columns: Mapping[str, Column]
    dtypes: Mapping[str, np.dtype[Any]]
    stretches: Mapping[str, Sequence[Stretch]]
    unreadable: Mapping[str, str]
    stamps: Mapping[str, tuple[int, int]]
    outside: Sequence[str]

    def row_bytes(self, name: str) -> int:
        """Return the size of a column's row."""
        return math.prod(self.columns[name].shape[1:]) * self.dtypes[name].itemsize

    def starts(self, name: str) -> list[int]:
        """Return the first rows of the blocks of a column: its chunks, or groups of small ones."""
        usual = max(1, CHUNK_BYTES // max(1, self.row_bytes(name)))
        sized = [(at, at.chunk or usual) for at in self.stretches[name]]
        count = sum((at.stop - at.start) // size for at, size in sized)
        together = count // _MOST_BLOCKS + 1
        found: list[int] = []
        for at, size in sized:
            block = size * together
            found += [at.start, *range(at.start + block - at.first % block, at.stop, block)]
        return found

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


def layout_of(path: str, names: Sequence[str] | None = None, allow_outside: bool = True) -> Layout:
    """Return the layout of a file; inspect all files that hold its rows.

    Args:
        path: Path of the file.
        names: Names of the datasets; None: all.
        allow_outside: Whether rows may lie in files outside of its folder.

    Raises:
        DataFileError: The file or one of its parts is missing or broken, a name is missing, or a
            part lies outside.
    """
    columns: dict[str, Column] = {}
    stretches: dict[str, list[Stretch]] = {}
    dtypes, unreadable = {}, {}
    with contextlib.closing(OpenFiles()) as files, opened(path) as file:
        survey = _Survey(path, files, allow_outside)
        for name, dataset in _datasets(path, file, names).items():
            try:
                stretches[name] = survey.stretches(dataset)
            except _Scattered as scattered:
                stretches[name], unreadable[name] = [], str(scattered)
            columns[name] = survey.column(name, dataset, stretches[name])
            # h5py's text has metadata, of which numpy warns when it saves a batch.
            is_text = columns[name].dtype == "text"
            dtypes[name] = np.dtype(object) if is_text else dataset.dtype
    outside = [part for part in survey.stamps if survey.is_outside(part)]
    return Layout(path, columns, dtypes, stretches, unreadable, survey.stamps, outside)


def _datasets(path: str, file: Any, names: Sequence[str] | None) -> dict[str, Any]:
    there = datasets_in(file)
    if names is None:
        return {name: item for name, item in there.items() if item.shape is not None}
    # These are opened by name, since links to datasets are not visited.
    found = {name: file.get(name.strip("/") or "/") for name in names}
    missing = [name for name, item in found.items() if not isinstance(item, h5py.Dataset)]
    if missing:
        raise DataFileError(
            f"{path}: there is no dataset {', '.join(map(repr, missing))}; "
            f"it has {', '.join(map(repr, sorted(there))) or 'none'}",
            path,
        )
    return found


class _Scattered(Exception):
    """A virtual dataset is not made of whole rows, one after the other."""


class _Survey:
    """The files that hold the datasets of a file, each inspected once."""

    def __init__(self, path: str, files: OpenFiles, allow_outside: bool) -> None:
        self.stamps = {path: _stamp(path)}
        self._path = path
        self._files = files
        self._allow_outside = allow_outside
        # The path itself may be a link to a file in another folder, beside its parts.
        self._folders = {
            os.path.realpath(os.path.dirname(path)),
            os.path.dirname(os.path.realpath(path)),
        }
        # Compression and bytes of each dataset, by its path and name.
        self._stored: dict[tuple[str, str], tuple[str | None, int]] = {}

    def column(self, name: str, dataset: Any, stretches: Sequence[Stretch]) -> Column:
        places = dict.fromkeys((stretch.path, stretch.dataset) for stretch in stretches)
        stored = [self._stored[place] for place in places]
        return Column(
            name=name,
            shape=tuple(map(int, dataset.shape or ())),
            dtype=kind_of(dataset.dtype),
            chunk=stretches[0].chunk if stretches else 0,
            compression=stored[0][0] if stored else None,
            stored=sum(size for _, size in stored),
            is_virtual=bool(dataset.is_virtual),
        )

    def is_outside(self, path: str) -> bool:
        """Return whether a file does not lie in the folder of the whole."""
        real = os.path.realpath(path)
        return not any(os.path.commonpath([real, folder]) == folder for folder in self._folders)

    def _inspect(self, path: str) -> None:
        """Note a file that holds rows; refuse it if it is outside and must not be."""
        if not self._allow_outside and self.is_outside(path):
            raise DataFileError(
                f"{self._path}: some of its rows lie in {path}, outside of its folder, which "
                "allow_outside=False refuses; move that file there, or allow it if you trust "
                "the author of the file",
                self._path,
            )
        self.stamps.setdefault(path, _stamp(path))

    def stretches(self, dataset: Any, depth: int = 0) -> list[Stretch]:
        """Return the stretches of a dataset, which so many virtual datasets show."""
        # A link may lead to another file.
        path = dataset.file.filename
        self._inspect(path)
        if not dataset.is_virtual:
            name = dataset.name
            for raw, _, _ in dataset.external or ():
                self._inspect_raw(dataset, raw)
            self._stored[path, name] = dataset.compression, int(dataset.id.get_storage_size())
            chunk = dataset.chunks[0] if dataset.chunks else 0
            rows = len(dataset) if dataset.shape else 0
            return [Stretch(0, rows, path, name, 0, chunk)] if rows else []
        try:
            sources = dataset.virtual_sources()
        except UnicodeDecodeError:
            raise _Scattered("the name of a file that it shows is not UTF-8") from None
        if depth >= _DEEPEST:
            raise DataFileError(
                f"{path}: the virtual dataset {dataset.name!r} shows itself, or lies below "
                f"{_DEEPEST} others, so its rows lie nowhere; write the file again from the data",
                path,
            )
        found = [
            stretch for source in sources for stretch in self._shown(path, dataset, source, depth)
        ]
        found.sort(key=lambda stretch: stretch.start)
        edges = [0, *(edge for s in found for edge in (s.start, s.stop)), len(dataset)]
        if edges[::2] != edges[1::2]:
            raise _Scattered("some of its rows lie in no file, or in several")
        return found

    def _inspect_raw(self, dataset: Any, raw: str) -> None:
        """Inspect a file of raw numbers that holds the rows of a dataset."""
        path = dataset.file.filename
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

    def _shown(self, whole: str, dataset: Any, source: Any, depth: int) -> Iterator[Stretch]:
        """Yield the stretches that one mapping of a virtual dataset in the file `whole` shows."""
        start, stop = _rows(source.vspace, dataset.shape)
        part = self._part(whole, source)
        is_alike = (part.ndim, part.shape[1:]) == (dataset.ndim, dataset.shape[1:])
        if not is_alike or kind_of(part.dtype) != kind_of(dataset.dtype):
            raise _Scattered(f"it shows {part.name!r} of {part.file.filename} in another form")
        first, last = 0, stop - start
        if source.src_space.get_select_type() != h5py.h5s.SEL_ALL:
            first, last = _rows(source.src_space, part.shape)
        if len(part) < last:
            raise DataFileError(
                f"{part.file.filename}: {part.name[1:]!r} has {len(part)} rows, but {whole} reads "
                f"{last} of it",
                part.file.filename,
            )
        # HDF5 maps no selection to one of another size, so both have equally many rows.
        for inner in self.stretches(part, depth + 1):
            low, high = max(inner.start, first), min(inner.stop, last)
            if low < high:
                yield dataclasses.replace(
                    inner,
                    start=low - first + start,
                    stop=high - first + start,
                    first=low - inner.start + inner.first,
                )

    def _part(self, whole: str, source: Any) -> Any:
        """Return the dataset that one mapping of a virtual dataset in the file `whole` shows."""
        path, name = whole, _unescaped(source.dset_name)
        if source.file_name != ".":
            path = _beside(whole, _unescaped(source.file_name))
        if not os.path.exists(path):
            raise DataFileError(
                f"{whole}: its part {_unescaped(source.file_name)} is missing; the file and its "
                "parts belong together and must be moved together (merge=True packs into one file)",
                whole,
            )
        self._inspect(path)
        part = self._files.open(path).get(name)
        if not isinstance(part, h5py.Dataset):
            raise DataFileError(f"{path}: there is no dataset {name!r}", path)
        return part


def _rows(space: Any, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the first row of a selection in a dataset, and the row behind its last one."""
    try:
        lows, highs = space.get_select_bounds()
        count = space.get_select_npoints()
    except (RuntimeError, ValueError, OverflowError):
        raise _Scattered("how many rows it has depends on the files that are there") from None
    start, stop = int(lows[0]), int(highs[0]) + 1
    if any(lows[1:]) or count != (stop - start) * math.prod(shape[1:]):
        raise _Scattered("it does not show whole rows, one after the other")
    return start, stop


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
    if "%" in name.replace("%%", ""):
        raise _Scattered("its files or datasets are counted by a pattern")
    return name.replace("%%", "%")


def _stamp(path: str) -> tuple[int, int]:
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns
