"""SPDL: an iterable in a subprocess."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from spdl.pipeline import iterate_in_subprocess

from faults import sources


def items(fault: str) -> Iterable[Any]:
    """Return what a worker makes."""
    return iterate_in_subprocess(functools.partial(sources.items, fault))
