"""The protocol of a channel, between one worker process and the consumer: packets on a socket.

    worker (ItemSender)                                           consumer (ItemReceiver)
      ITEM STATED ARRAYS MESSAGE  ---------------------------->  head(), take()
      READY BLOCK DROP RECORD ASK  --------------------------->  blocks, records
      orders, credit           <----------- EPOCH TASK STOP CREDIT

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
    """Kinds of packets: with a frame, from the worker, and to it."""

    ITEM = 1
    # An item, in a pair with the state of its iterator after it.
    STATED = 2
    # An item of small arrays, behind their layout.
    ARRAYS = 3
    # What is no item: an end, a failure, or a task without a result.
    MESSAGE = 4

    READY = 10
    BLOCK = 11
    DROP = 12
    RECORD = 13
    # The worker has an item and no credit for it.
    ASK = 14

    EPOCH = 20
    STOP = 21
    # A ticket for this worker alone.
    TASK = 22
    # What the worker may send, and the blocks that it may use again.
    CREDIT = 23


# A frame is this head, a table of the segments that lie in blocks, and the pickle if it is small.
# The head: size of the table, shard, number of the item.
FRAME = struct.Struct("=IIQ")
# Number of the block, and of its use; offset in it, size.
SEGMENT = struct.Struct("=IQQQ")
# Numbers of items: those that may be sent, those that were taken, and 1 + that of the one that the
# consumer waits for. Blocks that were released follow.
CREDIT = struct.Struct("=QQQ")
# Number of the block, and of its use.
RELEASED = struct.Struct("=IQ")
# Items that a worker of tasks may send: their tickets are the bound.
NO_LIMIT = 1 << 62
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
    """

    items: int
    waiting_bytes: int | None
    ask: bool
