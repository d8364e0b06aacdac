"""The private channel between one worker process and the consumer: what its packets say.

    worker (WorkerEnd)                                           consumer (ConsumerEnd)
      HELLO ITEM END FAILURE RECORD ASK  ---------------------->  inbox, records
      orders, credits                    <----  EPOCH GRANT STOP

One writer in each direction and no lock that both sides share, so a worker that is killed
cannot leave anybody hanging. Every packet begins with its kind and its number in the sequence;
only an END is an end.

A credit is the right to send one more item. The consumer's arithmetic for one worker: credits
out + items received but not yet taken <= its quota; and one more for the item that the consumer
is just waiting for, since that one does not wait. With a bound on bytes the worker itself keeps
the account, since only it knows the size of what it has in hand.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass


class Kind(enum.IntEnum):
    """What a packet is; its first byte."""

    HELLO = 0
    ITEM = 1
    END = 2
    FAILURE = 3
    RECORD = 4
    ASK = 5
    EPOCH = 10
    GRANT = 11
    STOP = 12


HEADER = struct.Struct("<BQIQ")  # kind, sequence number, shard, item number
FRAME = struct.Struct("<IIHH")  # bytes of pickle, block, segments, blocks dropped
SEGMENT = struct.Struct("<QQ")  # offset in the block, bytes
EPOCH = struct.Struct("<BQ")
GRANT = struct.Struct("<BIIBH")  # credits, items taken, whether one is waited for, blocks home

INLINE_BYTES = 16 * 1024  # a larger pickle goes into a block
MOST_HOME = 4096  # blocks named in one packet


@dataclass(frozen=True)
class Credit:
    """What a worker may send before it hears more.

    Attributes:
        items: Credits to begin with.
        waiting_bytes: The most bytes of its items that may wait, or None.
        ask: Whether to tell when it has an item and no credit.
    """

    items: int
    waiting_bytes: int | None
    ask: bool
