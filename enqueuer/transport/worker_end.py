"""The worker's end of a channel: items go out as credit allows, orders and logs pass by.

    send(Item) -> pickle -> copy into a block -> wait for credit -> packet
    send_record(record) -> a queue -> packets, whenever the socket has room

Only the worker's own loop waits. Records may come from any thread, and even from a destructor
that the garbage collector runs in the middle of a send: so the lock is only ever tried for
them, and whoever holds it sends what has been queued.
"""

from __future__ import annotations

import logging
import pickle
import select
import struct
import threading
from collections import deque
from collections.abc import Sequence

from enqueuer.errors import Closed
from enqueuer.messages import End, Failure, Item, Message
from enqueuer.transport import codec
from enqueuer.transport.blocks import ALIGNMENT, Block, BlockPool
from enqueuer.transport.channel import (
    EPOCH,
    FRAME,
    GRANT,
    HEADER,
    INLINE_BYTES,
    SEGMENT,
    Credit,
    Kind,
)
from enqueuer.transport.packets import Packets

_MOST_RECORDS = 10_000  # kept while the socket is full; then they are counted and dropped


class WorkerEnd:
    """A process worker's Sender and Orders. `send_record` may be called by any thread."""

    def __init__(self, packets: Packets) -> None:
        self._packets = packets
        self._lock = threading.Lock()
        self._sequence = 0
        self._credit = Credit(0, None, False)
        self._credits = 0
        self._sizes: deque[int] = deque()  # of what was sent and is not yet taken
        self._bytes = 0
        self._wanted = False
        self._epochs: deque[int] = deque()
        self._closed = False
        self._pool = BlockPool(keep=2)
        self._records: deque[bytes] = deque()
        self._lost_records = 0
        self._readable = select.poll()
        self._readable.register(packets.fileno(), select.POLLIN)

    def hello(self) -> None:
        """Tell that this worker lives."""
        self._emit(Kind.HELLO)

    def open(self, credit: Credit) -> None:
        """Begin with `credit`."""
        self._credit = credit
        self._credits = credit.items
        self._pool = BlockPool(keep=credit.items + 2)

    def send(self, message: Message) -> None:
        """Send `message`; an item waits for credit.

        An item is pickled and copied before this returns, so the generator may use its buffers
        again.

        Raises:
            Closed: The consumer left.
            ItemNotPicklable: The item cannot be sent.
            BlockMemoryError: There is no memory to send it through.
        """
        match message:
            case Item(shard=shard, number=number, value=value):
                data, buffers = codec.encode(value)
                with self._lock:
                    frame, block = self._frame_locked(data, buffers, with_dropped=True)
                size = len(data) + sum(view.nbytes for view in buffers)
                del data, buffers
                self._wait_for_credit(size)
                self._emit(Kind.ITEM, shard, number, frame, block)
                self._credits -= 1
                self._wanted = False
                self._sizes.append(size)
                self._bytes += size
            case End(shard=shard):
                self._emit(Kind.END, shard)
            case Failure(shard=shard, number=number, error=error):
                data = codec.encode_error(error)
                with self._lock:
                    frame, block = self._frame_locked(data, [])
                self._emit(Kind.FAILURE, shard, number, frame, block)

    def check(self) -> None:
        """Raise Closed if the consumer left."""
        self._read_orders()
        if self._closed:
            raise Closed("the consumer left")

    def next_epoch(self) -> int | None:
        """Wait for the number of the next epoch; None when there will be none."""
        self._read_orders()  # the first may have come with the job
        while not self._epochs and not self._closed:
            self._wait()
        return None if self._closed else self._epochs.popleft()

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
            self._pool.close()

    def _wait_for_credit(self, size: int) -> None:
        """Return when an item of `size` bytes may go."""
        self.check()
        asked = False
        while not self._may_send(size):
            if self._credit.ask and not asked:
                self._emit(Kind.ASK)
                asked = True
            self._wait()
            if self._closed:
                raise Closed("the consumer left")

    def _may_send(self, size: int) -> bool:
        if self._credits <= 0:
            return False
        limit = self._credit.waiting_bytes
        return self._wanted or limit is None or self._bytes + size <= limit

    def _wait(self) -> None:
        """Sleep until there are orders, a credit, or the consumer's end; send logs meanwhile."""
        with self._lock:
            try:
                self._send_records_locked(wait=False)
            except OSError:
                self._closed = True
            mask = select.POLLIN | (select.POLLOUT if self._records else 0)
        self._readable.modify(self._packets.fileno(), mask)
        self._readable.poll()
        self._read_orders()

    def _read_orders(self) -> None:
        self._packets.drain()
        received = self._packets.received
        while received:
            self._obey(received.popleft()[0])
        if self._packets.ended:
            self._closed = True

    def _obey(self, data: bytes) -> None:
        match data[0]:
            case Kind.EPOCH:
                self._epochs.append(EPOCH.unpack(data)[1])
            case Kind.GRANT:
                _, credits, taken, wanted, count = GRANT.unpack_from(data)
                self._credits += credits
                self._wanted = self._wanted or bool(wanted)
                for _ in range(taken):
                    self._bytes -= self._sizes.popleft()
                with self._lock:
                    for number in struct.unpack_from(f"<{count}I", data, GRANT.size):
                        self._pool.came_home(number)
            case _:  # Kind.STOP
                self._closed = True

    def _frame_locked(
        self, data: bytes, buffers: Sequence[memoryview], with_dropped: bool = False
    ) -> tuple[bytes, Block | None]:
        """Lay out an item: a small pickle in the packet itself, everything large in a block."""
        inline = len(data) <= INLINE_BYTES
        parts = [*buffers] if inline else [memoryview(data), *buffers]
        segments: list[tuple[int, int]] = []
        end = 0
        for part in parts:
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            end = begin + part.nbytes
            segments.append((begin, part.nbytes))
        block = self._pool.take(end) if parts else None
        dropped = self._pool.dropped() if with_dropped else []
        for part, (begin, size) in zip(parts, segments, strict=True):
            assert block is not None
            block.memory[begin : begin + size] = part
        table = b"".join([SEGMENT.pack(*segment) for segment in segments])
        head = FRAME.pack(
            len(data) if inline else 0, block.number if block else 0, len(segments), len(dropped)
        )
        gone = struct.pack(f"<{len(dropped)}I", *dropped)
        return b"".join([head, gone, table, data if inline else b""]), block

    def _emit(
        self,
        kind: int,
        shard: int = 0,
        number: int = 0,
        body: bytes = b"",
        block: Block | None = None,
    ) -> None:
        """Send one packet, and before it what was logged before it."""
        try:
            with self._lock:
                self._send_records_locked(wait=True)
                fds = (block.fd,) if block is not None and block.fd is not None else ()
                self._packets.send(HEADER.pack(kind, self._sequence, shard, number) + body, fds)
                self._sequence += 1
                if block is not None:
                    block.sent()
        except OSError as error:
            self._closed = True
            raise Closed("the consumer left") from error

    def _send_records_locked(self, wait: bool) -> None:
        while True:
            if self._lost_records and not self._records:
                self._records.append(pickle.dumps(_loss(self._lost_records).__dict__))
                self._lost_records = 0
            if not self._records:
                return
            frame, block = self._frame_locked(self._records[0], [])
            fds = (block.fd,) if block is not None and block.fd is not None else ()
            packet = HEADER.pack(Kind.RECORD, self._sequence, 0, 0) + frame
            if not self._packets.send(packet, fds, wait=wait):
                if block is not None:
                    self._pool.came_home(block.number)
                return
            if block is not None:
                block.sent()
            self._sequence += 1
            self._records.popleft()


def _loss(count: int) -> logging.LogRecord:
    text = f"{count} log records of this worker were dropped: they came faster than they were read"
    return logging.LogRecord("enqueuer", logging.WARNING, __file__, 0, text, None, None)
