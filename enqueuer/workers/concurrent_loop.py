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

from enqueuer.workers import loop
from enqueuer.workers.element_threads import ElementThreads, ThreadJob
from enqueuer.workers.messages import Empty, End, Failure, Sender, Ticket
from enqueuer.workers.plan import Plan, serve_failure
from enqueuer.workers.shards import Task, do_nothing
from enqueuer.workers.task_loop import Raised, TaskWork, serve_tasks
from enqueuer.workers.tasks import TaskSource


def serve_function(source: object) -> Callable[..., None]:
    """Return the loop of a worker of a source."""
    if not isinstance(source, TaskSource):
        return loop.serve
    return serve_concurrently if source.has_threads else serve_tasks


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
