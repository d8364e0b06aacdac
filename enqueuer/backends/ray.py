"""Workers as Ray actors: start, watch and end them; a stream of Ray's brings the messages of each.

    actor 0 ==packets==> thread 0 -> inbox 0 \\
    actor 1 ==packets==> thread 1 -> inbox 1  > one condition -> wait(), take()
    actor 0 <--epochs, credit-- acknowledge(), wait()

Ray places the actors, moves the packets and tells of deaths; a thread for each actor waits for
its next packet and unpacks it, ahead of the loop. What an actor had sent belongs to this process,
and so it is still there when the actor is not. An actor whose stream breaks is dead for us, and
is killed if it was not; the one that takes its place is a new one, wherever there is room.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from enqueuer import interrupts, logs, usage
from enqueuer.backends import (
    ESCALATION_S,
    Job,
    WorkerState,
    WorkerThread,
    bunch_of,
    check_owner,
    history,
    in_rotation,
    owners_of,
    split_bound,
    until,
)
from enqueuer.backends.payload import pickled_source
from enqueuer.backends.ray_session import Gone, Session
from enqueuer.backends.ray_worker import (
    GROUPS,
    Asking,
    Credit,
    Ended,
    Frame,
    Part,
    RayWorker,
    Ready,
    Sent,
    Told,
)
from enqueuer.errors import Closed, EnqueuerWarning, ItemNotLoadable, StopWarning, WorkerDied
from enqueuer.merging import ANY, Order, ShardOrder
from enqueuer.messages import End, Epoch, Failure, Item, Message
from enqueuer.meters import LoopMeter, clock
from enqueuer.stalls import DeadlineExpired, WaitSnapshot, WorkerSnapshot, awaited, first_for
from enqueuer.stats import WorkerStats
from enqueuer.transport.codec import decode, decode_error

_log = logging.getLogger("enqueuer")

_LOOK_S = 1.0  # for the stacks of all workers
_ACCOUNT_S = 0.3  # for their accounts; what does not come in time is as it was last told
_OFTEN_NS = 5_000_000  # between two grants, if each is to be worth its call
_PULSE_S = 0.5  # between two looks whether Ray is still there, of which it tells nobody
_SOON_S = 0.005  # for which a packet may be waited for within Ray
_STREAMS = 2  # asked for at once, so that the next begins when one has ended

_NEXT_STATE = {
    WorkerState.STARTING: {WorkerState.RUNNING, WorkerState.DEAD, WorkerState.ENDED},
    WorkerState.RUNNING: {WorkerState.DEAD, WorkerState.ENDED},
    WorkerState.DEAD: {WorkerState.ENDED},
    WorkerState.ENDED: set(),
}


@dataclass(eq=False)
class Actor:
    """One actor as this process sees it. What its thread and the consumer share is locked.

    Attributes:
        allow: The method that tells it its credit, which is called the most.
        inbox: What has come and was not taken.
        received: How many items came, all in all.
        taken: How many of them were taken.
        acknowledged: How many of those are consumed.
        credit: What it was told last.
        granted: When it was told that.
        is_asking: Whether it has an item that it may not send.
        why: How it died.
        never_ran: Whether its node died before the actor said anything; Ray may not have known
            that when it chose the node.
    """

    index: int
    handle: Any
    allow: Any
    shards: tuple[int, ...]
    credit: Credit
    granted: int = field(default_factory=clock)
    state: WorkerState = WorkerState.STARTING
    inbox: deque[Message] = field(default_factory=deque)
    sizes: deque[int] = field(default_factory=deque)
    received: int = 0
    taken: int = 0
    acknowledged: int = 0
    acknowledged_bytes: int = 0
    taken_bytes: int = 0
    is_asking: bool = False
    where: str = ""
    why: str = ""
    never_ran: bool = False
    began: int = field(default_factory=clock)
    thread: threading.Thread | None = None
    last: WorkerStats | None = None
    before: WorkerStats | None = None  # of those that it has replaced

    def move(self, new: WorkerState) -> None:
        """Change state; the only method that assigns `state` after the start."""
        assert new in _NEXT_STATE[self.state], f"{self.state} -> {new}"
        self.state = new

    def measure(self) -> WorkerStats:
        """Return what it was last known to have done, with those whose place it has taken."""
        now = self.last
        if now is None:
            so_far = (clock() - self.began) / 1e9
            now = WorkerStats(
                *(self.index, "", self.shards, 0, 0, 0),
                *(so_far, 0.0, 0.0, 0.0, 0.0),
            )
        now = dataclasses.replace(now, name=str(self), started=self.began)
        return now if self.before is None else now.after(self.before)

    def note(self, told: WorkerStats) -> None:
        """Remember what it says that it has done."""
        all_s = (clock() - self.began) / 1e9
        at_work_s = told.making_s + told.sending_s + told.waiting_s + told.idle_s
        self.last = dataclasses.replace(told, starting_s=max(0.0, all_s - at_work_s))

    def __str__(self) -> str:
        return f"worker {self.index} (Ray actor{self.where})"


class RayBackend:
    """See `enqueuer.backends.Backend`."""

    def __init__(self, job: Job, loop_meter: LoopMeter) -> None:
        self._job = job
        self._loop_meter = loop_meter
        self._plans = job.plans()
        self._owners = owners_of(self._plans)
        self._quotas = split_bound(job.max_queue_size, len(self._plans))
        limit = job.max_queue_bytes
        self._share = None if limit is None else limit // len(self._plans)
        self._owner = os.getpid()
        self._actors: list[Actor] = []
        self._ending: tuple[deque[Message], End, Order] | None = None  # see _note_end
        self._failed: Actor | None = None  # whose failure `wait` has returned
        self._found = 0  # the last worker whose message was next
        self._bunch = bunch_of(job)
        self._closed = False
        self._session = Session(job.cluster)
        self._class: Any = None
        self._payload: Any = None
        self._epoch = Epoch(0)
        self._deaths: list[tuple[int, int]] = []  # the shard and item of those replaced
        # Taken by itself: a condition enters and leaves it in Python, where a signal handler may
        # raise, and the lock would stay locked.
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._records: deque[logging.LogRecord] = deque()

    @property
    def restarts(self) -> int:
        return len(self._deaths)

    # --- start ---

    def start(self) -> None:
        interrupts.interruptible(self._start)  # Ray takes its time

    def _start(self) -> None:
        job = self._job
        # the user's mistakes show before anything runs
        payload = pickled_source(job.source, job.on_error, "a Ray actor", "backend='thread'")
        ray = self._session.join()
        try:
            self._class = ray.remote(concurrency_groups=GROUPS)(RayWorker).options(
                **{"scheduling_strategy": "SPREAD", **job.cluster.options}
            )
            self._payload = ray.put(payload)
            self._warn_of_missing()
            for index in range(len(self._plans)):
                self._actors.append(self._start_one(index))
        except BaseException:
            self.stop(0)
            raise
        _running.add(self)
        _register_exit()

    def _warn_of_missing(self) -> None:
        missing = self._session.missing()
        if missing:
            warnings.warn(
                f"ray_options ask for {missing}, which no node of the Ray cluster has; no worker "
                "starts until such a node joins. Ask for less, or look at `ray status`",
                EnqueuerWarning,
                stacklevel=3,
            )

    @functools.cached_property
    def _levels(self) -> logs.Levels | None:
        return logs.Levels.of_this_process() if self._job.forward_logs else None

    def _start_one(self, index: int) -> Actor:
        job, plan = self._job, self._plans[index]
        self._session.check()
        part = Part(
            index,
            plan.shards,
            job.shards,
            job.random_seed,
            self._levels,
            tuple(path for path in sys.path if path),
            job.trace,
            asks=not job.ordered,
        )
        credit = self._credit(index)
        handle = self._class.remote(part, credit, self._payload)
        allow = handle.allow.options(concurrency_group="tell", num_returns=0)
        actor = Actor(index, handle, allow, plan.shards, credit)
        self._call(actor, handle.work, "work")
        # a thread of its own kind: the collector must know it, see `backends.forget`
        actor.thread = WorkerThread(
            target=self._receive, args=(actor,), name=f"enqueuer-ray-{index}", daemon=True
        )
        actor.thread.start()
        return actor

    def _credit(self, index: int) -> Credit:
        """Return how much a worker may send at first."""
        return Credit(self._quotas[index], self._share, 0)

    # --- what comes; in the thread of each actor ---

    def _receive(self, actor: Actor) -> None:
        """Unpack what an actor sends, until it has said its last word or is dead."""
        try:
            # asyncio.run is another one in some notebooks
            with contextlib.closing(asyncio.SelectorEventLoop()) as loop:
                loop.run_until_complete(self._listen_while_ray_is_there(actor))
        except BaseException as error:
            self._lose(actor, error)
            traceback.clear_frames(error.__traceback__)  # they have the streams of a dead actor

    async def _listen_while_ray_is_there(self, actor: Actor) -> None:
        """Listen to an actor.

        Nobody may wait long within Ray for something to happen, as that is never woken, and uses
        freed memory, once the user has shut Ray down. So this waits in Python, with a look now
        and then. Only a packet that is on its way from another node is waited for within Ray.
        """
        listening = asyncio.ensure_future(self._listen(actor))
        try:
            while not listening.done():
                self._session.check()
                await asyncio.wait((listening,), timeout=_PULSE_S)
            listening.result()
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _listen(self, actor: Actor) -> None:
        get, wait = _as_it_is(self._session.ray.get), _as_it_is(self._session.ray.wait)
        streams = deque(self._stream(actor) for _ in range(_STREAMS))
        while True:
            stream = streams[0]
            self._session.check()
            # what is there soon is had for less within Ray: in Python it is fetched twice
            if wait([stream], timeout=_SOON_S, fetch_local=False)[0]:
                self._session.check()  # to ask an ended stream would start another Ray
                ref = next(stream, None)
            else:
                ref = await anext(stream, None)
                await asyncio.sleep(0)  # or the loop would keep what Ray has fetched
                self._session.check()
            if ref is None:
                streams.popleft()
                streams.append(self._stream(actor))
                continue
            self._take_in(actor, get(ref))
            del ref  # or Ray would keep the packet until the next one comes
            if actor.state is WorkerState.ENDED:  # threads of the user's may still log
                return

    def _stream(self, actor: Actor) -> Any:
        self._session.check()
        method = actor.handle.packets.options(concurrency_group="packets", num_returns="streaming")
        return method.remote()

    def _take_in(self, actor: Actor, frames: list[Frame]) -> None:
        """Unpack a packet; wake the consumer once, as that takes longer than a small item."""
        messages: list[Message] = []
        sizes = []  # of the items among them
        for frame in frames:
            match frame:
                case Sent():
                    item = self._unpack(frame, str(actor))
                    messages.append(item)
                    if isinstance(item, Item):
                        sizes.append(_size_of(frame))
                case Told(message=message, error=pickled):
                    if isinstance(message, Failure):
                        assert pickled is not None
                        error = decode_error(pickled)
                        message = dataclasses.replace(message, error=error, worker=str(actor))
                    messages.append(message)
                case Ready(pid=pid, node=node):
                    actor.where = f", process {pid} on {node}"
        with self._lock:
            for frame in frames:
                match frame:
                    case Sent():
                        actor.received += 1
                        actor.is_asking = False
                    case Asking():
                        actor.is_asking = True
                    case Ready():
                        actor.move(WorkerState.RUNNING)
                    case Ended(why=""):
                        actor.move(WorkerState.ENDED)
                    case logging.LogRecord():
                        self._records.append(frame)
            actor.sizes.extend(sizes)
            self._arrived(actor, messages)
            self._news.notify_all()
        for frame in frames:
            if isinstance(frame, Ended) and frame.why:
                raise Gone(frame.why)

    def _arrived(self, actor: Actor, messages: list[Message]) -> None:
        """Put messages into the inbox. Lock held."""
        actor.inbox.extend(messages)

    def _unpack(self, sent: Sent, worker: str) -> Item | Failure:
        buffers = [memoryview(buffer) for buffer in sent.buffers]
        if self._job.cluster.writable:
            buffers = [memoryview(bytearray(buffer)) for buffer in buffers]
        try:
            value = decode(sent.data, buffers)
        except Exception as error:
            failure = ItemNotLoadable(f"an item came, but it cannot be loaded here: {error!r}")
            failure.__cause__ = error
            return Failure(sent.shard, sent.number, failure, worker=worker)
        value, state = value if sent.has_state else (value, None)
        return Item(sent.shard, sent.number, value, state)

    def _lose(self, actor: Actor, error: BaseException) -> None:
        """Note that an actor is dead; make sure that it is."""
        self._dismiss(actor)
        with self._lock:
            if actor.state in (WorkerState.STARTING, WorkerState.RUNNING):
                actor.why = self._reason(error)
                is_new = actor.state is WorkerState.STARTING
                actor.never_ran = is_new and _is_of_its_node(error)
                actor.move(WorkerState.DEAD)
            self._news.notify_all()

    def _reason(self, error: BaseException) -> str:
        """Say how an actor died, in Ray's words, without those that say nothing of this one."""
        try:
            self._session.check()
        except Gone as gone:
            error = gone
        if isinstance(error, Gone):
            return f"{error}."
        text = str(error)
        _, _, after = text.partition("The actor is dead because ")
        text, _, _ = (after or text).partition(" Some common causes include")
        return f"Ray says: {' '.join(text.split())}"

    # --- run ---

    def begin(self, epoch: Epoch) -> None:
        check_owner(self._owner)
        self._epoch = epoch
        for actor in self._actors:
            self._tell(actor, [epoch.part(actor.shards)])

    def _tell(
        self,
        actor: Actor,
        orders: list[Epoch] | None = None,
        tickets: list[tuple[int, bytes]] | None = None,
    ) -> None:
        self._call(actor, actor.handle.tell, "tell", orders or [], tickets or [])

    def _call(self, actor: Actor, method: Any, group: str, *args: Any) -> None:
        """Call a method that answers nothing, in one of the actor's threads."""
        try:
            self._session.check()
            method.options(concurrency_group=group, num_returns=0).remote(*args)
        except Exception as error:  # it is of a Ray that is gone
            self._lose(actor, error)

    def wait(self, order: Order, deadline: float | None) -> Failure | None:
        check_owner(self._owner)
        expired = False
        self._failed = None
        while not order.done:
            self._deliver_records()  # without the lock: a handler may stop us
            with self._lock:
                if self._closed:
                    raise Closed("the enqueuer was stopped")
                found = self._look_for(order)
                if isinstance(found, Failure):
                    return found
                if found or order.done:
                    return None
                wanted = self._worker_of(order.turn())
                dead = self._dead(wanted, order)
                if dead is None:
                    if expired:
                        raise DeadlineExpired("no batch in time")
                    self._loop_meter.pause(None if wanted is None else wanted.index)
                    deadline = until(deadline, self._job.longest_wait_s)
                    self._ask_for(wanted)
                    if not self._records:
                        self._sleep(deadline)
                    expired = deadline is not None and time.monotonic() >= deadline
                    continue
            death = self._replace(dead, order)
            if death is not None:
                return death
        return None

    def _look_for(self, order: Order) -> Failure | bool:
        """Return the failure that is next; or whether an item is. Lock held."""
        self._note_end()
        while not order.done:
            found = self._with_message(self._worker_of(order.turn()))
            if found is None:
                return False
            match found.inbox[0]:
                case Item():
                    return True
                case End() as end:
                    self._ending = found.inbox, end, order
                    self._note_end()
                case Failure() as failure:
                    self._failed = found
                    return failure
        return False

    def _deliver_records(self) -> None:
        """Have handlers see what the workers logged; in the consumer's thread, and at the stop."""
        while self._records:
            with contextlib.suppress(IndexError):  # another thread stops us
                logs.deliver(self._records.popleft())

    def _sleep(self, deadline: float | None) -> None:
        """Wait for whatever comes: a message, a death, close(). Lock held."""
        self._news.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _note_end(self) -> None:
        """Note the end of a shard that is next, and drop it; or finish that. Lock held.

        It must not stay behind after an interrupt: in the next epoch it would end the shard.
        """
        if self._ending is not None:
            inbox, end, order = self._ending
            if inbox and inbox[0] is end:
                order.ended(end.shard, end.state, end.number)
                inbox.popleft()
            self._ending = None

    def pass_over(self) -> None:
        with self._lock:
            if self._failed is not None and self._failed.inbox:
                self._failed.inbox.popleft()

    def take(self, order: Order) -> Iterator[Item]:
        assert isinstance(order, ShardOrder)
        for _ in range(self._bunch):
            with self._lock:
                if order.done or self._closed:  # by a signal handler, say
                    return
                turn = order.turn()
                actor = self._actors[self._found] if turn is ANY else self._worker_of(turn)
                item = actor.inbox[0] if actor is not None and actor.inbox else None
                if not isinstance(item, Item):
                    return
                assert actor is not None
                inbox, sizes, shard, number = actor.inbox, actor.sizes, item.shard, item.number
                size = sizes[0]
                if item.state is not None:
                    order.remember(shard, number, item.state)
                # From here to the yield is no call and no jump, and so no signal handler runs.
                del inbox[0]
                del sizes[0]
                actor.taken += 1
                actor.taken_bytes += size
                order.numbers[shard] = number + 1
                order.last = shard
                yield item

    def acknowledge(self) -> None:
        for actor in self._actors:
            if actor.acknowledged != actor.taken:
                actor.acknowledged, actor.acknowledged_bytes = actor.taken, actor.taken_bytes
                self._grant(actor)

    def _grant(self, actor: Actor, wanted: bool = False) -> None:
        """Let an actor send more, if it is worth a call.

        Args:
            actor: Whom.
            wanted: Whether its next item is waited for, so that it must come in any case.
        """
        if actor.state in (WorkerState.DEAD, WorkerState.ENDED):
            return
        quota, before = self._quotas[actor.index], actor.credit
        items = actor.acknowledged + quota
        size = None if self._share is None else actor.acknowledged_bytes + self._share
        at_least = before.wanted
        if wanted and (quota == 0 or size is not None):
            at_least = actor.received + 1
        # a call costs about as much as a packet: not for each of many small items, but in a slow
        # loop for each, so that its queue is full whenever it turns to it
        now = clock()
        is_worth_it = 2 * (items - before.items) >= quota or now - actor.granted > _OFTEN_NS
        if self._share is not None:  # bytes may be used up long before items are
            assert size is not None and before.size is not None
            is_worth_it |= 2 * (size - before.size) >= self._share
        if at_least != before.wanted or (is_worth_it and (items, size) != before[:2]):
            check_owner(self._owner)  # in a forked child the call would hang
            actor.credit, actor.granted = Credit(items, size, at_least), now
            try:
                self._session.check()
                actor.allow.remote(*actor.credit)  # plain numbers are not pickled
            except Exception as error:  # as in _call
                self._lose(actor, error)

    def _ask_for(self, wanted: Actor | None) -> None:
        """Let the item come for which the consumer is about to wait. Lock held."""
        if wanted is not None:
            self._grant(wanted, wanted=True)
            return
        for actor in in_rotation(self._actors, self._found):
            if actor.is_asking:
                actor.is_asking = False
                self._grant(actor, wanted=True)
                return

    def waiting(self) -> int:
        check_owner(self._owner)
        with self._lock:
            return sum(len(actor.sizes) for actor in self._actors)

    def cpus(self) -> float:
        return self._cpus

    @functools.cached_property
    def _cpus(self) -> float:
        with contextlib.suppress(Exception):  # Ray is gone
            self._session.check()
            return float(self._session.ray.cluster_resources()["CPU"])
        return usage.cpus()

    def worker_bytes(self) -> int | None:
        return None  # it is that of other machines

    def measures(self) -> list[WorkerStats]:
        actors = list(self._actors)
        if not self._closed:
            for actor, told in self._answers("account", _ACCOUNT_S).items():
                actor.note(told)
        return [actor.measure() for actor in actors]

    def has_news(self, order: Order) -> bool:
        return True  # the death of an actor is noticed by wait() alone

    def look(self, order: Order) -> WaitSnapshot:
        stacks = self._answers("look", _LOOK_S)
        is_starting = any(actor.state is WorkerState.STARTING for actor in self._actors)
        missing = self._session.missing() if is_starting else ""
        workers = [
            WorkerSnapshot(
                str(actor), actor.shards, stacks.get(actor), _why_no_stack(actor, missing)
            )
            for actor in self._actors
        ]
        return WaitSnapshot(self._awaited(order), self.waiting(), first_for(order, workers))

    def _answers(self, question: str, limit: float) -> dict[Actor, Any]:
        """Call a method of all actors; return what those answer that do so in time."""
        refs, answers = {}, {}
        get, wait = _as_it_is(self._session.ray.get), _as_it_is(self._session.ray.wait)
        with contextlib.suppress(Exception):  # Ray is gone
            for actor in list(self._actors):
                if actor.state is WorkerState.RUNNING:
                    self._session.check()
                    method = getattr(actor.handle, question).options(concurrency_group="look")
                    refs[actor] = method.remote()
            if refs:
                wait(list(refs.values()), num_returns=len(refs), timeout=limit)
            self._session.check()  # before any of them is dropped
        for actor, ref in refs.items():
            with contextlib.suppress(Exception):
                answers[actor] = get(ref, timeout=0)
        return answers

    def _awaited(self, order: Order) -> str:
        return awaited(order)

    def _worker_of(self, shard: int | None) -> Actor | None:
        return None if shard is None else self._actors[self._owners[shard]]

    def _with_message(self, wanted: Actor | None) -> Actor | None:
        """Return the worker whose message is next, if there is one. Lock held."""
        for actor in in_rotation(self._actors, self._found) if wanted is None else (wanted,):
            if actor.inbox:
                self._found = self._actors.index(actor)
                return actor
        return None

    # --- deaths ---

    def _dead(self, wanted: Actor | None, order: Order) -> Actor | None:
        """Return a worker whose death must be told now, as nothing of it is left to deliver."""
        for actor in self._actors:
            told = actor.state is not WorkerState.DEAD or actor.inbox
            if not told and (actor is wanted or order.next_of(actor.shards) is not None):
                return actor
        return None

    def _replace(self, dead: Actor, order: Order) -> Failure | None:
        """Start a worker that goes on where a dead one was; return a failure if it must not."""
        shard = order.next_of(dead.shards)
        if shard is None:  # it had sent all of this epoch
            shard = dead.shards[0]
        number = order.number_of(shard)
        new = self._successor(dead, (shard, number), f"shard {shard}, item {number}")
        if isinstance(new, Failure):
            return new
        if new is not None:
            rest = Epoch(self._epoch.number, order.rest())
            self._tell(new, [rest.part(new.shards)])
        return None

    def _successor(self, dead: Actor, place: tuple[int, int], name: str) -> Actor | Failure | None:
        """Start a worker in the place of a dead one.

        Returns:
            The failure, if there must not be another one; None if we are being stopped.
        """
        job = self._job
        often = history(self._deaths, place, job.max_restarts)
        error = WorkerDied(self._death_message(dead, often), dead.index)
        failure = Failure(*place, error, worker=str(dead))
        if not dead.never_ran:
            if len(self._deaths) + job.restarts >= job.max_restarts:
                return failure
            self._deaths.append(place)
        try:
            new = self._put_another_in_place_of(dead)
        except Exception as trouble:
            error.__cause__ = trouble
            return failure
        if new is None:
            return None
        _log.warning(
            "%s died; %s goes on with another one (restart %d, of max_restarts=%d). %s",
            str(dead),
            name,
            len(self._deaths) + job.restarts,
            job.max_restarts,
            dead.why,
        )
        return new

    def _put_another_in_place_of(self, dead: Actor) -> Actor | None:
        with self._lock:
            if self._closed:
                return None
            new = self._start_one(dead.index)
            new.before = dead.measure()
            self._actors[self._actors.index(dead)] = new
            dead.move(WorkerState.ENDED)
            return new

    def _death_message(self, dead: Actor, history: str) -> str:
        """Say how an actor died, and what to do."""
        if not dead.where:
            return (
                f"{dead} could not be started.{history} {dead.why} Look at ray_options, and "
                "whether enqueuer, and what the generator imports, is on its node."
            )
        return (
            f"{dead} died; what it had sent was delivered.{history} {dead.why} "
            "If nobody killed it, look for want of memory on its node, os._exit, or a crash in "
            "the libraries that the generator uses."
        )

    # --- stop ---

    def close(self) -> None:
        if self._owner != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            actors = list(self._actors)
            self._news.notify_all()
        for actor in actors:
            self._hang_up(actor)

    def _hang_up(self, actor: Actor) -> None:
        """Ask an actor to end its loop."""
        if actor.state in (WorkerState.STARTING, WorkerState.RUNNING):
            self._call(actor, actor.handle.close, "tell")

    def _dismiss(self, actor: Actor) -> None:
        """End an actor that has said its last word."""
        with contextlib.suppress(Exception):
            self._session.check()
            _as_it_is(self._session.ray.kill)(actor.handle)

    def stop(self, timeout: float) -> None:
        if self._owner == os.getpid():
            interrupts.interruptible(self._stop, timeout)

    def _stop(self, timeout: float) -> None:
        self.close()
        end = time.monotonic() + timeout
        self._reap_until(end - min(ESCALATION_S, timeout / 2))
        for actor in self._actors:
            self._dismiss(actor)
        self._reap_until(end + ESCALATION_S)
        for actor in self._actors:
            if _is_at_work(actor):
                warnings.warn(
                    f"{actor} could not be ended: Ray does not answer", StopWarning, stacklevel=3
                )
        self._deliver_records()
        self._actors = []
        self._payload = None
        _running.discard(self)
        self._session.leave()

    def _reap_until(self, deadline: float) -> None:
        """Wait until the threads of all actors have ended, or time is over."""
        for actor in self._actors:
            if _is_at_work(actor):
                assert actor.thread is not None
                actor.thread.join(max(0.0, deadline - time.monotonic()))


def _as_it_is(function: Any) -> Any:
    """Return a function of Ray's that does not start a Ray where there is none any more."""
    return getattr(function, "__wrapped__", function)


def _is_of_its_node(error: BaseException) -> bool:
    """Tell whether an actor is lost because its node is.

    Of a process that has died Ray is told within a second. A dead node is noticed later, by the
    heartbeats that it misses; until then its actors are said to be unavailable.
    """
    return "its node has died" in str(error) or type(error).__name__ == "ActorUnavailableError"


def _size_of(sent: Sent) -> int:
    return len(sent.data) + sum(memoryview(buffer).nbytes for buffer in sent.buffers)


def _is_at_work(actor: Actor) -> bool:
    thread = actor.thread
    return thread is not None and thread is not threading.current_thread() and thread.is_alive()


def _why_no_stack(actor: Actor, missing: str) -> str:
    match actor.state:
        case WorkerState.STARTING if missing:
            return f"has not started: no node has {missing}"
        case WorkerState.STARTING:
            return "has not started yet: Ray looks for room for it, or it is importing"
        case WorkerState.RUNNING:
            return f"did not tell its stack within {_LOOK_S:g} s"
    return "has ended"


# --- the end of the interpreter ----------------------------------------------------------------

_running: weakref.WeakSet[RayBackend] = weakref.WeakSet()
_EXIT_TIMEOUT_S = 2.0


@functools.cache
def _register_exit() -> None:
    import atexit

    # after Ray's own, so that it runs before that
    atexit.register(_stop_all)


def _stop_all() -> None:
    for backend in list(_running):
        backend.stop(_EXIT_TIMEOUT_S)
