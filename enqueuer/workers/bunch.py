"""A bunch of items, which C code moves from a generator to the loop one by one.

    gate, numbers, values --zip--> (shard, number, value, None) --append_all--> the loop

Python code runs only before and after a bunch. A bunch ends when its gate is used up or cleared.
A gate may call a function behind the first item, which wakes a loop that waits for it.
`zip` asks the gate before it asks the generator, so no item is lost. A bunch also ends with the
generator, with an exception, and with an item that is None.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, repeat, takewhile
from typing import Any

from enqueuer.workers.messages import ItemTuple

_is_given = functools.partial(operator.is_not, None)
# Stands for a value in the row before the first item.
_FIRST = (True,)


class Bunch:
    """The items that a worker sends without asking for room or counting in between.

    Args:
        gate: The shard once for each item, and once more. Any thread may clear it, which ends the
            bunch after the item that is being made.
        append_all: Function that sends the items of an iterator.
        wake: Function written in C that is called as soon as the first item was sent; it returns
            None. None: none is called.

    Attributes:
        gate: The gate.

    Example:
        >>> sent = []
        >>> bunch = Bunch([7] * 4, sent.extend)
        >>> bunch.fill(10, iter("abcde")); bunch.asked, bunch.made
        (3, 3)
        >>> sent
        [(7, 10, 'a', None), (7, 11, 'b', None), (7, 12, 'c', None)]
        >>> bunch = Bunch([7] * 4, sent.extend)
        >>> bunch.fill(13, iter(["f", None, "g"])); bunch.asked, bunch.made
        (2, 1)
    """

    def __init__(
        self,
        gate: list[int],
        append_all: Callable[[Iterable[ItemTuple]], Any],
        wake: Callable[[bool], None] | None = None,
    ) -> None:
        self._size = len(gate)
        self.gate = gate
        self._wake = wake
        self._append_all = append_all
        self._numbers = iter(range(self._size))
        self._left: repeat[Any] = repeat(None, self._size)

    @property
    def asked(self) -> int:
        """Number of items that the generator was asked for; any thread may read this and `made`.

        While the generator runs, and after an item of None, it is one more than `made`.
        """
        return max(0, self._size - 1 - operator.length_hint(self._numbers))

    @property
    def made(self) -> int:
        """Number of items that the generator has made."""
        return max(0, self._size - 1 - operator.length_hint(self._left))

    def fill(self, number: int, values: Iterator[Any]) -> None:
        """Send items.

        Args:
            number: Number of the first item.
            values: Generator of the items.
        """
        self._numbers = iter(range(number - 1, number - 1 + self._size))
        given = takewhile(_is_given, chain(_FIRST, values))
        rows = zip(self._waking_gate(), self._numbers, given, self._left, strict=False)
        # While this is kept, `zip` makes a new tuple for each item. Otherwise it would keep one
        # of them, and with it an item that the loop has dropped.
        kept = next(rows, None)
        self._append_all(rows)
        del kept

    def _waking_gate(self) -> Iterable[int]:
        """Return the gate, with the call behind the first item."""
        if self._wake is None:
            return self.gate
        # The row before the first item, the item, the call, which yields nothing, and the rest.
        rest = iter(self.gate)
        return chain(islice(rest, 2), filter(None, map(self._wake, _FIRST)), rest)
