"""torchdata.nodes: threads around a process that maps."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

from faults import COUNT, sources


def items(fault: str) -> Iterable[Any]:
    """Return what a worker makes."""
    call = functools.partial(sources.item, fault=fault)
    numbers = IterableWrapper(range(COUNT))
    return Loader(ParallelMapper(numbers, call, num_workers=1, method="process"))
