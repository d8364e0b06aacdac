"""Rows of arrays, in `.npy` files or in memory, and the batches of rows that a shard gets.

    ArraySource(paths) --(a shard)--> map the files -> rows of the epoch's permutation -> a batch
    ShardBatches: the batches of a shard in an epoch, with a position; HDF5 files have them, too

An epoch is one permutation of all rows, cut into batches. The shards get the batches in turn, so
the batches do not depend on the number of shards. Workers get the paths and map the files
themselves.

A state has the number of the next batch and the identity: all values on which that batch depends.
"""

from __future__ import annotations

import functools
import mmap
import operator
import os
import pprint
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np

from enqueuer.common import checks
from enqueuer.common.objects import tree_map
from enqueuer.common.text import an
from enqueuer.errors import DataFileError, StateMismatch
from enqueuer.order.position import fingerprint_of, shortened
from enqueuer.workers.arrays import empty
from enqueuer.workers.shards import Shard
from enqueuer.workers.tasks import permutation, steps_in


@checks.suggests_options
class ArraySource:
    """The rows of arrays: a generator function of a shard, and a sequence.

    For `GeneratorEnqueuer` it yields batches. With `shuffle`, each epoch is one permutation of all
    rows, drawn from the enqueuer's seed, so batches are mixed as well as possible. They do not
    depend on the number of shards and workers, and a saved position is resumed at once. Rows are
    copied from the mapped files straight into shared memory.

    Random rows of a file on a slow disk are slow if the memory does not hold the file; then
    `HDF5Source` is faster, as it reads whole chunks. A file must not be truncated while it is
    mapped: the system ends the process that reads what is missing.

    Args:
        arrays: Path of an `.npy` file, a `numpy.memmap` of all of a raw file, or an array; or a
            dict, tuple or list of them, all with the same number of rows. A batch has the same
            structure. Paths and memmaps are mapped by each worker; arrays are sent to it.
        batch_size: Number of rows in a batch; 32 by default.
        shuffle: Whether each epoch has an order of its own; False by default.
        drop_last: Whether to leave out an incomplete last batch, and batches that would give
            some shards more than others; False by default.

    Raises:
        DataFileError: A file is missing, is no `.npy` file, or has Python objects.
        TypeError: An argument has the wrong type.
        ValueError: The arrays have no rows, or not equally many; there are too few for a batch,
            or with `drop_last` for one batch of each shard.

    Example:
        >>> import os, tempfile
        >>> import numpy as np
        >>> from enqueuer import GeneratorEnqueuer
        >>> from enqueuer.datasets.arrays import ArraySource
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = os.path.join(folder.name, "x.npy")
        >>> np.save(path, np.arange(10).reshape(5, 2))
        >>> source = ArraySource({"x": path, "y": np.arange(5)}, batch_size=2)
        >>> for batch in GeneratorEnqueuer(source, workers=2):
        ...     print(batch["x"].tolist(), batch["y"])
        [[0, 1], [2, 3]] [0 1]
        [[4, 5], [6, 7]] [2 3]
        [[8, 9]] [4]
        >>> len(source), source[-1]["x"].tolist()
        (5, [8, 9])
        >>> folder.cleanup()
    """

    def __init__(
        self,
        arrays: Any,
        batch_size: int = 32,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
    ) -> None:
        self._places = tree_map(_place, arrays)
        self._arrays: Any = None
        counts: set[int] = set()
        tree_map(lambda array: counts.add(len(array)), self._opened())
        if not counts:
            raise ValueError("there are no arrays")
        if len(counts) > 1:
            raise ValueError(f"the arrays must have equally many rows, got {sorted(counts)}")
        (self._count,) = counts
        if not self._count:
            raise ValueError("the arrays have no rows")
        size = checks.positive("batch_size", batch_size)
        if drop_last and self._count < size:
            raise ValueError(
                f"{self._count} rows do not fill a batch of {size}, and drop_last is True"
            )
        self._order = _Order(self._count, bool(shuffle))
        # Values on which a position depends.
        self._identity = {
            "rows": self._count,
            "batch_size": size,
            "shuffle": bool(shuffle),
            "drop_last": bool(drop_last),
        }

    def __call__(self, shard: Shard, first_item: int = 0) -> Iterator[Any]:
        """Return an iterator over the batches of a shard from one on; it has a `state_dict`.

        Raises:
            ValueError: There are fewer batches than shards, and `drop_last` is True.
        """
        size, drop_last = self._identity["batch_size"], bool(self._identity["drop_last"])
        steps = steps_in(self._count, size, drop_last)
        if drop_last:
            if steps < shard.count:
                raise ValueError(
                    f"{steps} batches cannot be divided evenly over {shard.count} shards, and "
                    "drop_last is True; give fewer shards, or a smaller batch_size"
                )
            steps -= steps % shard.count

        def begin(at: int) -> Generator[Any]:
            indices = self._order.of(shard)
            for step in range(shard.index, steps, shard.count)[at:]:
                yield self._batch(indices[step * size : (step + 1) * size])

        return ShardBatches(begin, self._identity, first_item)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._count

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        """Return a copy of a row, or of the rows of a slice.

        Raises:
            IndexError: There is no such row.
        """
        if not isinstance(index, slice):
            row = operator.index(index)
            if not -self._count <= row < self._count:
                raise IndexError(f"row {row} is out of range: there are {self._count}")
            index = row
        return tree_map(lambda array: np.array(array[index]), self._opened())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": None}

    def __repr__(self) -> str:
        return f"<ArraySource of {self._count} rows, {self._identity['batch_size']} a batch>"

    def _opened(self) -> Any:
        """Return the arrays, which this process maps when it needs them first."""
        if self._arrays is None:
            self._arrays = tree_map(_mapped, self._places)
        return self._arrays

    def _batch(self, indices: range | np.ndarray) -> Any:
        return tree_map(lambda array: take_rows(array, indices), self._opened())


@dataclass
class _Order:
    """The order of each epoch.

    `pack` compares plain attributes of a source from run to run. This one is not plain: its values
    are in the identity, and the order that is cached is another in each epoch.
    """

    count: int
    shuffle: bool
    cached: tuple[tuple[int, int], np.ndarray] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cached": None}

    def of(self, shard: Shard) -> range | np.ndarray:
        if not self.shuffle:
            return range(self.count)
        epoch = shard.random_seed, shard.epoch
        # The shards of a worker share the order of an epoch.
        cached = self.cached
        if cached is None or cached[0] != epoch:
            cached = self.cached = epoch, permutation(self.count, *epoch)
        return cached[1]


@fingerprint_of.register
def _fingerprint_of(source: ArraySource) -> dict[str, Any]:
    kinds = tree_map(lambda array: f"{array.dtype}{[*array.shape[1:]]}", source._opened())
    # The keys of a dict are sorted, as their order changes no batch.
    arrays = shortened(pprint.pformat(kinds, width=sys.maxsize))
    return {"name": type(source).__qualname__, **source._identity, "arrays": arrays}


# An array, or a function that maps a file: its first argument is the path.
_Place = np.ndarray | functools.partial[Any]


def _place(given: Any) -> _Place:
    """Return an array as workers get it; raise TypeError if it is none."""
    if isinstance(given, (str, os.PathLike)):
        path = os.path.abspath(os.fspath(given))
        # np.load would leave a broken .npz file open.
        return functools.partial(np.lib.format.open_memmap, path, mode="r")
    if isinstance(given, np.ma.MaskedArray):
        raise TypeError(
            "ArraySource got a masked array, whose mask would be lost: fill it, or pass data and "
            "mask as two columns"
        )
    # The offset of a slice is that of the whole. The changes of a copy are not in its file.
    if (
        isinstance(given, np.memmap)
        and given.mode != "c"
        and isinstance(given.base, mmap.mmap)
        and given.filename
    ):
        order: Any = "C" if given.flags.c_contiguous else "F"
        place = (str(given.filename), given.dtype, "r", given.offset, given.shape, order)
        return functools.partial(np.memmap, *place)
    if isinstance(given, np.ndarray):
        if not given.shape:
            raise ValueError("an array without rows cannot be a source, got a single value")
        return given
    raise TypeError(
        f"ArraySource needs paths of .npy files or arrays, got {an(type(given).__name__)}"
    )


def _mapped(place: _Place) -> np.ndarray:
    """Return an array; map its file.

    Raises:
        DataFileError: The file is missing or broken, or has Python objects or a single value.
    """
    if isinstance(place, np.ndarray):
        return place
    path = place.args[0]
    try:
        found = place()
    except Exception as error:
        raise DataFileError(f"{path}: it cannot be mapped as an array: {error}", path) from error
    if not isinstance(found, np.ndarray) or not found.shape:
        raise DataFileError(f"{path}: it is no .npy file of an array with rows", path)
    # Slices of a memmap take longer.
    return np.asarray(found)


class ShardBatches(Iterator[Any]):
    """The batches of one shard in one epoch, with a position.

    Args:
        begin: Function that yields the batches from a number on.
        identity: Values on which a position depends.
        first: Number of the batch to begin with.
    """

    def __init__(
        self, begin: Callable[[int], Generator[Any]], identity: Mapping[str, int], first: int
    ) -> None:
        self._begin = begin
        self._identity = identity
        self._batches = begin(first)
        self._next = first

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._next += 1
        return batch

    def close(self) -> None:
        """Close the files that are open for this shard."""
        self._batches.close()

    def state_dict(self) -> dict[str, int]:
        """Return the number of the next batch, and the values on which it depends."""
        return {"batch": self._next, **self._identity}

    @checks.reading("the batches of a shard")
    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a position.

        Raises:
            StateMismatch: The position is of other data or batches.
        """
        for key, value in self._identity.items():
            saved = state.get(key)
            if saved != value:
                raise StateMismatch(
                    f"the state is of {key}={saved}, but here it is {value}; make the source with "
                    "the arguments, the data and the version of enqueuer of the state"
                )
        number = checks.count("batch", state["batch"])
        self.close()
        self._next = number
        self._batches = self._begin(self._next)


def take_rows(array: np.ndarray, rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return a copy of some rows, in memory that a worker process need not copy again.

    Example:
        >>> take_rows(np.arange(10), range(3, 5)), take_rows(np.arange(10), np.array([7, 1]))
        (array([3, 4]), array([7, 1]))
    """
    out = empty((len(rows), *array.shape[1:]), array.dtype)
    if isinstance(rows, range):
        out[...] = array[rows.start : rows.stop]
        return out
    # The rows are in range. With "raise", numpy would write to a copy first.
    return np.take(array, rows, axis=0, out=out, mode="clip")
