"""What worker threads are to do: epochs for one of them, or tickets for whichever is free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from enqueuer.monitoring.meters import Meter

T = TypeVar("T")


class WorkQueue(Generic[T]):
    """An unbounded queue whose end is seen by all threads that wait. Any thread may call anything.

    An order may be put again after an interrupt, so putting must never wait for room.

    Example:
        >>> from enqueuer.monitoring.meters import IDLE
        >>> queue, meter = WorkQueue(), Meter()
        >>> queue.put("a"); queue.get(meter, IDLE)
        'a'
        >>> queue.put("b"); queue.close(); queue.get(meter, IDLE), queue.get(meter, IDLE)
        (None, None)
    """

    def __init__(self) -> None:
        # Written in C, so the garbage collector may close a forgotten queue inside its own put().
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._is_closed = False

    def put(self, item: T | None) -> None:
        """Append an item, or put back what `take` gave."""
        self._queue.put(item)

    def put_all(self, items: Iterable[T]) -> None:
        """Append several items."""
        deque(map(self._queue.put, items), maxlen=0)

    @property
    def take(self) -> Callable[[], T | None]:
        """The function that takes the oldest item, or raises `queue.Empty`."""
        return self._queue.get_nowait

    def get(self, meter: Meter, phase: int) -> T | None:
        """Take the oldest item; wait while there is none.

        Args:
            meter: Account of the worker, where a wait is noted.
            phase: What the wait counts as.

        Returns:
            The item; None if the queue is closed.
        """
        try:
            item = self._queue.get_nowait()
        except Empty:
            meter.pause(phase)
            item = self._queue.get()
            meter.resume()
        if self._is_closed:
            # This wakes the next thread.
            self._queue.put(None)
            return None
        return item

    def close(self) -> None:
        """End all waits; what is in the queue is not done."""
        self._is_closed = True
        self._queue.put(None)
