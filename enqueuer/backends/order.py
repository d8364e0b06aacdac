"""Whose turn it is, and where each shard stands: pure decisions, no waiting, no I/O.

    RoundRobin, AsTheyCome   for shards
    TaskOrder                for tasks, which are one shard whose items any worker makes

An order answers `turn()`, notes `ended(shard)`, and is `done` when all shards have ended. The
backend waits, takes the items, and writes down which it has taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Container, Iterable, Mapping
from typing import Any, Final, Protocol

from enqueuer.workers.messages import ItemTuple, Start

ANY: Final = None
"""The answer of `turn()` where any shard will do."""


class Order(Protocol):
    """The next shard, and the end, for the consumer to ask before each item."""

    @property
    def done(self) -> bool:
        """Whether every shard has ended."""

    def turn(self) -> int | None:
        """Return the shard to read next, or ANY."""

    def ended(self, shard: int, state: Any = None, number: int = 0) -> None:
        """Note that `shard` will give nothing more.

        Args:
            shard: The shard that has ended.
            state: State of its source at the end, if it has one.
            number: How many items its generator has yielded, those of None included.
        """

    @property
    def ends(self) -> Mapping[int, Any]:
        """The states of sources at the ends of shards, of those that have one."""

    @property
    def yielded(self) -> int:
        """How many items were made of what has ended, those of None included."""

    def next_of(self, shards: Container[int]) -> int | None:
        """Return which of some shards of one worker is next; None if all have ended."""

    def number_of(self, shard: int) -> int:
        """Return the number of the next item of a shard."""

    def rest(self, ready: Iterable[ItemTuple] = ()) -> dict[int, Start]:
        """Return where the shards stand that are not at their end, in the order of their turns.

        Args:
            ready: Items that were taken last, and count as if they had not been.
        """

    def beyond(self, ready: Iterable[ItemTuple] = ()) -> tuple[int, ...]:
        """Return which later items were taken nevertheless; only of tasks."""


class ShardOrder(ABC):
    """The shards that have not ended, the next item of each, and the last states of iterators.

    Code that takes an item calls `remember` if the item has a state, and then writes `numbers` and
    `last` itself. These two stores need no call, so that no exception of a signal handler can
    strike between them and what it stores beside.

    Attributes:
        numbers: Number of the next item of each shard.
        last: Shard of the item that was taken last.
        done: Whether every shard has ended.
    """

    def __init__(self, starts: Mapping[int, Start], recent: int) -> None:
        self.numbers = {shard: start.number for shard, start in starts.items()}
        # It is as if a round had just ended.
        self.last: int = next(reversed([*starts]), -1)
        self._recent = recent
        self.ends: dict[int, Any] = {}
        self.yielded = 0
        self._open = dict.fromkeys(starts)
        self.done = not self._open
        self._states = {
            shard: deque([start], recent)
            for shard, start in starts.items()
            if start.state is not None
        }

    def remember(self, shard: int, number: int, state: Any) -> None:
        """Keep the state of an iterator after an item that is about to be taken."""
        states = self._states.get(shard)
        if states is None:
            states = self._states[shard] = deque([Start()], self._recent)
        # An exception may have struck after an earlier call, before the item was taken.
        if states[-1].number != number + 1:
            states.append(Start(number + 1, state))

    def next_of(self, shards: Container[int]) -> int | None:
        return next((shard for shard in self._in_turn() if shard in shards), None)

    def number_of(self, shard: int) -> int:
        return self.numbers[shard]

    def rest(self, ready: Iterable[ItemTuple] = ()) -> dict[int, Start]:
        again: dict[int, int] = {}
        for item in ready:
            again.setdefault(item[0], item[1])
        shards = self._in_turn()
        # Turns go by index, so each shard gets its turn back.
        if again:
            shards = sorted({*shards, *again})
            at = shards.index(next(iter(again)))
            shards = shards[at:] + shards[:at]
        return {shard: self._start_of(shard, again.get(shard)) for shard in shards}

    def beyond(self, ready: Iterable[ItemTuple] = ()) -> tuple[int, ...]:
        return ()

    @abstractmethod
    def turn(self) -> int | None:
        """Return the shard to read next, or ANY."""

    @abstractmethod
    def ended(self, shard: int, state: Any = None, number: int = 0) -> None:
        """Note that `shard` will give nothing more; again does nothing."""

    @abstractmethod
    def _in_turn(self) -> list[int]:
        """Return the shards that have not ended, in the order of their turns."""

    def _start_of(self, shard: int, number: int | None) -> Start:
        if number is None:
            number = self.numbers[shard]
        states = self._states.get(shard)
        if states is None:
            return Start(number)
        known = next(at for at in reversed(states) if at.number - at.behind <= number)
        if known.state is None:
            return Start(number)
        return Start(number, known.state, number - known.number + known.behind)


class RoundRobin(ShardOrder):
    """One item of each shard in turn; ended shards drop out.

    Args:
        starts: Where each shard begins, in the order of their turns.
        recent: How many of the last states of an iterator are remembered.

    Example:
        >>> order = RoundRobin(dict.fromkeys(range(3), Start()))
        >>> for shard in range(2): order.numbers[shard], order.last = 1, shard  # one was taken
        >>> order.turn()
        2
        >>> order.ended(2); order.ended(0); order.turn()
        1
        >>> order.rest()
        {1: Start(number=1, state=None, behind=0)}
    """

    def __init__(self, starts: Mapping[int, Start], recent: int = 2) -> None:
        super().__init__(starts, recent)
        shards = list(starts)
        self._after = dict(zip(shards, shards[1:] + shards[:1], strict=True))
        # Number of the next item of each shard when the first shard ended.
        self._at_first_end: dict[int, int] | None = None

    @property
    def is_even(self) -> bool:
        """Whether each round so far had an item of every shard, but for the end of the last one.

        Several such orders, read one item of each in turn, are in the order of them all.
        """
        return self._at_first_end in (None, self.numbers)

    def turn(self) -> int:
        return self._after[self.last]

    def ended(self, shard: int, state: Any = None, number: int = 0) -> None:
        if shard not in self._open:
            return
        if state is not None:
            self.ends[shard] = state
        if self._at_first_end is None:
            self._at_first_end = self.numbers.copy()
        # An ended shard keeps its successor, as it may be the last one that was taken from.
        for before, following in self._after.items():
            if following == shard:
                self._after[before] = self._after[shard]
        self.yielded += number
        del self._open[shard]
        self.done = not self._open

    def _in_turn(self) -> list[int]:
        shards: list[int] = []
        shard = self.last
        while len(shards) < len(self._open):
            shard = self._after[shard]
            shards.append(shard)
        return shards


class AsTheyCome(ShardOrder):
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
        self._first = self.numbers.copy()

    def turn(self) -> None:
        return ANY

    def ended(self, shard: int, state: Any = None, number: int = 0) -> None:
        if shard not in self._open:
            return
        if state is not None:
            self.ends[shard] = state
        self.yielded += number
        del self._open[shard]
        self.done = not self._open

    def _in_turn(self) -> list[int]:
        # A worker sends one item of each of its shards in turn: the next has given the fewest.
        return sorted(self._open, key=lambda shard: self.numbers[shard] - self._first[shard])


class TaskOrder:
    """Tasks by their numbers, or as they come; each once.

    Numbers run on over epochs, so that a result that comes late is never taken for another's.

    Args:
        first: The number of the epoch's first task.
        start: Where in the epoch to begin, and the reader's state before that.
        done: Later tasks of the epoch that were done already.
        ordered: Whether they come by their numbers.

    Attributes:
        end: The number after that of the last task; None until that is known. Tasks of this number
            and above are those of the next epoch.

    Example:
        >>> order = TaskOrder(first=100, start=Start(2), done=(), ordered=True)
        >>> order.was_taken(101), order.was_taken(102)
        (True, False)
        >>> order.taken[102] = None; order.end_at(103); order.done
        True
    """

    def __init__(self, first: int, start: Start, done: Iterable[int], ordered: bool) -> None:
        self.first = first
        self.ordered = ordered
        # All tasks before it were taken.
        self.next = first + start.number
        # Number of tasks that were taken, and not only passed over.
        self.items = 0
        # Numbers that were taken, until `next` has gone past them. Code that takes a result writes
        # to it itself: that needs no call, see `ShardOrder`.
        self.taken: dict[int, None] = dict.fromkeys(first + number for number in done)
        self.end: int | None = None
        self.ends: dict[int, Any] = {}
        # before the task, of a reader that has a state
        self._states = {} if start.state is None else {self.next: start.state}

    @property
    def done(self) -> bool:
        if self.taken:
            self.advance()
        return self.next == self.end

    @property
    def yielded(self) -> int:
        return 0 if self.end is None else self.end - self.first

    def end_at(self, number: int, state: Any = None) -> None:
        """Note that there is no task of this number or a higher one, and the reader's state."""
        if state is not None:
            self.ends[0] = state
        self.end = number

    def read(self, number: int, state: Any) -> None:
        """Note the reader's state after it has read the task of this number.

        Called when all that was taken was given away, too: earlier states can be forgotten.
        """
        if self._states:
            for old in [old for old in self._states if old < self.next]:
                del self._states[old]
        if state is not None:
            self._states[number + 1] = state

    def is_of_next(self, number: int) -> bool:
        """Return whether a task belongs to the next epoch."""
        return self.end is not None and number >= self.end

    def was_taken(self, number: int) -> bool:
        """Return whether the task was done, now or before the start."""
        return number < self.next or number in self.taken

    def turn(self) -> None:
        return ANY

    def ended(self, shard: int, state: Any = None, number: int = 0) -> None:
        raise AssertionError("tasks end with the reader")

    def next_of(self, shards: Container[int]) -> int | None:
        return None

    def number_of(self, shard: int) -> int:
        return self.next

    def rest(self, ready: Iterable[ItemTuple] = ()) -> dict[int, Start]:
        self.advance()
        number = min([self.next, *(number for _, number, _, _ in ready)])
        return {0: Start(number - self.first, self._states.get(number))}

    def beyond(self, ready: Iterable[ItemTuple] = ()) -> tuple[int, ...]:
        self.advance()
        again = {number for _, number, _, _ in ready}
        earliest = min([self.next, *again])
        numbers = {*range(earliest, self.next), *self.taken} - again
        return tuple(sorted(number - self.first for number in numbers if number > earliest))

    def advance(self) -> None:
        """Have `next` go past all that was taken; again does nothing."""
        while self.next in self.taken:
            del self.taken[self.next]
            self.next += 1
