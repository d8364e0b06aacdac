"""`multiprocessing.Queue`, bare: processes that put, and the loop that gets."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from contestants import Setup


@contextmanager
def open(setup: Setup) -> Iterator[Iterator[Any]]:
    """Give the items of `setup`."""
    context = multiprocessing.get_context(setup.start_method)
    queue = context.Queue(setup.queue_size)
    processes = [
        context.Process(target=_put, args=(setup.source, queue), daemon=True)
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


def _put(source: Callable[[], Iterator[Any]], queue: Any) -> None:
    for item in source():
        queue.put(item)


def _get(queue: Any) -> Iterator[Any]:
    while True:
        yield queue.get()
