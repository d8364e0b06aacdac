"""`concurrent.futures.ThreadPoolExecutor`, with a window that slides over the tasks."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from contestants import Tasks


@contextmanager
def open_tasks(tasks: Tasks) -> Iterator[Callable[[], Iterator[Any]]]:
    """Give the epochs of `tasks`."""
    with ThreadPoolExecutor(tasks.workers) as pool:
        yield functools.partial(_epoch, pool, tasks)


def _epoch(pool: ThreadPoolExecutor, tasks: Tasks) -> Iterator[Any]:
    call, items = tasks.work()
    window: deque[Future[Any]] = deque()
    for item in items:
        window.append(pool.submit(call, item))
        if len(window) == tasks.queue_size + tasks.workers:
            yield window.popleft().result()
    while window:
        yield window.popleft().result()
