"""`enqueuer`, with a process, which is started in each of the three ways."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from enqueuer import GeneratorEnqueuer, Processes
from faults import sources


def items(fault: str, start_method: str) -> Iterator[Any]:
    """Yield what a worker makes."""
    source = functools.partial(sources.items, fault)
    with GeneratorEnqueuer(source, backend=Processes(start_method=start_method)) as enqueuer:
        yield from enqueuer
