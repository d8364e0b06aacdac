"""Whose turn it is: pure decisions, no waiting, no I/O.

An order is asked `turn()`, is told `took(shard)` and `ended(shard)`, and is `done` when all
shards have ended. The waiting is the backend's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from typing import Final, Protocol

ANY: Final = None
"""The answer of `turn()` where any shard will do."""


class Order(Protocol):
    """What the consumer asks before each item."""

    @property
    def done(self) -> bool:
        """Whether every shard has ended."""

    def turn(self) -> int | None:
        """Return the shard to read next, or ANY."""

    def took(self, shard: int) -> None:
        """Note that an item of `shard` was taken."""

    def ended(self, shard: int) -> None:
        """Note that `shard` will give nothing more."""

    def next_of(self, shards: Container[int]) -> int | None:
        """Return which of some shards of one worker is next; None if all have ended."""


class RoundRobin:
    """One item of each shard in turn; ended shards drop out.

    Example:
        >>> order = RoundRobin(range(3))
        >>> for _ in range(2): order.took(order.turn())
        >>> order.turn()
        2
        >>> order.ended(2); order.ended(0); order.turn()
        1
    """

    def __init__(self, shards: Iterable[int]) -> None:
        self._waiting = deque(shards)

    @property
    def done(self) -> bool:
        return not self._waiting

    def turn(self) -> int:
        return self._waiting[0]

    def took(self, shard: int) -> None:
        self._waiting.rotate(-1)

    def ended(self, shard: int) -> None:
        self._waiting.remove(shard)

    def next_of(self, shards: Container[int]) -> int | None:
        return next((shard for shard in self._waiting if shard in shards), None)


class AsTheyCome:
    """Whatever is there first, from any shard.

    Example:
        >>> order = AsTheyCome(range(2))
        >>> order.turn() is ANY, order.done
        (True, False)
        >>> order.ended(0); order.ended(1); order.done
        True
    """

    def __init__(self, shards: Iterable[int]) -> None:
        self._open = dict.fromkeys(shards)  # who gave something last is at the end

    @property
    def done(self) -> bool:
        return not self._open

    def turn(self) -> None:
        return ANY

    def took(self, shard: int) -> None:
        self._open[shard] = self._open.pop(shard)

    def ended(self, shard: int) -> None:
        self._open.pop(shard, None)

    def next_of(self, shards: Container[int]) -> int | None:
        return next((shard for shard in self._open if shard in shards), None)
