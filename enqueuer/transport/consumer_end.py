"""The consumer's end of a channel: what has come waits here for its turn; credits go back.

packets -> sort -> inbox (items, ends, failures) -> take() -> a message, decoded
                -> records
"""

from __future__ import annotations

import logging
import pickle
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from enqueuer.errors import BlockMemoryError, ItemNotLoadable, TransportError
from enqueuer.messages import End, Failure, Item, Message
from enqueuer.transport import codec
from enqueuer.transport.blocks import BlockMap
from enqueuer.transport.channel import EPOCH, FRAME, GRANT, HEADER, MOST_HOME, SEGMENT, Credit, Kind
from enqueuer.transport.packets import Packets


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
        self._tell(EPOCH.pack(Kind.EPOCH, epoch), wait=True)

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
        home = self._blocks.came_home()[:MOST_HOME]
        packet = GRANT.pack(Kind.GRANT, credits, self._taken, wanted, len(home))
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
            kind, sequence, shard, number = HEADER.unpack_from(data)
        except struct.error:
            raise TransportError(f"{self._describe} sent a malformed packet") from None
        if sequence < self._sequence:
            return  # seen already: an exception struck between sorting it and forgetting it
        if sequence > self._sequence:
            raise TransportError(
                f"{self._describe} sent packet {sequence}, but {self._sequence} was due"
            )
        body = memoryview(data)[HEADER.size :]
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
                self.records.append(self._record(body))
            case _:  # Kind.ASK
                self.asked = True
        self._sequence += 1

    def _record(self, body: memoryview) -> logging.LogRecord:
        try:
            return logging.makeLogRecord(pickle.loads(self._open(body)[0]))
        except Exception as error:  # a log must not stop the data
            text = f"a log record of {self._describe} could not be loaded: {error!r}"
            return logging.LogRecord("enqueuer", logging.WARNING, __file__, 0, text, None, None)

    def _blocks_of(self, body: memoryview, fds: Sequence[int]) -> memoryview:
        """Take over new blocks, forget dropped ones; return the rest of the frame."""
        _, number, _, dropped = FRAME.unpack_from(body)
        for gone in struct.unpack_from(f"<{dropped}I", body, FRAME.size):
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
        except BlockMemoryError as error:
            return Failure(arrival.shard, arrival.number, error)
        except Exception as error:  # not what a signal handler of this process raises meanwhile
            failure = ItemNotLoadable(f"an item came, but it cannot be loaded here: {error!r}")
            failure.__cause__ = error
            return Failure(arrival.shard, arrival.number, failure)
        return Item(arrival.shard, arrival.number, value)

    def _open(self, body: memoryview) -> tuple[memoryview, Iterable[memoryview]]:
        """Return the pickle of a frame and the buffers beside it."""
        length, number, count, dropped = FRAME.unpack_from(body)
        at = FRAME.size + 4 * dropped
        segments = list(SEGMENT.iter_unpack(body[at : at + count * SEGMENT.size]))
        at += count * SEGMENT.size
        if not count:
            return body[at : at + length], ()
        block = self._blocks.lease(number)
        views = [block[begin : begin + size] for begin, size in segments]
        if length:
            return body[at : at + length], views
        return views[0], views[1:]
