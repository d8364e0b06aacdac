"""The private channel between one worker process and the consumer: what the packets say.

    worker (WorkerEnd)                                           consumer (ConsumerEnd)
      HELLO ITEM END FAILURE RECORD ASK  ---------------------->  inbox, records
      orders, credits                    <----  EPOCH GRANT STOP

One writer in each direction and no lock that both sides share, so a worker that is killed
cannot leave anybody hanging. Every packet begins with its kind and its number in the sequence;
only an END is an end.

A credit is the right to send one more item. The consumer's arithmetic for one worker: credits
out + items received but not yet taken <= its quota; and one more for the item that the consumer
is just waiting for, since that one does not wait. With a bound on bytes the worker itself keeps
the account, since only it knows the size of what it has in hand.
"""

from __future__ import annotations

import enum
import logging
import pickle
import select
import struct
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from enqueuer.errors import Closed, ItemNotLoadable, TransportError
from enqueuer.messages import End, Failure, Item, Message
from enqueuer.transport import codec
from enqueuer.transport.blocks import ALIGNMENT, Block, BlockMap, BlockPool
from enqueuer.transport.packets import Packets


class Kind(enum.IntEnum):
    """What a packet is; its first byte."""

    HELLO = 0
    ITEM = 1
    END = 2
    FAILURE = 3
    RECORD = 4
    ASK = 5
    EPOCH = 10
    GRANT = 11
    STOP = 12


_HEADER = struct.Struct("<BQIQ")  # kind, sequence number, shard, item number
_FRAME = struct.Struct("<IIHH")  # bytes of pickle, block, segments, blocks dropped
_SEGMENT = struct.Struct("<QQ")  # offset in the block, bytes
_EPOCH = struct.Struct("<BQ")
_GRANT = struct.Struct("<BIIBH")  # credits, items taken, whether one is waited for, blocks home

_INLINE_BYTES = 16 * 1024  # a larger pickle goes into a block
_MOST_HOME = 4096  # blocks named in one packet
_MOST_RECORDS = 10_000  # kept while the socket is full; then they are counted and dropped


@dataclass(frozen=True)
class Credit:
    """What a worker may send before it hears more.

    Attributes:
        items: Credits to begin with.
        waiting_bytes: The most bytes of its items that may wait, or None.
        ask: Whether to tell when it has an item and no credit.
    """

    items: int
    waiting_bytes: int | None
    ask: bool


# --- the worker's end --------------------------------------------------------------------------


class WorkerEnd:
    """A process worker's Sender and Orders. `send_record` may be called by any thread."""

    def __init__(self, packets: Packets) -> None:
        self._packets = packets
        self._lock = threading.RLock()
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
                frame, block = self._frame(data, buffers, with_dropped=True)
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
                frame, block = self._frame(codec.encode_error(error), [])
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
                self._send_records(wait=False)
            except OSError:
                pass  # the consumer left; its log does not interest anybody any more
            finally:
                self._lock.release()

    def close(self) -> None:
        """Send what was logged last, then hang up."""
        with self._lock:
            try:
                self._send_records(wait=True)
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
                self._send_records(wait=False)
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
                self._epochs.append(_EPOCH.unpack(data)[1])
            case Kind.GRANT:
                _, credits, taken, wanted, count = _GRANT.unpack_from(data)
                self._credits += credits
                self._wanted = self._wanted or bool(wanted)
                for _ in range(taken):
                    self._bytes -= self._sizes.popleft()
                with self._lock:
                    for number in struct.unpack_from(f"<{count}I", data, _GRANT.size):
                        self._pool.came_home(number)
            case _:  # Kind.STOP
                self._closed = True

    def _frame(
        self, data: bytes, buffers: Sequence[memoryview], with_dropped: bool = False
    ) -> tuple[bytes, Block | None]:
        """Lay out an item: a small pickle in the packet itself, everything large in a block."""
        inline = len(data) <= _INLINE_BYTES
        parts = [*buffers] if inline else [memoryview(data), *buffers]
        segments: list[tuple[int, int]] = []
        end = 0
        for part in parts:
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            end = begin + part.nbytes
            segments.append((begin, part.nbytes))
        with self._lock:
            block = self._pool.take(end) if parts else None
            dropped = self._pool.dropped() if with_dropped else []
        for part, (begin, size) in zip(parts, segments, strict=True):
            assert block is not None
            block.memory[begin : begin + size] = part
        table = b"".join([_SEGMENT.pack(*segment) for segment in segments])
        head = _FRAME.pack(
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
        with self._lock:
            self._send_records(wait=True)
            fds = (block.fd,) if block is not None and block.fd is not None else ()
            self._put(kind, shard, number, body, fds)
            if block is not None:
                block.sent()

    def _put(
        self, kind: int, shard: int, number: int, body: bytes, fds: Sequence[int] = ()
    ) -> None:
        try:
            self._packets.send(_HEADER.pack(kind, self._sequence, shard, number) + body, fds)
        except OSError as error:
            self._closed = True
            raise Closed("the consumer left") from error
        self._sequence += 1

    def _send_records(self, wait: bool) -> None:
        if self._lost_records and len(self._records) < _MOST_RECORDS:
            self._records.append(pickle.dumps(_loss(self._lost_records).__dict__))
            self._lost_records = 0
        while self._records:
            frame, block = self._frame(self._records[0], [])
            fds = (block.fd,) if block is not None and block.fd is not None else ()
            packet = _HEADER.pack(Kind.RECORD, self._sequence, 0, 0) + frame
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


# --- the consumer's end ------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """A packet of the worker that waits for its turn, not yet decoded."""

    kind: int
    sequence: int
    shard: int
    number: int
    body: memoryview


class ConsumerEnd:
    """The consumer's end of one worker's channel. Called by one thread at a time.

    Attributes:
        inbox: What has come and was not taken.
        records: What the worker logged and nobody has handled yet.
        asked: Whether the worker has an item in hand and no credit to send it.
        greeted: Whether the worker has said HELLO.
    """

    def __init__(self, packets: Packets, credit: Credit, describe: str, batch: int) -> None:
        self._packets = packets
        self._quota = credit.items
        self._by_bytes = credit.waiting_bytes is not None
        self._describe = describe
        self._batch = batch
        self._sequence = 0
        self._out = credit.items  # credits granted and not yet used
        self._items = 0  # items in the inbox
        self._taken = 0  # items taken since the last grant
        self._wanted = False  # whether the worker knows that it is waited for
        self._blocks = BlockMap()
        self.inbox: deque[Arrival] = deque()
        self.records: deque[logging.LogRecord] = deque()
        self.asked = False
        self.greeted = False

    @property
    def ended(self) -> bool:
        """Whether the worker hung up and all that it sent has been read."""
        return self._packets.ended

    @property
    def items(self) -> int:
        """How many items wait in the inbox."""
        return self._items

    def fileno(self) -> int:
        return self._packets.fileno()

    def begin(self, epoch: int) -> None:
        """Tell the worker to run its shards for `epoch`."""
        self._tell(_EPOCH.pack(Kind.EPOCH, epoch), wait=True)

    def ask_to_stop(self) -> None:
        """Tell the worker to go home."""
        self._tell(bytes([Kind.STOP]), wait=False)
        self._packets.shutdown()

    def pump(self) -> None:
        """Read all that has come; waits for nothing.

        Raises:
            TransportError: It makes no sense.
        """
        self._packets.drain()
        received = self._packets.received
        while received:
            self._sort(*received[0])
            received.popleft()

    def take(self) -> Message:
        """Decode and return the oldest message of the inbox."""
        arrival = self.inbox[0]
        message = self._message(arrival)
        self.inbox.popleft()
        if arrival.kind == Kind.ITEM:
            self._items -= 1
            self._taken += 1
        return message

    @property
    def due(self) -> bool:
        """Whether enough has been taken for a grant to be worth a packet."""
        return self._quota - self._out - self._items >= self._batch or self._by_bytes

    @property
    def load(self) -> int:
        """Items that wait here, and those that the worker may still send."""
        return self._items + self._out

    def grant(self, room: int, wanted: bool = False) -> None:
        """Give the worker the credits that are due to it.

        Args:
            room: How many more items may wait, over all workers.
            wanted: The consumer waits for this worker and has nothing of it: one more, then.
        """
        credits = min(self._quota - self._out - self._items, room)
        if wanted and self._out <= 0:
            credits = max(credits, 1)
        credits = max(credits, 0)
        # a worker with a bound on bytes must know that it is waited for, whatever its credits
        tell_wanted = wanted and self._by_bytes and not self._wanted
        if not credits and not tell_wanted and not (self._by_bytes and self._taken):
            return
        home = self._blocks.came_home()[:_MOST_HOME]
        packet = _GRANT.pack(Kind.GRANT, credits, self._taken, wanted, len(home))
        if self._tell(packet + struct.pack(f"<{len(home)}I", *home), wait=False):
            self._out += credits
            self._taken = 0
            self._wanted = wanted
        else:
            self._blocks.still_home(home)

    def close(self) -> None:
        """Hang up; leased blocks stay as long as their arrays."""
        self._packets.close()

    def _tell(self, packet: bytes, wait: bool) -> bool:
        try:
            return self._packets.send(packet, wait=wait)
        except OSError:
            return True  # it is dead; the end of its channel says so in its turn

    def _sort(self, data: bytes, fds: Sequence[int]) -> None:
        """Put a packet where it belongs. Repeats, after an interrupt, do no harm."""
        try:
            kind, sequence, shard, number = _HEADER.unpack_from(data)
        except struct.error:
            raise TransportError(f"{self._describe} sent a malformed packet") from None
        if sequence < self._sequence:
            return  # seen already: an exception struck between sorting it and forgetting it
        if sequence > self._sequence:
            raise TransportError(
                f"{self._describe} sent packet {sequence}, but {self._sequence} was due"
            )
        body = memoryview(data)[_HEADER.size :]
        if kind in (Kind.ITEM, Kind.FAILURE, Kind.RECORD):
            body = self._blocks_of(body, fds)
        match kind:
            case Kind.HELLO:
                self.greeted = True
            case Kind.ITEM | Kind.END | Kind.FAILURE:
                self.inbox.append(Arrival(kind, sequence, shard, number, body))
                if kind == Kind.ITEM:
                    self._items += 1
                    self._out -= 1
                    self._wanted = self.asked = False
            case Kind.RECORD:
                self.records.append(logging.makeLogRecord(pickle.loads(self._open(body)[0])))
            case _:  # Kind.ASK
                self.asked = True
        self._sequence += 1

    def _blocks_of(self, body: memoryview, fds: Sequence[int]) -> memoryview:
        """Take over new blocks, forget dropped ones; return the rest of the frame."""
        _, number, _, dropped = _FRAME.unpack_from(body)
        for gone in struct.unpack_from(f"<{dropped}I", body, _FRAME.size):
            self._blocks.drop(gone)
        for fd in fds:
            self._blocks.add(number, fd)
        return body

    def _message(self, arrival: Arrival) -> Message:
        match arrival.kind:
            case Kind.ITEM:
                return self._item(arrival)
            case Kind.END:
                return End(arrival.shard)
            case _:  # Kind.FAILURE
                data, _ = self._open(arrival.body)
                return Failure(arrival.shard, arrival.number, codec.decode_error(bytes(data)))

    def _item(self, arrival: Arrival) -> Message:
        try:
            data, buffers = self._open(arrival.body)
            value = codec.decode(data, buffers)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failure = ItemNotLoadable(f"an item came, but it cannot be loaded here: {error!r}")
            failure.__cause__ = error
            return Failure(arrival.shard, arrival.number, failure)
        return Item(arrival.shard, arrival.number, value)

    def _open(self, body: memoryview) -> tuple[memoryview, Iterable[memoryview]]:
        """Return the pickle of a frame and the buffers beside it."""
        length, number, count, dropped = _FRAME.unpack_from(body)
        at = _FRAME.size + 4 * dropped
        segments = list(_SEGMENT.iter_unpack(body[at : at + count * _SEGMENT.size]))
        at += count * _SEGMENT.size
        if not count:
            return body[at : at + length], ()
        block = self._blocks.lease(number)
        views = [block[begin : begin + size] for begin, size in segments]
        if length:
            return body[at : at + length], views
        return views[0], views[1:]
