"""Starting, observing and ending Ray actors; a stream of Ray brings the messages of each.

    actor 0 ==packets==> thread 0 -> inbox 0 \\
    actor 1 ==packets==> thread 1 -> inbox 1  > one wake-up -> sleep()
    actor 0 <--epochs, tickets, credit-- calls without a result

Ray places the actors, moves the packets and reports deaths. A thread for each actor waits for
its next packet and unpacks it, ahead of the loop. The packets belong to this process, so they
outlive the actor. An actor whose stream breaks counts as dead, and is killed to make sure. Its
replacement is a new actor, which Ray places on any node with room.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

from enqueuer.backends.job import Job, split_bound
from enqueuer.backends.lifecycle import ESCALATION_S, deliver_all
from enqueuer.backends.payload import pickled_source
from enqueuer.backends.pool import HAS_ENDED, WorkerPool, WorkerSnapshot, WorkerState
from enqueuer.backends.ray.actor import GROUPS, ActorConfig, RayWorker
from enqueuer.backends.ray.channel import (
    Ended,
    Frame,
    ItemFrame,
    NeedsCredit,
    RayInbox,
    Ready,
    TotalCredit,
)
from enqueuer.backends.ray.handle import Actor, ActorDispatch, Receiver, unpack
from enqueuer.backends.ray.session import Gone, Session, unwrapped
from enqueuer.backends.stall import level_of_user
from enqueuer.common import finalizers, interrupts
from enqueuer.errors import EnqueuerWarning, StopWarning
from enqueuer.monitoring import usage
from enqueuer.monitoring.meters import WorkerStats
from enqueuer.workers import logs
from enqueuer.workers.messages import Failure
from enqueuer.workers.remote import WorkerConfig
from enqueuer.workers.tasks import TaskSource

# Seconds until the stacks of all workers must have come.
_STACKS_S = 1.0
# Seconds for their statistics; a worker that takes longer keeps those that it sent before.
_STATS_S = 0.3
# More items than any worker sends.
_ALL = 1 << 62


class RayPool(WorkerPool[Actor]):
    """See `enqueuer.backends.pool.WorkerPool`."""

    dispatch: ActorDispatch

    def __init__(self, job: Job) -> None:
        self.workers: list[Actor] = []
        self._lock = threading.RLock()
        # Held while no packet has come since the last sleep. A `threading.Event` has another lock,
        # for which a signal handler that wakes its own thread would wait forever.
        self._quiet = threading.Lock()
        self._quiet.acquire()
        self.dispatch = ActorDispatch(self.workers, self._lock, job.source.tickets_at_once)
        self._job = job
        self._plans = job.plans()
        self._does_tasks = isinstance(job.source, TaskSource)
        # Index of the worker that got credit last because it needed it.
        self._last_granted = 0
        self._is_closed = False
        self._session = Session(job.ray)
        self._class: Any = None
        self._payload: Any = None
        self._records: deque[logging.LogRecord] = deque()

    # --- start ---

    def open(self) -> None:
        # Ray may take many seconds to start.
        interrupts.interruptible(self._open)

    def _open(self) -> None:
        job = self._job
        # Pickled first, so that a mistake of the user shows before Ray is started.
        payload = pickled_source(job.source, job.on_error, "a Ray actor", "backend='thread'")
        ray = self._session.join()
        # Ray's own function ends the actors, and was registered just now.
        finalizers.call_first_at_exit()
        self._class = ray.remote(concurrency_groups=GROUPS)(RayWorker).options(
            **{"scheduling_strategy": "SPREAD", **job.ray.options}
        )
        self._payload = ray.put(payload)
        self._warn_of_missing()

    def _warn_of_missing(self) -> None:
        missing = self._session.missing()
        if missing:
            warnings.warn(
                f"actor_options ask for {missing}, which no node of the Ray cluster has; no worker "
                "starts until such a node joins. Ask for less, or check `ray status`",
                EnqueuerWarning,
                stacklevel=level_of_user(),
            )

    @functools.cached_property
    def _levels(self) -> logs.Levels | None:
        return logs.Levels.of_this_process() if self._job.forward_logs else None

    def start_worker(self, index: int) -> Actor:
        # For tasks there is one plan, which all workers share.
        job, plan = self._job, self._plans[index % len(self._plans)]
        self._session.check()
        config = ActorConfig(
            index,
            plan.shards,
            WorkerConfig(job.shards, job.random_seed, self._levels, job.trace),
            tuple(path for path in sys.path if path),
            asks=job.ordered is not True,
            keep_freed_memory=job.keep_freed_memory,
        )
        credit = self._credit(index)
        handle = self._class.remote(config, credit, self._payload)
        inbox = RayInbox(len(plan.shards), self._records, credit)
        actor = Actor(index, plan.shards, handle, self._order, inbox)
        inbox.grant = functools.partial(self._grant, actor)
        self._order(actor, "work", group="work")
        receiver = Receiver(self._session, actor, self._deliver, self._lose)
        # `lifecycle.forget` recognizes the thread by this class, and stops no backend in it.
        actor.thread = finalizers.WorkerThread(
            target=receiver.run, name=f"enqueuer-ray-{index}", daemon=True
        )
        actor.thread.start()
        return actor

    def _credit(self, index: int) -> TotalCredit:
        """Return the credit that a worker begins with."""
        job, count = self._job, len(self._plans)
        # The number of tickets is the limit for tasks, and one worker may do all of them.
        if self._does_tasks:
            return TotalCredit(_ALL, None, 0)
        limit = job.max_queue_bytes
        share = None if limit is None else limit // count
        return TotalCredit(split_bound(job.max_queue_size, count)[index], share, 0)

    # --- receiving, in the thread for each actor ---

    def _deliver(self, actor: Actor, frames: list[Frame]) -> None:
        """Put the messages of a packet into the inbox; wake the loop once for all of them."""
        first = frames[0]
        if isinstance(first, Ready):
            actor.where = f", process {first.pid} on {first.node}"
        messages = unpack(frames, str(actor), self._job.ray.writable)
        with self._lock:
            for frame in frames:
                match frame:
                    case ItemFrame():
                        actor.inbox.count_locked()
                    case NeedsCredit():
                        actor.inbox.needs_credit = True
                    case Ready():
                        actor.move(WorkerState.RUNNING)
                    case Ended(why=""):
                        actor.move(WorkerState.ENDED)
                    case logging.LogRecord():
                        self._records.append(frame)
            if self._does_tasks:
                sent = [message for message, _ in messages]
                done = [m.number for m in sent if not (isinstance(m, Failure) and m.skipped)]
                self.dispatch.done_locked(actor, done)
            for message, size in messages:
                actor.inbox.add(message, size)
            self.wake()
        for frame in frames:
            if isinstance(frame, Ended) and frame.why:
                raise Gone(frame.why)

    def _lose(self, actor: Actor, error: BaseException) -> None:
        """Kill an actor whose connection is lost, and note its death."""
        self._kill(actor)
        with self._lock:
            if actor.state in (WorkerState.STARTING, WorkerState.RUNNING):
                actor.lose(error, self._session.reason_of(error))
            self.wake()

    # --- sending ---

    def _order(self, actor: Actor, method: str, *args: Any, group: str = "orders") -> None:
        """Call a method of an actor that has no result, unless the actor has ended."""
        if actor.state in HAS_ENDED:
            return
        try:
            self._session.check()
            options = {"concurrency_group": group, "num_returns": 0}
            getattr(actor.handle, method).options(**options).remote(*args)
        except Exception as error:
            # Ray was shut down.
            self._lose(actor, error)

    def _grant(self, actor: Actor, wanted: bool = False) -> None:
        """Grant an actor more credit, if that is worth a call.

        Args:
            actor: The actor.
            wanted: Whether the loop waits for its next item.
        """
        # Tickets need no credit.
        if self._does_tasks:
            return
        credit = actor.inbox.due_credit(wanted)
        if credit is not None:
            # As plain numbers, which Ray does not pickle.
            self._order(actor, "grant", *credit)

    # --- waiting ---

    def sleep(self, awaited: Actor | None, deadline: float | None) -> None:
        if self._quiet.locked():
            # It may find that the actor is dead.
            with self._lock:
                self._request(awaited)
        left = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        self._quiet.acquire(True, left)

    def _request(self, awaited: Actor | None) -> None:
        """Grant credit for the item for which the loop is about to wait."""
        if awaited is not None:
            self._grant(awaited, wanted=True)
            return
        count = len(self.workers)
        for index in range(self._last_granted + 1, self._last_granted + 1 + count):
            actor = self.workers[index % count]
            if actor.inbox.needs_credit:
                actor.inbox.needs_credit = False
                self._last_granted = index % count
                self._grant(actor, wanted=True)
                return

    # --- observing the workers ---

    def cpus(self) -> float:
        return self._cpus

    @functools.cached_property
    def _cpus(self) -> float:
        # Suppressed, as Ray may have been shut down.
        with contextlib.suppress(Exception):
            self._session.check()
            return float(self._session.ray.cluster_resources()["CPU"])
        return usage.cpus()

    def measures(self, workers: Sequence[Actor]) -> list[WorkerStats]:
        if not self._is_closed:
            for actor, stats in self._answers(workers, "stats", _STATS_S).items():
                actor.keep_stats(stats)
        return [actor.measure() for actor in workers]

    def snapshots(self, workers: Sequence[Actor]) -> list[WorkerSnapshot]:
        stacks = self._answers(workers, "stack", _STACKS_S)
        is_starting = any(actor.state is WorkerState.STARTING for actor in workers)
        missing = self._session.missing() if is_starting else ""
        return [
            WorkerSnapshot(str(actor), actor.shards, stack, _why_no_stack(actor, missing), threads)
            for actor in workers
            for stack, threads in [stacks.get(actor, (None, []))]
        ]

    def _answers(self, workers: Sequence[Actor], name: str, limit: float) -> dict[Actor, Any]:
        """Call a method of all actors; return the results that come within `limit` seconds."""
        refs, answers = {}, {}
        get, wait = unwrapped(self._session.ray.get), unwrapped(self._session.ray.wait)
        # Suppressed, as Ray may have been shut down.
        with contextlib.suppress(Exception):
            for actor in workers:
                if actor.state is WorkerState.RUNNING:
                    self._session.check()
                    method = getattr(actor.handle, name).options(concurrency_group="inspect")
                    refs[actor] = method.remote()
            if refs:
                wait(list(refs.values()), num_returns=len(refs), timeout=limit)
            # While Ray shuts down, dropping a reference would end this process.
            self._session.check()
        for actor, ref in refs.items():
            with contextlib.suppress(Exception):
                answers[actor] = get(ref, timeout=0)
        return answers

    # --- stop ---

    def wake(self) -> None:
        # It may be free already.
        with contextlib.suppress(RuntimeError):
            self._quiet.release()

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self.wake()
        for actor in list(self.workers):
            self._order(actor, "close")

    def _kill(self, actor: Actor) -> None:
        with contextlib.suppress(Exception):
            self._session.check()
            unwrapped(self._session.ray.kill)(actor.handle)

    def discard(self, worker: Actor) -> None:
        self._kill(worker)
        with self._lock:
            if worker.state is WorkerState.DEAD:
                worker.move(WorkerState.ENDED)

    def stop(self, timeout: float) -> None:
        interrupts.interruptible(self._stop, timeout)

    def _stop(self, timeout: float) -> None:
        self.close()
        end = time.monotonic() + timeout
        self._reap_until(end - min(ESCALATION_S, timeout / 2))
        for actor in self.workers:
            self._kill(actor)
        self._reap_until(end + ESCALATION_S)
        for actor in self.workers:
            if actor.is_receiving:
                warnings.warn(
                    f"{actor} could not be ended: Ray does not answer",
                    StopWarning,
                    stacklevel=level_of_user(),
                )
        deliver_all(self._records)
        self.workers.clear()
        self._payload = None
        self._session.leave()

    def _reap_until(self, deadline: float) -> None:
        """Wait until the threads for all actors have ended, at most until `deadline`."""
        for actor in self.workers:
            if actor.is_receiving:
                assert actor.thread is not None
                actor.thread.join(max(0.0, deadline - time.monotonic()))


def _why_no_stack(actor: Actor, missing: str) -> str:
    match actor.state:
        case WorkerState.STARTING if missing:
            return f"has not started: no node has {missing}"
        case WorkerState.STARTING:
            return "has not started yet: Ray searches for a node, or it imports modules"
        case WorkerState.RUNNING:
            return f"did not send its stack within {_STACKS_S:g} s"
    return "has ended"
