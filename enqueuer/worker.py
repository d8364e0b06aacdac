"""The loop that every worker runs, whatever runs the worker: shards -> items -> a sender.

    serve: wait for an epoch -> run -> wait for the next one -> ... -> exit
    run:   one item of each shard in turn, until all have ended or one has failed
    serve_tasks: take a ticket -> do it -> take the next one -> ... -> exit

The items leave in the order in which an ordered consumer reads them. This file knows no
backend: the sender is a thread's buffer, a process's channel or, in a test, a list.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from enqueuer.errors import Closed, StateMismatch
from enqueuer.messages import (
    Empty,
    End,
    Epoch,
    Failure,
    Orders,
    Reported,
    Sender,
    Start,
    Ticket,
    Tickets,
)
from enqueuer.shards import Seeded, Shard, Task, listen_to
from enqueuer.sources import LiveSource, Source, Stateful, iterate
from enqueuer.tasks import FETCH, TaskSource

_log = logging.getLogger("enqueuer")

OnError = Literal["raise", "skip"] | Callable[[Exception], Any]
"""What to do about an exception: end, leave its place empty, or ask for something in its place."""


@dataclass(frozen=True)
class Plan:
    """What one worker is to do.

    Attributes:
        source: What the user handed over.
        shards: The indices of this worker's shards.
        count: How many shards there are in all.
        random_seed: Of the enqueuer.
        on_error: What to do about an exception of the source's.
    """

    source: Source | TaskSource
    shards: tuple[int, ...]
    count: int
    random_seed: int
    on_error: OnError = "raise"

    def of(self, epoch: Epoch) -> dict[Shard, Start]:
        """Return where this worker's shards begin in an epoch."""
        starts = dict.fromkeys(self.shards, Start()) if epoch.starts is None else epoch.starts
        return {
            Shard(index, self.count, epoch.number, self.random_seed): start
            for index, start in starts.items()
        }


def serve(
    plan: Plan, orders: Orders, sender: Sender, enter: Callable[[Shard], None] | None = None
) -> None:
    """Run one epoch after the other, until there are no more orders or the consumer left.

    Args:
        plan: The source and this worker's shards.
        orders: Where to wait for the next epoch.
        sender: Where items, ends and a failure go.
        enter: Called with the shard whose code is about to run, to exchange global states.
    """
    assert not isinstance(plan.source, TaskSource)
    try:
        last = -1
        while (epoch := orders.next_epoch()) is not None:
            if epoch.number <= last:
                continue  # told again: an exception struck the consumer when it had told it
            last = epoch.number
            run(plan.source, plan.of(epoch), sender, enter or _nothing, plan.on_error)
    except Closed:
        pass


def run(
    source: Source,
    starts: Mapping[Shard, Start],
    sender: Sender,
    enter: Callable[[Shard], None],
    on_error: OnError = "raise",
) -> None:
    """Send what `source` yields for each shard in turn, then each shard's end.

    The first exception ends the run: it is sent as a Failure. With another `on_error` it ends
    only the shard whose generator it came from. Closed, which says that the consumer left, goes
    up to the caller. Either way the generators are closed, here in the thread that ran them, so
    that their `finally` runs.
    """
    streams = deque(_Stream(source, shard, start) for shard, start in starts.items())
    with ExitStack() as stack:
        for stream in streams:
            stack.callback(stream.close)
        while streams:
            stream = streams[0]
            enter(stream.shard)
            try:
                has_more = stream.advance(sender, alone=len(streams) == 1)
            except BaseException as error:
                # our Closed says that the consumer left; the user's code may raise one, too
                if isinstance(error, Closed) and not stream.in_user_code:
                    raise
                stream.tell(sender)
                failure = Failure(stream.shard.index, stream.number, error)
                goes_on, value = _instead(failure, sender, on_error)
                if not goes_on:
                    del failure  # or the error, whose traceback has this frame, would be kept
                    return
                if stream.is_behind:
                    value = None  # what stood in its place was had before
                if value is not None and not _send_instead(failure, value, sender):
                    return
                stream.number += 1
                has_more = not stream.in_user_code  # it is over if it raised
                if has_more and value is None:
                    continue  # nothing came of its turn, as if the item had been None
            if has_more:
                streams.rotate(-1)
            else:
                streams.popleft()
                sender.send(End(stream.shard.index, stream.state_at_end, stream.number))


def serve_tasks(
    plan: Plan,
    tickets: Tickets,
    sender: Sender,
    enter: Callable[[Task], None] | None = None,
) -> None:
    """Do one task after the other, until there are no more or the consumer left.

    Args:
        plan: With a TaskSource.
        tickets: Where to take them from.
        sender: Where the results go, an item of each at most.
        enter: Called with the first task of a ticket before it is done, to seed global
            generators; not with each, since that would take longer than many tasks.
    """
    source = plan.source
    assert isinstance(source, TaskSource)
    enter = enter if enter is not None and source.runs_code else _nothing
    try:
        while (ticket := tickets.next_ticket()) is not None:
            _do(source, ticket, sender, enter, plan.on_error)
    except Closed:
        pass


def _do(
    source: TaskSource,
    ticket: Ticket,
    sender: Sender,
    enter: Callable[[Task], None],
    on_error: OnError,
) -> None:
    """Send the result of a ticket, or that it has none; and each error, by the element."""
    results = []
    seed = source.random_seed
    failed_fetch: BaseException | None = None
    if enter is not _nothing:
        enter(Task(ticket.indices[0], ticket.epoch, seed))
    try:
        elements = source.elements_of(ticket)
    except BaseException as error:
        # Fetched one by one, the element at fault raises an error of its own.
        elements, failed_fetch = [FETCH] * len(ticket.indices), error
    for place, (index, element) in enumerate(zip(ticket.indices, elements, strict=True)):
        try:
            result = source.result(index, ticket.epoch, seed, element)
        except BaseException as error:
            failed_fetch = None
            goes_on, result = _instead(Failure(place, ticket.number, error), sender, on_error)
            if not goes_on:
                return
        if result is not None:
            results.append(result)
    if failed_fetch is not None:  # and no element is at fault
        of_all, failed_fetch = Failure(0, ticket.number, failed_fetch), None
        goes_on, _ = _instead(of_all, sender, on_error)
        del of_all  # or its traceback would be a circle
        if not goes_on:
            return
    if not results:
        sender.send(Empty(ticket.number))
        return
    failure = _send_results(source, ticket, results, sender)
    if failure is not None:
        goes_on, result = _instead(failure, sender, on_error)
        if goes_on and result is not None:
            _send_instead(failure, result, sender)
        elif goes_on:
            sender.send(Empty(ticket.number))


def _send_results(
    source: TaskSource, ticket: Ticket, results: list[Any], sender: Sender
) -> Failure | None:
    try:
        value = results[0] if source.batch_size is None else source.collate(results)
    except BaseException as error:
        return Failure(0, ticket.number, error)
    if value is None:
        sender.send(Empty(ticket.number))
        return None
    try:
        sender.send_item(0, ticket.number, value)
    except Closed:
        raise
    except BaseException as error:
        return Failure(0, ticket.number, error)
    return None


def _instead(failure: Failure, sender: Sender, on_error: OnError) -> tuple[bool, Any]:
    """Report a failure, as one that is skipped if so wanted.

    Returns:
        Whether it is skipped, and what the user gives in its place: None, if nothing.
    """
    error, replacement = failure.error, None
    may_skip = isinstance(error, Exception) and not isinstance(error, StateMismatch)
    if on_error == "raise" or not may_skip:
        sender.send(failure)
        return False, None
    assert isinstance(error, Exception)
    if callable(on_error):
        try:
            replacement = on_error(error)
        except BaseException as second:
            sender.send(dataclasses.replace(failure, error=second))
            return False, None
    sender.send(dataclasses.replace(failure, skipped=True))
    return True, replacement


def _send_instead(failure: Failure, value: Any, sender: Sender) -> bool:
    """Send what comes in the place of a failure; return whether that could be."""
    try:
        sender.send_item(failure.shard, failure.number, value)
    except Closed:
        raise
    except BaseException as error:
        sender.send(dataclasses.replace(failure, error=error))
        return False
    return True


class _Stream:
    """One shard's iterator and the number of its next item."""

    def __init__(self, source: Source, shard: Shard, start: Start) -> None:
        self.shard = shard
        self.number = 0
        self.in_user_code = False
        self.state_at_end: Any = None
        self._source = source
        self._start = start
        self._items: Iterator[Any] | None = None
        self._stateful: Stateful | None = None
        self._reports = listen_to(shard)

    @property
    def is_behind(self) -> bool:
        """Whether it is being run again, and the item that is next had come before."""
        return self.number < self._start.number

    def advance(self, sender: Sender, alone: bool) -> bool:
        """Send the next item that is not None, or all of them; return whether there may be more.

        Args:
            sender: Where to.
            alone: Whether no other shard has to have its turn.
        """
        self.in_user_code = True
        if self._items is None:
            self._items = self._open()
            self._replay(self._items, sender)
        index, items, number, stateful = self.shard.index, self._items, self.number, self._stateful
        reports = self._reports
        while True:
            try:
                value = next(items)
            except StopIteration:
                # What a function gives is thrown away now; a live source is read again.
                if stateful is not None and isinstance(self._source, LiveSource):
                    self.state_at_end = stateful.state_dict()
                self.in_user_code = False
                self.tell(sender)
                return False
            state = None if stateful is None else stateful.state_dict()
            self.in_user_code = False
            if reports:
                self.tell(sender)
            if value is not None:
                sender.send_item(index, number, value, state)
                self.number = number = number + 1
                if not alone:
                    return True
                del value  # or it lives on while next() makes the following one: twice the memory
            else:
                self.number = number = number + 1
                sender.check()  # or a source of nothing but None could not be stopped
            self.in_user_code = True

    def tell(self, sender: Sender) -> None:
        """Send what the generator has reported since the last item, before what it made."""
        shard, number = self.shard.index, self.number
        for nth in range(1, len(self._reports) + 1):
            error, log = self._reports.pop(0)
            sender.send(Reported(shard, number, error, nth=nth, log=log))

    def _open(self) -> Iterator[Any]:
        wanted, state, behind = self._start
        try:
            items, self._stateful = iterate(self._source.open(self.shard), state)
        except StopIteration as error:
            # left as it is it would look like an end
            raise RuntimeError("the generator function raised StopIteration") from error
        if state is not None:
            self.number = wanted - behind
        return items

    def _replay(self, items: Iterator[Any], sender: Sender) -> None:
        """Run an iterator from where it is, or what its state says, up to where it is to start."""
        wanted = self._start.number
        while self.number < wanted:
            try:
                next(items)
            except StopIteration:
                raise StateMismatch(
                    f"shard {self.shard.index} ended after {self.number} items when it was run "
                    f"again, but {wanted} had come of it before: its generator does not repeat "
                    "itself. Draw from shard.rng only, and read the same data"
                ) from None
            self.number += 1
            self._reports.clear()  # they were told when the item was made first
            self.in_user_code = False
            sender.check()
            self.in_user_code = True

    def close(self) -> None:
        """Run the generator's `finally`; what goes wrong there is logged, not raised.

        It must not hide the first error, and after a stop nobody is left to raise it to.
        """
        close = getattr(self._items, "close", None)
        if close is None:
            return
        try:
            close()
        except BaseException:
            _log.exception("closing the generator of shard %d failed", self.shard.index)


def _nothing(place: Seeded) -> None:
    """Leave the global states alone: threads share them with the training loop."""
