"""Tasks on threads: one buffer of tickets for all workers, one of results for the consumer.

consumer -> [tickets] -> workers -> [results] -> the reorder buffer -> in order
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator
from queue import Empty as NothingYet

from enqueuer.backends import Job, WorkerThread, bunch_of, until
from enqueuer.backends.reorder_buffer import Look, ReorderBuffer, Reordering
from enqueuer.backends.threads import ThreadBackend, ThreadSender
from enqueuer.buffer import UNBOUNDED, Buffer
from enqueuer.errors import Closed, StartError
from enqueuer.merging import Order, TaskOrder
from enqueuer.messages import End, Epoch, Failure, Item, Message, Ticket
from enqueuer.meters import WAITING, LoopMeter
from enqueuer.stalls import DeadlineExpired, WaitSnapshot, awaited_task
from enqueuer.stats import WorkerStats
from enqueuer.tracing import traced
from enqueuer.worker import Plan, serve_tasks

_GO_HOME = Ticket(-1, 0, ())  # whoever takes it is one too many


class TaskThreads(Reordering, ThreadBackend):
    """See `enqueuer.backends.TaskBackend`."""

    def __init__(self, job: Job, loop_meter: LoopMeter) -> None:
        super().__init__(job, loop_meter)
        self._bunch = bunch_of(job)
        # The enqueuer keeps the bound: it hands out no more tickets than that.
        self._tickets: Buffer[Ticket] = Buffer(UNBOUNDED)
        self._results: Buffer[Message] = Buffer(UNBOUNDED)
        self._reorder_buffer = ReorderBuffer(job.max_queue_bytes is not None)
        self._hands: list[_TaskSender] = []  # of those who work, and those who are about to leave
        self._staying = job.workers

    def _start_one(self, index: int, plan: Plan) -> threading.Thread:
        sender = _TaskSender(index, self._results, self._tickets)
        thread = WorkerThread(
            target=traced(serve_tasks, self._trace, index),
            args=(plan, sender, sender),
            name=f"enqueuer-worker-{index}",
            daemon=True,
        )
        thread.start()
        self._senders.append(sender)
        self._hands.append(sender)
        return thread

    def begin(self, epoch: Epoch) -> None:
        pass  # the tickets tell

    def submit(self, ticket: Ticket) -> None:
        self._tickets.put(ticket)
        self._reorder_buffer.tickets[ticket.number] = ticket

    def resize(self, workers: int) -> None:
        self._part_with_leavers()
        before = self._staying
        while self._staying > workers:
            self._staying -= 1
            self._tickets.put(_GO_HOME)
        try:
            while self._staying < workers:
                self._add_one()
                self._staying += 1
        except RuntimeError as error:
            self.resize(before)
            raise StartError(f"another thread could not be started: {error}") from error

    def _add_one(self) -> None:
        taken = {hand.index for hand in self._hands}
        index = next(index for index in itertools.count() if index not in taken)
        plan = self._plans[0]  # they are all alike
        self._threads.append(self._start_one(index, plan))
        self._plans.append(plan)

    def _part_with_leavers(self) -> None:
        for hand, thread in list(zip(self._hands, self._threads, strict=True)):
            if hand.has_left:
                thread.join()  # all that it has left to do is to return
                self._hands.remove(hand)
                self._senders.remove(hand)
                self._threads.remove(thread)
                self._plans.pop()

    @property
    def is_resizing(self) -> bool:
        return sum(not hand.has_left for hand in self._hands) > self._staying

    def measures(self) -> list[WorkerStats]:
        gone = {hand.index for hand in list(self._hands) if hand.has_left}
        return [worker for worker in super().measures() if worker.index not in gone]

    def look(self, order: Order) -> WaitSnapshot:
        view = super().look(order)
        here = {worker.name for worker in self.measures()}
        workers = [worker for worker in view.workers if worker.name in here]
        return dataclasses.replace(view, workers=workers)

    def fail(self, failure: Failure) -> None:
        self._reorder_buffer.fail(failure.number, failure)

    def poll(self, order: TaskOrder) -> bool:
        self._fetch(0.0)
        return self._reorder_buffer.has_next(order)

    def wait(self, order: Order, deadline: float | None) -> Failure | None:
        assert isinstance(order, TaskOrder)
        while not order.done:
            if self._results.closed:
                raise Closed("the enqueuer was stopped")
            self._fetch(0.0)
            found = self._reorder_buffer.look(order)
            if isinstance(found, Failure):
                return found
            if found is not Look.NOTHING:
                return None
            if order.done:
                break
            self._loop_meter.pause(None)
            deadline = until(deadline, self._longest_wait_s)
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._fetch(timeout):
                raise DeadlineExpired("no batch in time")
        return None

    def _fetch(self, timeout: float | None) -> bool:
        """Put what has come in the reorder buffer; wait for the first of it."""
        results = self._results
        message = results.look()
        if message is None and timeout == 0:
            return False
        if message is None:
            try:
                message = results.peek(timeout)
            except NothingYet:
                return False
        while message is not None:
            assert not isinstance(message, End)
            self._reorder_buffer.put(message)  # again does no harm, if an exception strikes here
            results.drop()
            message = results.look()
        return True

    def take(self, order: Order) -> Iterator[Item]:
        assert isinstance(order, TaskOrder)
        return self._reorder_buffer.items(order, self._bunch)

    def has_news(self, order: Order) -> bool:
        assert isinstance(order, TaskOrder)
        return self.poll(order)

    def waiting(self) -> int:
        on_their_way = sum(isinstance(message, Item) for message in self._results.snapshot())
        return on_their_way + self._reorder_buffer.waiting

    def _awaited(self, order: Order) -> str:
        assert isinstance(order, TaskOrder)
        return awaited_task(order, self._reorder_buffer.tickets.get(order.next))

    def close(self) -> None:
        super().close()
        for buffer in (self._tickets, self._results):
            buffer.close()
            buffer.clear()


class _TaskSender(ThreadSender):
    """A worker thread's Sender and Tickets."""

    def __init__(self, index: int, results: Buffer[Message], tickets: Buffer[Ticket]) -> None:
        super().__init__(index, results, Buffer(), measured=False)
        self.has_left = False
        self._tickets = tickets

    def next_ticket(self) -> Ticket | None:
        ticket = self._get(self._tickets, WAITING)
        if ticket is _GO_HOME:
            self.has_left = True
            return None
        return ticket
