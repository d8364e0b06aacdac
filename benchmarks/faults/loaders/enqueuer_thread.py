"""`enqueuer`, with a thread."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from enqueuer import GeneratorEnqueuer
from faults import sources


def items(fault: str) -> Iterator[Any]:
    """Yield what a worker makes."""
    with GeneratorEnqueuer(functools.partial(sources.items, fault), backend="thread") as enqueuer:
        yield from enqueuer
