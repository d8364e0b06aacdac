"""`enqueuer`, with threads."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from contestants import Setup, enqueuer_process
from enqueuer import GeneratorEnqueuer


@contextmanager
def open(setup: Setup) -> Iterator[Iterator[Any]]:
    """Give the items of `setup`."""
    with GeneratorEnqueuer(
        setup.source, backend="thread", workers=setup.workers, max_queue_size=setup.queue_size
    ) as enqueuer:
        yield iter(enqueuer)


open_threads = open
open_tasks = functools.partial(enqueuer_process.open_tasks, backend="thread")
