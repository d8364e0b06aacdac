"""Which worker's message is next, of workers that run shards.

The order says whose turn it is, and is told what was taken. This file decides and does not wait.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Generic

from enqueuer.backends.pool import DeathPlace, Inbox, W, Worker, WorkerState
from enqueuer.order.messages import Empty, End, Epoch, Failure, ItemTuple
from enqueuer.order.sequence import ANY, ShardOrder

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
        limit: Most items to take at once.

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
        >>> starts = {0: Start(5), 1: Start(4)}  # shard 0 is next
        >>> order = ShardOrder(Epoch(0, starts), range(2), ordered=True)
        >>> schedule.next_step(order) is dead, schedule.place_of(dead, order).text
        (True, 'shard 0, item 5')
        >>> order.ended(0); schedule.next_step(order)
        True
    """

    def __init__(self, workers: list[W], owners: Mapping[int, int], limit: int) -> None:
        self._workers = workers
        self._owners = owners
        self._limit = limit
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
        self.announce(epoch)
        self._epochs = [known for known in self._epochs if known.number >= epoch.number]

    def begin_worker(self, worker: W, epoch: Epoch) -> None:
        """Have a worker that was just started run an epoch; `begin` follows after the last one."""
        self._epochs = [epoch]
        worker.begin(epoch.of_shards(worker.shards))

    def announce(self, epoch: Epoch) -> None:
        """Have the workers run an epoch after those that they were told. Idempotent."""
        if any(known.number == epoch.number for known in self._epochs):
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
        while not order.is_over:
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
        workers, limit = self._workers, self._limit
        # stop() was called in the meantime.
        if not workers:
            return []
        in_turn = len(workers) > 1 and order.ordered
        items: list[ItemTuple] = []
        while True:
            more = workers[self._served].inbox.take(1 if in_turn else limit)
            order.take(more)
            items += more
            if not in_turn or len(items) >= limit or self._head(order) is not True:
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
        remaining = order.position().of_shards(successor.shards)
        # A shard that has ended is late in the next epoch, and will be so again.
        failure = next((item for item in late if item.shard in (remaining.starts or ())), None)
        successor.begin(replace(remaining, late=failure))
        for epoch in self._epochs[1:]:
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
