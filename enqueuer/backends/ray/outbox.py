"""What a Ray actor sends: frames that its loop puts here, and the stream takes as packets.

    worker's loop --send_item(), send()--> Outbox --take()--> the stream of packets
                  <--next_epoch(), ...---        <--tell(), allow()-- the driver

A large item stays with the loop until it was copied into the object store; small ones lie here
until the stream takes them all at once, and share one object of the store, which stays as long as
an array of any of them does.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from logging import LogRecord
from typing import Any, NamedTuple

import numpy as np

from enqueuer.errors import Closed
from enqueuer.monitoring.meters import BYTES, IDLE, SENDING, WAITING, Meter, clock
from enqueuer.transport.error_codec import encode_error
from enqueuer.transport.item_codec import Encoder
from enqueuer.workers.messages import Empty, End, Epoch, Failure, Ticket

_SLOW_NS = 2_000_000  # an item that takes longer is handed over by itself

_SMALL_BYTES = 1 << 20  # an item that is copied once more, as that costs less than a packet


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
    """The first frame: process and node of the worker."""

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
        self._ordered = threading.Condition(self._lock)  # by the driver; what the loop waits for
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
        is_kept = began - self._done > _SLOW_NS or (bool(views) and size > _SMALL_BYTES)
        # buffers are the item's own memory, which may change once this returns
        buffers = tuple(map(_contiguous if is_kept else _copy, views))
        with self._lock:
            waited = self._wait_for_room_locked(size)
            self.sent += 1
            self._size += size
            self._put_locked(Sent(shard, number, has_state, data, buffers))
            self._given += 1
            mine = self._given
            if is_kept:
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
                self._ordered.wait()
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
                    self._ordered.wait()
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
            self._ordered.notify_all()

    def allow(self, credit: Credit) -> None:
        """Take in how much may have been sent."""
        with self._lock:
            self._credit = credit
            self._ordered.notify_all()

    def close(self) -> None:
        """Have the loop end."""
        with self._lock:
            self._closed = True
            self._ordered.notify_all()
            self._copied.notify()


_NO_ERROR = Exception()  # stands for one that travels apart


def _contiguous(view: Any) -> Any:
    """Return what Ray takes out of the packet and copies straight into the object store."""
    return _buffer_of(np.ascontiguousarray(view))


def _copy(view: Any) -> Any:
    return _buffer_of(np.array(view, order="C"))


def _buffer_of(array: np.ndarray) -> Any:
    flat = array.reshape(-1).view(np.uint8)  # whatever its dtype
    return pickle.PickleBuffer(flat)  # type: ignore[arg-type]  # numpy tells its types of no buffer
