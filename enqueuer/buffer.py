"""A bounded, closable buffer for threads.

    threads --put()--> [ item, item, ... <= max_size ] --get()--> threads

Any thread may call anything. One lock guards everything; nothing slow happens under it and
nothing polls. Closing wakes all threads: put() raises Closed at once, get() first returns the items
that are left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from queue import Empty, Full
from typing import Generic, TypeVar

from enqueuer.common import checks
from enqueuer.errors import Closed

T = TypeVar("T")


class Buffer(Generic[T]):
    """A bounded, closable, thread-safe first-in first-out buffer.

    It differs from `queue.Queue` in that it can be closed, which wakes all waiting threads.

    Args:
        max_size: The most items that may wait, >= 1.

    Example:
        >>> buffer = Buffer(max_size=2)
        >>> buffer.put("a"); buffer.put("b")
        >>> buffer
        <Buffer 2/2 open>
        >>> buffer.close(); list(buffer)
        ['a', 'b']
    """

    def __init__(self, max_size: int = 10) -> None:
        self.max_size = checks.positive("max_size", max_size)
        self._items: deque[T] = deque()
        self._closed = False
        # Reentrant, as the garbage collector may close a forgotten buffer inside its own put().
        self._lock = threading.RLock()
        # All are notified: a thread that an exception ends would waste the only notice.
        self._changed = threading.Condition(self._lock)

    def put(self, item: T, timeout: float | None = None) -> None:
        """Append `item`; wait while there is no room.

        Args:
            item: Anything, `None` included.
            timeout: Seconds to wait at most; None, the default, waits forever.

        Raises:
            Closed: The buffer is closed, or was while waiting.
            queue.Full: There was no room within `timeout`.
        """
        with self._lock:
            # Woken by get() and close().
            if not self._changed.wait_for(self._may_put_locked, timeout):
                raise Full
            if self._closed:
                raise Closed("the buffer is closed")
            self._items.append(item)
            self._changed.notify_all()

    def put_nowait(self, item: T) -> None:
        """Append `item`, or raise `queue.Full` at once."""
        self.put(item, 0)

    def get(self, timeout: float | None = None) -> T:
        """Take the oldest item; wait while there is none.

        Args:
            timeout: Seconds to wait at most; None, the default, waits forever.

        Raises:
            Closed: The buffer is closed and nothing is left in it.
            queue.Empty: Nothing came within `timeout`.
        """
        with self._lock:
            # Woken by put() and close().
            if not self._changed.wait_for(self._may_get_locked, timeout):
                raise Empty
            if not self._items:
                raise Closed("the buffer is closed and empty")
            self._changed.notify_all()
            return self._items.popleft()

    def get_nowait(self) -> T:
        """Take the oldest item, or raise `queue.Empty` at once."""
        return self.get(0)

    def close(self) -> None:
        """Let nothing more in and wake all threads; the items in the buffer can still be taken."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

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
        return f"<Buffer {len(self)}/{self.max_size} {'closed' if self._closed else 'open'}>"

    def _may_put_locked(self) -> bool:
        return self._closed or len(self._items) < self.max_size

    def _may_get_locked(self) -> bool:
        return self._closed or bool(self._items)
