"""Which rows make a batch: slices of the file in its order, or shuffled rows of whole chunks.

    edges of chunks -> pieces -> a shard's stretch of the shuffled pieces -> windows -> batches

HDF5 reads, and unpacks, whole chunks. So whole chunks are taken in random order, some of them are
read into a window, and rows are drawn from that: each chunk is read once an epoch, where random
rows would read one chunk for each row.

Pieces are ranges of rows: an array with a start and a stop in each line.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from enqueuer.datasets.hdf5.rows import ColumnLayout, Layout
from enqueuer.workers.shards import Shard


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
ORDER = 3


def pieces_of(shard: Shard, edges: np.ndarray, window: int, row_bytes: int) -> np.ndarray:
    """Return the pieces of a shard in the order of its epoch.

    Args:
        shard: The shard.
        edges: The edges of the chunks that are shuffled.
        window: Number of rows in a window.
        row_bytes: Size of a row of all columns.
    """
    # The windows of a single shard have rows of all pieces.
    wanted = _FEWEST_PIECES
    if shard.count > 1:
        piece_bytes = int(np.diff(edges).max(initial=0)) * row_bytes
        affordable = _PIECE_BYTES // max(1, piece_bytes)
        wanted = shard.count * min(_PIECES, max(_FEWEST_PIECES, affordable))
    pieces = finer(wanted, edges)
    groups = shard.count * max(1, int(edges[-1] - edges[0]) // shard.count // window)
    # All shards must agree on the order of the pieces, so it is not drawn from shard.rng.
    seed = np.random.SeedSequence(shard.random_seed, spawn_key=(shard.epoch,))
    order = spread(len(pieces), groups, np.random.default_rng(seed))
    return stretch(pieces[order], shard.index, shard.count)


def edges_of(columns: Mapping[str, ColumnLayout], rows: range) -> np.ndarray:
    """Return the edges of the chunks with these rows."""
    # To read a chunk twice costs most in the column with the largest rows.
    largest = max(columns.values(), key=lambda column: column.row_bytes)
    starts = [rows.start, *largest.starts(), rows.stop]
    return np.unique(np.clip(starts, rows.start, rows.stop))


def default_window(layout: Layout, columns: Mapping[str, ColumnLayout], batch_size: int) -> int:
    """Return the number of rows that `_WINDOW_BYTES` hold, but at least some batches."""
    row_bytes = _ROW_BYTES + sum(column.row_bytes for column in columns.values())
    objects = [column for column in columns.values() if column.dtype.hasobject]
    if objects:
        # h5py has no size for text and ragged rows. They cannot be compressed, so their files
        # are at least as large as they are.
        files = sum(size for size, _ in layout.stamps.values())
        row_bytes += len(objects) * _OBJECT_BYTES + files // max(1, objects[0].shape[0])
    return max(_WINDOW_BYTES // row_bytes, _WINDOW_BATCHES * batch_size)
