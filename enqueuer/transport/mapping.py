"""The blocks that this process has mapped as a consumer, and which of them holds an address.

    Mapping(fd) --> registered by its address --> mapping_at(address), until it is unmapped

An adapter finds the block of a tensor by its address, and has a GPU's driver pin it for as long
as it is mapped. Any thread may call anything.
"""

from __future__ import annotations

import bisect
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np


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
        self.address = np.frombuffer(self, np.uint8).__array_interface__["data"][0]
        _mappings[self.address] = self
        _mark_added()

    def __del__(self) -> None:
        for callback in self.before_unmap:
            callback()


_mappings: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()
# A mark that is replaced after each block that is added.
_newest = object()


class _Sorted(NamedTuple):
    """The mapped blocks in the order of their addresses.

    Attributes:
        newest: Value of `_newest` before the blocks were collected.
        addresses: Addresses at which the blocks begin.
        blocks: References to the blocks; each block may be gone by now.
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

    It takes no lock, because a fork or the collector may come at any line.
    """
    global _sorted
    found = _sorted
    # A thread that adds a block at the same time replaces the mark, so the next call sorts again.
    if found.newest is not _newest:
        found = _sorted = _sort()
    index = bisect.bisect_right(found.addresses, address) - 1
    mapping = found.blocks[index]() if index >= 0 else None
    return mapping if mapping is not None and address - mapping.address < len(mapping) else None


def _sort() -> _Sorted:
    newest = _newest
    alive = {}
    # The references are collected in one step, as other threads add blocks.
    for reference in _mappings.valuerefs():
        mapping = reference()
        if mapping is not None:
            alive[mapping.address] = weakref.ref(mapping)
    addresses = sorted(alive)
    return _Sorted(newest, addresses, [alive[address] for address in addresses])
