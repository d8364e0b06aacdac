"""The limit of two threads: a bounded deque, where each side sleeps only when it must.

It is no loader: it has no end, no errors and no stop.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from contestants import Setup


@contextmanager
def open(setup: Setup) -> Iterator[Iterator[Any]]:
    """Give the items of `setup`."""
    items: deque[Any] = deque()
    # The locks on which the thread and the loop sleep; the other one takes and releases them.
    putters: deque[threading.Lock] = deque()
    takers: deque[threading.Lock] = deque()

    def is_full() -> bool:
        return len(items) >= setup.queue_size

    def is_empty() -> bool:
        return not items

    def fill() -> None:
        for item in setup.source():
            while is_full():
                _sleep(putters, is_full)
            items.append(item)
            if takers:
                takers.popleft().release()

    def take() -> Iterator[Any]:
        while True:
            while not items:
                _sleep(takers, is_empty)
            item = items.popleft()
            if putters:
                putters.popleft().release()
            yield item

    threading.Thread(target=fill, daemon=True).start()
    yield take()


def _sleep(sleepers: deque[threading.Lock], must: Callable[[], bool]) -> None:
    lock = threading.Lock()
    lock.acquire()
    sleepers.append(lock)
    # What the other side did before it could see the lock is seen here.
    if must():
        lock.acquire()
