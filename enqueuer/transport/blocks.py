"""Shared-memory blocks, written by one worker, read by the consumer, and used again and again.

    worker (BlockPool)                              consumer (BlockMap)
    FREE --take()--> FILLING --sent--> SENT ------> LEASED: arrays are views of it
     ^                                                |
     +---------- the number comes home <--------------+ the last view has died

Fresh shared memory costs a page fault for each 4 kB; a block that is used again costs none. A
block is a file without a name (a memfd, elsewhere an unlinked temporary file): nothing appears
in /dev/shm and nothing can be left behind. Its descriptor crosses once, with its first item;
then both sides close theirs and only the mappings remain.

A lease ends in whatever thread the garbage collector happens to run in, perhaps while a lock is
held: so it only appends to a deque.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from enqueuer.errors import BlockMemoryError

ALIGNMENT = 64  # bytes; a cache line, and enough for every dtype and SIMD load

_PAGE = mmap.PAGESIZE
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
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("enqueuer", os.MFD_CLOEXEC)
    else:
        fd, path = tempfile.mkstemp(prefix="enqueuer-")
        os.unlink(path)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


@dataclass
class Block:
    """A piece of shared memory as its worker sees it.

    Attributes:
        number: Names it on both sides.
        memory: The mapping.
        fd: The descriptor, until it has been sent; then None.
    """

    number: int
    memory: mmap.mmap
    fd: int | None

    @property
    def size(self) -> int:
        """Capacity in bytes."""
        return len(self.memory)

    def sent(self) -> None:
        """Close the descriptor: the other side has its own now."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def close(self) -> None:
        """Give the memory back, as far as this side is concerned."""
        self.sent()
        with contextlib.suppress(BufferError):  # a view of it is alive; it goes with that one
            self.memory.close()


class BlockPool:
    """The worker's side: blocks to fill. Not thread-safe; only the worker's own loop calls it.

    Args:
        keep: How many free blocks are kept for later; more are given back to the system.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._free: list[Block] = []
        self._away: dict[int, Block] = {}
        self._dropped: list[int] = []
        self._count = 0

    def take(self, size: int) -> Block:
        """Return a block of at least `size` bytes: the smallest that is free, or a new one.

        Raises:
            BlockMemoryError: The system has no memory or no descriptor for it.
        """
        fitting = [block for block in self._free if size <= block.size <= max(4 * size, _PAGE)]
        if fitting:
            block = min(fitting, key=lambda block: block.size)
            self._free.remove(block)
        else:
            block = self._new(size)
        self._away[block.number] = block
        return block

    def came_home(self, number: int) -> None:
        """Note that the consumer's last view of a block is gone."""
        self._free.append(self._away.pop(number))
        while len(self._free) > self._keep:
            self._drop(self._free.pop(0))

    def dropped(self) -> list[int]:
        """Return, once, the blocks given up since the last call, for the consumer to unmap."""
        numbers, self._dropped = self._dropped, []
        return numbers

    def close(self) -> None:
        """Give up everything."""
        for block in [*self._free, *self._away.values()]:
            block.close()
        self._free, self._away = [], {}

    def _new(self, size: int) -> Block:
        capacity = -(-size // _PAGE) * _PAGE
        # what is free is too small or far too large: likely the items have changed size
        if len(self._free) >= self._keep:
            self._drop(self._free.pop(0))
        try:
            fd = open_nameless(capacity)
        except OSError as error:
            raise _no_memory(capacity, error) from error
        try:
            memory = mmap.mmap(fd, capacity, **_UNTRACKED)
        except OSError as error:
            os.close(fd)
            raise _no_memory(capacity, error) from error
        self._count += 1
        return Block(self._count, memory, fd)

    def _drop(self, block: Block) -> None:
        block.close()
        self._dropped.append(block.number)


class BlockMap:
    """The consumer's side: the blocks of one worker, and the leases on them.

    Leases outlive the map: arrays stay valid as long as anything refers to them, also after the
    worker died and the enqueuer was stopped.
    """

    def __init__(self) -> None:
        self._memory: dict[int, mmap.mmap] = {}
        self._missing: dict[int, BlockMemoryError] = {}
        self._leases: dict[int, weakref.ref[np.ndarray]] = {}
        self._home: deque[int] = deque()

    def add(self, number: int, fd: int) -> None:
        """Map a block that came with its descriptor; the descriptor is closed.

        If that fails, `lease` tells why: what had come before is to be delivered first.
        """
        size = os.fstat(fd).st_size
        try:
            self._memory[number] = mmap.mmap(fd, size, **_UNTRACKED)
        except OSError as error:
            self._missing[number] = _no_memory(size, error)
        finally:
            os.close(fd)

    def lease(self, number: int) -> memoryview:
        """Return a writable view of all of a block; the loan ends when its last slice dies.

        Raises:
            BlockMemoryError: It could not be mapped, for want of memory or descriptors.
        """
        if number not in self._memory:
            raise self._missing.pop(number, None) or BlockMemoryError(
                "the descriptor of an item's shared memory was lost on its way; this process has "
                "too few (`ulimit -n`): keep fewer batches, or try a smaller max_queue_size"
            )
        anchor = np.frombuffer(self._memory[number], np.uint8)
        if self._many_are_leased():
            self._home.append(number)
            return anchor.copy().data
        home = self._home
        self._leases[number] = weakref.ref(anchor, lambda _: home.append(number))
        return anchor.data

    def _many_are_leased(self) -> bool:
        if len(self._memory) <= _MOST_LEASED:
            return False
        return sum(anchor() is not None for anchor in self._leases.values()) >= _MOST_LEASED

    def drop(self, number: int) -> None:
        """Forget a block that the worker gave up."""
        self._memory.pop(number, None)
        self._leases.pop(number, None)

    def came_home(self) -> list[int]:
        """Return, once, the blocks whose loan has ended since the last call."""
        numbers = []
        while self._home:
            numbers.append(self._home.popleft())
        return numbers

    def still_home(self, numbers: Iterable[int]) -> None:
        """Take back what `came_home` returned, since the worker could not be told."""
        self._home.extendleft(numbers)


def _no_memory(size: int, error: OSError) -> BlockMemoryError:
    return BlockMemoryError(
        f"no shared memory of {size / 1e6:.1f} MB could be had ({error}); the system is out of "
        "memory or descriptors: try smaller batches, a smaller max_queue_size or fewer workers"
    )
