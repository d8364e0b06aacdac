"""The limit of a single copy: numpy copies each batch into memory that was written to before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from contestants import Setup

_DESTINATIONS = 4


@contextmanager
def open(setup: Setup) -> Iterator[Iterator[Any]]:
    """Give the items of `setup`."""
    yield _copied(setup.source())


def _copied(items: Iterator[dict[str, np.ndarray]]) -> Iterator[np.ndarray]:
    first = next(items)["x"]
    destinations = [np.full_like(first, n) for n in range(_DESTINATIONS)]
    for number, item in enumerate(items):
        destination = destinations[number % _DESTINATIONS]
        destination[:] = item["x"]
        yield destination
