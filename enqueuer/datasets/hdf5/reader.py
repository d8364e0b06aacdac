"""Reading rows: each from the file that holds it, whichever file shows it.

    rows 10 to 30 --stretches of the layout--> 10 to 20 here, 0 to 10 there --> one array

A part is opened when rows of it are needed, so a missing part is an error and not zeros. HDF5 also
gives zeros for rows that were cut off an open file. So after a file was read, and before its rows
are returned, it is checked that the file is unchanged.
"""

from __future__ import annotations

import bisect
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from enqueuer.common.text import size
from enqueuer.datasets.hdf5.files import (
    CACHE_BYTES,
    MOST_OPEN,
    OpenFiles,
    data_file_error,
    dataset_of,
    readable,
)
from enqueuer.datasets.hdf5.layout import Layout, Stretch
from enqueuer.errors import DataFileError

# Below this size, another copy costs less than the work of h5py to avoid it.
_DIRECT_BYTES = 1 << 16


# Rows of a dataset: the first, and the one behind the last, are counted in its file.
Part = tuple[Stretch, int, int]


class RowReader:
    """Read the same rows of several columns. A reader belongs to the process that made it.

    Any thread may call any method; the threads take turns, as in h5py itself.

    Args:
        layout: Layout of the file.
        names: Names of the columns.
    """

    def __init__(self, layout: Layout, names: Sequence[str]) -> None:
        layout.check_unchanged(layout.path)
        self.pid = os.getpid()
        self._layout = layout
        self._names = names
        self._stops = {name: [at.stop for at in layout.stretches[name]] for name in names}
        self._files = OpenFiles(self._cache_bytes())
        # Datasets with their caches of chunks, and the objects that give slices of them.
        self._datasets: dict[tuple[str, str], tuple[Any, Any]] = {}
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
        for name in self._names:
            parts = [part for piece in pieces for part in self._between(name, *piece, step)]
            paths.update([at.path for at, _, _ in parts])
            found[name] = self._column(name, parts, step, None if rest is None else rest[name])
        for path in paths:
            self._layout.check_unchanged(path)
        return found

    def _cache_bytes(self) -> int:
        """Return the size of the cache of each dataset; many files share the size for one."""
        layout = self._layout
        stretches = [(name, at) for name in self._names for at in layout.stretches[name]]
        files = len({at.path for _, at in stretches})
        chunks = (at.chunk * layout.row_bytes(name) for name, at in stretches)
        share = CACHE_BYTES // max(1, min(files, MOST_OPEN))
        # A cache below the size of a chunk has no effect, and each row would unpack its chunk.
        return max(share, min(CACHE_BYTES, max(chunks, default=0)))

    def _column(
        self, name: str, parts: Sequence[Part], step: int, rest: np.ndarray | None
    ) -> np.ndarray:
        counts = [len(range(low, high, step)) for _, low, high in parts]
        filled = 0 if rest is None else len(rest)
        rows = filled + sum(counts)
        try:
            shape = self._layout.columns[name].shape
            pool = np.empty((rows, *shape[1:]), self._layout.dtypes[name])
            if rest is not None:
                pool[:filled] = rest
            for part, count in zip(parts, counts, strict=True):
                self.take(*part, step, pool[filled : filled + count])
                filled += count
        except MemoryError as error:
            path, needed = self._layout.path, size(rows * self._layout.row_bytes(name))
            raise DataFileError(
                f"{path}: {rows:,} rows of {name!r} need {needed}, which could not be allocated; "
                "whole chunks are read, so pack it with smaller chunks (h5repack -l), or give a "
                "smaller window",
                path,
            ) from error
        return pool

    def _between(self, name: str, start: int, stop: int, step: int) -> Iterator[Part]:
        """Yield the stretches that hold some rows, and the numbers of these rows in their files."""
        stretches = self._layout.stretches[name]
        for nth in range(bisect.bisect_right(self._stops[name], start), len(stretches)):
            at = stretches[nth]
            if at.start >= stop:
                return
            low = max(start, at.start)
            low += (start - low) % step
            high = min(stop, at.stop)
            if low < high:
                yield at, low - at.start + at.first, high - at.start + at.first

    def take(self, at: Stretch, low: int, high: int, step: int, into: np.ndarray) -> None:
        """Read some rows of the dataset of a stretch into an array."""
        with self._lock:
            try:
                dataset, view = self._opened(at)
                if into.nbytes < _DIRECT_BYTES or not _is_plain(dataset.dtype):
                    into[...] = view[low:high:step]
                else:
                    dataset.read_direct(into, np.s_[low:high:step])
            except DataFileError:
                raise
            except (OSError, RuntimeError, UnicodeDecodeError) as error:
                # A change of the file would explain the error.
                self._layout.check_unchanged(at.path)
                rows = f"row {low}" if high == low + 1 else f"rows {low} to {high}"
                what = f"{rows} of {at.dataset[1:]!r} cannot be read: "
                raise data_file_error(at.path, error, what) from error

    def _opened(self, at: Stretch) -> tuple[Any, Any]:
        """Return a dataset, and an object whose slices are its rows."""
        opened = self._datasets.get((at.path, at.dataset))
        # The file may have been closed meanwhile.
        if opened is None or not opened[0].id.valid:
            self._layout.check_unchanged(at.path)
            dataset = dataset_of(self._files.open(at.path), at.dataset)
            opened = self._datasets[at.path, at.dataset] = dataset, readable(dataset)
        return opened


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Return whether HDF5 can read rows of a type into an array of numpy."""
    return not dtype.hasobject and dtype.subdtype is None
