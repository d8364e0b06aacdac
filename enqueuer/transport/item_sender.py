"""The worker's end of a channel: items go out as credit allows, orders and logs pass by.

    send_item() -> pickle -> large parts into blocks -> wait for credit -> a frame in the ring
    send_record(record) -> a queue -> packets, whenever the socket has room

An item is in the ring, where the consumer can take it, before this worker turns to the next
one. Only the worker's own loop waits. Records may come from any thread, and even from a
destructor that the garbage collector runs in the middle of a send: so the lock is only ever
tried for them, and whoever holds it sends what has been queued.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from enqueuer.errors import Closed
from enqueuer.messages import Empty, End, Epoch, Failure, Reported, Ticket
from enqueuer.meters import BYTES, IDLE, SENDING, WAITING, Meter, clock
from enqueuer.transport import codec, task_queue
from enqueuer.transport import ring as layout
from enqueuer.transport.blocks import (
    ALIGNMENT,
    Block,
    BlockPool,
    Made,
    nameless_file,
    read_whole,
)
from enqueuer.transport.channel import (
    FRAME,
    INLINE_BYTES,
    MOST_IN_PACKET,
    NUMBER,
    PACKET,
    REPORT,
    SEGMENT,
    Credit,
    Kind,
)
from enqueuer.transport.codec import SCALARS
from enqueuer.transport.packets import Packets, close_in_children
from enqueuer.transport.ring import (
    CONSUMER_ASLEEP,
    IS_STRONG,
    ORDERS,
    RING_BYTES,
    SENT,
    WRITTEN,
    Ring,
)

_MOST_RECORDS = 10_000  # kept while the socket is full; then they are counted and dropped

_log = logging.getLogger("enqueuer")
_COPIED = (
    "an array of enqueuer.empty() is copied on its way, as another view of it is still referred "
    "to in the generator (a loop's variable, say) and could be written to: `del` it before the "
    "yield. This is said once a worker"
)

_ITEM, _STATED = int(Kind.ITEM), int(Kind.STATED)
_HEAD = FRAME.size
_pack_head = FRAME.pack_into
_dumps = pickle.dumps

Segment = tuple[Block, int, int]
"""A part of an item: the block that it lies in, where, and its bytes."""


def send_ready(packets: Packets) -> None:
    """Tell that a worker lives, before it knows anything."""
    packets.send(PACKET.pack(Kind.READY, 0))


class ItemSender:
    """A process worker's Sender and Orders. `send_record` may be called by any thread."""

    def __init__(self, packets: Packets, ring: Ring, credit: Credit) -> None:
        self._packets = packets
        self._ring = ring
        self._words, self._frames, self._fence = ring.words, ring.frames, ring.fence
        self.meter = Meter(ring.meter)
        self._meter = ring.meter
        self._timed = 0  # items that the times so far stand for
        self._credit = credit
        self._written = self._sent = self._read = 0
        self._limit = 0  # may be sent without another thought; stays so with a bound on bytes
        self._sizes: deque[int] = deque()  # of what was sent and is not known to be taken
        self._bytes = 0
        self._lock = threading.Lock()  # of the socket's sending side, and of the records
        self._sequence = 1  # after send_ready()
        self._records: deque[bytes] = deque()
        self._lost_records = 0
        self._readable = select.poll()
        self._readable.register(packets.fileno(), select.POLLIN)
        self._epochs: deque[Epoch] = deque()
        self._tasks: deque[tuple[bytes, list[int]]] = deque()  # for this worker alone
        self._closed = False
        self._encoder = codec.Encoder()
        self._encode = self._encoder.encode
        self._sleeps = 0
        self._woken = 0  # the sleep of the consumer that was ended last
        self._orders = 0  # packets of the consumer that were read
        self.pool = BlockPool(keep=credit.items + 4)
        self._told_of_copies = False
        self._severed = _Severed(self)
        close_in_children(self._severed)

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        """Send an item, when there is credit for it.

        It is pickled and copied before this returns, so the generator may use its buffers again.

        Raises:
            Closed: The consumer left.
            ItemNotPicklable: The item cannot be sent.
            BlockMemoryError: There is no memory to send it through.
        """
        kind, table = _ITEM, 0
        # who may have to wait, or has much to copy, is timed, and stands for all since then
        began = clock() if self._sent >= self._limit else 0
        buffers: Sequence[codec.Buffer] = ()
        if state is not None:
            kind, value = _STATED, (value, state)
        if type(value) in SCALARS:
            data = _dumps(value, 5)
        else:
            data, buffers = self._encode(value)
        if began or buffers or len(data) > INLINE_BYTES:
            began = began or clock()
            waited = self._meter[WAITING]
            data, table = self._prepare(data, buffers)
            began += self._meter[WAITING] - waited
        elif self._words[ORDERS] != self._orders:
            self.check()
        self._sent += 1
        self._put(kind, shard, number, table, data)
        if began:
            self._account(clock() - began, table > 0)

    def send(self, message: End | Failure | Empty) -> None:
        """Send what is no item; needs no credit. Raises as `send_item`."""
        self.check()
        if isinstance(message, End):
            data, table = b"", b""
            if message.state is not None:
                data, segments = self._lay_out(*self._encode(message.state))
                table = self._announce(segments)
            self._put(Kind.END, message.shard, message.number, len(table), table + data)
        elif isinstance(message, Empty):
            self._put(Kind.EMPTY, 0, message.number, 0, b"")
        else:
            encoded = codec.encode_error(message.error)
            kind = Kind.SKIPPED if message.skipped else Kind.FAILURE
            if isinstance(message, Reported):
                kind = Kind.REPORTED
                encoded = REPORT.pack(message.nth, message.log) + encoded
            data, segments = self._lay_out(encoded, ())
            table = self._announce(segments)
            self._put(kind, message.shard, message.number, len(table), table + data)

    def check(self) -> None:
        """Raise Closed if the consumer left."""
        if self._words[layout.ORDERS] != self._orders:
            self._read_orders()
        if self._closed:
            raise Closed("the consumer left")

    def watch(self, waited: Callable[[int], None]) -> None:
        """Have `waited` called after each wait, with its begin."""
        self.meter.waited = waited

    def next_epoch(self) -> Epoch | None:
        """Wait for the next epoch; None when there will be none."""
        self._read_orders()  # the first may have come with the job
        while not self._epochs and not self._closed:
            self._sleep(phase=IDLE)
        return None if self._closed else self._epochs.popleft()

    def next_ticket(self, task_socket: socket.socket) -> Ticket | None:
        """Wait for a task, for this worker or for anyone; None when there will be none."""
        while True:
            if self._words[ORDERS] != self._orders:
                self._read_orders()
            if self._closed:
                return None
            found = self._tasks.popleft() if self._tasks else task_queue.take(task_socket)
            if found is None:
                self._sleep(also=task_socket.fileno())
                self._limit = 0  # the next result is timed
                continue
            token, number = task_queue.HEAD.unpack_from(found[0])
            self._words[layout.CLAIMED] = token + 1
            try:
                return task_queue.unpack(*found)
            except Exception as error:  # the user's class cannot be loaded here
                self.send(Failure(0, number, error))

    def send_record(self, record: logging.LogRecord) -> None:
        """Send a log record without ever waiting; what does not fit now goes with the next packet.

        Called by any thread of the worker.
        """
        if len(self._records) >= _MOST_RECORDS:
            self._lost_records += 1
            return
        self._records.append(pickle.dumps(record.__dict__))
        if self._lock.acquire(blocking=False):
            try:
                self._send_records_locked(wait=False)
            except OSError:
                pass  # the consumer left; its log does not interest anybody any more
            finally:
                self._lock.release()

    def close(self) -> None:
        """Send what was logged last, then hang up."""
        with self._lock:
            try:
                self._send_records_locked(wait=True)
            except OSError:
                pass
            self._closed = True
            self._packets.close()
            self.pool.close()

    # --- an item ---

    def _prepare(self, data: bytes, buffers: Sequence[codec.Buffer]) -> tuple[bytes, int]:
        """Put large parts into blocks, and wait for credit.

        Returns:
            The body of the frame, and how much of it is the table of the parts in blocks.
        """
        self.check()
        size = len(data) + sum(buffer.nbytes for buffer in buffers)
        data, segments = self._lay_out(data, buffers)
        del buffers
        if segments:
            self._meter[BYTES] += size
        if self._credit.waiting_bytes is not None:
            self._sizes.append(size)
            self._bytes += size
        self._wait_for_credit()
        table = self._announce(segments)
        return table + data, len(table)

    def _account(self, took: int, is_large: bool) -> None:
        """Note how long it took to send an item, without waiting.

        Args:
            took: Nanoseconds.
            is_large: Whether parts of it went into blocks; others are like those before it.
        """
        alike = 1 if is_large else self._sent - self._timed
        self._timed = self._sent
        self._meter[SENDING] += took * alike

    def _wait_for_credit(self) -> None:
        """Return when the item in hand may go."""
        self.check()
        while not self._may_send():
            if self._credit.ask:
                self._words[layout.ASKING] = self._sent + 1
                self._fence()
                self._wake_consumer()
            self._sleep(self._may_send)
            self.check()

    def _may_send(self) -> bool:
        words, limit = self._words, self._words[layout.LIMIT]
        if self._sent >= limit:
            return False
        most = self._credit.waiting_bytes
        if most is None:
            self._limit = limit
            return True
        waiting = self._sent - words[layout.TAKEN] + 1  # with the one in hand
        while len(self._sizes) > waiting:
            self._bytes -= self._sizes.popleft()
        return self._bytes <= most or words[layout.WANTED] > self._sent

    def _lay_out(self, data: bytes, buffers: Sequence[codec.Buffer]) -> tuple[bytes, list[Segment]]:
        """Put all that is large into a block, except for what lies in one already.

        Returns:
            The pickle, if it is small enough for the frame; the segments, of which the pickle
            is the first if it is not.
        """
        numbers = self._ring.take_released()
        if numbers:
            self.pool.reclaim(numbers)
        inline = len(data) <= INLINE_BYTES
        parts: list[codec.Buffer] = [*buffers] if inline else [memoryview(data), *buffers]
        found = self._in_place(parts) if self.pool.has_made else {}
        self._encoder.arrays.clear()
        if not parts:
            return data, []
        end, begins = 0, []
        for index, part in enumerate(parts):
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            begins.append(begin)
            end = end if index in found else begin + part.nbytes
        segments: list[Segment] = []
        block = self.pool.take(end) if len(found) < len(parts) else None
        for index, (part, begin) in enumerate(zip(parts, begins, strict=True)):
            if index in found:
                made, offset = found[index]
                segments.append((made.block, offset, part.nbytes))
                continue
            assert block is not None
            _copy(part, block, begin)
            segments.append((block, begin, part.nbytes))
        return data if inline else b"", segments

    def _in_place(self, parts: Sequence[codec.Buffer]) -> dict[int, tuple[Made, int]]:
        """Find the parts that lie in blocks which the generator has filled, and seal these."""
        found: dict[int, tuple[Made, int]] = {}
        sealed: dict[int, bool] = {}
        for index, part in enumerate(parts):
            place = self.pool.made(part) if isinstance(part, memoryview) else None
            if place is None:
                continue
            number = place[0].block.number
            if number not in sealed:
                sealed[number] = place[0].seal(self._encoder.arrays)
            if sealed[number]:
                found[index] = place
            elif not self._told_of_copies:
                self._told_of_copies = True
                _log.warning(_COPIED)
        return found

    # --- the ring ---

    def _put(self, kind: int, shard: int, number: int, table: int, body: bytes) -> None:
        """Write a frame, wait for room if need be, and wake the consumer if it waits for it."""
        if self._records:  # what was logged before it and did not fit into the socket then
            self._flush_records()
        size = _HEAD + len(body)
        if self._written + size - self._read > RING_BYTES:
            self._wait_for_room(size)
        frames, words = self._frames, self._words
        at = self._written % RING_BYTES
        end = at + size
        _pack_head(frames, at, size, table, kind, shard, number)
        frames[at + _HEAD : end] = body
        self._written = written = self._written - at + (end if end < RING_BYTES else RING_BYTES)
        if not IS_STRONG:
            self._fence()
        words[SENT] = self._sent
        words[WRITTEN] = written
        self._fence()
        if words[CONSUMER_ASLEEP]:
            self._wake_consumer()

    def _wake_consumer(self) -> None:
        """Wake the consumer if it sleeps; after something was stored for it, and a fence."""
        asleep = self._words[CONSUMER_ASLEEP]
        if asleep and asleep != self._woken:
            self._woken = asleep
            self._emit(Kind.WAKE)

    def _wait_for_room(self, size: int) -> None:
        def is_room() -> bool:
            self._read = self._words[layout.READ]
            return self._written + size - self._read <= RING_BYTES

        while not is_room():
            self._sleep(is_room)
            self.check()

    def _announce(self, segments: Sequence[Segment]) -> bytes:
        """Tell of the new blocks that a frame is about to use, and of dropped ones.

        Returns:
            The table of the segments.
        """
        for block in {segment[0].number: segment[0] for segment in segments}.values():
            if block.fd is not None:
                self._emit(Kind.BLOCK, NUMBER.pack(block.number), block.fd)
                block.close_descriptor()
            self.pool.sent(block)
        dropped = self.pool.dropped()
        for at in range(0, len(dropped), MOST_IN_PACKET):
            some = dropped[at : at + MOST_IN_PACKET]
            self._emit(Kind.DROP, b"".join(map(NUMBER.pack, some)))
        return b"".join([SEGMENT.pack(block.number, *place) for block, *place in segments])

    # --- the socket ---

    def _sleep(
        self,
        enough: Callable[[], bool] = lambda: False,
        also: int | None = None,
        phase: int = WAITING,
    ) -> None:
        """Sleep until there are orders, the consumer's end or a wake; send logs meanwhile.

        Args:
            enough: Asked once more after the consumer has been told that we sleep.
            also: A descriptor that wakes us, too, when there is something to read.
            phase: As what the time counts.
        """
        self.meter.pause(phase)
        with self._lock:
            try:
                self._send_records_locked(wait=False)
            except OSError:
                self._closed = True
            mask = select.POLLIN | (select.POLLOUT if self._records else 0)
        self._readable.modify(self._packets.fileno(), mask)
        if also is not None:
            self._readable.register(also, select.POLLIN)
        self._sleeps += 1
        self._words[layout.WORKER_ASLEEP] = self._sleeps
        self._fence()
        if not enough():
            self._readable.poll()
        self._words[layout.WORKER_ASLEEP] = 0
        if also is not None:
            self._readable.unregister(also)
        self.meter.resume()
        self._read_orders()

    def _read_orders(self) -> None:
        self._packets.drain()
        received = self._packets.received
        while received:
            self._obey(*received.popleft())
        if self._packets.ended:
            self._closed = True

    def _obey(self, data: bytes, fds: list[int]) -> None:
        kind, self._orders = PACKET.unpack_from(data)
        match kind:
            case Kind.EPOCH:
                self._epochs.append(pickle.loads(read_whole(data[PACKET.size :], fds)))
            case Kind.TASK:
                self._tasks.append((data[PACKET.size :], fds))
            case Kind.STOP:
                self._closed = True
            case _:  # Kind.WAKE
                pass

    def _emit(self, kind: int, body: bytes = b"", fd: int | None = None) -> None:
        """Send one packet, and before it what was logged before it."""
        self._flush_records()
        try:
            with self._lock:
                self._send_locked(kind, body, fd, wait=True)
        except OSError as error:
            self._closed = True
            raise Closed("the consumer left") from error

    def _flush_records(self) -> None:
        try:
            with self._lock:
                self._send_records_locked(wait=True)
        except OSError as error:
            self._closed = True
            raise Closed("the consumer left") from error

    def _send_locked(self, kind: int, body: bytes, fd: int | None, wait: bool) -> bool:
        packet = PACKET.pack(kind, self._sequence) + body
        if not self._packets.send(packet, () if fd is None else (fd,), wait=wait):
            return False
        self._sequence += 1
        self._words[layout.PACKETS] = self._sequence
        return True

    def _send_records_locked(self, wait: bool) -> None:
        while True:
            if self._lost_records and not self._records:
                self._records.append(pickle.dumps(_loss(self._lost_records).__dict__))
                self._lost_records = 0
            if not self._records:
                return
            if not self._send_record_locked(self._records[0], wait):
                return
            self._records.popleft()

    def _send_record_locked(self, data: bytes, wait: bool) -> bool:
        if len(data) <= INLINE_BYTES:
            return self._send_locked(Kind.RECORD, data, None, wait)
        fd = nameless_file(data)
        try:
            return self._send_locked(Kind.RECORD, b"", fd, wait)
        finally:
            os.close(fd)


class _Severed:
    """Keeps a forked copy of the worker, if its code runs on, from writing to the worker's ring."""

    def __init__(self, end: ItemSender) -> None:
        self._end = weakref.ref(end)

    def close(self) -> None:
        end = self._end()
        if end is not None:
            end._closed, end._limit = True, 0


def _copy(part: codec.Buffer, block: Block, begin: int) -> None:
    """Copy a part of an item to its place in a block."""
    if isinstance(part, np.ndarray):
        np.ndarray(part.shape, part.dtype, block.memory, begin)[...] = part
    else:
        block.memory[begin : begin + part.nbytes] = part


def _loss(count: int) -> logging.LogRecord:
    text = f"{count} log records of this worker were dropped: they came faster than they were read"
    return logging.LogRecord("enqueuer", logging.WARNING, __file__, 0, text, None, None)
