"""The workers of a DataLoader, and their failures, as torch's users expect them.

A worker process has the members of multiprocessing's processes. A failure is a RuntimeError with
torch's first words, and also the error that an enqueuer raises, so either kind of `except` catches
it.
"""

from __future__ import annotations

import re
import signal
from typing import Any, NoReturn

from enqueuer.backends.pool import WorkerState
from enqueuer.backends.process.handle import ProcessWorker
from enqueuer.enqueuers.enqueuer import BaseEnqueuer, core_of
from enqueuer.errors import BatchTimeout, WorkerDied, WorkerError


class WorkerHandle:
    """One worker process.

    Args:
        worker: The worker.

    Attributes:
        index: Index of the worker.
        pid: Its process.
    """

    def __init__(self, worker: ProcessWorker) -> None:
        self.index = worker.index
        self.pid = worker.process.pid
        self._worker = worker

    @property
    def exitcode(self) -> int | None:
        """Exit code of the process, negative for a signal; None: it runs, or that is not known."""
        self._has_ended(0)
        return self._worker.exitcode

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return not self._has_ended(0)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the process to end, at most so many seconds."""
        # Eleven days, which every wait accepts.
        self._has_ended(1e6 if timeout is None else timeout)

    def terminate(self) -> None:
        """Send SIGTERM to the process, if it runs."""
        if self.is_alive():
            self._worker.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process, if it runs."""
        if self.is_alive():
            self._worker.send_signal(signal.SIGKILL)

    def _has_ended(self, timeout: float) -> bool:
        worker = self._worker
        # Once it was reaped, another process may have its pid.
        if worker.exitcode is None and worker.state is not WorkerState.ENDED:
            worker.wait_for_exitcode(timeout)
            return worker.exitcode is not None or worker.has_ended() or not worker.process.has_pid()
        return True


def handles_of(enqueuer: BaseEnqueuer[Any]) -> list[WorkerHandle]:
    """Return the worker processes of an enqueuer that runs; none of threads and actors."""
    run = core_of(enqueuer).run
    workers = [] if run is None else run.backend.workers()
    return [WorkerHandle(worker) for worker in workers if isinstance(worker, ProcessWorker)]


class LoaderTimeout(BatchTimeout, RuntimeError):
    """No batch came within the `timeout` of a DataLoader."""


class LoaderWorkerDied(WorkerDied, RuntimeError):
    """A worker process of a DataLoader has died."""


def timed_out(error: BatchTimeout, timeout: float) -> LoaderTimeout:
    """Return the error of a batch that did not come in time."""
    return LoaderTimeout(f"DataLoader timed out after {timeout} seconds: {error}")


def died(error: WorkerDied) -> LoaderWorkerDied:
    """Return the error of a worker that has died."""
    found = re.search(r"\(process (\d+), ", str(error))
    pid = None if found is None else int(found[1])
    code = error.exitcode
    how = "ended"
    if code is not None and code < 0:
        how = f"is killed by signal: {signal.strsignal(-code) or -code}"
    elif code is not None:
        how = f"exited unexpectedly with exit code {code}"
    # torch says both, in two exceptions.
    message = (
        f"DataLoader worker (pid(s) {pid}) exited unexpectedly: "
        f"DataLoader worker (pid {pid}) {how}. {error}"
    )
    return LoaderWorkerDied(message, error.worker, error.exitcode)


def reraise(error: BaseException) -> NoReturn:
    """Raise an error of a worker in the loop."""
    # The loop would end as if all were well.
    if isinstance(error, (StopIteration, StopAsyncIteration)):
        raise WorkerError(f"a worker of the DataLoader raised {error!r}") from error
    try:
        raise error
    finally:
        # Otherwise its traceback would refer to itself, through this frame.
        del error
