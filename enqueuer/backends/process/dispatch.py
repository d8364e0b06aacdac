"""How tickets reach worker processes: idle workers take them from one pair of sockets.

    consumer --offer()--> packets --> a free worker takes one and claims it by its token
             --assign()-> the channel of one worker, for tasks of a dead one, or in turn

Tokens only grow, so the first ticket that still lies in the socket shows which ones were taken. A
worker that has taken one writes the token on its page. What was taken and is claimed by no
living worker was done, or was the dead one's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence
from typing import Any

from enqueuer.backends.pool import HAS_ENDED, Dispatch
from enqueuer.backends.process.handle import ProcessWorker
from enqueuer.order.messages import Ticket
from enqueuer.transport.channel import TaskQueue, pack_ticket

# Tokens that are kept, beside as many as are needed, before some are forgotten.
_MOST_TOKENS = 1000
# Tokens of tickets for one worker; far more than it ever has.
_MOST_ASSIGNED = 100_000


class QueueDispatch(Dispatch[ProcessWorker]):
    """See `enqueuer.backends.pool.Dispatch`.

    Args:
        workers: The workers of the pool.
        known: Definitions that the workers have got with the source; None if they are forked.
    """

    def __init__(self, workers: Sequence[ProcessWorker], known: Mapping[str, Any] | None) -> None:
        self._workers = workers
        self._known = known
        self._is_closed = False
        # Numbers of tasks and their tickets, for which there is no room in the queue yet.
        self._unsent: deque[tuple[int, bytes]] = deque()
        self._last_token = 0
        # Numbers of tasks by their tokens: of the queue, and of what one worker alone got.
        self._offered: dict[int, int] = {}
        self._assigned: dict[ProcessWorker, dict[int, int]] = {}
        # Tokens, numbers and tickets for which there was no room in the channel of one worker.
        self._owed: dict[ProcessWorker, deque[tuple[int, int, bytes]]] = {}
        self._most_tokens = _MOST_TOKENS

    def open(self) -> TaskQueue:
        """Make the queue."""
        self._queue = TaskQueue()
        return self._queue

    def close(self) -> None:
        """Close this process's ends of the queue."""
        self._is_closed = True
        self._queue.close()

    def pack(self, tickets: Sequence[Ticket]) -> Sequence[bytes]:
        return [pack_ticket(ticket, self._known) for ticket in tickets]

    def offer(self, numbers: Sequence[int], packed: Sequence[bytes]) -> None:
        self._unsent.extend(zip(numbers, packed, strict=True))
        self.feed()

    @property
    def full_queue(self) -> int | None:
        """Descriptor of the queue, if tickets wait for room that a poll shows; else None."""
        waits = self._unsent and self._queue.shows_room and not self._is_closed
        return self._queue.fileno() if waits else None

    def owes(self, worker: ProcessWorker) -> bool:
        """Return whether tickets of one worker alone wait for room in its channel."""
        return worker in self._owed

    def feed(self) -> None:
        for worker in list(self._owed):
            self._send_owed(worker)
        unsent = self._unsent
        while unsent:
            token, (number, packed) = self._last_token + 1, unsent[0]
            try:
                if not self._queue.send(token, number, packed):
                    return
            except OSError:
                # stop() has closed the sockets while the loop's thread read an iterable.
                if self._is_closed:
                    return
                raise
            self._last_token = token
            self._offered[token] = number
            if len(self._offered) > self._most_tokens:
                self._forget_done()
            unsent.popleft()

    def assign(self, worker: ProcessWorker, number: int, packed: bytes) -> None:
        self._last_token += 1
        assigned = self._assigned.setdefault(worker, {})
        assigned[self._last_token] = number
        if len(assigned) > _MOST_ASSIGNED:
            # It was done long ago.
            del assigned[next(iter(assigned))]
        owed = self._owed.setdefault(worker, deque())
        owed.append((self._last_token, number, packed))
        self._send_owed(worker)

    def _send_owed(self, worker: ProcessWorker) -> None:
        """Send a worker its own tickets, as many as there is room for."""
        owed, send = self._owed[worker], worker.inbox.control.assign
        while owed and send(*owed[0]):
            owed.popleft()
        if not owed:
            del self._owed[worker]

    def current(self, worker: ProcessWorker) -> Sequence[int]:
        numbers = self._offered | self._assigned.get(worker, {})
        return [numbers[token] for token in worker.inbox.claimed if token in numbers]

    def safe(self) -> Container[int]:
        first, safe = self._queue.first(), {number for number, _ in self._unsent}
        if first is not None:
            safe.update(number for token, number in self._offered.items() if token >= first)
        for worker in self._workers:
            if worker.state not in HAS_ENDED:
                safe.update(self.current(worker))
                safe.update(self._assigned.get(worker, {}).values())
        return safe

    def forget(self, worker: ProcessWorker) -> None:
        self._assigned.pop(worker, None)
        self._owed.pop(worker, None)

    def _forget_done(self) -> None:
        """Forget the tokens that were taken and that no worker claims."""
        first = self._queue.first()
        claimed = {token for worker in self._workers for token in worker.inbox.claimed}
        self._offered = {
            token: number
            for token, number in self._offered.items()
            if token in claimed or (first is not None and token >= first)
        }
        self._most_tokens = 2 * len(self._offered) + _MOST_TOKENS
