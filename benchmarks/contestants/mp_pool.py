"""`multiprocessing.Pool.imap`, one task at a time. Nothing bounds how many results wait."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from contestants import Tasks


@contextmanager
def open_tasks(tasks: Tasks) -> Iterator[Callable[[], Iterator[Any]]]:
    """Give the epochs of `tasks`."""
    with multiprocessing.Pool(tasks.workers) as pool:
        yield functools.partial(pool.imap, *tasks.work())
