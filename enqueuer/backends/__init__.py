"""What an enqueuer may ask of a backend, and loading one by name.

A backend has at most as many workers as there are shards; of n workers, worker w runs every n-th
shard from the w-th on, and sends their items in the order in which an ordered consumer reads them.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Protocol, TypeVar

from enqueuer.errors import InvalidState, StartError
from enqueuer.merging import Order, TaskOrder
from enqueuer.messages import Epoch, Failure, Item, Ticket
from enqueuer.meters import LoopMeter
from enqueuer.sources import Source
from enqueuer.stalls import WaitSnapshot
from enqueuer.stats import WorkerStats
from enqueuer.tasks import TaskSource
from enqueuer.trace import Place
from enqueuer.worker import OnError, Plan

T = TypeVar("T")

BackendName = Literal["thread", "process", "ray"]

METHODS = ("fork", "forkserver", "spawn")
HAS_FORKSERVER = hasattr(os, "fork") and hasattr(os, "pidfd_open")

_CLASSES = {
    ("thread", False): ("enqueuer.backends.threads", "ThreadBackend"),
    ("thread", True): ("enqueuer.backends.thread_tasks", "TaskThreads"),
    ("process", False): ("enqueuer.backends.processes", "ProcessBackend"),
    ("process", True): ("enqueuer.backends.process_tasks", "TaskProcesses"),
    ("ray", False): ("enqueuer.backends.ray", "RayBackend"),
    ("ray", True): ("enqueuer.backends.ray_tasks", "RayTasks"),
}

ESCALATION_S = 0.6  # terminate, wait half of this, kill, wait the other half


class WorkerState(enum.Enum):
    """Where a worker is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"  # its process has ended; what it had sent is still being read
    ENDED = "ended"  # as it was asked to
    DEAD = "dead"  # without having been asked


@dataclass(frozen=True)
class Cluster:
    """What `backend="ray"` is told of Ray.

    Attributes:
        address: Of the cluster; None: the one that is there, or a new one on this machine.
        options: Of the actors.
        writable: Whether large arrays are copied on arrival.
    """

    address: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    writable: bool = False


@dataclass(frozen=True)
class Job:
    """All that a backend must know to run a source.

    Attributes:
        source: What the user handed over; if it is a TaskSource, there are no shards.
        shards: How many shards there are, over all ranks.
        own: The indices of those that are run here.
        workers: How many workers run them; at most one a shard is started.
        random_seed: Of the enqueuer.
        ordered: Whether the consumer reads the shards in turn.
        max_queue_size: The most finished items that may wait, over all workers.
        max_queue_bytes: The same in bytes, or None.
        start_method: "fork", "forkserver" or "spawn"; processes only.
        most_workers: How many workers there may be later, if that is more than `workers`.
        threads_per_worker: How many threads native libraries may run in each worker process;
            None: its share of the CPUs, or what the environment says.
        forward_logs: True, False or "multiprocessing-logging"; not of threads.
        on_error: What to do about an exception of the source's.
        max_restarts: How many workers that died are replaced; not of threads.
        restarts: How many were replaced by an earlier backend, of these.
        may_grow: Whether there may be more workers later; tasks only.
        longest_wait_s: How long a wait without a deadline lasts at most; None: for ever.
        trace: Where workers record what they do; None: nowhere.
        cluster: For Ray only.
    """

    source: Source | TaskSource
    shards: int
    own: tuple[int, ...]
    workers: int
    random_seed: int
    ordered: bool
    max_queue_size: int
    max_queue_bytes: int | None
    start_method: str
    forward_logs: bool | str
    on_error: OnError
    max_restarts: int
    most_workers: int = 0
    threads_per_worker: int | None = None
    restarts: int = 0
    may_grow: bool = False
    longest_wait_s: float | None = None
    trace: Place | None = None
    cluster: Cluster = Cluster()

    def share_of(self, cpus: float) -> int:
        """Return how many of the CPUs each worker has if they are dealt out evenly; at least 1."""
        workers = max(self.workers, self.most_workers)
        if not isinstance(self.source, TaskSource):
            workers = min(workers, len(self.own))
        return max(1, int(cpus) // workers)

    def plans(self) -> list[Plan]:
        """Deal the shards out: of n workers, worker w gets every n-th from the w-th on."""
        workers = self.workers
        if not isinstance(self.source, TaskSource):
            workers = min(workers, len(self.own))
        return [
            Plan(self.source, self.own[w::workers], self.shards, self.random_seed, self.on_error)
            for w in range(workers)
        ]


class WorkerThread(threading.Thread):
    """A thread that runs a worker."""


class Backend(Protocol):
    """Workers, and what brings their messages."""

    def start(self) -> None:
        """Start all workers or none; raise StartError if it cannot be done."""

    @property
    def restarts(self) -> int:
        """How many workers died and were replaced."""

    def begin(self, epoch: Epoch) -> None:
        """Tell the workers to run their shards once more."""

    def wait(self, order: Order, deadline: float | None) -> Failure | None:
        """Wait until what is next in `order` can be taken; or until more tasks can be submitted.

        Called by one consumer at a time. Woken by a message, a death, and `close()`. Ends of
        shards are told to `order`; when all have ended there is nothing to wait for.

        Returns:
            The failure, if that is what is next; until `pass_over`, again and again.

        Raises:
            DeadlineExpired: Nothing came until `deadline`, of `time.monotonic()`; without one, for
                the job's `longest_wait_s`.
            Closed: `close()` was called.
        """

    def pass_over(self) -> None:
        """Forget the failure that `wait` has just returned, if it is skipped: it is noted."""

    def take(self, order: Order) -> Iterator[Item]:
        """Yield what is next in `order` and is there, at least one after a `wait()`.

        To be read by something written in C, such as `deque.extend`, so that an exception of a
        signal handler cannot strike while an item is in nobody's hands.
        """

    def acknowledge(self) -> None:
        """Count all that was taken as consumed, so that as many others may be made."""

    def waiting(self) -> int:
        """Return how many finished items wait and were not taken."""

    def has_news(self, order: Order) -> bool:
        """Return whether `wait()` might return at once, while no item waits.

        Neither this nor asking before waiting may let a worker make more than it would.
        """

    def cpus(self) -> float:
        """Return how many CPUs there are for the workers and this process."""

    def measures(self) -> list[WorkerStats]:
        """Return what each worker has done so far. Called by any thread, at any time."""

    def worker_bytes(self) -> int | None:
        """Return the memory of the largest worker, as one more would take it; None: unknown.

        Takes some milliseconds.
        """

    def look(self, order: Order) -> WaitSnapshot:
        """Return what can be seen of the workers, within about a second.

        Called by the consumer, after a `wait()` that brought nothing.
        """

    def close(self) -> None:
        """Ask the workers to exit and wake whoever is in `wait()`; returns at once."""

    def stop(self, timeout: float) -> None:
        """Close, then end the workers: ask, terminate, kill; within about `timeout` seconds."""


class TaskBackend(Backend, Protocol):
    """The same for tasks, which are handed over one by one."""

    def submit(self, ticket: Ticket) -> None:
        """Let whichever worker is free do a task."""

    def resize(self, workers: int) -> None:
        """Add workers, or let some exit; of a job that may grow.

        Raises:
            StartError: One could not be started; there are as many as before, or a few more.
        """

    @property
    def is_resizing(self) -> bool:
        """Whether a worker that was told to exit still runs."""

    def fail(self, failure: Failure) -> None:
        """Let a task have failed that could not be read."""

    def tickets(self) -> list[Ticket]:
        """Return the tickets of tasks whose results were not taken."""

    def poll(self, order: TaskOrder) -> bool:
        """Return whether something can be taken now; waits for nothing."""

    @property
    def outstanding(self) -> int:
        """How many tickets there are of tasks whose results were not taken."""

    @property
    def largest_bytes(self) -> int:
        """The size of the largest result so far, if there is a bound on bytes; else 0."""


def bunch_of(job: Job) -> int:
    """Return how many items are taken at once, if they are there."""
    return max(1, job.max_queue_size // 8)


def default_method() -> str:
    """Return the start method for what can be pickled: safe with threads in the parent."""
    return "forkserver" if HAS_FORKSERVER else "spawn"


def load(name: str, job: Job, loop_meter: LoopMeter | None = None) -> Backend:
    """Return the backend called `name`, ready to start `job`; it tells `loop_meter` of its waits.

    Raises:
        StartError: This system cannot run it.
    """
    if name == "process" and not hasattr(os, "fork"):
        raise StartError("backend='process' needs a POSIX system; use backend='thread' here")
    module, kind = _CLASSES[name, isinstance(job.source, TaskSource)]
    backend: Backend = getattr(importlib.import_module(module), kind)(
        job, loop_meter or LoopMeter()
    )
    return backend


class Stoppable(Protocol):
    """What has workers that can be stopped."""

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
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and daemonic threads with it
        helper.start()


def until(deadline: float | None, longest_wait_s: float | None) -> float | None:
    """Return when a wait that is about to sleep is cut: at its deadline, or the longest wait."""
    if deadline is None and longest_wait_s is not None:
        return time.monotonic() + longest_wait_s
    return deadline


def owners_of(plans: Sequence[Plan]) -> dict[int, int]:
    """Return which worker runs each shard."""
    return {shard: worker for worker, plan in enumerate(plans) for shard in plan.shards}


class Inherited:
    """The backend of an enqueuer that runs in the process from which this one was forked.

    Its workers are not here. Threads do not exist in a forked child, and a lock that one of them
    held would never be released, so the backend of the parent is not touched.

    Args:
        owner: The process that has the workers.
        backend: What the parent reads from. It is kept, as its end might do harm here.
    """

    def __init__(self, owner: int, backend: Backend) -> None:
        self._owner = owner
        self._kept = backend
        self.restarts = backend.restarts

    def close(self) -> None:
        """Do nothing: the workers are the parent's."""

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


def history(deaths: Sequence[tuple[int, int]], place: tuple[int, int], max_restarts: int) -> str:
    """Say how often replaced workers had died, and where.

    Args:
        deaths: The shard and item of each of them.
        place: The same of the one that is not replaced.
        max_restarts: How many may be.
    """
    if not max_restarts:
        return ""
    here = deaths.count(place)
    text = f" max_restarts={max_restarts} is used up"
    if here:
        text += f"; {here + 1} workers died at this very item"
    return f"{text}."


def in_rotation(workers: list[T], last: int) -> list[T]:
    """Return workers, beginning behind the last one that was served, so that all get their turn."""
    at = (last + 1) % max(1, len(workers))
    return workers[at:] + workers[:at]


def split_bound(total: int, workers: int) -> list[int]:
    """Deal a bound out over workers: as even as can be, and never more than `total`.

    Example:
        >>> split_bound(10, 4), split_bound(1, 3)
        ([3, 3, 2, 2], [1, 0, 0])
    """
    return [total // workers + (w < total % workers) for w in range(workers)]
