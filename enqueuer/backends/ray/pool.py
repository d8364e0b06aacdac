r"""Starting, observing and ending Ray actors; a stream of Ray brings the messages of each.

    actor 0 ==packets==> thread 0 -> inbox 0 \\
    actor 1 ==packets==> thread 1 -> inbox 1  > one wake-up -> sleep()
    actor 0 <--epochs, tickets, credit-- calls without a result

    STARTING --Ready--> RUNNING --its stream breaks--> DEAD
        \__________________\__was asked to stop, or discarded__\--> ENDED

Ray places the actors, moves the packets and reports deaths. A thread for each actor waits for
its next packet and unpacks it, ahead of the loop. The packets belong to this process, so they
outlive the actor. An actor whose stream breaks counts as dead, and is killed to make sure. Its
replacement is a new actor, which Ray places on any node with room.

The thread also assigns the next ticket, so no actor is idle while the loop is busy. An actor with
fast tasks has several at a time, so that it does not wait for the next one. A slow task is assigned
alone, as is the first one, so that no other task waits behind it while an actor is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from enqueuer.backends.job import Job
from enqueuer.backends.payload import pickled_source, program_settings
from enqueuer.backends.pool import (
    ESCALATION_S,
    HAS_ENDED,
    Death,
    Dispatch,
    WorkerPool,
    WorkerSnapshot,
    WorkerState,
    deliver_all,
)
from enqueuer.backends.ray.actor import (
    GROUPS,
    ActorConfig,
    Ended,
    Frame,
    RayInbox,
    RayWorker,
    Ready,
    TotalCredit,
    unpack,
)
from enqueuer.backends.ray.session import Gone, Session, is_of_its_node, unwrapped
from enqueuer.backends.thread_channel import UNBOUNDED
from enqueuer.common import interrupts
from enqueuer.common.text import warn
from enqueuer.errors import EnqueuerWarning, StopWarning
from enqueuer.monitoring import usage
from enqueuer.monitoring.meters import Meter, WorkerStats, clock, worker_stats
from enqueuer.order.messages import Epoch, Failure, Ticket
from enqueuer.transport.channel import pack_ticket
from enqueuer.workers import logs
from enqueuer.workers.running import WorkerConfig
from enqueuer.workers.tasks import TaskSource

# Nanoseconds of a call to an actor and back.
_ROUND_TRIP_NS = 5_000_000
# Nanoseconds; a task that takes longer is assigned alone.
_SLOW_NS = 100_000_000
_MAX_AHEAD = 64


class Assigned:
    """The tasks of an actor, and the pace at which it does them."""

    def __init__(self) -> None:
        # Numbers of its tasks, in the order in which it does them.
        self.numbers: dict[int, None] = {}
        self._pace_ns = 0.0
        self._since = 0

    def add(self, number: int) -> None:
        """Add a task."""
        if not self.numbers:
            self._since = clock()
        self.numbers[number] = None

    def done(self, number: int) -> None:
        """Remove a task that is done, and measure the time that it took."""
        if number in self.numbers:
            del self.numbers[number]
            now = clock()
            took, self._since = now - self._since, now
            self._pace_ns = 0.8 * self._pace_ns + 0.2 * took if self._pace_ns else took

    def lacks(self, at_once: int) -> int:
        """Return the number of further tasks for an actor that runs so many at once."""
        wanted = 1
        if 0 < self._pace_ns <= _SLOW_NS:
            wanted = min(_MAX_AHEAD, 1 + math.ceil(_ROUND_TRIP_NS / self._pace_ns))
        return at_once - 1 + wanted - len(self.numbers)


# Seconds between two checks whether the user has shut Ray down, which nothing reports.
_CHECK_S = 0.5
# Seconds of a wait within Ray.
_SHORT_WAIT_S = 0.005
# Streams that are requested at once, so that the next begins when one has ended.
_STREAMS = 2


@dataclass(eq=False)
class Actor:
    """One actor; see `enqueuer.backends.pool.Worker`.

    Attributes:
        handle: Ray's handle of the actor.
        pool: Pool of the actor.
        inbox: Messages that have arrived and were not taken.
        where: Process and node of the actor, for its name; empty until they are known.
        why: Cause of its death, in Ray's words.
        never_ran: Whether its node died before the actor sent anything. Ray may not have known
            that when it chose the node.
        began: Time of its start.
        thread: Thread that receives the packets of the actor.
        last_stats: The last statistics that the actor sent.
        tasks: Its tasks.
    """

    index: int
    shards: tuple[int, ...]
    handle: Any
    pool: RayPool
    inbox: RayInbox
    state: WorkerState = WorkerState.STARTING
    is_leaving: bool = False
    where: str = ""
    why: str = ""
    never_ran: bool = False
    began: int = field(default_factory=clock)
    thread: threading.Thread | None = None
    last_stats: WorkerStats | None = None
    tasks: Assigned = field(default_factory=Assigned)

    @property
    def is_receiving(self) -> bool:
        """Whether the thread that receives from it runs; False in that thread itself."""
        thread = self.thread
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    def begin(self, epoch: Epoch) -> None:
        """Send the actor an epoch of its shards."""
        self.order("assign", [epoch], [])

    def ask_to_exit(self) -> None:
        """Ask the actor to exit; another one does the rest of its work."""
        self.is_leaving = True
        self.order("close")

    def order(self, method: str, *args: Any, group: str = "orders") -> None:
        """Call a method of the actor that has no result, unless the actor has ended."""
        if self.state in HAS_ENDED:
            return
        # Unless it is held back, an exception of a signal handler would count as the end of Ray.
        with interrupts.held():
            try:
                self.pool.session.call(self.handle, method, *args, group=group)
            except Exception as error:
                # Ray was shut down.
                self.pool.lose(self, error)

    def grant(self, wanted: bool = False) -> None:
        """Grant the actor more credit, if that is worth a call.

        Args:
            wanted: Whether the loop waits for its next item.
        """
        credit = self.inbox.due_credit(wanted)
        if credit is not None:
            # As plain numbers, which Ray does not pickle.
            self.order("grant", *credit)

    def death(self) -> Death:
        """Return the cause of its death, with advice."""
        if not self.where:
            message = (
                f"{self} could not be started. {self.why} Check actor_options, and that "
                "enqueuer and all modules of the generator are installed on its node."
            )
        else:
            message = (
                f"{self} died; the items that had arrived were delivered. {self.why} Unless you "
                "killed it, likely causes are a lack of memory on its node, os._exit, or a crash "
                "in a library that the generator uses."
            )
        return Death(f"died ({self.why.rstrip('.')})", message, counts=not self.never_ran)

    def lose(self, error: BaseException, why: str) -> None:
        """Note the death of the actor.

        Args:
            error: Exception that Ray raised.
            why: Cause of the death, in Ray's words.
        """
        self.why = why
        self.never_ran = self.state is WorkerState.STARTING and is_of_its_node(error)
        self.move(WorkerState.DEAD)

    def move(self, new: WorkerState) -> None:
        """Change state; the only method that assigns `state` after the start."""
        self.state = self.state.to(new)

    def measure(self) -> WorkerStats:
        """Return the last known statistics of the actor."""
        nothing = Meter().words, (0, 0), usage.Usage()
        now = self.last_stats or worker_stats(self, *nothing, self.began)
        return dataclasses.replace(now, name=str(self), started=self.began)

    def keep_stats(self, stats: WorkerStats) -> None:
        """Keep statistics that the actor has sent, with the time of its start as seen from here."""
        all_s = (clock() - self.began) / 1e9
        at_work_s = stats.making_s + stats.sending_s + stats.waiting_s + stats.idle_s
        self.last_stats = dataclasses.replace(stats, starting_s=max(0.0, all_s - at_work_s))

    def __str__(self) -> str:
        return f"worker {self.index} (Ray actor{self.where})"

    # --- receiving, in the thread for the actor ---

    def receive(self) -> None:
        """Deliver packets until the actor has sent its last frame or is dead."""
        try:
            # Some notebooks replace asyncio.run.
            with contextlib.closing(asyncio.SelectorEventLoop()) as loop:
                loop.run_until_complete(self._receive_until_shutdown())
        except BaseException as error:
            self.pool.lose(self, error)
            # The frames refer to the streams of a dead actor.
            traceback.clear_frames(error.__traceback__)

    async def _receive_until_shutdown(self) -> None:
        """Receive packets, and raise Gone if the user shuts Ray down.

        No thread may wait long within Ray. Once the user has shut Ray down, such a wait is never
        woken and uses freed memory. So this method waits in Python, with a check now and then. It
        waits within Ray only for a packet that is on its way from another node.
        """
        receiving = asyncio.ensure_future(self._receive())
        try:
            while not receiving.done():
                self.pool.session.check()
                await asyncio.wait((receiving,), timeout=_CHECK_S)
            receiving.result()
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    async def _receive(self) -> None:
        session = self.pool.session
        get, wait = unwrapped(session.ray.get), unwrapped(session.ray.wait)
        streams = deque(self._stream() for _ in range(_STREAMS))
        while True:
            stream = streams[0]
            session.check()
            # A packet that comes soon costs less within Ray. In Python, Ray fetches it twice.
            if wait([stream], timeout=_SHORT_WAIT_S, fetch_local=False)[0]:
                # After a shutdown, the next line would start another Ray.
                session.check()
                ref = next(stream, None)
            else:
                ref = await anext(stream, None)
                # Without this, the event loop would keep the packet that Ray has fetched.
                await asyncio.sleep(0)
                session.check()
            if ref is None:
                streams.popleft()
                streams.append(self._stream())
                continue
            self.pool.deliver(self, get(ref))
            # Without this, Ray would keep the packet until the next one comes.
            del ref
            # Frames may follow the last one, as the user's threads may still log.
            if self.state is WorkerState.ENDED:
                return

    def _stream(self) -> Any:
        call = self.pool.session.call
        return call(self.handle, "packets", group="packets", returns="streaming")


class ActorDispatch(Dispatch[Actor]):
    """See `enqueuer.backends.pool.Dispatch`. Any thread may call anything.

    Args:
        workers: The actors of the pool.
        lock: Lock of the pool.
        at_once: Number of tasks that each actor runs at once.

    Attributes:
        known: Definitions that the actors have got with the source, by their ids.
    """

    def __init__(self, workers: Sequence[Actor], lock: threading.RLock, at_once: int) -> None:
        self.known: dict[str, Any] = {}
        self._workers = workers
        self._lock = lock
        self._at_once = at_once
        # Numbers and tickets of the tasks that no actor has.
        self._waiting: deque[tuple[int, bytes]] = deque()

    def pack(self, tickets: Sequence[Ticket]) -> Sequence[bytes]:
        return [pack_ticket(ticket, self.known) for ticket in tickets]

    def offer(self, numbers: Sequence[int], packed: Sequence[bytes]) -> None:
        with self._lock:
            self._waiting.extend(zip(numbers, packed, strict=True))
            self._assign_waiting_locked()

    def assign(self, worker: Actor, number: int, packed: bytes) -> None:
        with self._lock:
            worker.tasks.add(number)
            worker.order("assign", [], [(number, packed)])

    def current(self, worker: Actor) -> Sequence[int]:
        with self._lock:
            return list(worker.tasks.numbers)

    def safe(self) -> Container[int]:
        with self._lock:
            safe = {number for number, _ in self._waiting}
            for worker in self._workers:
                if worker.state not in HAS_ENDED:
                    safe.update(worker.tasks.numbers)
            return safe

    def forget(self, worker: Actor) -> None:
        with self._lock:
            worker.tasks.numbers.clear()
            # Its replacement may be there already.
            self._assign_waiting_locked()

    def finish_locked(self, worker: Actor, numbers: Sequence[int]) -> None:
        """Remove the tasks that a worker has done, and assign others."""
        for number in numbers:
            worker.tasks.done(number)
        self._assign_waiting_locked()

    def _assign_waiting_locked(self) -> None:
        assigned: dict[Actor, list[tuple[int, bytes]]] = {}
        able = [worker for worker in list(self._workers) if _can_work(worker)]
        while self._waiting and able:
            worker = max(able, key=lambda worker: worker.tasks.lacks(self._at_once))
            if worker.tasks.lacks(self._at_once) <= 0:
                break
            ticket = self._waiting.popleft()
            worker.tasks.add(ticket[0])
            assigned.setdefault(worker, []).append(ticket)
        for worker, tickets in assigned.items():
            worker.order("assign", [], tickets)


def _can_work(worker: Actor) -> bool:
    return worker.state not in HAS_ENDED and not worker.is_leaving


# Seconds until the stacks of all workers must have come.
_STACKS_S = 1.0
# Seconds for their statistics; a worker that takes longer keeps those that it sent before.
_STATS_S = 0.3


class RayPool(WorkerPool[Actor]):
    """See `enqueuer.backends.pool.WorkerPool`.

    Attributes:
        session: Connection to Ray.
    """

    dispatch: ActorDispatch

    def __init__(self, job: Job) -> None:
        self.workers: list[Actor] = []
        self._lock = threading.RLock()
        # Held while no packet has come since the last sleep. A `threading.Event` has another lock,
        # for which a signal handler that stops the enqueuer could wait forever.
        self._quiet = threading.Lock()
        self._quiet.acquire()
        self.dispatch = ActorDispatch(self.workers, self._lock, job.source.tickets_at_once)
        self._job = job
        self._plans = job.plans()
        self._does_tasks = isinstance(job.source, TaskSource)
        # Index of the worker that got credit last because it needed it.
        self._last_granted = 0
        self._is_closed = False
        self.session = Session(job.ray)
        self._class: Any = None
        self._payload: Any = None
        self._settings: Any = None
        self._records: deque[logging.LogRecord] = deque()

    # --- start ---

    def open(self) -> None:
        job = self._job
        # Pickled first, so that a mistake of the user shows before Ray is started.
        payload = pickled_source(
            *(job.source, job.on_error, "a Ray actor", "backend='thread'", self.dispatch.known),
            initializer=job.initializer,
        )
        self._settings = program_settings()
        ray = self.session.join()
        # Ray's own function ends the actors, and was registered just now.
        interrupts.call_first_at_exit()
        self._class = ray.remote(concurrency_groups=GROUPS)(RayWorker).options(
            **{"scheduling_strategy": "SPREAD", **job.ray.options}
        )
        self._payload = ray.put(tuple(payload))
        missing = self.session.missing()
        if missing:
            warn(
                f"actor_options ask for {missing}, which no node of the Ray cluster has; no worker "
                "starts until such a node joins. Ask for less, or check `ray status`",
                EnqueuerWarning,
            )

    @functools.cached_property
    def _levels(self) -> logs.Levels | None:
        return logs.Levels.of_this_process() if self._job.forward_logs else None

    def start_worker(self, index: int) -> Actor:
        # For tasks there is one plan, which all workers share.
        job, plan = self._job, self._plans[index % len(self._plans)]
        self.session.check()
        config = ActorConfig(
            index,
            plan.shards,
            WorkerConfig(job.shards, job.random_seed, self._levels, job.trace),
            self._settings,
            tuple(path for path in sys.path if path),
            asks=not job.ordered,
            keep_freed_memory=job.keep_freed_memory,
        )
        # The number of tickets is the limit for tasks, and one worker may do all of them.
        quota = (UNBOUNDED, None) if self._does_tasks else job.quota_of(index)
        credit = TotalCredit(*quota, 0)
        handle = self._class.remote(config, credit, self._payload)
        inbox = RayInbox(self._records, credit)
        actor = Actor(index, plan.shards, handle, self, inbox)
        inbox.grant = actor.grant
        actor.order("work", group="work")
        # `forget` recognizes the thread by this class, and stops no backend in it.
        actor.thread = interrupts.WorkerThread(
            target=actor.receive, name=f"enqueuer-ray-{index}", daemon=True
        )
        actor.thread.start()
        return actor

    # --- receiving, in the thread for each actor ---

    def deliver(self, actor: Actor, frames: list[Frame]) -> None:
        """Put the messages of a packet into the inbox; wake the loop once for all of them."""
        first = frames[0]
        if isinstance(first, Ready):
            actor.where = f", process {first.pid} on {first.node}"
        unpacked = [unpack(frame, str(actor), self._job.ray.writable) for frame in frames]
        done = []
        with self._lock:
            for frame, (message, size) in zip(frames, unpacked, strict=True):
                match frame:
                    case Ready():
                        actor.move(WorkerState.RUNNING)
                    case Ended(why=""):
                        actor.move(WorkerState.ENDED)
                actor.inbox.add_locked(frame, message, size)
                if message is not None and not (isinstance(message, Failure) and message.skipped):
                    done.append(message.number)
            self.dispatch.finish_locked(actor, done)
            self.wake()
        for frame in frames:
            if isinstance(frame, Ended) and frame.why:
                raise Gone(frame.why)

    def lose(self, actor: Actor, error: BaseException) -> None:
        """Kill an actor whose connection is lost, and note its death."""
        self._kill(actor)
        with self._lock:
            if actor.state in (WorkerState.STARTING, WorkerState.RUNNING):
                actor.lose(error, self.session.reason_of(error))
            self.wake()

    # --- waiting ---

    def sleep(self, awaited: Actor | None, deadline: float | None) -> None:
        if self._quiet.locked():
            # It may find that the actor is dead.
            with self._lock:
                self._request(awaited)
        remaining = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        interrupts.interruptible(self._quiet.acquire, True, remaining)

    def _request(self, awaited: Actor | None) -> None:
        """Grant credit for the item for which the loop is about to wait."""
        if awaited is not None:
            awaited.grant(wanted=True)
            return
        count = len(self.workers)
        for index in range(self._last_granted + 1, self._last_granted + 1 + count):
            actor = self.workers[index % count]
            if actor.inbox.needs_credit:
                actor.inbox.needs_credit = False
                self._last_granted = index % count
                actor.grant(wanted=True)
                return

    # --- observing the workers ---

    def cpus(self) -> float:
        return self._cpus

    @functools.cached_property
    def _cpus(self) -> float:
        # Suppressed, as Ray may have been shut down.
        with interrupts.held(), contextlib.suppress(Exception):
            self.session.check()
            return float(self.session.ray.cluster_resources()["CPU"])
        return usage.cpus()

    def measures(self, workers: Sequence[Actor]) -> list[WorkerStats]:
        if not self._is_closed:
            for actor, stats in self._answers(workers, "stats", _STATS_S).items():
                actor.keep_stats(stats)
        return [actor.measure() for actor in workers]

    def snapshots(self, workers: Sequence[Actor]) -> list[WorkerSnapshot]:
        stacks = self._answers(workers, "stack", _STACKS_S)
        is_starting = any(actor.state is WorkerState.STARTING for actor in workers)
        missing = self.session.missing() if is_starting else ""
        return [
            WorkerSnapshot(str(actor), actor.shards, stack, _why_no_stack(actor, missing), threads)
            for actor in workers
            for stack, threads in [stacks.get(actor, (None, []))]
        ]

    def _answers(self, workers: Sequence[Actor], name: str, limit: float) -> dict[Actor, Any]:
        """Call a method of all actors; return the results that come within `limit` seconds."""
        refs, answers = {}, {}
        get, wait = unwrapped(self.session.ray.get), unwrapped(self.session.ray.wait)
        # Suppressed, as Ray may have been shut down.
        with interrupts.held(), contextlib.suppress(Exception):
            for actor in workers:
                if actor.state is WorkerState.RUNNING:
                    call = self.session.call
                    refs[actor] = call(actor.handle, name, group="inspect", returns=1)
            if refs:
                wait(list(refs.values()), num_returns=len(refs), timeout=limit)
            # While Ray shuts down, dropping a reference would end this process.
            self.session.check()
        for actor, ref in refs.items():
            with interrupts.held(), contextlib.suppress(Exception):
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
            actor.order("close")

    def _kill(self, actor: Actor) -> None:
        with contextlib.suppress(Exception):
            self.session.check()
            unwrapped(self.session.ray.kill)(actor.handle)

    def discard(self, worker: Actor) -> None:
        self._kill(worker)
        with self._lock:
            if worker.state is WorkerState.DEAD:
                worker.move(WorkerState.ENDED)

    def stop(self, timeout: float) -> None:
        self.close()
        end = time.monotonic() + timeout
        self._reap_until(end - min(ESCALATION_S, timeout / 2))
        for actor in self.workers:
            self._kill(actor)
        self._reap_until(end + ESCALATION_S)
        for actor in self.workers:
            if actor.is_receiving:
                warn(f"{actor} could not be ended: Ray does not answer", StopWarning)
        deliver_all(self._records)
        self.workers.clear()
        self._payload = None
        self.session.leave()

    def _reap_until(self, deadline: float) -> None:
        """Wait until the threads for all actors have ended, at most until `deadline`."""
        for actor in self.workers:
            if actor.is_receiving:
                assert actor.thread is not None
                remaining = max(0.0, deadline - time.monotonic())
                interrupts.interruptible(actor.thread.join, remaining)


def _why_no_stack(actor: Actor, missing: str) -> str:
    match actor.state:
        case WorkerState.STARTING if missing:
            return f"has not started: no node has {missing}"
        case WorkerState.STARTING:
            return "has not started yet: Ray searches for a node, or it imports modules"
        case WorkerState.RUNNING:
            return f"did not send its stack within {_STACKS_S:g} s"
    return "has ended"
