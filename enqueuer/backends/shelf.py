"""The results of tasks between their arrival and their turn, and the tickets that are out.

A task that was handed out twice, since its worker seemed to have died with it, still has one
result: the second is dropped here.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Iterator

from enqueuer.backends import size_of
from enqueuer.merging import TaskOrder
from enqueuer.messages import Empty, Failure, Item, Ticket


class Look(enum.Enum):
    """What is on the shelf."""

    ITEM = 1  # the next one
    NOTHING = 2  # that could be taken now
    ROOM = 3  # nothing either; but some that had no result are gone, and others can be handed out


class Shelf:
    """Called by one thread at a time.

    Attributes:
        tickets: Those whose results were not taken, by their numbers.
        largest_bytes: Of all results, if they are measured.
    """

    def __init__(self, measure: bool) -> None:
        self._measure = measure
        self.largest_bytes = 0
        self.tickets: dict[int, Ticket] = {}
        self._results: dict[int, Item | Empty | Failure] = {}  # in the order of their arrival
        self._skipped: dict[int, deque[Failure]] = {}

    @property
    def waiting(self) -> int:
        """How many results wait."""
        return sum(isinstance(result, Item) for result in self._results.values())

    def undone(self) -> list[int]:
        """Return the numbers of the tasks that have no result yet."""
        return [number for number in self.tickets if number not in self._results]

    def put(self, message: Item | Empty | Failure) -> None:
        """Keep what came of a task, unless it is known already."""
        number = message.number
        if number not in self.tickets or number in self._results:
            return
        if isinstance(message, Failure):
            index = self.tickets[number].indices[message.shard]
            message = dataclasses.replace(message, shard=index)
        if isinstance(message, Failure) and message.skipped:
            self._skipped.setdefault(number, deque()).append(message)
        else:
            self._results[number] = message
            if self._measure and isinstance(message, Item):
                self.largest_bytes = max(self.largest_bytes, size_of(message.value))

    def begin_again(self, number: int) -> None:
        """Forget the skipped errors of a task that will be done once more."""
        self._skipped.pop(number, None)

    def fail(self, number: int, failure: Failure) -> None:
        """Tell a failure in the place of a task, also of one that has no ticket."""
        self._results[number] = failure

    def has_next(self, order: TaskOrder) -> bool:
        """Return whether anything is next, an error too."""
        return self._ready(order) is not None

    def look(self, order: TaskOrder) -> Failure | Look:
        """Return the failure that is next; or whether an item is, or nothing."""
        found = Look.NOTHING
        while (number := self._ready(order)) is not None:
            if self._skipped.get(number):
                return self._skipped[number].popleft()
            match self._results[number]:
                case Failure() as failure:
                    return failure
                case Item():
                    return Look.ITEM
            self._take(number, order)
            found = Look.ROOM
        return found

    def items(self, order: TaskOrder, most: int) -> Iterator[Item]:
        """Take items as long as they are next: at most so many."""
        for _ in range(most):
            number = self._ready(order)
            if number is None or self._skipped.get(number):
                return
            result = self._results[number]
            if not isinstance(result, Item):
                return
            self._take(number, order)
            order.items += 1
            yield result

    def _ready(self, order: TaskOrder) -> int | None:
        if order.ordered:
            return order.next if order.next in self._results else None
        # what failed without a ticket, in the reader's hands, comes after all that was read
        with_ticket = (number for number in self._results if number in self.tickets)
        return next(with_ticket, None if self.tickets else next(iter(self._results), None))

    def _take(self, number: int, order: TaskOrder) -> None:
        order.took(0, number)
        self._results.pop(number, None)
        self._skipped.pop(number, None)
        self.tickets.pop(number, None)


class Shelved:
    """What every backend of tasks answers from its shelf."""

    _shelf: Shelf

    def tickets(self) -> list[Ticket]:
        return list(self._shelf.tickets.values())

    @property
    def outstanding(self) -> int:
        return len(self._shelf.tickets)

    @property
    def largest_bytes(self) -> int:
        return self._shelf.largest_bytes
