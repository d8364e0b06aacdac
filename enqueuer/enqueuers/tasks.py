"""The workload of OrderedEnqueuer: one task for each element, or for each batch of elements.

An epoch reads elements, and submits their tasks to the workers, within the bound:

    sequence or iterable --ElementReader.next()--> a ticket --advance()--> the next one
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from enqueuer.backends.engine import Backend
from enqueuer.backends.task_schedule import TaskSchedule
from enqueuer.common import interrupts
from enqueuer.enqueuers.failures import Origin, refuse, rerun_task
from enqueuer.enqueuers.options import Auto, Concurrency, Options, Seed
from enqueuer.enqueuers.run import Run
from enqueuer.enqueuers.workload import EpochWork, Workload, warn_if_shared, warn_of_change
from enqueuer.errors import EnqueuerError, InvalidState, ItemNotPicklable, StateMismatch, WorkerDied
from enqueuer.order.messages import Epoch, Failure, Start, Ticket
from enqueuer.order.sequence import TaskOrder
from enqueuer.workers.arrays import stack
from enqueuer.workers.plan import MAX_THREADS
from enqueuer.workers.sources import iterate
from enqueuer.workers.tasks import Division, Reading, TaskSource, order_of, places_of, steps_in

# Stands in the backend for an error that has frames of the loop. The backend lives until it is
# stopped, and by these frames would keep the enqueuer alive.
_OF_THE_LOOP = EnqueuerError("the loop has the error")


class ElementReader:
    """Read one epoch of a source into tickets, each when it is asked for.

    No element is lost if an exception ends a call, unless it strikes inside the iterable's own
    code: `next` reads nothing more until `advance`.

    Args:
        source: Source of the elements.
        reading: Rules by which the elements are divided among ranks.
        epoch: Number of the epoch, from 0.
        start: First task to be read of an iterable, and perhaps the iterator's state before it.
        first: Number of the epoch's first task among those of all epochs.
        length: Length that the sequence must have in this epoch; None: any.
        division: Which elements were divided among the ranks.
    """

    def __init__(
        self,
        source: TaskSource,
        reading: Reading,
        epoch: int,
        start: Start,
        first: int,
        length: int | None = None,
        division: Division = (0,),
    ) -> None:
        self._reading = reading
        self._division = division
        self._epoch = epoch
        self._first = first
        # Elements of the next batch of an iterable, of all ranks.
        self._read: deque[tuple[int, Any] | None] = deque()
        self._stateful: Any = None
        self._size = source.batch_size or 1
        # Whether the iterable's own code runs, or has raised.
        self._runs = False
        source.begin(epoch)
        self._is_sequence = source.is_sequence
        if length is not None and source.length != length:
            raise StateMismatch(
                f"the state was saved in epoch {epoch} with a sequence of {length} elements, and "
                f"it has {source.length} in that epoch here"
            )
        if source.is_sequence:
            self._indices = order_of(source, reading, epoch, division)
            self._end = steps_in(len(self._indices), self._size, reading.drop_last)
        else:
            self._begin_iterable(source, start)

    def _begin_iterable(self, source: TaskSource, start: Start) -> None:
        reading, (begin, *done) = self._reading, self._division
        is_at_end = not (start.number or begin)
        items, self._stateful = iterate(source.items, start.state, is_at_end=is_at_end)
        numbered: Iterator[tuple[int, Any]] = enumerate(items)
        # Number of elements, of all ranks, that the iterator has given before its own first one.
        self._behind = 0
        if start.state is None:
            # Elements that other ranks had before, too.
            for _ in itertools.islice(numbered, begin):
                pass
            if done:
                finished = frozenset(done)
                numbered = (pair for pair in numbered if pair[0] not in finished)
            # The last batch of an epoch may be incomplete.
            lacks = 0 if reading.drop_last else self._size - 1
            _skip(numbered, start.number * self._size, reading, lacks if start.number else 0)
        else:
            # The iterator continues after the last batch that the loop had.
            self._behind = begin + start.number * self._size * reading.world_size
        # None for each element after the end.
        self._numbered = itertools.chain(numbered, itertools.repeat(None))

    @property
    def has_failed(self) -> bool:
        """Whether an exception came out of the iterable's own code."""
        return self._runs and len(self._read) < self._size * self._reading.world_size

    def next(self, number: int, limit: int) -> list[Ticket]:
        """Return the next tickets; none at the end of the epoch.

        Args:
            number: Number of the first one among the tasks of all epochs.
            limit: How many tickets of a sequence; of an iterable it is at most one.
        """
        if not self._is_sequence:
            return self._next_read(number)
        at, size = number - self._first, self._size
        steps = range(at, min(at + limit, self._end))
        parts: Iterable[tuple[int, ...]]
        if size == 1:
            parts = zip(_integers(self._indices[steps.start : steps.stop]), strict=False)
        else:
            slices = [self._indices[step * size : (step + 1) * size] for step in steps]
            parts = [tuple(_integers(chosen)) for chosen in slices]
        numbers = range(number, number + len(steps))
        return [
            Ticket(number, self._epoch, part) for number, part in zip(numbers, parts, strict=True)
        ]

    def _read_from(self, more: Iterable[Any]) -> None:
        """Read elements; an interrupt loses nothing that was read before it."""
        self._runs = True
        self._read.extend(more)
        self._runs = False

    def _next_read(self, number: int) -> list[Ticket]:
        """Read the next batch, with the elements of other ranks; return a ticket for our own."""
        reading, size = self._reading, self._size
        more = itertools.islice(self._numbered, size * reading.world_size - len(self._read))
        interrupts.interruptible(self._read_from, more)
        there = [pair for pair in self._read if pair is not None]
        if reading.drop_last:
            there = there[: len(there) - len(there) % reading.world_size]
        chosen = there[reading.rank :: reading.world_size]
        if not chosen or (reading.drop_last and len(chosen) < size):
            return []
        indices = tuple([index + self._behind for index, _ in chosen])
        elements = tuple([element for _, element in chosen])
        return [Ticket(number, self._epoch, indices, elements)]

    def advance(self) -> None:
        """Go on behind the ticket of an iterable that `next` has returned."""
        self._read = deque()

    def state(self) -> Any:
        """Return the current state of the iterator; None if it has no `state_dict`."""
        # A copy, as it may be the iterator's own object, which changes.
        return None if self._stateful is None else copy.deepcopy(self._stateful.state_dict())


def _integers(indices: Any) -> Sequence[int]:
    """Return a range, or the numbers of an array as integers of Python."""
    return indices if isinstance(indices, range) else indices.tolist()


def _skip(numbered: Iterator[tuple[int, Any]], count: int, reading: Reading, lacks: int) -> None:
    """Skip the first elements, of which a rank has had so many, or at most `lacks` fewer."""
    last = deque(enumerate(itertools.islice(numbered, count * reading.world_size), 1), maxlen=1)
    read = last[0][0] if last else 0
    if reading.drop_last:
        read -= read % reading.world_size
    had = len(range(reading.rank, read, reading.world_size))
    if had < count - lacks:
        raise StateMismatch(
            f"the iterable ended after {had} elements when it was read again, but {count} had "
            "come from it before: it does not repeat itself"
        )


class TaskEpoch(EpochWork):
    """See `EpochWork`.

    Args:
        workload: Workload of the enqueuer.
        run: The run that the epoch belongs to.
        epoch: Epoch to be run, or the rest of one.
        before: The epoch before, up to whose end an iterable was just read, so that it need load
            no state; None for the first one of the run.
        length: Length that the sequence must have; None: any.

    Attributes:
        number: Number of the task that is read next.
    """

    order: TaskOrder
    # An item is made once, whichever worker makes it, and each may make any.
    first_items = None

    def __init__(
        self,
        workload: TaskWorkload,
        run: Run,
        epoch: Epoch,
        before: TaskEpoch | None,
        length: int | None,
    ) -> None:
        self._workload, self._run = workload, run
        self._source: TaskSource = workload.source
        self.feed_runs_code = not self._source.is_sequence
        self._epoch = epoch.number
        start = Start() if epoch.starts is None else epoch.starts[0]
        # Numbers go on over the epochs of a run, so that a late result is never taken for one of
        # another epoch.
        first = 0 if before is None else before.number
        self.order = TaskOrder(epoch, first, run.options.ordered)
        self.number: int = first + start.number
        self._start = start if before is None else Start()
        self._length = length
        self._sample = self._source.sample()
        self._reader: ElementReader | None = None
        # Failure because of which nothing more can be read.
        self._unread: Failure | None = None
        # Tickets that were read and perhaps not submitted, and the state of an iterator after them.
        self._pending: tuple[list[Ticket], Any] | None = None
        self._is_read = False

    @property
    def may_be_followed(self) -> bool:
        # The last tickets are pending if an exception came right after the end was read.
        is_fed = self._is_read and self._unread is None and self._pending is None
        return is_fed and self._source.may_overlap

    # --- reading ---

    def feed(self) -> None:
        """Read elements and submit their tasks, as many as the bound allows."""
        order, tasks, source = self.order, self._run.backend.tasks, self._source
        assert tasks is not None, "the backend was loaded for tasks"
        reads, limit = 0, self._max_pending(tasks)
        while self._pending is not None or not self._is_read:
            if self._pending is None:
                room = limit - len(tasks.results.tickets)
                # A loop that waits for a batch should not wait for a slow iterable.
                if room <= 0 or (reads > 1 and not source.is_sequence and tasks.poll(order)):
                    return
                reads += 1
                try:
                    self._pending = self._read_on(room)
                except BaseException as error:
                    if not self._has_failed(error):
                        raise
                if self._pending is None:
                    return
            tickets, state = self._pending
            self.number = tickets[-1].number + 1
            if self._reader is not None and not source.is_sequence:
                self._submit_read(tasks, tickets[0], state)
                self._reader.advance()
            elif order.taken or tickets[0].number < order.next:
                # Some were done before, or were submitted by a call that did not complete.
                tasks.submit([t for t in tickets if not order.was_taken(t.number)])
            else:
                tasks.submit(tickets)
            self._pending = None

    def _submit_read(self, tasks: TaskSchedule[Any], ticket: Ticket, state: Any) -> None:
        """Submit the task of elements that were read, unless it was done before."""
        self.order.read(ticket.number, state)
        if not self.order.was_taken(ticket.number):
            try:
                tasks.submit([ticket])
            except ItemNotPicklable as error:
                self._fail(Failure(ticket.indices[0], ticket.number, error))

    def _max_pending(self, tasks: TaskSchedule[Any]) -> int:
        """Return how many tasks may be submitted and not taken; 1 with `workers=0`."""
        options = self._run.options
        if not self._run.workers:
            return 1
        if self._source.max_pending is not None:
            return self._source.max_pending
        waiting = options.max_queue_size
        if options.max_queue_bytes is not None:
            largest = tasks.largest_bytes
            # Until the size of the first result is known, workers get no more than they run.
            waiting = min(waiting, options.max_queue_bytes // largest) if largest else 0
        return waiting + self._run.workers * self._source.tickets_at_once

    def _has_failed(self, error: BaseException) -> bool:
        """Return whether the source has failed, which is noted; else the error is to be raised."""
        if self._reader is not None and self._reader.has_failed:
            self._fail(Failure(-1, self.number, error))
            return isinstance(error, Exception)
        # Ctrl-C, for example.
        if interrupts.is_of_handler(error) or not isinstance(error, Exception):
            return False
        self._fail(Failure(-1, self.number, error))
        return True

    def _read_on(self, limit: int) -> tuple[list[Ticket], Any] | None:
        """Return the next tickets, and the state after them; None at the end. Again, the same."""
        source, order = self._source, self.order
        if self._reader is None:
            first, length, division = order.first, self._length, order.epoch.division or (0,)
            # It calls methods of the user's, and may skip many elements.
            self._reader = interrupts.interruptible(
                ElementReader,
                source,
                self._workload.reading,
                self._epoch,
                self._start,
                first,
                length,
                division,
            )
        if source.is_sequence:
            tickets, state = self._reader.next(self.number, limit), None
        else:
            tickets, state = self._timed(self._reader), self._reader.state()
        if not tickets:
            if (last := max(order.taken, default=-1)) >= self.number:
                text = (
                    f"the iterable ended after {self.number - order.first} tasks when it was read "
                    f"again, but task {last - order.first} of it was done"
                )
                self._fail(Failure(-1, self.number, StateMismatch(text)))
                return None
            order.end_at(self.number, state)
            self._is_read = True
            return None
        return tickets, state

    def _timed(self, reader: ElementReader) -> list[Ticket]:
        """Read an iterable, and count it as a wait of the loop, as it runs code of the user."""
        meter = self._run.meter
        meter.pause(None)
        try:
            return reader.next(self.number, 1)
        finally:
            meter.resume(has_read=True)

    def _fail(self, failure: Failure) -> None:
        """Let a task have failed that no worker can be given; nothing more is read."""
        self._unread = dataclasses.replace(failure, worker="the process of the loop")
        self.keep(self._unread)
        self._is_read = True
        self.number = failure.number + 1

    # --- failures ---

    def keep(self, failure: Failure) -> None:
        self._keep_in(_tasks_of(self._run.backend), failure)

    def _keep_in(self, tasks: TaskSchedule[Any], failure: Failure) -> None:
        tasks.fail(dataclasses.replace(failure, error=_OF_THE_LOOP))

    def with_error(self, failure: Failure) -> Failure:
        unread = self._unread
        if unread is not None and unread.number == failure.number:
            return unread
        error = failure.error
        ran = self._ran(failure)
        if not (ran and self._source.path_of(ran[0]) and isinstance(error, WorkerDied)):
            return failure
        # In the message as well, as Python 3.10 shows no notes.
        died = WorkerDied(f"{error} It ran {self._what(failure)}.", error.worker, error.exitcode)
        died.__cause__ = error.__cause__
        return dataclasses.replace(failure, error=died)

    def where(self, failure: Failure) -> str:
        epoch, number = self.order.place_of(failure.number)
        # A worker that dies may have a task of the next epoch, and be the last one that could do
        # those of this epoch.
        task = f"task {number}" if epoch == self._epoch else f"task {number} of epoch {epoch}"
        if failure.shard < 0:
            return f"while the elements of {task} were read"
        place = f"in {failure.worker}, {task}, {self._what(failure)}"
        if isinstance(failure.error, IndexError) and failure.shard >= self._source.length:
            place += f". The sequence has become shorter meanwhile ({self._source.length} elements)"
        return place

    def _ran(self, failure: Failure) -> list[int]:
        """Return the elements that a worker that died was running, as far as that is known."""
        tickets = _tasks_of(self._run.backend).results.tickets
        found: list[int] = []
        for at, number in failure.running:
            if number in tickets:
                indices = tickets[number].indices
                # Below 0, all of them are fetched or stacked.
                found += indices if at < 0 else indices[at : at + 1]
        return found

    def _what(self, failure: Failure) -> str:
        """Return the element at which a task failed, or those at one of which it did."""
        indices: Sequence[int] = [failure.shard]
        tickets = _tasks_of(self._run.backend).results.tickets
        if isinstance(failure.error, WorkerDied) and failure.number in tickets:
            # The worker may have died at any of the elements.
            indices = self._ran(failure) or tickets[failure.number].indices
        paths = self._source.path_of
        if len(indices) == 1:
            return f"element {indices[0]}{paths(indices[0])}"
        if failure.running:
            return f"one of the elements {', '.join(f'{i}{paths(i)}' for i in indices)}"
        return f"one of the elements {[*indices]}"

    def origin_of(self, failure: Failure) -> Origin:
        epoch, number = self.order.place_of(failure.number)
        seed = self._source.random_seed
        origin = Origin(seed, epoch, number, None, 0, failure.worker, failure.shard)
        ticket = self.ticket(failure.number - self.order.first)
        origin.rerun = self._workload.rerun(origin, ticket)
        return origin

    def ticket(self, item: int) -> Ticket | None:
        return _tasks_of(self._run.backend).results.tickets.get(self.order.first + item)

    # --- the epoch as a whole ---

    def pass_work(self, old: Backend, new: Backend) -> None:
        tasks = _tasks_of(new)
        for ticket in list(_tasks_of(old).results.tickets.values()):
            # Those of the next epoch may have begun as well.
            if ticket.epoch == self._epoch:
                tasks.submit([ticket])
        if self._unread is not None:
            self._keep_in(tasks, self._unread)

    def end(self) -> None:
        # Worker processes have a copy of the list.
        if self._run.copies is None and self._source.sample(*self._sample[:1]) != self._sample:
            warn_of_change()
        self._source.end(self._epoch)


def _tasks_of(backend: Backend) -> TaskSchedule[Any]:
    tasks = backend.tasks
    assert tasks is not None, "it was loaded for tasks"
    return tasks


class TaskWorkload(Workload):
    """See `Workload`.

    Args:
        source: Source that the user gave.
        options: Options of the enqueuer.
        seed: Seed of the enqueuer.
        shuffle: Whether each epoch has an order of its own.
        concurrency: Number of elements at once in each worker that the user gave; `"auto"`: the
            autoscaler chooses. None: it does if that changes nothing but the speed.
    """

    def __init__(
        self,
        source: TaskSource,
        options: Options,
        seed: Seed,
        shuffle: bool,
        concurrency: Concurrency = None,
    ) -> None:
        self.source = source
        self.options = options
        self.seed = seed
        self.start_method = options.start_method(source)
        source.random_seed = seed.value
        self.reading = Reading(shuffle, options.drop_last, options.rank, options.world_size)
        self.needs_common_seed = shuffle
        self._concurrency = concurrency
        # Length of the sequence in the epoch in which a loaded state was saved, if it may change.
        self._saved_length: int | None = None
        # The epoch that was resumed from other ranks, and what this rank has of it.
        self._resumed: tuple[int, Division] | None = None

    def steps(self, division: Sequence[int] | None = None) -> int | None:
        """Return the number of batches of an epoch; None if only the source knows its end."""
        if not self.source.is_finite:
            return None
        count = len(places_of(self.source, self.reading, tuple(division or (0,))))
        return steps_in(count, self.source.batch_size or 1, self.options.drop_last)

    @property
    def max_concurrency(self) -> int:  # type: ignore[override]  # no caller sets it
        workers = self.options.workers
        if not isinstance(workers, Auto) or isinstance(self._concurrency, int):
            return self.source.concurrency
        if self._concurrency == "auto":
            return MAX_THREADS
        # Coroutines run at once anyway. Threads seed no global generators for an element; without
        # batches, each element at once may as well be a worker.
        source, is_thread = self.source, self.options.backend_name == "thread"
        is_free = source.is_async or (is_thread and source.batch_size is not None)
        return (workers.most or MAX_THREADS) if is_free else 1

    # --- what runs ---

    def keep_shards(self) -> None:
        """Do nothing: tasks have no shards."""

    def begin(self, run: Run, epoch: Epoch, before: EpochWork | None) -> TaskEpoch:
        assert before is None or isinstance(before, TaskEpoch)
        length = self._saved_length if before is None and epoch.starts is not None else None
        warn_if_shared(run, self.source.items)
        if epoch.division is not None:
            self._resumed = epoch.number, epoch.division
        elif self._resumed is not None and self._resumed[0] == epoch.number:
            self._resumed = None
        return TaskEpoch(self, run, epoch, before, length)

    def rewind(self) -> None:
        self.source.rewind()

    def why_empty(self, earlier: int) -> str:
        source, ranks = self.source, self.options.world_size
        if not source.is_sequence and earlier:
            return (
                "the iterable was read to its end in an earlier epoch; pass one that begins anew, "
                "such as a list"
            )
        if not source.is_sequence or not source.length:
            return "there are no elements; is there any data where the program looks for it?"
        return (
            f"the length of {source.length} is too small for batch_size={source.batch_size}, "
            f"world_size={ranks} and drop_last={self.options.drop_last}; give a smaller "
            "batch_size, fewer ranks, or drop_last=False"
        )

    # --- position ---

    def identity(self) -> dict[str, Any]:
        reading, options, source = self.reading, self.options, self.source
        return {
            "kind": "OrderedEnqueuer",
            "random_seed": self.seed.value,
            "length": source.length if source.is_finite else None,
            "shuffle": reading.shuffle,
            "batch_size": source.batch_size,
            "drop_last": options.drop_last,
            "rank": options.rank,
            "world_size": options.world_size,
            "ordered": options.ordered,
        }

    def fixed(self) -> dict[str, bool]:
        # The methods of a sequence for epochs may change its length, so that is checked later.
        return {"random_seed": self.seed.is_explicit, "length": not self.source.follows_epochs}

    def adopt(self, state: Mapping[str, Any], epoch: Epoch, was_run: bool) -> None:
        source = self.source
        if isinstance(source.items, Iterator) and was_run:
            raise InvalidState(
                "an iterator that was read cannot be rewound; make a new enqueuer with a fresh one"
            )
        if state.get("parts", 1) != 1:
            raise StateMismatch("the state is of one of several workers of a DataLoader")
        if epoch.starts is not None and list(epoch.starts) != [0]:
            raise StateMismatch("this is not the position of an OrderedEnqueuer")
        self._saved_length = None
        if epoch.starts is not None and source.follows_epochs:
            self._saved_length = state["length"]
        steps = self.steps()
        if epoch.starts is not None and steps is not None and not source.follows_epochs:
            last = max((epoch.starts[0].number - 1, *epoch.done))
            if last >= steps:
                raise StateMismatch(f"the state has task {last}, but an epoch has {steps} tasks")
        if source.follows_epochs and source.ended > epoch.number:
            raise InvalidState(
                f"on_epoch_end of the sequence was called for {source.ended} epochs, and it "
                f"cannot go back to epoch {epoch.number}; make a new enqueuer with a new sequence"
            )
        self._check_division(epoch)
        self._resumed = None if epoch.division is None else (epoch.number, epoch.division)
        self.seed.value = source.random_seed = state["random_seed"]

    def _check_division(self, epoch: Epoch) -> None:
        division = epoch.division
        if division is None:
            return
        source, is_ascending = self.source, list(division) == sorted({*division})
        # The first one may be that behind the last element.
        is_fixed = source.is_finite and not source.follows_epochs
        is_short = not is_fixed or division[-1:] <= (source.length,)
        if not (division and is_ascending and is_short):
            text = f"the state has the share {[*division]}, which is none of these tasks"
            raise StateMismatch(text)

    def rerun(self, origin: Origin, ticket: Ticket | None) -> Callable[[], Any]:
        if origin.element is None:
            raise ValueError("the error came from a shard of a GeneratorEnqueuer, not from a task")
        if origin.element < 0:
            return functools.partial(refuse, "the error came from reading the elements")
        ticket = ticket or self._new_ticket(origin)
        if ticket is None:
            return functools.partial(
                refuse,
                "the element came from an iterable, and is gone: replay(error) takes it along "
                "only in the process of the loop",
            )
        # Workers with several threads do not seed the global generators.
        seed = self.options.has_globals and not self.source.has_threads
        skip = self.options.on_error != "raise"
        return functools.partial(
            rerun_task, self.source, origin.random_seed, ticket, origin.element, seed, skip
        )

    def _new_ticket(self, origin: Origin) -> Ticket | None:
        """Return a ticket of a task of a sequence; None for an iterable."""
        if not self.source.is_sequence:
            return None
        size = self.source.batch_size or 1
        places = slice(origin.item * size, (origin.item + 1) * size)
        epoch, division = self._resumed or (origin.epoch, (0,))
        division = division if epoch == origin.epoch else (0,)
        indices = order_of(self.source, self.reading, origin.epoch, division)[places]
        if origin.element not in indices:
            raise ValueError(
                f"task {origin.item} of epoch {origin.epoch} has no element {origin.element} here: "
                "give the same arguments, and load the state with which the run that failed began"
            )
        return Ticket(origin.item, origin.epoch, tuple(int(index) for index in indices))

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        source = self.source
        options = self.options.explicit() | {
            "batch_size": source.batch_size,
            "collate": None if source.collate is stack else source.collate,
            "concurrency": self._concurrency,
            "random_seed": self.seed.value,
        }
        return (source.items, source.map, self.reading.shuffle), options
