"""One run of an enqueuer: the workers from start() to stop(), which others may replace meanwhile.

    NEW --the first epoch has begun--> RUNNING --a failure was raised--> FAILED
                                          |                                |
                                          +-----------stop()---------------+--> STOPPED

`OwnedBackends` ends the workers together with their enqueuer.

`Locks` say which thread reads, and keep a stop() that this thread asks for meanwhile:

    the loop has the lock: it waits for workers, or takes their items
        a signal handler, or a handler of a log record, in its thread: stop() --> defer_stop()
    the loop has released the lock -----------------------------------------> the workers end

The lock is reentrant, so it does not keep code of the same thread out. Workers that ended within
the code that reads from them would pull its list of workers away.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterator
from typing import cast

from enqueuer.backends.copies import Copies
from enqueuer.backends.engine import Backend, load
from enqueuer.backends.job import Job
from enqueuer.backends.pool import ESCALATION_S, Inherited, Restarts, forget
from enqueuer.backends.stall import DeadlineExpired, WaitLimits
from enqueuer.common import interrupts
from enqueuer.common.interrupts import Finalizer
from enqueuer.enqueuers.failures import FailurePolicy
from enqueuer.enqueuers.options import Options
from enqueuer.errors import Closed, InvalidState
from enqueuer.monitoring import usage
from enqueuer.monitoring.meters import LoopMeter, WorkerStats, clock, top_of
from enqueuer.monitoring.stats import Stats
from enqueuer.monitoring.trace import Trace
from enqueuer.order.messages import Epoch
from enqueuer.order.position import SavedPosition

# Seconds from the request to exit until the last worker is killed. A generator's `finally` should
# fit into the first two.
STOP_S = 2.0 + ESCALATION_S


class OwnedBackends:
    """Backends that are to be stopped when their enqueuer stops, or is garbage.

    Args:
        owner: The object at whose end the backends are stopped.
    """

    def __init__(self, owner: object) -> None:
        # The finalizers must not know the owner, or it could never be collected.
        self._owner = weakref.ref(owner)
        self._backends: list[tuple[Backend, Finalizer]] = []
        self._pid = 0

    def add(self, backend: Backend) -> None:
        """Stop a backend together with the owner."""
        finalizer = Finalizer(self._owner(), forget, functools.partial(_stop, backend), STOP_S)
        self._backends.append((backend, finalizer))
        self._pid = os.getpid()

    @property
    def are_running(self) -> bool:
        """Whether there are any; not after the end of the interpreter has stopped them."""
        # A copy, as another thread that removes one would hide the next one.
        return any(finalizer.alive for _, finalizer in self._backends.copy())

    def stop(self, timeout: float, but: Container[Backend | None] = ()) -> None:
        """Stop all backends but some. Idempotent."""
        with interrupts.held():
            for entry in self._backends.copy():
                backend, finalizer = entry
                if backend not in but:
                    backend.stop(timeout)
                    finalizer.detach()
                    # A signal handler may have stopped it as well, in the wait for its workers.
                    if entry in self._backends:
                        self._backends.remove(entry)

    def leave_to_parent(self) -> Backend:
        """Replace the backends in a child forked from the process that has their workers.

        Returns:
            The object that replaces them; its methods raise InvalidState.
        """
        parents, self._backends = self._backends, []
        for _, finalizer in parents:
            finalizer.detach()
        inherited = cast(Backend, Inherited(self._pid, parents))
        self.add(inherited)
        return inherited


def _stop(backend: Backend, timeout: float) -> None:
    with interrupts.held():
        backend.stop(timeout)


class Locks:
    """The locks of an enqueuer, and the stop that a thread makes once it has released the second.

    They outlive a run: the next one waits for the code of an iterable that still runs.

    Attributes:
        state_lock: Lock that one start, stop or change of the workers holds at a time. It is
            taken before `lock`.
        lock: Lock that one consumer at a time holds, and all that changes what consumers see.
        changed: Condition of `lock`: other workers have taken over, or the run ends.

    Example:
        >>> locks = Locks()
        >>> locks.defer_stop(lambda: print("stopped"))
        False
        >>> with locks.reading():
        ...     locks.defer_stop(lambda: print("stopped"))
        ...     print("reading")
        True
        reading
        stopped
    """

    def __init__(self) -> None:
        self.leave_to_parent()

    def leave_to_parent(self) -> None:
        """Be free in a forked child: a thread that does not exist there may have held them."""
        self.state_lock, self.lock = threading.RLock(), threading.RLock()
        self.changed = threading.Condition(self.lock)
        # Threads that are in `reading`: the one that has the lock, and those that wait for a
        # change of workers and have released it.
        self._readers: set[int] = set()
        # What threads have asked for that are still in `reading`; each takes its own.
        self._stops: dict[int, Callable[[], object]] = {}

    @contextlib.contextmanager
    def reading(self, timeout: float = -1) -> Iterator[None]:
        """Hold the lock, and signal handlers back; afterwards stop, if that was asked for.

        Args:
            timeout: Seconds to wait for the lock; -1, the default: without a limit.

        Raises:
            DeadlineExpired: The lock was not free in time.
        """
        thread = threading.get_ident()
        is_within = thread in self._readers
        try:
            with interrupts.held(), interrupts.taken(self.lock, timeout) as is_taken:
                if not is_taken:
                    raise DeadlineExpired("another thread waits for a batch")
                self._readers.add(thread)
                try:
                    yield
                finally:
                    if not is_within:
                        self._readers.discard(thread)
        finally:
            if not is_within and (stop := self._stops.pop(thread, None)) is not None:
                stop()

    @property
    def is_reading(self) -> bool:
        """Whether this thread is in `reading`."""
        return threading.get_ident() in self._readers

    def defer_stop(self, stop: Callable[[], object]) -> bool:
        """Have the workers stopped once this thread has left `reading`; False if it is not in."""
        if not self.is_reading:
            return False
        self._stops[threading.get_ident()] = stop
        return True


class State(enum.Enum):
    """Where an enqueuer is in its life."""

    NEW = "NEW"
    RUNNING = "RUNNING"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


_NEXT = {
    State.NEW: {State.RUNNING},
    State.RUNNING: {State.FAILED, State.STOPPED},
    State.FAILED: {State.FAILED, State.STOPPED},
    State.STOPPED: set[State](),
}

PassWork = Callable[[Backend, Backend], None]


class Run:
    """The workers, and what is measured of them.

    Args:
        options: Options of the enqueuer.
        workers: Number of workers to begin with.
        owned: Backends of the enqueuer; the run adds its own.
        locks: Locks of the enqueuer.
        trace: Recorder of what happens; None: nothing is recorded.
        saved: Where it begins.

    Attributes:
        workers: Number of workers.
        backend: Backend that the loop reads from; None before the start, and in a forked child.
        state: Where the run is; only `move` assigns it.
        restarts: Restarts of all its backends.
        meter: Waiting times of the loop.
        failures: Policy for failures of workers.
        limits: How long the loop waits for a batch.
        is_news: Whether callbacks of statistics may be due.
        has_warned_of_nothing: Whether an epoch without items was reported.
        successor: Started workers that are about to take over, their number, and the function that
            passes the work to them; None if none are.
        final: Statistics at the end of the run; None while it goes on.
    """

    def __init__(
        self,
        options: Options,
        workers: int,
        owned: OwnedBackends,
        locks: Locks,
        trace: Trace | None,
        saved: SavedPosition,
    ) -> None:
        self.options = options
        self.locks = locks
        self.owned = owned
        self.workers = workers
        self.restarts = Restarts(options.max_restarts)
        self.state = State.NEW
        self.meter = LoopMeter(trace)
        self._items_before = saved.total_items
        skipped = saved.error_count if saved.is_loaded else 0
        self.failures = FailurePolicy(options.on_error, options.max_errors, skipped)
        self.limits = WaitLimits(options.stall_timeout, options.timeout)
        self.is_news = False
        self.has_warned_of_nothing = False
        self.final: Stats | None = None
        # Nothing reads it before the start, which comes right after this.
        self.backend = cast(Backend, None)
        self._job: Job | None = None
        # What worker processes have copied from this one; None without them.
        self.copies: Copies | None = None
        # Backends that start. Within each, a signal handler may start another one.
        self._starting: list[Backend] = []
        self.successor: tuple[Backend, int, PassWork] | None = None

    # --- the workers ---

    @property
    def elements(self) -> int:
        """Number of elements in each item; 1 for shards."""
        return 1 if self._job is None else self._job.elements

    def move(self, new: State) -> None:
        """Change state; the only method that assigns `state` after the construction."""
        if new not in _NEXT[self.state]:
            raise InvalidState(f"cannot go from {self.state.value} to {new.value}")
        self.state = new

    def start_backend(self, job: Job, first: Epoch | None = None) -> Backend:
        """Return started workers; they wait for the first epoch, or run it already.

        Args:
            job: Description of what they run.
            first: The first epoch, if they may begin it.

        Raises:
            StartError: They could not be started; none is left.
        """
        self._job = job
        name, trace = self.options.backend_name, self.meter.trace
        if trace is not None:
            about = {"backend": name, "start_method": job.start_method, "workers": job.workers}
            about |= {"shards": len(job.rank_shards), "max_queue_size": job.max_queue_size}
            job = dataclasses.replace(job, trace=trace.open(about))
        try:
            backend = load(name, job, self.restarts, self.meter)
        except BaseException:
            if trace is not None:
                trace.leave()
            raise
        if trace is not None:
            backend.at_end = trace.leave
        self.copies = None
        if name != "thread" and job.workers:
            self.copies = Copies(job.source)
            if len(job.plans()) > 1 or job.may_grow:
                self.copies.warn_of_generators()
                if job.start_method == "fork":
                    self.copies.warn_of_files()
        # Before it is started: if neither that nor the clean-up is completed, stop() ends it.
        self.owned.add(backend)
        self._starting.append(backend)
        try:
            backend.start(first)
        except BaseException:
            self._starting.remove(backend)
            self.end_replaced()
            raise
        self._starting.remove(backend)
        return backend

    def cpus(self) -> float:
        """Return the number of CPUs that the workers and this process have."""
        return usage.cpus() if self.backend is None else self.backend.pool.cpus()

    # --- replacing them ---

    def resize(self, workers: int) -> None:
        """Add workers that do tasks, or let some exit. Locks held.

        Each worker finishes its task, so no work is repeated. But the list of workers changes, so
        no consumer may wait meanwhile, which `replace` allows.

        Raises:
            StartError: The new workers could not be started; the others go on.
        """
        self.backend.resize(workers)
        self.workers = workers
        self._record_change()

    def replace(self, job: Job, pass_work: PassWork) -> None:
        """Let other workers go on where these are. State lock of the enqueuer held.

        It wakes a consumer that waits. The caller ends the old workers afterwards.

        Args:
            job: Job of the new workers.
            pass_work: Called with the old and the new backend; gives the new one its work.

        Raises:
            StartError: The new workers could not be started; the others go on.
        """
        new, old = self.start_backend(job), self.backend
        self.successor = new, job.workers, pass_work
        # This wakes the consumer, which then waits for the change.
        old.close()
        self.finish_change()

    def finish_change(self) -> None:
        """Let new workers take over, if there are some. State lock of the enqueuer held.

        The consumer may hold the lock for long: code of the user's, such as an iterable, runs
        under it. The old workers are closed and cannot go on. So if a signal handler ends this
        wait, another thread waits in its place.
        """
        if self.successor is None:
            return
        try:
            with self.locks.reading():
                self._take_over()
        except BaseException:
            if self.successor is not None:
                name = "enqueuer-reconfigure"
                threading.Thread(target=self._finish_change_later, name=name, daemon=True).start()
            raise

    def _finish_change_later(self) -> None:
        # Closed is raised if the run is being stopped.
        with contextlib.suppress(Closed), self.locks.lock:
            self._take_over()
        with self.locks.state_lock:
            # After stop(), which has stopped them, there may be workers of the next run.
            if self.state is not State.STOPPED:
                self.end_replaced()

    def _take_over(self) -> None:
        """Replace the backend by its successor, if that is still to be done. Lock held."""
        old, successor = self.backend, self.successor
        try:
            if successor is not None:
                self.backend, self.workers, pass_work = successor
                self.meter.by_worker = {}
                pass_work(old, self.backend)
                self._record_change()
        finally:
            self.successor = None
            self.locks.changed.notify_all()

    def wait_for_change(self) -> bool:
        """Wait until new workers have taken over; return False if none are about to. Lock held."""
        if self.successor is None:
            return False
        self.locks.changed.wait_for(lambda: self.successor is None)
        return True

    def end_replaced(self) -> None:
        """End the workers that others have replaced. State lock of the enqueuer held."""
        self.owned.stop(STOP_S, but=[self.backend, *self._starting])

    def _record_change(self) -> None:
        """Record the number of workers in the timeline."""
        if self.meter.trace is not None:
            self.meter.trace.instant("reconfigured", {"workers": self.workers})

    # --- the end ---

    def close(self) -> None:
        """Ask the workers to exit, and wake the consumer."""
        self.backend.close()

    # --- what was measured ---

    def total_items(self, ready: int) -> int:
        """Return how many batches the loop was given, in earlier runs, too.

        Args:
            ready: As for `stats`.
        """
        return self._items_before + self.meter.taken - ready

    def stats(self, epoch: int, ready: int) -> Stats:
        """Return the statistics so far.

        Args:
            epoch: Number of the epoch, from 0.
            ready: Number of batches that were taken from the workers and not given to the loop.
        """
        if self.final is not None:
            return self.final
        backend, waits, options = self.backend, self.meter, self.options
        now, first, since, loop = clock(), waits.first, waits.since, waits.used
        waiting = now - since if since else 0
        waited = waits.waited + (waiting if first else 0)
        idle, idle_cpu_s = waits.idled(now)
        # What exceeds the queue counts as held by the workers.
        in_queue = 0 if backend is None else backend.schedule.waiting() + ready
        return Stats(
            seconds=0.0 if backend is None else (now - waits.began) / 1e9,
            backend=options.backend_name if self.workers else "inline",
            ordered=options.ordered,
            epoch=epoch,
            items=waits.taken - ready,
            first_batch_s=(first - waits.began) / 1e9 if first else None,
            first_wait_s=(waits.first_wait + (0 if first else waiting)) / 1e9,
            waiting_s=waited / 1e9,
            reading_s=waits.reading / 1e9,
            working_s=max(0, now - first - waited - idle) / 1e9 if first else 0.0,
            idle_s=idle / 1e9,
            idle_cpu_s=idle_cpu_s,
            waits={top_of(bucket) / 1e9: count for bucket, count in list(waits.buckets.items())},
            waited_for={worker: waited / 1e9 for worker, waited in list(waits.by_worker.items())},
            queue_size=min(in_queue, options.max_queue_size),
            max_queue_size=options.max_queue_size,
            error_count=self.failures.count,
            restart_count=self.restarts.count,
            cpus=self.cpus(),
            loop_cpu_s=0.0 if backend is None else time.process_time() - waits.cpu_s,
            loop_lacked_s=loop.cpu_wait_s or 0.0,
            loop_switches=loop.switches,
            workers=self._measures(now),
            elements=self.elements,
            useful_workers=None if self._job is None else self._job.useful_workers,
            side_by_side=self._job is not None and self._job.side_by_side,
            total_items=self.total_items(ready),
        )

    def _measures(self, now: int) -> tuple[WorkerStats, ...]:
        """Return the work of each worker."""
        measures = [] if self.backend is None else self.backend.measures()
        idled = self.meter.idled_since
        return tuple(worker.with_idle(idled(worker.started, now) / 1e9) for worker in measures)


def next_workers(before: Run | None, options: Options) -> int:
    """Return how many workers a run with these options begins with.

    With `workers="auto"` it is the number that the run before had come to, unless `start()` was
    given another one.
    """
    if before is not None and options.is_auto and before.options.workers is options.workers:
        return before.workers
    return options.first_workers
