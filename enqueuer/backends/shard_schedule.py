"""Whose turn it is, and where each shard stands; which worker's message is next.

    RoundRobin, AsTheyCome   the order of the items of shards
    ShardSchedule            the workers that run them, each certain shards

An order answers `turn()`, notes `ended(shard)`, and is `done` when all shards have ended. The code
that takes items writes down which it has taken. This file decides and does not wait.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Generic

from enqueuer.backends.lifecycle import DeathPlace
from enqueuer.backends.pool import Inbox, W, Worker, WorkerState
from enqueuer.order.messages import Empty, End, Epoch, Failure, ItemTuple, Start

ANY: Final = None
"""The answer of `turn()` where any shard will do."""


class ShardOrder(ABC):
    """The shards that have not ended, and what was taken of each.

    Args:
        starts: Where each shard begins, in the order of their turns.
        recent: How many of the last states of an iterator are remembered.

    Attributes:
        numbers: Number of the next item of each shard.
        last: Shard of the item that was taken last.
        items: Number of items that were taken.
        done: Whether every shard has ended.
        ends: States of sources at the ends of shards, of those that have one.
        yielded: Number of items that were made of what has ended, those of None included.
    """

    def __init__(self, starts: Mapping[int, Start], recent: int) -> None:
        self.numbers = {shard: start.number for shard, start in starts.items()}
        # It is as if a round had just ended.
        self.last: int = next(reversed([*starts]), -1)
        self.items = 0
        self._recent = recent
        self._states = {
            shard: deque([start], recent)
            for shard, start in starts.items()
            if start.state is not None
        }
        self.ends: dict[int, Any] = {}
        self.yielded = 0
        self._open = dict.fromkeys(starts)
        self.done = not self._open

    def add(self, items: Iterable[ItemTuple]) -> None:
        """Note items that were taken."""
        for shard, number, _, state in items:
            if state is not None:
                states = self._states.get(shard)
                if states is None:
                    states = self._states[shard] = deque([Start()], self._recent)
                states.append(Start(number + 1, state))
            self.numbers[shard] = number + 1
            self.last = shard
            self.items += 1

    def start_of(self, shard: int, number: int | None = None) -> Start:
        """Return where a shard starts again, at an item; None: the next one."""
        if number is None:
            number = self.numbers[shard]
        states = self._states.get(shard)
        if states is None:
            return Start(number)
        known = next(at for at in reversed(states) if at.number - at.behind <= number)
        if known.state is None:
            return Start(number)
        return Start(number, known.state, number - known.number + known.behind)

    def next_of(self, shards: Container[int]) -> int | None:
        """Return which of some shards of one worker is next; None if all have ended."""
        return next((shard for shard in self._in_turn() if shard in shards), None)

    def rest(self, ready: Iterable[ItemTuple] = ()) -> dict[int, Start]:
        """Return where the shards stand that are not at their end, in the order of their turns.

        Args:
            ready: Items that were taken last, and count as if they had not been.
        """
        again: dict[int, int] = {}
        for item in ready:
            again.setdefault(item[0], item[1])
        shards = self._in_turn()
        # Turns go by index, so each shard gets its turn back.
        if again:
            shards = sorted({*shards, *again})
            at = shards.index(next(iter(again)))
            shards = shards[at:] + shards[:at]
        return {shard: self.start_of(shard, again.get(shard)) for shard in shards}

    def beyond(self, ready: Iterable[ItemTuple] = ()) -> tuple[int, ...]:
        """Return which later items were taken nevertheless; only of tasks."""
        return ()

    def is_before(self, shard: int, number: int, position: Epoch) -> bool:
        """Return whether an item, or a failure in its place, comes before a position."""
        start = (position.starts or {}).get(shard)
        # A shard without a start has ended.
        return start is None or number < start.number

    @abstractmethod
    def turn(self) -> int | None:
        """Return the shard to read next, or ANY."""

    def ended(self, shard: int, state: Any = None, number: int = 0) -> None:
        """Note that `shard` will give nothing more. Idempotent.

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
        del self._open[shard]
        self.done = not self._open

    @abstractmethod
    def _in_turn(self) -> list[int]:
        """Return the shards that have not ended, in the order of their turns."""


class RoundRobin(ShardOrder):
    """One item of each shard in turn; ended shards drop out.

    Args:
        starts: Where each shard begins, in the order of their turns.
        recent: How many of the last states of an iterator are remembered.

    Example:
        >>> order = RoundRobin(dict.fromkeys(range(3), Start()))
        >>> for shard in range(2):  # one was taken
        ...     order.numbers[shard], order.last = 1, shard; order.items += 1
        >>> order.turn()
        2
        >>> order.ended(2); order.ended(0); order.turn()
        1
        >>> order.rest()
        {1: Start(number=1, state=None, behind=0, left_out=0)}
    """

    def __init__(self, starts: Mapping[int, Start], recent: int = 2) -> None:
        super().__init__(starts, recent)
        shards = list(starts)
        self._after = dict(zip(shards, shards[1:] + shards[:1], strict=True))
        # How many items each shard has given; all of these; and the turns since they were counted.
        self._given = {shard: start.number - start.left_out for shard, start in starts.items()}
        self._counted, self._turns = 0, shards

    def turn(self) -> int:
        return self._after[self.last]

    def rest(self, ready: Iterable[ItemTuple] = ()) -> dict[int, Start]:
        starts = super().rest(ready)
        given = Counter(self._count_given())
        given.subtract(item[0] for item in ready)
        return {
            shard: start._replace(left_out=start.number - given[shard])
            for shard, start in starts.items()
        }

    def _count_given(self, ending: int | None = None) -> dict[int, int]:
        """Count what was taken since the last time, when each shard that is open had its turn.

        Args:
            ending: Shard that has no turn from now on.
        """
        turns = self._turns
        rounds, more = divmod(self.items - self._counted, max(1, len(turns)))
        for at, shard in enumerate(turns):
            self._given[shard] += rounds + (at < more)
        self._counted = self.items
        self._turns = [shard for shard in turns[more:] + turns[:more] if shard != ending]
        return self._given

    def ended(self, shard: int, state: Any = None, number: int = 0) -> None:
        self._count_given(shard)
        # An ended shard keeps its successor, as it may be the last one that was taken from.
        for before, following in self._after.items():
            if following == shard:
                self._after[before] = self._after[shard]
        super().ended(shard, state, number)

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

    def _in_turn(self) -> list[int]:
        # A worker sends one item of each of its shards in turn: the next has given the fewest.
        return sorted(self._open, key=lambda shard: self.numbers[shard] - self._first[shard])


# To look up a member of an enum takes long.
_DEAD = WorkerState.DEAD
_inbox_of: Callable[[Worker], Inbox] = operator.attrgetter("inbox")
_waiting_of: Callable[[Inbox], int] = operator.attrgetter("waiting")


class ShardSchedule(Generic[W]):
    """The decisions of the engine for workers that run shards.

    Called by one consumer at a time.

    Args:
        workers: The workers, by their indices; the engine replaces those that died.
        owners: Index of the worker that runs each shard.
        most: Most items to take at once.

    Example:
        >>> from enqueuer.order.messages import Item, Start
        >>> class Worker:
        ...     def __init__(self, state, *messages):
        ...         self.shards, self.state, self.inbox = (len(messages),), state, self
        ...         self.messages = list(messages)
        ...     def head(self):
        ...         return isinstance(self.messages[0], Item) if self.messages else False
        >>> dead, alive = Worker(WorkerState.DEAD), Worker(WorkerState.RUNNING, Item(1, 0, "x"))
        >>> schedule = ShardSchedule([dead, alive], {0: 0, 1: 1}, 1)
        >>> order = RoundRobin({0: Start(5), 1: Start(4)})  # shard 0 is next
        >>> schedule.next_step(order) is dead, schedule.place_of(dead, order).text
        (True, 'shard 0, item 5')
        >>> order.ended(0); schedule.next_step(order)
        True
    """

    def __init__(self, workers: list[W], owners: Mapping[int, int], most: int) -> None:
        self._workers = workers
        self._owners = owners
        self._most = most
        # What the workers were told to run: the epoch that the loop reads, and perhaps the next.
        self._epochs: list[Epoch] = []
        # Index of the worker whose message was next last. Not the worker, nor its inbox: after
        # `stop()` nothing must keep the memory that is shared with it.
        self._served = 0
        self._is_acknowledged = True

    def waiting(self) -> int:
        """Return how many items of the epoch that the loop reads wait. Called by any thread."""
        # Read once, as another thread may begin the next epoch.
        number = next((epoch.number for epoch in self._epochs), 0)
        return sum(inbox.waiting_of(number) for inbox in set(map(_inbox_of, list(self._workers))))

    def begin(self, epoch: Epoch) -> None:
        """Have the workers run an epoch, unless they were told; the loop reads it from now on."""
        self.tell(epoch)
        self._epochs = [told for told in self._epochs if told.number >= epoch.number]

    def begin_worker(self, worker: W, epoch: Epoch) -> None:
        """Have a worker that was just started run an epoch; `begin` follows after the last one."""
        self._epochs = [epoch]
        worker.begin(epoch.of_shards(worker.shards))

    def tell(self, epoch: Epoch) -> None:
        """Have the workers run an epoch after those that they were told. Idempotent."""
        if any(told.number == epoch.number for told in self._epochs):
            return
        for worker in self._workers:
            worker.begin(epoch.of_shards(worker.shards))
        self._epochs = [*self._epochs, epoch]

    def next_step(self, order: ShardOrder) -> bool | Failure | W:
        """Decide what to do next.

        Returns:
            True if something can be taken, or the epoch is over; False if nothing can be until
            something comes; a failure to be returned; or a worker that has ended.
        """
        while not order.done:
            message = self._head(order)
            if message is True:
                return True
            if message is False:
                dead = self._dead(order)
                return False if dead is None else dead
            if isinstance(message, Failure):
                return message
            assert isinstance(message, End)
            order.ended(message.shard, message.state, message.number)
            self._remove(self._served, message)
        return True

    def _head(self, order: ShardOrder) -> bool | End | Failure | Empty:
        """Return what is next in the inbox whose turn it is, as `Inbox.head` does."""
        workers, count = self._workers, len(self._workers)
        if count == 1:
            self._served = 0
            return workers[0].inbox.head()
        shard = order.turn()
        # Without workers, stop() was called in the meantime.
        if shard is not None and count:
            self._served = self._owners[shard]
            return workers[self._served].inbox.head()
        for index in range(self._served + 1, self._served + 1 + count):
            message = self._workers[index % count].inbox.head()
            if message is not False:
                self._served = index % count
                return message
        return False

    def _dead(self, order: ShardOrder) -> W | None:
        """Return a worker whose death must be reported now; all that it sent was delivered.

        Another worker's turn may come first. But the loop has to wait for that worker, so the
        death is reported at once.
        """
        for worker in self._workers:
            if worker.state is not _DEAD:
                continue
            is_awaited = worker is self.awaited_worker(order)
            is_due = is_awaited or order.next_of(worker.shards) is not None
            if is_due and worker.inbox.head() is False:
                return worker
        return None

    def awaited_worker(self, order: ShardOrder) -> W | None:
        """Return the worker that the loop waits for; None if it waits for any."""
        shard = order.turn()
        if shard is None or not self._workers:
            return None
        return self._workers[self._owners[shard]]

    def awaited(self, order: ShardOrder) -> str:
        """Return what the loop waits for, in words."""
        shard = order.turn()
        if shard is ANY:
            return "the next item of any shard"
        return f"shard {shard}, item {order.numbers[shard]}"

    def take(self, order: ShardOrder) -> list[ItemTuple]:
        """Take what is next and is there, at least one item after the engine has waited."""
        self._is_acknowledged = False
        workers, most = self._workers, self._most
        # stop() was called in the meantime.
        if not workers:
            return []
        in_turn = len(workers) > 1 and order.turn() is not ANY
        items: list[ItemTuple] = []
        while True:
            more = workers[self._served].inbox.take(1 if in_turn else most)
            order.add(more)
            items += more
            if not in_turn or len(items) >= most or self._head(order) is not True:
                return items

    def pass_over(self, failure: Failure) -> None:
        """Forget the failure that `next_step` has returned. Idempotent."""
        self._remove(self._served, failure)

    def _remove(self, index: int, message: End | Failure) -> None:
        # Without workers, stop() was called in the meantime.
        if self._workers:
            self._workers[index].inbox.remove(message)
            self._is_acknowledged = False

    def acknowledge(self) -> None:
        """Count all that was taken as consumed, so that as much can be sent."""
        if not self._is_acknowledged:
            for worker in self._workers:
                worker.inbox.acknowledge()
            self._is_acknowledged = True

    # --- deaths ---

    def place_of(self, dead: W, order: ShardOrder) -> DeathPlace:
        """Return where a worker died: the first item that it did not send."""
        shard = order.next_of(dead.shards)
        # The worker had sent all of this epoch.
        if shard is None:
            shard = dead.shards[0]
        number = order.numbers[shard]
        return DeathPlace(shard, number, f"shard {shard}, item {number}")

    def resume(
        self, dead: W, successor: W, order: ShardOrder, late: Sequence[Failure] = ()
    ) -> None:
        """Have a new worker go on with the first items that a dead one did not send.

        Args:
            dead: The dead worker.
            successor: The new one.
            order: Order of the items.
            late: See `Death`.
        """
        current, *ahead = self._epochs
        starts = order.rest()
        rest = Epoch(current.number, starts).of_shards(successor.shards)
        # A shard that has ended is late in the next epoch, and will be so again.
        failure = next((one for one in late if one.shard in starts), None)
        successor.begin(replace(rest, late=failure))
        for epoch in ahead:
            successor.begin(epoch.of_shards(successor.shards))

    def give_up(self, dead: W, failure: Failure) -> Failure | None:
        """Return the failure of a worker that is not replaced, if that is what is next."""
        return failure

    def part_with(self, leaver: W) -> None:
        """Let others do what a worker that was asked to exit has not done."""
        raise AssertionError("the number of workers that run shards is fixed")


def waiting_in(workers: Sequence[Worker]) -> int:
    """Return how many items wait in the inboxes of some workers. Called by any thread."""
    # Workers may share an inbox.
    return sum(map(_waiting_of, set(map(_inbox_of, list(workers)))))
