"""The large parts of an item -> blocks, and the table of them in its frame.

lay_out(pickle, buffers) -> segments, copied into a block or left where the generator wrote
announce(segments)       -> packets with new blocks, and the table
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from enqueuer.transport.block import Block
from enqueuer.transport.block_pool import ALIGNMENT, BlockPool
from enqueuer.transport.item_codec import Buffer, Pieces
from enqueuer.transport.protocol import INLINE_BYTES, MOST_IN_PACKET, NUMBER, SEGMENT, Kind
from enqueuer.transport.ring import Ring
from enqueuer.transport.sender_control import SenderControl
from enqueuer.transport.user_block import UserBlock

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
        ring: Ring between the worker and the consumer, which returns released blocks.
        control: The worker's end of the socket, which announces blocks.
        arrays: List of the large arrays of the item that was encoded last.
        keep: Number of free blocks to be kept for later.

    Attributes:
        pool: Blocks of the worker.
    """

    def __init__(
        self, ring: Ring, control: SenderControl, arrays: list[np.ndarray], keep: int
    ) -> None:
        self.pool = BlockPool(keep)
        self._ring = ring
        self._control = control
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
        numbers = self._ring.take_released()
        if numbers:
            self.pool.reclaim(numbers)
        parts: list[Part] = [*buffers]
        if isinstance(data, Pieces):
            parts.insert(0, data)
            data = b""
        elif len(data) > INLINE_BYTES:
            parts.insert(0, memoryview(data))
            data = b""
        in_place = self._in_place(parts) if self.pool.has_user_blocks else {}
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
        for block in {segment[0].number: segment[0] for segment in segments}.values():
            if block.fd is not None:
                self._control.emit(Kind.BLOCK, NUMBER.pack(block.number), block.fd)
                block.close_descriptor()
            self.pool.sent(block)
        dropped = self.pool.dropped()
        for begin in range(0, len(dropped), MOST_IN_PACKET):
            numbers = dropped[begin : begin + MOST_IN_PACKET]
            self._control.emit(Kind.DROP, b"".join(map(NUMBER.pack, numbers)))
        return b"".join([SEGMENT.pack(block.number, *place) for block, *place in segments])


def copy_part(part: Part, block: Block, begin: int) -> None:
    """Copy a part of an item to its place in a block."""
    if isinstance(part, np.ndarray):
        np.ndarray(part.shape, part.dtype, block.memory, begin)[...] = part
    elif isinstance(part, Pieces):
        part.copy_to(block.memory, begin)
    else:
        block.memory[begin : begin + part.nbytes] = part
