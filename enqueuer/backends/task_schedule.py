"""Which tasks are assigned, which result is next, and which tasks run again after a death.

    tickets -> unsent -> Dispatch -> workers -> inboxes -> Results -> TaskOrder: in order

When a worker has died, the tasks that it had are found by what is left: those that have no
result, are not to be sent yet, and of which the dispatch does not know that they are safe. Its
successor does them before others. If one of them was with a living worker after all, it is done
twice, and the reorder buffer drops the second result.

This file decides and does not wait.
"""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Generic

from enqueuer.backends.pool import HAS_ENDED, DeathPlace, Dispatch, W, WorkerState
from enqueuer.backends.shard_schedule import waiting_in
from enqueuer.common.objects import size_of
from enqueuer.order.messages import Empty, End, Epoch, Failure, ItemTuple, Ticket
from enqueuer.order.sequence import Order, Results, TaskOrder

_ALL = 1 << 62

# Tickets that are assigned to a worker in turn and not done: its channel always has room for them.
_MAX_ASSIGNED = 4
# The hash of an enum, which a set needs, is a function in Python.
_RUNNING = WorkerState.RUNNING
_number_of: Callable[[Ticket], int] = operator.itemgetter(0)


class TaskSchedule(Generic[W]):
    """The decisions of the engine for workers that do tasks.

    Called by one consumer at a time.

    Args:
        workers: The workers; the engine adds and removes some.
        dispatch: How tickets reach the workers.
        limit: Most results to take at once.
        measure: Whether to measure the results.
        in_turn: Number of workers to which the elements are assigned in turn; 0: a free worker
            takes the next one.

    Attributes:
        dispatch: How tickets reach the workers.
        results: The results, and the tickets of tasks whose results were not taken.
        measures: Whether results are measured.
        largest_bytes: Of all results, if they are measured.

    Example:
        >>> from enqueuer.backends.pool import WorkerState
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
        >>> schedule = TaskSchedule(workers, dispatch := OneEach(), limit=1, measure=False)
        >>> order = TaskOrder(Epoch(0), first=0, ordered=True)
        >>> for number in range(4):
        ...     schedule.submit([Ticket(number, 0, (number,))])
        >>> schedule.next_step(order), len(schedule.results.tickets), dispatch.safe()
        (False, 4, [0, 1, 2, 3])
        >>> workers[1].state = WorkerState.DEAD
        >>> schedule.next_step(order) is workers[1], schedule.place_of(workers[1], order).text
        (True, 'task 1')
        >>> dead, workers[1] = workers[1], Worker()
        >>> schedule.resume(dead, workers[1], order); dispatch.current(workers[1])
        [1]
    """

    def __init__(
        self, workers: list[W], dispatch: Dispatch[W], limit: int, measure: bool, in_turn: int = 0
    ) -> None:
        self._workers = workers
        self.dispatch = dispatch
        self._limit = limit
        self.results = Results()
        self.measures = measure
        self.largest_bytes = 0
        # Held while results come and go, and by another thread that counts them. It is reentrant,
        # as the garbage collector may run code of the user there, which asks as well.
        self._lock = threading.RLock()
        self._in_turn = in_turn
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

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Let free workers do some tasks, all with elements or all without.

        Raises:
            ItemNotPicklable: An element cannot be sent to a worker.
        """
        if not tickets:
            return
        packed = self.dispatch.pack(tickets)
        numbers = list(map(_number_of, tickets))
        with self._lock:
            self.results.add(tickets)
        self._last = numbers[-1]
        self._offer(numbers, packed)

    def fail(self, failure: Failure) -> None:
        """Let a task have failed that could not be submitted."""
        self._last = failure.number
        with self._lock:
            self.results.fail(failure)

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
        for number, packed in list(unsent):
            place = self._place(number)
            if place in living and out[place] < _MAX_ASSIGNED:
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
        end, arriving = None if order is None else order.end, waiting_in(self._workers)
        with self._lock:
            return self.results.waiting_before(end, arriving)

    def next_step(self, order: TaskOrder) -> bool | Failure | W:
        """Decide what to do next; see `ShardSchedule.next_step`."""
        self._order = order
        ended = self._collect()
        if ended is not None:
            return ended
        self.dispatch.feed()
        if self._unsent:
            self._assign_in_turn()
        with self._lock:
            found = self.results.peek(order)
        if isinstance(found, Failure):
            return found
        if found or order.is_over:
            return True
        # Any message may let a worker have its next ticket, and the size of any result is of use.
        is_any = self._unsent or self.measures
        self.dispatch.awaited = None if is_any else order.turn()
        return False

    def _collect(self) -> W | None:
        """Put all that has come in the reorder buffer; return a worker whose end is new."""
        ended = None
        for worker in self._workers:
            inbox = worker.inbox
            while (message := inbox.head()) is not False:
                if message is True:
                    for item in inbox.take(_ALL):
                        self._put(item)
                else:
                    assert not isinstance(message, End), "the workers do tasks"
                    self._put(message)
                    inbox.remove(message)
            inbox.acknowledge()
            # Only now, as `head` may find out that a worker has ended. What a thread or an actor
            # has sent since then comes first.
            if worker.state is not _RUNNING and self._is_over(worker):
                ended = worker
        return ended

    def _put(self, message: ItemTuple | Empty | Failure) -> None:
        with self._lock:
            item = self.results.put(message)
        if item is not None and self.measures:
            # Never 0, which means that no result has come yet.
            self.largest_bytes = max(self.largest_bytes, size_of(item[2]), 1)

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
        number = order.turn()
        if number is None:
            return "the result of any task"
        text = f"task {number - order.first}"
        ticket = self.results.tickets.get(number)
        # The elements of this task were not read yet.
        if ticket is None:
            return text
        elements = ", ".join(map(str, ticket.indices))
        return f"{text} (element{'' if len(ticket.indices) == 1 else 's'} {elements})"

    def take(self, order: TaskOrder) -> list[ItemTuple]:
        """Take the results that are next and are there."""
        with self._lock:
            return self.results.take(order, self._limit)

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
        running = [number for number in self.dispatch.current(dead) if number in lost]
        number = running[0] if running else min(lost, default=order.next)
        ticket = self.results.tickets.get(number)
        index = 0 if ticket is None else ticket.indices[0]
        epoch, task = order.place_of(number)
        text = f"task {task}"
        if epoch != order.epoch.number:
            text += " of the next epoch" if ticket is None else f" of epoch {ticket.epoch}"
        is_single = bool(running) and ticket is not None and len(ticket.indices) == 1
        return DeathPlace(index, number, text, ((0, number),) if is_single else ())

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
        number = min(self.results.undone() if is_alone else lost, default=self._last + 1)
        # By this number it is replaced once it was raised: its traceback keeps the loop alive.
        with self._lock:
            self.results.fail(dataclasses.replace(failure, number=number))
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
