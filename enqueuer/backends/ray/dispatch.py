"""Assigning tickets to actors: a few at a time to each.

The thread that receives a result assigns the next ticket, so no actor is idle while the loop is
busy. An actor with fast tasks has several at a time, so that it does not wait for the next one. A
slow task is assigned alone, so that no other task waits behind it while an actor is free.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Container, Iterable, Sequence

from enqueuer.backends.pool import HAS_ENDED, Dispatch
from enqueuer.backends.ray.handle import Actor
from enqueuer.transport import task_queue
from enqueuer.workers.messages import Ticket


class ActorDispatch(Dispatch[Actor]):
    """See `enqueuer.backends.pool.Dispatch`. Any thread may call anything.

    Args:
        workers: The actors of the pool.
        lock: Lock of the pool.
        at_once: Number of tasks that each actor runs at once.
    """

    def __init__(self, workers: Sequence[Actor], lock: threading.RLock, at_once: int) -> None:
        self._workers = workers
        self._lock = lock
        self._at_once = at_once
        # Numbers and tickets of the tasks that no actor has.
        self._waiting: deque[tuple[int, bytes]] = deque()

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
            worker.tasks.add(number)
            worker.order(worker, "assign", [], [(number, packed)])

    def current(self, worker: Actor) -> Sequence[int]:
        with self._lock:
            return list(worker.tasks.numbers)

    def safe(self) -> Container[int]:
        with self._lock:
            safe = {number for number, _ in self._waiting}
            for worker in self._workers:
                if worker.state not in HAS_ENDED:
                    safe.update(worker.tasks.numbers)
            return safe

    def forget(self, worker: Actor) -> None:
        with self._lock:
            worker.tasks.numbers.clear()
            # Its replacement may be there already.
            self._assign_waiting_locked()

    def done_locked(self, worker: Actor, numbers: Sequence[int]) -> None:
        """Remove the tasks that a worker has done, and assign others."""
        for number in numbers:
            worker.tasks.done(number)
        self._assign_waiting_locked()

    def _assign_waiting_locked(self) -> None:
        given: dict[Actor, list[tuple[int, bytes]]] = {}
        able = [worker for worker in list(self._workers) if _can_work(worker)]
        while self._waiting and able:
            worker = max(able, key=lambda worker: worker.tasks.lacks(self._at_once))
            if worker.tasks.lacks(self._at_once) <= 0:
                break
            ticket = self._waiting.popleft()
            worker.tasks.add(ticket[0])
            given.setdefault(worker, []).append(ticket)
        for worker, tickets in given.items():
            worker.order(worker, "assign", [], tickets)


def _can_work(worker: Actor) -> bool:
    return worker.state not in HAS_ENDED and not worker.is_leaving
