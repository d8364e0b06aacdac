"""A bounded, closable buffer for threads.

    threads --put()--> [ item, item, ... <= max_size ] --get()--> threads

Any thread may call anything. One lock guards everything; nothing slow happens under it and
nothing polls. Closing wakes all threads: put() raises Closed at once, get() first returns the items
that are left.

Ctrl-C may raise at any call. So the lock is taken by itself: a `threading.Condition` enters and
leaves it in Python code, where an exception would leave it locked. A thread in get() waits for a
lock of its own: an exception in `Condition.wait` leaves a waiter behind, on which a later notify()
is wasted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from queue import Empty, Full
from typing import Generic, TypeVar

from enqueuer.errors import Closed

T = TypeVar("T")


class Buffer(Generic[T]):
    """A bounded, closable, thread-safe first-in first-out buffer.

    It differs from `queue.Queue` in three ways. It can be closed, which wakes all waiting threads.
    It can be limited by bytes as well as by items. A thread that waits in `get()` counts as a
    place, so even a buffer of size 0 works: it passes items directly.

    Args:
        max_size: The most items that may wait, >= 0.
        max_bytes: The most bytes that may wait, as given to `put()`, or None for no such bound.
            A larger item is passed only to a thread that waits for it.

    Example:
        >>> buffer = Buffer(max_size=2)
        >>> buffer.put("a"); buffer.put("b")
        >>> buffer
        <Buffer 2/2 open>
        >>> buffer.close(); list(buffer)
        ['a', 'b']
    """

    def __init__(self, max_size: int = 10, max_bytes: int | None = None) -> None:
        if max_size < 0:
            raise ValueError(f"max_size must be >= 0, got {max_size}")
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes must be >= 1 or None, got {max_bytes}")
        self.max_size = max_size
        self.max_bytes = max_bytes
        self._items: deque[tuple[T, int]] = deque()
        # Bytes of the items that wait.
        self._bytes = 0
        # The lock that each waiting thread waits for.
        self._getters: dict[threading.Lock, None] = {}
        self._putters = 0
        self._closed = False
        # Reentrant, as the garbage collector may close a forgotten buffer inside its own put().
        self._lock = threading.RLock()
        self._not_full = threading.Condition(self._lock)

    def put(self, item: T, timeout: float | None = None, size_bytes: int = 0) -> None:
        """Append `item`; wait while there is no room.

        Args:
            item: Anything, `None` included.
            timeout: Seconds to wait at most; None, the default, waits forever.
            size_bytes: What the item counts against `max_bytes`.

        Raises:
            Closed: The buffer is closed, or was while waiting.
            queue.Full: There was no room within `timeout`.
        """
        if self.offer(item, size_bytes):
            return
        with self._lock:
            self._wait_for_room_locked(size_bytes, timeout)
            self.offer(item, size_bytes)

    def put_nowait(self, item: T, size_bytes: int = 0) -> None:
        """Append `item`, or raise `queue.Full` at once."""
        self.put(item, 0, size_bytes)

    def offer(self, item: T, size_bytes: int = 0) -> bool:
        """Append `item` if there is room now, and return whether that was so.

        Raises:
            Closed: The buffer is closed.
        """
        with self._lock:
            if not self._may_put_locked(size_bytes):
                return False
            if self._closed:
                raise Closed("the buffer is closed")
            self._items.append((item, size_bytes))
            self._bytes += size_bytes
            if self._getters:
                self._wake_getters_locked()
            return True

    def get(self, timeout: float | None = None) -> T:
        """Take the oldest item; wait while there is none.

        Args:
            timeout: Seconds to wait at most; None, the default, waits forever.

        Raises:
            Closed: The buffer is closed and nothing is left in it.
            queue.Empty: Nothing came within `timeout`.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._wait_for_item(end)
            with self._lock:
                # Another thread may have taken it.
                if self._items:
                    return self._get_locked()

    def poll(self) -> T | None:
        """Take the oldest item that is there now; None if none is, also if it is closed."""
        with self._lock:
            return self._get_locked() if self._items else None

    def get_nowait(self) -> T:
        """Take the oldest item, or raise `queue.Empty` at once."""
        return self.get(0)

    def close(self) -> None:
        """Let nothing more in and wake all threads; the items in the buffer can still be taken."""
        with self._lock:
            self._closed = True
            self._not_full.notify_all()
            self._wake_getters_locked()

    def clear(self) -> None:
        """Drop the items that wait."""
        with self._lock:
            self._items.clear()
            self._bytes = 0
            self._not_full.notify_all()

    def snapshot(self) -> list[T]:
        """Return the items that wait now, the oldest first, and take none."""
        with self._lock:
            return [item for item, _ in self._items]

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._closed

    def qsize(self) -> int:
        """Return how many items wait now."""
        return len(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        """Take items until the buffer is closed and empty."""
        while True:
            try:
                yield self.get()
            except Closed:
                return

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        waiting = {"put": self._putters, "get": len(self._getters)}
        texts = (f", {count} in {name}()" for name, count in waiting.items() if count)
        return f"<Buffer {len(self._items)}/{self.max_size} {state}{''.join(texts)}>"

    def _get_locked(self) -> T:
        item, size_bytes = self._items.popleft()
        self._bytes -= size_bytes
        self._wake_putters_locked()
        return item

    def _may_put_locked(self, size_bytes: int) -> bool:
        if self._closed:
            return True
        if len(self._getters) > len(self._items):
            return True
        if len(self._items) >= self.max_size:
            return False
        return self.max_bytes is None or self._bytes + size_bytes <= self.max_bytes

    def _wait_for_room_locked(self, size_bytes: int, timeout: float | None) -> None:
        self._putters += 1
        try:
            # Woken by get(), by a new getter, by clear() and by close().
            if not self._not_full.wait_for(lambda: self._may_put_locked(size_bytes), timeout):
                raise Full
        finally:
            self._putters -= 1
            if not self._putters:
                self._wake_getters_locked()

    def _wait_for_item(self, end: float | None) -> None:
        """Wait until there is an item.

        Raises:
            Closed: The buffer is closed and nothing is left in it.
            queue.Empty: Nothing came until `end`.
        """
        if self._items:
            return
        wake_up = threading.Lock()
        wake_up.acquire()
        is_late = False
        try:
            while True:
                with self._lock:
                    if self._items:
                        return
                    if self._closed:
                        raise Closed("the buffer is closed and empty")
                    if is_late:
                        # Otherwise put() would exceed the bound for this thread.
                        del self._getters[wake_up]
                        raise Empty
                    self._getters[wake_up] = None
                    self._wake_putters_locked()
                    # A thread in put() appends its item now, so that get_nowait() finds it.
                    left = -1.0
                    if end is not None and not self._putters:
                        left = max(0.0, end - time.monotonic())
                # Woken by put(), by close() and by the last putter that leaves.
                is_late = not wake_up.acquire(True, left)
        finally:
            # In one step.
            self._getters.pop(wake_up, None)

    def _wake_getters_locked(self) -> None:
        for wake_up in tuple(self._getters):
            if wake_up.locked():
                wake_up.release()

    def _wake_putters_locked(self) -> None:
        if not self._putters:
            return
        # With a bound on bytes the woken thread may have too large an item, and the next one not.
        if self.max_bytes is None:
            self._not_full.notify()
        else:
            self._not_full.notify_all()
