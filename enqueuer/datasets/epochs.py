"""The batches of an epoch: their order, their division among shards, and a position in them.

    rows, or files --EpochBatches--> a permutation of the epoch, cut into batches
    a shard        --ShardBatches--> its batches from a number on, and a state

A state has the number of the next batch and the identity: all values on which that batch depends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from enqueuer.common import checks
from enqueuer.errors import StateMismatch
from enqueuer.workers.arrays import empty
from enqueuer.workers.shards import Shard
from enqueuer.workers.tasks import permutation, steps_in

Batch = TypeVar("Batch")


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


@dataclass
class _Order:
    """The order of each epoch.

    `pack` compares plain attributes of a source from run to run. This one is not plain: its values
    are in the identity, and the order that is kept is another in each epoch.
    """

    noun: str
    count: int
    size: int
    shuffle: bool
    drop_last: bool
    kept: tuple[tuple[int, int], np.ndarray] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kept": None}

    def of(self, shard: Shard) -> range | np.ndarray:
        if not self.shuffle:
            return range(self.count)
        epoch = shard.random_seed, shard.epoch
        # The shards of a worker share the order of an epoch.
        kept = self.kept
        if kept is None or kept[0] != epoch:
            kept = self.kept = epoch, permutation(self.count, *epoch)
        return kept[1]


class EpochBatches(ABC, Generic[Batch]):
    """A source that orders an epoch and cuts it into batches, which the shards get in turn.

    So the batches do not depend on the number of shards.

    Args:
        noun: What is ordered, in the plural.
        count: Number of these.
        batch_size: Number of these in a batch.
        shuffle: Whether each epoch has an order of its own, drawn from the seed.
        drop_last: Whether an incomplete last batch is left out, and batches that would give some
            shards more than others.
        others: Other values on which a position depends.
    """

    def __init__(
        self,
        noun: str,
        count: int,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        others: Mapping[str, bool] | None = None,
    ) -> None:
        size = checks.positive("batch_size", batch_size)
        if drop_last and count < batch_size:
            raise ValueError(
                f"{count} {noun} do not fill a batch of {batch_size}, and drop_last is True"
            )
        self._order = _Order(noun, count, size, bool(shuffle), bool(drop_last))
        # Values on which a position depends.
        self._identity = {noun: count, "batch_size": size, "shuffle": bool(shuffle)}
        self._identity.update(others or {})

    def __call__(self, shard: Shard, first_item: int = 0) -> Iterator[Batch]:
        """Return an iterator over the batches of a shard from one on; it has a `state_dict`.

        Raises:
            ValueError: There are fewer batches than shards, and `drop_last` is True.
        """
        order, size = self._order, self._order.size
        steps = steps_in(order.count, size, order.drop_last)
        if order.drop_last:
            if steps < shard.count:
                raise ValueError(
                    f"{steps} batches cannot be divided evenly over {shard.count} shards, and "
                    "drop_last is True; give fewer shards, or a smaller batch_size"
                )
            steps -= steps % shard.count

        def begin(at: int) -> Generator[Batch]:
            indices = order.of(shard)
            for step in range(shard.index, steps, shard.count)[at:]:
                yield self._batch(indices[step * size : (step + 1) * size], shard)

        return ShardBatches(begin, self._identity, first=first_item)

    def __repr__(self) -> str:
        order = self._order
        return f"<{type(self).__name__} of {order.count} {order.noun}, {order.size} a batch>"

    @abstractmethod
    def _batch(self, indices: range | np.ndarray, shard: Shard) -> Batch:
        """Return the batch of some indices; None: no batch."""


def fingerprint_of_epochs(source: EpochBatches[Any], **others: Any) -> dict[str, Any]:
    """Return the fingerprint of a source: its name, what its positions depend on, and others."""
    return {"name": type(source).__qualname__, **source._identity, **others}


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
