"""The items of a map-style dataset in one DataLoader worker, by their indices.

It decides which items are made, and waits for nothing itself: `Source` makes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Protocol


class Source(Protocol):
    """Where the items come from: the loader of this process, as far as it is needed here."""

    def begin(self, worker: int) -> int: ...
    def has_blocks(self, length: int) -> bool: ...
    def check_repeats(self, workers: int) -> None: ...
    def items_of_epoch(
        self, epoch: int, worker: int, workers: int, block: int
    ) -> Iterator[Any]: ...


class IndexedItems:
    """The items of a map-style dataset in one worker of a DataLoader, by their indices.

    torch sends batches of indices to its workers in turn: with batches of b, worker w of n gets
    the indices of batch w, w + n and so on. If the enqueuer can be divided into such blocks, its
    part makes exactly these items. Otherwise, or if the block is not known, a copy of the whole
    makes all items, and those of the other workers are dropped.

    Args:
        source: The loader of this process.
        length: Number of items of an epoch.
        worker: Index of this worker, from 0.
        workers: Number of workers.
    """

    def __init__(self, source: Source, length: int, worker: int, workers: int) -> None:
        self._source = source
        self._length = length
        self._worker, self._workers = worker, workers
        # First and latest index that torch has asked for in this epoch.
        self._first = self._last = -1
        self._epoch = 0
        # Items of a block; with 0 this worker makes all items.
        self._block = 0
        self._items: Iterator[Any] = iter(())

    def items(self, indices: Sequence[int]) -> list[Any]:
        """Return the items of a batch.

        Raises:
            ValueError: The indices do not come in order.
        """
        for index, following in itertools.pairwise(indices):
            if following != index + 1:
                self._refuse(index, following)
        return [self._item(index, len(indices)) for index in indices]

    def _item(self, index: int, size: int) -> Any:
        is_first = self._last < 0
        # torch begins each epoch of a worker with the same index.
        if is_first or index == self._first:
            self._begin(index, size)
        elif index <= self._last:
            self._refuse(self._last, index)
        elif self._block and index != self._following():
            self._make_all(index)
        elif not self._block:
            _drop(self._items, index - self._last - 1)
        self._last = index
        return next(self._items)

    def _begin(self, index: int, size: int) -> None:
        """Begin an epoch with the item of an index."""
        self._first, self._epoch = index, self._source.begin(self._worker)
        # The first batch of a later worker may be the last one of the epoch, and a short one.
        block = index // self._worker if self._worker else size
        if not self._source.has_blocks(self._length) or index != self._worker * block or not block:
            self._make_all(index)
            return
        self._block = block
        self._items = self._source.items_of_epoch(self._epoch, self._worker, self._workers, block)

    def _make_all(self, index: int) -> None:
        """Have this worker make all items of the epoch, and go on with one of them."""
        self._source.check_repeats(self._workers)
        self._block = 0
        self._items = self._source.items_of_epoch(self._epoch, self._worker, self._workers, 0)
        _drop(self._items, index)

    def _following(self) -> int:
        """Return the next index of this worker's blocks."""
        following = self._last + 1
        return (
            following if following % self._block else following + self._block * (self._workers - 1)
        )

    def _refuse(self, index: int, following: int) -> NoReturn:
        raise ValueError(
            f"index {following} was asked for after {index} in worker {self._worker} of a "
            "DataLoader, but the enqueuer makes its items in its own order: leave out "
            "shuffle=True and sampler= of the DataLoader, and let the enqueuer shuffle "
            "(OrderedEnqueuer(shuffle=True)), or take num_workers=0, where any index gives the "
            "next item"
        )


def _drop(items: Iterator[Any], count: int) -> None:
    for _ in itertools.islice(items, count):
        pass
