"""`enqueuer`, with processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from contestants import Setup
from enqueuer import GeneratorEnqueuer


@contextmanager
def open(setup: Setup) -> Iterator[Iterator[Any]]:
    """Give the items of `setup`."""
    with GeneratorEnqueuer(
        setup.source,
        backend="process",
        workers=setup.workers,
        max_queue_size=setup.queue_size,
        mp_context=setup.start_method,
    ) as enqueuer:
        yield iter(enqueuer)
