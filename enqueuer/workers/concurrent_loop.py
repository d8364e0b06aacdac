"""The loop of a worker that runs several elements at once, by `concurrency=n`.

    serve_concurrently: threads have room -> take a ticket -> its elements to the threads
    the last element of a ticket is done -> collate -> send, in the thread that has done it

`ElementThreads` says when there is room: mostly when a thread is free, so that no task waits here
while another worker could do it. The errors of a batch are sent in the order of its elements, as by
`serve_tasks`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from enqueuer.workers import loop, task_loop
from enqueuer.workers.element_threads import ElementThreads, ThreadJob
from enqueuer.workers.event_loop import EventLoop
from enqueuer.workers.messages import Empty, End, Failure, Sender, Ticket, Tickets
from enqueuer.workers.plan import OnError, Plan, serve_failure
from enqueuer.workers.shards import Task, do_nothing
from enqueuer.workers.tasks import TaskSource


def serve_function(source: object) -> Callable[..., None]:
    """Return the loop of a worker of a source."""
    if not isinstance(source, TaskSource):
        return loop.serve
    return serve_concurrently if source.has_threads else task_loop.serve_tasks


def serve_concurrently(
    plan: Plan,
    tickets: Tickets,
    sender: Any,
    enter: Callable[[Task], None] | None = None,
) -> None:
    """Do tasks, several elements at once, until there are no more or the consumer left.

    Args:
        plan: Work with a TaskSource.
        tickets: Source of the tickets.
        sender: Sender of the results, at most one item for each ticket, with a `meter`. Its method
            `share` returns a Sender that any of the threads may call.
        enter: Function that seeds the global generators. It is called for the first ticket only,
            as all threads share them.
    """
    source = plan.source
    assert isinstance(source, TaskSource)
    name, loop = threading.current_thread().name, None
    try:
        loop = EventLoop(f"{name}.loop", source.concurrency) if source.is_async else None
        threads = ElementThreads(source.concurrency, sender.meter, sender.check, loop)
        threads.start(name)
    except (RuntimeError, OSError) as error:
        if loop is not None:
            loop.close()
        serve_failure(error, (), tickets, sender)
        return
    shared = sender.share(threads)
    enter = enter if enter is not None and source.runs_code else do_nothing
    try:
        while threads.wait_for_room() and (ticket := tickets.next_ticket()) is not None:
            enter(Task(ticket.indices[0], ticket.epoch, source.random_seed))
            enter = do_nothing
            threads.submit(_jobs_of(source, ticket, shared, plan.on_error, threads))
        # Without tickets the coroutines that run are completed, unless the consumer left.
        if loop is not None:
            sender.check()
    except BaseException as error:
        threads.close(error)
        if loop is not None:
            # The threads end with the coroutines that they wait for.
            loop.cancel()
    threads.join()
    if loop is not None:
        loop.close()
    if threads.error is not None:
        raise threads.error


def _jobs_of(
    source: TaskSource, ticket: Ticket, sender: Sender, on_error: OnError, threads: ElementThreads
) -> list[ThreadJob]:
    """Return the jobs with which a ticket begins."""
    run = functools.partial(task_loop.do_task, source, ticket, sender, do_nothing, on_error)
    whole = ThreadJob(ticket, ticket.indices, run)
    try:
        # Here, so that no two threads announce the epoch.
        source.begin(ticket.epoch)
    except BaseException:
        # It raises once more there, where the error is sent.
        return [whole]
    is_fetched = source.fetches_many(ticket)
    if len(ticket.indices) == 1 or (is_fetched and source.map is None):
        return [whole]
    batch = _Batch(source, ticket, sender, on_error)
    if not is_fetched:
        return batch.jobs(source.elements_of(ticket))
    fetch = functools.partial(batch.fetch, threads)
    return [ThreadJob(ticket, ticket.indices, fetch, is_work=False)]


class _Batch:
    """The outcomes of the elements of one ticket, until all are there."""

    def __init__(
        self, source: TaskSource, ticket: Ticket, sender: Sender, on_error: OnError
    ) -> None:
        self._source = source
        self._ticket = ticket
        self._sender = sender
        self._failed_fetch: BaseException | None = None
        self._on_error = on_error
        count = len(ticket.indices)
        self._outcomes: list[Any] = [None] * count
        # Elements from this place on need not be run: an earlier one has failed.
        self._needed = self._left = count
        self._lock = threading.Lock()

    def fetch(self, threads: ElementThreads) -> None:
        """Fetch the elements by one call, before each gets a thread."""
        elements, self._failed_fetch = task_loop.fetched(self._source, self._ticket)
        threads.submit(self.jobs(elements))

    def jobs(self, elements: Sequence[Any]) -> list[ThreadJob]:
        """Return a job for each element."""
        run = functools.partial
        return [
            ThreadJob(self._ticket, (index,), run(self._run, place, element))
            for place, (index, element) in enumerate(
                zip(self._ticket.indices, elements, strict=True)
            )
        ]

    def _run(self, place: int, element: Any) -> None:
        """Run one element; after the last one, send the result of the ticket."""
        outcome = None
        if place < self._needed:
            outcome = task_loop.outcome_of(self._source, self._ticket, place, element)
        with self._lock:
            self._outcomes[place] = outcome
            if isinstance(outcome, task_loop.Raised) and self._on_error == "raise":
                self._needed = min(self._needed, place)
            self._left -= 1
            if self._left:
                return
        rest = self._sender, self._on_error, self._failed_fetch
        task_loop.send_results(self._source, self._ticket, [], self._outcomes, *rest)


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
