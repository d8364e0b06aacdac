"""The batches of rows that a shard gets in an epoch, and a position in them.

A state has the number of the next batch and the identity: all values on which that batch depends.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from enqueuer.common import checks
from enqueuer.errors import StateMismatch
from enqueuer.workers.arrays import empty


class ShardBatches(Iterator[Any]):
    """The batches of one shard in one epoch, with a position.

    Args:
        begin: Function that yields the batches from a number on.
        identity: Values on which a position depends.
        advice: What to do if one of these values differs, by its name; `{}` stands for the value
            in the state.
        first: Number of the batch to begin with.
    """

    def __init__(
        self,
        begin: Callable[[int], Generator[Any]],
        identity: Mapping[str, int],
        advice: Mapping[str, str] | None = None,
        first: int = 0,
    ) -> None:
        self._begin = begin
        self._identity = identity
        self._advice = advice or {}
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
                advice = self._advice.get(key, "").format(saved)
                raise StateMismatch(
                    f"the state is of {key}={saved}, but here it is {value}{advice}"
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
