"""The results of tasks between their arrival and their turn, and the tickets that are out.

A task that was assigned twice, since its worker seemed to have died with it, still has one
result: the second is dropped here.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice, takewhile
from typing import Any, cast

from enqueuer.backends.order import TaskOrder
from enqueuer.common.sizes import size_of
from enqueuer.workers.messages import Empty, Failure, ItemTuple, Ticket


class Next(enum.Enum):
    """The next thing in the reorder buffer."""

    # The next result can be taken.
    ITEM = 1
    # No result can be taken now.
    NOTHING = 2
    # Neither now; but tasks without a result are done, so others can be assigned.
    ROOM = 3


_NAMES = ("next", "items")
_number_of = operator.itemgetter(1)
_value_of = operator.itemgetter(2)
_is_none = functools.partial(operator.is_, None)
# Returns None, and keeps nothing.
_forget = deque[object](maxlen=0).append


class ReorderBuffer:
    """Called by one thread at a time.

    Attributes:
        tickets: Those whose results were not taken, by their numbers.
        largest_bytes: Of all results, if they are measured.
    """

    def __init__(self, measure: bool) -> None:
        self._measure = measure
        self.largest_bytes = 0
        self.tickets: dict[int, Ticket] = {}
        # In the order of their arrival.
        self._results: dict[int, ItemTuple | Empty | Failure] = {}
        # Numbers of the tasks in `_results` that have no result: empty ones, and failures.
        self._without: set[int] = set()
        self._skipped: dict[int, deque[Failure]] = {}
        # Number of the task whose skipped error was returned last.
        self._reported = -1
        # Number of the task whose result was given away last.
        self._going = -1

    @property
    def waiting(self) -> int:
        """Number of results that wait."""
        # A list is made in one step: another thread may ask while the loop takes results.
        return sum(isinstance(result, tuple) for result in list(self._results.values()))

    def waiting_before(self, end: int, arriving: int) -> int:
        """Return how many results of tasks below a number wait.

        Args:
            end: The number.
            arriving: Number of results that are not here yet. Which tasks they belong to is not
                known, so they count for as many of these tasks as have no result.
        """
        # Lists are made in one step, as above.
        results, tickets = list(self._results.items()), list(self.tickets)
        before = {number for number, _ in results if number < end}
        missing = sum(number < end and number not in before for number in tickets)
        there = sum(number < end and isinstance(result, tuple) for number, result in results)
        return there + min(arriving, missing)

    @property
    def outstanding(self) -> int:
        """Number of tickets of tasks whose results were not taken."""
        return len(self.tickets) - (self._going in self.tickets)

    def undone(self) -> list[int]:
        """Return the numbers of the tasks that have no result yet."""
        return [number for number in self.tickets if number not in self._results]

    def acknowledge(self, order: TaskOrder) -> None:
        """Forget the task whose result was given away last; again does nothing."""
        if self._going >= 0:
            order.advance()
            self.tickets.pop(self._going, None)
            self._results.pop(self._going, None)
            self._skipped.pop(self._going, None)
            self._without.discard(self._going)
            self._going = -1

    def pass_over(self) -> None:
        """Forget the skipped error that `peek` returned last."""
        if self._reported >= 0:
            errors, self._reported = self._skipped[self._reported], -1
            errors.popleft()

    def put(self, message: ItemTuple | Empty | Failure) -> None:
        """Keep what came of a task, unless it is known already."""
        if isinstance(message, tuple) and message[2] is None:
            message = Empty(message[1])
        number = message[1] if isinstance(message, tuple) else message.number
        if number not in self.tickets or number in self._results:
            return
        if isinstance(message, Failure):
            index = self.tickets[number].indices[message.shard]
            message = dataclasses.replace(message, shard=index)
        if isinstance(message, Failure) and message.skipped:
            self._skipped.setdefault(number, deque()).append(message)
        else:
            if not isinstance(message, tuple):
                self._without.add(number)
            self._results[number] = message
            if self._measure and isinstance(message, tuple):
                # Never 0, which means that no result has come yet.
                self.largest_bytes = max(self.largest_bytes, size_of(message[2]), 1)

    def put_all(self, arrived: deque[Any]) -> None:
        """Keep what came of some tasks, and remove it from where it arrived."""
        is_plain = not self._measure and set(map(type, arrived)) == {tuple}
        if is_plain and not any(map(_is_none, map(_value_of, arrived))):
            tickets, results = self.tickets, self._results
            items = cast("deque[ItemTuple]", arrived)
            known = dict(zip(map(_number_of, items), items, strict=True))
            if not known.keys() <= tickets.keys():
                known = {number: item for number, item in known.items() if number in tickets}
            if not results.keys().isdisjoint(known.keys()):
                known = {number: item for number, item in known.items() if number not in results}
            results.update(known)
            arrived.clear()
        while arrived:
            self.put(arrived[0])
            arrived.popleft()

    def forget_skipped(self, number: int) -> None:
        """Forget the skipped errors of a task that will run again."""
        self._skipped.pop(number, None)

    def fail(self, number: int, failure: Failure) -> None:
        """Put a failure in the place of a task, also of one that has no ticket."""
        self._without.add(number)
        self._results[number] = failure

    def has_next(self, order: TaskOrder) -> bool:
        """Return whether anything is next, an error too."""
        return self._ready(order) is not None

    def peek(self, order: TaskOrder) -> Failure | Next:
        """Return the failure that is next; or whether an item is, or nothing."""
        found = Next.NOTHING
        if self._going >= 0:
            self.acknowledge(order)
        self._reported = -1
        while (number := self._ready(order)) is not None:
            errors = self._skipped.get(number)
            if errors:
                failure = errors[0]
                self._reported = number
                return failure
            match self._results[number]:
                case Failure() as failure:
                    return failure
                case tuple():
                    return Next.ITEM
            order.taken[number] = None
            self._going = number
            self.acknowledge(order)
            found = Next.ROOM
        return found

    def items(self, order: TaskOrder, most: int) -> Iterator[ItemTuple]:
        """Take items as long as they are next: at most so many.

        To be read by something written in C, as `Inbox.items`.
        """
        if self._going >= 0:
            self.acknowledge(order)
        if not order.ordered or most == 1 or self._without or self._skipped:
            return self._one_by_one(order, most)
        first, results = order.next, cast("dict[int, ItemTuple]", self._results)
        if order.end is not None:
            most = min(most, order.end - first)
        numbers = list(islice(results, most))
        last = first + len(numbers) - 1
        # As a rule all came in order. To compare them is quicker than to look for each of them.
        is_whole = numbers[:1] + numbers[-1:] == [first, last]
        if not is_whole or numbers != list(range(first, last + 1)):
            numbers = list(takewhile(results.__contains__, range(first, first + most)))
        there = len(numbers)
        after = (first + there, order.items + there)
        # What is written behind the items yields nothing.
        return chain(
            map(results.pop, numbers),
            filter(None, map(_forget, map(self.tickets.pop, numbers))),
            filter(None, map(setattr, (order, order), _NAMES, after)),
        )

    def _one_by_one(self, order: TaskOrder, most: int) -> Iterator[ItemTuple]:
        taken = order.taken
        for _ in range(most):
            number = self._ready(order)
            if number is None or self._skipped.get(number):
                return
            result = self._results[number]
            if not isinstance(result, tuple):
                return
            # From here to the yield is no call and no jump, and so no signal handler runs.
            taken[number] = None
            order.items += 1
            self._going = number
            yield result
            self.acknowledge(order)

    def _ready(self, order: TaskOrder) -> int | None:
        """Return the number of the result that is next, if it is there."""
        end = order.end
        if order.ordered:
            number = order.next
            return number if number in self._results and number != end else None
        results = self._results if end is None else [n for n in self._results if n < end]
        # A failure without a ticket is the reader's: it comes after all that was read.
        with_ticket = (number for number in results if number in self.tickets)
        return next(with_ticket, None if self.tickets else next(iter(results), None))
