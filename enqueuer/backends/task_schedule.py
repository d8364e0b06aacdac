"""Which tasks are assigned, which result is next, and which tasks run again after a death.

    tickets -> unsent -> Dispatch -> workers -> inboxes -> ReorderBuffer -> TaskOrder: in order

When a worker has died, the tasks that it had are found by what is left: those that have no
result, are not to be sent yet, and of which the dispatch does not know that they are safe. Its
successor does them before others. If one of them was with a living worker after all, it is done
twice, and the reorder buffer drops the second result.

This file decides and does not wait.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import Any, Generic, TypeAlias, cast

from enqueuer.backends.lifecycle import DeathPlace
from enqueuer.backends.order_log import OrderLog
from enqueuer.backends.pool import HAS_ENDED, Dispatch, W, WorkerState
from enqueuer.backends.shard_schedule import ANY, AsTheyCome, ShardOrder, waiting_in
from enqueuer.common import interrupts
from enqueuer.common.sizes import size_of
from enqueuer.workers.messages import Empty, End, Epoch, Failure, ItemTuple, Start, Ticket

_NAMES = ("next", "items")
_number_of_item = operator.itemgetter(1)
_value_of = operator.itemgetter(2)
_is_none = functools.partial(operator.is_, None)
# Returns None, and keeps nothing.
_forget = deque[object](maxlen=0).append
_ALL = 1 << 62


class TaskOrder:
    """Tasks by their numbers, or as they come; each once.

    Numbers run on over epochs, so that a result that comes late is never taken for another's.

    Args:
        first: The number of the epoch's first task.
        start: Where in the epoch to begin, and the reader's state before that.
        done: Later tasks of the epoch that were done already.
        ordered: True: they come by their numbers. False: as they come. Or how many later ones may
            come before a task.
        given: Log of the tasks that were given before; None: it is not known.
        replay: Numbers of tasks in the epoch, in the order in which they come first.

    Attributes:
        end: The number after that of the last task; None until that is known. Tasks of this number
            and above are those of the next epoch.
        ordered: Whether they come by their numbers.
        log: Order in which they were taken; not kept if that is the one of their numbers.
        replay: Numbers of the tasks that come next, perhaps after some that were taken already.

    Example:
        >>> order = TaskOrder(first=100, start=Start(2), done=(), ordered=True)
        >>> order.was_taken(101), order.was_taken(102)
        (True, False)
        >>> order.taken[102] = None; order.end_at(103); order.done
        True
        >>> order = TaskOrder(first=0, start=Start(), done=(), ordered=2)
        >>> for number in (1, 4): order.taken[number] = None
        >>> order.only()
        0
    """

    def __init__(
        self,
        first: int,
        start: Start,
        done: Iterable[int],
        ordered: bool | int,
        given: str | None = "",
        replay: Iterable[int] = (),
    ) -> None:
        self.first = first
        self.ordered = ordered is True
        # Most later tasks that may be taken before one.
        self.allowance: int = (0 if ordered else _ALL) if isinstance(ordered, bool) else ordered
        self.log = OrderLog(None if self.ordered else given, first)
        # All tasks before it were taken.
        self.next = first + start.number
        # Number of tasks that were taken, and not only passed over.
        self.items = 0
        # Numbers that were taken, until `next` has gone past them. Code that takes a result writes
        # to it itself: that needs no call, see `Taken`.
        self.taken: dict[int, None] = dict.fromkeys(first + number for number in done)
        self.end: int | None = None
        self.ends: dict[int, Any] = {}
        # before the task, of a reader that has a state
        self._states = {} if start.state is None else {self.next: start.state}
        numbers = (first + number for number in replay)
        self.replay = deque(number for number in numbers if not self.was_taken(number))

    @property
    def done(self) -> bool:
        if self.taken:
            self.advance()
        return self.next == self.end

    @property
    def yielded(self) -> int:
        return 0 if self.end is None else self.end - self.first

    def end_at(self, number: int, state: Any = None) -> None:
        """Note that there is no task of this number or a higher one, and the reader's state."""
        if state is not None:
            self.ends[0] = state
        self.end = number

    def read(self, number: int, state: Any) -> None:
        """Note the reader's state after it has read the task of this number.

        Called when all that was taken was given away, too: earlier states can be forgotten.
        """
        if self._states:
            for old in [old for old in self._states if old < self.next]:
                del self._states[old]
        if state is not None:
            self._states[number + 1] = state

    def was_taken(self, number: int) -> bool:
        """Return whether the task was done, now or before the start."""
        return number < self.next or number in self.taken

    def turn(self) -> None:
        return ANY

    def only(self) -> int | None:
        """Return the number of the only task that may be taken now; None: any may."""
        replay = self.replay
        while replay:
            if not self.was_taken(replay[0]):
                return replay[0]
            replay.popleft()
        # Of the tasks that were not taken, this one was overtaken most often: by all in `taken`.
        if len(self.taken) >= self.allowance:
            self.advance()
        return self.next if len(self.taken) >= self.allowance else None

    def first_of(self, numbers: Collection[int], default: int) -> int:
        """Return which of some tasks comes first; a number if there are none."""
        replayed = (number for number in self.replay if number in numbers)
        return next(replayed, min(numbers, default=default))

    def end_replay(self, number: int) -> None:
        """Replay no tasks of this number or a higher one, as they cannot be read."""
        self.replay = deque(task for task in self.replay if task < number)

    def given(self, ready: int) -> str | None:
        return self.log.without(ready)

    def first_turns(self) -> tuple[int, ...]:
        return ()

    def rest(self, ready: Iterable[ItemTuple] = ()) -> dict[int, Start]:
        self.advance()
        number = min([self.next, *(number for _, number, _, _ in ready)])
        return {0: Start(number - self.first, self._states.get(number))}

    def beyond(self, ready: Iterable[ItemTuple] = ()) -> tuple[int, ...]:
        self.advance()
        again = {number for _, number, _, _ in ready}
        earliest = min([self.next, *again])
        numbers = {*range(earliest, self.next), *self.taken} - again
        return tuple(sorted(number - self.first for number in numbers if number > earliest))

    def is_before(self, shard: int, number: int, position: Epoch) -> bool:
        at, starts = number - self.first, position.starts
        return starts is None or at < starts[0].number or at in position.done

    def advance(self) -> None:
        """Have `next` go past all that was taken; again does nothing."""
        while self.next in self.taken:
            del self.taken[self.next]
            self.next += 1


Order: TypeAlias = ShardOrder | TaskOrder
"""What is next, and the end, for the consumer to ask before each item."""


class ReorderBuffer:
    """Called by one thread at a time.

    Attributes:
        measures: Whether results are measured.
        tickets: Those whose results were not taken, by their numbers.
        largest_bytes: Of all results, if they are measured.
    """

    def __init__(self, measure: bool) -> None:
        self.measures = measure
        self.largest_bytes = 0
        self.tickets: dict[int, Ticket] = {}
        # In the order of their arrival.
        self._results: dict[int, ItemTuple | Empty | Failure] = {}
        # Numbers of the tasks in `_results` that have no result: empty ones, and failures. A dict,
        # as a number is removed from it without a call.
        self._without: dict[int, None] = {}
        self._skipped: dict[int, deque[Failure]] = {}

    def waiting_before(self, end: int | None, arriving: int) -> int:
        """Return how many results of tasks below a number wait.

        Args:
            end: The number; None: there is none.
            arriving: Number of results that are not here yet. Which tasks they belong to is not
                known, so they count for as many of these tasks as have no result.
        """
        end = _ALL if end is None else end
        # A list is made in one step: another thread may ask while the loop takes results.
        results, tickets = list(self._results.items()), list(self.tickets)
        before = {number for number, _ in results if number < end}
        missing = sum(number < end and number not in before for number in tickets)
        there = sum(number < end and isinstance(result, tuple) for number, result in results)
        return there + min(arriving, missing)

    @property
    def outstanding(self) -> int:
        """Number of tasks that were submitted and whose results were not taken."""
        return len(self.tickets)

    def undone(self) -> list[int]:
        """Return the numbers of the tasks that have no result yet."""
        return [number for number in self.tickets if number not in self._results]

    def pass_over(self, failure: Failure) -> None:
        """Forget a skipped error that `peek` has returned; again does nothing."""
        errors = self._skipped.get(failure.number, deque())
        if errors and errors[0] is failure:
            del errors[0]
        # It may stay empty after an exception here; then items are taken one by one.
        if not errors:
            self._skipped.pop(failure.number, None)

    def put(self, message: ItemTuple | Empty | Failure) -> None:
        """Keep what came of a task, unless it is known already."""
        if isinstance(message, tuple) and message[2] is None:
            message = Empty(message[1])
        number = message[1] if isinstance(message, tuple) else message.number
        if number not in self.tickets or number in self._results:
            return
        if isinstance(message, Failure):
            index = self.tickets[number].indices[message.shard]
            # The same numbers if the task runs again: it has sent no failure since its result.
            nth = 1 + len(self._skipped.get(number, ()))
            message = dataclasses.replace(message, shard=index, nth=nth)
        if isinstance(message, Failure) and message.skipped:
            self._skipped.setdefault(number, deque()).append(message)
        else:
            if not isinstance(message, tuple):
                self._without[number] = None
            self._results[number] = message
            if self.measures and isinstance(message, tuple):
                # Never 0, which means that no result has come yet.
                self.largest_bytes = max(self.largest_bytes, size_of(message[2]), 1)

    def put_all(self, arrived: deque[Any]) -> None:
        """Keep what came of some tasks, and remove it from where it arrived."""
        is_plain = not self.measures and set(map(type, arrived)) == {tuple}
        if is_plain and not any(map(_is_none, map(_value_of, arrived))):
            tickets, results = self.tickets, self._results
            items = cast("deque[ItemTuple]", arrived)
            known = dict(zip(map(_number_of_item, items), items, strict=True))
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
        self._without[number] = None
        self._results[number] = failure

    def peek(self, order: TaskOrder) -> Failure | bool:
        """Return the failure that is next; or whether there is news.

        An item can be taken; or tasks without a result are done, so that others can be assigned.
        """
        found = False
        while (number := self.ready(order)) is not None:
            errors = self._skipped.get(number)
            if errors:
                return errors[0]
            match self._results[number]:
                case Failure() as failure:
                    return failure
                case tuple():
                    return True
            # In one step.
            order.taken[number] = None
            del self._results[number]
            del self._without[number]
            del self.tickets[number]
            found = True
        return found

    def items(self, order: TaskOrder, most: int) -> Iterator[ItemTuple]:
        """Take items as long as they are next: at most so many.

        To be read by something written in C, as `Inbox.items`.
        """
        if order.taken:
            order.advance()
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
        taken, log, results, tickets = order.taken, order.log, self._results, self.tickets
        code_of, text = log.code_of, log.text
        for _ in range(most):
            number = self.ready(order)
            if number is None or self._skipped.get(number):
                return
            result = results[number]
            if not isinstance(result, tuple):
                return
            code = code_of(number - log.last)
            # In one step, to the yield.
            taken[number] = None
            order.items += 1
            text += code
            log.last = number
            del results[number]
            del tickets[number]
            yield result

    def ready(self, order: TaskOrder) -> int | None:
        """Return the number of the result that is next, an error too, if it is there."""
        end = order.end
        if order.ordered:
            if order.taken:
                order.advance()
            number = order.next
            return number if number in self._results and number != end else None
        if order.replay or len(order.taken) >= order.allowance:
            only = order.only()
            if only is not None:
                return only if only in self._results else self._empty(order)
        results = self._results if end is None else [n for n in self._results if n < end]
        # A failure without a ticket is the reader's: it comes after all that was read.
        with_ticket = (number for number in results if number in self.tickets)
        return next(with_ticket, None if self.tickets else next(iter(results), None))

    def _empty(self, order: TaskOrder) -> int | None:
        """Return the number of an empty result that has no place in the order to be replayed."""
        end = _ALL if order.end is None else order.end
        empty = (n for n in self._without if isinstance(self._results[n], Empty) and n < end)
        return next(empty, None) if order.replay else None


# Tickets that are assigned to a worker in turn and not done: its channel always has room for them.
_MOST_ASSIGNED = 4
# The hash of an enum, which a set needs, is a function in Python.
_RUNNING = WorkerState.RUNNING
_number_of: Callable[[Ticket], int] = operator.itemgetter(0)


class TaskSchedule(Generic[W]):
    """The decisions of the engine for workers that do tasks.

    Called by one consumer at a time.

    Args:
        workers: The workers; the engine adds and removes some.
        dispatch: How tickets reach the workers.
        bunch: Most results to take at once.
        measure: Whether to measure the results.
        in_turn: Number of workers to which the elements are assigned in turn; 0: a free worker
            takes the next one.

    Attributes:
        dispatch: How tickets reach the workers.
        results: The results, and the tickets of tasks whose results were not taken.

    Example:
        >>> from enqueuer.backends.pool import WorkerState
        >>> from enqueuer.workers.messages import Start
        >>> class Worker:
        ...     shards, state, results = (), WorkerState.RUNNING, ()
        ...     inbox = property(lambda self: self)
        ...     def head(self): return False
        ...     def acknowledge(self): pass
        >>> class OneEach:
        ...     unsent, tasks, pack = [], {}, staticmethod(list)
        ...     def offer(self, numbers, packed):
        ...         self.unsent += numbers
        ...         free = [worker for worker in workers if worker not in self.tasks]
        ...         self.tasks.update((worker, self.unsent.pop(0)) for worker in free[:1])
        ...     def feed(self): pass
        ...     def assign(self, worker, number, packed): self.tasks[worker] = number
        ...     def current(self, worker): return [self.tasks[worker]]
        ...     def safe(self):
        ...         own = [n for w, n in self.tasks.items() if w.state is WorkerState.RUNNING]
        ...         return own + self.unsent
        ...     def forget(self, worker): del self.tasks[worker]
        >>> workers = [Worker(), Worker()]
        >>> schedule = TaskSchedule(workers, dispatch := OneEach(), bunch=1, measure=False)
        >>> order = TaskOrder(0, Start(), (), ordered=True)
        >>> for number in range(4):
        ...     schedule.submit([Ticket(number, 0, (number,))])
        >>> schedule.next_step(order), schedule.results.outstanding, dispatch.safe()
        (False, 4, [0, 1, 2, 3])
        >>> workers[1].state = WorkerState.DEAD
        >>> schedule.next_step(order) is workers[1], schedule.place_of(workers[1], order).text
        (True, 'task 1')
        >>> dead, workers[1] = workers[1], Worker()
        >>> schedule.resume(dead, workers[1], order); dispatch.current(workers[1])
        [1]
    """

    def __init__(
        self, workers: list[W], dispatch: Dispatch[W], bunch: int, measure: bool, in_turn: int = 0
    ) -> None:
        self._workers = workers
        self.dispatch = dispatch
        self._bunch = bunch
        self.results = ReorderBuffer(measure)
        self._in_turn = in_turn
        self._arrived: deque[ItemTuple | End | Failure | Empty] = deque()
        # Not used: the reorder buffer and the order know which results were taken.
        self._taken = AsTheyCome({})
        # Numbers of tasks, and their packed tickets, that wait for the worker whose turn they are.
        self._unsent: deque[tuple[int, Any]] = deque()
        # Number of the last task.
        self._last = -1
        # The epoch that the loop reads; None until it waits for a task of it.
        self._order: TaskOrder | None = None
        # Errors of what took too long, by the number of the task and the place in it.
        self._late: dict[int, dict[int, BaseException]] = {}
        # Dead workers whose death was reported.
        self._reported: set[W] = set()

    # --- tickets ---

    def begin(self, epoch: Epoch) -> None:
        """Forget the epoch before; the tickets have the number of theirs."""
        self._order = None

    def begin_worker(self, worker: W, epoch: Epoch) -> None:
        """Do nothing: the worker takes tickets as soon as there are some."""

    def tickets(self) -> list[Ticket]:
        """Return the tickets of tasks whose results were not taken."""
        return list(self.results.tickets.values())

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Let free workers do some tasks, all with elements or all without.

        Raises:
            ItemNotPicklable: An element cannot be sent to a worker.
        """
        if not tickets:
            return
        packed = self.dispatch.pack(tickets)
        numbers = list(map(_number_of, tickets))
        self.results.tickets.update(zip(numbers, tickets, strict=True))
        self._last = numbers[-1]
        self._offer(numbers, packed)

    def fail(self, failure: Failure) -> None:
        """Let a task have failed that could not be submitted."""
        self._last = failure.number
        self.results.fail(failure.number, failure)

    def _offer(self, numbers: Sequence[int], packed: Sequence[Any]) -> None:
        """Let free workers do some tasks, or the workers whose turn they are."""
        if self._in_turn:
            self._unsent.extend(zip(numbers, packed, strict=True))
            self._assign_in_turn()
        else:
            self.dispatch.offer(numbers, packed)

    def _assign_in_turn(self) -> None:
        """Assign the tickets, as long as their workers live and have few."""
        unsent = self._unsent
        waiting = {number for number, _ in unsent}
        out = Counter(self._place(n) for n in self.results.undone() if n not in waiting)
        living = {w.index: w for w in self._workers if w.state not in HAS_ENDED}
        # A signal handler's exception between two steps would have a task run twice.
        with interrupts.held():
            for number, packed in list(unsent):
                place = self._place(number)
                if place in living and out[place] < _MOST_ASSIGNED:
                    out[place] += 1
                    self.dispatch.assign(living[place], number, packed)
                    unsent.remove((number, packed))

    def _place(self, number: int) -> int | None:
        """Return the index of the worker whose turn a task is; None if the loop has the result."""
        ticket = self.results.tickets.get(number)
        return None if ticket is None else ticket.indices[0] % self._in_turn

    # --- results ---

    def has_next_of(self, order: Order) -> bool:
        """Return whether there are tasks of the epoch after this one. Called by any thread."""
        end = order.end if isinstance(order, TaskOrder) else None
        return end is not None and self._last >= end

    def waiting(self) -> int:
        """Return how many results of the epoch that the loop reads wait. Called by any thread.

        Results that have come since the last wait, or `poll`, may be of the next epoch. They count
        as those of this one, at most as many as it lacks.
        """
        # Read once, as another thread may begin the next epoch.
        order = self._order
        end = None if order is None else order.end
        return self.results.waiting_before(end, waiting_in(self._workers))

    def next_step(self, order: TaskOrder) -> bool | Failure | W:
        """Decide what to do next; see `ShardSchedule.next_step`."""
        self._order = order
        ended = self._collect()
        if ended is not None:
            return ended
        self.dispatch.feed()
        if self._unsent:
            self._assign_in_turn()
        found = self.results.peek(order)
        if isinstance(found, Failure):
            return found
        if found or order.done:
            return True
        # Any message may let a worker have its next ticket, and the size of any result is of use.
        # So is any result of a replay, in which more tasks may be out than there is room for.
        is_any = self._unsent or self.results.measures or order.replay
        self.dispatch.awaited = None if is_any else order.only()
        return False

    def _collect(self) -> W | None:
        """Put all that has come in the reorder buffer; return a worker whose end is new."""
        arrived, ended = self._arrived, None
        for worker in self._workers:
            inbox = worker.inbox
            while (message := inbox.head()) is not False:
                if message is True:
                    arrived.extend(inbox.items(_ALL, self._taken))
                else:
                    arrived.append(message)
                    # An exception before this repeats the step, without harm.
                    inbox.remove(message)
            inbox.acknowledge()
            # Only now, as `head` may find out that a worker has ended. What a thread or an actor
            # has sent since then comes first.
            if worker.state is not _RUNNING and self._is_over(worker):
                ended = worker
        if arrived:
            self.results.put_all(arrived)
        return ended

    def _is_over(self, worker: W) -> bool:
        """Return whether a worker has ended, with nothing left in its inbox, and its end is new."""
        is_new = worker.state in HAS_ENDED and worker not in self._reported
        return is_new and worker.inbox.head() is False

    def poll(self, order: Order) -> bool:
        """Return whether something can be taken now."""
        assert isinstance(order, TaskOrder)
        self._order = order
        self._collect()
        return self.results.ready(order) is not None

    def awaited(self, order: TaskOrder) -> str:
        """Return what the loop waits for, in words."""
        number = order.only()
        if number is None:
            return "the result of any task"
        text = f"task {number - order.first}"
        ticket = self.results.tickets.get(number)
        # The elements of this task were not read yet.
        if ticket is None:
            return text
        elements = ", ".join(map(str, ticket.indices))
        return f"{text} (element{'' if len(ticket.indices) == 1 else 's'} {elements})"

    def take(self, order: TaskOrder) -> Iterator[ItemTuple]:
        """Take the results that are next and are there."""
        return self.results.items(order, self._bunch)

    def pass_over(self, failure: Failure) -> None:
        """Forget a failure that `next_step` has returned, if it is skipped."""
        self.results.pass_over(failure)

    # --- deaths ---

    def _lost(self) -> list[int]:
        """Return the numbers of the tasks that no worker has and that are not done."""
        # First what is safe, then the results: what a worker does in between counts as safe.
        safe = self.dispatch.safe()
        self._collect()
        unsent = {number for number, _ in self._unsent}
        return [n for n in self.results.undone() if n not in unsent and n not in safe]

    def _unsent_of(self, dead: W) -> list[int]:
        """Return the numbers of the tasks that only a dead worker might have been assigned."""
        if not self._in_turn:
            return []
        return [number for number, _ in self._unsent if self._place(number) == dead.index]

    def place_of(self, dead: W, order: TaskOrder) -> DeathPlace:
        """Return the task that a worker did when it died, or the first one that it had."""
        lost = self._lost() + self._unsent_of(dead)
        # A worker runs the tasks that it took in their order.
        own = [number for number in self.dispatch.current(dead) if number in lost]
        number = own[0] if own else min(lost, default=order.next)
        ticket = self.results.tickets.get(number)
        index = 0 if ticket is None else ticket.indices[0]
        text = f"task {number - order.first}"
        if order.end is not None and number >= order.end:
            epoch = "the next epoch" if ticket is None else f"epoch {ticket.epoch}"
            text = f"task {number - order.end} of {epoch}"
        return DeathPlace(index, number, text)

    def resume(self, dead: W, successor: W, order: TaskOrder, late: Sequence[Failure] = ()) -> None:
        """Have a new worker do the tasks of a dead one; see `ShardSchedule.resume`."""
        for failure in late:
            self._late.setdefault(failure.number, {})[failure.shard] = failure.error
        for number in self._lost():
            self.dispatch.assign(successor, number, self._rerun_ticket(number))
        self.dispatch.forget(dead)

    def give_up(self, dead: W, failure: Failure) -> Failure | None:
        """Report a death in the place of a task; return None, as others may be next."""
        lost = self._lost() + self._unsent_of(dead)
        self._reported.add(dead)
        is_alone = all(worker.state in HAS_ENDED for worker in self._workers)
        order, lost = self._order, self.results.undone() if is_alone else lost
        assert order is not None, "the loop waits"
        number = order.first_of(lost, self._last + 1)
        # By this number it is replaced once it was raised: its traceback keeps the loop alive.
        self.results.fail(number, dataclasses.replace(failure, number=number))
        return None

    def part_with(self, leaver: W) -> None:
        """Let others do what a worker that was asked to exit has not done."""
        lost = sorted(self._lost())
        self._offer(lost, list(map(self._rerun_ticket, lost)))
        self.dispatch.forget(leaver)

    def _rerun_ticket(self, number: int) -> Any:
        """Return the packed ticket of a task that runs again."""
        self.results.forget_skipped(number)
        ticket = self.results.tickets[number]._replace(late=self._late.get(number))
        (packed,) = self.dispatch.pack([ticket])
        return packed
