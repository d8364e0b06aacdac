"""The consumer's end of a channel: takes what has come off the ring; credits go back.

the ring   -> items(), other() -> messages, decoded
the socket -> pump() -> new blocks, records

An exception out of a signal handler may strike on entry to a function, after a call and after a
jump back. It loses no message and repeats none: what has been read stays in the ring until it is
in safe hands, and from there to the store that counts it as read there is no such place.
"""

from __future__ import annotations

import logging
import pickle
from collections import deque
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

from enqueuer.monitoring.meters import BYTES
from enqueuer.transport.block_map import BlockMap
from enqueuer.transport.frame_decoder import FrameDecoder
from enqueuer.transport.packets import Packets
from enqueuer.transport.protocol import ALIGNMENT, FRAME, Credit, Kind, Taken
from enqueuer.transport.receiver_control import ReceiverControl
from enqueuer.transport.ring import (
    ASKING,
    CLAIMED,
    LIMIT,
    MOST_FRAME_BYTES,
    READ,
    RING_BYTES,
    SENT,
    TAKEN,
    WANTED,
    WORKER_ASLEEP,
    WRITTEN,
    Ring,
)
from enqueuer.workers.messages import Empty, End, Epoch, Failure, ItemTuple

_RUN, _STATED = int(Kind.RUN), int(Kind.STATED)
_ITEMS = frozenset(map(int, (Kind.ITEM, Kind.STATED, Kind.ARRAYS)))
_HEAD = FRAME.size
_NO_LIMIT = 1 << 62
# Items of a run that C code takes, at least.
_SHORTEST_CHAIN = 4
_NAMES = ("_given", "last")


class ItemReceiver:
    """The consumer's end of one worker's channel. Called by one thread at a time.

    Args:
        packets: The consumer's end of the socket.
        ring: Ring between the worker and the consumer.
        credit: Number of items, and of bytes, that may wait.
        describe: Name of the worker, for messages.

    Attributes:
        meter: Words of the worker's meter.
        records: Log records of the worker that are still to be handled.
        position: Number of bytes of the ring that were read, ever.
    """

    def __init__(self, packets: Packets, ring: Ring, credit: Credit, describe: str) -> None:
        self._ring = ring
        self._words, self._frames = ring.words, ring.frames
        self._blocks = BlockMap()
        self._control = ReceiverControl(packets, ring, self._blocks, describe)
        self._decoder = FrameDecoder(self._blocks, self._control.pump, describe)
        self.meter = ring.meter
        self.records: deque[logging.LogRecord] = self._control.records
        self.position = 0
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
        self._words[LIMIT] = credit.items

    @property
    def sent(self) -> tuple[int, int]:
        """Number of items that the worker has sent, and their bytes: in blocks, in the ring."""
        words = self._words
        return words[SENT], self.meter[BYTES] + words[WRITTEN]

    @property
    def memory(self) -> tuple[int, int]:
        """Number of blocks that are shared with the worker, and their bytes."""
        return self._blocks.count, self._blocks.nbytes

    @property
    def waiting(self) -> int:
        """Number of items that wait in the ring."""
        waiting: int = self._words[SENT] - self._given
        return waiting

    @property
    def has_message(self) -> bool:
        """Whether anything waits in the ring."""
        values, first, _, _ = self._loaded
        is_loaded = self._given - first < len(values)
        return is_loaded or bool(self._words[WRITTEN] != self.position)

    @property
    def is_asking(self) -> bool:
        """Whether the worker holds an item and has no credit to send it."""
        return bool(self._words[ASKING] > self._words[SENT])

    @property
    def load(self) -> int:
        """Number of items that wait, here or where they were given to, or may still be sent."""
        return self._limit - self._taken

    @property
    def claimed(self) -> list[int]:
        """Tokens of the tickets that the worker has taken, the last one or those not done."""
        words = [self._words[CLAIMED], *self._ring.claims.tolist()]
        return sorted(word - 1 for word in words if word)

    @property
    def is_acknowledged(self) -> bool:
        """Whether all that was taken off the ring, failures too, is counted as consumed."""
        return self._taken == self._given and bool(self._words[READ] == self._free)

    @property
    def _free(self) -> int:
        """Position before which the worker may write again; the head of a run is still needed."""
        return self.position if self._run is None else self._run[0]

    # --- the socket ---

    @property
    def ended(self) -> bool:
        """Whether the worker closed its end and all that it sent has been read."""
        return self._control.ended

    @property
    def is_ready(self) -> bool:
        """Whether the worker has reported that it lives."""
        return self._control.is_ready

    @property
    def has_packets(self) -> bool:
        """Whether there is something to `pump`."""
        return self._control.has_packets

    def fileno(self) -> int:
        return self._control.fileno()

    def pump(self) -> None:
        """Read all packets that have come; wait for nothing.

        Raises:
            TransportError: They make no sense.
        """
        self._control.pump()

    def begin(self, epoch: Epoch) -> None:
        """Order the worker to run its shards for `epoch`."""
        self._control.begin(epoch)

    def assign(self, token: int, number: int, ticket: bytes) -> None:
        """Send the worker a ticket, packed, that no other worker may take."""
        self._control.assign(token, number, ticket)

    def ask_to_stop(self) -> None:
        """Order the worker to exit."""
        self._control.ask_to_stop()

    def arm_wake_up(self, awaited: int = 0) -> None:
        """Ask to be woken by a packet when something comes; check once more before sleeping.

        Args:
            awaited: What must come, as in the word AWAITED; 0: anything.
        """
        self._control.arm_wake_up(awaited)

    def disarm_wake_up(self) -> None:
        """Ask no more to be woken."""
        self._control.disarm_wake_up()

    def close(self) -> None:
        """Close the channel; leased blocks stay as long as their arrays."""
        self._control.close()
        # The frames of an error may keep this object until the next collection.
        self._blocks.clear()

    # --- credit ---

    def acknowledge(self) -> None:
        """Count what was given away as consumed: its room in the ring is free again."""
        self._taken = self._given
        self._words[READ] = self._free
        self._words[TAKEN] = self._given
        released = self._blocks.released
        if released:
            self._ring.release(released)

    def make_room(self) -> None:
        """Acknowledge what was taken, and wake the worker if it waits for room without credit."""
        words = self._words
        # Kept until the worker is woken: an exception may strike when the room is made already.
        if words[WRITTEN] - words[READ] > RING_BYTES - MOST_FRAME_BYTES:
            self._was_full = True
        self.acknowledge()
        self._ring.fence()
        if self._was_full:
            self._control.wake(words[WORKER_ASLEEP])
        self._was_full = False

    def grant_all(self) -> None:
        """Let the worker send as it likes: the bound is kept by its tickets."""
        self._words[LIMIT] = _NO_LIMIT

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
            words[WANTED] = self._given + 1
            credits = max(credits, 1 - load)
        if credits > 0:
            self._limit += credits
            words[LIMIT] = self._limit
        self._ring.fence()
        asleep = words[WORKER_ASLEEP]
        if asleep and asleep != self._control.woken:
            is_worth_it = self._limit - words[SENT] >= self._batch
            if wanted or is_worth_it or self._by_bytes:
                self._control.wake(asleep)

    # --- messages ---

    def items(self, most: int, taken: Taken) -> Iterator[ItemTuple]:
        """Return the items that are there now, up to an end or a failure.

        An exception out of a signal handler loses no item and repeats none, if the caller keeps
        them in C, as `deque.extend` does. `taken` notes each item.
        """
        written = self._words[WRITTEN]
        self._ring.order()
        if most < _SHORTEST_CHAIN or not self._is_in_run(written):
            return self._one_by_one(most, taken, written)
        values, first, shard, number = self._loaded
        left = values[self._given - first :][:most]
        count, number = len(left), number + self._given - first
        # What is written behind the items of the run yields nothing.
        return chain(
            zip(repeat(shard), range(number, number + count), left, repeat(None), strict=False),
            filter(None, map(setattr, (self, taken), _NAMES, (self._given + count, shard))),
            filter(None, map(taken.numbers.__setitem__, (shard,), (number + count,))),
            self._one_by_one(most - count, taken, written),
        )

    def _one_by_one(self, most: int, taken: Taken, written: int) -> Iterator[ItemTuple]:
        frames, unpack, numbers = self._frames, FRAME.unpack_from, taken.numbers
        load, current = self._decoder.load, self._blocks.current
        while most > 0:
            if self._is_in_run(written):
                values, first, shard, number = self._loaded
                index = self._given - first
                number += index
                for value in values[index : index + most]:
                    item = (shard, number, value, None)
                    number += 1
                    most -= 1
                    # From here to the yield is no call and no jump, and so no handler runs.
                    numbers[shard] = number
                    taken.last = shard
                    self._given += 1
                    yield item
                continue
            if self.position >= written:
                return
            at = self.position % RING_BYTES
            size, table, kind, shard, number = unpack(frames, at)
            if kind == _RUN:
                run = self.position, shard, number
                position = self.position + _HEAD
                self._run = run
                self.position = position
                continue
            if kind not in _ITEMS:
                return
            body = frames[at + _HEAD : at + size]
            try:
                value = load(kind, body, table)
            except Exception:
                self._trouble = self._decoder.why_not_loaded(kind, body, table)
                if self._trouble is None:
                    # A signal handler has raised it: the item is whole at the next try.
                    raise
                return
            if kind == _STATED:
                value, state = value
                taken.remember(shard, number, state)
                del state
            position = _behind(self.position, size)
            item = (shard, number, value, None)
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
                current.clear()

    def other(self) -> End | Failure | Empty | None:
        """Return the next message in the ring; None if it is an item that can be loaded.

        It stays there until `pass_over`.

        Raises:
            TransportError: It makes no sense.
        """
        written = self._words[WRITTEN]
        self._ring.order()
        if self._is_in_run(written):
            return None
        at = self.position % RING_BYTES
        size, table, kind, shard, number = FRAME.unpack_from(self._frames, at)
        if kind == _RUN:
            return None
        if kind not in _ITEMS:
            body = self._frames[at + _HEAD : at + size]
            return self._decoder.message(kind, shard, number, body, table)
        return None if self._trouble is None else Failure(shard, number, self._trouble)

    def pass_over(self) -> None:
        """Count what `other` returned last as read."""
        size, _, kind, _, _ = FRAME.unpack_from(self._frames, self.position % RING_BYTES)
        position = _behind(self.position, size)
        given = self._given + (kind in _ITEMS)
        self.position = position
        self._given = given
        self._trouble = None
        self._blocks.current.clear()

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
        # These stores need no call: no exception of a signal handler can strike between them.
        self._run = run
        self._loaded = loaded
        self.position = end
        return True


def _behind(begin: int, size: int) -> int:
    """Return the position behind a frame, which may be that of a new lap."""
    end = begin % RING_BYTES + size
    end += -end % ALIGNMENT
    return begin - begin % RING_BYTES + min(end, RING_BYTES)
