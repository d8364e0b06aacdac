"""What worker threads have sent and the loop has not taken: a bounded, closable queue.

    worker --put(), send()--> [ item, item, end, ... ] --take()---> the loop
           <------ room for as many ------------------- acknowledge() <-----

Items keep their places until the loop acknowledges them. A worker appends what it has made, and
then waits until there is a place for it: the loop need not wake the worker to take its item.

One lock guards what both sides write; nothing slow happens under it, and nothing polls. The loop
waits for a queue of its own, as it may wait for several inboxes at once.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

from enqueuer.common import interrupts
from enqueuer.errors import Closed
from enqueuer.monitoring.meters import WAITING, Meter
from enqueuer.order.messages import Empty, End, Failure, ItemTuple

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
            most = self._items_sent if begun == epoch else before
            return max(0, min(self.waiting, most - self._taken))

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

    def take(self, most: int) -> list[ItemTuple]:
        ready: list[ItemTuple] = []
        with self._lock:
            messages = self._messages
            while messages and len(ready) < most:
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
