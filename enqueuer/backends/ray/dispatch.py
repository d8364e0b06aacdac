"""How tickets reach actors: each is assigned a few at a time.

A ticket is assigned when a result comes back, by whichever thread receives that; so no actor is
idle while the loop is busy. An actor with fast tasks has several at a time, so that it does not
wait for the next one; a slow task is alone, so that none waits behind it while an actor is free.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Container, Sequence

from enqueuer.backends.pool import HAS_ENDED
from enqueuer.backends.ray.handle import Actor
from enqueuer.monitoring.meters import clock
from enqueuer.transport import task_queue
from enqueuer.workers.messages import Ticket

_ROUND_TRIP_NS = 5_000_000  # to an actor and back
_SLOW_NS = 100_000_000  # a task that takes longer is assigned alone
_MOST_AHEAD = 64


class Assigned:
    """The tasks that an actor has, and how fast it does them."""

    def __init__(self) -> None:
        self.numbers: dict[int, None] = {}  # in the order in which it does them
        self._pace_ns = 0.0
        self._since = 0

    def add(self, number: int) -> None:
        """Note that it has a task more."""
        if not self.numbers:
            self._since = clock()
        self.numbers[number] = None

    def done(self, number: int) -> None:
        """Note that a task is done."""
        if number in self.numbers:
            del self.numbers[number]
            now = clock()
            took, self._since = now - self._since, now
            self._pace_ns = 0.8 * self._pace_ns + 0.2 * took if self._pace_ns else took

    @property
    def lacks(self) -> int:
        """How many tasks more it should have."""
        if not self._pace_ns:
            wanted = 2
        elif self._pace_ns > _SLOW_NS:
            wanted = 1
        else:
            wanted = min(_MOST_AHEAD, 1 + math.ceil(_ROUND_TRIP_NS / self._pace_ns))
        return wanted - len(self.numbers)


class ActorDispatch:
    """See `enqueuer.backends.pool.Dispatch`. Any thread may call anything.

    Args:
        workers: The actors of the pool.
        lock: Lock of the pool.
        send: Function that sends tickets to an actor.
    """

    def __init__(
        self,
        workers: Sequence[Actor],
        lock: threading.RLock,
        send: Callable[[Actor, list[tuple[int, bytes]]], None],
    ) -> None:
        self._workers = workers
        self._lock = lock
        self._send = send
        self._waiting: deque[tuple[int, bytes]] = deque()  # numbers and tickets
        self._assigned: dict[Actor, Assigned] = {}

    def pack(self, ticket: Ticket) -> bytes:
        return task_queue.pack(ticket, are_forked=False)

    def offer(self, number: int, packed: bytes) -> bool:
        with self._lock:
            self._waiting.append((number, packed))
            self._hand_out_locked()
        return True

    def assign(self, worker: Actor, number: int, packed: bytes) -> None:
        with self._lock:
            self._assigned.setdefault(worker, Assigned()).add(number)
            self._send(worker, [(number, packed)])

    def current(self, worker: Actor) -> int:
        with self._lock:
            assigned = self._assigned.get(worker)
            return -1 if assigned is None else next(iter(assigned.numbers), -1)

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
            self._hand_out_locked()  # another one may be there in its place

    def done_locked(self, worker: Actor, numbers: Sequence[int]) -> None:
        """Note which tasks a worker has done, and assign others."""
        assigned = self._assigned.get(worker)
        if assigned is not None:
            for number in numbers:
                assigned.done(number)
        self._hand_out_locked()

    def _hand_out_locked(self) -> None:
        given: dict[Actor, list[tuple[int, bytes]]] = {}
        able = [worker for worker in list(self._workers) if _can_work(worker)]
        while self._waiting and able:
            assigned = {worker: self._assigned.setdefault(worker, Assigned()) for worker in able}
            worker = max(able, key=lambda worker: assigned[worker].lacks)
            if assigned[worker].lacks <= 0:
                break
            ticket = self._waiting.popleft()
            assigned[worker].add(ticket[0])
            given.setdefault(worker, []).append(ticket)
        for worker, tickets in given.items():
            self._send(worker, tickets)


def _can_work(worker: Actor) -> bool:
    return worker.state not in HAS_ENDED and not worker.is_leaving
