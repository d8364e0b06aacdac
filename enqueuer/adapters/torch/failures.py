"""Failures of a DataLoader as torch's users expect them: RuntimeError, with torch's first words.

They are also the errors that an enqueuer raises, so either kind of `except` catches them.
"""

from __future__ import annotations

import signal
from typing import NoReturn

from enqueuer.adapters.torch.worker_handles import pid_in
from enqueuer.errors import BatchTimeout, WorkerDied, WorkerError


class LoaderTimeout(BatchTimeout, RuntimeError):
    """No batch came within the `timeout` of a DataLoader."""


class LoaderWorkerDied(WorkerDied, RuntimeError):
    """A worker process of a DataLoader has died."""


def timed_out(error: BatchTimeout, timeout: float) -> LoaderTimeout:
    """Return the error of a batch that did not come in time."""
    return LoaderTimeout(f"DataLoader timed out after {timeout} seconds: {error}")


def died(error: WorkerDied) -> LoaderWorkerDied:
    """Return the error of a worker that has died."""
    pid = pid_in(str(error))
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
