r"""One actor as the process of the loop sees it: its state, its packets, its death.

    STARTING --Ready--> RUNNING --its stream breaks--> DEAD
        \__________________\__was asked to stop, or discarded__\--> ENDED

A thread for each actor reads its stream and unpacks the packets:

    actor ==packets==> Ray's object store ==> the thread for the actor -> RayPool

That thread also assigns the next ticket, so no actor is idle while the loop is busy. An actor with
fast tasks has several at a time, so that it does not wait for the next one. A slow task is assigned
alone, so that no other task waits behind it while an actor is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import threading
import traceback
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from enqueuer.backends.pool import HAS_ENDED, Death, Dispatch, WorkerState
from enqueuer.backends.ray.channel import Frame, ItemFrame, MessageFrame, RayInbox
from enqueuer.backends.ray.session import Session, is_of_its_node, unwrapped
from enqueuer.errors import ItemNotLoadable
from enqueuer.monitoring.meters import Meter, WorkerStats, clock, worker_stats
from enqueuer.monitoring.usage import Usage
from enqueuer.transport import task_queue
from enqueuer.transport.errors import decode_error
from enqueuer.transport.item_codec import decode
from enqueuer.workers.messages import Epoch, Failure, Item, Message, Ticket

# Nanoseconds of a call to an actor and back.
_ROUND_TRIP_NS = 5_000_000
# Nanoseconds; a task that takes longer is assigned alone.
_SLOW_NS = 100_000_000
_MOST_AHEAD = 64


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
        if not self._pace_ns:
            wanted = 2
        elif self._pace_ns > _SLOW_NS:
            wanted = 1
        else:
            wanted = min(_MOST_AHEAD, 1 + math.ceil(_ROUND_TRIP_NS / self._pace_ns))
        return at_once - 1 + wanted - len(self.numbers)


@dataclass(eq=False)
class Actor:
    """One actor; see `enqueuer.backends.pool.Worker`.

    Attributes:
        handle: Ray's handle of the actor.
        order: Function that calls a method of the actor by its name.
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
    order: Callable[..., None]
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
        self.order(self, "assign", [epoch], [])

    def ask_to_exit(self) -> None:
        """Ask the actor to exit; another one does the rest of its work."""
        self.is_leaving = True
        self.order(self, "close")

    def death(self) -> Death:
        """Return the cause of its death, with advice."""
        if not self.where:
            message = (
                f"{self} could not be started. {self.why} Check actor_options, and that "
                "enqueuer and all modules of the generator are installed on its node."
            )
        else:
            message = (
                f"{self} died; the items that it had sent were delivered. {self.why} Unless you "
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
        now = self.last_stats
        if now is None:
            nothing = Meter().words, (0, 0), Usage()
            now = worker_stats(self, *nothing, self.began)
        return dataclasses.replace(now, name=str(self), started=self.began)

    def keep_stats(self, stats: WorkerStats) -> None:
        """Keep statistics that the actor has sent, with the time of its start as seen from here."""
        all_s = (clock() - self.began) / 1e9
        at_work_s = stats.making_s + stats.sending_s + stats.waiting_s + stats.idle_s
        self.last_stats = dataclasses.replace(stats, starting_s=max(0.0, all_s - at_work_s))

    def __str__(self) -> str:
        return f"worker {self.index} (Ray actor{self.where})"


class ActorDispatch(Dispatch[Actor]):
    """See `enqueuer.backends.pool.Dispatch`. Any thread may call anything.

    Args:
        workers: The actors of the pool.
        lock: Lock of the pool.
        at_once: Number of tasks that each actor runs at once.
    """

    def __init__(self, workers: Sequence[Actor], lock: threading.RLock, at_once: int) -> None:
        self._workers = workers
        self._lock = lock
        self._at_once = at_once
        # Numbers and tickets of the tasks that no actor has.
        self._waiting: deque[tuple[int, bytes]] = deque()

    def pack(self, tickets: Sequence[Ticket]) -> Sequence[bytes]:
        return [task_queue.pack(ticket, are_forked=False) for ticket in tickets]

    def offer(self, tickets: Sequence[tuple[int, bytes]]) -> int:
        with self._lock:
            self._waiting.extend(tickets)
            self._assign_waiting_locked()
        return len(tickets)

    def assign(self, worker: Actor, number: int, packed: bytes) -> None:
        with self._lock:
            worker.tasks.add(number)
            worker.order(worker, "assign", [], [(number, packed)])

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

    def done_locked(self, worker: Actor, numbers: Sequence[int]) -> None:
        """Remove the tasks that a worker has done, and assign others."""
        for number in numbers:
            worker.tasks.done(number)
        self._assign_waiting_locked()

    def _assign_waiting_locked(self) -> None:
        given: dict[Actor, list[tuple[int, bytes]]] = {}
        able = [worker for worker in list(self._workers) if _can_work(worker)]
        while self._waiting and able:
            worker = max(able, key=lambda worker: worker.tasks.lacks(self._at_once))
            if worker.tasks.lacks(self._at_once) <= 0:
                break
            ticket = self._waiting.popleft()
            worker.tasks.add(ticket[0])
            given.setdefault(worker, []).append(ticket)
        for worker, tickets in given.items():
            worker.order(worker, "assign", [], tickets)


def _can_work(worker: Actor) -> bool:
    return worker.state not in HAS_ENDED and not worker.is_leaving


# Seconds between two checks whether the user has shut Ray down, which nothing reports.
_CHECK_S = 0.5
# Seconds of a wait within Ray.
_SHORT_WAIT_S = 0.005
# Streams that are requested at once, so that the next begins when one has ended.
_STREAMS = 2


@dataclass(frozen=True)
class Receiver:
    """Receives packets from one actor, in a thread of its own.

    Attributes:
        session: Connection to Ray.
        actor: Actor that sends the packets.
        deliver: Function that is called with each packet.
        lose: Function that is called if the stream breaks.
    """

    session: Session
    actor: Actor
    deliver: Callable[[Actor, list[Frame]], None]
    lose: Callable[[Actor, BaseException], None]

    def run(self) -> None:
        """Deliver packets until the actor has sent its last frame or is dead."""
        try:
            # Some notebooks replace asyncio.run.
            with contextlib.closing(asyncio.SelectorEventLoop()) as loop:
                loop.run_until_complete(self._receive_until_shutdown())
        except BaseException as error:
            self.lose(self.actor, error)
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
                self.session.check()
                await asyncio.wait((receiving,), timeout=_CHECK_S)
            receiving.result()
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    async def _receive(self) -> None:
        get, wait = unwrapped(self.session.ray.get), unwrapped(self.session.ray.wait)
        streams = deque(self._stream() for _ in range(_STREAMS))
        while True:
            stream = streams[0]
            self.session.check()
            # A packet that comes soon costs less within Ray. In Python, Ray fetches it twice.
            if wait([stream], timeout=_SHORT_WAIT_S, fetch_local=False)[0]:
                # After a shutdown, the next line would start another Ray.
                self.session.check()
                ref = next(stream, None)
            else:
                ref = await anext(stream, None)
                # Otherwise the event loop would keep the packet that Ray has fetched.
                await asyncio.sleep(0)
                self.session.check()
            if ref is None:
                streams.popleft()
                streams.append(self._stream())
                continue
            self.deliver(self.actor, get(ref))
            # Otherwise Ray would keep the packet until the next one comes.
            del ref
            # Frames may follow the last one, as the user's threads may still log.
            if self.actor.state is WorkerState.ENDED:
                return

    def _stream(self) -> Any:
        self.session.check()
        method = self.actor.handle.packets.options(
            concurrency_group="packets", num_returns="streaming"
        )
        return method.remote()


def unpack(frames: list[Frame], worker: str, writable: bool) -> list[tuple[Message, int]]:
    """Return the messages of a packet, with the sizes of the items among them.

    Args:
        frames: Frames of the packet.
        worker: Name of the worker.
        writable: Whether to copy arrays, so that the loop may write to them.
    """
    messages: list[tuple[Message, int]] = []
    for frame in frames:
        match frame:
            case ItemFrame():
                messages.append((_item_of(frame, worker, writable), _size_of(frame)))
            case MessageFrame(message=message, error=pickled):
                if isinstance(message, Failure):
                    assert pickled is not None
                    error = decode_error(pickled)
                    message = dataclasses.replace(message, error=error, worker=worker)
                messages.append((message, 0))
    return messages


def _item_of(frame: ItemFrame, worker: str, writable: bool) -> Item | Failure:
    buffers = [memoryview(buffer) for buffer in frame.buffers]
    if writable:
        buffers = [memoryview(bytearray(buffer)) for buffer in buffers]
    try:
        value = decode(frame.data, buffers)
    except Exception as error:
        failure = ItemNotLoadable(f"an item arrived, but could not be loaded here: {error!r}")
        failure.__cause__ = error
        return Failure(frame.shard, frame.number, failure, worker=worker)
    value, state = value if frame.has_state else (value, None)
    return Item(frame.shard, frame.number, value, state)


def _size_of(frame: ItemFrame) -> int:
    return len(frame.data) + sum(memoryview(buffer).nbytes for buffer in frame.buffers)
