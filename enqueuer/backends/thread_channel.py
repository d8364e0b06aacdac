"""Both ends of a worker thread's inbox: the worker sends items, and the loop takes them.

    worker --put(), send()--> [ item, item, end, ... ] --take()---> the loop
           <------ room for as many ------------------- acknowledge() <-----
           <--get()---------- [ epoch or ticket, ... ] <--put()------------- (WorkQueue)

Items keep their places until the loop acknowledges them. A worker appends what it has made, and
then waits until there is a place for it: the loop need not wake the worker to take its item.

One lock guards what both sides write; nothing slow happens under it, and nothing polls. The loop
waits for a queue of its own, as it may wait for several inboxes at once.

The loop gets the yielded object itself, so a sender also notices generators that reuse one array.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from enqueuer.backends.pool import WorkerState
from enqueuer.common import interrupts
from enqueuer.common.objects import SAMPLED, size_of
from enqueuer.common.text import warn
from enqueuer.errors import Closed, OverwrittenDataWarning
from enqueuer.monitoring.duplicates import Digest, digest
from enqueuer.monitoring.meters import BEGAN, BYTES, IDLE, SINCE, WAITING, Meter
from enqueuer.order.messages import Empty, End, Epoch, Failure, ItemTuple, Ticket
from enqueuer.workers.event_loop import check_awaited
from enqueuer.workers.plan import Sender
from enqueuer.workers.task_loop import ElementThreads, LockedSender

# --- the loop's end -------------------------------------------------------------------------------

T = TypeVar("T")

# CPython 3.10 waits forever if the lock of the queue is free, as in a new one, and the time is over
# when it looks a second time.
_MAY_HANG = sys.version_info < (3, 11)


def get_until(source: SimpleQueue[T], end: float | None) -> T:
    """Take the next item, and wait for it until a time.

    Args:
        source: Queue from which one thread takes.
        end: The time, of `time.monotonic()`; None waits forever.

    Raises:
        queue.Empty: Nothing came until then.

    Example:
        >>> source = SimpleQueue()
        >>> source.put("a")
        >>> get_until(source, time.monotonic())
        'a'
    """
    if end is None:
        return source.get()
    if _MAY_HANG:
        # It takes the lock, and waits for nothing.
        with contextlib.suppress(queue.Empty):
            return source.get(False)
    return source.get(True, max(0.0, end - time.monotonic()))


def wait_for_any(
    inboxes: Sequence[ThreadInbox], end: float | None, awaited: int | None = None
) -> None:
    """Wait until one of some inboxes has a message, is closed or woken, or until a time.

    Args:
        inboxes: The inboxes.
        end: The time, of `time.monotonic()`; None waits forever.
        awaited: Number of the item that must come; None: any.
    """
    sleeper: SimpleQueue[bool] = SimpleQueue()
    try:
        for inbox in inboxes:
            if inbox.arm(sleeper, awaited):
                return
        interrupts.interruptible(get_until, sleeper, end)
    except queue.Empty:
        pass
    finally:
        for inbox in inboxes:
            inbox.disarm()


# Value of `max_size` where something else keeps the bound.
UNBOUNDED = 1 << 62
_CLOSED = "the inbox is closed"


class Putter(NamedTuple):
    """A worker that waits until there is a place for the last message that it has appended.

    Attributes:
        gate: Queue that it waits for; more than one entry does no harm.
        messages: Number of messages that were sent until then.
        size_bytes: Number of bytes that were sent until then, if these are bounded.
        items: 1 if its message is an item, else 0.
    """

    gate: SimpleQueue[bool]
    messages: int
    size_bytes: int
    items: int


class ThreadInbox:
    """See `enqueuer.backends.pool.Inbox`. Any thread may call anything but what takes messages.

    Args:
        max_size: Most items that may wait, >= 0, without one that each worker has made.
        max_bytes: Most bytes of these items; None for no such bound.

    Attributes:
        max_size: Most items that may wait.
        closed: Whether `close()` was called; it stays so.
        acknowledged: Number of items that the loop has used.
        bytes_acknowledged: Number of their bytes, if these are bounded.

    Example:
        >>> inbox = ThreadInbox(max_size=2)
        >>> inbox.put((0, 0, "a", None), 0, Meter())
        >>> inbox.waiting, inbox.head()
        (1, True)
    """

    def __init__(self, max_size: int, max_bytes: int | None = None) -> None:
        self.max_size = max_size
        self.closed = False
        self._max_bytes = max_bytes
        self._messages: deque[ItemTuple | End | Failure | Empty] = deque()
        # Numbers of messages that were sent, of items among them, and of those that were taken.
        self._sent = self._items_sent = self._taken = 0
        # Number of messages that are no items and were removed.
        self._removed = 0
        self.acknowledged = self.bytes_acknowledged = 0
        # With a bound in bytes: the size of each item that waits, and sums.
        self._sizes: deque[int] = deque()
        self._bytes_sent = self._bytes_taken = 0
        # Number of the epoch that workers have begun last, and of items that were sent before it.
        self._epoch = -1, 0
        # The queue in which the loop waits for anything; two workers may put it there.
        self._sleeper: SimpleQueue[bool] | None = None
        self._awaited: int | None = None  # the number of the item that it waits for
        # Whether `wake()` was called since the last wait.
        self._is_woken = False
        # In the order in which they have sent.
        self._putters: deque[Putter] = deque()
        # Reentrant, as the garbage collector may close a forgotten inbox inside its own put().
        self._lock = threading.RLock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._messages)

    # --- the worker ---

    def begin_epoch(self, epoch: int) -> None:
        """Note that what is sent from now on is of an epoch. Idempotent."""
        with self._lock:
            if epoch > self._epoch[0]:
                self._epoch = epoch, self._items_sent

    def put(self, item: ItemTuple, size_bytes: int, meter: Meter) -> None:
        """Append an item, and wait until there is a place for it.

        Args:
            item: The item.
            size_bytes: Bytes that count against the bound.
            meter: Account of the worker, where a wait is noted.

        Raises:
            Closed: The inbox is closed, or was while waiting.
        """
        with self._lock:
            if self.closed:
                raise Closed(_CLOSED)
            if self._max_bytes is not None:
                self._bytes_sent += size_bytes
                self._sizes.append(size_bytes)
            self._messages.append(item)
            self._sent += 1
            self._items_sent += 1
            if self._sleeper is not None and self._awaited in (None, item[1]):
                self._wake_loop_locked()
            self._wait_for_room_locked(1, meter)

    def send(self, message: End | Failure | Empty, meter: Meter) -> None:
        """Append another message, and wait until there is a place for it.

        Args:
            message: The message.
            meter: Account of the worker, where a wait is noted.

        Raises:
            Closed: The inbox is closed, or was while waiting.
        """
        with self._lock:
            if self.closed:
                raise Closed(_CLOSED)
            self._messages.append(message)
            self._sent += 1
            self._wake_loop_locked()
            self._wait_for_room_locked(0, meter)

    def _wait_for_room_locked(self, items: int, meter: Meter) -> None:
        """Wait until all that was sent so far has its place, or the inbox is closed.

        Args:
            items: As in `Putter`.
            meter: Account of the worker.

        Raises:
            Closed: It is closed.
        """
        if not self._has_place(self._sent, self._bytes_sent):
            gate: SimpleQueue[bool] = SimpleQueue()
            self._putters.append(Putter(gate, self._sent, self._bytes_sent, items))
            # The garbage collector may have closed it in this method.
            if not self.closed:
                self._lock.release()
                meter.pause(WAITING)
                try:
                    gate.get()
                finally:
                    meter.resume()
                    self._lock.acquire()
        if self.closed:
            raise Closed(_CLOSED)

    def _has_place(self, messages: int, size_bytes: int) -> bool:
        """Return whether so many messages, of so many bytes, have places, and those of before."""
        if self.closed:
            return True
        if messages - self.acknowledged - self._removed > self.max_size:
            return False
        return self._max_bytes is None or size_bytes - self.bytes_acknowledged <= self._max_bytes

    def _wake_loop_locked(self) -> None:
        sleeper = self._sleeper
        if sleeper is not None:
            sleeper.put(True)
        self._sleeper = None

    # --- the loop ---

    @property
    def waiting(self) -> int:
        with self._lock:
            # The workers still count as making what has no place.
            waiting = self._items_sent - self._taken
            return max(0, waiting - sum(putter.items for putter in self._putters))

    def waiting_of(self, epoch: int) -> int:
        with self._lock:
            begun, before = self._epoch
            limit = self._items_sent if begun == epoch else before
            return max(0, min(self.waiting, limit - self._taken))

    def arm(self, sleeper: SimpleQueue[bool], awaited: int | None) -> bool:
        """Let what comes wake the loop from now on; return whether it need not sleep."""
        with self._lock:
            self._awaited, self._sleeper = awaited, sleeper
            return bool(self._messages or self.closed or self._is_woken)

    def disarm(self) -> None:
        """Let nothing wake the loop, as it does not sleep any more."""
        with self._lock:
            self._sleeper = None
            self._is_woken = False

    def head(self) -> bool | End | Failure | Empty:
        with self._lock:
            message = self._messages[0] if self._messages else False
        return True if isinstance(message, tuple) else message

    def take(self, limit: int) -> list[ItemTuple]:
        ready: list[ItemTuple] = []
        with self._lock:
            messages = self._messages
            while messages and len(ready) < limit:
                message = messages[0]
                if not isinstance(message, tuple):
                    break
                ready.append(message)
                messages.popleft()
            self._taken += len(ready)
            if self._max_bytes is not None:
                for _ in ready:
                    self._bytes_taken += self._sizes.popleft()
        return ready

    def remove(self, message: End | Failure | Empty) -> None:
        with self._lock:
            if self._messages and self._messages[0] is message:
                self._removed += 1
                self._messages.popleft()
            self._wake_putters_locked()

    def acknowledge(self) -> None:
        with self._lock:
            self.acknowledged, self.bytes_acknowledged = self._taken, self._bytes_taken
            self._wake_putters_locked()

    def _wake_putters_locked(self) -> None:
        """Wake the workers for whose messages there are places now."""
        putters = self._putters
        while putters and self._has_place(putters[0].messages, putters[0].size_bytes):
            first = putters[0]
            first.gate.put(True)
            # The garbage collector may have closed the inbox meanwhile, which wakes all.
            if putters and putters[0] is first:
                del putters[0]

    # --- both ---

    def wake(self) -> None:
        """Wake the loop, or let its next wait return at once."""
        with self._lock:
            self._is_woken = True
            self._wake_loop_locked()

    def close(self) -> None:
        """Let nothing more in and wake all threads; what is in the inbox can still be taken."""
        with self._lock:
            self.closed = True
            self._wake_putters_locked()
            self._wake_loop_locked()

    def clear(self) -> None:
        """Throw away what waits, once it is closed."""
        with self._lock:
            self._messages.clear()
            self._sizes.clear()
            self._taken = self._items_sent

    def snapshot(self) -> list[ItemTuple]:
        """Return the items that wait now, the oldest first, and take nothing."""
        with self._lock:
            return [message for message in self._messages if isinstance(message, tuple)]


# --- the worker's end -----------------------------------------------------------------------------


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
        same = [waiting for waiting in self.inbox.snapshot() if waiting[:2] in digests]
        for waiting in same[:1] + same[1:][-1:]:
            now = digest(waiting[2])
            if now is None or now == digests[waiting[:2]]:
                continue
            # The loop may have taken it since, and changed it itself.
            if any(entry is waiting for entry in self.inbox.snapshot()):
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
