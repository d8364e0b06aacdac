"""One epoch of tasks: read elements, and submit their tasks to the workers, within the bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from enqueuer.backends.load import Backend
from enqueuer.backends.order import TaskOrder
from enqueuer.backends.task_schedule import TaskSchedule
from enqueuer.enqueuers.element_reader import ElementReader
from enqueuer.enqueuers.replay import Origin
from enqueuer.enqueuers.run import Run
from enqueuer.enqueuers.task_order import Reading
from enqueuer.errors import ItemNotPicklable, StateMismatch, WorkerDied
from enqueuer.monitoring.duplicates import FirstItems
from enqueuer.monitoring.stats import Stats
from enqueuer.workers.messages import Epoch, Failure, Start, Ticket
from enqueuer.workers.tasks import TaskSource


class TaskEpoch:
    """See `EpochWork`.

    Args:
        source: Source that the user gave.
        reading: Which elements are read, and in which order.
        rerun: Returns a function that makes an item again; see `Workload.rerun`.
        run: The run that the epoch belongs to.
        epoch: Epoch to be run, or the rest of one.
        goes_on: Whether the iterable was just read up to there, and need load no state.
        first: Number of the first task of the epoch. Numbers go on over the epochs of a run, so
            that a late result is never taken for one of another epoch.

    Attributes:
        number: Number of the task that is read next.
    """

    def __init__(
        self,
        source: TaskSource,
        reading: Reading,
        rerun: Callable[[Origin, Ticket | None], Callable[[], Any]],
        run: Run,
        epoch: Epoch,
        goes_on: bool,
        first: int,
    ) -> None:
        # An item is made once, whichever worker makes it.
        self.first_items: FirstItems | None = None
        self._source = source
        self._tickets_at_once = source.tickets_at_once
        self._reading = reading
        self._rerun = rerun
        self._run = run
        self._epoch = epoch.number
        start = Start() if epoch.starts is None else epoch.starts[0]
        self.order = TaskOrder(first, start, epoch.done, run.options.ordered)
        self.number = first + start.number
        self._start = Start() if goes_on else start
        self._reader: ElementReader | None = None
        # Failure because of which nothing more can be read.
        self._unread: Failure | None = None
        # Ticket that was read and not submitted, with the state of the iterator after it.
        self._pending: tuple[Ticket, Any] | None = None
        # Tickets of a sequence that were read and perhaps not submitted.
        self._unsubmitted: list[Ticket] = []
        self._is_read = False

    @property
    def may_be_followed(self) -> bool:
        if not self._is_read or self._unread is not None:
            return False
        # The last ones, if an exception of a signal handler came right after the end was read.
        if self._pending is not None or self._unsubmitted:
            return False
        return self._source.may_overlap

    @property
    def feed_runs_code(self) -> bool:
        return not self._source.is_sequence

    @property
    def _tasks(self) -> TaskSchedule[Any]:
        return _tasks_of(self._run.backend)

    # --- reading ---

    def feed(self) -> None:
        """Read elements and submit their tasks, as many as the bound allows."""
        order, tasks, source = self.order, self._tasks, self._source
        reads, most = 0, self._most_out(tasks)
        if source.is_sequence and self._reader is not None and self._pending is None:
            # Quick tasks are offered several at once. Three quarters of them are still out, and
            # when those are done there is room for more.
            if most - tasks.outstanding < min(tasks.least, most // 4):
                return
            self._feed_many(self._reader, tasks, most)
        while not self._is_read and tasks.outstanding < most:
            if self._pending is None:
                # A loop that waits for a batch should not wait for a slow iterable.
                if reads > 1 and not source.is_sequence and tasks.poll(order):
                    return
                reads += 1
                self._pending = self._read()
                if self._pending is None:
                    return
            ticket, state = self._pending
            self.number = ticket.number + 1
            order.read(ticket.number, state)
            if not order.was_taken(ticket.number):
                try:
                    tasks.submit(ticket)
                except ItemNotPicklable as error:
                    self._fail(Failure(ticket.indices[0], ticket.number, error))
            if self._reader is not None:
                self._reader.advance(ticket.number)
            self._pending = None

    def _feed_many(self, reader: ElementReader, tasks: TaskSchedule[Any], most: int) -> None:
        """Submit several tasks of a sequence at once."""
        tickets = self._unsubmitted
        if not tickets:
            if self._is_read or tasks.outstanding >= most:
                return
            tickets = self._unsubmitted = reader.next_many(most - tasks.outstanding)
            if not tickets:
                return
        order = self.order
        # Some were done before, or were submitted before an exception of a signal handler.
        if order.taken or tickets[0].number < order.next:
            tasks.submit_all([t for t in tickets if not order.was_taken(t.number)])
        else:
            tasks.submit_all(tickets)
        self.number = tickets[-1].number + 1
        reader.advance_many(tickets)
        self._unsubmitted = []

    def _most_out(self, tasks: TaskSchedule[Any]) -> int:
        """Return how many tasks may be submitted and not taken; 1 with `workers=0`."""
        options = self._run.options
        if not self._run.workers:
            return 1
        waiting = options.max_queue_size
        if options.max_queue_bytes is not None:
            largest = tasks.largest_bytes
            # Until the size of the first result is known, workers get no more than they run.
            waiting = min(waiting, options.max_queue_bytes // largest) if largest else 0
        return waiting + self._run.workers * self._tickets_at_once

    def _read(self) -> tuple[Ticket, Any] | None:
        """Return the next ticket, and the reader's state after it; None if there is none."""
        try:
            return self._read_on()
        except BaseException as error:
            if self._reader is not None and self._reader.has_failed:
                self._fail(Failure(-1, self.number, error))
                if isinstance(error, Exception):
                    return None
                raise
            if self._source.is_sequence:
                # A new reader continues from here.
                self._reader = None
            if not isinstance(error, Exception):
                # A KeyboardInterrupt, for example.
                raise
            # An error of the source's own comes again; else a signal handler has raised it.
            try:
                self._read_on()
            except Exception:
                self._fail(Failure(-1, self.number, error))
                return None
            raise

    def _read_on(self) -> tuple[Ticket, Any] | None:
        """Do what `_read` does; again, until the reader advances, does the same."""
        source, order = self._source, self.order
        if self._reader is None:
            start = self._start
            if source.is_sequence:
                start = Start(self.number - order.first)
            self._reader = ElementReader(source, self._reading, self._epoch, start, order.first)
        read = self._timed(self._reader)
        state = self._reader.state()
        if read is None:
            count, last = self.number - order.first, max(order.beyond(), default=-1)
            if last >= count:
                text = f"the iterable ended after {count} tasks when it was read again, but task "
                self._fail(Failure(-1, self.number, StateMismatch(f"{text}{last} of it was done")))
                return None
            order.end_at(self.number, state)
            self._is_read = True
            return None
        return read, state

    def _timed(self, reader: ElementReader) -> Ticket | None:
        """Read on, and count it as a wait of the loop if it runs code of the user."""
        if self._source.is_sequence:
            return reader.next()
        meter = self._run.meter
        meter.pause(None)
        try:
            return reader.next()
        finally:
            meter.read()

    def _fail(self, failure: Failure) -> None:
        """Let a task have failed that no worker can be given; nothing more is read."""
        self._unread = dataclasses.replace(failure, worker="the process of the loop")
        self._tasks.fail(self._unread)
        self._is_read = True
        self.number = failure.number + 1

    # --- failures ---

    def keep(self, failure: Failure) -> None:
        self._tasks.fail(failure)

    def where(self, failure: Failure) -> str:
        epoch, number = self._place_of(failure)
        # A worker that dies may have a task of the next epoch, and be the last one that could do
        # those of this epoch.
        task = f"task {number}" if epoch == self._epoch else f"task {number} of epoch {epoch}"
        if failure.shard < 0:
            return f"while the elements of {task} were read"
        indices: Sequence[int] = [failure.shard]
        ticket = self.ticket(failure.number - self.order.first)
        # The worker may have died at any of the elements.
        if isinstance(failure.error, WorkerDied) and ticket is not None:
            indices = ticket.indices
        what = f"element {indices[0]}" if len(indices) == 1 else f"one of the elements {[*indices]}"
        return f"in {failure.worker}, {task}, {what}"

    def _place_of(self, failure: Failure) -> tuple[int, int]:
        """Return the epoch of a failure, and the task of that epoch."""
        first, end = self.order.first, self.order.end
        if end is not None and failure.number >= end:
            return self._epoch + 1, failure.number - end
        return self._epoch, failure.number - first

    def origin_of(self, failure: Failure) -> Origin:
        epoch, number = self._place_of(failure)
        origin = Origin(
            self._source.random_seed,
            epoch,
            number,
            None,
            0,
            failure.worker,
            failure.shard,
        )
        ticket = self.ticket(failure.number - self.order.first)
        origin.rerun = self._rerun(origin, ticket)
        return origin

    def ticket(self, item: int) -> Ticket | None:
        number = self.order.first + item
        tickets = self._tasks.tickets()
        return next((ticket for ticket in tickets if ticket.number == number), None)

    # --- the epoch as a whole ---

    def pass_work(self, old: Backend, new: Backend) -> None:
        tasks = _tasks_of(new)
        for ticket in _tasks_of(old).tickets():
            # Those of the next epoch may have begun as well.
            if ticket.epoch == self._epoch:
                tasks.submit(ticket)
        if self._unread is not None:
            tasks.fail(self._unread)

    def steps_done(self, ready: int, taken: int) -> int:
        return self.order.next - self.order.first - ready

    def next_epoch(self) -> Epoch:
        ends = self.order.ends
        starts = {shard: Start(0, state) for shard, state in ends.items()}
        return Epoch(self._epoch + 1, starts or None)

    def end(self) -> None:
        self._source.end(self._epoch)

    def rerun_s(self, stats: Stats) -> float | None:
        return None


def _tasks_of(backend: Backend) -> TaskSchedule[Any]:
    tasks = backend.tasks
    assert tasks is not None, "it was loaded for tasks"
    return tasks
