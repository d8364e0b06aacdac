"""The consumer's end of a channel: takes what has come off the ring; credits go back.

    ItemReceiver, the ring: head() -> what is next; items() -> decoded items
    ReceiverControl, the socket: begin(), assign(), wake() -> packets; pump() -> blocks, records

An exception (Ctrl-C) loses no message and repeats none: what has been read stays in the ring until
one step gives it on and counts it as read. Decoding a frame twice does no harm, as the leases are
the same until the frame counts as read. Packets are numbered, and one that was seen is passed over.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
import struct
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any, Literal

from enqueuer.common.catching import raised_here
from enqueuer.errors import BlockMemoryError, ItemNotLoadable, TransportError
from enqueuer.monitoring.meters import BYTES
from enqueuer.transport import item_codec, small_arrays, task_queue
from enqueuer.transport import ring as layout
from enqueuer.transport.block_map import BlockMap
from enqueuer.transport.errors import with_decoded_error
from enqueuer.transport.memory import read_whole
from enqueuer.transport.packets import Packets
from enqueuer.transport.protocol import ALIGNMENT, FRAME, NUMBER, PACKET, SEGMENT, Credit, Kind
from enqueuer.transport.ring import MOST_FRAME_BYTES, RING_BYTES, Ring
from enqueuer.workers.messages import Empty, End, Epoch, Failure, ItemTuple, Taken


class ReceiverControl:
    """The consumer's end of the socket to one worker. Called by one thread at a time.

    Args:
        packets: The consumer's end of the socket.
        ring: Ring between the worker and the consumer.
        blocks: Blocks of the worker, to which new ones are added.
        name: Name of the worker, for messages.

    Attributes:
        packets: The consumer's end of the socket, which ends when the worker closes its own.
        records: Log records of the worker that are still to be handled.
        is_ready: Whether the packet READY has come.
        woken: The sleep of the worker that was ended last.
    """

    def __init__(self, packets: Packets, ring: Ring, blocks: BlockMap, name: str) -> None:
        self.records: deque[logging.LogRecord] = deque()
        self.is_ready = False
        self.woken = 0
        self.packets = packets
        self._words, self._fence = ring.words, ring.fence
        self._blocks = blocks
        self._name = name
        # Packets that were read, and packets that were sent.
        self._sequence = 0
        self._orders = 0
        self._sleeps = 0
        self._was_asked = False

    @property
    def has_packets(self) -> bool:
        """Whether there is something to `pump`."""
        return bool(self._words[layout.PACKETS] > self._sequence)

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
        self._send(Kind.EPOCH, data, wait=True)

    def assign(self, token: int, number: int, ticket: bytes) -> None:
        """Send the worker a ticket, packed, that no other worker may take."""
        self._send(Kind.TASK, ticket, task_queue.HEAD.pack(token, number), wait=True)

    def ask_to_stop(self) -> None:
        """Order the worker to exit; again does nothing."""
        if self._was_asked:
            return
        self._send(Kind.STOP)
        # If the socket was full, this alone is the order.
        self.packets.shutdown()
        # Only now, as an exception may have struck before.
        self._was_asked = True

    def wake(self, asleep: int) -> None:
        """Wake the worker from a sleep, by its number; 0 if it does not sleep."""
        if asleep and asleep != self.woken:
            self._send(Kind.WAKE)
            # Only now, as an exception may have struck before it was sent.
            self.woken = asleep

    def arm_wake_up(self, awaited: int) -> None:
        """Ask to be woken by a packet when something comes; check once more before sleeping.

        Args:
            awaited: What must come, as in the word AWAITED; 0: anything.
        """
        self._sleeps += 1
        self._words[layout.AWAITED] = awaited
        self._words[layout.CONSUMER_ASLEEP] = self._sleeps
        self._fence()

    def disarm_wake_up(self) -> None:
        """Ask no more to be woken."""
        self._words[layout.CONSUMER_ASLEEP] = 0

    def _send(self, kind: Kind, data: bytes = b"", head: bytes = b"", wait: bool = False) -> None:
        head = PACKET.pack(kind, self._orders + 1) + head
        try:
            if not self.packets.send_whole(head, data, wait=wait):
                # The socket is full of packets that the worker has not read; these wake it, too.
                return
        except raised_here(OSError):
            # The worker is dead; the end of its channel shows that in its turn.
            return
        self._orders += 1
        self._words[layout.ORDERS] = self._orders

    # --- what comes ---

    def pump(self) -> None:
        """Read all packets that have come; wait for nothing.

        Raises:
            TransportError: They make no sense.
        """
        self.packets.drain()
        received = self.packets.received
        while received:
            self._sort(*received[0])
            received.popleft()

    def _sort(self, data: bytes, fds: list[int]) -> None:
        """Handle a packet; again does nothing."""
        try:
            kind, sequence = PACKET.unpack_from(data)
        except struct.error:
            raise TransportError(f"{self._name} sent a malformed packet") from None
        if sequence < self._sequence:
            # An exception struck between handling this packet and forgetting it.
            return
        if sequence > self._sequence:
            raise TransportError(
                f"{self._name} sent packet {sequence}, but {self._sequence} was due"
            )
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
        # Kind.WAKE has ended the sleep.
        self._sequence += 1

    def _record(self, data: bytes, fds: list[int]) -> logging.LogRecord:
        try:
            return logging.makeLogRecord(pickle.loads(read_whole(data, fds)))
        except raised_here(Exception) as error:
            # A log record must not stop the data.
            text = f"a log record of {self._name} could not be loaded: {error!r}"
            return logging.LogRecord("enqueuer", logging.WARNING, __file__, 0, text, None, None)


_loads = pickle.loads
_RUN, _STATED, _ARRAYS = int(Kind.RUN), int(Kind.STATED), int(Kind.ARRAYS)
_ITEMS = frozenset(map(int, (Kind.ITEM, Kind.STATED, Kind.ARRAYS)))
_HEAD = FRAME.size
_NO_LIMIT = 1 << 62
# Items of a run that C code takes, at least: a caller that asks for one may have code of its own
# behind it, where they would count too late.
_SHORTEST_CHAIN = 4
_NAMES = ("_given", "last", "items")
_NO_HEAD = (-1, False)


class ItemReceiver:
    """The consumer's end of one worker's channel. Called by one thread at a time.

    It is the inbox of the worker as well; see `enqueuer.backends.pool.Inbox`.

    Args:
        packets: The consumer's end of the socket.
        ring: Ring between the worker and the consumer.
        credit: Number of items, and of bytes, that may wait.
        name: Name of the worker, for messages.
        room: Function that returns how many more items may wait, over all workers; None: any
            number, as tickets are the bound.

    Attributes:
        control: The socket beside the ring.
        read: Function that reads the packets that have come; a pool delivers log records as well.
        meter: Words of the worker's meter.
        blocks: Blocks that are shared with the worker.
        position: Number of bytes of the ring that were read, ever.
    """

    def __init__(
        self,
        packets: Packets,
        ring: Ring,
        credit: Credit,
        name: str,
        room: Callable[[], int] | None,
    ) -> None:
        self._ring = ring
        self._words, self._frames = ring.words, ring.frames
        self.blocks = BlockMap()
        self.control = ReceiverControl(packets, ring, self.blocks, name)
        self.meter, self.watch = ring.meter, ring.watch
        self.position = 0
        self.read: Callable[[], None] = self.control.pump
        self._name, self._room = name, room
        # Position in the ring, and the message that `head` returned there.
        self._head: tuple[int, bool | End | Failure | Empty] = _NO_HEAD
        # The run in which the position lies, if it does: the position of its head, its shard, and
        # the number of the next item that is to be loaded.
        self._run: tuple[int, int, int] | None = None
        # The values of a run that were loaded last, how many items had been given before them,
        # their shard and the number of the first.
        self._loaded: tuple[list[Any], int, int, int] = ([], 0, 0, 0)
        # Items that were taken off the ring, and those of them that the worker knows of.
        self._given = 0
        self._taken = 0
        # Why the next item could not be loaded.
        self._trouble: BaseException | None = None
        self._quota = self._limit = credit.items
        self._by_bytes = credit.waiting_bytes is not None
        # A worker that waits for credit is woken for so many at once, and so many items are
        # taken at once: each switch between the two costs as much as many small items.
        self._batch = max(1, credit.items // 8)
        # Whether the ring was full when room was made on it last.
        self._was_full = False
        # With tickets the worker sends as it likes: these are the bound.
        self._words[layout.LIMIT] = _NO_LIMIT if room is None else credit.items

    @property
    def sent(self) -> tuple[int, int]:
        """Number of items that the worker has sent, and their bytes: in blocks, in the ring."""
        words = self._words
        return words[layout.SENT], self.meter[BYTES] + words[layout.WRITTEN]

    @property
    def waiting(self) -> int:
        """Number of items that wait in the ring."""
        waiting: int = self._words[layout.SENT] - self._given
        return waiting

    def waiting_of(self, epoch: int) -> int:
        """Return how many of these items are of an epoch, if others are of the next one."""
        # In this order: what comes in between is of the epoch that has begun.
        waiting, (before, is_odd) = self.waiting, divmod(self._words[layout.EPOCH_AT], 2)
        return waiting if is_odd == epoch % 2 else max(0, before - self._given)

    @property
    def has_message(self) -> bool:
        """Whether anything waits in the ring."""
        values, first, _, _ = self._loaded
        is_loaded = self._given - first < len(values)
        return is_loaded or bool(self._words[layout.WRITTEN] != self.position)

    @property
    def is_asking(self) -> bool:
        """Whether the worker holds an item and has no credit to send it."""
        return bool(self._words[layout.ASKING] > self._words[layout.SENT])

    @property
    def load(self) -> int:
        """Number of items that wait, here or where they were given to, or may still be sent."""
        return self._limit - self._taken

    @property
    def claimed(self) -> list[int]:
        """Tokens of the tickets that the worker has taken, the last one or those not done."""
        return sorted(word - 1 for word in self._ring.claims.tolist() if word)

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
        words, room = self._words, self._room
        # The head of a run is still needed.
        free = self.position if self._run is None else self._run[0]
        if room is not None and self._taken == self._given and words[layout.READ] == free:
            return
        # Kept until the worker is woken: an exception may strike when the room is made already.
        if words[layout.WRITTEN] - words[layout.READ] > RING_BYTES - MOST_FRAME_BYTES:
            self._was_full = True
        self._taken = self._given
        words[layout.READ] = free
        words[layout.TAKEN] = self._given
        released = self.blocks.released
        if released:
            self._ring.release(released)
        if room is not None:
            self.grant(room())
            return
        self._ring.fence()
        # It waits for room without credit.
        if self._was_full:
            self.control.wake(words[layout.WORKER_ASLEEP])
        self._was_full = False

    def grant(self, room: int, wanted: bool = False) -> None:
        """Give the worker the credits that are due to it, and wake it if it waits for them.

        Args:
            room: Number of items that may still wait, over all workers.
            wanted: Whether the consumer waits for this worker and has nothing of it, so that one
                more credit is due.
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
        if asleep and asleep != self.control.woken:
            is_worth_it = self._limit - words[layout.SENT] >= self._batch
            if wanted or is_worth_it or self._by_bytes:
                self.control.wake(asleep)

    # --- messages ---

    def head(self) -> bool | End | Failure | Empty:
        """Return what is next: True for an item, False for nothing, or the message itself."""
        control = self.control
        if control.has_packets or control.records:
            self.read()
        if not self.has_message:
            return False
        position, message = self._head
        if position == self.position:
            return message
        found = self._next()
        if found is True:
            return True
        if isinstance(found, Failure):
            found = dataclasses.replace(found, worker=self._name)
        self._head = self.position, found
        return found

    def _next(self) -> Literal[True] | End | Failure | Empty:
        """Return the next message in the ring, and begin a run; True for an item.

        Raises:
            TransportError: It makes no sense.
        """
        written = self._words[layout.WRITTEN]
        self._ring.order()
        if self._is_in_run(written):
            return True
        at = self.position % RING_BYTES
        size, table, kind, shard, number = FRAME.unpack_from(self._frames, at)
        if kind == _RUN:
            run, position = (self.position, shard, number), self.position + _HEAD
            self._run = run
            self.position = position
            return True
        if kind not in _ITEMS:
            body = self._frames[at + _HEAD : at + size]
            return self._message(kind, shard, number, body, table)
        return True if self._trouble is None else Failure(shard, number, self._trouble)

    def remove(self, message: End | Failure | Empty) -> None:
        """Forget the message that `head` returned; again does nothing."""
        position, head = self._head
        if head is message and position == self.position:
            size, _, kind, _, _ = FRAME.unpack_from(self._frames, position % RING_BYTES)
            position = _behind(position, size)
            given = self._given + (kind in _ITEMS)
            self.position = position
            self._given = given
            self._trouble = None
            self.blocks.current.clear()
        self._head = _NO_HEAD

    def items(self, most: int, taken: Taken) -> Iterator[ItemTuple]:
        """Return the items that are there now, up to an end, a failure, or another kind of item.

        No exception loses an item or repeats one, if the caller keeps them in C, as `deque.extend`
        does. `taken` notes each item.
        """
        written = self._words[layout.WRITTEN]
        self._ring.order()
        if not self._is_in_run(written):
            return self._of_frames(most, taken, written)
        if most < _SHORTEST_CHAIN:
            return self._of_run(most, taken)
        values, first, shard, number = self._loaded
        left = values[self._given - first :][:most]
        count, number = len(left), number + self._given - first
        after = self._given + count, shard, taken.items + count
        # What is written behind the items yields nothing.
        return chain(
            zip(repeat(shard), range(number, number + count), left, repeat(None), strict=False),
            filter(None, map(setattr, (self, taken, taken), _NAMES, after)),
            filter(None, map(taken.numbers.__setitem__, (shard,), (number + count,))),
        )

    def _of_frames(self, most: int, taken: Taken, written: int) -> Iterator[ItemTuple]:
        frames, unpack, numbers = self._frames, FRAME.unpack_from, taken.numbers
        load, current = self._load, self.blocks.current
        while most > 0 and self.position < written:
            at = self.position % RING_BYTES
            size, table, kind, shard, number = unpack(frames, at)
            if kind not in _ITEMS:
                return
            body = frames[at + _HEAD : at + size]
            try:
                value = load(kind, body, table)
            except BlockMemoryError as error:
                self._trouble = error
                return
            except raised_here(Exception) as error:
                # Then the item is whole at the next try.
                text = f"an item arrived, but could not be loaded here: {error!r}"
                self._trouble = ItemNotLoadable(text)
                self._trouble.__cause__ = error
                return
            if kind == _STATED:
                value, state = value
                taken.remember(shard, number, state)
                del state
            position = _behind(self.position, size)
            item = (shard, number, value, None)
            del value, body
            most -= 1
            # From here to the yield is no call and no jump.
            numbers[shard] = number + 1
            taken.last = shard
            taken.items += 1
            self.position = position
            self._given += 1
            yield item
            del item
            if table:
                current.clear()

    def _of_run(self, most: int, taken: Taken) -> Iterator[ItemTuple]:
        values, first, shard, number = self._loaded
        index = self._given - first
        number += index
        for value in values[index : index + most]:
            item = (shard, number, value, None)
            number += 1
            # From here to the yield is no call and no jump.
            taken.numbers[shard] = number
            taken.last = shard
            taken.items += 1
            self._given += 1
            yield item

    # --- frames ---

    def _load(self, kind: int, body: memoryview, table: int) -> Any:
        """Return the value in the body of a frame, which begins with a table of that size.

        Raises:
            BlockMemoryError: A block could not be mapped.
        """
        if kind == _ARRAYS:
            return small_arrays.decode(bytes(body[:table]), body[table:])
        if not table:
            return _loads(body)
        return item_codec.decode(*self._open(body, table))

    def _message(
        self, kind: int, shard: int, number: int, body: memoryview, table: int
    ) -> End | Failure | Empty:
        """Return the message of a frame that is no item.

        Raises:
            TransportError: The frame makes no sense.
        """
        if kind != Kind.MESSAGE:
            raise TransportError(f"{self._name} sent a malformed frame")
        try:
            data, buffers = self._open(body, table)
        except BlockMemoryError as error:
            return Failure(shard, number, error)
        message: End | Failure | Empty = with_decoded_error(item_codec.decode(data, buffers))
        return message

    def _open(self, body: memoryview, table: int) -> tuple[memoryview, list[memoryview]]:
        """Return the pickle of a frame and the buffers beside it."""
        data = body[table:]
        leases: dict[int, memoryview] = {}
        views = []
        for number, begin, size in SEGMENT.iter_unpack(body[:table]):
            if number not in leases:
                if number not in self.blocks:
                    # It was announced before the frame that names it.
                    self.control.pump()
                leases[number] = self.blocks.lease(number)
            views.append(leases[number][begin : begin + size])
        if data or not views:
            return data, views
        return views[0], views[1:]

    def _is_in_run(self, written: int) -> bool:
        """Return whether the next message is an item of a run; load all that have come of it.

        Args:
            written: Bytes of frames that were written, loaded before this call.
        """
        values, first, _, _ = self._loaded
        if self._given - first < len(values):
            return True
        if self._run is None:
            return False
        begin, shard, number = self._run
        # 0 as long as the run may grow: then nothing else had been written at `written`.
        size = self._ring.sizes[begin % RING_BYTES // 4]
        end = min(written, begin + size) if size else written
        if end == self.position:
            if size and end < written:
                position = _behind(begin, size)
                self._run = None
                self.position = position
            return False
        offset = begin % RING_BYTES - begin
        pickles = self._frames[offset + self.position : offset + end]
        values = pickle.loads(b"".join((pickle.MARK, pickles, pickle.LIST, pickle.STOP)))
        run, loaded = (begin, shard, number + len(values)), (values, self._given, shard, number)
        # No call stands between these stores.
        self._run = run
        self._loaded = loaded
        self.position = end
        return True


def _behind(begin: int, size: int) -> int:
    """Return the position behind a frame, which may be that of a new lap."""
    end = begin % RING_BYTES + size
    end += -end % ALIGNMENT
    return begin - begin % RING_BYTES + min(end, RING_BYTES)
