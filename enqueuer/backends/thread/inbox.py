"""What worker threads have sent and the loop has not taken: a bounded, closable queue.

    worker --open_bunch(), put(), send()--> [ item, item, ... ] --items()--> the loop
           <------ room for as many ------------------- acknowledge() <-----

Items keep their places until the loop acknowledges them. A worker appends what it has made, and
then waits until there is a place for it: the loop need not wake the worker to take its item.

One lock guards what both sides write; nothing slow happens under it, and nothing polls. A worker
with an inbox of its own appends a bunch of items without the lock, one by one. A loop that is about
to sleep clears the bunch's gate: this ends the bunch after the item that is being made, so that the
worker can wake the loop. A bunch that begins while the loop sleeps wakes it by its first item.

The loop waits for a queue of its own, and takes items by one call of C: an exception in the middle
of a `threading.Condition` would leave its lock taken.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

from enqueuer.common.catching import raised_here, suppressed
from enqueuer.errors import Closed
from enqueuer.monitoring import usage
from enqueuer.monitoring.meters import WAITING, Meter
from enqueuer.workers.loop import Bunch
from enqueuer.workers.messages import Empty, End, Failure, ItemTuple, Taken

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
        with suppressed(queue.Empty):
            return source.get(False)
    return source.get(True, max(0.0, end - time.monotonic()))


def wait_for_any(
    inboxes: Sequence[ThreadInbox], end: float | None, awaited: int | None = None
) -> None:
    """Wait until one of some inboxes has a message, is closed or woken, or until a time.

    Args:
        inboxes: The inboxes.
        end: The time, of `time.monotonic()`; None waits forever.
        awaited: Number of the item that must come, unless it is sent in a bunch; None: any.
    """
    sleeper: SimpleQueue[bool] = SimpleQueue()
    try:
        for inbox in inboxes:
            if inbox.arm(sleeper, awaited):
                return
        get_until(sleeper, end)
    except raised_here(queue.Empty):
        pass
    finally:
        for inbox in inboxes:
            inbox.disarm()


# Value of `max_size` where something else keeps the bound.
UNBOUNDED = 1 << 62
# Items of a bunch, at least.
_SHORTEST_BUNCH = 4
_CLOSED = "the inbox is closed"
_NAMES = ("_taken", "last", "items")


class Putter(NamedTuple):
    """A worker that waits until there is a place for the last message that it has appended.

    Attributes:
        lock: Lock that it waits for.
        messages: Number of messages that were sent until then.
        items: Number of items among them, without its own if that is the last message.
        size_bytes: Number of their bytes, if these are bounded.
    """

    lock: threading.Lock
    messages: int
    items: int
    size_bytes: int


class ThreadInbox:
    """See `enqueuer.backends.pool.Inbox`.

    Args:
        max_size: Most items that may wait, >= 0, without one that each worker has made.
        max_bytes: Most bytes of these items; None for no such bound.
        shards: Number of shards whose items are sent to it.
        has_bunches: Whether workers may append bunches.

    Attributes:
        max_size: Most items that may wait.
        closed: Whether `close()` was called.
        acknowledged: Number of items that the loop has used.
        bytes_acknowledged: Number of their bytes, if these are bounded.

    Example:
        >>> inbox = ThreadInbox(max_size=2)
        >>> inbox.put((0, 0, "a", None), 0, Meter())
        >>> inbox.waiting, inbox.head()
        (1, True)
    """

    def __init__(
        self,
        max_size: int,
        max_bytes: int | None = None,
        shards: int = 1,
        has_bunches: bool = True,
    ) -> None:
        self.max_size = max_size
        self.closed = False
        self._max_bytes = max_bytes
        self._items: deque[ItemTuple] = deque()
        # Other messages, each with the number of items before it; and how many were sent.
        self._others: deque[tuple[int, End | Failure | Empty]] = deque()
        self._others_sent = 0
        # Number of items that were sent, without those of an open bunch.
        self._sent = 0
        self._taken = self._bytes_sent = 0
        self.acknowledged = self.bytes_acknowledged = 0
        # Number of the epoch that workers have begun last, and of items that were sent before it.
        self._epoch = -1, 0
        # With a bound in bytes: numbers of items that were sent, and of their bytes.
        self._totals: deque[tuple[int, int]] = deque()
        # Whether all items are of one shard, and none has a state.
        self._is_plain = shards == 1
        # Without the lock only one thread at a time may run.
        self._has_bunches = has_bunches and max_bytes is None and usage.switch_s() is not None
        self._bunches: list[Bunch] = []
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
        return len(self._items) + len(self._others)

    # --- the worker ---

    def begin_epoch(self, epoch: int) -> None:
        """Note that what is sent from now on is of an epoch; again, and by others, is harmless."""
        with self._lock:
            if epoch > self._epoch[0]:
                self._epoch = epoch, self._sent

    def open_bunch(self, shard: int, most: int) -> Bunch | None:
        """Let a worker append items without the lock, until the loop waits.

        Args:
            shard: Shard of the items, the only one of this inbox.
            most: Most items of the bunch.

        Returns:
            None if the next item must be sent by itself.
        """
        with self._lock:
            room = 0
            if self._has_bunches and not self.closed:
                # Its last item waits for a place.
                room = 1 + self.max_size - (self._sent - self.acknowledged) - len(self._others)
            most = min(room, most)
            # To make a shorter bunch takes longer than to send its items one by one.
            if most < _SHORTEST_BUNCH:
                return None
            sleeper = self._sleeper
            wake = None if sleeper is None else sleeper.put
            bunch = Bunch([shard] * (most + 1), self._items.extend, wake)
            self._bunches.append(bunch)
            return bunch

    def close_bunch(self, bunch: Bunch, made: int, meter: Meter) -> None:
        """Count the items of a bunch, and wake the loop if it waits; wait for places for them.

        Args:
            bunch: The bunch.
            made: Number of its items.
            meter: Account of the worker, where a wait is noted.
        """
        with self._lock:
            self._bunches.remove(bunch)
            self._sent += made
            if self._sleeper is not None and made:
                self._wake_loop_locked()
            self._wait_for_room_locked(1, meter)

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
            if item[3] is not None:
                self._is_plain = False
            if self._max_bytes is not None:
                self._bytes_sent += size_bytes
                self._totals.append((self._sent + 1, self._bytes_sent))
                while self._totals[0][0] <= self.acknowledged:
                    self._totals.popleft()
            # In one step, as the worker may run in the main thread.
            self._sent += 1
            self._items.append(item)
            if self._sleeper is not None and self._awaited in (None, item[1]):
                self._wake_loop_locked()
            self._wait_for_room_locked(1, meter)
            if self.closed:
                raise Closed(_CLOSED)

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
            self._insert_locked(message)
            self._wait_for_room_locked(0, meter)
            if self.closed:
                raise Closed(_CLOSED)

    def insert(self, message: Failure) -> None:
        """Append a failure, also within a bunch, and also by another thread; wait for nothing."""
        with self._lock:
            if not self.closed:
                self._insert_locked(message)

    def _insert_locked(self, message: End | Failure | Empty) -> None:
        made = sum(bunch.made for bunch in self._bunches)
        self._others.append((self._sent + made, message))
        self._others_sent += 1
        self._wake_loop_locked()

    def _wait_for_room_locked(self, items: int, meter: Meter) -> None:
        """Wait until all that was sent so far has its place, or the inbox is closed.

        Args:
            items: How many of the messages that have none are items of this worker: 0 or 1.
            meter: Account of the worker.
        """
        sent, size_bytes = self._sent + self._others_sent, self._bytes_sent
        if self._has_place(sent, size_bytes):
            return
        lock = threading.Lock()
        lock.acquire()
        self._putters.append(Putter(lock, sent, self._sent - items, size_bytes))
        # The garbage collector may have closed it in this method.
        if self.closed:
            return
        self._lock.release()
        meter.pause(WAITING)
        try:
            lock.acquire()
        finally:
            meter.resume()
            self._lock.acquire()

    def _has_place(self, messages: int, size_bytes: int) -> bool:
        """Return whether so many messages, of so many bytes, have places, and those of before."""
        gone = self.acknowledged + self._others_sent - len(self._others)
        if messages - gone > self.max_size:
            return self.closed
        is_light = self._max_bytes is None or (
            size_bytes - self.bytes_acknowledged <= self._max_bytes
        )
        return is_light or self.closed

    def _wake_loop_locked(self) -> None:
        sleeper = self._sleeper
        if sleeper is not None:
            sleeper.put(True)
        # Last, so that another call wakes the loop if an exception ended this one.
        self._sleeper = None

    # --- the loop ---

    @property
    def waiting(self) -> int:
        try:
            first = self._putters[0]
        except IndexError:
            return len(self._items)
        # The workers still count as making the others.
        return max(0, min(len(self._items), first.items - self._taken))

    def waiting_of(self, epoch: int) -> int:
        # In this order: what comes in between is of the epoch that has begun.
        waiting = self.waiting
        begun, before = self._epoch
        return waiting if begun == epoch else max(0, min(waiting, before - self._taken))

    def arm(self, sleeper: SimpleQueue[bool], awaited: int | None) -> bool:
        """Let what comes wake the loop from now on; return whether it need not sleep."""
        with self._lock:
            # Before the look: an item that comes after it then ends its bunch, and the worker
            # wakes the loop. The thread may be switched in between.
            for bunch in self._bunches:
                bunch.gate.clear()
            # Before the look as well: a `wake()` that comes after it then finds the queue.
            self._awaited, self._sleeper = awaited, sleeper
            return bool(self._items or self._others or self.closed or self._is_woken)

    def disarm(self) -> None:
        """Let nothing wake the loop, as it does not sleep any more."""
        self._sleeper = None
        self._is_woken = False

    def head(self) -> bool | End | Failure | Empty:
        # The items first: what was sent before one of them is seen as well then.
        has_items, others = bool(self._items), self._others
        if not others:
            return has_items
        before, message = others[0]
        return message if before <= self._taken else has_items

    def items(self, most: int, taken: Taken) -> Iterator[ItemTuple]:
        items, others = self._items, self._others
        count = min(most, len(items))
        if others:
            count = min(count, others[0][0] - self._taken)
        if count <= 0:
            return iter(())
        if count == 1 or not self._is_plain:
            return self._one_by_one(count, taken)
        shard, number = items[count - 1][:2]
        after = self._taken + count, shard, taken.items + count
        # What is written behind the items yields nothing.
        return itertools.chain(
            itertools.starmap(items.popleft, itertools.repeat((), count)),
            filter(None, map(setattr, (self, taken, taken), _NAMES, after)),
            filter(None, map(taken.numbers.__setitem__, (shard,), (number + 1,))),
        )

    def _one_by_one(self, count: int, taken: Taken) -> Iterator[ItemTuple]:
        items, numbers = self._items, taken.numbers
        for total in range(self._taken + 1, self._taken + 1 + count):
            # The inbox may have been cleared.
            if not items:
                return
            item = items[0]
            shard, number, _, state = item
            if state is not None:
                taken.remember(shard, number, state)
            # In one step, to the yield.
            numbers[shard] = number + 1
            taken.last = shard
            taken.items += 1
            self._taken = total
            del items[0]
            yield item

    def remove(self, message: End | Failure | Empty) -> None:
        with self._lock:
            if self._others and self._others[0][1] is message:
                del self._others[0]
            # Again, too: the first call may not have come to this.
            self._wake_putters_locked()

    def acknowledge(self) -> None:
        taken = self._taken
        # Workers that wait may have to be woken again.
        if taken == self.acknowledged and not self._putters:
            return
        with self._lock:
            if self._max_bytes is not None and taken > self.acknowledged:
                self.bytes_acknowledged = dict(self._totals)[taken]
            self.acknowledged = taken
            if self._putters:
                self._wake_putters_locked()

    def _wake_putters_locked(self) -> None:
        """Wake the workers for whose messages there are places now."""
        putters = self._putters
        while putters:
            first = putters[0]
            if not self._has_place(first.messages, first.size_bytes):
                return
            # The first may be awake already, and each call may run one of close(), which wakes all.
            is_asleep = first.lock.locked()
            if is_asleep and putters and putters[0] is first:
                first.lock.release()
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
            for bunch in self._bunches:
                bunch.gate.clear()
            self._wake_putters_locked()
            self._wake_loop_locked()

    def clear(self) -> None:
        """Throw away what waits, once it is closed."""
        with self._lock:
            # Others than these, as the loop may be about to take from them.
            self._items, self._others = deque(), deque()

    def snapshot(self) -> list[ItemTuple]:
        """Return the items that wait now, the oldest first, and take nothing."""
        return list(self._items)
