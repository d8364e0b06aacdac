"""The worker's side of shared memory: blocks to fill, which are used again and again.

    worker (BlockPool)                              consumer (BlockMap)
    FREE --take()--> FILLING --sent()--> SENT ----> LEASED: arrays are views of it
     ^                                                |
     +---------- the number is released <------------+ the last view has died

Fresh shared memory costs a page fault for each 4 kB; a block that is used again costs none. The
descriptor of a block crosses once, before its first item; then both sides close theirs and only
the mappings remain.

A generator may fill a block itself (`make`). It is sent without a copy if every array that
shows it is known, and these become read-only; it is not used again while one of them lives.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np

from enqueuer.transport.block import Block, BlockState
from enqueuer.transport.memory import allocation_error, map_shared, open_nameless
from enqueuer.transport.user_block import UserBlock, address_of

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
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        # The block that was used last is at the end.
        self._free: list[Block] = []
        self._busy: dict[int, Block] = {}
        self._user_blocks: dict[int, UserBlock] = {}
        # Released by the consumer, but an array of the worker still shows them.
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
            self._user_blocks[block.number] = UserBlock(
                block, root.__array_interface__["data"][0], weakref.ref(root), weakref.ref(array)
            )
        return array

    @property
    def has_user_blocks(self) -> bool:
        """Whether there may be blocks that the generator fills itself."""
        return bool(self._user_blocks)

    def find_user_block(self, view: memoryview) -> tuple[UserBlock, int] | None:
        """Return the unsent block of the generator in which `view` lies, and its offset there."""
        address = address_of(view)
        for user_block in list(self._user_blocks.values()):
            offset, block = address - user_block.address, user_block.block
            if 0 <= offset < block.size and block.state is BlockState.FILLING:
                return user_block, offset
        return None

    def sent(self, block: Block) -> None:
        """Note that the consumer has a block now, and its descriptor, too."""
        block.close_descriptor()
        if block.state is BlockState.FILLING:
            block.move(BlockState.SENT)

    def reclaim(self, numbers: Iterable[int]) -> None:
        """Note that the consumer's last views of some blocks are gone."""
        with self._lock:
            for number in numbers:
                user_block = self._user_blocks.get(number)
                if user_block is not None and user_block.root() is not None:
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
            self._free, self._busy, self._user_blocks = [], {}, {}

    def _take_locked(self, size: int) -> Block:
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
        best.move(BlockState.FILLING)
        self._busy[best.number] = best
        self._drop_idle_locked(best.taken)
        return best

    def _free_user_blocks_locked(self) -> None:
        """Free the blocks to which neither the generator nor the consumer refers any more."""
        for number, user_block in list(self._user_blocks.items()):
            if user_block.root() is not None:
                continue
            del self._user_blocks[number]
            if number in self._released or user_block.block.state is BlockState.FILLING:
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
        # Free blocks are too small or far too large: likely the items have changed size.
        if len(self._free) >= self._keep:
            self._drop_locked(self._free[0])
        try:
            fd = open_nameless(capacity)
        except OSError as error:
            raise allocation_error(capacity, error) from error
        try:
            memory = map_shared(fd, capacity)
        except OSError as error:
            os.close(fd)
            raise allocation_error(capacity, error) from error
        self.count += 1
        return Block(self.count, memory, fd)

    def _drop_locked(self, block: Block) -> None:
        self._free.remove(block)
        # A block that never crossed is not known on the other side.
        if block.fd is None:
            self._dropped.append(block.number)
        block.close()
