"""The consumer's end of a channel: takes what has come off the ring; credits go back.

the ring   -> items(), other() -> messages, decoded
the socket -> pump() -> new blocks, records

An exception out of a signal handler may strike on entry to a function, after a call and after a
jump back. It loses no message and repeats none: what has been read stays in the ring until it is
in safe hands, and from there to the store that counts it as read there is no such place.
"""

from __future__ import annotations

import logging
import os
import pickle
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import cloudpickle

from enqueuer.errors import BlockMemoryError, ItemNotLoadable, TransportError
from enqueuer.messages import Empty, End, Epoch, Failure, Item, Reported
from enqueuer.meters import BYTES
from enqueuer.transport import codec, task_queue
from enqueuer.transport import ring as layout
from enqueuer.transport.blocks import BlockMap, nameless_file, read_whole
from enqueuer.transport.channel import (
    FRAME,
    INLINE_BYTES,
    NUMBER,
    PACKET,
    REPORT,
    SEGMENT,
    Credit,
    Kind,
)
from enqueuer.transport.packets import Packets
from enqueuer.transport.ring import MOST_FRAME_BYTES, RING_BYTES, Ring

_ITEM, _STATED = int(Kind.ITEM), int(Kind.STATED)
_HEAD = FRAME.size
_NO_LIMIT = 1 << 62


class Taken(Protocol):
    """Where it is noted which items were taken, see `merging.ShardOrder`."""

    numbers: dict[int, int]
    last: int

    def remember(self, shard: int, number: int, state: Any) -> None:
        """Keep the state of an iterator after an item that is about to be taken."""


class ItemReceiver:
    """The consumer's end of one worker's channel. Called by one thread at a time.

    Attributes:
        meter: The words of the worker's meter.
        records: What the worker logged and nobody has handled yet.
        is_ready: Whether the packet READY has come.
        position: Bytes of the ring that were read, ever.
    """

    def __init__(self, packets: Packets, ring: Ring, credit: Credit, describe: str) -> None:
        self._packets = packets
        self._ring = ring
        self._words, self._frames = ring.words, ring.frames
        self.meter = ring.meter
        self._quota = credit.items
        self._by_bytes = credit.waiting_bytes is not None
        # A worker that waits for credit is woken for so many at once, and so many items are
        # taken at once: each switch between the two costs as much as many small items.
        self._batch = max(1, credit.items // 8)
        self._describe = describe
        self._sequence = 0  # packets read
        self._orders = 0  # packets sent
        self.position = 0
        self._given = 0  # items taken off it
        self._taken = 0  # of these, how many the worker knows of
        self._trouble: BaseException | None = None  # why the next item could not be loaded
        self._limit = credit.items
        self._sleeps = 0
        self._woken = 0  # the sleep of the worker that was ended last
        self._was_full = False  # the ring, when room was made on it last
        self._blocks = BlockMap()
        self.records: deque[logging.LogRecord] = deque()
        self.is_ready = False
        self._words[layout.LIMIT] = credit.items

    @property
    def ended(self) -> bool:
        """Whether the worker hung up and all that it sent has been read."""
        return self._packets.ended

    @property
    def sent(self) -> tuple[int, int]:
        """How many items the worker has sent, and about how many bytes: in blocks, in the ring."""
        words = self._words
        return words[layout.SENT], self.meter[BYTES] + words[layout.WRITTEN]

    @property
    def memory(self) -> tuple[int, int]:
        """How many blocks are shared with the worker, and their bytes."""
        return self._blocks.count, self._blocks.nbytes

    @property
    def waiting(self) -> int:
        """How many items wait in the ring."""
        waiting: int = self._words[layout.SENT] - self._given
        return waiting

    @property
    def has_message(self) -> bool:
        """Whether anything waits in the ring."""
        return bool(self._words[layout.WRITTEN] != self.position)

    @property
    def has_packets(self) -> bool:
        """Whether there is something to `pump`."""
        return bool(self._words[layout.PACKETS] > self._sequence)

    @property
    def is_asking(self) -> bool:
        """Whether the worker has an item in hand and no credit to send it."""
        return bool(self._words[layout.ASKING] > self._words[layout.SENT])

    @property
    def load(self) -> int:
        """Items that wait, here or with whom they were given to, and those still to be sent."""
        return self._limit - self._taken

    def fileno(self) -> int:
        return self._packets.fileno()

    # --- orders ---

    def begin(self, epoch: Epoch) -> None:
        """Tell the worker to run its shards for `epoch`."""
        data = cloudpickle.dumps(epoch, protocol=5)  # states may be of any class
        self._tell_whole(Kind.EPOCH, b"", data)

    def hand(self, token: int, number: int, ticket: bytes) -> None:
        """Give the worker a ticket, packed, that no other may take."""
        self._tell_whole(Kind.TASK, task_queue.HEAD.pack(token, number), ticket)

    @property
    def claimed(self) -> int:
        """The token of the ticket that the worker took last; -1 if it took none."""
        claimed: int = self._words[layout.CLAIMED]
        return claimed - 1

    def ask_to_stop(self) -> None:
        """Tell the worker to exit."""
        self._tell(Kind.STOP)
        self._packets.shutdown()

    @property
    def is_settled(self) -> bool:
        """Whether all that was taken off the ring, failures too, is counted as consumed."""
        return bool(self._words[layout.READ] == self.position)

    def acknowledge(self) -> None:
        """Count what was given away as consumed: its room in the ring is free again."""
        self._taken = self._given
        self._words[layout.READ] = self.position
        self._words[layout.TAKEN] = self._given
        released = self._blocks.released
        if released:
            self._ring.release(released)

    def make_room(self) -> None:
        """Acknowledge what was taken, and wake the worker if it waits for room without credit."""
        words = self._words
        # Kept until the worker is told: an exception may strike when the room is made already.
        if words[layout.WRITTEN] - words[layout.READ] > RING_BYTES - MOST_FRAME_BYTES:
            self._was_full = True
        self.acknowledge()
        self._ring.fence()
        if self._was_full:
            self._wake(words[layout.WORKER_ASLEEP])
        self._was_full = False

    def grant_all(self) -> None:
        """Let the worker send as it likes: its tickets are what bounds it."""
        self._words[layout.LIMIT] = _NO_LIMIT

    def grant(self, room: int, wanted: bool = False) -> None:
        """Give the worker the credits that are due to it, and wake it if it waits for them.

        Args:
            room: How many more items may wait, over all workers.
            wanted: The consumer waits for this worker and has nothing of it: one more, then.
        """
        words, load = self._words, self.load
        credits = min(self._quota - load, room)
        if wanted:
            words[layout.WANTED] = self._given + 1
            credits = max(credits, 1 - load)
        if credits > 0:
            self._limit += credits
            words[layout.LIMIT] = self._limit
        self._ring.fence()
        asleep = words[layout.WORKER_ASLEEP]
        if asleep and asleep != self._woken:
            is_worth_it = self._limit - words[layout.SENT] >= self._batch
            if wanted or is_worth_it or self._by_bytes:
                self._wake(asleep)

    def _wake(self, asleep: int) -> None:
        if asleep and asleep != self._woken:
            self._tell(Kind.WAKE)
            self._woken = asleep  # only now: an exception may have struck before it was told

    def arm_wake_up(self) -> None:
        """Ask to be woken by a packet when something comes; look once more before sleeping."""
        self._sleeps += 1
        self._words[layout.CONSUMER_ASLEEP] = self._sleeps
        self._ring.fence()

    def disarm_wake_up(self) -> None:
        """Ask no more to be woken."""
        self._words[layout.CONSUMER_ASLEEP] = 0

    # --- messages ---

    def items(self, most: int, taken: Taken) -> Iterator[Item]:
        """Yield the items that are there now: at most so many, up to an end or a failure.

        An exception out of a signal handler loses no item and repeats none, if the caller keeps
        them in C, as `deque.extend` does.

        Args:
            most: How many at most.
            taken: Where each item is noted that is yielded.
        """
        frames, unpack, loads = self._frames, FRAME.unpack_from, pickle.loads
        numbers, in_hand = taken.numbers, self._blocks.in_hand
        written = self._words[layout.WRITTEN]
        self._ring.order()
        while most > 0 and self.position < written:
            position = self.position
            at = position % RING_BYTES
            size, table, kind, shard, number = unpack(frames, at)
            if kind != _ITEM and kind != _STATED:
                return
            try:
                end = at + size
                body = frames[at + _HEAD : end]
                value = self._load(body, table) if table else loads(body)
            except Exception:
                self._trouble = self._why_not_loaded(body, table)
                if self._trouble is None:
                    raise  # a signal handler has raised it: the item is whole at the next try
                return
            if kind == _STATED:
                value, state = value
                taken.remember(shard, number, state)
                del state
            position += (end if end < RING_BYTES else RING_BYTES) - at
            item = Item(shard, number, value)
            del value, body
            most -= 1
            # From here to the yield is no call and no jump, and so no signal handler runs.
            numbers[shard] = number + 1
            taken.last = shard
            self.position = position
            self._given += 1
            yield item
            del item
            if table:
                in_hand.clear()

    def other(self) -> End | Failure | Empty | None:
        """Return what is next in the ring and is no item; None if it is an item.

        It stays there until `pass_over`.

        Raises:
            TransportError: It makes no sense.
        """
        self._ring.order()
        at = self.position % RING_BYTES
        size, table, kind, shard, number = FRAME.unpack_from(self._frames, at)
        body = self._frames[at + _HEAD : at + size]
        message: End | Failure | Empty
        match kind:
            case Kind.ITEM | Kind.STATED:
                if self._trouble is None:
                    return None
                message = Failure(shard, number, self._trouble)
            case Kind.END:
                message = self._end(body, table, shard, number)
            case Kind.EMPTY:
                message = Empty(number)
            case Kind.FAILURE | Kind.SKIPPED:
                error = self._error(body, table)
                message = Failure(shard, number, error, skipped=kind == Kind.SKIPPED)
            case Kind.REPORTED:
                message = self._reported(body, table, shard, number)
            case _:
                raise TransportError(f"{self._describe} sent a malformed frame")
        return message

    def pass_over(self) -> None:
        """Count what `other` returned last as read."""
        position = self.position
        at = position % RING_BYTES
        size, _, kind, _, _ = FRAME.unpack_from(self._frames, at)
        end = at + size
        position += (end if end < RING_BYTES else RING_BYTES) - at
        given = self._given + (kind in (_ITEM, _STATED))
        self.position = position
        self._given = given
        self._trouble = None
        self._blocks.in_hand.clear()

    def _why_not_loaded(self, body: memoryview, table: int) -> BaseException | None:
        """Return why an item cannot be loaded; None if it can."""
        try:
            self._load(body, table)
        except BlockMemoryError as error:
            return error
        except Exception as error:
            failure = ItemNotLoadable(f"an item came, but it cannot be loaded here: {error!r}")
            failure.__cause__ = error
            return failure
        return None

    def _end(self, body: memoryview, table: int, shard: int, number: int) -> End | Failure:
        if not body:
            return End(shard, None, number)
        try:
            return End(shard, codec.decode(*self._open(body, table)), number)
        except BlockMemoryError as error:
            return Failure(shard, number, error)

    def _error(self, body: memoryview, table: int) -> BaseException:
        try:
            data, _ = self._open(body, table)
        except BlockMemoryError as error:
            return error
        return codec.decode_error(bytes(data))

    def _reported(self, body: memoryview, table: int, shard: int, number: int) -> Failure:
        try:
            data, _ = self._open(body, table)
        except BlockMemoryError as error:
            return Failure(shard, number, error, skipped=True)
        nth, log = REPORT.unpack_from(data)
        caught = codec.decode_error(bytes(data[REPORT.size :]))
        return Reported(shard, number, caught, nth=nth, log=log)

    def _load(self, body: memoryview, table: int) -> Any:
        return codec.decode(*self._open(body, table))

    def _open(self, body: memoryview, table: int) -> tuple[memoryview, list[memoryview]]:
        """Return the pickle of a frame and the buffers beside it; the table is that long."""
        data = body[table:]
        leases: dict[int, memoryview] = {}
        views = []
        for number, begin, size in SEGMENT.iter_unpack(body[:table]):
            if number not in leases:
                leases[number] = self._lease(number)
            views.append(leases[number][begin : begin + size])
        if data or not views:
            return data, views
        return views[0], views[1:]

    def _lease(self, number: int) -> memoryview:
        if number not in self._blocks:
            self.pump()  # it was announced before the frame that names it
        return self._blocks.lease(number)

    # --- the socket ---

    def pump(self) -> None:
        """Read all packets that have come; waits for nothing.

        Raises:
            TransportError: They make no sense.
        """
        self._packets.drain()
        received = self._packets.received
        while received:
            self._sort(*received[0])
            received.popleft()

    def close(self) -> None:
        """Hang up; leased blocks stay as long as their arrays."""
        self._packets.close()
        self._blocks = BlockMap()  # the frames of an error may keep us until the next collection

    def _tell_whole(self, kind: Kind, head: bytes, data: bytes) -> None:
        """Tell something of any size: what is large goes beside the packet."""
        if len(data) <= INLINE_BYTES:
            self._tell(kind, head + data, wait=True)
            return
        fd = nameless_file(data)
        try:
            self._tell(kind, head, wait=True, fds=(fd,))
        finally:
            os.close(fd)

    def _tell(
        self, kind: Kind, body: bytes = b"", wait: bool = False, fds: Sequence[int] = ()
    ) -> None:
        packet = PACKET.pack(kind, self._orders + 1) + body
        try:
            if not self._packets.send(packet, fds, wait=wait):
                return  # the socket is full of what it has not read yet: that wakes it, too
        except OSError:
            return  # it is dead; the end of its channel says so in its turn
        self._orders += 1
        self._words[layout.ORDERS] = self._orders

    def _sort(self, data: bytes, fds: list[int]) -> None:
        """Obey a packet. Repeats, after an interrupt, do no harm."""
        try:
            kind, sequence = PACKET.unpack_from(data)
        except struct.error:
            raise TransportError(f"{self._describe} sent a malformed packet") from None
        if sequence < self._sequence:
            return  # seen already: an exception struck between sorting it and forgetting it
        if sequence > self._sequence:
            raise TransportError(
                f"{self._describe} sent packet {sequence}, but {self._sequence} was due"
            )
        body = data[PACKET.size :]
        match kind:
            case Kind.READY:
                self.is_ready = True
            case Kind.BLOCK:
                self._blocks.add(NUMBER.unpack(body)[0], fds)
            case Kind.DROP:
                for (number,) in NUMBER.iter_unpack(body):
                    self._blocks.drop(number)
            case Kind.RECORD:
                self.records.append(self._record(body, fds))
            case _:  # Kind.WAKE
                pass
        self._sequence += 1

    def _record(self, data: bytes, fds: list[int]) -> logging.LogRecord:
        try:
            return logging.makeLogRecord(pickle.loads(read_whole(data, fds)))
        except Exception as error:  # a log must not stop the data
            text = f"a log record of {self._describe} could not be loaded: {error!r}"
            return logging.LogRecord("enqueuer", logging.WARNING, __file__, 0, text, None, None)
