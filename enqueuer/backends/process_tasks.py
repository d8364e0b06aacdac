"""Tasks on processes: idle workers take tickets from one pair of sockets; channels bring results.

    consumer -> tickets -> worker 0 ==channel 0==> \\
                        -> worker 1 ==channel 1==>  > the reorder buffer -> in order

When a worker dies, the tickets that it had taken are told by what is left: those that are not
done, do not lie in the socket and are not in a living worker's hand. Its successor does them
before it takes others. If one of them was in somebody's hand after all, it is done twice, and
the reorder buffer drops the second result.
"""

from __future__ import annotations

import dataclasses
import itertools
import socket
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from enqueuer import interrupts
from enqueuer.backends import Job, WorkerState, check_owner, until
from enqueuer.backends.processes import ProcessBackend
from enqueuer.backends.reorder_buffer import Look, ReorderBuffer, Reordering
from enqueuer.backends.watched import Watched
from enqueuer.errors import Closed, StartError
from enqueuer.merging import AsTheyCome, Order, TaskOrder
from enqueuer.messages import End, Epoch, Failure, Item, Ticket
from enqueuer.meters import LoopMeter
from enqueuer.stalls import DeadlineExpired, awaited_task
from enqueuer.stats import WorkerStats
from enqueuer.transport import task_queue
from enqueuer.transport.channel import Credit
from enqueuer.transport.task_queue import TaskQueue

_ALL = 1 << 62


class TaskProcesses(Reordering, ProcessBackend):
    """See `enqueuer.backends.TaskBackend`."""

    def __init__(self, job: Job, loop_meter: LoopMeter) -> None:
        super().__init__(job, loop_meter)
        self._reorder_buffer = ReorderBuffer(job.max_queue_bytes is not None)
        self._arrived: deque[Any] = deque()
        self._noted = AsTheyCome(
            {}
        )  # nobody asks it: the reorder buffer and the order keep the account
        self._task_queue: TaskQueue | None = None
        self._unsent: deque[tuple[int, bytes]] = deque()  # numbers and tickets
        self._last_token = 0
        self._last = -1  # the number of the last ticket
        self._offered: dict[int, int] = {}  # token -> number, of what went to the task queue
        self._handed: dict[Watched, dict[int, int]] = {}  # the same, of what one worker alone got
        self._reported: set[Watched] = set()  # dead workers whose death was reported
        self._leaving: set[Watched] = set()  # those who were one too many, until they are gone

    # --- start ---

    def _open_wake_up(self) -> None:
        super()._open_wake_up()
        self._task_queue = TaskQueue()
        self._resources.callback(self._task_queue.close)

    def _task_socket(self) -> socket.socket | None:
        assert self._task_queue is not None
        return self._task_queue.worker_socket()

    def _credit(self, index: int) -> Credit:
        # tickets are the bound: one worker may do all of them
        return Credit(self._job.max_queue_size + self._job.workers, None, ask=False)

    def _start_one(self, index: int) -> Watched:
        worker = super()._start_one(index)
        worker.channel.grant_all()
        return worker

    # --- workers="auto" ---

    def resize(self, workers: int) -> None:
        staying = [worker for worker in self._workers if worker not in self._leaving]
        for worker in staying[workers:]:
            self._leaving.add(worker)
            worker.channel.ask_to_stop()  # what it cannot finish, another one does
        added: list[Watched] = []
        try:
            with interrupts.held():  # or there might be a worker that nobody knows
                while len(staying) + len(added) < workers:
                    added.append(self._add_one())
        except (OSError, StartError) as error:
            self.resize(len(staying))
            raise StartError(f"another worker could not be started: {error}") from error
        finally:
            self._started = time.monotonic()

    @property
    def is_resizing(self) -> bool:
        return bool(self._leaving)

    def measures(self) -> list[WorkerStats]:
        return [worker.measure() for worker in list(self._workers) if worker not in self._leaving]

    def _add_one(self) -> Watched:
        taken = {worker.index for worker in self._workers}
        index = next(index for index in itertools.count() if index not in taken)
        while len(self._plans) <= index:
            self._plans.append(self._plans[0])  # they are all alike
        worker = self._start_one(index)
        self._workers.append(worker)
        return worker

    def _part_with(self, leaver: Watched) -> None:
        """Let others do what a worker that was told to exit had left to do."""
        self._leaving.discard(leaver)
        for number in sorted(self._lost(leaver), reverse=True):
            self._reorder_buffer.begin_again(number)
            self._unsent.appendleft((number, self._pack(self._reorder_buffer.tickets[number])))
        self._handed.pop(leaver, None)
        self._workers.remove(leaver)
        self._end(leaver)

    # --- tickets ---

    def begin(self, epoch: Epoch) -> None:
        check_owner(self._owner)  # the tickets tell the rest

    def submit(self, ticket: Ticket) -> None:
        packed = self._pack(ticket)
        self._reorder_buffer.tickets[ticket.number] = ticket
        self._last = ticket.number
        self._unsent.append((ticket.number, packed))
        self._offer()

    def fail(self, failure: Failure) -> None:
        self._last = failure.number
        self._reorder_buffer.fail(failure.number, failure)

    def poll(self, order: TaskOrder) -> bool:
        self._collect()
        return self._reorder_buffer.has_next(order)

    def _pack(self, ticket: Ticket) -> bytes:
        return task_queue.pack(ticket, are_forked=self._job.start_method == "fork")

    def _offer(self) -> None:
        """Send tickets as long as there is room for them; the rest goes when results come."""
        assert self._task_queue is not None
        while self._unsent:
            token = self._last_token + 1
            try:
                if not self._task_queue.send(token, *self._unsent[0]):
                    return
            except OSError:
                # stop() has closed the sockets while the loop's thread read an iterable.
                if self._closed:
                    return
                raise
            self._last_token = token
            self._offered[token] = self._unsent.popleft()[0]
        if len(self._offered) > 2 * len(self._reorder_buffer.tickets) + 1000:
            self._forget_done()

    # --- results ---

    def wait(self, order: Order, deadline: float | None) -> Failure | None:
        assert isinstance(order, TaskOrder)
        check_owner(self._owner)
        expired = False
        while not order.done:
            if self._closed:
                raise Closed("the enqueuer was stopped")
            self._collect()
            if self._closed:  # by a handler of a log record that has just come
                continue
            self._replace_the_dead(order)
            self._offer()
            found = self._reorder_buffer.look(order)
            if isinstance(found, Failure):
                return found
            if found is not Look.NOTHING or order.done:
                return None
            if expired:
                raise DeadlineExpired("no batch in time")
            self._loop_meter.pause(None)
            deadline = until(deadline, self._job.longest_wait_s)
            self._sleep(self._workers, False, deadline)
            expired = deadline is not None and time.monotonic() >= deadline
        return None

    def take(self, order: Order) -> Iterator[Item]:
        assert isinstance(order, TaskOrder)
        return self._reorder_buffer.items(order, self._bunch)

    def acknowledge(self) -> None:
        pass  # what is in the reorder buffer has left the rings

    def has_news(self, order: Order) -> bool:
        assert isinstance(order, TaskOrder)
        return super().has_news(order) or self.poll(order)

    def waiting(self) -> int:
        return super().waiting() + self._reorder_buffer.waiting

    def _awaited(self, order: Order) -> str:
        assert isinstance(order, TaskOrder)
        return awaited_task(order, self._reorder_buffer.tickets.get(order.next))

    def _collect(self) -> None:
        """Put in the reorder buffer all that has come."""
        for worker in self._workers:
            channel = worker.channel
            if channel.has_packets or channel.records:
                self._read(worker)
            while channel.has_message:
                self._arrived.extend(channel.items(_ALL, self._noted))
                message = channel.other() if channel.has_message else None
                if isinstance(message, Failure):
                    message = dataclasses.replace(message, worker=str(worker))
                if message is not None:
                    self._arrived.append(message)
                    channel.pass_over()  # an exception before this repeats it, which does no harm
            channel.make_room()
        while self._arrived:
            message = self._arrived[0]
            assert not isinstance(message, End)
            self._reorder_buffer.put(message)
            self._arrived.popleft()

    # --- deaths ---

    def _replace_the_dead(self, order: TaskOrder) -> None:
        # one after the other: while one is replaced, the death of any other may be read
        while dead := next(filter(self._is_to_be_replaced, self._workers), None):
            if self._closed:
                return
            self._replace_one(dead, order)

    def _is_to_be_replaced(self, worker: Watched) -> bool:
        return worker.state is WorkerState.DEAD and worker not in self._reported

    def _replace_one(self, dead: Watched, order: TaskOrder) -> None:
        self._collect()  # what others have done meanwhile; nothing of the dead is left in its ring
        if dead in self._leaving:
            self._part_with(dead)
            return
        lost, in_hand = self._lost(dead), self._number_in_hand(dead)
        number = in_hand if in_hand in lost else min(lost, default=order.next)
        ticket = self._reorder_buffer.tickets.get(number)
        index = ticket.indices[0] if ticket is not None else 0
        with interrupts.held():
            new = self._successor(dead, (index, number), f"task {number - order.first}")
            if isinstance(new, Failure):
                self._reported.add(dead)
                self._reorder_buffer.fail(self._when_to_tell(lost), new)
            elif new is not None:
                mine = self._handed[new] = {}
                for number in lost:
                    self._reorder_buffer.begin_again(number)
                    self._last_token += 1
                    mine[self._last_token] = number
                    packed = self._pack(self._reorder_buffer.tickets[number])
                    new.channel.hand(self._last_token, number, packed)
            self._handed.pop(dead, None)

    def _lost(self, dead: Watched) -> list[int]:
        """Return the numbers of the tasks that nobody has and that are not done."""
        assert self._task_queue is not None
        self._forget_done()
        first = self._task_queue.first()
        safe = {number for number, _ in self._unsent}
        if first is not None:
            safe.update(number for token, number in self._offered.items() if token >= first)
        for worker in self._alive():
            safe.add(self._number_in_hand(worker))
            safe.update(self._handed.get(worker, {}).values())
        return [number for number in self._reorder_buffer.undone() if number not in safe]

    def _number_in_hand(self, worker: Watched) -> int:
        """Return the number of the task that a worker took last; -1 if that is done."""
        token = worker.channel.claimed
        return self._handed.get(worker, {}).get(token, self._offered.get(token, -1))

    def _when_to_tell(self, lost: list[int]) -> int:
        """Return the number of the task in whose place a death is told."""
        candidates = lost if self._alive() else self._reorder_buffer.undone()
        return min(candidates, default=self._last + 1)

    def _alive(self) -> list[Watched]:
        return [worker for worker in self._workers if worker.state is not WorkerState.DEAD]

    def _forget_done(self) -> None:
        undone = set(self._reorder_buffer.undone())
        self._offered = {t: number for t, number in self._offered.items() if number in undone}
