"""Assigning tickets to actors: a few at a time to each.

The thread that receives a result assigns the next ticket, so no actor is idle while the loop is
busy. An actor with fast tasks has several at a time, so that it does not wait for the next one. A
slow task is assigned alone, so that no other task waits behind it while an actor is free.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence

from enqueuer.backends.pool import HAS_ENDED, Dispatch
from enqueuer.backends.ray.handle import Actor
from enqueuer.monitoring.meters import clock
from enqueuer.transport import task_queue
from enqueuer.workers.messages import Epoch, Ticket

# Nanoseconds of a call to an actor and back.
_ROUND_TRIP_NS = 5_000_000
# Nanoseconds; a task that takes longer is assigned alone.
_SLOW_NS = 100_000_000
_MOST_AHEAD = 64


class Assigned:
    """The tasks of an actor, and the pace at which it does them.

    Args:
        at_once: Number of tasks that the actor runs at once.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        # Numbers of its tasks, in the order in which it does them.
        self.numbers: dict[int, None] = {}
        self._pace_ns = 0.0
        self._since = 0

    def add(self, number: int) -> None:
        """Add a task."""
        if not self.numbers:
            self._since = clock()
        self.numbers[number] = None

    def done(self, number: int) -> None:
        """Remove a task that is done, and measure the time that it took."""
        if number in self.numbers:
            del self.numbers[number]
            now = clock()
            took, self._since = now - self._since, now
            self._pace_ns = 0.8 * self._pace_ns + 0.2 * took if self._pace_ns else took

    @property
    def lacks(self) -> int:
        """Number of further tasks that the actor should have."""
        if not self._pace_ns:
            wanted = 2
        elif self._pace_ns > _SLOW_NS:
            wanted = 1
        else:
            wanted = min(_MOST_AHEAD, 1 + math.ceil(_ROUND_TRIP_NS / self._pace_ns))
        return self._at_once - 1 + wanted - len(self.numbers)


class ActorDispatch(Dispatch[Actor]):
    """See `enqueuer.backends.pool.Dispatch`. Any thread may call anything.

    Args:
        workers: The actors of the pool.
        lock: Lock of the pool.
        send: Function that sends tickets to an actor.
        at_once: Number of tasks that each actor runs at once.
    """

    def __init__(
        self,
        workers: Sequence[Actor],
        lock: threading.RLock,
        send: Callable[[Actor, list[Epoch], list[tuple[int, bytes]]], None],
        at_once: int,
    ) -> None:
        self._workers = workers
        self._lock = lock
        self._send = send
        self._at_once = at_once
        # Numbers and tickets of the tasks that no actor has.
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._assigned: dict[Actor, Assigned] = {}

    def pack(self, ticket: Ticket) -> bytes:
        return task_queue.pack(ticket, are_forked=False)

    def pack_all(self, tickets: Sequence[Ticket]) -> Iterable[bytes]:
        return map(self.pack, tickets)

    def offer(self, tickets: Sequence[tuple[int, bytes]]) -> int:
        with self._lock:
            self._waiting.extend(tickets)
            self._assign_waiting_locked()
        return len(tickets)

    def assign(self, worker: Actor, number: int, packed: bytes) -> None:
        with self._lock:
            self._assigned_to(worker).add(number)
            self._send(worker, [], [(number, packed)])

    def _assigned_to(self, worker: Actor) -> Assigned:
        return self._assigned.setdefault(worker, Assigned(self._at_once))

    def current(self, worker: Actor) -> Sequence[int]:
        with self._lock:
            assigned = self._assigned.get(worker)
            return () if assigned is None else list(assigned.numbers)

    def safe(self) -> Container[int]:
        with self._lock:
            safe = {number for number, _ in self._waiting}
            for worker, assigned in self._assigned.items():
                if worker.state not in HAS_ENDED:
                    safe.update(assigned.numbers)
            return safe

    def forget(self, worker: Actor) -> None:
        with self._lock:
            self._assigned.pop(worker, None)
            # Its replacement may be there already.
            self._assign_waiting_locked()

    def done_locked(self, worker: Actor, numbers: Sequence[int]) -> None:
        """Remove the tasks that a worker has done, and assign others."""
        assigned = self._assigned.get(worker)
        if assigned is not None:
            for number in numbers:
                assigned.done(number)
        self._assign_waiting_locked()

    def _assign_waiting_locked(self) -> None:
        given: dict[Actor, list[tuple[int, bytes]]] = {}
        able = [worker for worker in list(self._workers) if _can_work(worker)]
        while self._waiting and able:
            assigned = {worker: self._assigned_to(worker) for worker in able}
            worker = max(able, key=lambda worker: assigned[worker].lacks)
            if assigned[worker].lacks <= 0:
                break
            ticket = self._waiting.popleft()
            assigned[worker].add(ticket[0])
            given.setdefault(worker, []).append(ticket)
        for worker, tickets in given.items():
            self._send(worker, [], tickets)


def _can_work(worker: Actor) -> bool:
    return worker.state not in HAS_ENDED and not worker.is_leaving
