"""The worker's end of a channel: items go out as credit allows.

    send_item() -> pickle -> large parts into blocks -> wait for credit -> a frame in the ring

An item is in the ring, where the consumer can take it, before this worker turns to the next
one. What is no item goes and comes by `SenderControl`.
"""

from __future__ import annotations

import logging
import socket
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from enqueuer.common.descriptors import close_in_children
from enqueuer.monitoring.meters import BYTES, IDLE, SENDING, WAITING, Meter, clock
from enqueuer.transport import task_queue
from enqueuer.transport.block_pool import BlockPool
from enqueuer.transport.block_writer import BlockWriter
from enqueuer.transport.error_codec import encode_error
from enqueuer.transport.frame_writer import MOST_IN_RUN, FrameWriter
from enqueuer.transport.item_codec import SCALARS, Buffer, Encoder, Pieces
from enqueuer.transport.number_bunch import LEAST, PACKED, NumberBunch
from enqueuer.transport.packets import Packets
from enqueuer.transport.protocol import INLINE_BYTES, REPORT, Credit, Kind
from enqueuer.transport.ring import (
    ASKING,
    CLAIMED,
    CONSUMER_ASLEEP,
    LIMIT,
    ORDERS,
    TAKEN,
    WANTED,
    Ring,
)
from enqueuer.transport.sender_control import SenderControl
from enqueuer.transport.small_arrays import Layouts
from enqueuer.transport.spin import Spin
from enqueuer.workers.messages import Empty, End, Epoch, Failure, Reported, Ticket

_ITEM, _STATED, _ARRAYS = int(Kind.ITEM), int(Kind.STATED), int(Kind.ARRAYS)


class ItemSender:
    """A process worker's Sender and Orders. `send_record` may be called by any thread.

    Attributes:
        meter: Meter of the worker.
        control: The worker's end of the socket.
        claims: Words for the claims of a worker with several threads.
        may_bunch: Whether the item before was a number, after which a bunch may be worth it.
    """

    def __init__(self, packets: Packets, ring: Ring, credit: Credit) -> None:
        self.meter = Meter(ring.meter)
        self.control = self._control = SenderControl(packets, ring, self.meter, Spin(credit.spins))
        self.claims = ring.claims
        encoder = Encoder()
        self._encode = encoder.encode
        self._blocks = BlockWriter(ring, self._control, encoder.arrays, keep=credit.items + 4)
        self._words, self._fence = ring.words, ring.fence
        self._writer = FrameWriter(ring, self._control)
        self._put, self._append = self._writer.put, self._writer.append
        self._pack = Layouts().encode
        self._allowance = _Allowance(ring.words, credit)
        self._asks = credit.ask
        # Tickets of the packet that was taken last.
        self._tickets: deque[Ticket] = deque()
        # Items that the times of the meter stand for.
        self._timed = 0
        # Items that may be sent without asking the allowance; stays 0 with a bound on bytes.
        self._limit = 0
        self._bunches = _Bunches()
        self.may_bunch = False
        self._severed = _Severed(self)
        close_in_children(self._severed)

    def fileno(self) -> int:
        """Return the descriptor by which orders come."""
        return self.control.fileno()

    @property
    def pool(self) -> BlockPool:
        """Blocks of the worker."""
        return self._blocks.pool

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        """Send an item, when there is credit for it.

        It is pickled and copied before this returns, so the generator may use its buffers again.

        Raises:
            Closed: The consumer left.
            ItemNotPicklable: The item cannot be sent.
            BlockMemoryError: There is no memory to send it through.
        """
        # An item that may have to wait, or has much to copy, is timed, and stands for all since
        # the last one that was timed.
        began = clock() if self._writer.sent >= self._limit else 0
        kind, table = _ITEM, 0
        # Bytes, or pieces of a large pickle, which `_prepare` puts into a block.
        data: Any
        buffers: Sequence[Buffer] = ()
        if state is not None:
            kind = _STATED
            data, buffers = self._encode((value, state))
        elif (encode := SCALARS.get(type(value))) is not None:
            data = encode(value)
            if not began and len(data) <= MOST_IN_RUN:
                if self._words[ORDERS] > self._control.orders:
                    self._control.check()
                self._append(shard, number, data)
                self._bunches.kind = type_ = type(value)
                left = self._limit - self._writer.sent
                is_asleep = self._words[CONSUMER_ASLEEP]
                self.may_bunch = left >= LEAST and type_ in PACKED and not is_asleep
                return
        elif (packed := self._pack(value)) is not None:
            layout, data = packed
            kind, table, data = _ARRAYS, len(layout), layout + data
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
        elif self._words[ORDERS] > self._control.orders:
            self._control.check()
        self._put(kind, shard, number, table, data, 1)
        if began:
            self._account(clock() - began, is_large)

    def open_bunch(self, shard: int) -> NumberBunch | None:
        """See `BunchSender`; after a number there may be a bunch of others."""
        most = self._limit - self._writer.sent
        if not self.may_bunch:
            return None
        # After a bunch one item is sent by itself, and shows the type of the next bunch.
        self.may_bunch = False
        return self._bunches.open(self._writer, shard, most, self._control.orders)

    def send_report(self, report: Reported) -> None:
        """Send a report after the current bunch, and end that; any thread may call this."""
        self._bunches.report(report)

    def close_bunch(self, bunch: NumberBunch) -> None:
        self._writer.close_bunch(bunch)
        for report in self._bunches.close():
            self.send(report)

    def send(self, message: End | Failure | Empty) -> None:
        """Send what is no item; needs no credit. Raises as `send_item`."""
        self._control.check()
        if isinstance(message, Empty):
            self._put(Kind.EMPTY, 0, message.number, 0, b"")
            return
        kind, data, buffers = self._encoded(message)
        data, segments = self._blocks.lay_out(data, buffers)
        table = self._blocks.announce(segments)
        self._put(kind, message.shard, message.number, len(table), table + data)

    def _encoded(self, message: End | Failure) -> tuple[int, bytes | Pieces, Sequence[Buffer]]:
        if isinstance(message, End):
            data: bytes | Pieces = b""
            buffers: Sequence[Buffer] = ()
            if message.state is not None:
                data, buffers = self._encode(message.state)
            return Kind.END, data, buffers
        error = encode_error(message.error)
        if isinstance(message, Reported):
            return Kind.REPORTED, REPORT.pack(message.nth, message.log) + error, ()
        return Kind.SKIPPED if message.skipped else Kind.FAILURE, error, ()

    def check(self) -> None:
        """Raise Closed if the consumer left."""
        self._control.check()

    def watch(self, waited: Callable[[int], None]) -> None:
        """Have `waited` called after each wait, with its begin."""
        self.meter.waited = waited

    def next_epoch(self) -> Epoch | None:
        """Wait for the next epoch; None when there will be none."""
        control = self._control
        # The first one may have come with the job.
        control.read_orders()
        while not control.epochs and not control.closed:
            control.sleep(phase=IDLE)
        return None if control.closed else control.epochs.popleft()

    def next_ticket(self, task_socket: socket.socket) -> Ticket | None:
        """Wait for a task, for this worker or for any; None when there will be none."""
        control = self._control
        while True:
            if self._words[ORDERS] > control.orders:
                control.read_orders()
            if control.closed:
                return None
            if self._tickets:
                ticket = self._tickets.popleft()
                self._writer.has_more = bool(self._tickets)
                return ticket
            found = control.tasks.popleft() if control.tasks else task_queue.take(task_socket)
            if found is None:
                control.sleep(also=task_socket.fileno())
                # So that the next result is timed.
                self._limit = 0
                continue
            token, number = task_queue.HEAD.unpack_from(found[0])
            self._words[CLAIMED] = token + 1
            try:
                self._tickets.extend(task_queue.unpack(*found))
            except Exception as error:
                # The user's class cannot be loaded here.
                self.send(Failure(0, number, error))

    def send_record(self, record: logging.LogRecord) -> None:
        """Send a log record without ever waiting. Called by any thread of the worker."""
        self._control.send_record(record)

    def sever(self) -> None:
        """Send nothing any more, as the process is a forked copy of the worker."""
        self._control.closed, self._limit = True, 0

    def close(self) -> None:
        """Send what was logged last, then close the channel."""
        self._control.close()
        self.pool.close()

    # --- an item ---

    def _prepare(self, data: bytes | Pieces, buffers: Sequence[Buffer]) -> tuple[bytes, bytes]:
        """Put large parts into blocks, and wait for credit.

        Returns:
            The pickle, if it is small, and the table of the parts in blocks.
        """
        self._control.check()
        if not buffers and isinstance(data, bytes) and len(data) <= INLINE_BYTES:
            self._allowance.add(len(data))
            self._wait_for_credit()
            return data, b""
        size = len(data) + sum(buffer.nbytes for buffer in buffers)
        data, segments = self._blocks.lay_out(data, buffers)
        self.meter.words[BYTES] += size
        self._allowance.add(size)
        self._wait_for_credit()
        return data, self._blocks.announce(segments)

    def _account(self, took: int, is_large: bool) -> None:
        """Add the time of an item, and of those before it that are like it, to the meter.

        Args:
            took: Nanoseconds that sending took, without waiting.
            is_large: Whether parts of it went into blocks; others are like those before it.
        """
        alike = 1 if is_large else self._writer.sent - self._timed
        self._timed = self._writer.sent
        self.meter.words[SENDING] += took * alike

    def _wait_for_credit(self) -> None:
        """Return when the current item may be sent."""
        control = self._control
        while not self._may_send():
            if self._asks:
                self._words[ASKING] = self._writer.sent + 1
                self._fence()
                control.wake_consumer()
            control.sleep(self._may_send)
            control.check()

    def _may_send(self) -> bool:
        if not self._allowance.covers(self._writer.sent):
            return False
        self._limit = self._allowance.limit
        return True


class _Allowance:
    """What the worker may send: its credits, and with a bound on bytes the sizes that wait.

    Attributes:
        limit: Items that may be sent, ever, without asking again; 0 with a bound on bytes.
    """

    def __init__(self, words: memoryview[int], credit: Credit) -> None:
        self.limit = 0
        self._words = words
        self._most_bytes = credit.waiting_bytes
        # Sizes of the items that were sent and are not known to be taken, and their sum.
        self._sizes: deque[int] = deque()
        self._bytes = 0

    def add(self, size: int) -> None:
        """Count the size of an item that is about to be sent."""
        if self._most_bytes is not None:
            self._sizes.append(size)
            self._bytes += size

    def covers(self, sent: int) -> bool:
        """Return whether one more item than `sent` may be sent."""
        words, limit = self._words, self._words[LIMIT]
        if sent >= limit:
            return False
        if self._most_bytes is None:
            self.limit = limit
            return True
        # With the current item.
        waiting = sent - words[TAKEN] + 1
        while len(self._sizes) > waiting:
            self._bytes -= self._sizes.popleft()
        return self._bytes <= self._most_bytes or words[WANTED] > sent


class _Bunches:
    """The bunches of one worker, one after the other, and the reports within them.

    Attributes:
        kind: Type of the number before.
    """

    def __init__(self) -> None:
        self.kind: type = object
        self._current: NumberBunch | None = None
        self._reports: deque[Reported] = deque()

    def open(self, writer: FrameWriter, shard: int, most: int, orders: int) -> NumberBunch | None:
        """Return a bunch, see `FrameWriter.open_bunch`."""
        self._current = writer.open_bunch(shard, self.kind, most, orders)
        return self._current

    def report(self, report: Reported) -> None:
        """Keep a report until the bunch is closed, and end it. Called by any thread."""
        self._reports.append(report)
        bunch = self._current
        if bunch is not None:
            bunch.gate.clear()

    def close(self) -> Iterator[Reported]:
        """Forget the bunch, and take its reports."""
        self._current = None
        while self._reports:
            yield self._reports.popleft()


class _Severed:
    """Keep a forked copy of the worker, if its code runs on, from writing to the worker's ring."""

    def __init__(self, end: ItemSender) -> None:
        self._end = weakref.ref(end)

    def close(self) -> None:
        end = self._end()
        if end is not None:
            end.sever()
