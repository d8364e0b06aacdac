"""faster-fifo: a queue in a ring of shared memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from faster_fifo import Queue

from contestants import Setup

_LONG = 1e6  # seconds; the limit of a wait, which must be a number


@contextmanager
def open(setup: Setup) -> Iterator[Iterator[Any]]:
    """Give the items of `setup`."""
    queue = Queue(setup.queue_size * (setup.item_bytes + 1024), maxsize=setup.queue_size)
    processes = [
        multiprocessing.Process(target=_put, args=(setup.source, queue), daemon=True)
        for _ in range(setup.workers)
    ]
    for process in processes:
        process.start()
    try:
        yield _get(queue)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
        queue.close()


def _put(source: Callable[[], Iterator[Any]], queue: Queue) -> None:
    for item in source():
        queue.put(item, timeout=_LONG)


def _get(queue: Queue) -> Iterator[Any]:
    while True:
        yield from queue.get_many(timeout=_LONG)  # its own way to be fast
