"""The private channel between one worker process and the consumer: what the two say.

    worker (ItemSender)                                           consumer (ItemReceiver)
      frames ITEM END FAILURE ...  ----- the ring ------------>  take()
      packets READY BLOCK DROP RECORD WAKE  ---- a socket ---->  blocks, records
      orders, wakes            <--- packets EPOCH STOP WAKE ---

One writer in each direction and no lock that both sides share, so a worker that is killed
cannot leave anybody hanging. Only an END is an end.

A credit is the right to send one more item. The consumer's arithmetic for one worker: credits
out + items that wait <= its quota; and one more for the item that the consumer is just waiting
for, since that one does not wait. With a bound on bytes the worker itself keeps the account,
since only it knows the size of what it has in hand.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass


class Kind(enum.IntEnum):
    """What a frame or a packet is."""

    ITEM = 1
    END = 2
    FAILURE = 3
    STATED = 4  # an item, in a pair with the state of its iterator after it
    SKIPPED = 5  # a failure after which the worker goes on
    EMPTY = 6  # a task without a result
    REPORTED = 7  # a failure that the generator has caught itself; REPORT comes before the error
    READY = 10
    BLOCK = 11
    DROP = 12
    RECORD = 13
    WAKE = 14
    EPOCH = 20
    STOP = 21
    TASK = 22  # a ticket for this worker alone


# A frame: this, a table of the segments that lie in blocks, and the pickle if it is small.
FRAME = struct.Struct("=IHBxIQ")  # bytes, those of the table, kind, shard, item number
SEGMENT = struct.Struct("=IQQ")  # block, offset in it, bytes
PACKET = struct.Struct("=BQ")  # kind, its number in the sequence
NUMBER = struct.Struct("=Q")
REPORT = struct.Struct("=Q?")  # which one of its item, whether to log it

INLINE_BYTES = 16 * 1024  # a larger pickle goes into a block
MOST_IN_PACKET = 4096  # numbers of blocks


@dataclass(frozen=True)
class Credit:
    """What a worker may send before it hears more.

    Attributes:
        items: How many of its items may wait.
        waiting_bytes: The most bytes of its items that may wait, or None.
        ask: Whether to tell when it has an item and no credit.
    """

    items: int
    waiting_bytes: int | None
    ask: bool
