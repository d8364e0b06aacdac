"""The batches of a shard: slices of the file in its order, or shuffled rows of whole chunks.

HDF5 reads, and unpacks, whole chunks. So whole chunks are taken in random order, some of them are
read into a window, and rows are drawn from that: each chunk is read once an epoch, where random
rows would read one chunk for each row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from enqueuer.datasets.hdf5.layout import Layout
from enqueuer.datasets.hdf5.reader import RowReader
from enqueuer.datasets.hdf5.windows import Piece, cut, finer, spread, stretch, windows
from enqueuer.errors import StateMismatch
from enqueuer.workers.arrays import empty
from enqueuer.workers.shards import Shard

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
        stop: Row behind the last one.
        batch_size: Number of rows in a batch.
        drop_last: Whether incomplete batches are left out.
        window: Number of rows, at least, that are shuffled among each other; 0: rows are not
            shuffled.
        pieces: Pieces of the file that are shuffled.
    """

    layout: Layout
    names: tuple[str, ...]
    first: int
    stop: int
    batch_size: int
    drop_last: bool
    window: int
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        """Number of rows in an epoch."""
        return self.stop - self.first

    def identity(self) -> dict[str, int]:
        """Return the values on which a position in a shard depends."""
        common = {"first": self.first, "rows": self.rows, "batch_size": self.batch_size}
        if not self.window:
            return {**common, "window": 0, "chunks": 0}
        return {**common, "window": self.window, "chunks": len(self.pieces), "order": _ORDER}

    def batches(self, shard: Shard, first: int) -> Generator[dict[str, Any]]:
        """Yield the batches of a shard from number `first` on."""
        with RowReader(self.layout, self.names) as reader:
            make = self._shuffled if self.window else self._plain
            for batch in make(reader, shard, first):
                yield batch
                del batch

    def _plain(self, reader: RowReader, shard: Shard, first: int) -> Iterator[dict[str, Any]]:
        size = self.batch_size
        rows = self.rows - self.rows % size if self.drop_last else self.rows
        for start in shard.split(range(self.first, self.first + rows, size))[first:]:
            yield reader.rows(start, min(start + size, self.first + rows))

    def _shuffled(self, reader: RowReader, shard: Shard, first: int) -> Iterator[dict[str, Any]]:
        size = self.batch_size
        left = self.rows // shard.count // size if self.drop_last else sys.maxsize
        # Which rows come is drawn without reading any, so earlier batches can be left out.
        numbers, rest, number = np.empty(0, int), None, 0
        for window in windows(self._own_pieces(shard), self.window):
            before = numbers
            numbers = np.concatenate([before, *(np.arange(*piece) for piece in window)])
            drawn = shard.rng.permutation(len(numbers))
            full = len(numbers) - len(numbers) % size
            if number + full // size <= first:
                rest = None
            else:
                if rest is None and len(before):
                    rest = _rows_by_number(reader, before)
                pool = reader.pool(window, rest)
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

    def _own_pieces(self, shard: Shard) -> Iterator[Piece]:
        """Return the pieces of a shard in the order of its epoch."""
        # All shards must agree on the order of the pieces, so it is not drawn from shard.rng.
        seed = np.random.SeedSequence(shard.random_seed, spawn_key=(shard.epoch,))
        pieces = finer(self._wanted_pieces(shard.count), self.pieces)
        groups = shard.count * max(1, self.rows // shard.count // self.window)
        order = spread(len(pieces), groups, np.random.default_rng(seed))
        return stretch([pieces[index] for index in order], shard.index, shard.count)

    def _wanted_pieces(self, shards: int) -> int:
        """Return into about how many pieces the rows are cut if they have too few chunks."""
        # The windows of a single shard have rows of all pieces.
        if shards == 1:
            return _FEWEST_PIECES
        longest = max((stop - start for start, stop in self.pieces), default=1)
        piece_bytes = longest * sum(map(self.layout.row_bytes, self.names))
        affordable = _PIECE_BYTES // max(1, piece_bytes)
        return shards * min(_PIECES, max(_FEWEST_PIECES, affordable))


def pieces_of(layout: Layout, names: tuple[str, ...], first: int, stop: int) -> tuple[Piece, ...]:
    """Return the pieces of a file that are shuffled: its chunks."""
    # To read a chunk twice costs most in the column with the largest rows.
    starts = layout.starts(max(names, key=layout.row_bytes))
    return cut(starts, first, stop)


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


class ShardBatches:
    """The batches of one shard in one epoch, with a position.

    Args:
        plan: Rows of the epoch.
        shard: The shard.
        form: Makes the batch that the user gets of a dict of columns.
    """

    def __init__(self, plan: ReadPlan, shard: Shard, form: Callable[[dict[str, Any]], Any]) -> None:
        self._plan = plan
        self._shard = shard
        self._form = form
        self._batches: Generator[dict[str, Any]] | None = None
        self._next = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._plan.batches(self._shard, self._next)
        batch = next(self._batches)
        self._next += 1
        return self._form(batch)

    def close(self) -> None:
        """Close the files that are open for this shard."""
        if self._batches is not None:
            self._batches.close()

    def state_dict(self) -> dict[str, int]:
        """Return the number of the next batch, and the values on which it depends."""
        return {"batch": self._next, **self._plan.identity()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a position.

        Raises:
            StateMismatch: The position is of other rows or batches.
        """
        own = self._plan.identity()
        if self._plan.window and state.get("window") and state.get("order") != own["order"]:
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
        self._next = state["batch"]


def _rows_by_number(reader: RowReader, numbers: np.ndarray) -> dict[str, np.ndarray]:
    return reader.pool([(row, row + 1) for row in numbers.tolist()], None)


def _taken(pool: Mapping[str, np.ndarray], indices: np.ndarray) -> dict[str, np.ndarray]:
    """Return some rows of each array, in memory that a worker process need not copy again."""
    return {name: _rows_of(array, indices) for name, array in pool.items()}


def _rows_of(array: np.ndarray, indices: np.ndarray) -> np.ndarray:
    if array.dtype.hasobject:
        taken: np.ndarray = array[indices]
        return taken
    out = empty((len(indices), *array.shape[1:]), array.dtype)
    # The indices are in range. With "raise", numpy would write to a copy first.
    return np.take(array, indices, axis=0, out=out, mode="clip")
