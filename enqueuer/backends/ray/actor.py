"""The inside of a Ray actor, and both ends of its channel.

    driver: assign() --epochs, tickets--> Outbox --next_epoch(), ...--> serve(), in the thread of
            grant() --credit------------> Outbox <--send_item(), send()--       work()
            RayInbox <--packets()-------- Outbox: lists of frames, in another thread

The stream is a streaming generator of Ray. Each packet is copied once, into the object store, and
belongs to the driver, so it outlives the actor.

A large item stays with the loop until it is copied into the object store. Small items lie in the
outbox until the stream takes them all at once. They share one object of the store, which stays as
long as an array of any of them does.
"""

from __future__ import annotations

import importlib
import logging
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

from enqueuer.backends.pool import Stack, deliver_all
from enqueuer.backends.thread_channel import UNBOUNDED, ThreadInbox, WorkQueue
from enqueuer.common.interrupts import WorkerThread
from enqueuer.errors import Closed, ItemNotLoadable
from enqueuer.monitoring import usage
from enqueuer.monitoring.meters import (
    BYTES,
    IDLE,
    SENDING,
    WAITING,
    Meter,
    WorkerStats,
    clock,
    worker_stats,
)
from enqueuer.order.messages import Empty, End, Epoch, Failure, Item, Message, Ticket
from enqueuer.transport.errors import with_decoded_error, with_encoded_error
from enqueuer.transport.item_codec import Encoder, decode
from enqueuer.workers import logs, native
from enqueuer.workers.plan import Sender, serve_failure
from enqueuer.workers.running import WorkerConfig
from enqueuer.workers.settings import Settings, be_worker, load_source
from enqueuer.workers.task_loop import ElementThreads, LockedSender
from enqueuer.workers.threads import ThreadSnapshot, snapshots_of

# --- the channel ----------------------------------------------------------------------------------

# Nanoseconds; an item that takes longer to make leaves before the next one is begun.
_SLOW_NS = 2_000_000
# Bytes; copying a smaller item once more costs less than a packet of its own.
_SMALL_BYTES = 1 << 20


class TotalCredit(NamedTuple):
    """The total that a worker may have sent since its start.

    Attributes:
        items: Number of items, if their bytes allow it.
        size: Number of bytes; None if there is no limit.
        wanted: Number of items that it may send however large they are.
    """

    items: int
    size: int | None
    wanted: int


class Ready(NamedTuple):
    """The first frame: process and node of the worker."""

    pid: int
    node: str


class ItemFrame(NamedTuple):
    """A frame with an item, which is a pickle and the large buffers beside it."""

    shard: int
    number: int
    has_state: bool
    data: bytes
    buffers: tuple[Any, ...]


class MessageFrame(NamedTuple):
    """A frame with an end, a failure or an empty result: its pickle, and the buffers beside it."""

    data: bytes
    buffers: tuple[Any, ...]


class NeedsCredit(NamedTuple):
    """A frame of a worker that has an item and no credit to send it."""


class Ended(NamedTuple):
    """The last frame: the worker's loop has ended.

    Attributes:
        why: Reason for the end; empty if the driver asked for it.
    """

    why: str = ""


Frame = Ready | ItemFrame | MessageFrame | NeedsCredit | Ended | LogRecord


class Outbox:
    """The Channel of a worker: between its loop and the driver's calls.

    Args:
        credit: Credit that the worker begins with.
        asks: Whether the worker sends `NeedsCredit` when its credit is used up.
    """

    def __init__(self, credit: TotalCredit, asks: bool) -> None:
        self.meter = Meter()
        # Where waits for orders and tickets are noted.
        self._waits = self.meter
        self.sent = 0
        self._size = 0
        self._credit = credit
        self._asks = asks
        self._encoder = Encoder()
        self._orders: WorkQueue[Epoch] = WorkQueue()
        self._tickets: WorkQueue[tuple[int, bytes]] = WorkQueue()
        self._frames: list[Frame] = []
        # Numbers of items that the loop has put here, that the stream has taken, and that Ray has
        # copied into the object store.
        self._put_count = self._taken_count = self._copied_count = 0
        # Time at which the last item had left the loop.
        self._sent_ns = 0
        self._closed = False
        # Reentrant, as the garbage collector may run here, and what it finalizes may log.
        self._lock = threading.RLock()
        # The loop waits until the driver grants credit, or the stream has copied its item.
        self._called = threading.Condition(self._lock)
        # The stream waits until there are frames.
        self._filled = threading.Condition(self._lock)

    # --- the worker's loop ---

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        began = clock()
        has_state = state is not None
        pickled, views = self._encoder.encode((value, state) if has_state else value)
        data = bytes(pickled)
        self._encoder.arrays.clear()
        size = len(data) + sum(view.nbytes for view in views)
        # An item that took long to make should leave before the next one takes this thread.
        is_retained = began - self._sent_ns > _SLOW_NS or (bool(views) and size > _SMALL_BYTES)
        # The buffers are the memory of the item, which may change once this method returns.
        buffers = tuple(map(_contiguous if is_retained else _copy, views))
        with self._lock:
            waited = self._wait_for_room_locked(size)
            self.sent += 1
            self._size += size
            self._put_locked(ItemFrame(shard, number, has_state, data, buffers))
            self._put_count += 1
            count = self._put_count
            if is_retained:
                while self._copied_count < count and not self._closed:
                    self._called.wait()
        self._sent_ns = clock()
        words = self.meter.words
        words[BYTES] += size
        words[SENDING] += self._sent_ns - began - waited

    def _wait_for_room_locked(self, size: int) -> int:
        """Wait until an item may be sent; return the nanoseconds of the wait."""
        began = 0
        if not self._may_send_locked(size):
            began = clock()
            self.meter.pause(WAITING)
            if self._asks:
                self._put_locked(NeedsCredit())
            while not self._may_send_locked(size):
                self._called.wait()
            self.meter.resume()
        self.check()
        return clock() - began if began else 0

    def _may_send_locked(self, size: int) -> bool:
        credit = self._credit
        if self._closed or self.sent < credit.wanted:
            return True
        fits = credit.size is None or self._size + size <= credit.size
        return fits and self.sent < credit.items

    def send(self, message: End | Failure | Empty) -> None:
        pickled, views = self._encoder.encode(with_encoded_error(message))
        frame = MessageFrame(bytes(pickled), tuple(map(_copy, views)))
        with self._lock:
            self.check()
            self._put_locked(frame)

    def check(self) -> None:
        if self._closed:
            raise Closed("the enqueuer was stopped")

    def next_epoch(self) -> Epoch | None:
        return self._orders.get(self._waits, IDLE)

    def next_ticket(self) -> Ticket | None:
        while (found := self._tickets.get(self._waits, WAITING)) is not None:
            number, pickled = found
            try:
                ticket: Ticket = pickle.loads(pickled)
            except Exception as error:
                # The class of an element may be missing on this node.
                self.send(Failure(0, number, error))
            else:
                return ticket
        return None

    def share(self, threads: ElementThreads) -> Sender:
        # The worker waits only when its threads do.
        self._waits = Meter()
        # The worker's own thread may be waiting for a ticket, and ends.
        threads.on_error = lambda error: self.close()
        return LockedSender(self)

    def send_frame(self, frame: Ready | Ended | LogRecord) -> None:
        """Send a frame about the worker itself, also after the driver has closed the outbox."""
        with self._lock:
            self._put_locked(frame)

    def _put_locked(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._filled.notify()

    # --- the driver's calls ---

    def take(self) -> list[Frame]:
        """Wait for frames and return all of them.

        Ray has copied the frames of the previous call before it makes the next one.
        """
        with self._lock:
            self._copied_count = self._taken_count
            self._called.notify_all()
            while not self._frames:
                self._filled.wait()
            frames, self._frames = self._frames, []
            self._taken_count = self._put_count
            return frames

    def assign(self, orders: list[Epoch], tickets: list[tuple[int, bytes]]) -> None:
        """Add epochs to run, or tasks to do."""
        self._orders.put_all(orders)
        self._tickets.put_all(tickets)

    def grant(self, credit: TotalCredit) -> None:
        """Replace the credit by a larger one."""
        with self._lock:
            self._credit = credit
            self._called.notify_all()

    def close(self) -> None:
        """End the loop: it gets no more orders, and sending raises Closed."""
        # First, as a worker that gets no more orders asks if the consumer left.
        with self._lock:
            self._closed = True
            self._called.notify_all()
        self._orders.close()
        self._tickets.close()


def _contiguous(view: Any) -> Any:
    """Return a buffer that Ray copies straight into the object store, without pickling it."""
    return _buffer_of(np.ascontiguousarray(view))


def _copy(view: Any) -> Any:
    return _buffer_of(np.array(view, order="C"))


def _buffer_of(array: np.ndarray) -> Any:
    # Not every dtype has a buffer, but its bytes do.
    flat = array.reshape(-1).view(np.uint8)
    return pickle.PickleBuffer(flat)  # type: ignore[arg-type]  # numpy declares no buffer


# Nanoseconds between two grants; a grant that comes later is always worth its call.
_GRANT_GAP_NS = 5_000_000


class RayInbox(ThreadInbox):
    """The messages of an actor, and its credit; the thread that receives from it fills the inbox.

    Args:
        records: Log records of all workers, which the loop delivers.
        credit: Credit that the actor begins with; that many items and bytes may wait here.

    Attributes:
        needs_credit: Whether the actor has an item and no credit to send it.
        grant: Function that is called when the loop has consumed the items that it took.
    """

    grant: Callable[[], None]

    def __init__(self, records: deque[logging.LogRecord], credit: TotalCredit) -> None:
        # The credit is the bound.
        super().__init__(UNBOUNDED, UNBOUNDED)
        self.needs_credit = False
        self._records = records
        self._quota, self._share = credit.items, credit.size
        # The last grant, and its time.
        self._credit = credit
        self._granted = clock()
        # Number of items that have arrived, those that could not be loaded included.
        self._received = 0
        # Of the waits for room, which there are none of here.
        self._meter = Meter()

    def waiting_of(self, epoch: int) -> int:
        # An actor makes nothing ahead of an epoch.
        return self.waiting

    def add_locked(self, frame: Frame, message: Message | None, size: int) -> None:
        """Add a frame that has arrived, and what `unpack` has returned for it."""
        match frame:
            case ItemFrame():
                # It counts also if it cannot be loaded.
                self._received += 1
                self.needs_credit = False
            case NeedsCredit():
                self.needs_credit = True
            case LogRecord():
                self._records.append(frame)
        if isinstance(message, tuple):
            self.put(message, size, self._meter)
        elif message is not None:
            self.send(message, self._meter)

    def head(self) -> bool | End | Failure | Empty:
        if self._records:
            deliver_all(self._records)
        return super().head()

    def acknowledge(self) -> None:
        before = self.acknowledged
        super().acknowledge()
        if self.acknowledged != before:
            self.grant()

    def due_credit(self, wanted: bool) -> TotalCredit | None:
        """Return the credit to grant now; None if it is not worth a call.

        Args:
            wanted: Whether the loop waits for the next item, which must then come in any case.
        """
        quota, before = self._quota, self._credit
        # Tickets need no credit.
        if quota == UNBOUNDED:
            return None
        items = self.acknowledged + quota
        size = None if self._share is None else self.bytes_acknowledged + self._share
        at_least = before.wanted
        if wanted and (quota == 0 or size is not None):
            at_least = self._received + 1
        # A call costs about as much as a packet, so a fast loop grants many small items at once. A
        # slow loop grants each item, so that its queue is full whenever it asks.
        now = clock()
        is_worth_it = 2 * (items - before.items) >= quota or now - self._granted > _GRANT_GAP_NS
        # The bytes may be used up long before the items.
        if size is not None and before.size is not None:
            is_worth_it |= 2 * (size - before.size) >= (self._share or 0)
        if at_least == before.wanted and not (is_worth_it and (items, size) != before[:2]):
            return None
        self._credit, self._granted = TotalCredit(items, size, at_least), now
        return self._credit


def unpack(frame: Frame, worker: str, writable: bool) -> tuple[Message | None, int]:
    """Return the message in a frame, None if there is none; and the size of an item.

    Args:
        frame: The frame.
        worker: Name of the worker.
        writable: Whether to copy arrays, so that the loop may write to them.
    """
    if isinstance(frame, ItemFrame):
        size = len(frame.data) + sum(memoryview(buffer).nbytes for buffer in frame.buffers)
        return _item_of(frame, worker, writable), size
    if not isinstance(frame, MessageFrame):
        return None, 0
    message: Message = with_decoded_error(decode(frame.data, map(memoryview, frame.buffers)))
    return replace(message, worker=worker) if isinstance(message, Failure) else message, 0


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


# --- the actor ------------------------------------------------------------------------------------

GROUPS = {"work": 1, "packets": 1, "orders": 1, "inspect": 1}
"""The concurrency groups of an actor, each with one thread, in which its methods run."""

# Packets of one stream; Ray remembers each of them until the stream ends.
_MAX_PACKETS = 10_000


@dataclass(frozen=True)
class ActorConfig:
    """Configuration of one actor.

    Attributes:
        index: Index of the worker, from 0.
        shards: Indices of its shards; empty for tasks.
        worker: Configuration that it shares with worker processes.
        settings: Settings of the driver.
        path: Directories from which the driver imports.
        asks: Whether it sends a frame when it has an item and no credit.
        keep_freed_memory: Whether the C library keeps the memory that is freed.
    """

    index: int
    shards: tuple[int, ...]
    worker: WorkerConfig
    settings: Settings
    path: tuple[str, ...]
    asks: bool
    keep_freed_memory: bool

    def __str__(self) -> str:
        # The driver knows its name.
        return ""


class RayWorker:
    """The class of the actors; the pool calls each method in a concurrency group of GROUPS.

    It has an outbox and is none: Ray wraps each method of this class, and each call of it.

    Args:
        config: Configuration of the actor.
        credit: Credit that it begins with.
        payload: Pickles of the program, and of the source and `on_error`.
    """

    def __init__(
        self, config: ActorConfig, credit: TotalCredit, payload: tuple[bytes, bytes]
    ) -> None:
        if config.keep_freed_memory:
            native.keep_freed_memory()
        # Ray has set OMP_NUM_THREADS, which OpenCV does not read. These hold for libraries that
        # the source imports; numpy is loaded already.
        os.environ.update(native.limits(1, False, os.environ))
        self._config = config
        self._payload = payload
        self._outbox = Outbox(credit, config.asks)
        self._began = clock()
        self._thread: threading.Thread | None = None
        self._cpu_s = usage.of_process(os.getpid()).cpu_s or 0.0
        known = set(sys.path)
        sys.path.extend(path for path in config.path if path not in known)

    def work(self) -> None:
        """Run the worker's loop until the driver closes the outbox."""
        # `forget` recognizes the thread by this class, and stops no backend in it.
        self._thread = WorkerThread(target=self._work, name=f"enqueuer-worker-{self._config.index}")
        self._thread.start()
        self._thread.join()

    def _work(self) -> None:
        ended = Ended()
        try:
            self._serve()
        except BaseException as error:
            # Without a last frame, the driver would wait forever.
            traceback.print_exc()
            ended = Ended(f"Its loop ended by {error!r}")
        finally:
            self._outbox.send_frame(ended)

    def _serve(self) -> None:
        be_worker()
        config, outbox = self._config, self._outbox
        outbox.send_frame(Ready(os.getpid(), _node()))
        if config.worker.levels is not None:
            logs.forward(outbox.send_frame, config.worker.levels)
        try:
            program, pickled = self._payload
            pickle.loads(program).install()
            config.settings.apply()
            source, on_error = load_source(pickled, config.index)
        except BaseException as error:
            serve_failure(error, config.shards, outbox)
        else:
            outbox.meter.begin()
            config.worker.serve(config.index, config.shards, source, on_error, outbox)

    def packets(self) -> Iterator[list[Frame]]:
        """Yield the frames in the order in which they were sent, as many at once as there are."""
        for _ in range(_MAX_PACKETS):
            frames = self._outbox.take()
            yield frames
            if isinstance(frames[-1], Ended):
                return
            # Without this, an item would live on while the next one is made.
            del frames

    def assign(self, orders: list[Epoch], tickets: list[tuple[int, bytes]]) -> None:
        """Add epochs to run, or tasks to do."""
        self._outbox.assign(orders, tickets)

    def grant(self, items: int, size: int | None, wanted: int) -> None:
        """Replace the credit; the arguments are the fields of a `TotalCredit`."""
        self._outbox.grant(TotalCredit(items, size, wanted))

    def close(self) -> None:
        """End the loop; its remaining frames come before the last packet."""
        self._outbox.close()

    def stack(self) -> tuple[Stack | None, list[ThreadSnapshot]]:
        """Return the stack of the worker's loop, None if it does not run; its threads or shards."""
        thread = self._thread
        frame = None if thread is None else sys._current_frames().get(thread.ident or 0)
        # A stack without the values of variables can always be pickled.
        stack = None if frame is None else list(traceback.extract_stack(frame))
        return stack, snapshots_of(None if thread is None else thread.ident)

    def stats(self) -> WorkerStats:
        """Return a snapshot of the worker's work."""
        outbox, thread = self._outbox, self._thread
        used = usage.of_process(os.getpid())
        if thread is not None and used.cpu_s is not None:
            # Without the time that Ray took to start the process.
            cpu_s = used.cpu_s - self._cpu_s
            used = used._replace(cpu_s=cpu_s, cpu_wait_s=usage.of_thread(thread).cpu_wait_s)
        words = outbox.meter.words
        return worker_stats(self._config, words, (outbox.sent, words[BYTES]), used, self._began)


def _node() -> str:
    util = importlib.import_module("ray.util")
    return f"{socket.gethostname()} ({util.get_node_ip_address()})"
