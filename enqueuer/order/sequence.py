"""The sequence of an epoch: which item is next, and the position between two of them.

    ShardOrder    items of shards, in turn or as they come
    TaskOrder     tasks, by their numbers or as they come
    Results       the results of tasks, until it is their turn

States and events of both orders:

    open    --ended(), end_at(), take() of the last one--> done     nothing more comes
    open    --take()--> open                                        an item was taken

An order lives as long as its epoch. `Results` lives as long as the workers, as it also keeps
results of the next epoch.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Container, Iterable, Sequence
from typing import Any, Final, TypeAlias

from enqueuer.order.messages import Empty, Epoch, Failure, ItemTuple, Start, Ticket

ANY: Final = None
"""The answer of `turn()` where any shard, or any task, will do."""


class EpochOrder:
    """What both orders know.

    Args:
        epoch: The epoch, or its rest.
        shards: The shards of later epochs; tasks count as shard 0.
        ordered: Whether items come in turn; otherwise as they are made.

    Attributes:
        epoch: Where in the epoch it began.
        ordered: As above.
        ends: States of sources at the ends of shards, of those that have one.
    """

    def __init__(self, epoch: Epoch, shards: Iterable[int], ordered: bool) -> None:
        self.epoch = epoch
        self.ordered = ordered
        self.ends: dict[int, Any] = {}
        self._shards = shards

    def next_epoch(self) -> Epoch:
        """Return the epoch after this one, which is done."""
        # A shard that had ended when a state was saved has sent no state since.
        starts = dict.fromkeys(self._shards, Start()) if self.ends else {}
        starts |= {shard: Start(0, state) for shard, state in self.ends.items()}
        return Epoch(self.epoch.number + 1, starts or None)


class ShardOrder(EpochOrder):
    """One item of each shard in turn, or whatever is there first; ended shards drop out.

    Args:
        epoch: The epoch, or its rest.
        shards: The shards of later epochs.
        ordered: Whether it is one item of each shard in turn.
        recent: How many of the last states of an iterator are remembered.

    Attributes:
        numbers: Number of the next item of each shard.
        steps: Number of items that were taken.
        is_over: Whether every shard has ended.
        yielded: Number of items that were made of what has ended, those of None included.

    Example:
        >>> order = ShardOrder(Epoch(0), range(3), ordered=True)
        >>> order.take([(0, 0, "a", None), (1, 0, "b", None)]); order.turn()
        2
        >>> order.ended(2); order.ended(0); order.turn()
        1
        >>> order.position().starts
        {1: Start(number=1, state=None, behind=0, left_out=0)}
        >>> ShardOrder(Epoch(0), range(3), ordered=False).turn() is ANY
        True
    """

    def __init__(self, epoch: Epoch, shards: Iterable[int], ordered: bool, recent: int = 2) -> None:
        super().__init__(epoch, shards, ordered)
        starts = dict.fromkeys(shards, Start()) if epoch.starts is None else epoch.starts
        self.numbers = {shard: start.number for shard, start in starts.items()}
        self.steps = self.yielded = 0
        self._first = self.numbers.copy()
        # How many items each shard has given, when they were counted last, after how many steps,
        # and the shards that had not ended, in the order of their turns from then on.
        self._delivered = {shard: start.number - start.left_out for shard, start in starts.items()}
        self._counted, self._open = 0, list(starts)
        self.is_over = not starts
        self._recent = recent
        self._states = {
            shard: deque([start], recent)
            for shard, start in starts.items()
            if start.state is not None
        }

    # --- events ---

    def take(self, items: Sequence[ItemTuple]) -> None:
        """Note items that were taken."""
        for shard, number, _, state in items:
            if state is not None:
                states = self._states.get(shard)
                if states is None:
                    states = self._states[shard] = deque([Start()], self._recent)
                states.append(Start(number + 1, state))
            self.numbers[shard] = number + 1
        self.steps += len(items)

    def ended(self, shard: int, state: Any = None, number: int = 0) -> None:
        """Note that a shard will give nothing more. Idempotent.

        Args:
            shard: The shard that has ended.
            state: State of its source at the end, if it has one.
            number: How many items its generator has yielded, those of None included.
        """
        if shard not in self._open:
            return
        if state is not None:
            self.ends[shard] = state
        self.yielded += number
        self._count()
        self._open.remove(shard)
        self.is_over = not self._open

    def _count(self) -> None:
        """Count what was taken since the last time, when each open shard had its turn."""
        if self.ordered and self._open:
            rounds, more = divmod(self.steps - self._counted, len(self._open))
            for at, shard in enumerate(self._open):
                self._delivered[shard] += rounds + (at < more)
            self._counted, self._open = self.steps, self._open[more:] + self._open[:more]

    # --- answers ---

    def turn(self) -> int | None:
        """Return the shard to read next, or ANY."""
        shards = self._open
        return shards[(self.steps - self._counted) % len(shards)] if self.ordered else ANY

    def in_turn(self) -> list[int]:
        """Return the shards that have not ended, in the order of their turns."""
        if self.ordered:
            self._count()
            return self._open
        # A worker sends one item of each of its shards in turn: the next has given the fewest.
        return sorted(self._open, key=lambda shard: self.numbers[shard] - self._first[shard])

    def next_of(self, shards: Container[int]) -> int | None:
        """Return which of some shards of one worker is next; None if all have ended."""
        return next((shard for shard in self.in_turn() if shard in shards), None)

    def position(self, ready: Sequence[ItemTuple] = ()) -> Epoch:
        """Return the rest of the epoch.

        Args:
            ready: Items that were taken last, and count as if they had not been.
        """
        again: dict[int, int] = {}
        for item in ready:
            again.setdefault(item[0], item[1])
        # Those of what is ready get their turns back; the others had none since.
        shards = dict.fromkeys([*again, *self.in_turn()])
        numbers = {shard: again.get(shard, self.numbers[shard]) for shard in shards}
        starts = {shard: self._start_of(shard, number) for shard, number in numbers.items()}
        if self.ordered:
            delivered = Counter(self._delivered)
            delivered.subtract(item[0] for item in ready)
            for shard, start in starts.items():
                starts[shard] = start._replace(left_out=start.number - delivered[shard])
        return Epoch(self.epoch.number, starts, share=self.epoch.share)

    def _start_of(self, shard: int, number: int) -> Start:
        """Return where a shard starts again at an item."""
        states = self._states.get(shard, (Start(),))
        known = next(at for at in reversed(states) if at.number - at.behind <= number)
        if known.state is None:
            return Start(number)
        return Start(number, known.state, number - known.number + known.behind)

    def is_before(self, shard: int, number: int, position: Epoch) -> bool:
        """Return whether an item, or a failure in its place, comes before a position."""
        start = (position.starts or {}).get(shard)
        # A shard without a start has ended.
        return start is None or number < start.number


class TaskOrder(EpochOrder):
    """Tasks by their numbers, or as they come; each once.

    Numbers run on over epochs, so that a result that comes late is never taken for another's.

    Args:
        epoch: The epoch, or its rest.
        first: The number of the epoch's first task.
        ordered: Whether they come by their numbers.

    Attributes:
        end: The number after that of the last task; None until that is known. Tasks of this number
            and above are those of the next epoch.
        next: All tasks before this number were taken.
        taken: Numbers of later tasks that were taken.

    Example:
        >>> order = TaskOrder(Epoch(0, {0: Start(2)}), first=100, ordered=True)
        >>> order.was_taken(101), order.was_taken(102), order.turn()
        (True, False, 102)
        >>> order.take(102); order.end_at(103); order.is_over
        True
    """

    def __init__(self, epoch: Epoch, first: int, ordered: bool) -> None:
        super().__init__(epoch, (0,), ordered)
        start = Start() if epoch.starts is None else epoch.starts[0]
        self.first = first
        self.next = first + start.number
        self.taken = {first + number for number in epoch.done}
        self._delivered = start.number + len(epoch.done) - epoch.left_out
        self._advance()
        self.end: int | None = None
        # before the task, of a reader that has a state
        self._states = {} if start.state is None else {self.next: start.state}

    def _advance(self) -> None:
        while self.next in self.taken:
            self.taken.remove(self.next)
            self.next += 1

    # --- events ---

    def take(self, number: int, has_item: bool = True) -> None:
        """Note that a task was taken, or only passed over, as it has no item."""
        self._delivered += has_item
        if number == self.next and not self.taken:
            self.next += 1
        else:
            self.taken.add(number)
            self._advance()

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

    # --- answers ---

    @property
    def is_over(self) -> bool:
        return self.next == self.end

    @property
    def steps(self) -> int:
        return self.next - self.first

    @property
    def yielded(self) -> int:
        return 0 if self.end is None else self.end - self.first

    def turn(self) -> int | None:
        """Return the number of the only task that may be taken now, or ANY."""
        return self.next if self.ordered else ANY

    def was_taken(self, number: int) -> bool:
        """Return whether the task was done, now or before the start."""
        return number < self.next or number in self.taken

    def place_of(self, number: int) -> tuple[int, int]:
        """Return the epoch of a task, which may be the next one, and its number there."""
        if self.end is not None and number >= self.end:
            return self.epoch.number + 1, number - self.end
        return self.epoch.number, number - self.first

    def position(self, ready: Sequence[ItemTuple] = ()) -> Epoch:
        """Return the rest of the epoch; see `ShardOrder.position`."""
        again = {number for _, number, _, _ in ready}
        number = min([self.next, *again])
        later = {*range(number, self.next), *self.taken} - again
        done = tuple(sorted(at - self.first for at in later))
        start = Start(number - self.first, self._states.get(number))
        left_out = start.number + len(done) - (self._delivered - len(ready))
        return Epoch(self.epoch.number, {0: start}, done, left_out, division=self.epoch.division)

    def is_before(self, shard: int, number: int, position: Epoch) -> bool:
        at, starts = number - self.first, position.starts
        return starts is None or at < starts[0].number or at in position.done


Order: TypeAlias = ShardOrder | TaskOrder
"""What is next, and the end, for the consumer to ask before each item."""


class Results:
    """Results that have come, until it is their turn: the reorder buffer.

    Attributes:
        tickets: Those whose results were not taken, by their numbers.
    """

    def __init__(self) -> None:
        self.tickets: dict[int, Ticket] = {}
        # In the order of their arrival.
        self._results: dict[int, ItemTuple | Empty | Failure] = {}
        self._skipped: dict[int, deque[Failure]] = {}

    # --- events ---

    def add(self, tickets: Sequence[Ticket]) -> None:
        """Note tasks that are submitted."""
        self.tickets.update((ticket.number, ticket) for ticket in tickets)

    def put(self, message: ItemTuple | Empty | Failure) -> ItemTuple | None:
        """Keep what came of a task, unless it is known already; return it if it is an item."""
        if isinstance(message, tuple):
            number = message[1]
            if message[2] is None:
                message = Empty(number)
        else:
            number = message.number
        if number not in self.tickets or number in self._results:
            return None
        if isinstance(message, Failure):
            index = self.tickets[number].indices[message.shard]
            # The same numbers if the task runs again: it has sent no failure since its result.
            nth = 1 + len(self._skipped.get(number, ()))
            message = dataclasses.replace(message, shard=index, nth=nth)
            if message.skipped:
                self._skipped.setdefault(number, deque()).append(message)
                return None
        self._results[number] = message
        return message if isinstance(message, tuple) else None

    def fail(self, failure: Failure) -> None:
        """Put a failure in the place of a task, also of one that has no ticket."""
        self._results[failure.number] = failure

    def pass_over(self, failure: Failure) -> None:
        """Forget a skipped error that `peek` has returned. Idempotent."""
        errors = self._skipped.get(failure.number)
        if errors and errors[0] is failure:
            errors.popleft()
            if not errors:
                del self._skipped[failure.number]

    def forget_skipped(self, number: int) -> None:
        """Forget the skipped errors of a task that will run again."""
        self._skipped.pop(number, None)

    def take(self, order: TaskOrder, limit: int) -> list[ItemTuple]:
        """Take results as long as they are next: at most so many."""
        taken: list[ItemTuple] = []
        while len(taken) < limit and isinstance(item := self._head(order), tuple):
            self._remove(order, item[1])
            taken.append(item)
        return taken

    def _remove(self, order: TaskOrder, number: int, has_item: bool = True) -> None:
        del self._results[number], self.tickets[number]
        order.take(number, has_item)

    # --- answers ---

    def undone(self) -> list[int]:
        """Return the numbers of the tasks that have no result yet."""
        return [number for number in self.tickets if number not in self._results]

    def waiting_before(self, end: int | None, arriving: int) -> int:
        """Return how many results of tasks below a number wait.

        Args:
            end: The number; None: there is none.
            arriving: Number of results that are not here yet. Which tasks they belong to is not
                known, so they count for as many of these tasks as have no result.
        """
        # The garbage collector may run code of the user here, which takes some of them.
        results, tickets = self._results.copy(), list(self.tickets)
        there = [n for n, result in results.items() if isinstance(result, tuple)]
        missing = [n for n in tickets if n not in results]
        if end is not None:
            there, missing = [n for n in there if n < end], [n for n in missing if n < end]
        return len(there) + min(arriving, len(missing))

    def peek(self, order: TaskOrder) -> Failure | bool:
        """Return the failure that is next; or whether there is news.

        An item can be taken; or tasks without a result are done, so that others can be assigned.
        """
        found = False
        while isinstance(empty := self._head(order), Empty):
            self._remove(order, empty.number, has_item=False)
            found = True
        return empty if isinstance(empty, Failure) else found or empty is not None

    def _head(self, order: TaskOrder) -> ItemTuple | Empty | Failure | None:
        """Return what is next, the skipped errors of a task before its result; None if nothing."""
        number = self.ready(order)
        if number is None:
            return None
        return self._skipped[number][0] if number in self._skipped else self._results[number]

    def ready(self, order: TaskOrder) -> int | None:
        """Return the number of the result that is next, an error too, if it is there."""
        end, number = order.end, order.turn()
        if number is not ANY:
            return number if number in self._results and number != end else None
        results = self._results if end is None else [n for n in self._results if n < end]
        # A failure without a ticket is the reader's: it comes after all that was read.
        with_ticket = (number for number in results if number in self.tickets)
        return next(with_ticket, None if self.tickets else next(iter(results), None))
