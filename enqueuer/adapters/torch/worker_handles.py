"""The worker processes of an enqueuer, with the members of multiprocessing's processes."""

from __future__ import annotations

import os
import re
import select
from dataclasses import dataclass
from typing import Any

from enqueuer.enqueuers.enqueuer import BaseEnqueuer, core_of


@dataclass(frozen=True)
class WorkerHandle:
    """One worker process.

    Attributes:
        index: Index of the worker.
        pid: Its process.
    """

    index: int
    pid: int

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return not self._has_ended(0)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the process to end, at most so many seconds."""
        self._has_ended(timeout)

    def _has_ended(self, timeout: float | None) -> bool:
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            return bool(poller.poll(None if timeout is None else 1000 * timeout))
        finally:
            os.close(fd)


def handles_of(enqueuer: BaseEnqueuer[Any]) -> list[WorkerHandle]:
    """Return the worker processes of an enqueuer that runs; none of threads and actors."""
    run = core_of(enqueuer).run
    measures = [] if run is None else run.backend.measures()
    found = [(worker.index, pid_in(worker.name)) for worker in measures]
    return [WorkerHandle(index, pid) for index, pid in found if pid is not None]


def pid_in(text: str) -> int | None:
    """Return the process in the name of a worker, or in a text that begins with one.

    Example:
        >>> pid_in("worker 0 (process 4711, forkserver)")
        4711
    """
    found = re.search(r"\(process (\d+), ", text)
    return None if found is None else int(found[1])
