"""An event that wakes the loop, and that a signal handler of the loop's own thread may set."""

from __future__ import annotations

import contextlib
import threading
import time


class WakeUp:
    """An event for one thread that waits; `wait()` resets it.

    `threading.Event` has a lock that is not reentrant: a handler that runs within its `wait()`
    would wait for that lock forever.

    Attributes:
        is_set: Whether `set()` was called since the last wait.

    Example:
        >>> wake_up = WakeUp()
        >>> wake_up.set()
        >>> wake_up.wait(None)
        >>> wake_up.is_set
        False
    """

    def __init__(self) -> None:
        self.is_set = False
        self._sleeper: threading.Lock | None = None

    def set(self) -> None:
        """Wake the thread that waits, or let its next wait return at once."""
        self.is_set = True
        sleeper = self._sleeper
        if sleeper is not None and sleeper.locked():
            # Another thread may have released it in between.
            with contextlib.suppress(RuntimeError):
                sleeper.release()

    def wait(self, deadline: float | None) -> None:
        """Wait until `set()` is called, or until a time of `time.monotonic()`; None: forever."""
        sleeper = threading.Lock()
        sleeper.acquire()
        # Before the look: `set()` stores in the other order, so one of the two sees the other.
        self._sleeper = sleeper
        try:
            if not self.is_set:
                left = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
                sleeper.acquire(True, left)
        finally:
            self._sleeper = None
            self.is_set = False
