"""Tasks on Ray actors: each is handed a few tickets at a time; its stream brings the results.

    consumer -> tickets that wait -> a few to each actor -> results -> reorder buffer -> in order

A ticket is handed out when one comes back, by whichever thread receives that; so nobody idles
while the loop is busy. Fast tasks are handed out several at a time, so that the way to the actor
is not waited for; a slow one is alone, so that none waits behind it while somebody else is free.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator

from enqueuer.backends import Job, WorkerState, check_owner
from enqueuer.backends.ray import Actor, RayBackend
from enqueuer.backends.ray_worker import Credit
from enqueuer.backends.reorder_buffer import Look, ReorderBuffer, Reordering
from enqueuer.merging import Order, TaskOrder
from enqueuer.messages import End, Epoch, Failure, Item, Message, Ticket
from enqueuer.meters import LoopMeter, clock
from enqueuer.stalls import awaited_task
from enqueuer.stats import WorkerStats
from enqueuer.transport import task_queue

_ALL = 1 << 62
_WAY_NS = 5_000_000  # to an actor and back, of which none is idle
_SLOW_NS = 100_000_000  # a task that takes longer is handed out alone
_MOST_AHEAD = 64


class _Hand:
    """The tickets that an actor has, and how fast it is."""

    def __init__(self) -> None:
        self.numbers: dict[int, None] = {}  # in the order in which it does them
        self.pace_ns = 0.0
        self._since = 0

    def give(self, number: int) -> None:
        if not self.numbers:
            self._since = clock()
        self.numbers[number] = None

    def done(self, number: int) -> None:
        if number in self.numbers:
            del self.numbers[number]
            now = clock()
            took, self._since = now - self._since, now
            self.pace_ns = 0.8 * self.pace_ns + 0.2 * took if self.pace_ns else took

    @property
    def wants(self) -> int:
        """How many tickets it should have."""
        if not self.pace_ns:
            return 2
        if self.pace_ns > _SLOW_NS:
            return 1
        return min(_MOST_AHEAD, 1 + math.ceil(_WAY_NS / self.pace_ns))


class RayTasks(Reordering, RayBackend):
    """See `enqueuer.backends.TaskBackend`."""

    def __init__(self, job: Job, loop_meter: LoopMeter) -> None:
        super().__init__(job, loop_meter)
        self._reorder_buffer = ReorderBuffer(job.max_queue_bytes is not None)
        self._unsent: deque[tuple[int, bytes]] = deque()  # numbers and tickets
        self._hands: dict[Actor, _Hand] = {}
        self._last = -1  # the number of the last ticket
        self._leaving: set[Actor] = set()  # those who were one too many, until they are gone
        self._reported: set[Actor] = set()  # dead actors whose death was reported

    def _start_one(self, index: int) -> Actor:
        while len(self._plans) <= index:
            self._plans.append(self._plans[0])  # they are all alike
        actor = super()._start_one(index)
        self._hands[actor] = _Hand()
        return actor

    def _credit(self, index: int) -> Credit:
        return Credit(_ALL, None, 0)  # tickets are the bound: one worker may do all of them

    # --- workers="auto" ---

    def resize(self, workers: int) -> None:
        with self._lock:
            staying = [actor for actor in self._actors if actor not in self._leaving]
            for actor in staying[workers:]:
                self._leaving.add(actor)
                self._take_back(actor)
                self._hang_up(actor)  # what it cannot finish, another one does
            taken = {actor.index for actor in self._actors}
            free = (index for index in itertools.count() if index not in taken)
            for _ in range(workers - len(staying)):
                self._actors.append(self._start_one(next(free)))
            self._hand_out()

    @property
    def is_resizing(self) -> bool:
        with self._lock:
            for actor in list(self._leaving):
                if actor.state in (WorkerState.ENDED, WorkerState.DEAD) and not actor.inbox:
                    self._leaving.discard(actor)
                    self._actors.remove(actor)
                    self._dismiss(actor)
            return bool(self._leaving)

    def measures(self) -> list[WorkerStats]:
        leaving = {actor.index for actor in self._leaving}
        return [worker for worker in super().measures() if worker.index not in leaving]

    # --- tickets ---

    def begin(self, epoch: Epoch) -> None:
        check_owner(self._owner)  # the tickets tell the rest

    def submit(self, ticket: Ticket) -> None:
        packed = task_queue.pack(ticket, are_forked=False)
        with self._lock:
            self._reorder_buffer.tickets[ticket.number] = ticket
            self._last = ticket.number
            self._unsent.append((ticket.number, packed))
            self._hand_out()

    def fail(self, failure: Failure) -> None:
        with self._lock:
            self._last = failure.number
            self._reorder_buffer.fail(failure.number, failure)

    def _hand_out(self) -> None:
        """Give tickets to those who should have more. Lock held."""
        given: dict[Actor, list[tuple[int, bytes]]] = {}
        hands = [(actor, self._hands[actor]) for actor in self._actors if self._can_work(actor)]
        while self._unsent and hands:
            actor, hand = min(hands, key=lambda pair: len(pair[1].numbers) - pair[1].wants)
            if len(hand.numbers) >= hand.wants:
                break
            ticket = self._unsent.popleft()
            hand.give(ticket[0])
            given.setdefault(actor, []).append(ticket)
        for actor, some in given.items():
            self._tell(actor, tickets=some)

    def _can_work(self, actor: Actor) -> bool:
        alive = actor.state in (WorkerState.STARTING, WorkerState.RUNNING)
        return alive and actor not in self._leaving

    def _take_back(self, actor: Actor) -> list[int]:
        """Let others do what an actor has not done. Lock held."""
        undone = set(self._reorder_buffer.undone())
        done = {message.number for message in actor.inbox if not isinstance(message, End)}
        lost = [n for n in self._hands[actor].numbers if n in undone and n not in done]
        self._hands[actor].numbers.clear()
        for number in reversed(lost):
            self._reorder_buffer.begin_again(number)
            packed = task_queue.pack(self._reorder_buffer.tickets[number], are_forked=False)
            self._unsent.appendleft((number, packed))
        return lost

    # --- results ---

    def _arrived(self, actor: Actor, messages: list[Message]) -> None:
        for message in messages:
            is_result = not isinstance(message, Failure) or not message.skipped
            if is_result and not isinstance(message, End):
                self._hands[actor].done(message.number)
        self._hand_out()
        super()._arrived(actor, messages)

    def _look_for(self, order: Order) -> Failure | bool:
        assert isinstance(order, TaskOrder)
        self._collect()
        found = self._reorder_buffer.look(order)
        return found if isinstance(found, Failure) else found is not Look.NOTHING

    def poll(self, order: TaskOrder) -> bool:
        with self._lock:
            self._collect()
            return self._reorder_buffer.has_next(order)

    def _collect(self) -> None:
        """Put in the reorder buffer all that has come. Lock held."""
        for actor in self._actors:
            while actor.inbox:
                message = actor.inbox[0]
                assert not isinstance(message, End)
                self._reorder_buffer.put(
                    message
                )  # again does no harm, if an exception strikes here
                if isinstance(message, Item):
                    del actor.sizes[0]
                del actor.inbox[0]

    def take(self, order: Order) -> Iterator[Item]:
        assert isinstance(order, TaskOrder)
        return self._reorder_buffer.items(order, self._bunch)

    def acknowledge(self) -> None:
        pass  # tickets are the bound

    def waiting(self) -> int:
        return super().waiting() + self._reorder_buffer.waiting

    def _ask_for(self, wanted: Actor | None) -> None:
        pass

    def _awaited(self, order: Order) -> str:
        assert isinstance(order, TaskOrder)
        return awaited_task(order, self._reorder_buffer.tickets.get(order.next))

    # --- deaths ---

    def _dead(self, wanted: Actor | None, order: Order) -> Actor | None:
        return next(
            (
                actor
                for actor in self._actors
                if actor.state is WorkerState.DEAD
                and not actor.inbox
                and actor not in self._reported
            ),
            None,
        )

    def _replace(self, dead: Actor, order: Order) -> Failure | None:
        assert isinstance(order, TaskOrder)
        with self._lock:
            if dead in self._leaving:
                self._leaving.discard(dead)
                self._actors.remove(dead)
                self._take_back(dead)
                self._hand_out()
                return None
            in_hand = next(iter(self._hands[dead].numbers), None)
            lost = self._take_back(dead)
        number = in_hand if in_hand in lost else min(lost, default=order.next)
        assert number is not None
        ticket = self._reorder_buffer.tickets.get(number)
        index = ticket.indices[0] if ticket is not None else 0
        new = self._successor(dead, (index, number), f"task {number - order.first}")
        with self._lock:
            if isinstance(new, Failure):
                self._reported.add(dead)
                self._reorder_buffer.fail(self._when_to_tell(number, lost), new)
            self._hand_out()
        return None

    def _when_to_tell(self, number: int, lost: list[int]) -> int:
        """Return the number of the task in whose place a death is told. Lock held."""
        if lost:
            self._unsent = deque(ticket for ticket in self._unsent if ticket[0] != number)
            return number
        if any(self._can_work(actor) for actor in self._actors):
            return self._last + 1
        return min(self._reorder_buffer.undone(), default=self._last + 1)
