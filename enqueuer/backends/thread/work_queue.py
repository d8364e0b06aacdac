"""What worker threads are to do: epochs for one of them, or tickets for whichever is free.

put_all() -> [ item, item, ... ] -> take(), get()
          -> a token, if there is none -> a thread that waits, which passes it on
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, starmap
from queue import SimpleQueue
from typing import Generic, TypeVar

from enqueuer.monitoring.meters import Meter

T = TypeVar("T")

# The arguments of one call that has none.
_ONCE = ((),)


class WorkQueue(Generic[T]):
    """An unbounded queue whose end is seen by all threads that wait. Any thread may call anything.

    An order is put again after an interrupt, so putting must never wait for room.

    Example:
        >>> from enqueuer.monitoring.meters import IDLE
        >>> queue, meter = WorkQueue(), Meter()
        >>> queue.put("a"); queue.get(meter, IDLE)
        'a'
        >>> queue.put("b"); queue.close(); queue.get(meter, IDLE), queue.get(meter, IDLE)
        (None, None)
    """

    def __init__(self) -> None:
        # Both are written in C, so the garbage collector may close a forgotten queue inside its
        # own put().
        self._items: deque[T | None] = deque()
        # While a thread waits and there is an item, a token is here, or a thread that has just
        # taken it passes it on.
        self._tokens: SimpleQueue[bool] = SimpleQueue()
        self._is_closed = False

    def put(self, item: T | None) -> None:
        """Append an item, or put back what `take` gave; again after an interrupt."""
        self._items.append(item)
        # Behind the item: a thread that takes the token later sees it.
        if self._tokens.empty():
            self._tokens.put(True)

    def put_all(self, items: Iterable[T | None]) -> None:
        """Append several items."""
        # One call, as a signal handler that raised in between would leave a thread asleep.
        is_empty = filter(None, starmap(self._tokens.empty, _ONCE))
        deque(chain(map(self._items.extend, (items,)), map(self._tokens.put, is_empty)), maxlen=0)

    @property
    def take(self) -> Callable[[], T | None]:
        """The function that takes the oldest item, or raises `IndexError`."""
        return self._items.popleft

    def get(self, meter: Meter, phase: int) -> T | None:
        """Take the oldest item; wait while there is none.

        Args:
            meter: Account of the worker, where a wait is noted.
            phase: What the wait counts as.

        Returns:
            The item; None if the queue is closed.
        """
        try:
            item = self._items.popleft()
        except IndexError:
            meter.pause(phase)
            item = self._wait()
            meter.resume()
        if self._is_closed:
            # This wakes the next thread.
            self.put(None)
            return None
        return item

    def _wait(self) -> T | None:
        while True:
            self._tokens.get()
            # Another thread may have taken the item meanwhile.
            with contextlib.suppress(IndexError):
                item = self._items.popleft()
                if self._items:
                    self.put_all(())
                return item

    def close(self) -> None:
        """End all waits; what is in the queue is not done."""
        self._is_closed = True
        self.put_all((None,))
