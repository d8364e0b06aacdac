"""A block of shared memory as its worker sees it, and the states of its life.

    FREE --> FILLING --> SENT --> FREE; or FILLING --> FREE, if it is not sent after all

`block_pool.py` shows which side changes the state, and when.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os


class BlockState(enum.IntEnum):
    """Where a block is in its life, as its worker knows it.

    Numbers are hashed in C, and each block changes its state three times for an item.
    """

    FREE = 0
    FILLING = 1
    # Sent, and then leased, which only the consumer knows.
    SENT = 2


_NEXT = {
    BlockState.FREE: {BlockState.FILLING},
    BlockState.FILLING: {BlockState.SENT, BlockState.FREE},
    BlockState.SENT: {BlockState.FREE},
}


class Block:
    """A piece of shared memory as its worker sees it.

    Attributes:
        number: Number that names the block on both sides.
        memory: Mapping of the block in this process.
        size: Capacity in bytes.
        fd: Descriptor, until it has been sent; then None.
        state: State, as the head of this file shows.
        taken: Time at which the block was last taken, by `time.monotonic()`.
    """

    def __init__(self, number: int, memory: mmap.mmap, fd: int | None) -> None:
        self.number = number
        self.memory = memory
        self.size = len(memory)
        self.fd = fd
        self.state = BlockState.FREE
        self.taken = 0.0

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
        # A block of which a view is alive goes with that view.
        with contextlib.suppress(BufferError):
            self.memory.close()
