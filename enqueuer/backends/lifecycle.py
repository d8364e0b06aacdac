"""How workers are replaced and ended: the restart policy, and who may stop a backend.

`Restarts` says how many dead workers are replaced, and what the message about it says. Only the
process that has started a backend stops it, and never one of its own worker threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from enqueuer.common.interrupts import WorkerThread
from enqueuer.errors import InvalidState
from enqueuer.workers import logs


class DeathPlace(NamedTuple):
    """Where in the data a worker died.

    Attributes:
        shard: Index of the shard; of a task, the index of its first element.
        number: Number of the item or the task.
        text: The same in words.
    """

    shard: int
    number: int
    text: str


class Restarts:
    """The deaths after which a worker was replaced, and the limit of their number.

    A run has one for all its backends, so that other workers bring no further restarts.

    Args:
        most: Largest number of restarts in a run.

    Example:
        >>> restarts, place = Restarts(most=1), DeathPlace(0, 7, "shard 0, item 7")
        >>> restarts.allowed
        True
        >>> restarts.add(place); restarts.allowed
        False
        >>> restarts.history(place)
        ' max_restarts=1 is used up; 2 workers died at this very item.'
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._places: list[tuple[int, int]] = []

    @property
    def count(self) -> int:
        """Number of workers that died and were replaced. Read by any thread."""
        return len(self._places)

    @property
    def allowed(self) -> bool:
        """Whether another worker may be replaced."""
        return self.count < self.most

    def add(self, place: DeathPlace) -> None:
        """Record that a worker died at a place and was replaced."""
        self._places.append(place[:2])

    def history(self, place: DeathPlace) -> str:
        """Return, as a part of a message, how often replaced workers had died, and where.

        Args:
            place: Place of the death that is reported.
        """
        if not self.most:
            return ""
        here = self._places.count(place[:2])
        text = f" max_restarts={self.most} is used up"
        if here:
            text += f"; {here + 1} workers died at this very item"
        return f"{text}."


# Seconds; SIGTERM comes first, and SIGKILL after half of them.
ESCALATION_S = 0.6


def forget(stop: Callable[[float], object], timeout: float) -> None:
    """Stop a backend whose enqueuer is garbage, or an enqueuer whose loader is, by its method.

    The collector runs in any thread, and in one of our workers it may strike in the middle of
    what a stop would disturb: between seeing that a buffer is full and waiting for room, say.
    Then another thread does it.
    """
    if not isinstance(threading.current_thread(), WorkerThread):
        stop(timeout)
        return
    helper = threading.Thread(target=stop, args=(timeout,), daemon=True)
    # While the interpreter ends, no thread can be started. It ends daemonic threads itself.
    with contextlib.suppress(RuntimeError):
        helper.start()


def deliver_all(records: deque[logging.LogRecord]) -> None:
    """Log the records of workers; called in the thread of the loop, and at the stop."""
    while records:
        try:
            record = records.popleft()
        except IndexError:
            # Another thread stops the workers, and delivers the records, too.
            return
        logs.deliver(record)


class Inherited:
    """The backend of an enqueuer that runs in the process from which this one was forked.

    Its workers are not here. Threads do not exist in a forked child, and a lock that one of them
    held would never be released, so the backend of the parent is not touched.

    Args:
        owner: Process that has the workers.
        kept: Backends of the parent. They are kept, as their end might do harm here.
    """

    def __init__(self, owner: int, kept: object) -> None:
        self._owner = owner
        self._kept = kept

    def close(self) -> None:
        """Do nothing: the workers are the parent's."""

    def wake(self) -> None:
        """Do nothing: the loop of this process waits for no worker."""

    def stop(self, timeout: float) -> None:
        """Do nothing: the workers are the parent's."""

    def __getattr__(self, name: str) -> NoReturn:
        """Raise InvalidState, whatever else is asked of the backend."""
        raise InvalidState(
            f"this enqueuer belongs to process {self._owner}, and this one, "
            f"{os.getpid()}, was forked from it; make a new enqueuer here"
        )
