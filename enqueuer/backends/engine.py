"""The only loop that waits for workers, and the only restart policy: what an enqueuer sees.

    wait() -- what is next? -- a schedule decides ---> an item, or the end: return
                    ^                            \\---> a failure: return it
                    |                             \\--> a worker has died: replace it, or report it
                    +--- the pool sleeps <-------------> nothing yet

`load()` finds the pool of a backend by its name. The engine joins a pool, which runs, wakes and
ends workers, and a schedule, which decides what is next and what is done again after a death.
`wait()` and what belongs to it are called by one consumer at a time; `close()`, `stop()`,
`measures()` and `waiting()` by any thread.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import logging
import os
import time
from collections.abc import Callable
from typing import Any, Generic, TypeAlias

from enqueuer.backends.job import Job
from enqueuer.backends.pool import (
    HAS_ENDED,
    Death,
    DeathPlace,
    NoRoom,
    Restarts,
    W,
    Worker,
    WorkerPool,
)
from enqueuer.backends.shard_schedule import ShardSchedule
from enqueuer.backends.stall import DeadlineExpired, WaitSnapshot
from enqueuer.backends.task_schedule import TaskSchedule
from enqueuer.common import interrupts
from enqueuer.errors import Closed, StartError, WorkerDied
from enqueuer.monitoring.meters import LoopMeter, WorkerStats
from enqueuer.order.messages import Epoch, Failure
from enqueuer.workers.settings import check_not_importing
from enqueuer.workers.tasks import TaskSource

_log = logging.getLogger("enqueuer")

_POOLS = {
    "thread": ("enqueuer.backends.thread_pool", "ThreadPool"),
    "process": ("enqueuer.backends.process.pool", "ProcessPool"),
    "ray": ("enqueuer.backends.ray.pool", "RayPool"),
}
# The pool of `workers=0`, whatever the backend is.
_INLINE = ("enqueuer.backends.inline", "InlinePool")
# Seconds for the end of the workers that were started before one could not be.
_FAILED_START_S = 1.0


class Engine(Generic[W]):
    """The workers of one run, and what brings their messages.

    Args:
        job: Description of what the workers run.
        pool: Pool that runs the workers.
        schedule: Decisions about the items or the tasks of the job.
        restarts: Restarts of the run, which other engines may share.
        loop_meter: Account of the waits.

    Attributes:
        schedule: Decisions about the items or the tasks; it gives what was waited for.
        tasks: The schedule, if the workers do tasks; None if they run shards.
        shards: The schedule, if the workers run shards; None if they do tasks.
        at_end: Function that is called once the workers have ended; or None.
    """

    def __init__(
        self,
        job: Job,
        pool: WorkerPool[W],
        schedule: ShardSchedule[W] | TaskSchedule[W],
        restarts: Restarts,
        loop_meter: LoopMeter,
    ) -> None:
        self.tasks = schedule if isinstance(schedule, TaskSchedule) else None
        self.shards = schedule if isinstance(schedule, ShardSchedule) else None
        self._job = job
        self.pool = pool
        self.schedule = schedule
        self._restarts = restarts
        self._loop_meter = loop_meter
        # Statistics of the workers that were replaced, by index.
        self._before: dict[int, WorkerStats] = {}
        # Number of workers, without those that are leaving.
        self._size = job.workers
        self._concurrency = job.source.concurrency
        self._owner = os.getpid()
        self.at_end: Callable[[], None] | None = None
        self.is_closed = False

    def start(self, first: Epoch | None = None) -> None:
        """Start all workers or none. Called within `interrupts.held()`.

        Args:
            first: Epoch for which `begin` is called next, if that is known. A process begins it
                while others are being started.

        Raises:
            StartError: They cannot be started.
        """
        workers, count = self.pool.workers, len(self._job.plans())
        try:
            self.pool.open()
            for index in range(count):
                worker = self.pool.start_worker(index)
                workers.append(worker)
                if first is not None and self.pool.are_processes:
                    self.schedule.begin_worker(worker, first)
                interrupts.check()
        except BaseException as error:
            text = f"worker {len(workers)} of {count} could not be started: {error}"
            self.stop(_FAILED_START_S)
            if isinstance(error, NoRoom):
                raise StartError(f"{text}; none is running now") from error
            raise

    # --- the loop ---

    def wait(self, order: Any, deadline: float | None) -> Failure | None:
        """Wait until what is next in `order` can be taken; or until more tasks can be submitted.

        Woken by a message, a death, and `close()`. Ends of shards are noted in `order`; when all
        have ended there is nothing to wait for.

        Returns:
            The failure, if that is what is next; until `pass_over` of it, again and again.

        Raises:
            DeadlineExpired: Nothing came until `deadline`, of `time.monotonic()`; without one, for
                the job's `longest_wait_s`.
            Closed: `close()` was called.
        """
        schedule, is_expired = self.schedule, False
        while not self.is_closed:
            step = schedule.next_step(order)
            # A handler of a log record may have called stop().
            if self.is_closed:
                break
            if step is True:
                return None
            if isinstance(step, Failure):
                return step
            if step is not False:
                failure = self._replace(step, order)
                if failure is not None:
                    return failure
                continue
            if is_expired:
                raise DeadlineExpired("no batch in time")
            until = self._sleep_until_news(order, deadline)
            is_expired = until is not None and time.monotonic() >= until
        raise Closed("the enqueuer was stopped")

    def _sleep_until_news(self, order: Any, deadline: float | None) -> float | None:
        """Sleep until something comes; return the time at which this was to end anyway."""
        # Any worker may do the task that the loop waits for.
        awaited = None if self.shards is None else self.shards.awaited_worker(order)
        meter = self._loop_meter
        meter.pause(None if awaited is None else awaited.index)
        longest_wait_s = self._job.longest_wait_s
        if deadline is None and longest_wait_s is not None:
            deadline = meter.since / 1e9 + longest_wait_s
        self.pool.sleep(awaited, deadline)
        return deadline

    def acknowledge(self) -> None:
        """Count all that was taken as consumed, so that as many others may be made."""
        # What is in the reorder buffer was acknowledged.
        if self.shards is not None:
            self.shards.acknowledge()

    # --- what is known of the workers ---

    def measures(self, workers: list[W] | None = None) -> list[WorkerStats]:
        """Return what some workers, or all, have done so far, with those that they replaced."""
        measures = self.pool.measures(self.workers() if workers is None else workers)
        if self._concurrency > 1:
            measures = [dataclasses.replace(m, concurrency=self._concurrency) for m in measures]
        before = self._before
        return [now.after(before[now.index]) if now.index in before else now for now in measures]

    def workers(self) -> list[W]:
        """Return the workers, without those that are leaving."""
        return [worker for worker in list(self.pool.workers) if not worker.is_leaving]

    def inspect(self, order: Any) -> WaitSnapshot:
        """Return what can be seen of the workers, within about a second.

        Called by the consumer, after a `wait()` that brought nothing.
        """
        turn, snapshots = order.turn(), self.pool.snapshots(self.workers())
        # The awaited worker comes first.
        snapshots.sort(key=lambda worker: turn not in worker.shards)
        return WaitSnapshot(self.schedule.awaited(order), self.schedule.waiting(), snapshots)

    # --- deaths ---

    def _replace(self, worker: W, order: Any) -> Failure | None:
        """Replace a worker that has ended; return its failure if that is not allowed, or fails."""
        if worker.is_leaving:
            self.schedule.part_with(worker)
            self.pool.workers.remove(worker)
            self._before.pop(worker.index, None)
            self.pool.discard(worker)
            return None
        place, death = self.schedule.place_of(worker, order), worker.death()
        successor = self._successor(worker, place, death)
        if isinstance(successor, Failure):
            return self.schedule.give_up(worker, successor)
        if successor is not None:
            self.schedule.resume(worker, successor, order, death.late)
            if (trace := self._loop_meter.trace) is not None:
                trace.instant("restart", {"worker": str(successor), "why": death.message})
        return None

    def _successor(self, dead: W, place: DeathPlace, death: Death) -> W | Failure | None:
        """Start a worker in the place of a dead one, whose messages were delivered.

        Returns:
            The new worker; the failure, if no more restarts are allowed or the start failed; None
            if `stop()` was called meanwhile.
        """
        restarts, workers = self._restarts, self.pool.workers
        if death.error is not None:
            return _failure_of(dead, place, death.message, death)
        if death.counts and not restarts.allowed:
            return _failure_of(dead, place, death.message + restarts.history(place), death)
        try:
            new = self.pool.start_worker(dead.index)
        except Exception as trouble:
            # What it waits for, such as the fork server, a handler may have interrupted.
            if interrupts.is_of_handler(trouble):
                raise
            text = f"{death.message} A replacement could not be started: {trouble}"
            failure = _failure_of(dead, place, text, death)
            failure.error.__cause__ = trouble
            return failure
        # stop() was called in the meantime, and does not know of this worker.
        if self.is_closed:
            self.pool.discard(new)
            return None
        if death.counts:
            restarts.add(place)
        (self._before[dead.index],) = self.measures([dead])
        workers[workers.index(dead)] = new
        self.pool.discard(dead)
        _log.warning(
            "%s %s; %s goes on with %s (restart %d, of max_restarts=%d)",
            # As text, as a handler may keep the record, and with it descriptors.
            str(dead),
            death.how,
            str(new),
            place.text,
            restarts.count,
            restarts.limit,
        )
        return new

    # --- the number of workers ---

    @property
    def is_resizing(self) -> bool:
        """Whether a worker that was asked to exit still runs."""
        running = [worker for worker in self.pool.workers if worker.state not in HAS_ENDED]
        return len(running) > self._size

    def resize(self, workers: int) -> None:
        """Add workers that do tasks, or let some exit after their tasks.

        Called by the consumer, between two waits and within `interrupts.held()`.

        Raises:
            StartError: One could not be started; there are as many as before, or a few more.
        """
        all_workers, before = self.pool.workers, self._size
        surplus = before - workers
        if surplus > 0:
            for worker in self.workers()[-surplus:]:
                worker.ask_to_exit()
        self._size = min(before, workers)
        try:
            while self._size < workers:
                used = {worker.index for worker in all_workers}
                index = next(index for index in itertools.count() if index not in used)
                all_workers.append(self.pool.start_worker(index))
                self._size += 1
        except StartError as error:
            self.resize(before)
            raise StartError(f"another worker could not be started: {error}") from error

    # --- the end ---

    def close(self) -> None:
        """Ask the workers to exit and wake the thread that is in `wait()`; returns at once."""
        # Not of a child that was forked inside `open`, before an enqueuer had this backend.
        if self._owner == os.getpid():
            self.is_closed = True
            self.pool.close()

    def stop(self, timeout: float) -> None:
        """Close, then end the workers: ask, terminate, kill; within about `timeout` seconds.

        Called within `interrupts.held()`. Idempotent.
        """
        if self._owner != os.getpid():
            return
        self.close()
        self.pool.stop(timeout)
        at_end, self.at_end = self.at_end, None
        if at_end is not None:
            at_end()


def _failure_of(dead: Worker, place: DeathPlace, text: str, death: Death) -> Failure:
    """Return the failure of a worker that is not replaced, at the place of its death."""
    error = WorkerDied(text, dead.index, death.exitcode)
    error.__cause__ = death.error
    running = death.running or place.running
    return Failure(place.shard, place.number, error, worker=str(dead), running=running)


Backend: TypeAlias = Engine[Any]


def load(name: str, job: Job, restarts: Restarts, loop_meter: LoopMeter) -> Backend:
    """Return a backend that is ready to be started.

    Args:
        name: Name of the backend.
        job: Description of what the workers run.
        restarts: Restarts of the run.
        loop_meter: Account of the waits.

    Raises:
        StartError: This system cannot run it, or this is a worker that imports a module.
    """
    if name == "process" and job.workers and not hasattr(os, "fork"):
        raise StartError("backend='process' needs a POSIX system; use backend='thread' here")
    if name != "thread" and job.workers and job.start_method != "fork":
        check_not_importing()
    if name == "process" and job.workers and job.start_method == "forkserver":
        # The server imports numpy while this process imports the pool and pickles the source.
        importlib.import_module("enqueuer.backends.process.fork_server").server.begin()
    module, kind = _POOLS[name] if job.workers else _INLINE
    pool: WorkerPool[Any] = getattr(importlib.import_module(module), kind)(job)
    # Items keep their places until the loop has used them, so it takes at most half of them. With a
    # bound in bytes there may be few places, and a trace records when each item was asked for.
    is_measured = job.max_queue_bytes is not None
    limit = 1 if is_measured or job.trace is not None else max(1, job.max_queue_size // 2)
    if isinstance(job.source, TaskSource):
        in_turn = job.workers if job.source.is_round_robin and name != "thread" else 0
        tasks = TaskSchedule(pool.workers, pool.dispatch, limit, is_measured, in_turn)
        return Engine(job, pool, tasks, restarts, loop_meter)
    owners = {shard: worker for worker, plan in enumerate(job.plans()) for shard in plan.shards}
    return Engine(job, pool, ShardSchedule(pool.workers, owners, limit), restarts, loop_meter)
