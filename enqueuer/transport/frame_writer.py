"""Writing frames into the ring, and waking the consumer if it sleeps.

    put(kind, shard, number, table, body) -> a frame of its own
    append(shard, number, pickle)         -> one more item in a run
    open_bunch(shard, kind, most)         -> numbers that C code appends to a run

A run is a frame of many items that are each a short pickle, such as numbers. It grows by each of
them, so each can be read at once. Its size is 0 until another frame follows it. The pickles lack
their last byte, STOP, so that the consumer can load all that has come as one list.
"""

from __future__ import annotations

import threading

from enqueuer.transport.number_bunch import LEAST, PACKED, NumberBunch
from enqueuer.transport.protocol import ALIGNMENT, FRAME, Kind
from enqueuer.transport.ring import (
    AWAITED,
    CONSUMER_ASLEEP,
    IS_STRONG,
    READ,
    RING_BYTES,
    SENT,
    WRITTEN,
    Ring,
)
from enqueuer.transport.sender_control import SenderControl

# Largest pickle in a run; for a larger one, a head of its own makes no difference.
MOST_IN_RUN = 256

_HEAD = FRAME.size
_pack_head = FRAME.pack_into
_RUN = int(Kind.RUN)
# A run is read as a whole, and its room is free when all of it was read.
_RUN_BYTES = 4096


class FrameWriter:
    """Write the frames of one worker.

    Args:
        ring: Ring between the worker and the consumer.
        control: The worker's end of the socket.

    Attributes:
        sent: Number of items that were written.
        has_more: Whether the worker has further tasks of the packet that it took last.
    """

    def __init__(self, ring: Ring, control: SenderControl) -> None:
        self.sent = 0
        self.has_more = False
        self._ring = ring
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
        # As `_publish`, without its call and that of the fence.
        words = self._words
        if not IS_STRONG:
            self._fence()
        words[SENT] = sent
        words[WRITTEN] = written
        if IS_STRONG:
            self._take_lock(False)
            self._release_lock()
        else:
            self._fence()
        if words[CONSUMER_ASLEEP] != self._asleep:
            self._wake_consumer(number)

    def open_bunch(self, shard: int, kind: type, most: int, orders: int) -> NumberBunch | None:
        """Return a bunch of numbers at the end of the run; None if it is not worth the calls.

        Args:
            shard: Index of the shard.
            kind: Type of the numbers.
            most: Largest number of items.
            orders: Number of orders that were read.
        """
        # Elsewhere the stores of C code would need barriers between them.
        if not IS_STRONG or shard != self._run_shard or self._records:
            return None
        at = self._written - self._lap
        most = min(most, (self._run_limit - at) // PACKED[kind][0].size)
        # A loop that sleeps is woken for each item.
        if most < LEAST or self._words[CONSUMER_ASLEEP]:
            return None
        fence, number = (self._take_lock, self._release_lock), self._run_number
        return NumberBunch(kind, most, number, at, self._ring, fence, orders, self._asleep)

    def close_bunch(self, bunch: NumberBunch) -> None:
        """Count the numbers of a bunch, and wake the consumer if it sleeps."""
        self.sent += bunch.made
        self._run_number += bunch.made
        self._written = self._words[WRITTEN]
        if self._words[CONSUMER_ASLEEP] != self._asleep:
            self._wake_consumer(self._run_number)

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
            self._read = self._words[READ]
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
        words[SENT] = self.sent
        words[WRITTEN] = self._written
        self._fence()
        if words[CONSUMER_ASLEEP] != self._asleep:
            self._wake_consumer(number)

    def _wake_consumer(self, number: int) -> None:
        """Wake the consumer if it sleeps until this message, and remember which sleep that was."""
        asleep, awaited = self._words[CONSUMER_ASLEEP], self._words[AWAITED]
        if asleep and awaited and asleep != self._due:
            if awaited >> 1 != number + 1:
                return
            self._due = asleep
        if asleep and awaited & 1 and self.has_more:
            return
        self._asleep = asleep
        if asleep:
            self._control.wake_consumer()
