"""What a Ray actor does: the worker's loop in one of its threads, a stream of packets in another.

    driver: tell() --epochs, tickets--> Outbox --> serve(), in the thread of work()
            allow() --credit----------> Outbox
            packets() <--lists of frames- Outbox <--/

The stream is a streaming generator of Ray's, so that each packet is copied once, into the object
store, and belongs to the driver: it outlives the actor. A large item stays in its worker's hand
until it was copied; small ones lie here until the stream takes them all at once, and share one
object of the store, which stays as long as an array of any of them does.
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from logging import LogRecord
from typing import Any, NamedTuple

import numpy as np

from enqueuer import allocator, logs, usage, worker
from enqueuer.backends import WorkerThread
from enqueuer.errors import Closed
from enqueuer.import_hook import after_import
from enqueuer.messages import Empty, End, Epoch, Failure, Ticket
from enqueuer.meters import BYTES, IDLE, SENDING, WAITING, Meter, clock
from enqueuer.shards import FRAMEWORKS, GlobalStreams, TaskSeeds
from enqueuer.stalls import Stack
from enqueuer.stats import WorkerStats, worker_stats
from enqueuer.tasks import TaskSource
from enqueuer.trace import Place
from enqueuer.tracing import traced
from enqueuer.transport.codec import Encoder, encode_error

GROUPS = {"work": 1, "packets": 1, "tell": 1, "look": 1}
"""The threads of an actor, by what they do; each does one thing after the other."""

_SLOW_NS = 2_000_000  # an item that takes longer is handed over by itself

_SMALL_BYTES = 1 << 20  # an item that is copied once more, as that costs less than a packet

_MOST_PACKETS = 10_000  # of one stream; Ray remembers each of them until its end


@dataclass(frozen=True)
class Part:
    """What one worker is told.

    Attributes:
        index: Of the worker.
        shards: That it runs.
        count: How many shards there are in all.
        random_seed: Of the enqueuer.
        levels: Of the loggers whose records are wanted; None: none are.
        path: Where the driver imports from.
        trace: Where to record; None: nowhere.
        asks: Whether it says so when it may not send what it has.
    """

    index: int
    shards: tuple[int, ...]
    count: int
    random_seed: int
    levels: logs.Levels | None
    path: tuple[str, ...]
    trace: Place | None
    asks: bool


class Credit(NamedTuple):
    """How much a worker may have sent in all.

    Attributes:
        items: So many, if their bytes allow it.
        size: So many bytes; None: any number.
        wanted: So many items at least, however large they are.
    """

    items: int
    size: int | None
    wanted: int


class Ready(NamedTuple):
    """The first frame: who and where the worker is."""

    pid: int
    node: str


class Sent(NamedTuple):
    """A frame with an item, which is a pickle and the large buffers beside it."""

    shard: int
    number: int
    has_state: bool
    data: bytes
    buffers: tuple[Any, ...]


class Told(NamedTuple):
    """A frame with an end or a failure, whose error is pickled apart."""

    message: End | Failure | Empty
    error: bytes | None


class Asking(NamedTuple):
    """A frame that says: there is an item, and no right to send it."""


class Ended(NamedTuple):
    """The last frame: the worker's loop is over.

    Attributes:
        why: It is, if it was not asked to end.
    """

    why: str = ""


Frame = Ready | Sent | Told | Asking | Ended | LogRecord


class Outbox:
    """A worker's Sender, Orders and Tickets: between its loop and the driver's calls."""

    def __init__(self, credit: Credit, asks: bool) -> None:
        self.meter = Meter()
        self.sent = 0
        self._size = 0
        self._credit = credit
        self._asks = asks
        self._encoder = Encoder()
        self._orders: deque[Epoch] = deque()
        self._tickets: deque[tuple[int, bytes]] = deque()
        self._frames: list[Frame] = []
        self._given = self._taken = self._gone = 0  # items: put here, taken by the stream, copied
        self._done = 0  # when the last one was dealt with
        self._closed = False
        self._lock = threading.RLock()  # the collector may strike here, and what it ends may log
        self._told = threading.Condition(self._lock)  # by the driver; what the loop waits for
        self._filled = threading.Condition(self._lock)  # what the stream waits for
        self._copied = threading.Condition(self._lock)  # by the stream; the loop waits for it, too

    # --- the worker's loop ---

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        began = clock()
        has_state = state is not None
        data, views = self._encoder.encode((value, state) if has_state else value)
        self._encoder.arrays.clear()
        size = len(data) + sum(view.nbytes for view in views)
        # what took long to make should be on its way before the next one takes this thread
        in_hand = began - self._done > _SLOW_NS or (bool(views) and size > _SMALL_BYTES)
        # buffers are the item's own memory, which may change once this returns
        buffers = tuple(map(_contiguous if in_hand else _copy, views))
        with self._lock:
            waited = self._wait_for_room_locked(size)
            self.sent += 1
            self._size += size
            self._put_locked(Sent(shard, number, has_state, data, buffers))
            self._given += 1
            mine = self._given
            if in_hand:
                while self._gone < mine and not self._closed:
                    self._copied.wait()
        self._done = clock()
        words = self.meter.words
        words[BYTES] += size
        words[SENDING] += self._done - began - waited

    def _wait_for_room_locked(self, size: int) -> int:
        """Wait for the right to send; return for how many nanoseconds."""
        began = 0
        if not self._may_send_locked(size):
            began = clock()
            self.meter.pause(WAITING)
            if self._asks:
                self._put_locked(Asking())
            while not self._may_send_locked(size):
                self._told.wait()
            self.meter.resume()
        self._check_locked()
        return clock() - began if began else 0

    def _may_send_locked(self, size: int) -> bool:
        credit = self._credit
        if self._closed or self.sent < credit.wanted:
            return True
        fits = credit.size is None or self._size + size <= credit.size
        return fits and self.sent < credit.items

    def send(self, message: End | Failure | Empty) -> None:
        error = None
        if isinstance(message, Failure):
            error = encode_error(message.error)
            message = replace(message, error=_NO_ERROR)
        with self._lock:
            self._check_locked()
            self._put_locked(Told(message, error))

    def send_record(self, record: LogRecord) -> None:
        """Have a log record leave, also when the driver has hung up."""
        with self._lock:
            self._put_locked(record)

    def check(self) -> None:
        with self._lock:
            self._check_locked()

    def watch(self, waited: Callable[[int], None]) -> None:
        self.meter.waited = waited

    def next_epoch(self) -> Epoch | None:
        epoch: Epoch | None = self._next(self._orders, IDLE)
        return epoch

    def next_ticket(self) -> Ticket | None:
        while (found := self._next(self._tickets, WAITING)) is not None:
            number, pickled = found
            try:
                ticket: Ticket = pickle.loads(pickled)
            except Exception as error:  # the user's class cannot be loaded here
                self.send(Failure(0, number, error))
            else:
                return ticket
        return None

    def _next(self, queue: deque[Any], phase: int) -> Any:
        with self._lock:
            if not queue and not self._closed:
                self.meter.pause(phase)
                while not queue and not self._closed:
                    self._told.wait()
                self.meter.resume()
            return None if self._closed else queue.popleft()

    def say(self, frame: Ready | Ended) -> None:
        """Send a frame about the worker itself."""
        with self._lock:
            self._put_locked(frame)

    def _check_locked(self) -> None:
        if self._closed:
            raise Closed("the enqueuer was stopped")

    def _put_locked(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._filled.notify()

    # --- the driver's calls ---

    def take(self) -> list[Frame]:
        """Wait for frames, and return all; those that were returned before were copied by now."""
        with self._lock:
            self._gone = self._taken
            self._copied.notify()
            while not self._frames:
                self._filled.wait()
            frames, self._frames = self._frames, []
            self._taken = self._given
            return frames

    def tell(self, orders: list[Epoch], tickets: list[tuple[int, bytes]]) -> None:
        """Take in what there is to do."""
        with self._lock:
            self._orders.extend(orders)
            self._tickets.extend(tickets)
            self._told.notify_all()

    def allow(self, credit: Credit) -> None:
        """Take in how much may have been sent."""
        with self._lock:
            self._credit = credit
            self._told.notify_all()

    def close(self) -> None:
        """Have the loop end."""
        with self._lock:
            self._closed = True
            self._told.notify_all()
            self._copied.notify()


class RayWorker:
    """The actor. Its methods run in the threads of GROUPS, as the backend asks for them.

    Args:
        part: What it is told.
        credit: How much it may send at once.
        payload: The pickled source and `on_error`.
    """

    def __init__(self, part: Part, credit: Credit, payload: bytes) -> None:
        allocator.keep_freed_memory()
        self._part = part
        self._payload = payload
        self._outbox = Outbox(credit, part.asks)
        self._began = clock()
        self._thread: threading.Thread | None = None
        self._cpu_s = usage.of_process(os.getpid()).cpu_s or 0.0
        known = set(sys.path)
        sys.path.extend(path for path in part.path if path not in known)

    def work(self) -> None:
        """Run the worker's loop until the driver hangs up."""
        # a thread of its own kind: the collector must know it, see `backends.forget`
        self._thread = WorkerThread(target=self._work, name=f"enqueuer-worker-{self._part.index}")
        self._thread.start()
        self._thread.join()

    def _work(self) -> None:
        ended = Ended()
        try:
            self._serve()
        except BaseException as error:  # or the driver would wait for ever
            traceback.print_exc()
            ended = Ended(f"Its loop ended by {error!r}")
        finally:
            self._outbox.say(ended)

    def _serve(self) -> None:
        part, outbox = self._part, self._outbox
        outbox.say(Ready(os.getpid(), _node()))
        if part.levels is not None:
            logs.forward(outbox.send_record, part.levels)
        try:
            source, on_error = pickle.loads(self._payload)
        except BaseException as error:
            self._fail(error)
        else:
            outbox.meter.begin()
            plan = worker.Plan(source, part.shards, part.count, part.random_seed, on_error)
            if isinstance(source, TaskSource):
                seeds = TaskSeeds()
                after_import(FRAMEWORKS, seeds.seed_imported)
                serve = traced(worker.serve_tasks, part.trace, part.index)
                serve(plan, outbox, outbox, seeds.enter)
            else:
                streams = GlobalStreams()
                after_import(FRAMEWORKS, streams.seed_imported)
                traced(worker.serve, part.trace, part.index)(plan, outbox, outbox, streams.enter)

    def _fail(self, error: BaseException) -> None:
        """Tell that there is no source, and stay until the driver has heard it."""
        outbox = self._outbox
        try:
            if self._part.shards:
                outbox.send(Failure(self._part.shards[0], 0, error))
                while outbox.next_epoch() is not None:
                    pass
            else:
                while (ticket := outbox.next_ticket()) is not None:
                    outbox.send(Failure(0, ticket.number, error))
        except Closed:
            pass

    def packets(self) -> Iterator[list[Frame]]:
        """Yield what there is, in the order in which it was sent."""
        for _ in range(_MOST_PACKETS):
            frames = self._outbox.take()
            yield frames
            if isinstance(frames[-1], Ended):
                return
            del frames  # or an item would live on while the next one is made

    def tell(self, orders: list[Epoch], tickets: list[tuple[int, bytes]]) -> None:
        """Take in what there is to do."""
        self._outbox.tell(orders, tickets)

    def allow(self, items: int, size: int | None, wanted: int) -> None:
        """Take in how much may have been sent, as the fields of a Credit."""
        self._outbox.allow(Credit(items, size, wanted))

    def close(self) -> None:
        """Have the loop end; what it has still to say comes before the last packet."""
        self._outbox.close()

    def look(self) -> Stack | None:
        """Return where the worker's loop is."""
        thread = self._thread
        frame = None if thread is None else sys._current_frames().get(thread.ident or 0)
        # without the values of variables, which may be anything
        return None if frame is None else list(traceback.extract_stack(frame))

    def account(self) -> WorkerStats:
        """Return what the worker has done so far."""
        outbox, thread = self._outbox, self._thread
        used = usage.of_process(os.getpid())
        if thread is not None and used.cpu_s is not None:
            cpu_s = used.cpu_s - self._cpu_s  # without what Ray took to start
            used = replace(used, cpu_s=cpu_s, starved_s=usage.of_thread(thread).starved_s)
        return worker_stats(
            self._part.index,
            "",
            self._part.shards,
            outbox.meter.words,
            (outbox.sent, outbox.meter.words[BYTES]),
            used,
            self._began,
        )


_NO_ERROR = Exception()  # stands for one that travels apart


def _contiguous(view: Any) -> Any:
    """Return what Ray takes out of the packet and copies straight into the object store."""
    return _buffer_of(np.ascontiguousarray(view))


def _copy(view: Any) -> Any:
    return _buffer_of(np.array(view, order="C"))


def _buffer_of(array: np.ndarray) -> Any:
    flat = array.reshape(-1).view(np.uint8)  # whatever its dtype
    return pickle.PickleBuffer(flat)  # type: ignore[arg-type]  # numpy tells its types of no buffer


def _node() -> str:
    util = importlib.import_module("ray.util")
    return f"{socket.gethostname()} ({util.get_node_ip_address()})"
