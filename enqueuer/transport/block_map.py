"""The consumer's side of shared memory: the blocks of one worker, and the leases on them.

    add(number, descriptor) -> mapped -> lease(number): a view -> its last slice dies -> released

A lease ends in whatever thread the garbage collector happens to run in, perhaps while a lock is
held: so it only appends to a deque. Until the frame that names a block counts as read, the map
itself keeps the lease: if the item's own code raises KeyboardInterrupt, the frame is read again.

An adapter finds the block of a tensor by its address (`mapping_at`), and has a GPU's driver pin it
for as long as it is mapped. Any thread may call that.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from enqueuer.errors import BlockMemoryError
from enqueuer.transport.memory import MAP_OPTIONS, allocation_error, close_all


def address_of(buffer: Any) -> int:
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
        self.address = address_of(self)
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
_MOST_LEASED = 4096 if MAP_OPTIONS else 64


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
        if len(self._memory) <= _MOST_LEASED:
            return False
        return sum(anchor() is not None for anchor in self._leases.values()) >= _MOST_LEASED

    def drop(self, number: int) -> None:
        """Forget a block that the worker gave up."""
        self._memory.pop(number, None)
        self._missing.pop(number, None)
        self._leases.pop(number, None)

    def clear(self) -> None:
        """Forget all blocks; leased ones stay as long as their arrays."""
        for forgotten in (self._memory, self._missing, self._leases, self.current, self.released):
            forgotten.clear()
