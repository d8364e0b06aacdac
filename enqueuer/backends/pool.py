"""What all backends have alike: the protocols that the engine uses, and how workers end.

    Engine --open(), start_worker(), sleep(), stop()--> WorkerPool
           --begin(), death()-------------------------> Worker
           --head(), take(), remove()-----------------> its Inbox
           --offer(), assign(), safe()----------------> Dispatch, for tasks

A pool decides nothing: whose item is next, what is done after a death and how often a worker is
replaced is the same for all backends. Only `WorkerPool.sleep` waits for messages.

`Restarts` says how many dead workers are replaced, and what the message about it says. Only the
process that has started a backend stops it, and never one of its own worker threads.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol, TypeVar

from enqueuer.common.interrupts import WorkerThread
from enqueuer.errors import InvalidState, StartError
from enqueuer.monitoring import usage
from enqueuer.monitoring.meters import WorkerStats
from enqueuer.order.messages import Empty, End, Epoch, Failure, ItemTuple, Ticket
from enqueuer.workers import logs
from enqueuer.workers.threads import ThreadSnapshot

# --- protocols ------------------------------------------------------------------------------------


class WorkerState(enum.Enum):
    """Where a worker is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    # It exited because it was asked to.
    ENDED = "ended"
    # It exited without having been asked.
    DEAD = "dead"

    def to(self, new: WorkerState) -> WorkerState:
        """Return the state that follows this one, if it may."""
        assert new in _NEXT_STATE[self], f"{self} -> {new}"
        return new


_NEXT_STATE = {
    WorkerState.STARTING: {WorkerState.RUNNING, WorkerState.DEAD, WorkerState.ENDED},
    WorkerState.RUNNING: {WorkerState.DEAD, WorkerState.ENDED},
    WorkerState.DEAD: {WorkerState.ENDED},
    WorkerState.ENDED: set(),
}
HAS_ENDED = frozenset({WorkerState.ENDED, WorkerState.DEAD})


class NoRoom(StartError):
    """The system has no room for another worker; the message says of what."""


class Death(NamedTuple):
    """How a worker ended.

    Attributes:
        how: How it ended, for the log: "was killed by SIGKILL".
        message: Message of the `WorkerDied` that is raised if the worker is not replaced.
        exitcode: Exit code of its process; None if it is not known.
        counts: Whether its replacement counts as a restart.
        error: Exception that ended its loop, if it is known; then it is not replaced.
        late: Failures of what ran for longer than `element_timeout`, by their places, for which the
            worker was killed.
        running: See `Failure`.
    """

    how: str
    message: str
    exitcode: int | None = None
    counts: bool = True
    error: BaseException | None = None
    late: tuple[Failure, ...] = ()
    running: tuple[tuple[int, int], ...] = ()


Stack = Sequence[traceback.FrameSummary]
"""Where a thread is, the outermost frame first, as `traceback` has it."""


class WorkerSnapshot(NamedTuple):
    """State of one worker.

    Attributes:
        name: Name of the worker.
        shards: Indices of its shards; empty if it does tasks.
        stack: Python stack of the worker; None if that is not known.
        why: Reason why the stack is not known.
        threads: Snapshots of the threads that run elements; empty if the worker has none.
    """

    name: str
    shards: tuple[int, ...]
    stack: Stack | None
    why: str = ""
    threads: Sequence[ThreadSnapshot] = ()


class Inbox(Protocol):
    """The messages that a worker has sent and the loop has not taken; workers may share one.

    Nothing here waits. Called by one consumer at a time, but for what says otherwise.
    """

    @property
    def waiting(self) -> int:
        """How many items wait. Called by any thread."""

    def waiting_of(self, epoch: int) -> int:
        """Return how many items of an epoch wait, if others are of the next one. Any thread."""

    def head(self) -> bool | End | Failure | Empty:
        """Return the next message and leave it there.

        Returns:
            True if an item is next, False if nothing has come, else the message itself: the same
            object until it is removed.
        """

    def take(self, limit: int) -> list[ItemTuple]:
        """Take items as long as they are next: at most so many, and perhaps fewer."""

    def remove(self, message: End | Failure | Empty) -> None:
        """Forget the message that `head` returned. Idempotent."""

    def acknowledge(self) -> None:
        """Count what was taken as consumed, so that as much can be sent. Idempotent."""


class Worker(Protocol):
    """One worker as the process of the loop sees it. `str()` of it names it for messages."""

    @property
    def index(self) -> int:
        """Index of the worker, from 0."""

    @property
    def shards(self) -> tuple[int, ...]:
        """Indices of its shards; empty if it does tasks."""

    @property
    def inbox(self) -> Inbox:
        """Messages that it has sent."""

    @property
    def state(self) -> WorkerState:
        """Where it is in its life. A dead worker has no messages left but those in its inbox."""

    @property
    def is_leaving(self) -> bool:
        """Whether it exits, or has exited, since `ask_to_exit` was called."""

    def begin(self, epoch: Epoch) -> None:
        """Have it run its shards for an epoch."""

    def ask_to_exit(self) -> None:
        """Have it exit after its task, or another worker of the same pool in its place."""

    def death(self) -> Death:
        """Return how it ended, once it is dead."""


W = TypeVar("W", bound=Worker)
W_contra = TypeVar("W_contra", bound=Worker, contravariant=True)


class Dispatch(Protocol[W_contra]):
    """How tickets reach the workers of a pool: as they are, unless it says otherwise.

    Nothing here waits.

    Attributes:
        awaited: Number of the task whose result the loop sleeps for; None: for any message. A
            pool may wake the loop sooner.
    """

    awaited: int | None = None

    def pack(self, tickets: Sequence[Ticket]) -> Sequence[Any]:
        """Return some tickets as they travel, all with elements or all without.

        Raises:
            ItemNotPicklable: An element cannot be sent to a worker.
        """
        return tickets

    def offer(self, numbers: Sequence[int], packed: Sequence[Any]) -> None:
        """Let free workers do some tasks, by their numbers and their packed tickets."""

    def feed(self) -> None:
        """Send what was offered when there was no room for it; called when results have come."""
        return None

    def assign(self, worker: W_contra, number: int, packed: Any) -> None:
        """Have one worker do a task, before those that were offered: a dead one's, or its own."""

    def current(self, worker: W_contra) -> Sequence[int]:
        """Return the numbers of the tasks that a worker took last, those that are done included."""
        return ()

    def safe(self) -> Container[int]:
        """Return the numbers of the tasks that no worker has begun or that a living worker has.

        Those that were offered and not sent are among them.
        """

    def forget(self, worker: W_contra) -> None:
        """Forget what a worker was assigned that has ended."""
        return None


class WorkerPool(Protocol[W]):
    """Runs, wakes and ends the workers of a backend.

    Attributes:
        workers: The workers that have not been discarded; the engine changes the list.
        dispatch: How tickets reach the workers; used for tasks only.
        are_processes: Whether the workers are processes of this machine. One that runs does not
            hold up the start of others, as a thread does by the GIL.
    """

    workers: list[W]
    dispatch: Dispatch[W]
    are_processes: ClassVar[bool] = False

    def open(self) -> None:
        """Get what all workers need; called once, before the first worker is started.

        Raises:
            NoRoom: The system has no room for it.
            StartError: It is not to be had for another reason.
            SourceNotPicklable: The source cannot be sent to a worker.
        """
        return None

    def start_worker(self, index: int) -> W:
        """Start a worker.

        Raises:
            NoRoom: The system has no room for it.
            StartError: It could not be started for another reason.
        """

    def sleep(self, awaited: W | None, deadline: float | None) -> None:
        """Wait until something comes that was not there when the inboxes were read last.

        Woken by a message, a death, `wake()` and `close()`, also if it is called right after one
        of these. It may return early.

        Args:
            awaited: Worker whose next item the loop waits for. It may send one, whatever waits
                already. None: the loop waits for any worker.
            deadline: Time by `time.monotonic()` at which to return; None: never.
        """

    def discard(self, worker: W) -> None:
        """End a worker at once, if it runs, and close all that this process has of it."""

    def measures(self, workers: Sequence[W]) -> list[WorkerStats]:
        """Return what each worker has done so far. Called by any thread."""

    def snapshots(self, workers: Sequence[W]) -> list[WorkerSnapshot]:
        """Return where each worker is, within about a second."""

    def cpus(self) -> float:
        """Return how many CPUs there are for the workers and this process."""
        return usage.cpus()

    def worker_bytes(self) -> int | None:
        """Return the memory of the largest worker; None if one more would not take as much."""
        return None

    def wake(self) -> None:
        """Wake `sleep()`, or let its next call return at once. Called by any thread."""
        return None

    def close(self) -> None:
        """Ask all workers to exit and wake `sleep()`; return at once. Called by any thread."""

    def stop(self, timeout: float) -> None:
        """Close, then end the workers: ask, terminate, kill; within about `timeout` seconds."""


# --- ends -----------------------------------------------------------------------------------------


class DeathPlace(NamedTuple):
    """Where in the data a worker died.

    Attributes:
        shard: Index of the shard; of a task, the index of its first element.
        number: Number of the item or the task.
        text: The same in words.
        running: The only element of the task that the worker had certainly taken; see `Failure`.
    """

    shard: int
    number: int
    text: str
    running: tuple[tuple[int, int], ...] = ()


class Restarts:
    """The deaths after which a worker was replaced, and the limit of their number.

    A run has one for all its backends, so that other workers bring no further restarts.

    Args:
        limit: Largest number of restarts in a run.

    Example:
        >>> restarts, place = Restarts(limit=1), DeathPlace(0, 7, "shard 0, item 7")
        >>> restarts.allowed
        True
        >>> restarts.add(place); restarts.allowed
        False
        >>> restarts.history(place)
        ' max_restarts=1 is used up; 2 workers died at this very item.'
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._places: list[tuple[int, int]] = []

    @property
    def count(self) -> int:
        """Number of workers that died and were replaced. Read by any thread."""
        return len(self._places)

    @property
    def allowed(self) -> bool:
        """Whether another worker may be replaced."""
        return self.count < self.limit

    def add(self, place: DeathPlace) -> None:
        """Record that a worker died at a place and was replaced."""
        self._places.append(place[:2])

    def history(self, place: DeathPlace) -> str:
        """Return, as a part of a message, how often replaced workers had died, and where.

        Args:
            place: Place of the death that is reported.
        """
        if not self.limit:
            return ""
        here = self._places.count(place[:2])
        text = f" max_restarts={self.limit} is used up"
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
        parents: Backends of the parent. They are kept, as their end might do harm here.
    """

    def __init__(self, owner: int, parents: object) -> None:
        self._owner = owner
        self._parents = parents

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
