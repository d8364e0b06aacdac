"""The loop of a worker that does tasks, one after the other or several elements at once.

serve_tasks:        take a ticket -> its elements -> their results -> collate -> send -> the next
serve_concurrently: threads have room -> take a ticket -> its elements to the threads
                    the last element of a ticket is done -> collate -> send, in its thread

With `concurrency=n`, `ElementThreads` says when there is room: mostly when a thread is free, so no
task waits here while another worker could do it. Both send the errors of a batch in the
order of its elements.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from enqueuer.errors import Closed
from enqueuer.workers.element_threads import ElementThreads, ThreadJob
from enqueuer.workers.messages import Channel, Empty, End, Failure, Sender, Ticket
from enqueuer.workers.plan import Plan, serve_failure, skip_or_end
from enqueuer.workers.shards import Task, do_nothing
from enqueuer.workers.tasks import FETCH, TaskSource


def serve_tasks(plan: Plan, channel: Channel, enter: Callable[[Task], None] | None = None) -> None:
    """Do one task after the other, until there are no more or the consumer left.

    Args:
        plan: Work with a TaskSource.
        channel: Source of the tickets, to which at most one item is sent for each.
        enter: Function that seeds the global generators for the first task of a ticket. Calling
            it for each task would take longer than many tasks do.
    """
    work = TaskWork(plan, channel)
    source, do = work.source, work.send if work.source.is_plain else work.do
    enter = enter if enter is not None and source.runs_code else do_nothing
    with contextlib.suppress(Closed):
        while (ticket := channel.next_ticket()) is not None:
            if enter is not do_nothing:
                enter(Task(ticket.indices[0], ticket.epoch, source.random_seed))
            do(ticket)


class Raised:
    """The outcome of an element, a sample or a batch that raised."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class TaskWork:
    """The work of a worker for each ticket, also if several threads share the elements.

    Args:
        plan: Work with a TaskSource.
        sender: Sender of the results.

    Attributes:
        source: The source of the tasks.
        on_error: What to do about an exception.
    """

    def __init__(self, plan: Plan, sender: Sender) -> None:
        assert isinstance(plan.source, TaskSource)
        self.source = plan.source
        self.on_error = plan.on_error
        self._sender = sender

    def do(self, ticket: Ticket) -> None:
        """Send the result of a ticket, or `Empty`, and before that a failure for each error."""
        results: list[Any] = []
        failures: list[Raised] = []
        elements, failed_fetch = self.fetched(ticket)
        if failed_fetch is None:
            try:
                results.extend(self.source.results_of(ticket, elements))
            except BaseException as error:
                failures.append(Raised(error))
        # If one raised StopIteration, that looks like an end, and comes again.
        left = range(len(results) + len(failures), len(ticket.indices))
        rest = (self.outcome_of(ticket, place, elements[place]) for place in left)
        try:
            self.send_batch(ticket, results, chain(failures, rest), failed_fetch)
        finally:
            # Otherwise its traceback would refer to itself, through this frame.
            del failures

    def fetched(self, ticket: Ticket) -> tuple[Sequence[Any], BaseException | None]:
        """Return the elements of a ticket, and the exception of fetching all at once, if it failed.

        If they are then fetched one by one, the element at fault raises its own error.
        """
        try:
            return self.source.elements_of(ticket), None
        except BaseException as error:
            return [FETCH] * len(ticket.indices), error

    def outcome_of(self, ticket: Ticket, place: int, element: Any) -> Any:
        """Return the result of one element of a ticket, or what it raised."""
        source, index = self.source, ticket.indices[place]
        try:
            return source.result(index, ticket.epoch, source.random_seed, element)
        except BaseException as error:
            return Raised(error)

    def send_batch(
        self,
        ticket: Ticket,
        results: list[Any],
        rest: Iterable[Any],
        failed_fetch: BaseException | None,
    ) -> None:
        """Collate and send the results of a ticket, or `Empty`, and before that its failures.

        Args:
            ticket: The ticket.
            results: Results of the first elements.
            rest: Outcomes of the others.
            failed_fetch: Exception of fetching all elements at once, if no single one is at fault.
        """
        for place, result in enumerate(rest, len(results)):
            if isinstance(result, Raised):
                failed_fetch, failure = None, Failure(place, ticket.number, result.error)
                goes_on, result = skip_or_end(failure, self._sender, self.on_error)
                if not goes_on:
                    return
            results.append(result)
        if failed_fetch is not None:
            failure = Failure(0, ticket.number, failed_fetch)
            goes_on, _ = skip_or_end(failure, self._sender, self.on_error)
            if not goes_on:
                return
        self.send(ticket, results)

    def send(self, ticket: Ticket, results: list[Any] | None = None) -> None:
        """Send the item of a ticket, or `Empty`; if making it fails, its failure.

        Args:
            ticket: The ticket.
            results: Results of its elements; None: its only one is to be made, of a plain source.
        """
        number, epoch, indices, _ = ticket
        source = self.source
        try:
            if results is None:
                value = source.result(indices[0], epoch, source.random_seed)
            else:
                value = source.item_of(ticket, results, source.random_seed)
        except BaseException as error:
            failure: Failure | None = Failure(0, number, error)
        else:
            failure = try_to_send(number, value, self._sender)
        if failure is not None:
            try:
                goes_on, value = skip_or_end(failure, self._sender, self.on_error)
                if goes_on:
                    send_replacement(failure, value, self._sender)
            finally:
                # Otherwise the traceback of its error would refer to itself, through this frame.
                del failure


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


def serve_concurrently(
    plan: Plan, channel: Any, enter: Callable[[Task], None] | None = None
) -> None:
    """Do tasks, several elements at once, until there are no more or the consumer left.

    Args:
        plan: Work with a TaskSource.
        channel: Source of the tickets, to which at most one item is sent for each, with a `meter`.
            Its method `share` returns a Sender that any of the threads may call.
        enter: Function that seeds the global generators. It is called for the first ticket only,
            as all threads share them.
    """
    source = plan.source
    assert isinstance(source, TaskSource)
    threads = ElementThreads(source.concurrency, channel.meter, channel.check, source.is_async)
    try:
        threads.start(threading.current_thread().name)
    except (RuntimeError, OSError) as error:
        serve_failure(error, (), channel)
        return
    work = TaskWork(plan, channel.share(threads))
    enter = enter if enter is not None and source.runs_code else do_nothing
    try:
        while threads.wait_for_room() and (ticket := channel.next_ticket()) is not None:
            enter(Task(ticket.indices[0], ticket.epoch, source.random_seed))
            enter = do_nothing
            threads.submit(_jobs_of(work, ticket, threads))
        # Without tickets the coroutines that run are completed, unless the consumer left.
        if source.is_async:
            channel.check()
    except BaseException as error:
        threads.close(error)
        threads.cancel()
    threads.join()
    if threads.error is not None:
        raise threads.error


def _jobs_of(work: TaskWork, ticket: Ticket, threads: ElementThreads) -> list[ThreadJob]:
    """Return the jobs with which a ticket begins."""
    source = work.source
    whole = ThreadJob(ticket, ticket.indices, functools.partial(work.do, ticket))
    try:
        # Here, so that no two threads announce the epoch.
        source.begin(ticket.epoch)
    except BaseException:
        # It raises once more there, where the error is sent.
        return [whole]
    is_fetched = source.fetches_many(ticket)
    if len(ticket.indices) == 1 or (is_fetched and source.map is None):
        return [whole]
    batch = _Batch(work, ticket)
    if not is_fetched:
        return batch.jobs(source.elements_of(ticket))
    fetch = functools.partial(batch.fetch, threads)
    return [ThreadJob(ticket, ticket.indices, fetch, is_work=False)]


class _Batch:
    """The outcomes of the elements of one ticket, until all are there."""

    def __init__(self, work: TaskWork, ticket: Ticket) -> None:
        self._work = work
        self._ticket = ticket
        self._failed_fetch: BaseException | None = None
        count = len(ticket.indices)
        self._outcomes: list[Any] = [None] * count
        # Elements from this place on need not be run: an earlier one has failed.
        self._needed = self._left = count
        self._lock = threading.Lock()

    def fetch(self, threads: ElementThreads) -> None:
        """Fetch the elements by one call, before each gets a thread."""
        elements, self._failed_fetch = self._work.fetched(self._ticket)
        threads.submit(self.jobs(elements))

    def jobs(self, elements: Sequence[Any]) -> list[ThreadJob]:
        """Return a job for each element."""
        run, indices = functools.partial, self._ticket.indices
        return [
            ThreadJob(self._ticket, (indices[place],), run(self._run, place, element))
            for place, element in enumerate(elements)
        ]

    def _run(self, place: int, element: Any) -> None:
        """Run one element; after the last one, send the result of the ticket."""
        work, ticket, outcome = self._work, self._ticket, None
        if place < self._needed:
            outcome = work.outcome_of(ticket, place, element)
        with self._lock:
            self._outcomes[place] = outcome
            if isinstance(outcome, Raised) and work.on_error == "raise":
                self._needed = min(self._needed, place)
            self._left -= 1
            if self._left:
                return
        work.send_batch(ticket, [], self._outcomes, self._failed_fetch)


class LockedSender:
    """A Sender that any thread may call, around one that one thread at a time may."""

    def __init__(self, sender: Sender) -> None:
        self._sender, self.check = sender, sender.check
        self._lock = threading.Lock()

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        with self._lock:
            self._sender.send_item(shard, number, value, state)

    def send(self, message: End | Failure | Empty) -> None:
        with self._lock:
            self._sender.send(message)
