"""Taking from a queue until a time."""

from __future__ import annotations

import contextlib
import queue
import sys
import time
from queue import SimpleQueue
from typing import TypeVar

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
