"""The protocol of a channel, between one worker process and the consumer: frames and packets.

    worker (ItemSender)                                           consumer (ItemReceiver)
      frames ITEM RUN MESSAGE ...  ----- the ring ------------>  head(), items()
      packets READY BLOCK DROP RECORD WAKE  ---- a socket ---->  blocks, records
      orders, wake-ups         <--- packets EPOCH TASK STOP WAKE

Each direction has one writer, and no lock is shared, so a worker that is killed leaves no other
process waiting. Only an `End` is an end.

A credit is the right to send one more item. The consumer's arithmetic for one worker: credits
granted + items that wait <= its quota; and one more for the item that the consumer waits for,
since that one does not wait. With a bound on bytes the worker itself keeps the account, since
only it knows the size of the item that it is about to send.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple


class Kind(enum.IntEnum):
    """Kinds of frames, of packets from the worker, and of packets to it."""

    ITEM = 1
    # An item, in a pair with the state of its iterator after it.
    STATED = 2
    # Many items, each a short pickle without its STOP; see `sender.py`.
    RUN = 3
    # An item of small arrays, behind their layout; see `small_arrays.py`.
    ARRAYS = 4
    # What is no item: an end, a failure, or a task without a result.
    MESSAGE = 5

    READY = 10
    BLOCK = 11
    DROP = 12
    RECORD = 13
    WAKE = 14

    EPOCH = 20
    STOP = 21
    # A ticket for this worker alone.
    TASK = 22


# A frame is this head, a table of the segments that lie in blocks, and the pickle if it is small.
# The head: size of the frame, size of the table, kind, shard, number of the item. The size of a
# run is 0 as long as it may grow.
FRAME = struct.Struct("=IHBxIQ")
# A frame begins at a multiple of so many bytes, so that its size is stored at once.
ALIGNMENT = 8
# Number of the block, offset in it, size.
SEGMENT = struct.Struct("=IQQ")
# Kind of the packet, its number in the sequence.
PACKET = struct.Struct("=BQ")
NUMBER = struct.Struct("=Q")

# A larger pickle goes into a block, and other data into a file beside its packet.
INLINE_BYTES = 16 * 1024


class Credit(NamedTuple):
    """The credit with which a worker begins, and the rules for more.

    Attributes:
        items: Number of its items that may wait.
        waiting_bytes: Largest number of bytes of its items that may wait, or None.
        ask: Whether the worker reports that it has an item and no credit.
        spins: Whether the worker may spin before it sleeps, as it has a CPU of its own.
    """

    items: int
    waiting_bytes: int | None
    ask: bool
    spins: bool = False
