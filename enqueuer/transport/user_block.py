"""A block that the generator fills itself, and the arrays through which it can write to it.

    empty() -> an array of the block -> yield -> freeze(): read-only, sent without a copy

numpy keeps a reference from each view to the array that owns the memory. So counting references
shows whether there are views that the package does not know of.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable

import numpy as np

from enqueuer.transport.block import Block


class UserBlock:
    """A block that the generator fills itself, and the arrays that show it.

    Attributes:
        block: Block of the pool.
        address: Address in this process at which the block begins.
        root: All of the block as bytes; every view that numpy makes has this array as its base.
        array: Array that the generator was given.
    """

    def __init__(
        self,
        block: Block,
        address: int,
        root: weakref.ref[np.ndarray],
        array: weakref.ref[np.ndarray],
    ) -> None:
        self.block = block
        self.address = address
        self.root = root
        self.array = array

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


def address_of(view: memoryview) -> int:
    """Return the address in this process at which a buffer begins."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def _views_of(root: np.ndarray) -> int:
    return sys.getrefcount(root) - _NO_VIEWS


_NO_VIEWS = 0


def _calibrate() -> int:
    root = np.empty(0)
    return _views_of(root)


# As many references as the question itself takes, in this version of Python.
_NO_VIEWS = _calibrate()
