"""HDF5 files as they are found: opened, or refused clearly.

    opened, OpenFiles:  one file, or as many parts as one needs
    guarded:            h5py's OSError -> DataFileError with the path, the reason and what to do
    kind_of, readable:  what a dataset holds, and how it comes as Python has it

Everybody else opens files by this one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from enqueuer.errors import DataFileError
from enqueuer.frameworks import framework

h5py = framework("h5py", "hdf5", "3.7", user="enqueuer.datasets.hdf5")

CHUNK_BYTES = 1 << 20  # of a chunk: large enough for a disk, small enough for a cache
MOST_OPEN = 32  # as many as a file has parts by default; to open one takes a tenth of a chunk
CACHE_BYTES = 16 << 20  # of each dataset; HDF5's own 1 MiB does not hold a chunk of that


@contextlib.contextmanager
def guarded(path: str | os.PathLike[str], what: str = "") -> Iterator[None]:
    """Turn an OSError of h5py's into a DataFileError that has the path."""
    try:
        yield
    except DataFileError:
        raise
    except (OSError, RuntimeError) as error:
        raise as_told(path, error, what) from error


def as_told(path: str | os.PathLike[str], error: Exception, what: str = "") -> DataFileError:
    """Return the DataFileError for an error of h5py's."""
    return DataFileError(f"{path}: {what}{_reason(path, error)}", str(path))


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Open a file for reading, and close it at the end.

    Raises:
        DataFileError: It is not there, broken, or being written.
    """
    with open_file(path) as file:
        yield file


def open_file(path: str | os.PathLike[str], cache_bytes: int = CACHE_BYTES) -> Any:
    """Return an `h5py.File` open for reading, or raise DataFileError."""
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        # HDF5 would wait until something is written to a pipe
        raise DataFileError(f"{path}: a pipe or a device, and no HDF5 file", str(path))
    with guarded(path):
        return h5py.File(path, "r", rdcc_nbytes=cache_bytes)


class OpenFiles:
    """Files that are open for reading: those that were opened last, and no more than a few.

    One thread at a time may ask.

    Args:
        cache_bytes: The most that is kept of the chunks of each dataset in each of them.
    """

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self._cache_bytes = cache_bytes
        self._files: dict[str, Any] = {}  # in the order in which they were opened

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(self, path: str) -> Any:
        """Return a file; the one that has been open for longest may be closed for it.

        Raises:
            DataFileError: It is not there, broken, or being written.
        """
        if path not in self._files:
            if len(self._files) >= MOST_OPEN:
                self._files.pop(next(iter(self._files))).close()
            self._files[path] = open_file(path, self._cache_bytes)
        return self._files[path]

    def close(self) -> None:
        """Close all of them."""
        while self._files:
            path, file = self._files.popitem()
            with guarded(path):
                file.close()


def _reason(path: str | os.PathLike[str], error: Exception) -> str:
    text = str(error)
    if os.path.isdir(path):
        return "a folder, and no HDF5 file"
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
            f"too many open files; close what is not needed, or raise the limit (ulimit -n); {text}"
        )
    if "truncated file" in text:
        return f"truncated: it was not written to its end, or not copied whole; {text}"
    if "file signature not found" in text:
        return "not an HDF5 file, or one whose writing was interrupted"
    if "No space left on device" in text:
        return f"the disk is full; make room, and do the same again to go on: {text}"
    if "filter" in text:
        return f"corrupt, or packed with a filter that is not installed; {text}"
    return text


def parts_of(path: str | os.PathLike[str]) -> Path:
    """Return the folder in which the parts of a packed file lie."""
    whole = Path(path)
    return whole.with_name(whole.name + ".parts")


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
    # UTF-8 also where the file says ASCII, which many writers say of whatever they write
    return dataset.asstr("utf-8") if kind_of(dataset.dtype) == "text" else dataset
