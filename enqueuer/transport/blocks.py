"""Shared-memory blocks, written by one worker, read by the consumer, and used again and again.

    worker (BlockPool)                              consumer (BlockMap)
    FREE --take()--> FILLING --sent()--> SENT ----> LEASED: arrays are views of it
     ^                                                |
     +---------- the number is released <------------+ the last view has died

Fresh shared memory costs a page fault for each 4 kB; a block that is used again costs none. A
block is a file without a name (a memfd, elsewhere an unlinked temporary file): nothing appears
in /dev/shm and nothing can be left behind. Its descriptor crosses once, before its first item;
then both sides close theirs and only the mappings remain.

A lease ends in whatever thread the garbage collector happens to run in, perhaps while a lock is
held: so it only appends to a deque. A function in C does that, so that no exception of a signal
handler can lose it. Until the frame that names a block counts as read, the map itself keeps the
lease: an exception that strikes in the middle of a frame must not release the block.

A generator may fill a block itself (`make`). It is sent without a copy if every array that
shows it is known, and these become read-only; it is not used again while one of them lives.
"""

from __future__ import annotations

import bisect
import contextlib
import enum
import errno
import math
import mmap
import os
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from enqueuer.errors import BlockMemoryError
from enqueuer.transport import is_portable

OUT_OF_BAND_BYTES = 16 * 1024  # smaller buffers are cheaper inside the pickle
ALIGNMENT = 64  # bytes; a cache line, and enough for every dtype and SIMD load

_PAGE = mmap.PAGESIZE
_IDLE_S = 5.0  # a block that was not needed for so long is given back, when the next is taken
# Before Python 3.13 each mapping keeps a descriptor, of which a process may have 1024; the system
# allows 65530 mappings. Who keeps more batches of one worker than these gets copies.
_UNTRACKED: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
_MOST_LEASED = 4096 if _UNTRACKED else 64


def open_nameless(size: int) -> int:
    """Return a descriptor of `size` bytes of memory that has no name.

    The memory is reserved now, so that a lack of it is an error here and no bus error later.

    Raises:
        OSError: There is no room, or no descriptor left.
    """
    fd = _new_memfd()
    if fd is None:
        fd, path = tempfile.mkstemp(prefix=f"enqueuer-{os.getpid()}-")
        os.unlink(path)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
        else:
            _write_zeros(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


_is_refused = False  # whether the system has refused a memfd, as it will again
_LACKS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # of what a file would need as well


def _new_memfd() -> int | None:
    """Return a new memfd; None where there are none: elsewhere than on Linux, or in a sandbox.

    Raises:
        OSError: There is no room, or no descriptor left.
    """
    global _is_refused
    if not _has_memfd():
        return None
    try:
        return os.memfd_create("enqueuer", os.MFD_CLOEXEC)
    except OSError as error:
        if error.errno in _LACKS:
            raise
        _is_refused = True
        return None


def _has_memfd() -> bool:
    return hasattr(os, "memfd_create") and not _is_refused and not is_portable()


def remove_names_of(pid: int) -> None:
    """Remove what a process left that was killed before it could make its memory nameless."""
    if not _has_memfd():
        for path in Path(tempfile.gettempdir()).glob(f"enqueuer-{pid}-*"):
            path.unlink(missing_ok=True)


def nameless_file(data: bytes) -> int:
    """Return a descriptor of memory without a name that holds `data`; raises as `open_nameless`."""
    fd = open_nameless(len(data))
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd


def close_all(fds: list[int]) -> None:
    """Close descriptors and forget them: whoever tries again, after an interrupt, finds none."""
    # Nothing but C runs between forgetting one and closing it, as in packets.py.
    deque(map(os.close, map(fds.pop, repeat(0, len(fds)))), maxlen=0)


def read_whole(data: bytes, fds: list[int]) -> bytes:
    """Return what came in a packet, or beside it in a nameless file; closes the descriptors."""
    try:
        for fd in fds:
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:  # nobody moves an offset
                data = memory[:]
        return data
    finally:
        close_all(fds)


def _write_zeros(fd: int, size: int) -> None:
    zeros = bytes(1 << 20)
    for at in range(0, size, len(zeros)):
        os.pwrite(fd, zeros[: size - at], at)


def map_shared(fd: int, size: int) -> mmap.mmap:
    """Map the memory behind a descriptor, which stays the caller's.

    Raises:
        OSError: There is no address space or no descriptor left.
    """
    return mmap.mmap(fd, size, **_UNTRACKED)


class BlockState(enum.Enum):
    """Where a block is in its life, as its worker knows it."""

    FREE = "free"
    FILLING = "filling"
    SENT = "sent"  # and then leased, which only the consumer knows


_NEXT = {
    BlockState.FREE: {BlockState.FILLING},
    BlockState.FILLING: {BlockState.SENT, BlockState.FREE},
    BlockState.SENT: {BlockState.FREE},
}


@dataclass(eq=False)
class Block:
    """A piece of shared memory as its worker sees it.

    Attributes:
        number: Names it on both sides.
        memory: The mapping.
        fd: The descriptor, until it has been sent; then None.
        state: See the head of this file.
        taken: When it was last taken, in `time.monotonic()`.
    """

    number: int
    memory: mmap.mmap
    fd: int | None
    state: BlockState = BlockState.FREE
    taken: float = 0.0

    @property
    def size(self) -> int:
        """Capacity in bytes."""
        return len(self.memory)

    def move(self, new: BlockState) -> None:
        """Change state; the only method that assigns `state` after the construction."""
        assert new in _NEXT[self.state], f"{self.state} -> {new}"
        self.state = new

    def close_descriptor(self) -> None:
        """Close the descriptor: the other side has its own now."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def close(self) -> None:
        """Give the memory back, as far as this side is concerned."""
        self.close_descriptor()
        with contextlib.suppress(BufferError):  # a view of it is alive; it goes with that one
            self.memory.close()


@dataclass(eq=False)
class Made:
    """A block that the generator fills itself, and the arrays that show it.

    Attributes:
        block: The block.
        address: Where it begins in this process.
        root: All of it as bytes; every view that numpy makes has this array as its base.
        array: What the generator was given.
    """

    block: Block
    address: int
    root: weakref.ref[np.ndarray]
    array: weakref.ref[np.ndarray]

    def seal(self, known: Iterable[np.ndarray]) -> bool:
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


class BlockPool:
    """The worker's side: blocks to fill.

    Any thread of the worker may call `make`, the rest is for the worker's own loop.

    Args:
        keep: How many free blocks are kept for later; more are given back to the system.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._free: list[Block] = []  # the last one used at the end
        self._busy: dict[int, Block] = {}
        self._made: dict[int, Made] = {}
        # Released by the consumer, but an array of the worker still shows them.
        self._released: set[int] = set()
        self._dropped: list[int] = []
        self._count = 0

    def take(self, size: int) -> Block:
        """Return a block of at least `size` bytes: the smallest that is free, or a new one.

        Raises:
            BlockMemoryError: The system has no memory or no descriptor for it.
        """
        with self._lock:
            return self._take_locked(size)

    def make(self, shape: Sequence[SupportsIndex], dtype: np.dtype[Any]) -> np.ndarray:
        """Return an array that lies in a block of its own, for the generator to fill.

        Raises:
            BlockMemoryError: The system has no memory or no descriptor for it.
        """
        size = math.prod(map(int, shape)) * dtype.itemsize
        with self._lock:
            block = self._take_locked(size)
            root = np.frombuffer(block.memory, np.uint8)
            array: np.ndarray = np.ndarray(shape, dtype, root)
            self._made[block.number] = Made(
                block, address_of(root.data), weakref.ref(root), weakref.ref(array)
            )
        return array

    @property
    def has_made(self) -> bool:
        """Whether there may be blocks that the generator fills itself."""
        return bool(self._made)

    def made(self, view: memoryview) -> tuple[Made, int] | None:
        """Return the block that the generator has filled and in which `view` lies, and where."""
        address = address_of(view)
        for made in list(self._made.values()):
            offset = address - made.address
            if 0 <= offset < made.block.size and made.block.state is BlockState.FILLING:
                return made, offset
        return None

    def sent(self, block: Block) -> None:
        """Note that a block is the consumer's now, and its descriptor, too."""
        block.close_descriptor()
        if block.state is BlockState.FILLING:
            block.move(BlockState.SENT)

    def reclaim(self, numbers: Iterable[int]) -> None:
        """Note that the consumer's last views of some blocks are gone."""
        with self._lock:
            for number in numbers:
                made = self._made.get(number)
                if made is not None and made.root() is not None:
                    self._released.add(number)
                else:
                    self._free_locked(self._busy.pop(number))

    def dropped(self) -> list[int]:
        """Return, once, the blocks given up since the last call, for the consumer to unmap."""
        numbers, self._dropped = self._dropped, []
        return numbers

    def close(self) -> None:
        """Give up everything."""
        with self._lock:
            for block in [*self._free, *self._busy.values()]:
                block.close()
            self._free, self._busy, self._made = [], {}, {}

    def _take_locked(self, size: int) -> Block:
        self._settle_locked()
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
        best.move(BlockState.FILLING)
        self._busy[best.number] = best
        self._drop_idle_locked(best.taken)
        return best

    def _settle_locked(self) -> None:
        """Free the blocks that the generator has let go of, if the consumer has, too."""
        for number, made in list(self._made.items()):
            if made.root() is not None:
                continue
            del self._made[number]
            if number in self._released or made.block.state is BlockState.FILLING:
                self._released.discard(number)
                self._free_locked(self._busy.pop(number))

    def _free_locked(self, block: Block) -> None:
        block.move(BlockState.FREE)
        self._free.append(block)
        while len(self._free) > self._keep:
            self._drop_locked(self._free[0])

    def _drop_idle_locked(self, now: float) -> None:
        while self._free and now - self._free[0].taken > _IDLE_S:
            self._drop_locked(self._free[0])

    def _new_locked(self, size: int) -> Block:
        capacity = max(1, -(-size // _PAGE)) * _PAGE
        # what is free is too small or far too large: likely the items have changed size
        if len(self._free) >= self._keep:
            self._drop_locked(self._free[0])
        try:
            fd = open_nameless(capacity)
        except OSError as error:
            raise _no_memory(capacity, error) from error
        try:
            memory = map_shared(fd, capacity)
        except OSError as error:
            os.close(fd)
            raise _no_memory(capacity, error) from error
        self._count += 1
        return Block(self._count, memory, fd)

    def _drop_locked(self, block: Block) -> None:
        self._free.remove(block)
        # a block that never crossed is not known on the other side
        if block.fd is None:
            self._dropped.append(block.number)
        block.close()


class Mapping(mmap.mmap):
    """A block as the consumer maps it, which says when it is about to be unmapped.

    So it can be registered with a GPU's driver for as long as it lasts, and no longer.

    Attributes:
        address: Where it begins in this process.
        before_unmap: Called then; they must not raise.
    """

    address: int
    before_unmap: Sequence[Callable[[], None]] = ()  # also of one that could not be mapped

    def __init__(self, *args: Any, **options: Any) -> None:
        self.address = np.frombuffer(self, np.uint8).__array_interface__["data"][0]
        _mappings[self.address] = self
        _mark_added()

    def __del__(self) -> None:
        for tell in self.before_unmap:
            tell()


_mappings: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()
_newest = object()  # another one after each block that is added


@dataclass(frozen=True)
class _Sorted:
    """The mapped blocks in the order of their addresses.

    Attributes:
        newest: `_newest` before the blocks were collected.
        addresses: Where the blocks begin.
        blocks: The blocks; each may be gone by now.
    """

    newest: object
    addresses: list[int]
    blocks: list[weakref.ref[Mapping]]


_sorted = _Sorted(_newest, [], [])


def _mark_added() -> None:
    global _newest
    _newest = object()


def mapping_at(address: int) -> Mapping | None:
    """Return the block of this consumer's in which an address lies; None if it lies in none.

    Any thread may call it. It takes no lock, because a fork or the collector may come at any line.
    """
    global _sorted
    found = _sorted
    # A thread that adds a block at the same time replaces the mark, so the next call sorts again.
    if found.newest is not _newest:
        found = _sorted = _sort()
    at = bisect.bisect_right(found.addresses, address) - 1
    mapping = found.blocks[at]() if at >= 0 else None
    return mapping if mapping is not None and address - mapping.address < len(mapping) else None


def _sort() -> _Sorted:
    newest = _newest
    alive = {}
    for reference in _mappings.valuerefs():  # in one step, as other threads add blocks
        mapping = reference()
        if mapping is not None:
            alive[mapping.address] = weakref.ref(mapping)
    addresses = sorted(alive)
    return _Sorted(newest, addresses, [alive[address] for address in addresses])


class Lease(weakref.ref[np.ndarray]):
    """A block that is lent to the arrays of an item.

    Attributes:
        number: Number of the block.
    """

    __slots__ = ("number",)
    number: int


class BlockMap:
    """The consumer's side: the blocks of one worker, and the leases on them.

    Leases outlive the map: arrays stay valid as long as anything refers to them, also after the
    worker died and the enqueuer was stopped.

    Attributes:
        in_hand: Blocks of the frame that is being read, by number. The reader empties it when the
            frame counts as read.
        released: Leases that have ended and of which the worker does not know it yet.
    """

    def __init__(self) -> None:
        self._memory: dict[int, Mapping] = {}
        self._missing: dict[int, BlockMemoryError] = {}
        self._leases: dict[int, Lease] = {}
        self.in_hand: dict[int, np.ndarray] = {}
        self.released: deque[Lease] = deque()

    def __contains__(self, number: int) -> bool:
        return number in self._memory or number in self._missing

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self._memory)

    @property
    def nbytes(self) -> int:
        """How many bytes they have, all together."""
        return sum(map(len, tuple(self._memory.values())))

    def add(self, number: int, fds: list[int]) -> None:
        """Map a block that came with its descriptor; the descriptor is closed.

        If that fails, `lease` tells why: what had come before is to be delivered first. It may be
        called again after an interrupt.
        """
        if not fds and number not in self:
            self._missing[number] = BlockMemoryError(
                "the descriptor of an item's shared memory was lost on its way; this process has "
                "too few (`ulimit -n`): keep fewer batches, or try a smaller max_queue_size"
            )
        for fd in fds:
            size = os.fstat(fd).st_size
            try:
                self._memory[number] = Mapping(fd, size, **_UNTRACKED)
            except OSError as error:
                self._missing[number] = _no_memory(size, error)
        close_all(fds)

    def lease(self, number: int) -> memoryview:
        """Return a writable view of all of a block; the loan ends when its last slice dies.

        It may be called again for the same frame: the loan is the same.

        Raises:
            BlockMemoryError: It could not be mapped, for want of memory or descriptors.
        """
        if number in self._missing:
            raise self._missing[number]
        are_many = self._many_are_leased()
        anchor = self.in_hand.get(number)
        if anchor is None:
            anchor = np.frombuffer(self._memory[number], np.uint8)
            self.in_hand[number] = anchor  # before its end can be noticed
        lease = self._leases.get(number)
        if lease is None or lease() is not anchor:
            lease = Lease(anchor, self.released.append)
            lease.number = number
            self._leases[number] = lease
        return anchor.copy().data if are_many else anchor.data

    def _many_are_leased(self) -> bool:
        if len(self._memory) <= _MOST_LEASED:
            return False
        return sum(anchor() is not None for anchor in self._leases.values()) >= _MOST_LEASED

    def drop(self, number: int) -> None:
        """Forget a block that the worker gave up."""
        self._memory.pop(number, None)
        self._missing.pop(number, None)
        self._leases.pop(number, None)


def address_of(view: memoryview) -> int:
    """Return where a buffer begins in this process."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def _views_of(root: np.ndarray) -> int:
    return sys.getrefcount(root) - _NO_VIEWS


_NO_VIEWS = 0


def _calibrate() -> int:
    root = np.empty(0)
    return _views_of(root)


_NO_VIEWS = _calibrate()  # as many references as asking takes, in this version of Python


def _no_memory(size: int, error: OSError) -> BlockMemoryError:
    return BlockMemoryError(
        f"no shared memory of {size / 1e6:.1f} MB could be had ({error}); the system is out of "
        "memory or descriptors: try smaller batches, a smaller max_queue_size or fewer workers"
    )
