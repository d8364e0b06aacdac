"""Reading: an HDF5 file as a source of batches, and as a sequence of rows.

    in a worker:  chunks in an order of the epoch -> this shard's stretch -> windows -> batches
    anywhere:     source[3], source[10:20], which a sampler of somebody else's asks for

HDF5 reads, and unpacks, whole chunks. So whole chunks are taken in random order, some of them
are read into a window, and rows are drawn from that: each chunk is read once an epoch, where
random rows would read one chunk for each row.

A reader belongs to the process that made it. What travels to workers is the path, and what was
found in the file when the source was made.
"""

from __future__ import annotations

import itertools
import operator
import os
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np

from enqueuer import arguments
from enqueuer.arrays import empty
from enqueuer.datasets.h5layout import Layout, layout_of
from enqueuer.datasets.h5reader import Reader
from enqueuer.errors import DataFileError, StateMismatch
from enqueuer.shards import Shard

# The default window. A worker holds at most twice as much, and its first batch waits until it is
# read. 16 chunks (16 MB of a packed file) were tried first: of a file sorted by class a batch of
# 64 rows then has 20 classes of 100, where a shuffle of all rows has 47.
_WINDOW_BYTES = 128 << 20
_WINDOW_BATCHES = 4  # the window has at least these, however large a row is
_ROW_BYTES = 32  # that a row in a window costs beside its data: two indices, copied once
_OBJECT_BYTES = 100  # of a Python object, such as a string, beside its data

# Pieces that each of several shards gets, about. A file with too few chunks is cut finer than
# its chunks, and several shards read the same chunk. Without that, a shard of a small sorted file
# would have few of its classes. Each shard reads no more than _PIECE_BYTES for that, unless it
# had fewer than _FEWEST_PIECES then: it would have the same rows in every epoch.
_PIECES = 64
_PIECE_BYTES = 64 << 20
_FEWEST_PIECES = 4

# Number of the way in which windows are made. It is part of a state, since another way gives the
# same rows in another order; states without it are of the first way.
_ORDER = 2

_inherited: list[Reader] = []  # of the process that this one was forked from: never touched


class HDF5Source:
    """The rows of an HDF5 file: a generator function of a shard, and a sequence.

    For `GeneratorEnqueuer` it yields batches. Without `shuffle` these are the slices of the file,
    in its order for any number of shards. With it, whole chunks come in an order that is new
    each epoch, and rows are shuffled within a window of several chunks; each row comes exactly
    once an epoch. Both depend on the enqueuer's `random_seed` and `shards` alone. Its `rank` and
    `world_size` deal the shards out to several training processes. It is resumed at once, without
    reading again what came before.

    For `OrderedEnqueuer`, for torch as a map-style dataset, and for yourself it is a sequence of
    rows: `len(source)`, `source[3]`, `source[10:20]`.

    The file is opened in each process that reads it, and looked at once when this is made: that
    it is whole, and all files that it refers to.

    Args:
        path: Of the file, written by `pack` or by anybody else.
        keys: What to read together. None, the default: a dict of all datasets in the file; a
            list of names: a dict of these; a tuple of names: a tuple in that order, such as
            `("x", "y")`; one name: its array alone.
        batch_size: How many rows a batch has; 32 by default.
        shuffle: Whether batches are drawn at random; False by default.
        window: Number of rows, at least, that are shuffled among each other. A worker has fewer
            than twice as many in memory, and one chunk more; the first batch of a shard comes
            when its first window has been read. A larger window mixes better. By default as many
            rows as 128 MiB hold, but at least 4 batches. Text and ragged rows are counted by the
            size of their files.
        rows: A slice of the rows, with step 1, as if the file had only these: one file for
            training and validation. None, the default: all.
        drop_last: Whether to leave out incomplete batches, and, of a shuffled epoch, those that
            not every shard has; False by default.
        allow_outside: Whether rows may be read from files that are not in the folder of the file:
            of external links, virtual datasets and external raw storage. True by default. Give
            False for a file that you do not trust, which could show you any file of yours.

    Raises:
        DataFileError: The file, or one that it refers to, is missing, broken or being written; a
            key is missing; lengths differ; a file lies outside, and `allow_outside` is False.
        TypeError: An argument has the wrong type, an open file for example.
        ValueError: An argument is out of its range.

    Example:
        >>> import os, tempfile, h5py
        >>> import numpy as np
        >>> from enqueuer import GeneratorEnqueuer
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = os.path.join(folder.name, "a.h5")
        >>> with h5py.File(path, "w") as file:
        ...     file["x"], file["y"] = np.eye(4), np.arange(4)
        >>> source = HDF5Source(path, keys=("x", "y"), batch_size=2)
        >>> for x, y in GeneratorEnqueuer(source, workers=2):
        ...     print(x.shape, y)
        (2, 4) [0 1]
        (2, 4) [2 3]
        >>> len(source), int(source[-1][1])
        (4, 3)
        >>> source.close()
        >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keys: str | Sequence[str] | None = None,
        batch_size: int = 32,
        *,
        shuffle: bool = False,
        window: int | None = None,
        rows: slice | None = None,
        drop_last: bool = False,
        allow_outside: bool = True,
    ) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(
                f"HDF5Source needs the path of a file, got {path!r}; an open file must not be "
                "carried to another process"
            )
        self._path = os.path.abspath(path)
        self._batch_size = arguments.positive("batch_size", batch_size)
        self._shuffle = bool(shuffle)
        self._drop_last = bool(drop_last)
        self._is_one, self._is_tuple = isinstance(keys, str), isinstance(keys, tuple)
        self._layout = layout_of(self._path, _names(keys), bool(allow_outside))
        self._names, count = _together(self._layout, is_asked=keys is not None)
        self._first, self._stop = _bounds(rows, count)
        # what has the largest rows costs most if its chunks are read twice
        starts = self._layout.starts(max(self._names, key=self._layout.row_bytes))
        self._pieces = _cut(starts, self._first, self._stop)
        self._window = self._default_window()
        if window is not None:
            self._window = arguments.positive("window", window)
        self._reader: Reader | None = None

    def __call__(self, shard: Shard) -> Iterator[Any]:
        """Return an iterator over the batches of a shard in its epoch; it has a `state_dict`."""
        return _Share(self, shard)

    def __len__(self) -> int:
        """Return how many rows there are."""
        return self._stop - self._first

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        """Return a row, or the rows of a slice.

        Raises:
            IndexError: There is no such row.
            TypeError: It is neither a number nor a slice.
            ValueError: The step of a slice is not positive.
            DataFileError: It cannot be read.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step < 1:
                raise ValueError(f"the step of a slice must be >= 1, got {step}")
            return self._formed(self._here().rows(self._first + start, self._first + stop, step))
        try:
            at = operator.index(index)
        except TypeError:
            raise TypeError(f"rows are taken by a number or a slice, got {index!r}") from None
        if not -len(self) <= at < len(self):
            raise IndexError(f"row {at} of {self._path} is out of range: it has {len(self)}")
        return self._formed(self._here().row(self._first + at % len(self)))

    def close(self) -> None:
        """Close the file in this process, if it was opened for single rows or slices.

        It is opened again when it is needed. Batches have files of their own, which are closed at
        the end of each shard.
        """
        if self._reader is not None and self._reader.pid == os.getpid():
            self._reader.close()
            self._reader = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def __repr__(self) -> str:
        keys = ", ".join(self._names)
        return f"<HDF5Source {self._path} ({keys}), {len(self)} rows>"

    # --- inside ---

    def _default_window(self) -> int:
        row_bytes = _ROW_BYTES + sum(map(self._layout.row_bytes, self._names))
        dtypes = [self._layout.dtypes[name] for name in self._names]
        objects = sum(dtype.hasobject for dtype in dtypes)
        if objects:
            # Of text and ragged rows h5py tells no size. They cannot be compressed, so their
            # files are at least as large as they are.
            files = sum(size for size, _ in self._layout.stamps.values())
            rows = self._layout.columns[self._names[0]].shape[0]
            row_bytes += objects * _OBJECT_BYTES + files // max(1, rows)
        return max(_WINDOW_BYTES // row_bytes, _WINDOW_BATCHES * self._batch_size)

    def _wanted_pieces(self, shards: int) -> int:
        """Return into how many pieces, about, the rows are cut if they have too few chunks."""
        if shards == 1:
            return _FEWEST_PIECES  # the windows of a single shard have rows of all pieces
        longest = max((stop - start for start, stop in self._pieces), default=1)
        piece_bytes = longest * sum(map(self._layout.row_bytes, self._names))
        affordable = _PIECE_BYTES // max(1, piece_bytes)
        return shards * min(_PIECES, max(_FEWEST_PIECES, affordable))

    def _here(self) -> Reader:
        """Return the reader of this process."""
        reader = self._reader
        if reader is not None and reader.pid != os.getpid():
            _inherited.append(reader)  # closing its files here would be felt there
            reader = None
        if reader is None:
            # two threads may both come here: one reader then ends with its last use
            reader = self._reader = Reader(self._layout, self._names)
        return reader

    def _identity(self) -> dict[str, int]:
        """Return what a position in a shard depends on."""
        own = {"first": self._first, "rows": len(self), "batch_size": self._batch_size}
        if not self._shuffle:
            return {**own, "window": 0, "chunks": 0}
        return {**own, "window": self._window, "chunks": len(self._pieces), "order": _ORDER}

    def _formed(self, found: dict[str, Any]) -> Any:
        if self._is_one:
            return next(iter(found.values()))
        return tuple(found.values()) if self._is_tuple else found

    def _batches(self, shard: Shard, first: int) -> Generator[Any]:
        """Yield the batches of a shard from number `first` on."""
        with Reader(self._layout, self._names) as reader:
            make = self._shuffled if self._shuffle else self._plain
            for batch in make(reader, shard, first):
                yield self._formed(batch)
                del batch

    def _plain(self, reader: Reader, shard: Shard, first: int) -> Iterator[dict[str, Any]]:
        size = self._batch_size
        rows = len(self) - len(self) % size if self._drop_last else len(self)
        for start in shard.split(range(self._first, self._first + rows, size))[first:]:
            yield reader.rows(start, min(start + size, self._first + rows))

    def _shuffled(self, reader: Reader, shard: Shard, first: int) -> Iterator[dict[str, Any]]:
        size = self._batch_size
        # all shards must agree on the order of the chunks, so it is not drawn from shard.rng
        rng = np.random.default_rng(
            np.random.SeedSequence(shard.random_seed, spawn_key=(shard.epoch,))
        )
        pieces = _finer(self._wanted_pieces(shard.count), self._pieces)
        order = [pieces[at] for at in rng.permutation(len(pieces))]
        left = len(self) // shard.count // size if self._drop_last else sys.maxsize
        # Which rows come is drawn without reading any, so that what came before can be left out.
        numbers, rest, number = np.empty(0, int), None, 0
        for window in _windows(_stretch(order, shard), self._window):
            before = numbers
            numbers = np.concatenate([before, *(np.arange(*piece) for piece in window)])
            drawn = shard.rng.permutation(len(numbers))
            full = len(numbers) - len(numbers) % size
            if number + full // size <= first:
                rest = None
            else:
                if rest is None and len(before):
                    rest = reader.pool([(row, row + 1) for row in before.tolist()], None)
                pool = reader.pool(window, rest)
                del rest
                for start in range(max(0, first - number) * size, full, size):
                    if number + start // size >= left:
                        return  # of the shards that have one row more than others
                    yield _taken(pool, drawn[start : start + size])
                rest = _taken(pool, drawn[full:])
                del pool  # or there would be two while the next one is read
            number += full // size
            numbers = numbers[drawn[full:]]
        if not self._drop_last and len(numbers) and number >= first:
            if rest is None:
                rest = reader.pool([(row, row + 1) for row in numbers.tolist()], None)
            yield rest


class _Share:
    """The batches of one shard in one epoch."""

    def __init__(self, source: HDF5Source, shard: Shard) -> None:
        self._source = source
        self._shard = shard
        self._batches: Generator[Any] | None = None
        self._at = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._source._batches(self._shard, self._at)
        batch = next(self._batches)
        self._at += 1
        return batch

    def close(self) -> None:
        """Close the files that are open for it."""
        if self._batches is not None:
            self._batches.close()

    def state_dict(self) -> dict[str, int]:
        return {"batch": self._at, **self._source._identity()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        own = self._source._identity()
        if self._source._shuffle and state.get("window") and state.get("order") != own["order"]:
            raise StateMismatch(
                "the state was saved by another version of enqueuer, whose HDF5Source shuffles "
                "rows in another order; load it with that version, or begin a new epoch"
            )
        for key, value in own.items():
            if state.get(key) != value:
                advice = ""
                if key == "window" and value and state.get(key):
                    advice = f"; to go on, make the source with window={state[key]}"
                raise StateMismatch(
                    f"the state is of {key}={state.get(key)}, but here it is {value}{advice}"
                )
        self._at = state["batch"]


def _names(keys: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if keys is None:
        return None
    names = (keys,) if isinstance(keys, str) else tuple(keys)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"keys must be a name, names in a list or tuple, or None, got {keys!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"keys must differ, got {keys!r}")
    return names


def _bounds(rows: slice | None, count: int) -> tuple[int, int]:
    if rows is None:
        return 0, count
    if not isinstance(rows, slice):
        raise TypeError(f"rows must be a slice or None, got {rows!r}")
    start, stop, step = rows.indices(count)
    if step != 1:
        raise ValueError(f"the step of rows must be 1, got {step}")
    return start, max(start, stop)


def _together(layout: Layout, is_asked: bool) -> tuple[tuple[str, ...], int]:
    """Return the datasets that are read together, and how many rows these have."""
    path, shapes = layout.path, {name: column.shape for name, column in layout.columns.items()}
    if not is_asked:
        shapes = {name: shape for name, shape in shapes.items() if shape}
    if not shapes:
        raise DataFileError(f"{path}: there is no dataset with rows in it", path)
    for name, shape in shapes.items():
        if not shape:
            raise DataFileError(f"{path}: {name!r} is a single value and has no rows", path)
        if name in layout.unreadable:
            raise DataFileError(
                f"{path}: {name!r} is a virtual dataset of a kind that is not read, since "
                f"{layout.unreadable[name]}; copy it into a dataset of its own",
                path,
            )
    if len({shape[0] for shape in shapes.values()}) > 1:
        told = ", ".join(f"{name}: {shape[0]}" for name, shape in shapes.items())
        raise DataFileError(
            f"{path}: datasets that are read together must have equally many rows, got {told}; "
            "name those that belong together with keys=",
            path,
        )
    return tuple(shapes), next(iter(shapes.values()))[0]


def _cut(starts: Iterable[int], first: int, stop: int) -> tuple[tuple[int, int], ...]:
    """Return the blocks between two rows, as (start, stop)."""
    edges = [first, *(start for start in starts if first < start < stop), stop]
    return tuple(itertools.pairwise(edges)) if stop > first else ()


def _finer(count: int, pieces: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return pieces cut into smaller ones, as far as there are rows, if they are too few.

    Of a file with few chunks each shard would have the same rows in every epoch.
    """
    cuts = max(1, round(count / max(1, len(pieces))))
    finer: list[tuple[int, int]] = []
    for start, stop in pieces:
        edges = sorted({start + (stop - start) * cut // cuts for cut in range(cuts + 1)})
        finer += itertools.pairwise(edges)
    return finer


def _stretch(pieces: Iterable[tuple[int, int]], shard: Shard) -> Iterator[tuple[int, int]]:
    """Yield a shard's stretch of pieces in a row; shards differ by at most one row.

    The pieces at its ends may be cut, and are then read by two shards.
    """
    pieces = list(pieces)
    total = sum(stop - start for start, stop in pieces)
    begin = total * shard.index // shard.count
    end = total * (shard.index + 1) // shard.count
    passed = 0
    for start, stop in pieces:
        low, high = max(begin - passed, 0), min(end - passed, stop - start)
        if low < high:
            yield start + low, start + high
        passed += stop - start


def _windows(pieces: Iterable[tuple[int, int]], rows: int) -> Iterator[list[tuple[int, int]]]:
    """Yield pieces in groups of at least so many rows, which are about equally many in each.

    A last group of what is left over would have few pieces, which mix badly.
    """
    pieces = list(pieces)
    total = sum(stop - start for start, stop in pieces)
    count = max(1, total // rows)
    window: list[tuple[int, int]] = []
    had, made = 0, 0
    for start, stop in pieces:
        window.append((start, stop))
        had += stop - start
        if had * count >= total * (made + 1):
            yield window
            window, made = [], had * count // total


def _taken(pool: Mapping[str, np.ndarray], at: np.ndarray) -> dict[str, np.ndarray]:
    """Return some rows of each array, in memory that a worker process need not copy again."""
    return {name: _rows_of(array, at) for name, array in pool.items()}


def _rows_of(array: np.ndarray, at: np.ndarray) -> np.ndarray:
    if array.dtype.hasobject:
        taken: np.ndarray = array[at]
        return taken
    out = empty((len(at), *array.shape[1:]), array.dtype)
    # the indices are right; with "raise" numpy would write to a copy first
    return np.take(array, at, axis=0, out=out, mode="clip")
