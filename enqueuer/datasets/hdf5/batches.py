"""Which rows make a batch: slices of the file in its order, or shuffled rows of whole chunks.

    edges of chunks -> pieces -> a shard's stretch of the shuffled pieces -> windows -> batches

HDF5 reads, and unpacks, whole chunks. So whole chunks are taken in random order, some of them are
read into a window, and rows are drawn from that: each chunk is read once an epoch, where random
rows would read one chunk for each row.

Pieces are ranges of rows: an array with a start and a stop in each line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from enqueuer.datasets.epochs import take_rows
from enqueuer.datasets.hdf5.layout import Layout
from enqueuer.datasets.hdf5.reader import RowReader
from enqueuer.workers.shards import Shard

Rows = Mapping[str, np.ndarray]


def finer(count: int, edges: np.ndarray) -> np.ndarray:
    """Return about `count` pieces, as far as there are rows, by cutting pieces if they are too few.

    Of a file with few chunks each shard would have the same rows in every epoch.

    Example:
        >>> finer(4, np.array([0, 10, 13])).tolist()
        [[0, 5], [5, 10], [10, 11], [11, 13]]
    """
    low, high = edges[:-1, None], edges[1:, None]
    cuts = max(1, round(count / max(1, len(low))))
    parts = low + (high - low) * np.arange(cuts + 1) // cuts
    pieces = np.stack([parts[:, :-1].ravel(), parts[:, 1:].ravel()], axis=1)
    return pieces[pieces[:, 0] < pieces[:, 1]]


def spread(count: int, groups: int, rng: np.random.Generator) -> np.ndarray:
    """Return a random order of pieces in which each group has some of all parts of a file.

    Pieces that follow each other in the file, as many as there are groups, go to different
    groups. A file sorted by class so gives each window about the same number of pieces of each
    class; a plain permutation would give it a third of the classes not at all.

    Args:
        count: Number of pieces.
        groups: Number of groups: windows, over all shards.
        rng: Random generator of the epoch.

    Example:
        >>> spread(6, 3, np.random.default_rng(7)).reshape(3, 2) // 3
        array([[0, 1],
               [1, 0],
               [0, 1]])
    """
    rounds = np.tile(np.arange(groups), (-(-count // groups), 1))
    group_of = rng.permuted(rounds, axis=1).reshape(-1)[:count]
    return np.lexsort((rng.random(count), group_of))


def stretch(pieces: np.ndarray, index: int, count: int) -> np.ndarray:
    """Return a shard's stretch of consecutive pieces; shards differ by at most one row.

    The pieces at its ends may be cut, and are then read by two shards.

    Example:
        >>> stretch(np.array([(0, 4), (8, 12)]), index=0, count=2).tolist()
        [[0, 4]]
        >>> stretch(np.array([(0, 4), (8, 12)]), index=1, count=3).tolist()
        [[2, 4], [8, 9]]
    """
    start, stop = pieces[:, :1], pieces[:, 1:]
    ends = np.cumsum(stop - start)[:, None]
    bounds = (stop - start).sum() * np.array([index, index + 1]) // count
    found: np.ndarray = np.clip(stop - ends + bounds, start, stop)
    return found[found[:, 0] < found[:, 1]]


def windows(pieces: np.ndarray, rows: int) -> list[np.ndarray]:
    """Return pieces in groups with about equally many rows, at least `rows` on average.

    A smaller last group would have few pieces, which mix badly.

    Example:
        >>> pieces = np.array([(0, 4), (4, 8), (8, 12)])
        >>> [window.tolist() for window in windows(pieces, rows=5)]
        [[[0, 4], [4, 8]], [[8, 12]]]
        >>> [window.tolist() for window in windows(pieces, rows=4)]
        [[[0, 4]], [[4, 8]], [[8, 12]]]
    """
    passed = np.cumsum(pieces[:, 1] - pieces[:, 0])
    total = max(1, int(passed[-1:].sum()))
    full = passed * max(1, total // rows) // total
    return np.split(pieces, np.flatnonzero(np.diff(full, prepend=0)) + 1)[:-1]


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
_ORDER = 3


@dataclass(frozen=True)
class ReadPlan:
    """The rows of an epoch, and how batches are made of them.

    Attributes:
        layout: Layout of the file.
        names: Names of the columns that are read together.
        first: First row.
        rows: Number of rows in an epoch.
        batch_size: Number of rows in a batch.
        drop_last: Whether incomplete batches are left out.
        window: Number of rows, at least, that are shuffled among each other; 0: rows are not
            shuffled.
        edges: The first rows of the pieces that are shuffled, which are chunks, and the row behind
            the last one.
    """

    layout: Layout
    names: tuple[str, ...]
    first: int
    rows: int
    batch_size: int
    drop_last: bool
    window: int
    edges: np.ndarray

    def identity(self) -> dict[str, int]:
        """Return the values on which a position in a shard depends."""
        common = {"first": self.first, "rows": self.rows, "batch_size": self.batch_size}
        if not self.window:
            return {**common, "window": 0, "chunks": 0}
        return {**common, "window": self.window, "chunks": len(self.edges) - 1, "order": _ORDER}

    def batches(self, reader: RowReader, shard: Shard, first: int) -> Iterator[Rows]:
        """Yield the batches of a shard from number `first` on."""
        if self.window:
            yield from self._shuffled(reader, shard, first)
            return
        size = self.batch_size
        stop = self.first + (self.rows - self.rows % size if self.drop_last else self.rows)
        for start in shard.split(range(self.first, stop, size))[first:]:
            yield reader.read([(start, min(start + size, stop))])

    def _shuffled(self, reader: RowReader, shard: Shard, first: int) -> Iterator[Rows]:
        size = self.batch_size
        left = self.rows // shard.count // size if self.drop_last else sys.maxsize
        # Which rows come is drawn without reading any, so earlier batches can be left out.
        numbers, rest, number = np.empty(0, int), None, 0
        for window in windows(self._pieces_of(shard), self.window):
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
        if not self.drop_last and len(numbers) and number >= first:
            yield _rows_by_number(reader, numbers) if rest is None else rest

    def _pieces_of(self, shard: Shard) -> np.ndarray:
        """Return the pieces of a shard in the order of its epoch."""
        # All shards must agree on the order of the pieces, so it is not drawn from shard.rng.
        seed = np.random.SeedSequence(shard.random_seed, spawn_key=(shard.epoch,))
        pieces = finer(self._wanted_pieces(shard.count), self.edges)
        groups = shard.count * max(1, self.rows // shard.count // self.window)
        order = spread(len(pieces), groups, np.random.default_rng(seed))
        return stretch(pieces[order], shard.index, shard.count)

    def _wanted_pieces(self, shards: int) -> int:
        """Return into about how many pieces the rows are cut if they have too few chunks."""
        # The windows of a single shard have rows of all pieces.
        if shards == 1:
            return _FEWEST_PIECES
        longest = int(np.diff(self.edges).max(initial=0))
        piece_bytes = longest * sum(map(self.layout.row_bytes, self.names))
        affordable = _PIECE_BYTES // max(1, piece_bytes)
        return shards * min(_PIECES, max(_FEWEST_PIECES, affordable))


def edges_of(layout: Layout, names: tuple[str, ...], first: int, stop: int) -> np.ndarray:
    """Return the edges of the chunks between two rows."""
    # To read a chunk twice costs most in the column with the largest rows.
    starts = layout.starts(max(names, key=layout.row_bytes))
    return np.unique(np.clip([first, *starts, stop], first, stop))


def default_window(layout: Layout, names: tuple[str, ...], batch_size: int) -> int:
    """Return the number of rows that `_WINDOW_BYTES` hold, but at least some batches."""
    row_bytes = _ROW_BYTES + sum(map(layout.row_bytes, names))
    objects = sum(layout.dtypes[name].hasobject for name in names)
    if objects:
        # h5py has no size for text and ragged rows. They cannot be compressed, so their files
        # are at least as large as they are.
        files = sum(size for size, _ in layout.stamps.values())
        rows = layout.columns[names[0]].shape[0]
        row_bytes += objects * _OBJECT_BYTES + files // max(1, rows)
    return max(_WINDOW_BYTES // row_bytes, _WINDOW_BATCHES * batch_size)


def _rows_by_number(reader: RowReader, numbers: np.ndarray) -> Rows:
    return reader.read([(row, row + 1) for row in numbers.tolist()])


def _taken(pool: Rows, indices: np.ndarray) -> Rows:
    return {name: take_rows(array, indices) for name, array in pool.items()}
