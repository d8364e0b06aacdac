"""The pool of the standard library."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterator
from typing import Any

from faults import COUNT, sources


def items(fault: str) -> Iterator[Any]:
    """Yield what a worker makes."""
    with multiprocessing.Pool(1) as pool:
        yield from pool.imap(functools.partial(sources.item, fault=fault), range(COUNT))
