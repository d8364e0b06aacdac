"""Calls of signal handlers that wait until their thread has released the lock of the consumer.

    the loop holds the lock: it waits for workers, or takes their items
        a signal handler in its thread: stop(), reconfigure() --> defer()
    the loop has released the lock ------------------------------> make(): the workers change

The lock is reentrant, so it does not keep a handler of the same thread out. Workers that ended
within the code that reads from them would pull its list of workers away, or an item would be both
taken and made again.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator


class DeferredCalls:
    """The calls that a thread makes once it has released a lock.

    Args:
        lock: The lock.

    Attributes:
        calls: The calls, the earliest first.

    Example:
        >>> lock = threading.RLock()
        >>> deferred = DeferredCalls(lock)
        >>> deferred.defer(lambda: print("called"))
        False
        >>> with deferred.locked():
        ...     deferred.defer(lambda: print("called"))
        ...     print("waiting")
        True
        waiting
        called
    """

    def __init__(self, lock: threading.RLock) -> None:
        self.calls: deque[Callable[[], object]] = deque()
        self._lock = lock
        # It knows whether this thread holds the lock.
        self._condition = threading.Condition(lock)

    def defer(self, call: Callable[[], object]) -> bool:
        """Keep a call if this thread holds the lock; return False if it may be made now."""
        if not self._is_held_here():
            return False
        self.calls.append(call)
        return True

    def make(self) -> None:
        """Make the calls, unless this thread still holds the lock."""
        while self.calls and not self._is_held_here():
            try:
                call = self.calls.popleft()
            except IndexError:
                # Another thread makes it.
                return
            call()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock, and make the calls after it."""
        try:
            with self._lock:
                yield
        finally:
            self.make()

    def _is_held_here(self) -> bool:
        try:
            # It wakes no thread, and raises if this one does not hold the lock.
            self._condition.notify(0)
        except RuntimeError:
            return False
        return True
