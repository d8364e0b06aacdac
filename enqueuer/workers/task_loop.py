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
import logging
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from queue import SimpleQueue
from typing import Any, NamedTuple

from enqueuer.common.interrupts import WorkerThread
from enqueuer.errors import Closed
from enqueuer.monitoring.duplicates import SampleWatch
from enqueuer.monitoring.meters import WAITING, Meter, clock
from enqueuer.order.messages import Empty, End, Failure, Ticket
from enqueuer.workers.event_loop import LOOK_S, EventLoop, set_loop
from enqueuer.workers.logs import warn_of_reuse
from enqueuer.workers.plan import (
    COLLATING,
    FETCHING,
    MAX_THREADS,
    Channel,
    Plan,
    Raised,
    Sender,
    serve_failure,
    skip_or_end,
)
from enqueuer.workers.shards import Task, do_nothing
from enqueuer.workers.tasks import FETCH, TaskSource, WrongElements
from enqueuer.workers.threads import element_snapshots, set_snapshots

_log = logging.getLogger("enqueuer")

# Coroutines of an async function that run at once, if the user gave no number. If each waits for
# 50 ms and computes for 3 ms, so many keep a CPU busy.
ASYNC_CONCURRENCY = 16
# Nanoseconds. Behind a job that takes longer, no ticket is taken ahead that a thread of another
# worker might do at once.
SHORT_NS = 500_000_000
# Nanoseconds, those of CPython's switch interval. If the worker's own thread comes later, threads
# compute.
LATE_NS = 5_000_000
# Nanoseconds after that for which it is taken to be late, as it comes in time now and then by
# chance.
LATE_FOR_NS = 1_000_000_000


def serve_tasks(plan: Plan, channel: Channel, enter: Callable[[Task], None] | None = None) -> None:
    """Do one task after the other, until there are no more or the consumer left.

    Args:
        plan: Work with a TaskSource.
        channel: Source of the tickets, to which at most one item is sent for each.
        enter: Function that seeds the global generators for the first task of a ticket. Calling
            it for each task would take longer than many tasks do.
    """
    work = TaskWork(plan, channel)
    source, is_plain = work.source, work.source.is_plain and plan.watch is None
    do = work.send if is_plain else work.do
    enter = enter if enter is not None and source.runs_code else do_nothing
    with contextlib.suppress(Closed):
        while (ticket := channel.next_ticket()) is not None:
            if enter is not do_nothing:
                enter(Task(ticket.indices[0], ticket.epoch, source.random_seed))
            do(ticket)


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
        self.watch = SampleWatch()
        self._sender = sender
        self._watch = plan.watch

    def _timed(self, ticket: Ticket, place: int, function: Callable[..., Any], *args: Any) -> Any:
        """Call code of the user; raise instead if that took too long in another worker.

        Args:
            ticket: The ticket.
            place: Place of the element in it, `FETCHING` or `COLLATING`.
            function: Function that calls the code.
            args: Its arguments.
        """
        if ticket.late and place in ticket.late:
            raise ticket.late[place]
        if self._watch is None:
            return function(*args)
        return self._watch.run(place, ticket.number, function, *args)

    def do(self, ticket: Ticket) -> None:
        """Send the result of a ticket, or `Empty`, and before that a failure for each error."""
        results: list[Any] = []
        failures: list[Raised] = []
        elements, failed_fetch = self.fetched(ticket)
        # With a time limit each element is called for by itself.
        watch = self._watch
        if failed_fetch is None and (watch is None or not watch.has_limit):
            note = None if watch is None else functools.partial(watch.noted, ticket.number)
            try:
                made = iter(self.source.results_of(ticket, elements, note))
                results.extend(islice(made, 1))
                seen = self.watch.look(results[0]) if results else None
                results.extend(made)
                self.check_unchanged(seen, results)
            except BaseException as error:
                failures.append(Raised(error))
        # If one raised StopIteration, that looks like an end, and comes again.
        remaining = range(len(results) + len(failures), len(ticket.indices))
        outcomes = (self.outcome_of(ticket, place, elements[place]) for place in remaining)
        try:
            self.send_batch(ticket, results, chain(failures, outcomes), failed_fetch)
        finally:
            # Without this, its traceback would refer to itself, through this frame.
            del failures

    def check_unchanged(self, seen: Any, results: list[Any]) -> None:
        """Warn if the first result of a batch is not what it was when it was made."""
        if seen is not None and self.watch.has_changed(seen, results[0]):
            warn_of_reuse("a result of map or __getitem__")

    def fetched(self, ticket: Ticket) -> tuple[Sequence[Any], BaseException | None]:
        """Return the elements of a ticket, and the exception of fetching all at once, if it failed.

        If they are then fetched one by one, the element at fault raises its own error.
        """
        try:
            return self._timed(ticket, FETCHING, self.source.elements_of, ticket), None
        except BaseException as error:
            return [FETCH] * len(ticket.indices), error

    def outcome_of(self, ticket: Ticket, place: int, element: Any) -> Any:
        """Return the result of one element of a ticket, or what it raised."""
        source, index = self.source, ticket.indices[place]
        arguments = index, ticket.epoch, source.random_seed, element
        try:
            return self._timed(ticket, place, source.result, *arguments)
        except BaseException as error:
            return Raised(error)

    def send_batch(
        self,
        ticket: Ticket,
        results: list[Any],
        outcomes: Iterable[Any],
        failed_fetch: BaseException | None,
    ) -> None:
        """Collate and send the results of a ticket, or `Empty`, and before that its failures.

        Args:
            ticket: The ticket.
            results: Results of the first elements.
            outcomes: Outcomes of the others.
            failed_fetch: Exception of fetching all elements at once, if no single one is at fault.
        """
        if isinstance(failed_fetch, WrongElements):
            # No element is at fault, and perhaps none can be fetched alone.
            outcomes = ()
        for place, result in enumerate(outcomes, len(results)):
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
        number, epoch, indices, _, _ = ticket
        source = self.source
        try:
            if results is None:
                value = source.result(indices[0], epoch, source.random_seed)
            else:
                arguments = ticket, results, source.random_seed
                value = self._timed(ticket, COLLATING, source.item_of, *arguments)
        except BaseException as error:
            failure: Failure | None = Failure(0, number, error)
        else:
            if value is None or results is not None:
                self._note_none(ticket, [value] if results is None else results)
            failure = try_to_send(number, value, self._sender)
        if failure is not None:
            try:
                goes_on, value = skip_or_end(failure, self._sender, self.on_error)
                if goes_on:
                    send_replacement(failure, value, self._sender)
            finally:
                # Without this, its traceback would refer to itself, through this frame.
                del failure

    def _note_none(self, ticket: Ticket, results: list[Any]) -> None:
        """Log the first result that is None, as map may have forgotten to return it."""
        source = self.source
        # Errors that are skipped become None, too.
        if source.has_none or self.on_error != "raise" or type(None) not in map(type, results):
            return
        source.has_none = True
        index = next(i for i, result in zip(ticket.indices, results, strict=True) if result is None)
        _log.warning(
            "the result of element %s%s is None, so it is left out, as is each result that is "
            "None; does map return a value in all its branches?",
            *(index, source.path_of(index)),
        )


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
    if threads.loop is not None:
        threads.loop.watch = plan.watch
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
        # Digest of the first outcome.
        self._seen: Any = None
        count = len(ticket.indices)
        self._outcomes: list[Any] = [None] * count
        # Elements from this place on need not be run: an earlier one has failed.
        self._needed = self._remaining = count
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
        if not place:
            self._seen = work.watch.look(outcome)
        with self._lock:
            self._outcomes[place] = outcome
            if isinstance(outcome, Raised) and work.on_error == "raise":
                self._needed = min(self._needed, place)
            self._remaining -= 1
            if self._remaining:
                return
        work.check_unchanged(self._seen, self._outcomes)
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


# --- the threads ----------------------------------------------------------------------------------


class ThreadJob(NamedTuple):
    """The work for one element, or for all elements of a batch at once.

    Attributes:
        ticket: The ticket that it belongs to.
        indices: Indices of the elements.
        run: Function that does it, and raises Closed if the consumer left.
        is_work: Whether its time is that of work for elements, not of fetching them at once.
    """

    ticket: Ticket
    indices: tuple[int, ...]
    run: Callable[[], None]
    is_work: bool = True


class ElementThreads:
    """A few threads that run jobs. Any thread may call anything but `start` and `join`.

        submit(jobs) -> a queue -> n threads, each runs one job after the other

    A thread that has no job waits until the worker's own thread has got the GIL and has taken the
    next ticket. If the other threads compute, each of them may be first, which takes many times as
    long as a short job. So if it comes late, and jobs are short, each thread's next job waits here,
    too.

    The worker is busy by as much as its threads are, on average. So its meter counts a wait of one
    thread of n as the n-th part of a wait of the worker.

    Coroutines of an async function run on the event loop of the worker, in a further thread; each
    of these threads waits for one of them. So all else is as for plain functions. There are twice
    as many threads: when a coroutine ends, the loop goes on with the next one at once, while the
    thread that waited for it gets the GIL and takes another job.

    Args:
        count: Number of threads.
        meter: Meter of the worker, whose waits are those of the threads.
        check: Function that raises Closed if the consumer left; called before each job.
        is_async: Whether jobs wait for coroutines.

    Attributes:
        threads: The threads.
        loop: Event loop on which coroutines of the jobs run; None: there are none.
        error: Exception of a thread that is no error of a job; or None.
        do: Function that does a job; a trace sets one that records it, too.
        on_error: Function that is called with an exception of a thread; the worker's own thread
            may be waiting for a ticket, and then does not see it.
        is_awaited: Whether the worker's own thread waits for room.

    Example:
        >>> done, threads = [], ElementThreads(2, Meter(), list)
        >>> job = ThreadJob(Ticket(0, 0, (0,)), (0,), lambda: done.append("done"))
        >>> threads.start("worker-0"); threads.submit([job, job, job])
        >>> threads.join(); len(done)
        3
    """

    def __init__(
        self,
        count: int,
        meter: Meter,
        check: Callable[[], object],
        is_async: bool = False,
    ) -> None:
        self.threads: list[threading.Thread] = []
        self.error: BaseException | None = None
        self.do: Callable[[ThreadJob], None] = operator.methodcaller("run")
        self.on_error: Callable[[BaseException], None] | None = None
        self._count = count
        self._meter = meter
        self._check = check
        self._is_async = is_async
        self.loop: EventLoop | None = None
        self._jobs: SimpleQueue[ThreadJob | None] = SimpleQueue()
        # The elements that run, and when each job began, by the thread that runs it, the oldest
        # first.
        self._current: dict[int, tuple[tuple[int, ...], int]] = {}
        self._changed = threading.Condition(threading.Lock())
        # Number of jobs that wait or run.
        self._load = 0
        # Whether the last work was short; when the worker's own thread was called to the last room,
        # and until when it is taken to be late.
        self._is_short = False
        self._called = self._late_until = 0
        self.is_awaited = False
        self._is_closed = False
        # Time of the last change of the load.
        self._since = clock()

    def start(self, name: str) -> None:
        """Start the threads, or as many as the system has room for.

        Raises:
            OSError: It has no descriptors for the event loop.
            RuntimeError: It has no room for any.
        """
        self._meter.pause(WAITING)
        if self._is_async:
            self.loop = EventLoop(f"{name}.loop", self._count)
        for_each = 1 + self._is_async
        try:
            for number in range(for_each * self._count):
                thread = WorkerThread(target=self._run, name=f"{name}.{number}", daemon=True)
                thread.start()
                self.threads.append(thread)
        except RuntimeError as error:
            if not self.threads:
                self.join()
                raise
            wanted, self._count = self._count, max(1, len(self.threads) // for_each)
            _log.warning(
                "%s runs %d elements at once, not %d: %s", name, self._count, wanted, error
            )
        stack_of = None if self.loop is None else self.loop.stack_of
        set_snapshots(lambda: element_snapshots(self._current, stack_of))

    @property
    def is_idle(self) -> bool:
        """Whether no job waits or runs."""
        return not self._load

    def wait_for_room(self) -> bool:
        """Wait until there is room for a job; return False if the threads were closed."""
        with self._changed:
            while not (self.has_room or self._is_closed):
                self.is_awaited = True
                if self.loop is None:
                    self._changed.wait()
                elif not self._changed.wait(LOOK_S):
                    # Coroutines may wait for long, and are cancelled then.
                    self._check()
                now = clock()
                if now - self._called > LATE_NS:
                    self._late_until = now + LATE_FOR_NS
            return not self._is_closed

    def submit(self, jobs: Sequence[ThreadJob]) -> None:
        """Let the next free threads run some jobs, in this order."""
        with self._changed:
            self._count_locked(len(jobs))
        for job in jobs:
            self._jobs.put(job)

    def close(self, reason: BaseException) -> None:
        """Begin no more jobs, and let `wait_for_room` return; Closed is a reason, but no error."""
        error = None if isinstance(reason, Closed) else reason
        with self._changed:
            self._is_closed = True
            self.error = self.error or error
            self._changed.notify_all()
        if error is not None and self.on_error is not None:
            self.on_error(error)

    def cancel(self) -> None:
        """Cancel the coroutines; the threads end with those that they wait for."""
        if self.loop is not None:
            self.loop.cancel()

    def join(self) -> None:
        """Wait until the threads have run all jobs, or all that they have begun if closed."""
        for _ in self.threads:
            self._jobs.put(None)
        for thread in self.threads:
            thread.join()
        set_snapshots(None)
        if self.loop is not None:
            self.loop.close()

    def _run(self) -> None:
        ident = threading.get_ident()
        set_loop(self.loop)
        while (job := self._jobs.get()) is not None:
            began = clock()
            with self._changed:
                self._current[ident] = job.indices, began
            try:
                if not self._is_closed:
                    self._check()
                    self.do(job)
            except BaseException as error:
                self.close(error)
            with self._changed:
                del self._current[ident]
                self._count_locked(-1)
                if job.is_work:
                    self._is_short = self._since - began < SHORT_NS
                if self.is_awaited and self.has_room:
                    self.is_awaited = False
                    self._called = self._since
                    self._changed.notify()
            del job

    @property
    def has_room(self) -> bool:
        """Whether a thread has no job, or its next one may wait here; exact with the lock only."""
        if self._load < self._count:
            return True
        # There is a claim for each ticket.
        limit = min(2 * self._count, MAX_THREADS)
        if self.loop is not None:
            return self._load < limit
        if not (self._is_short and self._load < limit):
            return False
        now = clock()
        _, oldest = next(iter(self._current.values()), (None, now))
        return now < self._late_until and now - oldest < SHORT_NS

    def _count_locked(self, change: int) -> None:
        """Change the load, and note for how long threads had nothing to do before."""
        now, meter = clock(), self._meter
        if not self._load and change:
            meter.resume()
        elif self._load < self._count:
            meter.words[WAITING] += (now - self._since) * (self._count - self._load) // self._count
        self._since = now
        self._load += change
        if not self._load:
            meter.pause(WAITING)
            # What comes next may be other work.
            self._late_until = 0
