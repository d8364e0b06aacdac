"""Blocks of shared memory: a worker fills them again and again, and the consumer leases them.

    worker (BlockPool)                              consumer (BlockMap)
    free --take()--> filled --sent()--> sent -----> add(), lease(): arrays are views of it
     ^                                                |
     +---------- the number is released <------------+ the last view has died

    BlockWriter.lay_out(pickle, buffers) -> segments, copied or left where the generator wrote
    BlockWriter.announce(segments)       -> packets with new blocks, and the table of a frame

Fresh shared memory costs a page fault for each 4 kB; a block that is used again costs none. The
descriptor of a block crosses once, before its first item; then both sides close theirs and only
the mappings remain.

A generator may fill a block itself (`enqueuer.empty`). The block is sent without a copy if every
array that shows it is known, and these become read-only; it is not used again while one of them
lives. numpy keeps a reference from each view to the array that owns the memory, so counting
references shows whether there are views that the package does not know of.

A lease ends in whatever thread the garbage collector happens to run in, perhaps while a lock is
held: so it only appends to a deque. Until the frame that names a block counts as read, the map
itself keeps the lease: if the item's own code raises KeyboardInterrupt, the frame is read again.

An adapter finds the block of a tensor by its address (`mapping_at`), and has a GPU's driver pin it
for as long as it is mapped. Any thread may call that.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from enqueuer.errors import BlockMemoryError
from enqueuer.transport.channel import INLINE_BYTES, NUMBER, SEGMENT, Kind
from enqueuer.transport.item_codec import Buffer, Pieces
from enqueuer.transport.memory import (
    MAP_OPTIONS,
    allocation_error,
    close_all,
    map_shared,
    open_nameless,
)

# --- the worker -----------------------------------------------------------------------------------


class Block:
    """A piece of shared memory as its worker sees it.

    Attributes:
        number: Number that names the block on both sides.
        memory: Mapping of the block in this process.
        size: Capacity in bytes.
        fd: Descriptor, until it has been sent; then None.
        is_sent: Whether the consumer has it, or its arrays.
        taken: Time at which the block was last taken, by `time.monotonic()`.
        use: Number of times that it was taken; the release of an earlier use is passed over.
    """

    def __init__(self, number: int, memory: mmap.mmap, fd: int | None) -> None:
        self.number = number
        self.memory = memory
        self.size = len(memory)
        self.fd = fd
        self.is_sent = False
        self.taken = 0.0
        self.use = 0

    def close_descriptor(self) -> None:
        """Close the descriptor: the other side has its own now."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def close(self) -> None:
        """Give the memory back, as far as this side is concerned."""
        self.close_descriptor()
        # A block of which a view is alive goes with that view.
        with contextlib.suppress(BufferError):
            self.memory.close()


class UserBlock(NamedTuple):
    """A block that the generator fills itself, and the arrays that show it.

    Attributes:
        block: Block of the pool.
        address: Address in this process at which the block begins.
        root: All of the block as bytes; every view that numpy makes has this array as its base.
        array: Array that the generator was given.
    """

    block: Block
    address: int
    root: weakref.ref[np.ndarray]
    array: weakref.ref[np.ndarray]

    def freeze(self, known: Iterable[np.ndarray]) -> bool:
        """Make all arrays that show the block read-only; return whether all are known.

        Args:
            known: Arrays of the item that is about to be sent, and perhaps others.
        """
        root, array = self.root(), self.array()
        if root is None:
            return True
        views = {id(view): view for view in known if view.base is root}
        if array is not None:
            views[id(array)] = array
        if _views_of(root) > len(views):
            return False
        for view in views.values():
            view.flags.writeable = False
        return True


def _views_of(root: np.ndarray) -> int:
    return sys.getrefcount(root) - _NO_VIEWS


_NO_VIEWS = 0


def _calibrate() -> int:
    root = np.empty(0)
    return _views_of(root)


# As many references as the question itself takes, in this version of Python.
_NO_VIEWS = _calibrate()


# Bytes: a cache line, and enough for every dtype and SIMD load.
ALIGNMENT = 64

_PAGE = mmap.PAGESIZE
# Seconds after which a block that was not needed is given back, when the next one is taken.
_IDLE_S = 5.0


class BlockPool:
    """The blocks of one worker.

    Any thread of the worker may call `make`, the rest is for the worker's own loop.

    Args:
        keep: Number of free blocks to be kept for later; more are given back to the system.

    Attributes:
        user_blocks: Blocks that the generator fills itself, by their numbers.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lock = threading.RLock()
        # The block that was used last is at the end.
        self._free: list[Block] = []
        self._busy: dict[int, Block] = {}
        self.user_blocks: dict[int, UserBlock] = {}
        # Those of them that the consumer has released; an array of the worker may still show them.
        self._released: set[int] = set()
        self._dropped: list[int] = []
        # Number of blocks that were made; it is that of the latest block.
        self.count = 0

    def take(self, size: int) -> Block:
        """Return a block of at least `size` bytes: the smallest that is free, or a new one.

        Raises:
            BlockMemoryError: The system has no memory or no descriptor for it.
        """
        with self._lock:
            if self.user_blocks:
                self._free_user_blocks_locked()
            best = None
            for block in self._free:
                if size <= block.size <= max(4 * size, _PAGE) and (
                    best is None or block.size <= best.size
                ):
                    best = block
            if best is None:
                best = self._new_locked(size)
            else:
                self._free.remove(best)
            best.taken = time.monotonic()
            best.use += 1
            self._busy[best.number] = best
            while self._free and best.taken - self._free[0].taken > _IDLE_S:
                self._drop_locked(self._free[0])
            return best

    def make(self, shape: Sequence[SupportsIndex], dtype: np.dtype[Any]) -> np.ndarray:
        """Return an array that lies in a block of its own, for the generator to fill.

        Raises:
            BlockMemoryError: The system has no memory or no descriptor for it.
        """
        size = math.prod(map(int, shape)) * dtype.itemsize
        with self._lock:
            block = self.take(size)
            root = np.frombuffer(block.memory, np.uint8)
            array: np.ndarray = np.ndarray(shape, dtype, root)
            self.user_blocks[block.number] = UserBlock(
                block, _address_of(root), weakref.ref(root), weakref.ref(array)
            )
        return array

    def find_user_block(self, view: memoryview) -> tuple[UserBlock, int] | None:
        """Return the unsent block of the generator in which `view` lies, and its offset there."""
        address = _address_of(view)
        for user_block in list(self.user_blocks.values()):
            offset, block = address - user_block.address, user_block.block
            if 0 <= offset < block.size and not block.is_sent:
                return user_block, offset
        return None

    def sent(self, block: Block) -> None:
        """Note that the consumer has a block now, and its descriptor, too."""
        block.close_descriptor()
        block.is_sent = True

    def reclaim(self, released: Iterable[tuple[int, int]]) -> None:
        """Note that the consumer's last views of some uses of blocks are gone; idempotent."""
        with self._lock:
            for number, use in released:
                block = self._busy.get(number)
                if block is None or block.use != use:
                    continue
                if number in self.user_blocks:
                    self._released.add(number)
                else:
                    self._free_locked(self._busy.pop(number))

    def dropped(self) -> list[int]:
        """Return, once, the blocks given up since the last call, for the consumer to unmap."""
        with self._lock:
            numbers, self._dropped = self._dropped, []
        return numbers

    def close(self) -> None:
        """Give up everything."""
        with self._lock:
            for block in [*self._free, *self._busy.values()]:
                block.close()
            self._free, self._busy, self.user_blocks = [], {}, {}

    def _free_user_blocks_locked(self) -> None:
        """Free the blocks to which neither the generator nor the consumer refers any more."""
        for number, user_block in list(self.user_blocks.items()):
            if user_block.root() is not None:
                continue
            del self.user_blocks[number]
            if number in self._released or not user_block.block.is_sent:
                self._released.discard(number)
                self._free_locked(self._busy.pop(number))

    def _free_locked(self, block: Block) -> None:
        block.is_sent = False
        self._free.append(block)
        while len(self._free) > self._keep:
            self._drop_locked(self._free[0])

    def _new_locked(self, size: int) -> Block:
        capacity = max(1, -(-size // _PAGE)) * _PAGE
        # Free blocks are too small or far too large: likely the items have changed size.
        if len(self._free) >= self._keep:
            self._drop_locked(self._free[0])
        try:
            fd = open_nameless(capacity)
            try:
                memory = map_shared(fd, capacity)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise allocation_error(capacity, error) from error
        self.count += 1
        return Block(self.count, memory, fd)

    def _drop_locked(self, block: Block) -> None:
        self._free.remove(block)
        # A block that never crossed is not known on the other side.
        if block.fd is None:
            self._dropped.append(block.number)
        block.close()


_log = logging.getLogger("enqueuer")
_COPIED = (
    "an array of enqueuer.empty() is copied before it is sent, because the generator still refers "
    "to another view of it (a loop variable, for example) and could write to it: `del` that view "
    "before the yield. Each worker logs this once"
)

Part = Buffer | Pieces
"""What is copied into a block: a buffer, or a large pickle."""

Segment = tuple[Block, int, int]
"""A part of an item: its block, its offset in the block, and its size in bytes."""


class BlockWriter:
    """Put the large parts of items into blocks.

    Args:
        emit: Function that sends a packet, which announces blocks.
        arrays: List of the large arrays of the item that was encoded last.
        keep: Number of free blocks to be kept for later.

    Attributes:
        pool: Blocks of the worker.
    """

    def __init__(self, emit: Callable[..., None], arrays: list[np.ndarray], keep: int) -> None:
        self.pool = BlockPool(keep)
        self._emit = emit
        self._arrays = arrays
        self._has_warned = False

    def lay_out(
        self, data: bytes | Pieces, buffers: Sequence[Buffer]
    ) -> tuple[bytes, list[Segment]]:
        """Put all that is large into a block, except for what lies in one already.

        Returns:
            The pickle, if it is small enough for the frame; the segments, of which the pickle
            is the first if it is not.

        Raises:
            BlockMemoryError: There is no memory for a block.
        """
        parts: list[Part] = [*buffers]
        if isinstance(data, Pieces) or len(data) > INLINE_BYTES:
            parts.insert(0, data if isinstance(data, Pieces) else memoryview(data))
            data = b""
        in_place = self._in_place(parts) if self.pool.user_blocks else {}
        self._arrays.clear()
        return data, self._copied(parts, in_place)

    def _copied(self, parts: list[Part], in_place: dict[int, Segment]) -> list[Segment]:
        """Copy parts into a block of their own, but those that lie in one; return all segments."""
        if not parts:
            return []
        end, begins = 0, []
        for index, part in enumerate(parts):
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            begins.append(begin)
            end = end if index in in_place else begin + part.nbytes
        segments: list[Segment] = []
        block = self.pool.take(end) if len(in_place) < len(parts) else None
        for index, (part, begin) in enumerate(zip(parts, begins, strict=True)):
            if index in in_place:
                segments.append(in_place[index])
                continue
            assert block is not None
            copy_part(part, block, begin)
            segments.append((block, begin, part.nbytes))
        return segments

    def _in_place(self, parts: Sequence[Part]) -> dict[int, Segment]:
        """Find the parts that lie in blocks which the generator has filled, and freeze these."""
        found: dict[int, Segment] = {}
        frozen: dict[int, bool] = {}
        for index, part in enumerate(parts):
            place = self.pool.find_user_block(part) if isinstance(part, memoryview) else None
            if place is None:
                continue
            user_block, offset = place
            number = user_block.block.number
            if number not in frozen:
                frozen[number] = self._freeze(user_block)
            if frozen[number]:
                found[index] = user_block.block, offset, part.nbytes
        return found

    def _freeze(self, user_block: UserBlock) -> bool:
        is_frozen = user_block.freeze(self._arrays)
        if not is_frozen and not self._has_warned:
            self._has_warned = True
            _log.warning(_COPIED)
        return is_frozen

    def announce(self, segments: Sequence[Segment]) -> bytes:
        """Send the new blocks that a frame is about to use, and the numbers of dropped ones.

        Returns:
            The table of the segments.
        """
        table: list[bytes] = []
        for block, begin, size in segments:
            if block.fd is not None:
                self._emit(Kind.BLOCK, NUMBER.pack(block.number), (block.fd,))
            self.pool.sent(block)
            table.append(SEGMENT.pack(block.number, block.use, begin, size))
        for number in self.pool.dropped():
            self._emit(Kind.DROP, NUMBER.pack(number))
        return b"".join(table)


def copy_part(part: Part, block: Block, begin: int) -> None:
    """Copy a part of an item to its place in a block."""
    if isinstance(part, np.ndarray):
        np.ndarray(part.shape, part.dtype, block.memory, begin)[...] = part
    elif isinstance(part, Pieces):
        part.copy_to(block.memory, begin)
    else:
        block.memory[begin : begin + part.nbytes] = part


# --- the consumer ---------------------------------------------------------------------------------


def _address_of(buffer: Any) -> int:
    """Return the address in this process at which a buffer begins."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address


class Mapping(mmap.mmap):
    """A block as the consumer maps it, which runs callbacks just before it is unmapped.

    So it can be registered with a GPU's driver for as long as it lasts, and no longer.

    Attributes:
        address: Address in this process at which the block begins.
        before_unmap: Functions that are called before the block is unmapped; they must not raise.
    """

    address: int
    # A class attribute, since a block that could not be mapped has no other.
    before_unmap: Sequence[Callable[[], None]] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        self.address = _address_of(self)
        _mappings[self.address] = self

    def __del__(self) -> None:
        for callback in self.before_unmap:
            callback()


_mappings: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()


def mapping_at(address: int) -> Mapping | None:
    """Return the block of this consumer's in which an address lies; None if it lies in none.

    It takes no lock, because a fork or the collector may come at any line.
    """
    # A list, as other threads add blocks.
    for reference in _mappings.valuerefs():
        mapping = reference()
        if mapping is not None and 0 <= address - mapping.address < len(mapping):
            return mapping
    return None


# The system allows 65530 mappings, and fewer where each keeps a descriptor. A loop that keeps
# more batches of one worker than these gets copies.
_MAX_LEASED = 4096 if MAP_OPTIONS else 64


class Lease(weakref.ref[np.ndarray]):
    """A block that is lent to the arrays of an item.

    Attributes:
        key: Number of the block, and of its use.
    """

    __slots__ = ("key",)
    key: tuple[int, int]


class BlockMap:
    """The blocks of one worker as the consumer maps them, and the leases on them.

    Leases outlive the map: arrays stay valid as long as anything refers to them, also after the
    worker died and the enqueuer was stopped.

    Attributes:
        current: Blocks of the frame that is being read, by number. The reader empties it when the
            frame counts as read.
        released: Leases that have ended and that the worker has not been sent yet.
    """

    def __init__(self) -> None:
        self._memory: dict[int, Mapping] = {}
        # Why a block could not be mapped, as text: an exception that is raised grows frames of the
        # loop, and would keep the enqueuer alive.
        self._missing: dict[int, str] = {}
        self._leases: dict[int, Lease] = {}
        self.current: dict[int, np.ndarray] = {}
        self.released: deque[Lease] = deque()

    @property
    def size(self) -> tuple[int, int]:
        """Number of mapped blocks, and their bytes."""
        blocks = tuple(self._memory.values())
        return len(blocks), sum(map(len, blocks))

    def add(self, number: int, fds: list[int]) -> None:
        """Map a block that came with its descriptor, and close the descriptor.

        If that fails, `lease` raises the reason: what had come before is to be delivered first.
        """
        if not fds:
            self._missing[number] = (
                "the descriptor of an item's shared memory was lost on its way; this process has "
                "too few (`ulimit -n`): keep fewer batches, or try a smaller max_queue_size"
            )
        for fd in fds:
            size = os.fstat(fd).st_size
            try:
                self._memory[number] = Mapping(fd, size, **MAP_OPTIONS)
            except OSError as error:
                self._missing[number] = str(allocation_error(size, error))
        close_all(fds)

    def lease(self, number: int, use: int) -> memoryview:
        """Return a writable view of all of a block; the lease ends when its last slice dies.

        It may be called again for the same frame: the lease is the same.

        Raises:
            BlockMemoryError: The block could not be mapped: no memory or descriptor is left.
        """
        if number in self._missing:
            raise BlockMemoryError(self._missing[number])
        are_many = self._many_are_leased()
        anchor = self.current.get(number)
        if anchor is None:
            anchor = np.frombuffer(self._memory[number], np.uint8)
            # Kept before its end can be noticed.
            self.current[number] = anchor
        lease = self._leases.get(number)
        if lease is None or lease() is not anchor:
            lease = Lease(anchor, self.released.append)
            lease.key = number, use
            self._leases[number] = lease
        return anchor.copy().data if are_many else anchor.data

    def _many_are_leased(self) -> bool:
        if len(self._memory) <= _MAX_LEASED:
            return False
        return sum(anchor() is not None for anchor in self._leases.values()) >= _MAX_LEASED

    def drop(self, number: int) -> None:
        """Forget a block that the worker gave up."""
        self._memory.pop(number, None)
        self._missing.pop(number, None)
        self._leases.pop(number, None)

    def clear(self) -> None:
        """Forget all blocks; leased ones stay as long as their arrays."""
        for forgotten in (self._memory, self._missing, self._leases, self.current, self.released):
            forgotten.clear()
