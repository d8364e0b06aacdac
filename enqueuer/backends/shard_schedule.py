"""Which worker's message is next, and where a replaced worker goes on: the schedule of shards.

The order of the items (`order.py`) says which shard is next; of the workers, each runs certain
shards. This file decides and does not wait.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Generic, cast

from enqueuer.backends.order import Order, ShardOrder
from enqueuer.backends.pool import Inbox, W, WorkerState
from enqueuer.backends.restarts import DeathPlace
from enqueuer.backends.stall import awaited
from enqueuer.monitoring.loop_meter import LoopMeter
from enqueuer.workers.messages import Empty, End, Epoch, Failure, ItemTuple


class Step(enum.Enum):
    """The next step of the engine, if it is neither a failure nor a worker that has ended."""

    # Something can be taken, or the epoch is over.
    TAKE = 1
    # Nothing can be taken until something comes.
    WAIT = 2


NOTHING: Final[Iterator[ItemTuple]] = iter(())
"""What `ShardSchedule.more` returns if nothing has come and all workers live."""

# To look up a member of an enum takes long.
_TAKE, _WAIT, _DEAD = Step.TAKE, Step.WAIT, WorkerState.DEAD


class ShardSchedule(Generic[W]):
    """The decisions of the engine for workers that run shards.

    Called by one consumer at a time.

    Args:
        workers: The workers, by their indices; the engine replaces those that died.
        owners: Index of the worker that runs each shard.
        bunch: Most items to take at once.
        quick_bunch: Most items of one worker to take at once if the loop is quick.
        loop_meter: Account of the waits, which knows whether it is.

    Example:
        >>> from enqueuer.backends.order import RoundRobin
        >>> from enqueuer.monitoring.loop_meter import LoopMeter
        >>> from enqueuer.workers.messages import Item, Start
        >>> class Worker:
        ...     def __init__(self, state, *messages):
        ...         self.shards, self.state, self.inbox = (len(messages),), state, self
        ...         self.messages = list(messages)
        ...     def head(self):
        ...         return isinstance(self.messages[0], Item) if self.messages else False
        >>> dead, alive = Worker(WorkerState.DEAD), Worker(WorkerState.RUNNING, Item(1, 0, "x"))
        >>> schedule = ShardSchedule([dead, alive], {0: 0, 1: 1}, 1, 1, LoopMeter())
        >>> order = RoundRobin({0: Start(5), 1: Start(4)})  # shard 0 is next
        >>> schedule.next_step(order) is dead, schedule.place_of(dead, order).text
        (True, 'shard 0, item 5')
        >>> order.ended(0); schedule.next_step(order)
        <Step.TAKE: 1>
    """

    def __init__(
        self,
        workers: list[W],
        owners: Mapping[int, int],
        bunch: int,
        quick_bunch: int,
        loop_meter: LoopMeter,
    ) -> None:
        self._workers = workers
        self._owners = owners
        self._bunch = bunch
        self._quick_bunch = quick_bunch
        self._loop_meter = loop_meter
        self._epoch = Epoch(0)
        # The epoch that each worker began at its start.
        self._begun: Epoch | None = None
        # Index of the worker whose message was next last. Not the worker, nor its inbox: after
        # `stop()` nothing must keep the memory that is shared with it.
        self._served = 0
        # The failure that was returned last.
        self._failed: Failure | None = None
        # The end of a shard that is about to be noted and dropped. It must not stay behind after
        # an interrupt: it would end the shard in the next epoch.
        self._ending: tuple[int, End, Order] | None = None
        self._is_acknowledged = True

    def waiting(self) -> int:
        """Return how many items wait. Called by any thread."""
        return sum(inbox.waiting for inbox in inboxes_of(self._workers))

    def begin(self, epoch: Epoch) -> None:
        """Have the workers run an epoch."""
        self._epoch = epoch
        if epoch is self._begun:
            return
        for worker in self._workers:
            worker.begin(epoch.of_shards(worker.shards))

    def begin_worker(self, worker: W, epoch: Epoch) -> None:
        """Have a worker that was just started run an epoch; `begin` follows after the last one."""
        self._begun = epoch
        worker.begin(epoch.of_shards(worker.shards))

    def next_step(self, order: Order) -> Step | Failure | W:
        """Decide what to do next: take items, return a failure, replace a worker, or wait."""
        if self._ending is not None:
            self._note_end()
        while not order.done:
            message = self._head(order)
            if message is True:
                return _TAKE
            if message is False:
                dead = self._dead(order)
                return _WAIT if dead is None else dead
            if isinstance(message, Failure):
                self._failed = message
                return message
            assert isinstance(message, End)
            self._ending = self._served, message, order
            self._note_end()
        return _TAKE

    def _head(self, order: Order) -> bool | End | Failure | Empty:
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

    def _note_end(self) -> None:
        if self._ending is not None:
            index, end, order = self._ending
            order.ended(end.shard, end.state, end.number)
            self._remove(index, end)
            self._ending = None

    def _dead(self, order: Order) -> W | None:
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

    def awaited_worker(self, order: Order) -> W | None:
        """Return the worker that the loop waits for; None if it waits for any."""
        shard = order.turn()
        if shard is None or not self._workers:
            return None
        return self._workers[self._owners[shard]]

    def awaited(self, order: Order) -> str:
        """Return what the loop waits for, in words."""
        return awaited(order)

    def take(self, order: Order) -> Iterator[ItemTuple]:
        """Take what is next and is there."""
        self._is_acknowledged = False
        workers, shards = self._workers, cast(ShardOrder, order)
        # stop() was called in the meantime.
        if not workers:
            return iter(())
        if len(workers) == 1 or self._bunch == 1 or order.turn() is None:
            return workers[self._served].inbox.items(self._bunch, shards)
        return self._take_in_turn(shards)

    def more(self, order: Order) -> Iterator[ItemTuple] | None:
        """Acknowledge what was taken, and take what is next and is there.

        Returns:
            NOTHING if nothing has come; None if `next_step` must say what is next.
        """
        workers = self._workers
        if not self._is_acknowledged:
            for worker in workers:
                worker.inbox.acknowledge()
            self._is_acknowledged = True
        if self._ending is not None or order.done:
            return None
        if len(workers) == 1:
            self._served = 0
            (worker,) = workers
            head = worker.inbox.head()
            if head is True:
                self._is_acknowledged = False
                most = self._quick_bunch if self._loop_meter.is_quick else self._bunch
                # The order of shards is a record, too.
                return worker.inbox.items(most, order)  # type: ignore[arg-type]
        else:
            head = self._head(order)
            if head is True:
                return self.take(order)
        if head is False:
            for worker in workers:
                if worker.state is _DEAD:
                    return None
            return NOTHING
        return None

    def _take_in_turn(self, order: ShardOrder) -> Iterator[ItemTuple]:
        for _ in range(self._bunch):
            worker = None if order.done else self.awaited_worker(order)
            if worker is None or worker.inbox.head() is not True:
                return
            yield from worker.inbox.items(1, order)

    def pass_over(self) -> None:
        """Forget the failure that `next_step` returned last."""
        if self._failed is not None:
            self._remove(self._served, self._failed)
            self._failed = None

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

    def place_of(self, dead: W, order: Order) -> DeathPlace:
        """Return where a worker died: the first item that it did not send."""
        shard = order.next_of(dead.shards)
        # The worker had sent all of this epoch.
        if shard is None:
            shard = dead.shards[0]
        number = order.number_of(shard)
        return DeathPlace(shard, number, f"shard {shard}, item {number}")

    def resume(self, dead: W, successor: W, order: Order) -> None:
        """Have a new worker go on with the first items that a dead one did not send."""
        rest = Epoch(self._epoch.number, order.rest())
        successor.begin(rest.of_shards(successor.shards))

    def give_up(self, dead: W, failure: Failure) -> Failure | None:
        """Return the failure of a worker that is not replaced, if that is what is next."""
        return failure

    def part_with(self, leaver: W) -> None:
        """Let others do what a worker that was asked to exit has not done."""
        raise AssertionError("the number of workers that run shards is fixed")


def inboxes_of(workers: Sequence[W]) -> list[Inbox]:
    """Return the inboxes of some workers, each once. Called by any thread."""
    return list(dict.fromkeys(worker.inbox for worker in list(workers)))
