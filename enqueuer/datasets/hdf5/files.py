"""Opening HDF5 files, with errors that name the file, the reason and a remedy.

    opened, OpenFiles:  one file, or many parts of which a few are open at a time
    guarded:            h5py's errors -> DataFileError with the path, the reason and what to do
    walk, datasets_in:  the datasets of a file, and those that are damaged
    kind_of, readable:  the type of a dataset, and its content as Python objects

All other modules open files by this one. A process has one handle of a file, whose users are
counted. With several, HDF5 keeps a pointer to the one by which a dataset was opened first. After
that is closed, reading texts or ragged members of a table by another handle is a SIGSEGV. Handles
of another driver have nothing in common with ours, so the program may open and close its own.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from enqueuer.common.extras import framework
from enqueuer.errors import DataFileError

h5py = framework("h5py", "hdf5", "3.7", user="enqueuer.datasets.hdf5")
# It reads as the default driver does; without flags it writes no log.
_DRIVER = "enqueuer"
h5py.register_driver(_DRIVER, lambda options: options.set_fapl_log(b"", 0, 0))

# Size of a chunk: large enough for a disk, small enough for a cache.
CHUNK_BYTES = 1 << 20
# A file has as many parts by default. To open one takes a tenth of the time of a chunk.
MAX_OPEN = 32
# Size of a cache for the chunks of a dataset. HDF5's default of 1 MiB does not hold such a chunk.
CACHE_BYTES = 16 << 20

# What texts of HDF5 mean, and what to do.
_REASONS = {
    "unable to lock file|already open for": (
        "another process is writing it; wait until that has closed it (a file system without "
        "locks needs HDF5_USE_FILE_LOCKING=FALSE): {}"
    ),
    "Too many open files": "too many open files; close some, or raise the limit (ulimit -n): {}",
    "truncated file": "truncated: it was not written to its end, or not copied whole; {}",
    "file signature not found": "not an HDF5 file, or one whose writing was interrupted",
    "No space left on device": "the disk is full; make room, and do the same again to go on: {}",
    "filter|can't open directory": (
        "corrupt, or packed with a filter that is not installed (`pip install hdf5plugin`, and "
        "`import hdf5plugin` in the program); {}"
    ),
}


@contextlib.contextmanager
def guarded(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert an error of h5py to a DataFileError with the path."""
    try:
        yield
    except DataFileError:
        raise
    except (OSError, RuntimeError, KeyError) as error:
        raise data_file_error(path, error) from error


def data_file_error(
    path: str | os.PathLike[str], error: Exception, what: str = "", dataset: Any = None
) -> DataFileError:
    """Return the DataFileError for an error of h5py, for example when it read a dataset."""
    text = text_of(error)
    known = (reason for pattern, reason in _REASONS.items() if re.search(pattern, text))
    reason = next(known, "{}").format(text)
    if os.path.isdir(path):
        reason = "a folder, and no HDF5 file"
    elif isinstance(error, FileNotFoundError) and parts_folder(path).is_dir():
        reason = (
            f"not there yet, but {parts_folder(path).name} is: it is being packed, or that was "
            "interrupted; run the same pack again to go on"
        )
    elif isinstance(error, FileNotFoundError):
        reason = "no such file"
    elif dataset is not None and (filters := _filters(dataset, lacking=True)):
        reason = (
            f"packed with {filters}, which is not installed; hdf5plugin has most filters: "
            "`pip install hdf5plugin`, and `import hdf5plugin` in the program"
        )
    return DataFileError(f"{path}: {what}{reason}", str(path))


def text_of(error: Exception) -> str:
    """Return the text of an error, without the quotes of a KeyError."""
    return str(error.args[0] if isinstance(error, KeyError) and error.args else error)


class SharedFile:
    """A file that this process has open, for all of its readers.

    Args:
        key: Number of the file in the system.
        file: The `h5py.File`.
    """

    def __init__(self, key: tuple[int, int], file: Any) -> None:
        self.key = key
        self.file = file
        self.users = 0
        self._datasets: dict[str, tuple[Any, Any]] = {}

    def dataset(self, name: str) -> tuple[Any, Any]:
        """Return a dataset with its cache of chunks, and an object whose slices are its rows."""
        found = self._datasets.get(name)
        if found is None:
            dataset = dataset_of(self.file, name)
            found = self._datasets.setdefault(name, (dataset, readable(dataset)))
        return found


# Those that are open, by their numbers, and those that a reader needs no longer.
_shared: dict[tuple[int, int], SharedFile] = {}
_released: collections.deque[SharedFile] = collections.deque()
_lock = threading.Lock()
# Files of the process that this one was forked from. They are never touched: to close them here
# would close them there.
_inherited: list[SharedFile] = []


def _leave_to_parent() -> None:
    global _lock
    _lock = threading.Lock()
    _inherited.extend(_shared.values())
    _shared.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def acquire(path: str | os.PathLike[str], cache_bytes: int = CACHE_BYTES) -> SharedFile:
    """Return the handle of a file, which is open for reading until it is released.

    Raises:
        DataFileError: The file is missing, broken, or being written.
    """
    try:
        with guarded(path), _lock:
            there = os.stat(path)
            if not (stat.S_ISREG(there.st_mode) or stat.S_ISDIR(there.st_mode)):
                # HDF5 would wait for a writer of a pipe.
                raise DataFileError(f"{path}: a pipe or a device, and no HDF5 file", str(path))
            key = there.st_dev, there.st_ino
            if key not in _shared:
                try:
                    file = h5py.File(path, "r", driver=_DRIVER, rdcc_nbytes=cache_bytes)
                except OSError:
                    # It is locked if the program has it open for writing; that can be shared.
                    file = h5py.File(path, "r", rdcc_nbytes=cache_bytes)
                _shared[key] = SharedFile(key, file)
            _shared[key].users += 1
            return _shared[key]
    finally:
        release()


def release(*shared: SharedFile) -> None:
    """Close files that have no other users.

    The garbage collector may call this at any time, also while this thread holds the lock, or has
    h5py's. So it never waits: the thread that holds the lock closes the file afterwards.
    """
    _released.extend(shared)
    while _released and _lock.acquire(blocking=False):
        try:
            while _released:
                done = _released.popleft()
                done.users -= 1
                if not done.users and _shared.get(done.key) is done:
                    del _shared[done.key]
                    with guarded(done.file.filename):
                        done.file.close()
        finally:
            _lock.release()


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Give an `h5py.File` that is open for reading; raise DataFileError if that is impossible."""
    shared = acquire(path)
    try:
        yield shared.file
    finally:
        release(shared)


class OpenFiles(dict[str, SharedFile]):
    """The files that were opened last, by path, at most `MAX_OPEN`; for one thread at a time.

    To look one up opens it, and may close the one that was opened first. That raises
    `DataFileError` if the file is missing, broken, or being written.

    Args:
        cache_bytes: Size of the cache for the chunks of each dataset in each file.
    """

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self._cache_bytes = cache_bytes

    def __missing__(self, path: str) -> SharedFile:
        if len(self) >= MAX_OPEN:
            release(self.pop(next(iter(self))))
        self[path] = shared = acquire(path, self._cache_bytes)
        return shared

    def close(self) -> None:
        """Close all of them."""
        while self:
            release(self.popitem()[1])

    __del__ = close


def parts_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder of the parts of a packed file."""
    whole = Path(path)
    return whole.with_name(whole.name + ".parts")


def walk(group: Any, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the name of each dataset in a group, and the dataset; links are not followed.

    For what is damaged, the error comes instead of the dataset; that of the whole is raised.
    """
    seen = set() if seen is None else seen
    try:
        names = sorted(group.id)
    except (OSError, RuntimeError) as error:
        if not prefix:
            raise
        yield prefix[:-1], error
        return
    for raw in names:
        name = prefix + raw.decode("utf-8", "surrogateescape")
        try:
            if group.id.links.get_info(raw).type != h5py.h5l.TYPE_HARD:
                continue
            item = group[raw]
            address = h5py.h5o.get_info(item.id).addr
        except (KeyError, OSError, RuntimeError, ValueError, TypeError) as error:
            yield name, error
            continue
        # A group may be in itself.
        if address not in seen:
            seen.add(address)
            if isinstance(item, h5py.Dataset):
                yield name, item
            elif isinstance(item, h5py.Group):
                yield from walk(item, f"{name}/", seen)


def key_names(argument: str, names: Any) -> tuple[str, ...]:
    """Return the names of datasets; raise TypeError or ValueError unless they are some names."""
    if isinstance(names, str) or not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} must be names in a list or tuple, got {names!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"{argument} must differ, got {names!r}")
    return tuple(names)


def raw_name(name: str) -> bytes:
    """Return a name as it is in the file; some writers do not use UTF-8."""
    return name.encode("utf-8", "surrogateescape")


def dataset_of(file: Any, name: str) -> Any:
    """Return a dataset of an open file, without a cache if its chunks are stored as they are.

    HDF5 then reads the rows that are wanted, straight into the caller's array. With a cache it
    reads whole chunks into that, and copies the rows.
    """
    dataset = file[raw_name(name)]
    if dataset.chunks is None or dataset.id.get_create_plist().get_nfilters():
        return dataset
    options = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    options.set_chunk_cache(1, 0, 1.0)
    # The second one would share the cache of the first.
    del dataset
    return h5py.Dataset(h5py.h5d.open(file.id, raw_name(name), options))


def filter_folders() -> list[bytes]:
    """Return the folders in which HDF5 looks for filters, in this process."""
    return [h5py.h5pl.get(at) for at in range(h5py.h5pl.size())]


def add_filter_folders(folders: Iterable[bytes]) -> None:
    """Have HDF5 look for filters in the folders of the program, too."""
    for folder in folders:
        if folder not in filter_folders():
            h5py.h5pl.append(folder)


def name_of(dataset: Any) -> str:
    """Return the path of a dataset in its file."""
    name: bytes = h5py.h5i.get_name(dataset.id)
    return name.decode("utf-8", "surrogateescape")


def _filters(dataset: Any, lacking: bool = False) -> str:
    """Return the filters of a dataset that are not part of HDF5, or those that are not there."""
    plist = dataset.id.get_create_plist()
    found = (plist.get_filter(at) for at in range(plist.get_nfilters()))
    # HDF5 keeps the numbers below 256. A name may go on with an address.
    return ", ".join(
        f"filter {number} {re.split('[:;]', name.decode(errors='replace'))[0]}".strip()
        for number, _, _, name in found
        if (not h5py.h5z.filter_avail(number) if lacking else number > 255)
    )


def compression_of(dataset: Any) -> str | None:
    """Return the name of the compression of a dataset, or None."""
    known: str | None = dataset.compression
    # Which of the two h5py says of a filter that it does not know depends on its version.
    return (_filters(dataset) or None) if known in (None, "unknown") else known


def by_offset(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype with the fields in the order in which they lie in memory.

    HDF5 sorts the members of a compound type at any time, so their order means nothing.

    Raises:
        TypeError: There are references among them, which mean nothing without the open file.
    """
    if dtype.subdtype is not None:
        return np.dtype((by_offset(dtype.subdtype[0]), dtype.subdtype[1]))
    if h5py.check_ref_dtype(dtype):
        raise TypeError("references; read what they refer to by its own name")
    if dtype.fields is None:
        return dtype
    fields = sorted(dtype.fields.items(), key=lambda field: field[1][1])
    return np.dtype(
        {
            "names": [name for name, _ in fields],
            "formats": [by_offset(field[0]) for _, field in fields],
            "offsets": [field[1] for _, field in fields],
            "itemsize": dtype.itemsize,
        }
    )


def assign(into: np.ndarray, found: np.ndarray) -> None:
    """Copy an array, by the names of its fields, where numpy goes by their places."""
    if into.dtype.names is None or into.dtype == found.dtype:
        into[...] = found
        return
    for name in into.dtype.names:
        assign(into[name], found[name])


def kind_of(dtype: Any) -> str:
    """Return the name of a dtype: that of numpy, or `text`, or `ragged` and that of its items."""
    text, item = h5py.check_string_dtype(dtype), h5py.check_vlen_dtype(dtype)
    if text is not None and text.length is None:
        return "text"
    if item is not None:
        return f"ragged {by_offset(np.dtype(item))}"
    return str(by_offset(dtype))


class RowKind(NamedTuple):
    """The type that all rows of a dataset have in common.

    Attributes:
        name: Name of the dtype. For rows of objects it includes their type, which numpy does not
            compare.
        shape: Shape of a row.
        dtype: The dtype in HDF5.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any

    def __repr__(self) -> str:
        return f"{self.name} of shape {self.shape}"


def row_kind(dtype: Any, shape: tuple[int, ...]) -> RowKind:
    """Return the type of the rows of a dataset with a shape."""
    return RowKind(kind_of(dtype), shape[1:], by_offset(dtype))


def readable(dataset: Any) -> Any:
    """Return an object whose slices are those of a dataset, with strings as `str`."""
    # Many writers mark any text as ASCII, so it is always read as UTF-8.
    return dataset.asstr("utf-8") if kind_of(dataset.dtype) == "text" else dataset
