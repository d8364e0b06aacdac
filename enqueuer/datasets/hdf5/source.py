"""Reading: an HDF5 file as a source of batches, and as a sequence of rows.

    in a worker:  batches of a shard, which are slices of the file in its order, or, with shuffle,
                  edges of chunks -> pieces -> a shard's stretch of the shuffled pieces
                  -> windows -> batches
    anywhere:     source[3], source[10:20], for a sampler or for yourself

HDF5 reads, and unpacks, whole chunks. So whole chunks are taken in random order, some of them are
read into a window, and rows are drawn from that: each chunk is read once an epoch, where random
rows would read one chunk for each row. Pieces are ranges of rows: an array with a start and a stop
in each line.

A reader belongs to the process that made it. Workers get the path, and the layout that was found
when the source was made.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np

from enqueuer.common import checks
from enqueuer.common.text import printable
from enqueuer.datasets.arrays import ShardBatches, take_rows
from enqueuer.datasets.hdf5.files import add_filter_folders, filter_folders, key_names
from enqueuer.datasets.hdf5.rows import Axis, Layout, RowReader, joined, layout_of
from enqueuer.errors import DataFileError
from enqueuer.order.position import fingerprint_of, shortened
from enqueuer.workers.shards import Shard
from enqueuer.workers.tasks import steps_in

Path = str | os.PathLike[str]
Paths = Path | Sequence[Path]
Rows = Mapping[str, np.ndarray]


# The default window. A worker holds at most twice as much, and its first batch waits until it is
# read. It holds 128 chunks of a packed file: of a file sorted by class a batch of 64 rows then has
# 45 classes of 100, where a shuffle of all rows has 47. With 16 chunks it would have 20.
_WINDOW_BYTES = 128 << 20
# Smallest number of batches in a window, however large a row is.
_WINDOW_BATCHES = 4
# Bytes that a row in a window needs beside its data: two indices, copied once.
_ROW_BYTES = 32
# Bytes that a Python object, such as a string, needs beside its data.
_OBJECT_BYTES = 100

# Pieces that each of several shards gets, about. A file with too few chunks is cut finer than
# its chunks, and several shards read the same chunk. Without that, a shard of a small sorted file
# would have few of its classes. Each shard reads no more than _PIECE_BYTES for that, unless it
# had fewer than _FEWEST_PIECES then: it would have the same rows in every epoch.
_PIECES = 112
_PIECE_BYTES = 112 << 20
_FEWEST_PIECES = 4

# Number of the method that makes windows. It is part of a state, since another method gives the
# same rows in another order; states without it are of the first method.
_SHUFFLE_VERSION = 3


@checks.suggests_options
class HDF5Source:
    """The rows of an HDF5 file: a generator function of a shard, and a sequence.

    For `GeneratorEnqueuer` it yields batches. Without `shuffle` these are the slices of the file,
    in its order for any number of shards. With `shuffle`, whole chunks come in a new order each
    epoch, and rows are shuffled within a window of several chunks. Each row comes exactly once an
    epoch. The order depends on the enqueuer's `random_seed` and `shards` alone. Its `rank` and
    `world_size` divide the shards among training processes. It resumes at once, without reading
    earlier rows.

    For `OrderedEnqueuer`, for torch as a map-style dataset, and for yourself it is a sequence of
    rows: `len(source)`, `source[3]`, `source[10:20]`.

    Each process that reads the file opens it. The constructor checks that the file and its parts
    are whole.

    Args:
        path: Path of the file, written by `pack` or by any other program; or a list of paths of
            files whose datasets are alike. The rows of the second follow those of the first.
        keys: Names of the datasets that are read together. None, the default, gives a dict of all
            datasets in the file. A list of names gives a dict of these, a tuple of names, such as
            `("x", "y")`, a tuple in that order, and one name its array alone.
        batch_size: Number of rows in a batch; 32 by default.
        shuffle: Whether batches are drawn at random; False by default.
        window: Least number of rows that are shuffled among each other. A worker has fewer than
            twice as many in memory, and one chunk more. The first batch of a shard comes when its
            first window has been read. A larger window mixes better. By default as many
            rows as 128 MiB hold, but at least 4 batches. Text and ragged rows are counted by the
            size of their files.
        rows: A slice of the rows, with step 1, as if the file had only these: one file for
            training and validation. None, the default: all.
        axis: Axis of a dataset along which its rows lie; 0 by default. Or a dict of those that are
            another one, such as `{"x": -1}` for images of MATLAB. In a batch, rows come first.
        drop_last: Whether to leave out incomplete batches, and, of a shuffled epoch, those that
            not every shard has; False by default.
        allow_outside: Whether rows may be read from any file to which this one refers; True by
            default. Give False for a file that you do not trust, which could show you any file of
            yours: files that are not in its folder, external raw storage and virtual datasets that
            `pack` has not made are refused then.

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
        path: Paths,
        keys: str | Sequence[str] | None = None,
        batch_size: int = 32,
        *,
        shuffle: bool = False,
        window: int | None = None,
        rows: slice | None = None,
        axis: Axis = 0,
        drop_last: bool = False,
        allow_outside: bool = True,
    ) -> None:
        self._paths = _absolute(path)
        self._is_one, self._is_tuple = isinstance(keys, str), isinstance(keys, tuple)
        names = _names(keys)
        layouts = [layout_of(path, names, bool(allow_outside), axis) for path in self._paths]
        self._layout = joined([_together(layout, names is not None) for layout in layouts])
        self._names = tuple(self._layout.columns)
        self._rows = _bounds(rows, self._layout.rows)
        self._size = checks.positive("batch_size", batch_size)
        self._drop_last = bool(drop_last)
        window = checks.optional(checks.positive)("window", window)
        # Least number of rows that are shuffled among each other; 0: rows are not shuffled.
        self._window = (window or _default_window(self._layout, self._size)) if shuffle else 0
        self._edges = _edges_of(self._layout, self._rows)
        # The values on which a position in a shard depends.
        self._identity = {
            "first": self._rows.start,
            "rows": len(self),
            "batch_size": self._size,
            "window": self._window,
            "chunks": len(self._edges) - 1 if shuffle else 0,
            **({"shuffle_version": _SHUFFLE_VERSION} if shuffle else {}),
            **_axes(axis, self._names),
        }
        # An interrupted `pack` of this source is resumed only if all plain attributes have the same
        # names and values.
        self._reader = RowReader(self._layout)

    def __call__(self, shard: Shard, first_item: int = 0) -> Iterator[Any]:
        """Return an iterator over the batches of a shard from one on; it has a `state_dict`."""
        return ShardBatches(functools.partial(self._batches, shard), self._identity, first_item)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        """Return a row, or the rows of a slice.

        Raises:
            IndexError: There is no such row.
            TypeError: `index` is neither a number nor a slice.
            ValueError: The step of a slice is not positive.
            DataFileError: The row cannot be read.
        """
        if not isinstance(index, slice):
            at = operator.index(index)
            if not -len(self) <= at < len(self):
                raise IndexError(f"row {at} of {self._where} is out of range: it has {len(self)}")
            row = self._rows[at]
            columns = self._own_reader().read([(row, row + 1)])
            return self._formed({name: column[0] for name, column in columns.items()})
        found = self._rows[index]
        if found.step < 1:
            raise ValueError(f"the step of a slice must be >= 1, got {found.step}")
        return self._formed(self._own_reader().read([(found.start, found.stop)], found.step))

    def close(self) -> None:
        """Close the file in this process, if it was opened for single rows or slices.

        It is opened again when it is needed. Batches have files of their own, which are closed at
        the end of each shard.
        """
        self._own_reader().close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None, "_folders": filter_folders()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        add_filter_folders(state.pop("_folders"))
        self.__dict__.update(state, _reader=RowReader(state["_layout"]))

    @property
    def _where(self) -> str:
        first, *others = self._paths
        return f"{first} and {len(others)} more" if others else first

    def __repr__(self) -> str:
        keys = ", ".join(self._names)
        # A name in a file may have characters that a terminal obeys.
        return printable(f"<HDF5Source {self._where} ({keys}), {len(self)} rows>")

    def _batches(self, shard: Shard, first: int) -> Generator[Any]:
        with contextlib.closing(RowReader(self._layout)) as reader:
            make = self._shuffled if self._window else self._in_order
            # This frame refers to no batch.
            yield from map(self._formed, make(reader, shard, first))

    def _in_order(self, reader: RowReader, shard: Shard, first: int) -> Iterator[Rows]:
        """Yield the batches of a shard, slices of the file, from number `first` on."""
        size = self._size
        rows = self._rows[: steps_in(len(self), size, self._drop_last) * size]
        for start in shard.split(rows[::size])[first:]:
            yield reader.read([(start, min(start + size, rows.stop))])

    def _shuffled(self, reader: RowReader, shard: Shard, first: int) -> Iterator[Rows]:
        """Yield the batches of a shard, drawn from one window after the other."""
        size = self._size
        left = len(self) // shard.count // size if self._drop_last else sys.maxsize
        # Which rows come is drawn without reading any, so earlier batches can be left out.
        numbers, rest, number = np.empty(0, int), None, 0
        for window in _windows(self._pieces_of(shard), self._window):
            before = numbers
            numbers = np.concatenate([before, *(np.arange(*piece) for piece in window)])
            drawn = shard.rng.permutation(len(numbers))
            full = len(numbers) - len(numbers) % size
            if number + full // size <= first:
                rest = None
            else:
                if rest is None and len(before):
                    rest = _rows_by_number(reader, before)
                pool = reader.read([(start, stop) for start, stop in window.tolist()], rest=rest)
                del rest
                for start in range(max(0, first - number) * size, full, size):
                    # Some shards have one row more than others.
                    if number + start // size >= left:
                        return
                    yield _taken(pool, drawn[start : start + size])
                rest = _taken(pool, drawn[full:])
                # Otherwise there would be two pools while the next one is read.
                del pool
            number += full // size
            numbers = numbers[drawn[full:]]
        if not self._drop_last and len(numbers) and number >= first:
            yield _rows_by_number(reader, numbers) if rest is None else rest

    def _pieces_of(self, shard: Shard) -> np.ndarray:
        """Return the pieces of a shard in the order of its epoch."""
        edges = self._edges
        # The windows of a single shard have rows of all pieces.
        wanted = _FEWEST_PIECES
        if shard.count > 1:
            row_bytes = sum(column.row_bytes for column in self._layout.columns.values())
            piece_bytes = int(np.diff(edges).max(initial=0)) * row_bytes
            affordable = _PIECE_BYTES // max(1, piece_bytes)
            wanted = shard.count * min(_PIECES, max(_FEWEST_PIECES, affordable))
        pieces = _finer(wanted, edges)
        groups = shard.count * max(1, len(self) // shard.count // self._window)
        # All shards must agree on the order of the pieces, so it is not drawn from shard.rng.
        seed = np.random.SeedSequence(shard.random_seed, spawn_key=(shard.epoch,))
        order = _spread(len(pieces), groups, np.random.default_rng(seed))
        return _stretch(pieces[order], shard.index, shard.count)

    def _own_reader(self) -> RowReader:
        """Return the reader of this process."""
        if self._reader.pid != os.getpid():
            # If two threads come here at a time, one of the readers ends with its last use.
            self._reader = RowReader(self._layout)
        return self._reader

    def _formed(self, found: Mapping[str, Any]) -> Any:
        if self._is_one:
            return next(iter(found.values()))
        return tuple(found.values()) if self._is_tuple else found


@fingerprint_of.register
def _fingerprint_of(source: HDF5Source) -> dict[str, Any]:
    # A batch that is a dict is the same with its keys in another order.
    names = source._names if source._is_tuple else sorted(source._names)
    name, keys = type(source).__qualname__, shortened(", ".join(names))
    files = shortened(", ".join(map(os.path.basename, source._paths)))
    return {"name": name, "file": files, "keys": keys, **source._identity}


def _absolute(given: Paths) -> list[str]:
    paths: Sequence[Any] = given if isinstance(given, (list, tuple)) else [given]
    if not paths:
        raise ValueError("HDF5Source needs at least one file, got an empty list")
    return [os.path.abspath(path) for path in paths]


def _names(keys: str | Sequence[str] | None) -> tuple[str, ...] | None:
    return None if keys is None else key_names("keys", [keys] if isinstance(keys, str) else keys)


def _axes(axis: Axis, names: Sequence[str]) -> dict[str, int]:
    """Return the axes that are not the first, as values on which a position depends."""
    axes = axis if isinstance(axis, Mapping) else dict.fromkeys(names, axis)
    if unknown := sorted(axes.keys() - names):
        raise ValueError(f"axis is for {unknown}, but the keys are {list(names)}")
    return {f"axis of {name}": at for name, at in axes.items() if at}


def _bounds(rows: slice | None, count: int) -> range:
    if not isinstance(rows, (slice, type(None))):
        raise TypeError(f"rows must be a slice or None, got {rows!r}")
    found = range(count)[rows or slice(None)]
    if found.step != 1:
        raise ValueError(f"the step of rows must be 1, got {found.step}")
    return found


def _together(layout: Layout, is_asked: bool) -> Layout:
    """Return a layout of the datasets that are read together."""
    layout.check_readable()
    path, columns = layout.path, layout.columns
    if not is_asked:
        columns = {name: column for name, column in columns.items() if column.shape}
    if not columns:
        raise DataFileError(f"{path}: there is no dataset with rows in it", path)
    counts = {name: column.shape[0] if column.shape else None for name, column in columns.items()}
    if None in counts.values() or len(set(counts.values())) > 1:
        raise DataFileError(
            f"{path}: datasets that are read together must have equally many rows, got {counts}; "
            "name those that belong together with keys=",
            path,
        )
    layout.columns = columns
    return layout


def _rows_by_number(reader: RowReader, numbers: np.ndarray) -> Rows:
    return reader.read([(row, row + 1) for row in numbers.tolist()])


def _taken(pool: Rows, indices: np.ndarray) -> Rows:
    return {name: take_rows(array, indices) for name, array in pool.items()}


def _finer(count: int, edges: np.ndarray) -> np.ndarray:
    """Return about `count` pieces, as far as there are rows, by cutting pieces if they are too few.

    Of a file with few chunks each shard would have the same rows in every epoch.

    Example:
        >>> _finer(4, np.array([0, 10, 13])).tolist()
        [[0, 5], [5, 10], [10, 11], [11, 13]]
    """
    low, high = edges[:-1, None], edges[1:, None]
    cuts = max(1, round(count / max(1, len(low))))
    parts = low + (high - low) * np.arange(cuts + 1) // cuts
    pieces = np.stack([parts[:, :-1].ravel(), parts[:, 1:].ravel()], axis=1)
    return pieces[pieces[:, 0] < pieces[:, 1]]


def _spread(count: int, groups: int, rng: np.random.Generator) -> np.ndarray:
    """Return a random order of pieces in which each group has some of all parts of a file.

    Pieces that follow each other in the file, as many as there are groups, go to different
    groups. A file sorted by class so gives each window about the same number of pieces of each
    class; a plain permutation would give it a third of the classes not at all.

    Args:
        count: Number of pieces.
        groups: Number of groups: windows, over all shards.
        rng: Random generator of the epoch.

    Example:
        >>> _spread(6, 3, np.random.default_rng(7)).reshape(3, 2) // 3
        array([[0, 1],
               [1, 0],
               [0, 1]])
    """
    rounds = np.tile(np.arange(groups), (-(-count // groups), 1))
    group_of = rng.permuted(rounds, axis=1).reshape(-1)[:count]
    return np.lexsort((rng.random(count), group_of))


def _stretch(pieces: np.ndarray, index: int, count: int) -> np.ndarray:
    """Return a shard's stretch of consecutive pieces; shards differ by at most one row.

    The pieces at its ends may be cut, and are then read by two shards.

    Example:
        >>> _stretch(np.array([(0, 4), (8, 12)]), index=0, count=2).tolist()
        [[0, 4]]
        >>> _stretch(np.array([(0, 4), (8, 12)]), index=1, count=3).tolist()
        [[2, 4], [8, 9]]
    """
    start, stop = pieces[:, :1], pieces[:, 1:]
    ends = np.cumsum(stop - start)[:, None]
    bounds = (stop - start).sum() * np.array([index, index + 1]) // count
    found: np.ndarray = np.clip(stop - ends + bounds, start, stop)
    return found[found[:, 0] < found[:, 1]]


def _windows(pieces: np.ndarray, rows: int) -> list[np.ndarray]:
    """Return pieces in groups with about equally many rows, at least `rows` on average.

    A smaller last group would have few pieces, which mix badly.

    Example:
        >>> pieces = np.array([(0, 4), (4, 8), (8, 12)])
        >>> [window.tolist() for window in _windows(pieces, rows=5)]
        [[[0, 4], [4, 8]], [[8, 12]]]
        >>> [window.tolist() for window in _windows(pieces, rows=4)]
        [[[0, 4]], [[4, 8]], [[8, 12]]]
    """
    passed = np.cumsum(pieces[:, 1] - pieces[:, 0])
    total = max(1, int(passed[-1:].sum()))
    full = passed * max(1, total // rows) // total
    return np.split(pieces, np.flatnonzero(np.diff(full, prepend=0)) + 1)[:-1]


def _edges_of(layout: Layout, rows: range) -> np.ndarray:
    """Return the edges of the chunks with these rows."""
    # To read a chunk twice costs most in the column with the largest rows.
    largest = max(layout.columns.values(), key=lambda column: column.row_bytes)
    starts = [rows.start, *largest.starts(), max(rows.start, rows.stop)]
    return np.unique(np.clip(starts, rows.start, starts[-1]))


def _default_window(layout: Layout, batch_size: int) -> int:
    """Return the number of rows that `_WINDOW_BYTES` hold, but at least some batches."""
    columns = layout.columns.values()
    row_bytes = _ROW_BYTES + sum(column.row_bytes for column in columns)
    objects = [column for column in columns if column.kind.dtype.hasobject]
    if objects:
        # h5py has no size for text and ragged rows. They cannot be compressed, so their files
        # are at least as large as they are.
        files = sum(size for size, _ in layout.stamps.values())
        row_bytes += len(objects) * _OBJECT_BYTES + files // max(1, layout.rows)
    return max(_WINDOW_BYTES // row_bytes, _WINDOW_BATCHES * batch_size)
