"""The end of a backend: the process and the thread that may stop it."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import NoReturn, Protocol

from enqueuer.common.finalizers import WorkerThread
from enqueuer.errors import InvalidState

# Seconds; SIGTERM comes first, and SIGKILL after half of them.
ESCALATION_S = 0.6


class Stoppable(Protocol):
    """An object with workers that can be stopped."""

    def stop(self, timeout: float) -> None:
        """End them within `timeout` seconds."""


def forget(workers: Stoppable, timeout: float) -> None:
    """Stop a backend whose enqueuer is garbage, or an enqueuer whose loader is.

    The collector runs in any thread, and in one of our workers it may strike in the middle of
    what a stop would interrupt: between seeing that a buffer is full and waiting for room, say.
    Then another thread does it.
    """
    if not isinstance(threading.current_thread(), WorkerThread):
        workers.stop(timeout)
        return
    helper = threading.Thread(target=workers.stop, args=(timeout,), daemon=True)
    # While the interpreter ends, no thread can be started. It ends daemonic threads itself.
    with contextlib.suppress(RuntimeError):
        helper.start()


class Inherited:
    """The backend of an enqueuer that runs in the process from which this one was forked.

    Its workers are not here. Threads do not exist in a forked child, and a lock that one of them
    held would never be released, so the backend of the parent is not touched.

    Args:
        owner: Process that has the workers.
        backend: Backend of the parent. It is kept, as its end might do harm here.
    """

    def __init__(self, owner: int, backend: object) -> None:
        self._owner = owner
        self._kept = backend

    def close(self) -> None:
        """Do nothing: the workers are the parent's."""

    def wake(self) -> None:
        """Do nothing: the loop of this process waits for no worker."""

    def stop(self, timeout: float) -> None:
        """Do nothing: the workers are the parent's."""

    def __getattr__(self, name: str) -> NoReturn:
        """Raise InvalidState, whatever else is asked of the backend."""
        raise _of_another_process(self._owner)


def check_owner(owner: int) -> None:
    """Raise InvalidState in a process that was forked from the one that started the workers."""
    if owner != os.getpid():
        raise _of_another_process(owner)


def _of_another_process(owner: int) -> InvalidState:
    return InvalidState(
        f"this enqueuer belongs to process {owner}, and this one, "
        f"{os.getpid()}, was forked from it; make a new enqueuer here"
    )
