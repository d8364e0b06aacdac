"""The worker's end of a channel: items go out as credit allows.

    ItemSender.send_item() -> pickle -> large parts into blocks -> wait for credit
        -> FrameWriter.put(), a frame of its own, or append(), one more item in a run
    SenderControl, the socket: sleep() -> orders; emit() -> blocks, wake-ups; log records

An item is in the ring, where the consumer can take it, before this worker turns to the next one.

A run is a frame of many items that are each a short pickle, such as numbers. It grows by each of
them, so each can be read at once. Its size is 0 until another frame follows it. The pickles lack
their last byte, STOP, so that the consumer can load all that has come as one list.

Only the worker's own loop waits. Records may come from any thread, and even from a destructor
that the garbage collector runs in the middle of a send: so the lock is only ever tried for them,
and whichever thread holds it sends what has been queued.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from enqueuer.common.descriptors import close_in_children
from enqueuer.errors import BlockMemoryError, Closed
from enqueuer.monitoring.meters import BYTES, IDLE, SENDING, WAITING, Meter, clock
from enqueuer.transport import ring as layout
from enqueuer.transport import task_queue
from enqueuer.transport.blocks import BlockWriter
from enqueuer.transport.errors import with_encoded_error
from enqueuer.transport.item_codec import SCALARS, Buffer, Encoder, Pieces
from enqueuer.transport.memory import read_whole
from enqueuer.transport.packets import Packets, take
from enqueuer.transport.protocol import ALIGNMENT, FRAME, INLINE_BYTES, PACKET, Credit, Kind
from enqueuer.transport.ring import IS_STRONG, RING_BYTES, Ring, Spin
from enqueuer.transport.small_arrays import Layouts
from enqueuer.workers.messages import Empty, End, Epoch, Failure, Ticket

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
        packets: The worker's end of the socket.
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
        self.packets = packets
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
        if self._words[layout.ORDERS] > self.orders:
            self.read_orders()
        if self.closed:
            raise Closed("the consumer left")

    @property
    def has_orders(self) -> bool:
        """Whether packets have come that were not read."""
        return bool(self._words[layout.ORDERS] > self.orders)

    def try_flush(self) -> bool:
        """Send what was logged without waiting; return whether there is more."""
        with contextlib.suppress(Closed):
            self.flush_records(wait=False)
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
            if self._words[layout.ORDERS] > self.orders:
                self.read_orders()
            return
        mask = select.POLLIN | (select.POLLOUT if self.try_flush() else 0)
        self._readable.modify(self.packets.fileno(), mask)
        if also is not None:
            self._readable.register(also, select.POLLIN)
        self._sleeps += 1
        self._words[layout.WORKER_ASLEEP] = self._sleeps
        self._fence()
        if enough is None or not enough():
            self._readable.poll()
        self._words[layout.WORKER_ASLEEP] = 0
        if also is not None:
            self._readable.unregister(also)
        self.meter.resume()
        self.read_orders()

    def read_orders(self) -> None:
        """Read all packets that have come; wait for nothing."""
        self.packets.drain()
        received = self.packets.received
        while received:
            self._obey(*received.popleft())
        if self.packets.ended:
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
        # Kind.WAKE has ended the sleep.

    def wake_consumer(self) -> None:
        """Wake the consumer if it sleeps; call it after a store for it, and a fence."""
        asleep = self._words[layout.CONSUMER_ASLEEP]
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

    def emit(self, kind: int, body: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Send one packet, and before it what was logged before it.

        Raises:
            Closed: The consumer left.
        """
        self.flush_records(packet=(kind, body, fds))

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

    def flush_records(
        self, wait: bool = True, packet: tuple[int, bytes, Sequence[int]] | None = None
    ) -> None:
        """Send what was logged, and then a packet, if one is given.

        Args:
            wait: Whether to wait for room; without, as much is sent as there is room for.
            packet: Kind, body and descriptors of the packet.

        Raises:
            Closed: The consumer left.
        """
        try:
            with self._lock:
                self._send_records_locked(wait)
                if packet is not None:
                    self._send_locked(*packet, wait)
        except OSError as error:
            self.closed = True
            raise Closed("the consumer left") from error

    def close(self) -> None:
        """Send what was logged last, then close the socket."""
        with contextlib.suppress(Closed):
            self.flush_records()
        with self._lock:
            self.closed = True
            self.packets.close()

    def _send_locked(self, kind: int, data: bytes, fds: Sequence[int], wait: bool) -> bool:
        head = PACKET.pack(kind, self._sequence)
        if not self.packets.send_whole(head, data, fds, wait=wait):
            return False
        self._sequence += 1
        self._words[layout.PACKETS] = self._sequence
        return True

    def _send_records_locked(self, wait: bool) -> None:
        while True:
            if self._lost_records and not self.records:
                self.records.append(pickle.dumps(_loss(self._lost_records).__dict__))
                self._lost_records = 0
            try:
                if not self.records or not self._send_locked(
                    Kind.RECORD, self.records[0], (), wait
                ):
                    return
            except BlockMemoryError:
                # There is no descriptor left for a long text.
                self._lost_records += 1
            self.records.popleft()


def _loss(count: int) -> logging.LogRecord:
    text = f"{count} log records of this worker were dropped: they came faster than they were read"
    return logging.LogRecord("enqueuer", logging.WARNING, __file__, 0, text, None, None)


# Largest pickle in a run; for a larger one, a head of its own makes no difference.
MOST_IN_RUN = 256

_HEAD = FRAME.size
_pack_head = FRAME.pack_into
_RUN = int(Kind.RUN)
_SENT, _WRITTEN, _ASLEEP = layout.SENT, layout.WRITTEN, layout.CONSUMER_ASLEEP
# A run is read as a whole, and its room is free when all of it was read.
_RUN_BYTES = 4096


class FrameWriter:
    """Write the frames of one worker, when there is credit and room for them.

    Args:
        ring: Ring between the worker and the consumer.
        control: The worker's end of the socket.
        credit: Credit that the worker begins with.

    Attributes:
        sent: Number of items that were written.
        limit: Items that may be sent, ever, without asking again; 0 with a bound on bytes.
        tickets: Further tickets of the packet that the worker took last.
    """

    def __init__(self, ring: Ring, control: SenderControl, credit: Credit) -> None:
        self.sent = self.limit = 0
        self.tickets: deque[Ticket] = deque()
        self._credit = credit
        # Sizes of the items that were sent and are not known to be taken, and their sum; only
        # with a bound on bytes.
        self._waiting: deque[int] = deque()
        self._bytes = 0
        self._words, self._fence = ring.words, ring.fence
        self._frames, self._sizes = ring.frames, ring.sizes
        self._control, self._records = control, control.records
        lock = threading.Lock()
        self._take_lock, self._release_lock = lock.acquire, lock.release
        # The sleep of the consumer that was seen last; 0 if it did not sleep.
        self._asleep = 0
        # The sleep that ends with the packet of tasks, as the awaited result was sent.
        self._due = 0
        # Bytes that were written and read, ever, and how many there were before the current lap.
        self._written = self._read = self._lap = 0
        # The run that may grow: the offset of its head, that of its greatest end, which is 0 if
        # there is none, its shard and the number of its next item.
        self._run_begin = self._run_limit = 0
        self._run_shard = self._run_number = 0

    def wait_for_credit(self, size: int) -> None:
        """Return when one more item, of that size, may be sent."""
        if self._credit.waiting_bytes is not None:
            self._waiting.append(size)
            self._bytes += size
        while not self._has_credit():
            if self._credit.ask:
                self._words[layout.ASKING] = self.sent + 1
                self._fence()
                self._control.wake_consumer()
            self._control.sleep(self._has_credit)
            self._control.check()

    def _has_credit(self) -> bool:
        words, limit = self._words, self._words[layout.LIMIT]
        if self.sent >= limit:
            return False
        if self._credit.waiting_bytes is None:
            self.limit = limit
            return True
        # With the current item.
        waiting = self.sent - words[layout.TAKEN] + 1
        while len(self._waiting) > waiting:
            self._bytes -= self._waiting.popleft()
        return self._bytes <= self._credit.waiting_bytes or words[layout.WANTED] > self.sent

    def close(self) -> None:
        """Allow nothing any more; called in a forked copy of the worker, whose code may run on."""
        self.limit, self._control.closed = 0, True

    def put(
        self, kind: int, shard: int, number: int, table: int, body: bytes, items: int = 0
    ) -> None:
        """Write a frame, and wait for room if need be.

        Args:
            kind: Kind of the frame.
            shard: Index of the shard.
            number: Number of the item.
            table: Size of the table, or of the layout, at the begin of the body.
            body: All behind the head.
            items: Number of items in it: 1 or 0.
        """
        size = _HEAD + len(body)
        at = self._next_frame(size)
        frames = self._frames
        _pack_head(frames, at, size, table, kind, shard, number)
        end = at + size
        frames[at + _HEAD : end] = body
        self.sent += items
        self._written = self._lap + end
        self._align()
        self._publish(number)

    def append(self, shard: int, number: int, data: bytes) -> None:
        """Write an item, a pickle of at most `MOST_IN_RUN` bytes, into the run or into a new one.

        It must be that of a number, a text or the like, as all of a run are loaded together.
        """
        at = self._written - self._lap
        # Without STOP, which the next item overwrites.
        end = at + len(data) - 1
        if end >= self._run_limit or number != self._run_number or shard != self._run_shard:
            at = self._begin_run(shard, number, len(data))
            if not at:
                self.put(Kind.ITEM, shard, number, 0, data, items=1)
                return
            end = at + len(data) - 1
        elif self._records:
            self._control.flush_records()
        self._frames[at : end + 1] = data
        self._run_number = number + 1
        self.sent = sent = self.sent + 1
        self._written = written = self._lap + end
        if not IS_STRONG:
            self._publish(number)
            return
        # As `_publish`, without its call and that of the fence.
        words = self._words
        words[_SENT] = sent
        words[_WRITTEN] = written
        self._take_lock(False)
        self._release_lock()
        if words[_ASLEEP] != self._asleep:
            self._wake_consumer(number)

    def _begin_run(self, shard: int, number: int, size: int) -> int:
        """Begin a run with an item of that size; return its offset, 0 if the lap ends before it."""
        at = self._next_frame(_HEAD + size)
        if at + _HEAD + size > RING_BYTES:
            return 0
        _pack_head(self._frames, at, 0, 0, _RUN, shard, number)
        self._run_begin, self._run_shard = at, shard
        room = RING_BYTES - (self._written - self._read)
        self._run_limit = min(at + min(room, _RUN_BYTES), RING_BYTES)
        return at + _HEAD

    def _end_run(self) -> None:
        # A single store, as the consumer may read it at the same time.
        self._sizes[self._run_begin // 4] = self._written - self._lap - self._run_begin
        self._run_limit = 0
        self._align()

    def _align(self) -> None:
        """Go to the place of the next frame."""
        self._written += -self._written % ALIGNMENT
        if self._written - self._lap >= RING_BYTES:
            self._written = self._lap = self._lap + RING_BYTES

    def _next_frame(self, size: int) -> int:
        """Return the offset of a new frame, as soon as there is room for it."""
        # Records that were logged before it and did not fit into the socket then.
        if self._records:
            self._control.flush_records()
        if self._run_limit:
            self._end_run()
        if self._written + size - self._read > RING_BYTES:
            self._wait_for_room(size)
        return self._written - self._lap

    def _wait_for_room(self, size: int) -> None:
        def is_room() -> bool:
            self._read = self._words[layout.READ]
            return self._written + size - self._read <= RING_BYTES

        while not is_room():
            # It may sleep for the result of a task that no worker begins before there is room.
            self._control.wake_consumer()
            self._control.sleep(is_room)
            self._control.check()

    def _publish(self, number: int) -> None:
        """Let the consumer see all that was written, a message of that number last."""
        words = self._words
        if not IS_STRONG:
            self._fence()
        words[_SENT] = self.sent
        words[_WRITTEN] = self._written
        self._fence()
        if words[_ASLEEP] != self._asleep:
            self._wake_consumer(number)

    def _wake_consumer(self, number: int) -> None:
        """Wake the consumer if it sleeps until this message, and remember which sleep that was."""
        asleep, awaited = self._words[layout.CONSUMER_ASLEEP], self._words[layout.AWAITED]
        if asleep and awaited and asleep != self._due:
            if awaited >> 1 != number + 1:
                return
            self._due = asleep
        if asleep and awaited & 1 and self.tickets:
            return
        self._asleep = asleep
        if asleep:
            self._control.wake_consumer()


_ITEM, _STATED, _ARRAYS = int(Kind.ITEM), int(Kind.STATED), int(Kind.ARRAYS)


class ItemSender:
    """The Channel of a process worker. `send_record` may be called by any thread.

    Attributes:
        task_socket: Socket from which it takes tickets; None for shards.
        meter: Meter of the worker.
        control: The worker's end of the socket.
        check: Raises Closed if the consumer left.
        send_record: Sends a log record without ever waiting; called by any thread.
        blocks: The large parts of items, and the blocks of the worker.
        claims: Words for the tickets that the worker has taken.
    """

    def __init__(
        self,
        packets: Packets,
        ring: Ring,
        credit: Credit,
        task_socket: socket.socket | None = None,
    ) -> None:
        self.task_socket = task_socket
        self.meter = Meter(ring.meter)
        self.control = self._control = SenderControl(packets, ring, self.meter, Spin(credit.spins))
        self.check, self.send_record = self.control.check, self.control.send_record
        self.claims = ring.claims
        encoder = Encoder()
        self._encode = encoder.encode
        self.blocks = BlockWriter(ring, self._control.emit, encoder.arrays, keep=credit.items + 4)
        self._words, self._fence = ring.words, ring.fence
        self._writer = FrameWriter(ring, self._control, credit)
        self._pack = Layouts().encode
        self._tickets = self._writer.tickets
        # Number of the epoch that it runs.
        self._epoch = -1
        # Items that the times of the meter stand for.
        self._timed = 0
        close_in_children(self._writer)

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        """Send an item, when there is credit for it.

        It is pickled and copied before this returns, so the generator may use its buffers again.

        Raises:
            Closed: The consumer left.
            ItemNotPicklable: The item cannot be sent.
            BlockMemoryError: There is no memory to send it through.
        """
        # An item that may have to wait, or has much to copy, is timed, without its waits. One
        # without blocks stands for all since the last one that was timed.
        writer = self._writer
        began = clock() if writer.sent >= writer.limit else 0
        kind, table = _ITEM, 0
        # Bytes, or pieces of a large pickle, which `_prepare` puts into a block.
        data: Any
        buffers: Sequence[Buffer] = ()
        if state is not None:
            kind = _STATED
            data, buffers = self._encode((value, state))
        elif (encode := SCALARS.get(type(value))) is not None:
            data = encode(value)
            if len(data) <= MOST_IN_RUN:
                kind = _RUN
        elif (packed := self._pack(value)) is not None:
            head, data = packed
            kind, table, data = _ARRAYS, len(head), head + data
        else:
            data, buffers = self._encode(value)
        is_large = False
        if began or buffers or len(data) > INLINE_BYTES:
            began = began or clock()
            waited = self.meter.words[WAITING]
            data, segments = self._prepare(data, buffers)
            if segments:
                is_large, table, data = True, len(segments), segments + data
            began += self.meter.words[WAITING] - waited
        elif self._words[layout.ORDERS] > self._control.orders:
            self._control.check()
        if kind == _RUN:
            writer.append(shard, number, data)
        else:
            writer.put(kind, shard, number, table, data, 1)
        if began:
            alike = 1 if is_large else writer.sent - self._timed
            self._timed = writer.sent
            self.meter.words[SENDING] += (clock() - began) * alike

    def send(self, message: End | Failure | Empty) -> None:
        """Send what is no item; needs no credit. Raises as `send_item`."""
        self._control.check()
        shard = 0 if isinstance(message, Empty) else message.shard
        data, segments = self.blocks.lay_out(*self._encode(with_encoded_error(message)))
        table = self.blocks.announce(segments)
        self._writer.put(Kind.MESSAGE, shard, message.number, len(table), table + data)

    def next_epoch(self) -> Epoch | None:
        """Wait for the next epoch; None when there will be none."""
        control = self._control
        # The first one may have come with the job.
        control.read_orders()
        while not control.epochs and not control.closed:
            control.sleep(phase=IDLE)
        if control.closed:
            return None
        epoch = control.epochs.popleft()
        # An order may come twice.
        if epoch.number > self._epoch:
            self._epoch = epoch.number
            self._words[layout.EPOCH_AT] = 2 * self._writer.sent + epoch.number % 2
        return epoch

    def next_ticket(self) -> Ticket | None:
        """Wait for a task, for this worker or for any; None when there will be none."""
        control, task_socket = self._control, self.task_socket
        assert task_socket is not None
        while True:
            if self._words[layout.ORDERS] > control.orders:
                control.read_orders()
            if control.closed:
                return None
            if self._tickets:
                return self._tickets.popleft()
            found = control.tasks.popleft() if control.tasks else take(task_socket)
            if found is None:
                control.sleep(also=task_socket.fileno())
                # So that the next result is timed.
                self._writer.limit = 0
                continue
            token, number = task_queue.HEAD.unpack_from(found[0])
            self.claims[0] = token + 1
            try:
                self._tickets.extend(task_queue.unpack(*found))
            except Exception as error:
                # The user's class cannot be loaded here.
                self.send(Failure(0, number, error))

    def close(self) -> None:
        """Send what was logged last, then close the channel."""
        self._control.close()
        self.blocks.pool.close()

    # --- an item ---

    def _prepare(self, data: bytes | Pieces, buffers: Sequence[Buffer]) -> tuple[bytes, bytes]:
        """Put large parts into blocks, and wait for credit.

        Returns:
            The pickle, if it is small, and the table of the parts in blocks.
        """
        self._control.check()
        size = len(data) + sum(buffer.nbytes for buffer in buffers)
        if isinstance(data, bytes) and not buffers and size <= INLINE_BYTES:
            self._writer.wait_for_credit(size)
            return data, b""
        data, segments = self.blocks.lay_out(data, buffers)
        self.meter.words[BYTES] += size
        self._writer.wait_for_credit(size)
        return data, self.blocks.announce(segments)
