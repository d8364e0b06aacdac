"""The consumer's end of a channel: takes what has come over the socket; credit goes back.

    ItemReceiver: head() -> what is next; take() -> decoded items; grant() -> credit
    ReceiverControl, the socket: begin(), assign() -> packets; pump() -> frames, blocks, records

Packets are numbered, so that one which is missing is noticed.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import pickle
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from enqueuer.errors import BlockMemoryError, ItemNotLoadable, TransportError
from enqueuer.monitoring.meters import BYTES
from enqueuer.order.messages import Empty, End, Epoch, Failure, ItemTuple
from enqueuer.transport import item_codec
from enqueuer.transport.blocks import BlockMap
from enqueuer.transport.channel import (
    CREDIT,
    EPOCH,
    FRAME,
    NO_LIMIT,
    NUMBER,
    PACKET,
    RELEASED,
    SEGMENT,
    SENT,
    SENT_BEFORE,
    TICKET,
    Credit,
    Kind,
    Packets,
    Status,
)
from enqueuer.transport.errors import with_decoded_error
from enqueuer.transport.memory import read_whole


class ReceiverControl:
    """The consumer's end of the socket to one worker. Called by one thread at a time.

    Args:
        packets: The consumer's end of the socket.
        blocks: Blocks of the worker, to which new ones are added.
        name: Name of the worker, for messages.

    Attributes:
        packets: The consumer's end of the socket, which ends when the worker closes its own.
        frames: Items and other messages that were not taken: kind, size of the table, shard,
            number, and body, which begins with the table.
        items: Number of items that have come.
        asked: 1 + the number of items before the one for which the worker has asked for credit.
        records: Log records of the worker that are still to be handled.
        is_ready: Whether the packet READY has come.
    """

    def __init__(self, packets: Packets, blocks: BlockMap, name: str) -> None:
        self.frames: deque[tuple[int, int, int, int, memoryview]] = deque()
        self.items = self.asked = 0
        self.records: deque[logging.LogRecord] = deque()
        self.is_ready = False
        self.packets = packets
        self._blocks = blocks
        self._name = name
        # Packets that were read.
        self._sequence = 0
        self._was_asked = False

    # --- what is sent ---

    def begin(self, epoch: Epoch) -> None:
        """Order the worker to run its shards for `epoch`."""
        if epoch.starts is None:
            data = pickle.dumps(epoch, protocol=5)
        else:
            # States of iterators may be of any class. Most epochs have none, and the import takes
            # some milliseconds of the first start.
            from enqueuer.transport.definitions import dumps

            data = dumps(epoch, known={})
        self.send(Kind.EPOCH, data, wait=True)

    def assign(self, token: int, number: int, ticket: bytes) -> bool:
        """Send the worker a packed ticket of its own; return False if there is no room for it."""
        return self.send(Kind.TASK, ticket, TICKET.pack(token, number))

    def ask_to_stop(self) -> None:
        """Order the worker to exit. Idempotent."""
        if not self._was_asked:
            self._was_asked = True
            self.send(Kind.STOP)
            # If the socket was full, this alone is the order.
            self.packets.shutdown()

    def send(self, kind: Kind, data: bytes = b"", head: bytes = b"", wait: bool = False) -> bool:
        """Send an order; return False if there is no room for it, which `wait` waits for."""
        try:
            return self.packets.send_whole(bytes((kind,)) + head, data, wait=wait)
        except OSError:
            # The worker is dead; the end of its channel shows that in its turn.
            return True

    # --- what comes ---

    def pump(self) -> None:
        """Read all packets that have come; wait for nothing.

        Raises:
            TransportError: They make no sense.
        """
        self.packets.drain()
        received = self.packets.received
        while received:
            self._sort(*received.popleft())

    def _sort(self, data: bytes, fds: list[int]) -> None:
        """Handle a packet."""
        try:
            kind, sequence = PACKET.unpack_from(data)
        except struct.error:
            raise TransportError(f"{self._name} sent a malformed packet") from None
        if sequence != self._sequence:
            raise TransportError(
                f"{self._name} sent packet {sequence}, but {self._sequence} was due"
            )
        self._sequence += 1
        if kind <= _MESSAGE:
            self._keep(kind, data)
            return
        body = data[PACKET.size :]
        match kind:
            case Kind.READY:
                self.is_ready = True
            case Kind.BLOCK:
                self._blocks.add(NUMBER.unpack(body)[0], fds)
            case Kind.DROP:
                self._blocks.drop(NUMBER.unpack(body)[0])
            case Kind.RECORD:
                self.records.append(self._record(body, fds))
            case Kind.ASK:
                (self.asked,) = NUMBER.unpack(body)
            case _:
                raise TransportError(f"{self._name} sent a packet of kind {kind}")

    def _keep(self, kind: int, data: bytes) -> None:
        """Keep the frame of a packet until it is taken."""
        try:
            frame = kind, *FRAME.unpack_from(data, PACKET.size), memoryview(data)[_BODY:]
        except struct.error:
            raise TransportError(f"{self._name} sent a malformed frame") from None
        self.frames.append(frame)
        self.items += kind != _MESSAGE

    def _record(self, data: bytes, fds: list[int]) -> logging.LogRecord:
        try:
            return logging.makeLogRecord(pickle.loads(read_whole(data, fds)))
        except Exception as error:
            # A log record must not stop the data.
            text = f"a log record of {self._name} could not be loaded: {error!r}"
            return logging.LogRecord("enqueuer", logging.WARNING, __file__, 0, text, None, None)


_STATED, _ARRAYS, _MESSAGE = int(Kind.STATED), int(Kind.ARRAYS), int(Kind.MESSAGE)
# Where the body of a frame begins in its packet.
_BODY = PACKET.size + FRAME.size
# Blocks that are released by one packet.
_MAX_RELEASED = 1000
# What the page says before the worker has written anything.
_NOTHING = (0,) * (EPOCH + 1)


class ItemReceiver:
    """The consumer's end of one worker's channel. Called by one thread at a time.

    It is the inbox of the worker as well; see `enqueuer.backends.pool.Inbox`.

    Args:
        packets: The consumer's end of the socket.
        status: Page on which the worker says what it does.
        credit: Number of items, and of bytes, that may wait.
        name: Name of the worker, for messages.
        room: Function that returns how many more items may wait, over all workers; None: any
            number, as tickets are the bound.

    Attributes:
        control: The socket.
        read: Function that reads the packets that have come; a pool delivers log records as well.
        status: The page.
        blocks: Blocks that are shared with the worker.
        is_owing: Whether the worker's socket was full, so that credit is to be sent again.
    """

    def __init__(
        self,
        packets: Packets,
        status: Status,
        credit: Credit,
        name: str,
        room: Callable[[], int] | None,
    ) -> None:
        self.status = status
        self.blocks = BlockMap()
        self.control = ReceiverControl(packets, self.blocks, name)
        self._frames = self.control.frames
        self.read: Callable[[], None] = self.control.pump
        self.is_owing = False
        self._name, self._room = name, room
        # The message that `head` returned, if it was not removed.
        self._head: End | Failure | Empty | None = None
        # Items that were given away, and those of them that were acknowledged.
        self._delivered = 0
        self._taken = 0
        # Why the next item could not be loaded.
        self._trouble: BaseException | None = None
        self._quota = credit.items
        self._limit = NO_LIMIT if room is None else credit.items
        self._wanted = 0
        # The limit, the items taken, and the one wanted, as the worker knows them.
        self._sent_credit = self._limit, 0, 0
        self._by_bytes = credit.waiting_bytes is not None
        # So much credit is sent at once, as each packet costs as much as some small items.
        self._batch = max(1, credit.items // 8)

    @property
    def meter(self) -> Sequence[int]:
        """Record of the worker's meter. Called by any thread."""
        records = self.status.meter.read()
        return records[0] if records else _NOTHING

    @property
    def sent(self) -> tuple[int, int]:
        """Number of items that the worker has sent, and their bytes. Called by any thread."""
        words = self.meter
        return max(words[SENT], self.control.items), words[BYTES]

    @property
    def waiting(self) -> int:
        """Number of items that wait, here or in the socket."""
        return self.sent[0] - self._delivered

    def waiting_of(self, epoch: int) -> int:
        """Return how many of these items are of an epoch, if others are of the next one."""
        words = self.meter
        if words[EPOCH] in (epoch, -1):
            return self.waiting
        return max(0, words[SENT_BEFORE] - self._delivered)

    @property
    def has_message(self) -> bool:
        """Whether a message has been read and not taken."""
        return bool(self._frames)

    @property
    def is_asking(self) -> bool:
        """Whether the worker holds an item and has no credit to send it."""
        return self.control.asked > self.control.items

    @property
    def is_coming(self) -> bool:
        """Whether an item that was wanted is on its way."""
        return self._wanted > self._delivered and self.is_asking

    @property
    def load(self) -> int:
        """Number of items that wait, here or where they were given to, or may still be sent."""
        return self._limit - self._taken

    @property
    def claimed(self) -> list[int]:
        """Tokens of the tickets that the worker has taken, the last one or those not done."""
        return sorted(word - 1 for (word,) in self.status.claims.read() if word)

    def close(self) -> None:
        """Close the channel; leased blocks stay as long as their arrays."""
        self.control.packets.close()
        # That of a pool refers to this object.
        self.read = lambda: None
        # The frames of an error may keep this object until the next collection.
        self.blocks.clear()

    # --- credit ---

    def acknowledge(self) -> None:
        """Count what was given away as consumed, and let the worker send as much again."""
        if self._taken != self._delivered:
            self._taken = self._delivered
            if self._room is not None:
                self.grant(self._room())
        if self.blocks.released:
            self._send_credit()

    def grant(self, room: int, wanted: bool = False) -> None:
        """Give the worker the credits that are due to it.

        Args:
            room: Number of items that may still wait, over all workers.
            wanted: Whether the consumer waits for this worker and has nothing of it, so that one
                more credit is due.
        """
        load = self.load
        credits = min(self._quota - load, room)
        if wanted:
            self._wanted = self._delivered + 1
            credits = max(credits, 1 - load)
        self._limit += max(0, credits)
        limit, *account = self._sent_credit
        due = self._limit - limit
        has_changed = self._by_bytes and account != [self._taken, self._wanted]
        if due >= self._batch or (wanted and due) or has_changed:
            self._send_credit()

    def settle(self) -> bool:
        """Send again what there was no room for; return whether there is none still."""
        if self.is_owing:
            self._send_credit()
        return self.is_owing

    def _send_credit(self) -> None:
        """Send the worker its credit, and the blocks that were released."""
        released, account_sent = self.blocks.released, (self._limit, self._taken, self._wanted)
        keys = [released[at].key for at in range(min(len(released), _MAX_RELEASED))]
        data = CREDIT.pack(*account_sent) + b"".join(itertools.starmap(RELEASED.pack, keys))
        self.is_owing = not self.control.send(Kind.CREDIT, data)
        if self.is_owing:
            return
        self._sent_credit = account_sent
        for _ in keys:
            released.popleft()

    # --- messages ---

    def head(self) -> bool | End | Failure | Empty:
        """Return what is next: True for an item, False for nothing, or the message itself."""
        frames = self._frames
        if not frames or self.control.records:
            self.read()
        if self._head is not None or not frames:
            return self._head or False
        kind, table, shard, number, body = frames[0]
        if self._trouble is not None:
            found: End | Failure | Empty = Failure(shard, number, self._trouble)
        elif kind == _MESSAGE:
            found = self._message(shard, number, body, table)
        else:
            return True
        if isinstance(found, Failure):
            found = dataclasses.replace(found, worker=self._name)
        self._head = found
        return found

    def remove(self, message: End | Failure | Empty) -> None:
        """Forget the message that `head` returned. Idempotent."""
        if self._head is message:
            self._head = self._trouble = None
            self._delivered += self._frames.popleft()[0] != _MESSAGE
            self.blocks.current.clear()

    def take(self, count: int) -> list[ItemTuple]:
        """Take the items that are there now, up to an end or a failure."""
        frames, items = self._frames, list[ItemTuple]()
        while frames and len(items) < count and frames[0][0] != _MESSAGE:
            kind, table, shard, number, body = frames[0]
            try:
                value = self._load(kind, body, table)
            except BlockMemoryError as error:
                # The frames of its traceback have views of memory, which the garbage collector
                # cannot free in a cycle, and the enqueuer would never be collected.
                self._trouble = error.with_traceback(None)
                break
            except Exception as error:
                text = f"an item arrived, but could not be loaded here: {error!r}"
                self._trouble = ItemNotLoadable(text)
                self._trouble.__cause__ = error
                break
            frames.popleft()
            self._delivered += 1
            value, state = value if kind == _STATED else (value, None)
            items.append((shard, number, value, state))
            if table:
                self.blocks.current.clear()
        return items

    # --- frames ---

    def _load(self, kind: int, body: memoryview, table: int) -> Any:
        """Return the value in the body of a frame, which begins with a table of that size.

        Raises:
            BlockMemoryError: A block could not be mapped.
        """
        if kind == _ARRAYS:
            return item_codec.decode_arrays(bytes(body[:table]), body[table:])
        return item_codec.decode(*self._open(body, table)) if table else pickle.loads(body)

    def _message(
        self, shard: int, number: int, body: memoryview, table: int
    ) -> End | Failure | Empty:
        """Return the message of a frame that is no item."""
        try:
            data, buffers = self._open(body, table)
        except BlockMemoryError as error:
            return Failure(shard, number, error.with_traceback(None))
        message: End | Failure | Empty = with_decoded_error(item_codec.decode(data, buffers))
        return message

    def _open(self, body: memoryview, table: int) -> tuple[memoryview, list[memoryview]]:
        """Return the pickle of a frame and the buffers beside it."""
        data = body[table:]
        leases: dict[int, memoryview] = {}
        views = []
        for number, use, begin, size in SEGMENT.iter_unpack(body[:table]):
            if number not in leases:
                leases[number] = self.blocks.lease(number, use)
            views.append(leases[number][begin : begin + size])
        if data or not views:
            return data, views
        return views[0], views[1:]
