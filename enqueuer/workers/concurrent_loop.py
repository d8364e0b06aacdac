"""The loop of a worker that runs several elements at once, by `concurrency=n`.

    serve_concurrently: threads have room -> take a ticket -> its elements to the threads
    the last element of a ticket is done -> collate -> send, in the thread that has done it

`ElementThreads` says when there is room: mostly when a thread is free, so that no task waits here
while another worker could do it. The errors of a batch are sent in the order of its elements, as by
`serve_tasks`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from enqueuer.errors import Closed
from enqueuer.monitoring.meters import Meter
from enqueuer.workers.element_threads import ElementThreads, Job
from enqueuer.workers.messages import Empty, End, Failure, Sender, Ticket, Tickets
from enqueuer.workers.plan import OnError, Plan
from enqueuer.workers.shards import Task, do_nothing
from enqueuer.workers.skipping import skip_or_end
from enqueuer.workers.task_loop import do_task, send_results, serve_tasks
from enqueuer.workers.tasks import FETCH, TaskSource


class ShareableSender(Sender, Protocol):
    """A Sender that several threads of a worker can use."""

    meter: Meter

    def share(self, threads: ElementThreads) -> Sender:
        """Return a Sender that any of the threads may call; a stall report shows the threads."""


def serve_function(source: object) -> Callable[..., None]:
    """Return the loop of a worker that does the tasks of a source."""
    is_concurrent = isinstance(source, TaskSource) and source.concurrency > 1
    return serve_concurrently if is_concurrent else serve_tasks


def serve_concurrently(
    plan: Plan,
    tickets: Tickets,
    sender: ShareableSender,
    enter: Callable[[Task], None] | None = None,
) -> None:
    """Do tasks, several elements at once, until there are no more or the consumer left.

    Args:
        plan: Work with a TaskSource.
        tickets: Source of the tickets.
        sender: Sender of the results, at most one item for each ticket.
        enter: Function that seeds the global generators. It is called for the first ticket only,
            as all threads share them.
    """
    source = plan.source
    assert isinstance(source, TaskSource)
    threads = ElementThreads(source.concurrency, sender.meter)
    shared = sender.share(threads)
    enter = enter if enter is not None and source.runs_code else do_nothing
    try:
        threads.start(threading.current_thread().name)
    except RuntimeError as error:
        _fail_all(tickets, sender, error)
        return
    try:
        while threads.wait_for_room() and (ticket := tickets.next_ticket()) is not None:
            enter(Task(ticket.indices[0], ticket.epoch, source.random_seed))
            enter = do_nothing
            threads.submit(_jobs_of(source, ticket, shared, plan.on_error, threads))
    except Closed:
        threads.close()
    except BaseException as error:
        threads.close(error)
    threads.join()
    if threads.error is not None:
        raise threads.error


def _fail_all(tickets: Tickets, sender: Sender, error: Exception) -> None:
    """Send the error of the start for each ticket."""
    try:
        while (ticket := tickets.next_ticket()) is not None:
            sender.send(Failure(0, ticket.number, error))
    except Closed:
        pass


def _jobs_of(
    source: TaskSource, ticket: Ticket, sender: Sender, on_error: OnError, threads: ElementThreads
) -> list[Job]:
    """Return the jobs with which a ticket begins."""
    whole = _Whole(source, ticket, sender, on_error)
    try:
        # Here, so that no two threads announce the epoch.
        source.begin_if_new(ticket.epoch)
    except BaseException:
        # It raises once more there, where the error is sent.
        return [whole]
    if len(ticket.indices) == 1:
        return [whole]
    batch = _Batch(source, ticket, sender, on_error)
    if source.fetches_many(ticket):
        return [whole] if source.map is None else [_Fetch(batch, threads)]
    return batch.jobs(source.elements_of(ticket))


class _Whole:
    """All of a ticket, done by one thread."""

    is_work = True

    def __init__(
        self, source: TaskSource, ticket: Ticket, sender: Sender, on_error: OnError
    ) -> None:
        self._work = (source, ticket, sender, do_nothing, on_error)
        self.ticket = ticket
        self.indices = ticket.indices

    def run(self) -> None:
        self._work[2].check()
        do_task(*self._work)


class _Raised:
    """The outcome of an element that raised."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Batch:
    """The outcomes of the elements of one ticket, until all are there."""

    def __init__(
        self, source: TaskSource, ticket: Ticket, sender: Sender, on_error: OnError
    ) -> None:
        self.source = source
        self.ticket = ticket
        self.sender = sender
        self.failed_fetch: BaseException | None = None
        self._on_error = on_error
        count = len(ticket.indices)
        self._outcomes: list[Any] = [None] * count
        # Elements from this place on need not be run: an earlier one has failed.
        self._needed = self._left = count
        self._lock = threading.Lock()

    def jobs(self, elements: Sequence[Any]) -> list[Job]:
        """Return a job for each element."""
        return [_Element(self, place, element) for place, element in enumerate(elements)]

    def is_needed(self, place: int) -> bool:
        """Return whether an element must be run."""
        return place < self._needed

    def put(self, place: int, outcome: Any) -> None:
        """Keep the outcome of an element; after the last one, send the result of the ticket."""
        with self._lock:
            self._outcomes[place] = outcome
            if isinstance(outcome, _Raised) and self._on_error == "raise":
                self._needed = min(self._needed, place)
            self._left -= 1
            if self._left:
                return
        self._finish()

    def _finish(self) -> None:
        ticket, sender, on_error = self.ticket, self.sender, self._on_error
        results, has_failed = [], False
        for place, result in enumerate(self._outcomes):
            if isinstance(result, _Raised):
                has_failed = True
                failure = Failure(place, ticket.number, result.error)
                goes_on, result = skip_or_end(failure, sender, on_error)
                if not goes_on:
                    return
            results.append(result)
        # No single element is at fault, so the failure is that of fetching all of them.
        if self.failed_fetch is not None and not has_failed:
            of_all = Failure(0, ticket.number, self.failed_fetch)
            goes_on, _ = skip_or_end(of_all, sender, on_error)
            if not goes_on:
                return
        send_results(self.source, ticket, results, sender, on_error)


class _Fetch:
    """Fetching the elements of a batch by one call, before each gets a thread."""

    is_work = False

    def __init__(self, batch: _Batch, threads: ElementThreads) -> None:
        self._batch = batch
        self._threads = threads
        self.ticket = batch.ticket
        self.indices = batch.ticket.indices

    def run(self) -> None:
        batch = self._batch
        batch.sender.check()
        try:
            elements = batch.source.elements_of(batch.ticket)
        except BaseException as error:
            # If they are fetched one by one, the element at fault raises its own error.
            elements, batch.failed_fetch = [FETCH] * len(self.indices), error
        self._threads.submit(batch.jobs(elements))


class _Element:
    """One element of a batch."""

    is_work = True

    def __init__(self, batch: _Batch, place: int, element: Any) -> None:
        self._batch = batch
        self.ticket = batch.ticket
        self._place = place
        self._element = element

    @property
    def indices(self) -> tuple[int, ...]:
        return self.ticket.indices[self._place : self._place + 1]

    def run(self) -> None:
        batch, place = self._batch, self._place
        batch.sender.check()
        outcome: Any = None
        if batch.is_needed(place):
            source, ticket = batch.source, batch.ticket
            try:
                outcome = source.result(
                    ticket.indices[place], ticket.epoch, source.random_seed, self._element
                )
            except BaseException as error:
                outcome = _Raised(error)
        batch.put(place, outcome)


class LockedSender:
    """A Sender that any thread may call, around one that one thread at a time may."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._lock = threading.Lock()

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        with self._lock:
            self._sender.send_item(shard, number, value, state)

    def send(self, message: End | Failure | Empty) -> None:
        with self._lock:
            self._sender.send(message)

    def check(self) -> None:
        self._sender.check()

    def watch(self, waited: Callable[[int], None]) -> None:
        self._sender.watch(waited)
