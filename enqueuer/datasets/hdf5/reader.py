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
        if rest is None and len(parts) == 1:
            found: np.ndarray = self.take(*parts[0], step)
            return found
        dtype = self._layout.dtypes[name]
        if step > 1 or dtype.hasobject or dtype.subdtype is not None:
            rest = self._empty(name, 0) if rest is None else rest
            return np.concatenate([rest, *(self.take(*part, step) for part in parts)])
        filled = 0 if rest is None else len(rest)
        rows = filled + sum(high - low for _, low, high in parts)
        try:
            pool = self._empty(name, rows)
        except MemoryError as error:
            raise self._too_large(self._layout.path, name, 0, rows) from error
        if rest is not None:
            pool[:filled] = rest
        for at, low, high in parts:
            there = filled + high - low
            self.take(at, low, high, into=pool[filled:there])
            filled = there
        return pool

    def _empty(self, name: str, rows: int) -> np.ndarray:
        shape = self._layout.columns[name].shape
        return np.empty((rows, *shape[1:]), self._layout.dtypes[name])

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

    def take(
        self, at: Stretch, low: int, high: int, step: int = 1, into: np.ndarray | None = None
    ) -> Any:
        """Read some rows of the dataset of a stretch; return them unless an array is given."""
        with self._lock:
            try:
                there = self._datasets.get((at.path, at.dataset))
                # The file may have been closed meanwhile.
                if there is None or not there[0].id.valid:
                    there = self._opened(at)
                if into is None:
                    return there[1][low:high:step]
                if into.nbytes < _DIRECT_BYTES:
                    into[...] = there[0][low:high]
                else:
                    there[0].read_direct(into, np.s_[low:high])
                return None
            except DataFileError:
                raise
            except MemoryError as error:
                raise self._too_large(at.path, at.dataset[1:], low, high) from error
            except (OSError, RuntimeError, UnicodeDecodeError) as error:
                # A change of the file would explain the error.
                self._layout.check_unchanged(at.path)
                rows = f"row {low}" if high == low + 1 else f"rows {low} to {high}"
                what = f"{rows} of {at.dataset[1:]!r} cannot be read: "
                raise data_file_error(at.path, error, what) from error

    def _too_large(self, path: str, name: str, low: int, high: int) -> DataFileError:
        row_bytes = self._layout.row_bytes(name) if name in self._layout.columns else 0
        needed = size((high - low) * row_bytes) if row_bytes else "more memory than there is"
        return DataFileError(
            f"{path}: {high - low:,} rows of {name!r} need {needed}, which could not be "
            "allocated; whole chunks are read, so pack it with smaller chunks (h5repack -l), or "
            "give a smaller window",
            path,
        )

    def _opened(self, at: Stretch) -> tuple[Any, Any]:
        self._layout.check_unchanged(at.path)
        dataset = dataset_of(self._files.open(at.path), at.dataset)
        self._datasets[at.path, at.dataset] = dataset, readable(dataset)
        return self._datasets[at.path, at.dataset]
