"""Nothing at all: the loop runs the generator itself. What the source costs shows here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from contestants import Setup, Tasks


@contextmanager
def open(setup: Setup) -> Iterator[Iterator[Any]]:
    """Give the items of `setup`."""
    yield setup.source()


@contextmanager
def open_tasks(tasks: Tasks) -> Iterator[Callable[[], Iterator[Any]]]:
    """Give the epochs of `tasks`."""
    yield functools.partial(map, *tasks.work())
