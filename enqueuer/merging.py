"""Whose turn it is, and where each shard stands: pure decisions, no waiting, no I/O.

    RoundRobin, AsTheyCome   for shards
    TaskOrder                for tasks, which are one shard of which anybody makes the items

An order is asked `turn()`, is told `took(shard, number)` and `ended(shard)`, and is `done` when
all shards have ended. The waiting is the backend's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any, Final, Protocol

from enqueuer.messages import Item, Start

ANY: Final = None
"""The answer of `turn()` where any shard will do."""


class Order(Protocol):
    """What the consumer asks before each item."""

    @property
    def done(self) -> bool:
        """Whether every shard has ended."""

    def turn(self) -> int | None:
        """Return the shard to read next, or ANY."""

    def took(self, shard: int, number: int, state: Any = None) -> None:
        """Note that item `number` of `shard` was taken, after which its iterator's state was so."""

    def ended(self, shard: int) -> None:
        """Note that `shard` will give nothing more."""

    def next_of(self, shards: Container[int]) -> int | None:
        """Return which of some shards of one worker is next; None if all have ended."""

    def number_of(self, shard: int) -> int:
        """Return the number of the next item of a shard."""

    def rest(self, ready: Iterable[Item] = ()) -> dict[int, Start]:
        """Return where the shards stand that are not at their end, in the order of their turns.

        Args:
            ready: What was taken last and counts as if it had not been.
        """

    def beyond(self, ready: Iterable[Item] = ()) -> tuple[int, ...]:
        """Return which later items were taken nevertheless; only of tasks."""


class _Shards:
    """The shards that have not ended, the next item of each, and the last states of iterators."""

    _open: Collection[int]
    _states: dict[int, deque[Start]]

    def __init__(self, starts: Mapping[int, Start], recent: int) -> None:
        self._numbers = {shard: start.number for shard, start in starts.items()}
        self._recent = recent
        self._states = {
            shard: deque([start], recent)
            for shard, start in starts.items()
            if start.state is not None
        }

    @property
    def done(self) -> bool:
        return not self._open

    def next_of(self, shards: Container[int]) -> int | None:
        return next((shard for shard in self._open if shard in shards), None)

    def number_of(self, shard: int) -> int:
        return self._numbers[shard]

    def rest(self, ready: Iterable[Item] = ()) -> dict[int, Start]:
        again: dict[int, int] = {}
        for item in ready:
            again.setdefault(item.shard, item.number)
        shards = list(self._open)
        if again:  # turns go by index, so this is where they were
            shards = sorted({*shards, *again})
            at = shards.index(next(iter(again)))
            shards = shards[at:] + shards[:at]
        return {shard: self._start_of(shard, again.get(shard)) for shard in shards}

    def beyond(self, ready: Iterable[Item] = ()) -> tuple[int, ...]:
        return ()

    def _start_of(self, shard: int, number: int | None) -> Start:
        if number is None:
            number = self._numbers[shard]
        states = self._states.get(shard)
        if states is None:
            return Start(number)
        last = next(at for at in reversed(states) if at.number - at.behind <= number)
        if last.state is None:
            return Start(number)
        return Start(number, last.state, number - last.number + last.behind)

    def _remember(self, shard: int, start: Start) -> None:
        if shard not in self._states:
            self._states[shard] = deque([Start()], self._recent)
        self._states[shard].append(start)


class RoundRobin(_Shards):
    """One item of each shard in turn; ended shards drop out.

    Args:
        starts: Where each shard begins, in the order of their turns.
        recent: How many of the last states of an iterator are remembered.

    Example:
        >>> order = RoundRobin(dict.fromkeys(range(3), Start()))
        >>> for _ in range(2): order.took(order.turn(), 0)
        >>> order.turn()
        2
        >>> order.ended(2); order.ended(0); order.turn()
        1
        >>> order.rest()
        {1: Start(number=1, state=None, behind=0)}
    """

    def __init__(self, starts: Mapping[int, Start], recent: int = 2) -> None:
        super().__init__(starts, recent)
        self._open: deque[int] = deque(starts)

    def turn(self) -> int:
        return self._open[0]

    def took(self, shard: int, number: int, state: Any = None) -> None:
        self._open.rotate(-1)
        self._numbers[shard] = number + 1
        if state is not None:
            self._remember(shard, Start(number + 1, state))

    def ended(self, shard: int) -> None:
        self._open.remove(shard)


class AsTheyCome(_Shards):
    """Whatever is there first, from any shard.

    Example:
        >>> order = AsTheyCome(dict.fromkeys(range(2), Start()))
        >>> order.turn() is ANY, order.done
        (True, False)
        >>> order.ended(0); order.ended(1); order.done
        True
    """

    def __init__(self, starts: Mapping[int, Start], recent: int = 2) -> None:
        super().__init__(starts, recent)
        self._open: dict[int, None] = dict.fromkeys(starts)  # the last one served is at the end

    def turn(self) -> None:
        return ANY

    def took(self, shard: int, number: int, state: Any = None) -> None:
        self._open[shard] = self._open.pop(shard)
        self._numbers[shard] = number + 1
        if state is not None:
            self._remember(shard, Start(number + 1, state))

    def ended(self, shard: int) -> None:
        self._open.pop(shard, None)


class TaskOrder:
    """Tasks by their numbers, or as they come; each once.

    Numbers run on over epochs, so that a result that comes late is never taken for another's.

    Args:
        first: The number of the epoch's first task.
        start: Where in the epoch to begin, and the reader's state before that.
        done: Later tasks of the epoch that were done already.
        ordered: Whether they come by their numbers.

    Example:
        >>> order = TaskOrder(first=100, start=Start(2), done=(), ordered=True)
        >>> order.was_taken(101), order.was_taken(102)
        (True, False)
        >>> order.took(0, 102); order.end_at(103); order.done
        True
    """

    def __init__(self, first: int, start: Start, done: Iterable[int], ordered: bool) -> None:
        self.first = first
        self.ordered = ordered
        self.next = first + start.number  # all before it were taken
        self.items = 0  # that were taken, and not only passed over
        self._beyond = {first + number for number in done}
        self._end: int | None = None
        # before the task, of a reader that tells its state
        self._states = {} if start.state is None else {self.next: start.state}

    @property
    def done(self) -> bool:
        return self.next == self._end

    def end_at(self, number: int) -> None:
        """Note that there is no task of this number or a higher one."""
        self._end = number
        self._advance()

    def read(self, number: int, state: Any) -> None:
        """Note the reader's state after it has read the task of this number.

        Called when all that was taken was given away, too: earlier states can be forgotten.
        """
        if self._states:
            for old in [old for old in self._states if old < self.next]:
                del self._states[old]
        if state is not None:
            self._states[number + 1] = state

    def was_taken(self, number: int) -> bool:
        """Return whether the task was done, now or before the start."""
        return number < self.next or number in self._beyond

    def turn(self) -> None:
        return ANY

    def took(self, shard: int, number: int, state: Any = None) -> None:
        if number == self.next and not self._beyond:
            self.next = number + 1
        else:
            self._beyond.add(number)
            self._advance()

    def ended(self, shard: int) -> None:
        raise AssertionError("tasks end with the reader")

    def next_of(self, shards: Container[int]) -> int | None:
        return None

    def number_of(self, shard: int) -> int:
        return self.next

    def rest(self, ready: Iterable[Item] = ()) -> dict[int, Start]:
        number = min([self.next, *(item.number for item in ready)])
        return {0: Start(number - self.first, self._states.get(number))}

    def beyond(self, ready: Iterable[Item] = ()) -> tuple[int, ...]:
        again = {item.number for item in ready}
        earliest = min([self.next, *again])
        numbers = {*range(earliest, self.next), *self._beyond} - again
        return tuple(sorted(number - self.first for number in numbers if number > earliest))

    def _advance(self) -> None:
        while self.next in self._beyond:
            self._beyond.remove(self.next)
            self.next += 1
