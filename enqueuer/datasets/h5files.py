"""HDF5 files as they are found: opened or refused clearly, what is in them, where their chunks lie.

    opened, guarded: h5py's OSError -> DataFileError with the path, the reason and what to do
    layout_of:       path -> columns, chunks, and all files that a virtual dataset reads from
    describe:        path -> what a person wants to know of it

HDF5 itself gives zeros for the rows of a virtual dataset whose file is missing or cannot be
opened. So all files are looked at when a layout is made; and each process that reads opens all of
them first, and looks after reading whether they are still what they were.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from enqueuer.errors import DataFileError
from enqueuer.frameworks import framework

h5py = framework("h5py", "hdf5", "3.7", user="enqueuer.datasets.hdf5")

CHUNK_BYTES = 1 << 20  # of a chunk: large enough for a disk, small enough for a cache
_CACHE_BYTES = 16 << 20  # of each dataset; HDF5's own 1 MiB does not hold a chunk of that
_SAMPLE_BLOCKS = 16  # of which `describe` makes its statistics


@dataclass(frozen=True)
class Column:
    """One dataset of a file.

    Attributes:
        name: Its path in the file, such as `"x"` or `"train/x"`.
        shape: Its first number is that of the rows.
        dtype: As numpy tells it; `"text"` or `"ragged int32"` for rows of variable length.
        chunk: How many rows a chunk has; 0 if it is stored in one piece.
        compression: Such as `"gzip"`, or None.
        stored: Bytes in the file, of a virtual dataset in all its files.
        is_virtual: Whether its rows lie in other files.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk: int
    compression: str | None
    stored: int
    is_virtual: bool

    @property
    def is_object(self) -> bool:
        """Whether numpy holds its rows as Python objects."""
        return self.dtype == "text" or self.dtype.startswith("ragged")


@dataclass(frozen=True)
class Layout:
    """What a reader must know of a file before it opens it.

    Attributes:
        columns: The datasets that are read together, of equal length.
        rows: How many these have.
        starts: Where a chunk begins, and at last `rows`.
        files: Path, size and time of change of each file that the rows lie in.
    """

    columns: tuple[Column, ...]
    rows: int
    starts: tuple[int, ...]
    files: tuple[tuple[str, int, int], ...]


@contextlib.contextmanager
def guarded(path: str | os.PathLike[str], what: str = "") -> Iterator[None]:
    """Turn an OSError of h5py's into a DataFileError that has the path."""
    try:
        yield
    except DataFileError:
        raise
    except (OSError, RuntimeError) as error:
        raise DataFileError(f"{path}: {what}{_reason(path, error)}", str(path)) from error


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Open a file for reading, and close it at the end.

    Raises:
        DataFileError: It is not there, broken, or being written.
    """
    with open_file(path) as file:
        yield file


def open_file(path: str | os.PathLike[str]) -> Any:
    """Return an `h5py.File` open for reading, or raise DataFileError."""
    with guarded(path):
        return h5py.File(path, "r", rdcc_nbytes=_CACHE_BYTES)


def _reason(path: str | os.PathLike[str], error: Exception) -> str:
    text = str(error)
    if isinstance(error, FileNotFoundError):
        if parts_of(path).is_dir():
            return (
                f"not there yet, but {parts_of(path).name} is: it is being packed, or that was "
                "interrupted; run the same pack again to go on"
            )
        return "no such file"
    if "unable to lock file" in text or "already open for" in text:
        return (
            "another process is writing it; wait until that has closed it (a file system without "
            f"locks needs HDF5_USE_FILE_LOCKING=FALSE): {text}"
        )
    if "Too many open files" in text:
        return (
            "too many open files; of a packed file all parts are open at once: raise the limit "
            f"(ulimit -n), pack into fewer shards, or with merge=True; {text}"
        )
    if "truncated file" in text:
        return f"truncated: it was not written to its end, or not copied whole; {text}"
    if "file signature not found" in text:
        return "not an HDF5 file, or one whose writing was interrupted"
    if "filter" in text:
        return f"corrupt, or packed with a filter that is not installed; {text}"
    return text


@contextlib.contextmanager
def bar(title: str, total: int | None, unit: str, shown: bool) -> Iterator[Callable[..., object]]:
    """Show a progress bar on standard error.

    Args:
        title: What it is about.
        total: How many there are; None: nobody knows.
        unit: Of what.
        shown: Whether to show it at all.

    Yields:
        A function that is told how many more are done, and some text to show beside it.
    """
    if not shown:
        yield lambda more, text="": None
        return
    tqdm = framework("tqdm", "hdf5", "4.64", user="a progress bar").tqdm
    with tqdm(total=total, unit=unit, desc=title) as shown_bar:

        def tell(more: int, text: str = "") -> None:
            shown_bar.set_postfix_str(text, refresh=False)
            shown_bar.update(more)

        yield tell


def parts_of(path: str | os.PathLike[str]) -> Path:
    """Return the folder in which the parts of a packed file lie."""
    whole = Path(path)
    return whole.with_name(whole.name + ".parts")


def layout_of(path: str, names: Sequence[str] | None) -> Layout:
    """Return what is in a file, after a look at all files that its rows lie in.

    Args:
        path: Of the file.
        names: Of the datasets; None: of all that have rows.

    Raises:
        DataFileError: The file or one of its parts is broken, a name is missing, or lengths
            differ.
    """
    with opened(path) as file:
        datasets = _datasets(path, file, names)
        lengths = {name: len(dataset) for name, dataset in datasets.items()}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise DataFileError(
                f"{path}: datasets that are read together must have equally many rows, "
                f"got {told}; name those that belong together with keys=",
                path,
            )
        with _Parts(path) as parts:
            columns = {name: parts.column(dataset) for name, dataset in datasets.items()}
            rows = next(iter(lengths.values()))
            # what has the largest rows costs most if its chunks are read twice
            widest = max(datasets.values(), key=_row_bytes)
            starts = {0, rows, *parts.starts(widest)}
    return Layout(tuple(columns.values()), rows, tuple(sorted(starts)), parts.files())


def _datasets(path: str, file: Any, names: Sequence[str] | None) -> dict[str, Any]:
    there: dict[str, Any] = {}
    file.visititems(
        lambda name, item: there.update({name: item}) if isinstance(item, h5py.Dataset) else None
    )
    if names is None:
        found = {name: item for name, item in there.items() if item.shape}
        if not found:
            raise DataFileError(f"{path}: there is no dataset with rows in it", path)
        return found
    # by name, since links to datasets are not visited
    found = {name: file.get(name.strip("/") or "/") for name in names}
    missing = [name for name, item in found.items() if not isinstance(item, h5py.Dataset)]
    if missing:
        raise DataFileError(
            f"{path}: there is no dataset {', '.join(map(repr, missing))}; "
            f"it has {', '.join(map(repr, sorted(there))) or 'none'}",
            path,
        )
    for name, item in found.items():
        if not item.shape:
            raise DataFileError(f"{path}: {name!r} is a single value and has no rows", path)
    return found


def _row_bytes(dataset: Any) -> int:
    return int(math.prod(dataset.shape[1:]) * dataset.dtype.itemsize)


class _Parts:
    """The files that the datasets of a file lie in, each opened and looked at once."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen = {path: _stamp(path)}
        self._open: dict[str, Any] = {}

    def __enter__(self) -> _Parts:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._open.values():
            file.close()

    def files(self) -> tuple[tuple[str, int, int], ...]:
        return tuple((path, *stamp) for path, stamp in self._seen.items())

    def column(self, dataset: Any) -> Column:
        pieces = list(self._pieces(dataset))
        first = pieces[0][1] if pieces else (0, None, 0)
        return Column(
            name=dataset.name.strip("/"),
            shape=tuple(map(int, dataset.shape)),
            dtype=kind_of(dataset.dtype),
            chunk=first[0],
            compression=first[1],
            stored=sum(piece[1][2] for piece in pieces),
            is_virtual=bool(dataset.is_virtual),
        )

    def starts(self, dataset: Any) -> Iterator[int]:
        usual = max(1, CHUNK_BYTES // max(1, _row_bytes(dataset)))
        for (start, stop), (chunk, _, _) in self._pieces(dataset):
            yield from range(start, stop, chunk or usual)

    def _pieces(
        self, dataset: Any
    ) -> Iterator[tuple[tuple[int, int], tuple[int, str | None, int]]]:
        """Yield the rows of each piece, and its chunk, compression and bytes."""
        whole = dataset.file.filename  # a link may lead to another file
        self._seen.setdefault(whole, _stamp(whole))
        if not dataset.is_virtual:
            yield (0, len(dataset)), _stored(dataset)
            return
        for source in dataset.virtual_sources():
            first, last = source.vspace.get_select_bounds()
            rows = last[0] + 1 - first[0]
            yield (first[0], last[0] + 1), self._look(source, rows, whole)

    def _look(self, source: Any, rows: int, whole: str) -> tuple[int, str | None, int]:
        """Look at the file of one mapping of a virtual dataset in the file `whole`."""
        path, name = whole, _unescaped(source.dset_name)
        if source.file_name != ".":
            path = _beside(whole, _unescaped(source.file_name))
        if not os.path.exists(path):
            raise DataFileError(
                f"{whole}: its part {_unescaped(source.file_name)} is missing; the file and its "
                "parts belong together and must be moved together (merge=True packs into one file)",
                whole,
            )
        if path not in self._open:
            self._seen[path] = _stamp(path)
            self._open[path] = open_file(path)
        file = self._open[path]
        if name not in file:
            raise DataFileError(f"{path}: there is no dataset {name!r}", path)
        dataset = file[name]
        if source.src_space.get_select_type() == h5py.h5s.SEL_HYPERSLABS:  # a part of it
            rows = source.src_space.get_select_bounds()[1][0] + 1
        if len(dataset) < rows:
            raise DataFileError(
                f"{path}: {name!r} has {len(dataset)} rows, but {whole} reads {rows} of it", path
            )
        if not dataset.is_virtual:
            return _stored(dataset)
        stored = [piece[1] for piece in self._pieces(dataset)]
        chunk, compression, _ = stored[0] if stored else (0, None, 0)
        return chunk, compression, sum(piece[2] for piece in stored)


def _beside(whole: str, name: str) -> str:
    """Return where HDF5 looks for a file that another refers to; a link may lead to both."""
    path = os.path.join(os.path.dirname(whole), name)
    if os.path.exists(path):
        return path
    behind = os.path.join(os.path.dirname(os.path.realpath(whole)), name)
    return behind if os.path.exists(behind) else path


def escaped(name: str) -> str:
    """Return what a name of a file or dataset is called in the mappings of virtual datasets."""
    return name.replace("%", "%%")


def _unescaped(name: str) -> str:
    return name.replace("%%", "%")


def _stored(dataset: Any) -> tuple[int, str | None, int]:
    chunk = dataset.chunks[0] if dataset.chunks else 0
    return chunk, dataset.compression, int(dataset.id.get_storage_size())


def _stamp(path: str) -> tuple[int, int]:
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns


def check_unchanged(layout: Layout) -> None:
    """Raise DataFileError if a file is not what it was when the layout was made."""
    for path, *stamp in layout.files:
        try:
            is_same = list(_stamp(path)) == stamp
        except FileNotFoundError:
            raise DataFileError(f"{path}: it was there before and is gone", path) from None
        if not is_same:
            raise DataFileError(
                f"{path}: it was changed since the source was made; make a new one", path
            )


def check_spare() -> None:
    """Raise OSError if no more file can be opened; HDF5 does, again, for a virtual dataset."""
    with open(os.devnull, "rb"):
        pass


def kind_of(dtype: Any) -> str:
    """Return the word for a dtype: numpy's, or `text`, or `ragged` and that of its items."""
    text, item = h5py.check_string_dtype(dtype), h5py.check_vlen_dtype(dtype)
    if text is not None and text.length is None:
        return "text"
    if item is not None:
        return f"ragged {np.dtype(item)}"
    return str(dtype)


def readable(dataset: Any) -> Any:
    """Return what slices of a dataset are taken of: strings come as `str`."""
    return dataset.asstr() if kind_of(dataset.dtype) == "text" else dataset


# --- what a person wants to know of a file ------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """A few statistics of a column, of `rows` of its rows; None where they make no sense."""

    rows: int
    minimum: float | None = None
    mean: float | None = None
    maximum: float | None = None
    not_finite: int = 0  #: numbers that are NaN or infinite, and are left out of the others


@dataclass(frozen=True)
class Description:
    """What `describe` tells of a file.

    Attributes:
        path: Of the file.
        bytes: Of the file and of all the files that its virtual datasets lie in.
        files: How many these are.
        columns: All its datasets.
        summaries: A summary for each column.
        attributes: Of the file.
        column_attributes: Of each column that has some.
    """

    path: str
    bytes: int
    files: int
    columns: tuple[Column, ...]
    summaries: tuple[Summary, ...]
    attributes: dict[str, Any]
    column_attributes: dict[str, dict[str, Any]]


def describe(
    path: str | os.PathLike[str],
    full: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Description:
    """Look at an HDF5 file: its datasets, how they are stored, and a few statistics.

    Args:
        path: Of the file.
        full: Whether the statistics are of all rows; by default of 16 chunks, evenly spread.
        progress: Called with the number of rows whenever some have been read.

    Raises:
        DataFileError: The file or one of its parts is missing, broken or being written.

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
    whole = os.path.abspath(path)
    columns, summaries, own = [], [], {}
    with opened(whole) as file, _Parts(whole) as parts:
        for name, dataset in _datasets_of_any_shape(whole, file).items():
            column = parts.column(dataset)
            columns.append(column)
            starts = sorted({0, *parts.starts(dataset)}) if dataset.shape else []
            summaries.append(_summary(whole, dataset, column, starts, full, progress))
            if dataset.attrs:
                own[name] = dict(dataset.attrs)
        attributes = dict(file.attrs)
    files = parts.files()
    size = sum(size for _, size, _ in files)
    return Description(
        str(path), size, len(files), tuple(columns), tuple(summaries), attributes, own
    )


def _datasets_of_any_shape(path: str, file: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    file.visititems(
        lambda name, item: (
            found.update({name: item})
            if isinstance(item, h5py.Dataset) and item.shape is not None
            else None
        )
    )
    return found


def _summary(
    path: str,
    dataset: Any,
    column: Column,
    starts: list[int],
    full: bool,
    progress: Callable[[int], object] | None,
) -> Summary:
    if not dataset.shape or column.is_object or dataset.dtype.kind not in "biuf":
        return Summary(0)
    stops = [*starts[1:], len(dataset)]
    blocks = list(zip(starts, stops, strict=True))
    if not full and len(blocks) > _SAMPLE_BLOCKS:
        picked = np.linspace(0, len(blocks) - 1, _SAMPLE_BLOCKS).astype(int)
        blocks = [blocks[at] for at in picked]
    return _statistics(_read_blocks(path, dataset, blocks, progress))


def _read_blocks(
    path: str,
    dataset: Any,
    blocks: Iterable[tuple[int, int]],
    progress: Callable[[int], object] | None,
) -> Iterator[np.ndarray]:
    for start, stop in blocks:
        with guarded(path, f"rows {start} to {stop} of {dataset.name[1:]!r} cannot be read: "):
            if dataset.is_virtual:
                check_spare()
            rows = dataset[start:stop]
        yield rows
        if progress is not None:
            progress(stop - start)


def _statistics(blocks: Iterable[np.ndarray]) -> Summary:
    rows, numbers, total, bad = 0, 0, 0.0, 0
    least, most = math.inf, -math.inf
    for block in blocks:
        rows += len(block)
        finite = block[np.isfinite(block)]
        bad += block.size - finite.size
        if finite.size:
            numbers += finite.size
            total += float(finite.sum(dtype=np.float64))
            least, most = min(least, float(finite.min())), max(most, float(finite.max()))
    if not numbers:
        return Summary(rows, not_finite=bad)
    return Summary(rows, least, total / numbers, most, bad)
