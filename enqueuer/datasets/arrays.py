"""Rows of arrays, in `.npy` files or in memory: a source of batches, and a sequence of rows.

    ArraySource(paths) --(a shard)--> map the files -> rows of the epoch's permutation -> a batch

An epoch is one permutation of all rows, cut into batches. The shards get the batches in turn, so
the batches do not depend on the number of shards. Workers get the paths and map the files
themselves.
"""

from __future__ import annotations

import mmap
import operator
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from enqueuer.common import checks
from enqueuer.common.text import an
from enqueuer.common.trees import members_of, tree_map
from enqueuer.enqueuers.task_order import permutation, steps_in
from enqueuer.errors import DataFileError, StateMismatch
from enqueuer.workers.arrays import empty
from enqueuer.workers.shards import Shard


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
        ValueError: The arrays have no rows, or not equally many; there are too few for a batch.

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
        counts = {len(array) for array in _leaves(self._opened())}
        if len(counts) != 1:
            raise ValueError(
                f"the arrays must have equally many rows, got {sorted(counts)}"
                if counts
                else "there are no arrays"
            )
        (self._count,) = counts
        self._batch_size = checks.positive("batch_size", batch_size)
        self._shuffle = bool(shuffle)
        self._drop_last = bool(drop_last)
        self._order: tuple[tuple[int, int], np.ndarray] | None = None
        if drop_last and self._count < self._batch_size:
            raise ValueError(
                f"{self._count} rows do not fill a batch of {batch_size}, and drop_last is True"
            )

    def __call__(self, shard: Shard) -> Iterator[Any]:
        """Return an iterator over the batches of a shard; it has a `state_dict`."""
        return _Share(self, shard)

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
        return {**self.__dict__, "_arrays": None, "_order": None}

    def __repr__(self) -> str:
        return f"<ArraySource of {self._count} rows, {self._batch_size} a batch>"

    def _opened(self) -> Any:
        """Return the arrays, which this process maps when it needs them first."""
        if self._arrays is None:
            self._arrays = tree_map(_mapped, self._places)
        return self._arrays

    def _steps(self, shard: Shard) -> range:
        """Return the numbers of a shard's batches in the epoch."""
        steps = steps_in(self._count, self._batch_size, self._drop_last)
        if self._drop_last:
            steps -= steps % shard.count
        return range(shard.index, steps, shard.count)

    def _batch(self, step: int, shard: Shard) -> Any:
        """Return batch number `step` of the epoch."""
        start, stop = step * self._batch_size, min((step + 1) * self._batch_size, self._count)
        if not self._shuffle:
            return tree_map(lambda array: _copied(array[start:stop]), self._opened())
        rows = self._order_of(shard)[start:stop]
        return tree_map(lambda array: _taken(array, rows), self._opened())

    def _order_of(self, shard: Shard) -> np.ndarray:
        epoch = shard.random_seed, shard.epoch
        # The shards of a worker share the order of an epoch.
        kept = self._order
        if kept is None or kept[0] != epoch:
            kept = self._order = epoch, permutation(self._count, *epoch)
        return kept[1]

    def _identity(self) -> dict[str, int]:
        own = {"rows": self._count, "batch_size": self._batch_size}
        return {**own, "shuffle": self._shuffle, "drop_last": self._drop_last}


class _Share:
    """The batches of one shard in one epoch."""

    def __init__(self, source: ArraySource, shard: Shard) -> None:
        self._source = source
        self._shard = shard
        self._steps = source._steps(shard)
        self._next = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._next >= len(self._steps):
            raise StopIteration
        step = self._steps[self._next]
        self._next += 1
        return self._source._batch(step, self._shard)

    def state_dict(self) -> dict[str, int]:
        return {"batch": self._next, **self._source._identity()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        for key, own in self._source._identity().items():
            if state.get(key) != own:
                raise StateMismatch(f"the state is of {key}={state.get(key)}, but here it is {own}")
        self._next = state["batch"]


class _Raw(NamedTuple):
    """A raw file, as `numpy.memmap` maps it."""

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    order: str


class _Place:
    """An array as workers get it: a path, the facts of a raw file, or the array itself.

    A class of its own, so that a walk over the structure does not take a fact for a member.
    """

    def __init__(self, held: str | _Raw | np.ndarray) -> None:
        self.held = held


def _place(given: Any) -> _Place:
    """Return the place of an array; raise TypeError if it is none."""
    if isinstance(given, (str, os.PathLike)):
        return _Place(os.path.abspath(os.fspath(given)))
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
        order = "C" if given.flags.c_contiguous else "F"
        raw = _Raw(str(given.filename), given.dtype, given.shape, given.offset, order)
        return _Place(raw)
    if isinstance(given, np.ndarray):
        if not given.shape:
            raise ValueError("an array without rows cannot be a source, got a single value")
        return _Place(given)
    raise TypeError(
        f"ArraySource needs paths of .npy files or arrays, got {an(type(given).__name__)}"
    )


def _mapped(place: _Place) -> np.ndarray:
    """Return an array; map its file.

    Raises:
        DataFileError: The file is missing or broken, or has Python objects or a single value.
    """
    held = place.held
    if isinstance(held, np.ndarray):
        return held
    try:
        if isinstance(held, _Raw):
            path = held.path
            found = np.memmap(path, held.dtype, "r", held.offset, held.shape, held.order)  # type: ignore[call-overload]
        else:
            path = held
            found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataFileError(f"{path}: it cannot be mapped as an array: {error}", path) from error
    if not isinstance(found, np.ndarray) or not found.shape:
        raise DataFileError(f"{path}: it is no .npy file of an array with rows", path)
    # Slices of a memmap take longer.
    return np.asarray(found)


def _leaves(nest: Any) -> Iterator[np.ndarray]:
    members = members_of(nest)
    if members is None:
        yield nest
        return
    for member in members.values():
        yield from _leaves(member)


def _copied(rows: np.ndarray) -> np.ndarray:
    out = empty(rows.shape, rows.dtype)
    out[...] = rows
    return out


def _taken(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return some rows, in memory that a worker process need not copy again."""
    out = empty((len(rows), *array.shape[1:]), array.dtype)
    # The rows are in range. With "raise", numpy would write to a copy first.
    return np.take(array, rows, axis=0, out=out, mode="clip")
