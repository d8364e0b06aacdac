"""`enqueuer`, with threads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from contestants import Setup, Tasks
from enqueuer import GeneratorEnqueuer, OrderedEnqueuer


@contextmanager
def open(setup: Setup) -> Iterator[Iterator[Any]]:
    """Give the items of `setup`."""
    with GeneratorEnqueuer(
        setup.source, backend="thread", workers=setup.workers, max_queue_size=setup.queue_size
    ) as enqueuer:
        yield iter(enqueuer)


open_threads = open


@contextmanager
def open_tasks(tasks: Tasks) -> Iterator[Callable[[], Iterator[Any]]]:
    """Give the epochs of `tasks`."""
    with OrderedEnqueuer(
        range(tasks.count),
        tasks.call,
        batch_size=tasks.batch_size,
        backend="thread",
        workers=tasks.workers,
        max_queue_size=tasks.queue_size,
    ) as enqueuer:
        yield functools.partial(iter, enqueuer)
