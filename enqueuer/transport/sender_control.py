"""The worker's end of the socket beside the ring: orders come, blocks, logs and wake-ups go.

    sleep() -> orders: epochs, tickets, the request to stop
    emit() -> new blocks, dropped blocks, wake-ups
    send_record(record) -> a queue -> packets, whenever the socket has room

Only the worker's own loop waits. Records may come from any thread, and even from a destructor
that the garbage collector runs in the middle of a send: so the lock is only ever tried for them,
and whichever thread holds it sends what has been queued.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import threading
from collections import deque
from collections.abc import Callable

from enqueuer.errors import Closed
from enqueuer.monitoring.meters import WAITING, Meter
from enqueuer.transport.memory import nameless_file, read_whole
from enqueuer.transport.packets import Packets
from enqueuer.transport.protocol import INLINE_BYTES, PACKET, Kind
from enqueuer.transport.ring import CONSUMER_ASLEEP, ORDERS, PACKETS, WORKER_ASLEEP, Ring
from enqueuer.transport.spin import Spin
from enqueuer.workers.messages import Epoch

# Records that are kept while the socket is full; more are counted and dropped.
_MOST_RECORDS = 10_000


def send_ready(packets: Packets) -> None:
    """Report that a worker lives, before it has received anything."""
    packets.send(PACKET.pack(Kind.READY, 0))


class SenderControl:
    """The worker's end of the socket, after `send_ready()`.

    Any thread may call `send_record`, `try_flush` and `emit`; the rest is for the worker's own
    loop.

    Args:
        packets: The worker's end of the socket.
        ring: Ring between the worker and the consumer.
        meter: Meter of the worker, which counts its waits.
        spin: Whether, and how often, it spins before a sleep.

    Attributes:
        meter: Meter that counts the waits.
        closed: Whether the consumer left, or has asked the worker to stop.
        orders: Number of packets that were read; the word ORDERS is larger if more have come.
        epochs: Epochs that are still to be run.
        tasks: Tickets for this worker alone, each with the descriptors that came with it.
        records: Pickled log records that are still to be sent.
        keeps_wakes: Whether a wake-up of the consumer is kept until `take_wake()`, or a sleep.
    """

    def __init__(self, packets: Packets, ring: Ring, meter: Meter, spin: Spin) -> None:
        self.closed = False
        self.keeps_wakes = False
        self.orders = 0
        self.epochs: deque[Epoch] = deque()
        self.tasks: deque[tuple[bytes, list[int]]] = deque()
        self.records: deque[bytes] = deque()
        self._packets = packets
        self._words, self._fence = ring.words, ring.fence
        self.meter = meter
        # Held while packets are sent, and while records leave their queue.
        self._lock = threading.Lock()
        self._sequence = 1
        self._lost_records = 0
        self._readable = select.poll()
        self._readable.register(packets.fileno(), select.POLLIN)
        self._spin = spin
        self._sleeps = 0
        # The sleep of the consumer that was ended last, and whether that is still to be done.
        self._woken = 0
        self._is_wake_kept = False

    def check(self) -> None:
        """Raise Closed if the consumer left."""
        if self._words[ORDERS] > self.orders:
            self.read_orders()
        if self.closed:
            raise Closed("the consumer left")

    @property
    def has_orders(self) -> bool:
        """Whether packets have come that were not read."""
        return bool(self._words[ORDERS] > self.orders)

    def fileno(self) -> int:
        """Return the descriptor by which orders come."""
        return self._packets.fileno()

    def try_flush(self) -> bool:
        """Send what was logged without waiting; return whether there is more."""
        with self._lock:
            try:
                self._send_records_locked(wait=False)
            except OSError:
                self.closed = True
        return bool(self.records)

    def sleep(
        self,
        enough: Callable[[], bool] | None = None,
        also: int | None = None,
        phase: int = WAITING,
    ) -> None:
        """Sleep until there are orders, the consumer's end or a wake-up; send logs meanwhile.

        Args:
            enough: Function that returns whether there is no need to sleep. It is asked once more
                after the consumer can see that this sleeps.
            also: Descriptor that ends the sleep, too, when there is something to read.
            phase: Word of the meter to which the time is added.
        """
        if self._is_wake_kept and self.take_wake():
            self.emit(Kind.WAKE)
        self.meter.pause(phase)
        if enough is not None and self._spin.until(enough):
            self.meter.resume()
            if self._words[ORDERS] > self.orders:
                self.read_orders()
            return
        mask = select.POLLIN | (select.POLLOUT if self.try_flush() else 0)
        self._readable.modify(self._packets.fileno(), mask)
        if also is not None:
            self._readable.register(also, select.POLLIN)
        self._sleeps += 1
        self._words[WORKER_ASLEEP] = self._sleeps
        self._fence()
        if enough is None or not enough():
            self._readable.poll()
        self._words[WORKER_ASLEEP] = 0
        if also is not None:
            self._readable.unregister(also)
        self.meter.resume()
        self.read_orders()

    def read_orders(self) -> None:
        """Read all packets that have come; wait for nothing."""
        self._packets.drain()
        received = self._packets.received
        while received:
            self._obey(*received.popleft())
        if self._packets.ended:
            self.closed = True

    def _obey(self, data: bytes, fds: list[int]) -> None:
        kind, self.orders = PACKET.unpack_from(data)
        match kind:
            case Kind.EPOCH:
                self.epochs.append(pickle.loads(read_whole(data[PACKET.size :], fds)))
            case Kind.TASK:
                self.tasks.append((data[PACKET.size :], fds))
            case Kind.STOP:
                self.closed = True
            case _:  # Kind.WAKE
                pass

    def wake_consumer(self) -> None:
        """Wake the consumer if it sleeps; call it after a store for it, and a fence."""
        asleep = self._words[CONSUMER_ASLEEP]
        if asleep and asleep != self._woken:
            self._woken = asleep
            if self.keeps_wakes:
                self._is_wake_kept = True
            else:
                self.emit(Kind.WAKE)

    def take_wake(self) -> bool:
        """Return whether a wake-up was kept; the caller then sends `Kind.WAKE`."""
        is_kept, self._is_wake_kept = self._is_wake_kept, False
        return is_kept

    def emit(self, kind: int, body: bytes = b"", fd: int | None = None) -> None:
        """Send one packet, and before it what was logged before it.

        Raises:
            Closed: The consumer left.
        """
        self.flush_records()
        try:
            with self._lock:
                self._send_locked(kind, body, fd, wait=True)
        except OSError as error:
            self.closed = True
            raise Closed("the consumer left") from error

    def send_record(self, record: logging.LogRecord) -> None:
        """Send a log record without ever waiting; what does not fit now goes with the next packet.

        Called by any thread of the worker.
        """
        if len(self.records) >= _MOST_RECORDS:
            self._lost_records += 1
            return
        self.records.append(pickle.dumps(record.__dict__))
        if self._lock.acquire(blocking=False):
            try:
                self._send_records_locked(wait=False)
            except OSError:
                # The consumer left, so no process handles its logs any more.
                pass
            finally:
                self._lock.release()

    def flush_records(self) -> None:
        """Send what was logged.

        Raises:
            Closed: The consumer left.
        """
        try:
            with self._lock:
                self._send_records_locked(wait=True)
        except OSError as error:
            self.closed = True
            raise Closed("the consumer left") from error

    def close(self) -> None:
        """Send what was logged last, then close the socket."""
        with self._lock:
            try:
                self._send_records_locked(wait=True)
            except OSError:
                pass
            self.closed = True
            self._packets.close()

    def _send_locked(self, kind: int, body: bytes, fd: int | None, wait: bool) -> bool:
        packet = PACKET.pack(kind, self._sequence) + body
        if not self._packets.send(packet, () if fd is None else (fd,), wait=wait):
            return False
        self._sequence += 1
        self._words[PACKETS] = self._sequence
        return True

    def _send_records_locked(self, wait: bool) -> None:
        while True:
            if self._lost_records and not self.records:
                self.records.append(pickle.dumps(_loss(self._lost_records).__dict__))
                self._lost_records = 0
            if not self.records:
                return
            if not self._send_record_locked(self.records[0], wait):
                return
            self.records.popleft()

    def _send_record_locked(self, data: bytes, wait: bool) -> bool:
        if len(data) <= INLINE_BYTES:
            return self._send_locked(Kind.RECORD, data, None, wait)
        fd = nameless_file(data)
        try:
            return self._send_locked(Kind.RECORD, b"", fd, wait)
        finally:
            os.close(fd)


def _loss(count: int) -> logging.LogRecord:
    text = f"{count} log records of this worker were dropped: they came faster than they were read"
    return logging.LogRecord("enqueuer", logging.WARNING, __file__, 0, text, None, None)
