"""A worker thread's end of its inbox: it sends items, and takes epochs or tickets from a queue.

    WorkQueue: put_all() -> [ item, item, ... ] -> get(), of any thread

The loop gets the yielded object itself, so this also notices generators that reuse one array.
"""

from __future__ import annotations

import copy
import dataclasses
import queue
from collections.abc import Iterable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from enqueuer.backends.pool import WorkerState
from enqueuer.backends.stall import warn
from enqueuer.backends.thread.inbox import ThreadInbox
from enqueuer.common.objects import SAMPLED, size_of
from enqueuer.errors import Closed, OverwrittenDataWarning
from enqueuer.monitoring.duplicates import Digest, digest
from enqueuer.monitoring.meters import BEGAN, BYTES, IDLE, SINCE, WAITING, Meter
from enqueuer.order.messages import Empty, End, Epoch, Failure, ItemTuple, Ticket
from enqueuer.workers.event_loop import check_awaited
from enqueuer.workers.plan import Sender
from enqueuer.workers.task_loop import ElementThreads, LockedSender

T = TypeVar("T")


class WorkQueue(Generic[T]):
    """An unbounded queue whose end is seen by all threads that wait. Any thread may call anything.

    An order may be put twice, so putting must never wait for room.

    Example:
        >>> from enqueuer.monitoring.meters import IDLE
        >>> queue, meter = WorkQueue(), Meter()
        >>> queue.put("a"); queue.get(meter, IDLE)
        'a'
        >>> queue.put("b"); queue.close(); queue.get(meter, IDLE), queue.get(meter, IDLE)
        (None, None)
    """

    def __init__(self) -> None:
        # Its put() is reentrant: in its middle the garbage collector may close a forgotten queue.
        self._items: SimpleQueue[T | None] = SimpleQueue()
        self.put, self._take = self._items.put, self._items.get_nowait
        self._is_closed = False

    def __len__(self) -> int:
        return self._items.qsize()

    def put_all(self, items: Iterable[T | None]) -> None:
        """Append several items."""
        for item in items:
            self._items.put(item)

    def get(self, meter: Meter, phase: int) -> T | None:
        """Take the oldest item; wait while there is none.

        Args:
            meter: Account of the worker, where a wait is noted.
            phase: What the wait counts as.

        Returns:
            The item; None if the queue is closed.
        """
        try:
            item = self._take()
        except queue.Empty:
            meter.pause(phase)
            item = self._items.get()
            meter.resume()
        if self._is_closed:
            # This wakes the next thread.
            self.put(None)
            return None
        return item

    def close(self) -> None:
        """End all waits; what is in the queue is not done."""
        self._is_closed = True
        self.put(None)


# First items of a worker, each of which is weighed and checked for reuse.
_WATCHED = 16
# One item of so many is weighed: to weigh each would take longer than to send it.
_WEIGHED_EVERY = 256

# The worker that takes this ticket exits.
EXIT = Ticket(-1, 0, ())


class ThreadSender:
    """The Channel of a worker thread.

    Args:
        index: Index of the worker.
        inbox: Inbox to which it sends its messages.
        orders: Queue from which it takes epochs, if it runs shards.
        tickets: Queue from which it takes tickets, if it does tasks.
        measured: Whether items count by their bytes.
    """

    def __init__(
        self,
        index: int,
        inbox: ThreadInbox,
        orders: WorkQueue[Epoch],
        tickets: WorkQueue[Ticket],
        measured: bool,
    ) -> None:
        self.index = index
        self.state = WorkerState.RUNNING
        # The exception that ended the loop of the worker.
        self.error: BaseException | None = None
        self.inbox = inbox
        self.orders = orders
        self._tickets = tickets
        self._measured = measured
        self.meter = Meter()
        # Where waits for orders and tickets are noted.
        self._waits = self.meter
        # The threads that run elements, if there are several.
        self.elements: ElementThreads | None = None
        # Number of items that it has sent. It and the next two have one writer; another thread that
        # reads them in between gets an estimate that is late by one item.
        self._sent = 0
        # Number of items at which one is weighed next, and when the last one was.
        self._due, self._weighed = 1, 0
        # of the first items, by shard and number; None once they are no longer needed
        self._digests: dict[tuple[int, int], Digest] | None = {}

    @property
    def sent(self) -> tuple[int, int]:
        """How many items it has sent, or is about to send, and about how many bytes."""
        sent = self._sent
        return sent, self.meter.words[BYTES] * sent // max(1, self._weighed)

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        size_bytes = size_of(value) if self._measured else 0
        if state is not None:
            # It may be the iterator's own state, which changes.
            state = copy.deepcopy(state)
        self._sent += 1
        item = (shard, number, value, state)
        if self._sent >= self._due:
            check_awaited(value)
            self._weigh(value)
            if self._digests is not None:
                self._look_for_reuse(item, self._digests)
        self.inbox.put(item, size_bytes, self.meter)

    def _weigh(self, value: object) -> None:
        """Note the size of an item, which stands for those since the last one that was weighed."""
        sent = self._sent
        self.meter.words[BYTES] += size_of(value, SAMPLED) * (sent - self._weighed)
        self._weighed = sent
        self._due = sent + (1 if sent < _WATCHED else min(sent, _WEIGHED_EVERY))

    def _look_for_reuse(self, item: ItemTuple, digests: dict[tuple[int, int], Digest]) -> None:
        """Warn if an item that waits is no longer what it was when it was yielded.

        The oldest and the newest of this worker are looked at, which is enough for a generator
        with one buffer or a few. What the loop has taken it may have changed itself.
        """
        own = [waiting for waiting in self.inbox.snapshot() if waiting[:2] in digests]
        for waiting in own[:1] + own[1:][-1:]:
            now = digest(waiting[2])
            if now is None or now == digests[waiting[:2]]:
                continue
            # The loop may have taken it since, and changed it itself.
            if any(one is waiting for one in self.inbox.snapshot()):
                self._digests = None
                _warn_of_reuse(self, waiting)
                return
        if self._due > _WATCHED:
            self._digests = None
            return
        found = digest(item[2])
        if found is not None:
            digests[item[:2]] = found

    def _forget_digests(self) -> None:
        """Look for no more reuse if items wait that have the same numbers as those to come."""
        digests = self._digests
        if digests and any(item[:2] in digests for item in self.inbox.snapshot()):
            self._digests = None

    def send(self, message: End | Failure | Empty) -> None:
        match message:
            case Failure():
                message = self._signed(message)
            case End(state=state) if state is not None:
                message = dataclasses.replace(message, state=copy.deepcopy(state))
        self.inbox.send(message, self.meter)

    def _signed(self, failure: Failure) -> Failure:
        return dataclasses.replace(failure, worker=str(self))

    def fail(self, error: BaseException) -> None:
        """Let the training loop see that the loop of this worker has failed; any thread."""
        self.error = self.error or error
        # Last, as the loop reads the error after it.
        self.state = WorkerState.DEAD
        self.inbox.wake()

    def check(self) -> None:
        if self.inbox.closed:
            raise Closed("the enqueuer was stopped")

    def share(self, threads: ElementThreads) -> Sender:
        # The worker waits only when its threads do.
        self._waits = Meter()
        self.elements = threads
        threads.on_error = self.fail
        return LockedSender(self)

    def next_epoch(self) -> Epoch | None:
        if not self.meter.words[BEGAN]:
            self._begin()
        epoch = self.orders.get(self._waits, IDLE)
        if epoch is not None:
            self.inbox.begin_epoch(epoch.number)
            self._forget_digests()
        return epoch

    def next_ticket(self) -> Ticket | None:
        if not self.meter.words[BEGAN]:
            self._begin()
        ticket = self._tickets.get(self._waits, WAITING)
        if ticket is EXIT:
            self.state = WorkerState.ENDED
            return None
        return ticket

    def _begin(self) -> None:
        self.meter.begin()
        # Threads for elements wait since they were started, which took part of the start.
        self.meter.words[SINCE] = self.meter.words[BEGAN]

    def __str__(self) -> str:
        return f"worker {self.index} (thread)"


def _warn_of_reuse(sender: ThreadSender, item: ItemTuple) -> None:
    warn(
        f"{sender}: item {item[1]} of shard {item[0]} was changed after it was "
        "yielded, while it waited for the loop. The generator seems to reuse one buffer, but "
        "threads pass on the object itself: yield a copy (batch.copy()), or use "
        "backend='process', which copies",
        OverwrittenDataWarning,
    )
