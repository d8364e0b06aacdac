"""The loop of a worker that does tasks.

serve_tasks: take a ticket -> its elements -> their results -> collate -> send -> the next one
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from enqueuer.errors import Closed
from enqueuer.workers.messages import Empty, Failure, Sender, Ticket, Tickets
from enqueuer.workers.plan import OnError, Plan, skip_or_end
from enqueuer.workers.shards import Task, do_nothing
from enqueuer.workers.tasks import FETCH, TaskSource


def serve_tasks(
    plan: Plan,
    tickets: Tickets,
    sender: Sender,
    enter: Callable[[Task], None] | None = None,
) -> None:
    """Do one task after the other, until there are no more or the consumer left.

    Args:
        plan: Work with a TaskSource.
        tickets: Source of the tickets.
        sender: Sender of the results, at most one item for each ticket.
        enter: Function that seeds the global generators for the first task of a ticket. Calling
            it for each task would take longer than many tasks do.
    """
    source = plan.source
    assert isinstance(source, TaskSource)
    enter = enter if enter is not None and source.runs_code else do_nothing
    do = _do_plain if source.is_plain else do_task
    try:
        while (ticket := tickets.next_ticket()) is not None:
            do(source, ticket, sender, enter, plan.on_error)
    except Closed:
        pass


def _do_plain(
    source: TaskSource,
    ticket: Ticket,
    sender: Sender,
    enter: Callable[[Task], None],
    on_error: OnError,
) -> None:
    """Do a task of a plain source, with fewer calls than `do_task`."""
    number, epoch, (index,), _ = ticket
    seed = source.random_seed
    if enter is not do_nothing:
        enter(Task(index, epoch, seed))
    try:
        value = source.result(index, epoch, seed)
    except BaseException as error:
        failure: Failure | None = Failure(0, number, error)
    else:
        failure = try_to_send(number, value, sender)
    if failure is not None:
        try:
            _skip_batch(failure, sender, on_error)
        finally:
            # Otherwise the traceback of its error would refer to itself, through this frame.
            del failure


def do_task(
    source: TaskSource,
    ticket: Ticket,
    sender: Sender,
    enter: Callable[[Task], None],
    on_error: OnError,
) -> None:
    """Send the result of a ticket, or `Empty`, and before that a failure for each error.

    Args:
        source: The source of the tasks.
        ticket: The ticket.
        sender: Sender of the result.
        enter: Function of the first task.
        on_error: What to do about an exception.
    """
    results: list[Any] = []
    failures: list[Raised] = []
    if enter is not do_nothing:
        enter(Task(ticket.indices[0], ticket.epoch, source.random_seed))
    elements, failed_fetch = fetched(source, ticket)
    if failed_fetch is None:
        try:
            results.extend(source.results_of(ticket, elements))
        except BaseException as error:
            failures.append(Raised(error))
    # If one raised StopIteration, that looks like an end, and comes again.
    left = range(len(results) + len(failures), len(ticket.indices))
    rest = (outcome_of(source, ticket, place, elements[place]) for place in left)
    try:
        send_results(source, ticket, results, chain(failures, rest), sender, on_error, failed_fetch)
    finally:
        # Otherwise its traceback would refer to itself, through this frame.
        del failures


def fetched(source: TaskSource, ticket: Ticket) -> tuple[Sequence[Any], BaseException | None]:
    """Return the elements of a ticket, and the exception of fetching all at once, if it failed.

    If they are then fetched one by one, the element at fault raises its own error.
    """
    try:
        return source.elements_of(ticket), None
    except BaseException as error:
        return [FETCH] * len(ticket.indices), error


class Raised:
    """The outcome of an element, a sample or a batch that raised."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def outcome_of(source: TaskSource, ticket: Ticket, place: int, element: Any) -> Any:
    """Return the result of one element of a ticket, or what it raised."""
    try:
        return source.result(ticket.indices[place], ticket.epoch, source.random_seed, element)
    except BaseException as error:
        return Raised(error)


def send_results(
    source: TaskSource,
    ticket: Ticket,
    results: list[Any],
    rest: Iterable[Any],
    sender: Sender,
    on_error: OnError,
    failed_fetch: BaseException | None,
) -> None:
    """Collate and send the results of a ticket, or `Empty`, and before that its failures.

    Args:
        source: The source of the tasks.
        ticket: The ticket.
        results: Results of the first elements.
        rest: Outcomes of the others.
        sender: Sender of the item.
        on_error: What to do about an exception.
        failed_fetch: Exception of fetching all elements at once, if no single one is at fault.
    """
    for place, result in enumerate(rest, len(results)):
        if isinstance(result, Raised):
            failed_fetch, failure = None, Failure(place, ticket.number, result.error)
            goes_on, result = skip_or_end(failure, sender, on_error)
            if not goes_on:
                return
        results.append(result)
    if failed_fetch is not None:
        goes_on, _ = skip_or_end(Failure(0, ticket.number, failed_fetch), sender, on_error)
        if not goes_on:
            return
    try:
        value = source.item_of(ticket, results, source.random_seed)
    except BaseException as error:
        failed: Failure | None = Failure(0, ticket.number, error)
    else:
        failed = try_to_send(ticket.number, value, sender)
    if failed is not None:
        _skip_batch(failed, sender, on_error)


def try_to_send(number: int, value: Any, sender: Sender, shard: int = 0) -> Failure | None:
    """Send an item, or `Empty` for a task without a result; return the failure if that raises."""
    if value is None:
        sender.send(Empty(number))
        return None
    try:
        sender.send_item(shard, number, value)
    except Closed:
        raise
    except BaseException as error:
        return Failure(shard, number, error)
    return None


def send_replacement(failure: Failure, value: Any, sender: Sender) -> bool:
    """Send a value in place of the item that failed; return False if its failure was sent."""
    failed = try_to_send(failure.number, value, sender, failure.shard)
    if failed is not None:
        sender.send(failed)
    return failed is None


def _skip_batch(failure: Failure, sender: Sender, on_error: OnError) -> None:
    """Send the failure of a whole batch, then its replacement, or `Empty`, if it is skipped."""
    goes_on, replacement = skip_or_end(failure, sender, on_error)
    if goes_on:
        send_replacement(failure, replacement, sender)
