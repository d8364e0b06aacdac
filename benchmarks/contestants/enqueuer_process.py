"""`enqueuer`, with processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from contestants import Setup, Tasks
from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes
from enqueuer.backends.job import BackendName


@contextmanager
def open(setup: Setup) -> Iterator[Iterator[Any]]:
    """Give the items of `setup`."""
    with GeneratorEnqueuer(
        setup.source,
        backend=Processes(start_method=setup.start_method),
        workers=setup.workers,
        max_queue_size=setup.queue_size,
    ) as enqueuer:
        yield iter(enqueuer)


@contextmanager
def open_tasks(
    tasks: Tasks, backend: BackendName = "process"
) -> Iterator[Callable[[], Iterator[Any]]]:
    """Give the epochs of `tasks`."""
    with OrderedEnqueuer(
        range(tasks.count),
        tasks.call,
        batch_size=tasks.batch_size,
        backend=backend,
        workers=tasks.workers,
        max_queue_size=tasks.queue_size,
    ) as enqueuer:
        yield functools.partial(iter, enqueuer)
