"""Opening HDF5 files, with errors that name the file, the reason and a remedy.

    opened, OpenFiles:  one file, or many parts of which a few are open at a time
    guarded:            h5py's OSError -> DataFileError with the path, the reason and what to do
    kind_of, readable:  the type of a dataset, and its content as Python objects

All other modules open files by this one.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from enqueuer.common.extras import framework
from enqueuer.errors import DataFileError

h5py = framework("h5py", "hdf5", "3.7", user="enqueuer.datasets.hdf5")

# Size of a chunk: large enough for a disk, small enough for a cache.
CHUNK_BYTES = 1 << 20
# A file has as many parts by default. To open one takes a tenth of the time of a chunk.
MOST_OPEN = 32
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
    "filter": "corrupt, or packed with a filter that is not installed; {}",
}


@contextlib.contextmanager
def guarded(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert an OSError of h5py to a DataFileError with the path."""
    try:
        yield
    except DataFileError:
        raise
    except (OSError, RuntimeError) as error:
        raise data_file_error(path, error) from error


def data_file_error(
    path: str | os.PathLike[str], error: Exception, what: str = ""
) -> DataFileError:
    """Return the DataFileError for an error of h5py."""
    text = str(error)
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
    return DataFileError(f"{path}: {what}{reason}", str(path))


def opened(path: str | os.PathLike[str], cache_bytes: int = CACHE_BYTES) -> Any:
    """Return an `h5py.File` open for reading, which closes at the end of a `with`.

    Raises:
        DataFileError: The file is missing, broken, or being written.
    """
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        # HDF5 would wait for a writer of a pipe.
        raise DataFileError(f"{path}: a pipe or a device, and no HDF5 file", str(path))
    with guarded(path):
        return h5py.File(path, "r", rdcc_nbytes=cache_bytes)


class OpenFiles(dict[str, Any]):
    """The files that were opened last, by path, at most `MOST_OPEN`; for one thread at a time.

    To look one up opens it, and may close the one that was opened first. That raises
    `DataFileError` if the file is missing, broken, or being written.

    Args:
        cache_bytes: Size of the cache for the chunks of each dataset in each file.
    """

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self._cache_bytes = cache_bytes

    def __missing__(self, path: str) -> Any:
        if len(self) >= MOST_OPEN:
            self.pop(next(iter(self))).close()
        self[path] = file = opened(path, self._cache_bytes)
        return file

    def close(self) -> None:
        """Close all of them."""
        while self:
            path, file = self.popitem()
            with guarded(path):
                file.close()


def parts_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder of the parts of a packed file."""
    whole = Path(path)
    return whole.with_name(whole.name + ".parts")


def datasets_in(file: Any) -> dict[str, Any]:
    """Return all datasets of an open file, by their names; links are not followed."""
    found: dict[str, Any] = {}
    file.visititems(
        lambda name, item: found.update({name: item}) if isinstance(item, h5py.Dataset) else None
    )
    return found


def dataset_of(file: Any, name: str) -> Any:
    """Return a dataset of an open file, without a cache if its chunks are stored as they are.

    HDF5 then reads the rows that are wanted, straight into the caller's array. With a cache it
    reads whole chunks into that, and copies the rows.
    """
    dataset = file[name]
    if dataset.chunks is None or dataset.id.get_create_plist().get_nfilters():
        return dataset
    options = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    options.set_chunk_cache(1, 0, 1.0)
    # The second one would share the cache of the first.
    del dataset
    return h5py.Dataset(h5py.h5d.open(file.id, name.encode(), options))


def kind_of(dtype: Any) -> str:
    """Return the name of a dtype: that of numpy, or `text`, or `ragged` and that of its items."""
    text, item = h5py.check_string_dtype(dtype), h5py.check_vlen_dtype(dtype)
    if text is not None and text.length is None:
        return "text"
    if item is not None:
        return f"ragged {np.dtype(item)}"
    return str(dtype)


def readable(dataset: Any) -> Any:
    """Return an object whose slices are those of a dataset, with strings as `str`."""
    # Many writers mark any text as ASCII, so it is always read as UTF-8.
    return dataset.asstr("utf-8") if kind_of(dataset.dtype) == "text" else dataset
