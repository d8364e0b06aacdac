"""Reading rows: each from the file that it lies in, whichever file shows it.

    rows 10 to 30 --stretches of the layout--> 10 to 20 here, 0 to 10 there --> one array

A part is opened when rows of it are wanted, so one that is missing is an error and not zeros. HDF5
also gives zeros for what was cut off a file that is open; so each file is looked at once more after
it was read, and before what was read is handed out.
"""

from __future__ import annotations

import bisect
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from enqueuer.datasets.h5files import CACHE_BYTES, MOST_OPEN, OpenFiles, as_told, readable
from enqueuer.datasets.h5layout import Layout, Stretch
from enqueuer.errors import DataFileError
from enqueuer.formats import size

_DIRECT_BYTES = 1 << 16  # below, another copy costs less than what h5py does to save it


class Reader:
    """Reads the same rows of several columns. It belongs to the process that made it.

    Any thread may call anything; they take turns, as in h5py itself.

    Args:
        layout: Of the file.
        names: Of the columns.
    """

    def __init__(self, layout: Layout, names: Sequence[str]) -> None:
        layout.check_unchanged(layout.path)
        self.pid = os.getpid()
        self._layout = layout
        self._names = names
        self._stops = {name: [at.stop for at in layout.stretches[name]] for name in names}
        self._files = OpenFiles(self._cache_bytes())
        # with their caches of chunks; and what slices are taken of
        self._datasets: dict[tuple[str, str], tuple[Any, Any]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; they are opened again when they are needed."""
        with self._lock:
            self._files.close()

    def row(self, at: int) -> dict[str, Any]:
        """Return one row of each column."""
        places: set[str] = set()
        found = {name: self._read(places, name, at, at + 1)[0][0] for name in self._names}
        self._check(places)
        return found

    def rows(self, start: int, stop: int, step: int = 1) -> dict[str, np.ndarray]:
        """Return a slice of each column."""
        places: set[str] = set()
        found = {name: self._read(places, name, start, stop, step) for name in self._names}
        self._check(places)
        return {name: _joined(parts) for name, parts in found.items()}

    def pool(
        self, pieces: Sequence[tuple[int, int]], rest: Mapping[str, np.ndarray] | None
    ) -> dict[str, np.ndarray]:
        """Return the rows of several pieces, after those that are left of the pool before."""
        places: set[str] = set()
        found = {
            name: self._pooled(places, name, pieces, None if rest is None else rest[name])
            for name in self._names
        }
        self._check(places)
        return found

    # --- inside; `places` are the files that have been read for one answer ---

    def _cache_bytes(self) -> int:
        """Return how much to keep of each dataset: of many files, no more than of one."""
        layout = self._layout
        stretches = [(name, at) for name in self._names for at in layout.stretches[name]]
        files = len({at.path for _, at in stretches})
        chunks = (at.chunk * layout.row_bytes(name) for name, at in stretches)
        share = CACHE_BYTES // max(1, min(files, MOST_OPEN))
        # less than a chunk would be none at all, and each row would have its chunk unpacked
        return max(share, min(CACHE_BYTES, max(chunks, default=0)))

    def _check(self, places: set[str]) -> None:
        for path in places:
            self._layout.check_unchanged(path)

    def _read(
        self, places: set[str], name: str, start: int, stop: int, step: int = 1
    ) -> list[np.ndarray]:
        found = []
        for at, low, high in self._between(name, start, stop, step):
            found.append(self._take(at, low, high, step))
            places.add(at.path)
        return found or [self._empty(name, 0)]

    def _pooled(
        self,
        places: set[str],
        name: str,
        pieces: Sequence[tuple[int, int]],
        rest: np.ndarray | None,
    ) -> np.ndarray:
        dtype = self._layout.dtypes[name]
        if dtype.hasobject or dtype.subdtype is not None:
            read = [part for piece in pieces for part in self._read(places, name, *piece)]
            return np.concatenate(read if rest is None else [rest, *read])
        filled = 0 if rest is None else len(rest)
        rows = filled + sum(stop - start for start, stop in pieces)
        try:
            pool = self._empty(name, rows)
        except MemoryError as error:
            raise self._too_large(self._layout.path, name, 0, rows) from error
        if rest is not None:
            pool[:filled] = rest
        for piece in pieces:
            for at, low, high in self._between(name, *piece):
                there = filled + high - low
                self._take(at, low, high, into=pool[filled:there])
                places.add(at.path)
                filled = there
        return pool

    def _empty(self, name: str, rows: int) -> np.ndarray:
        shape = self._layout.columns[name].shape
        return np.empty((rows, *shape[1:]), self._layout.dtypes[name])

    def _between(
        self, name: str, start: int, stop: int, step: int = 1
    ) -> Iterator[tuple[Stretch, int, int]]:
        """Yield the stretches that some rows lie in, and which rows these are in their files."""
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

    def _take(
        self, at: Stretch, low: int, high: int, step: int = 1, into: np.ndarray | None = None
    ) -> Any:
        """Read some rows of the dataset of a stretch; return them, if they go into no array."""
        with self._lock:
            try:
                there = self._datasets.get((at.path, at.dataset))
                if there is None or not there[0].id.valid:  # its file has been closed meanwhile
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
                self._layout.check_unchanged(at.path)  # which would explain it
                rows = f"row {low}" if high == low + 1 else f"rows {low} to {high}"
                what = f"{rows} of {at.dataset[1:]!r} cannot be read: "
                raise as_told(at.path, error, what) from error

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
        dataset = self._files.open(at.path)[at.dataset]
        self._datasets[at.path, at.dataset] = dataset, readable(dataset)
        return self._datasets[at.path, at.dataset]


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
