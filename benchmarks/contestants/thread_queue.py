"""A bare thread that fills a `queue.Queue`: the shortest thing that works, and never ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from contestants import Setup


@contextmanager
def open(setup: Setup) -> Iterator[Iterator[Any]]:
    """Give the items of `setup`."""
    items: queue.Queue[Any] = queue.Queue(setup.queue_size)

    def fill() -> None:
        for item in setup.source():
            items.put(item)

    threading.Thread(target=fill, daemon=True).start()
    # What no item is: the sources have no end.
    yield iter(items.get, object())
