"""Which tasks are assigned, which result is next, and which tasks run again after a death.

    tickets -> unsent -> Dispatch -> workers -> inboxes -> the reorder buffer -> in order

When a worker has died, the tasks that it had are found by what is left: those that have no
result, are not to be sent yet, and of which the dispatch does not know that they are safe. Its
successor does them before others. If one of them was with a living worker after all, it is done
twice, and the reorder buffer drops the second result.

This file decides and does not wait.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat, starmap
from typing import Any, Generic

from enqueuer.backends.order import AsTheyCome, Order, TaskOrder
from enqueuer.backends.pool import HAS_ENDED, Dispatch, W, WorkerState
from enqueuer.backends.reorder_buffer import Next, ReorderBuffer
from enqueuer.backends.restarts import DeathPlace
from enqueuer.backends.shard_schedule import Step, inboxes_of
from enqueuer.backends.stall import awaited_task
from enqueuer.workers.messages import Empty, End, Epoch, Failure, ItemTuple, Ticket

_ALL = 1 << 62
# The hash of an enum, which a set needs, is a function in Python.
_RUNNING = WorkerState.RUNNING
_number_of: Callable[[Ticket], int] = operator.itemgetter(0)
# Keeps nothing.
_forget_all = deque[object](maxlen=0).extend


class TaskSchedule(Generic[W]):
    """The decisions of the engine for workers that do tasks.

    Called by one consumer at a time.

    Args:
        workers: The workers; the engine adds and removes some.
        dispatch: How tickets reach the workers.
        bunch: Most results to take at once.
        measure: Whether to measure the results.

    Example:
        >>> from enqueuer.backends.pool import WorkerState
        >>> from enqueuer.workers.messages import Start
        >>> class Worker:
        ...     shards, state, results = (), WorkerState.RUNNING, ()
        ...     inbox = property(lambda self: self)
        ...     def head(self): return False
        ...     def acknowledge(self): pass
        >>> class OneEach:
        ...     least, tasks, pack = 1, {}, staticmethod(lambda ticket: ticket)
        ...     def offer(self, tickets):
        ...         free = [worker for worker in workers if worker not in self.tasks]
        ...         self.tasks.update((worker, tickets[0][0]) for worker in free[:1])
        ...         return len(free[:1])
        ...     def assign(self, worker, number, packed): self.tasks[worker] = number
        ...     def current(self, worker): return [self.tasks[worker]]
        ...     def safe(self):
        ...         return [n for w, n in self.tasks.items() if w.state is WorkerState.RUNNING]
        ...     def forget(self, worker): del self.tasks[worker]
        >>> workers = [Worker(), Worker()]
        >>> schedule = TaskSchedule(workers, dispatch := OneEach(), bunch=1, measure=False)
        >>> order = TaskOrder(0, Start(), (), ordered=True)
        >>> for number in range(4):
        ...     schedule.submit(Ticket(number, 0, (number,)))
        >>> schedule.next_step(order), schedule.outstanding, dispatch.safe()
        (<Step.WAIT: 2>, 4, [0, 1])
        >>> workers[1].state = WorkerState.DEAD
        >>> schedule.next_step(order) is workers[1], schedule.place_of(workers[1], order).text
        (True, 'task 1')
        >>> dead, workers[1] = workers[1], Worker()
        >>> schedule.resume(dead, workers[1], order); dispatch.current(workers[1])
        [1]
    """

    def __init__(self, workers: list[W], dispatch: Dispatch[W], bunch: int, measure: bool) -> None:
        self._workers = workers
        self._dispatch = dispatch
        self._bunch = bunch
        self._buffer = ReorderBuffer(measure)
        self._measures = measure
        self._arrived: deque[ItemTuple | End | Failure | Empty] = deque()
        # Not used: the reorder buffer and the order know which results were taken.
        self._taken = AsTheyCome({})
        # Numbers of tasks, and their packed tickets.
        self._unsent: deque[tuple[int, Any]] = deque()
        # Number of the last task.
        self._last = -1
        # The epoch that the loop reads; None until it waits for a task of it.
        self._order: TaskOrder | None = None
        # Dead workers whose death was reported.
        self._reported: set[W] = set()

    # --- tickets ---

    def begin(self, epoch: Epoch) -> None:
        """Forget the epoch before; the tickets have the number of theirs."""
        self._order = None

    def begin_worker(self, worker: W, epoch: Epoch) -> None:
        """Do nothing: the worker takes tickets as soon as there are some."""

    @property
    def outstanding(self) -> int:
        """Number of tasks that were submitted and whose results were not taken."""
        return self._buffer.outstanding

    @property
    def largest_bytes(self) -> int:
        """Size of the largest result so far, if there is a limit in bytes; else 0."""
        return self._buffer.largest_bytes

    @property
    def least(self) -> int:
        """Number of tickets that are worth being submitted at once."""
        return self._dispatch.least

    def tickets(self) -> list[Ticket]:
        """Return the tickets of tasks whose results were not taken."""
        return list(self._buffer.tickets.values())

    def submit(self, ticket: Ticket) -> None:
        """Let a free worker do a task.

        Raises:
            ItemNotPicklable: An element cannot be sent to a worker.
        """
        packed = self._dispatch.pack(ticket)
        self._buffer.tickets[ticket.number] = ticket
        self._last = ticket.number
        self._unsent.append((ticket.number, packed))
        self._offer()

    def submit_all(self, tickets: Sequence[Ticket]) -> None:
        """Let free workers do some tasks, whose elements the workers have."""
        if not tickets:
            return
        numbers, dispatch = list(map(_number_of, tickets)), self._dispatch
        self._buffer.tickets.update(zip(numbers, tickets, strict=True))
        self._last = numbers[-1]
        # Threads take tickets as they are, and any number of them.
        offer_all = getattr(dispatch, "offer_all", None)
        if offer_all is not None and not self._unsent:
            offer_all(tickets)
            return
        self._unsent.extend(zip(numbers, dispatch.pack_all(tickets), strict=True))
        self._offer()

    def fail(self, failure: Failure) -> None:
        """Let a task have failed that could not be submitted."""
        self._last = failure.number
        self._buffer.fail(failure.number, failure)

    def _offer(self) -> None:
        """Send tickets as long as there is room for them; the rest is sent when results come."""
        unsent = self._unsent
        while unsent:
            sent = self._dispatch.offer(unsent)
            if not sent:
                return
            _forget_all(starmap(unsent.popleft, repeat((), sent)))

    # --- results ---

    def has_next_of(self, order: Order) -> bool:
        """Return whether there are tasks of the epoch after this one. Called by any thread."""
        return isinstance(order, TaskOrder) and order.is_of_next(self._last)

    def waiting(self) -> int:
        """Return how many results of the epoch that the loop reads wait. Called by any thread.

        Results that have come since the last wait, or `poll`, may be of the next epoch. They count
        as those of this one, at most as many as it lacks.
        """
        # Read once, as another thread may begin the next epoch.
        order = self._order
        on_their_way = sum(inbox.waiting for inbox in inboxes_of(self._workers))
        if order is None or order.end is None or self._last < order.end:
            return on_their_way + self._buffer.waiting
        return self._buffer.waiting_before(order.end, on_their_way)

    def next_step(self, order: Order) -> Step | Failure | W:
        """Decide what to do next: take results, return a failure, replace a worker, or wait."""
        assert isinstance(order, TaskOrder)
        self._order = order
        ended = self._collect()
        if ended is not None:
            return ended
        if self._unsent:
            self._offer()
        found = self._buffer.peek(order)
        if isinstance(found, Failure):
            return found
        if found is not Next.NOTHING or order.done:
            return Step.TAKE
        # Any message makes room for what was not sent, and the size of any result is of use.
        is_any = not order.ordered or self._unsent or self._measures
        self._dispatch.awaited = None if is_any else order.next
        return Step.WAIT

    def _collect(self) -> W | None:
        """Put all that has come in the reorder buffer; return a worker whose end is new."""
        arrived, ended = self._arrived, None
        for worker in self._workers:
            inbox, state = worker.inbox, worker.state
            while (message := inbox.head()) is not False:
                if message is True:
                    arrived.extend(inbox.items(_ALL, self._taken))
                else:
                    arrived.append(message)
                    # An exception before this repeats the step, without harm.
                    inbox.remove(message)
            inbox.acknowledge()
            if state is not _RUNNING and state in HAS_ENDED and worker not in self._reported:
                ended = worker
        if arrived:
            self._buffer.put_all(arrived)
        return ended

    def poll(self, order: Order) -> bool:
        """Return whether something can be taken now."""
        assert isinstance(order, TaskOrder)
        self._order = order
        self._collect()
        return self._buffer.has_next(order)

    def awaited_worker(self, order: Order) -> W | None:
        """Return None: any worker may do the task that the loop waits for."""
        return None

    def awaited(self, order: Order) -> str:
        """Return what the loop waits for, in words."""
        assert isinstance(order, TaskOrder)
        return awaited_task(order, self._buffer.tickets.get(order.next))

    def take(self, order: Order) -> Iterator[ItemTuple]:
        """Take the results that are next and are there."""
        assert isinstance(order, TaskOrder)
        return self._buffer.items(order, self._bunch)

    def more(self, order: Order) -> None:
        """Return None: tickets are submitted first."""

    def pass_over(self) -> None:
        """Forget the failure that `next_step` returned last, if it is skipped."""
        self._buffer.pass_over()

    def acknowledge(self) -> None:
        """Do nothing: what is in the reorder buffer was acknowledged."""

    # --- deaths ---

    def _lost(self) -> list[int]:
        """Return the numbers of the tasks that no worker has and that are not done."""
        # First what is safe, then the results: what a worker does in between counts as safe.
        safe = self._dispatch.safe()
        self._collect()
        unsent = {number for number, _ in self._unsent}
        return [n for n in self._buffer.undone() if n not in unsent and n not in safe]

    def place_of(self, dead: W, order: Order) -> DeathPlace:
        """Return the task that a worker did when it died, or the first one that it had."""
        assert isinstance(order, TaskOrder)
        lost = self._lost()
        # A worker runs the tasks that it took in their order.
        own = [number for number in self._dispatch.current(dead) if number in lost]
        number = own[0] if own else min(lost, default=order.next)
        ticket = self._buffer.tickets.get(number)
        index = 0 if ticket is None else ticket.indices[0]
        text = f"task {number - order.first}"
        if order.end is not None and number >= order.end:
            epoch = "the next epoch" if ticket is None else f"epoch {ticket.epoch}"
            text = f"task {number - order.end} of {epoch}"
        return DeathPlace(index, number, text)

    def resume(self, dead: W, successor: W, order: Order) -> None:
        """Have a new worker do the tasks of a dead one."""
        for number in self._lost():
            self._dispatch.assign(successor, number, self._rerun_ticket(number))
        self._dispatch.forget(dead)

    def give_up(self, dead: W, failure: Failure) -> Failure | None:
        """Report a death in the place of a task; return None, as others may be next."""
        lost = self._lost()
        self._reported.add(dead)
        is_alone = all(worker.state in HAS_ENDED for worker in self._workers)
        candidates = self._buffer.undone() if is_alone else lost
        self._buffer.fail(min(candidates, default=self._last + 1), failure)
        return None

    def part_with(self, leaver: W) -> None:
        """Let others do what a worker that was asked to exit has not done."""
        for number in sorted(self._lost(), reverse=True):
            self._unsent.appendleft((number, self._rerun_ticket(number)))
        self._dispatch.forget(leaver)

    def _rerun_ticket(self, number: int) -> Any:
        """Return the packed ticket of a task that runs again."""
        self._buffer.forget_skipped(number)
        return self._dispatch.pack(self._buffer.tickets[number])
