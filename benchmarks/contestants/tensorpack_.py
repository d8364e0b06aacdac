"""tensorpack: msgpack over ZeroMQ, by sockets; or threads and a queue."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("TENSORPACK_ONCE_SERIALIZE", "msgpack")  # faster than its default, pickle
from tensorpack.dataflow import DataFlow, MultiProcessRunnerZMQ, MultiThreadRunner

from contestants import Setup


class _Flow(DataFlow):
    def __init__(self, source: Callable[[], Iterator[Any]]) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return self._source()


@contextmanager
def open(setup: Setup) -> Iterator[Iterator[Any]]:
    """Give the items of `setup`."""
    runner = MultiProcessRunnerZMQ(_Flow(setup.source), setup.workers, hwm=setup.queue_size)
    runner.reset_state()
    try:
        yield iter(runner)
    finally:
        runner.__del__()  # the only end that it has


@contextmanager
def open_threads(setup: Setup) -> Iterator[Iterator[Any]]:
    """Give the items of `setup`, made by threads."""
    runner = MultiThreadRunner(lambda: _Flow(setup.source), setup.queue_size, setup.workers)
    runner.reset_state()
    try:
        yield iter(runner)
    finally:
        for thread in runner.threads:  # or the next line waits for each in turn, 5 s a thread
            thread.stop()
        runner.__del__()
