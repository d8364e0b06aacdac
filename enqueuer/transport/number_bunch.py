"""Numbers that C code moves from a generator into the ring, each readable as soon as it is made.

    gates, values --zip--> a pickle into the run, SENT, WRITTEN, fence, the next one

A number takes C code a third of the time that the calls of Python code for it take. Python code
runs only before and after a bunch. A bunch ends, before the generator is asked for another item,
when the loop falls asleep or has sent an order: only Python code can wake it, or read that.
It also ends at a value of another type, which the stream then sends by itself.
"""

from __future__ import annotations

import functools
import pickle
import struct
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count, islice, repeat, starmap, takewhile, tee
from operator import getitem, is_, length_hint, setitem
from typing import Any

from enqueuer.transport.ring import CONSUMER_ASLEEP, ORDERS, SENT, WRITTEN, Ring

# A number as it is pickled, without STOP: how it is packed, and its opcode.
PACKED: dict[type, tuple[struct.Struct, bytes]] = {
    int: (struct.Struct("<2sq"), pickle.LONG1 + b"\x08"),
    float: (struct.Struct(">1sd"), pickle.BINFLOAT),
}

LEAST = 8
"""Items of a bunch: opening and closing it takes as long as sending a few by themselves."""

# One of its overloads.
_store: Callable[..., None] = setitem

Fence = tuple[Callable[[bool], Any], Callable[[], None]]
"""Two functions that are a full memory barrier if the second is called after the first."""


class NumberBunch:
    """Numbers of one type that are sent without calls of Python code; see `ItemBunch`.

    Args:
        kind: Type of the numbers, a key of `PACKED`.
        most: Largest number of items.
        number: Number of the first item.
        at: Offset of the first pickle in the frames.
        ring: Ring between the worker and the consumer.
        fence: Memory barrier.
        orders: Number of orders that were read.
        asleep: The sleep of the consumer that was ended last.

    Attributes:
        gate: List that any thread may clear: the bunch ends before the item that is being made.
        left: The item that was made and not sent, if there is one.
    """

    def __init__(
        self,
        kind: type,
        most: int,
        number: int,
        at: int,
        ring: Ring,
        fence: Fence,
        orders: int,
        asleep: int,
    ) -> None:
        self.gate = [True] * most
        self.left: list[Any] = []
        self._kind, self._most, self._number, self._at = kind, most, number, at
        self._words, self._frames, self._fence = ring.words, ring.frames, fence
        self._orders, self._asleep = orders, asleep
        self._sent: int = ring.words[SENT]
        self._asked = 0

    @property
    def asked(self) -> int:
        return self._asked - len(self.left)

    @property
    def made(self) -> int:
        return self._words[SENT] - self._sent

    def fill(self, number: int, values: Iterator[Any]) -> None:
        words, most = self._words, self._most if number == self._number else 0
        packer, opcode = PACKED[self._kind]
        size, (take, release) = packer.size, self._fence
        first, second, third = tee(values, 3)
        asked, packed = repeat(True, most), repeat(True, most)
        rows = zip(
            takewhile(self._orders.__eq__, map(getitem, repeat(words), repeat(ORDERS))),
            takewhile(self._asleep.__eq__, map(getitem, repeat(words), repeat(CONSUMER_ASLEEP))),
            asked,
            takewhile(functools.partial(is_, self._kind), map(type, first)),
            self.gate,
            packed,
            map(
                packer.pack_into,
                repeat(self._frames),
                count(self._at, size),
                repeat(opcode),
                second,
            ),
            map(_store, repeat(words), repeat(SENT), count(self._sent + 1)),
            map(_store, repeat(words), repeat(WRITTEN), count(words[WRITTEN] + size, size)),
            map(take, repeat(False)),
            starmap(release, repeat(())),
            third,
            strict=False,
        )
        try:
            deque(rows, maxlen=0)
        except struct.error:
            # A number has more than 64 bits, unless the generator has raised this.
            if length_hint(packed) != length_hint(asked):
                raise
        finally:
            self._asked = most - length_hint(asked)
        # An item that is None, or not the next one of the run, has been skipped before.
        if self._asked > self.made or not most:
            self._asked = self.made + 1
            self.left.extend(value for value in islice(third, 1) if value is not None)
