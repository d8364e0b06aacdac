"""How tickets reach worker processes: idle workers take them from one pair of sockets.

    consumer --offer()--> packets --> a free worker takes one and claims it by its token
             --assign()-> the channel of one worker, for tasks of a dead one, or in turn

Tokens only grow, so the first ticket that still lies in the socket shows which ones were taken. A
worker that has taken one writes the token on its page. What was taken and is claimed by no
living worker was done, or was the dead one's.
"""

from __future__ import annotations

import itertools
import pickle
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from enqueuer.backends.pool import HAS_ENDED, Dispatch
from enqueuer.backends.process.handle import ProcessWorker
from enqueuer.monitoring.meters import clock
from enqueuer.transport import task_queue
from enqueuer.transport.task_queue import TaskQueue
from enqueuer.workers.messages import Ticket

# Tokens that are kept, beside as many as are needed, before some are forgotten.
_MOST_TOKENS = 1000
# Tokens of tickets for one worker; far more than it ever has.
_MOST_ASSIGNED = 100_000
# Tickets, and indices in them, that share a packet; they fit into it.
_MOST_TICKETS = 32
_MOST_INDICES = 100
# Nanoseconds that the tasks of a packet may take, as another worker cannot take some of them.
_PACKET_NS = 1_000_000


class QueueDispatch(Dispatch[ProcessWorker]):
    """See `enqueuer.backends.pool.Dispatch`.

    Args:
        workers: The workers of the pool.
        known: Definitions that the workers have got with the source; None if they are forked.
        one_each: Whether each packet has one ticket.
    """

    def __init__(
        self, workers: Sequence[ProcessWorker], known: Mapping[str, Any] | None, one_each: bool
    ) -> None:
        self._workers = workers
        self._known = known
        self._one_each = one_each
        self._is_closed = False
        # Numbers of tasks and their tickets, for which there is no room in the queue yet.
        self._unsent: deque[tuple[int, Ticket | bytes]] = deque()
        self._last_token = 0
        # Numbers of tasks by their tokens: of the queue, and of what one worker alone got.
        self._offered: dict[int, Sequence[int]] = {}
        self._sizes = PacketSizes()
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

    @property
    def least(self) -> int:
        return self._sizes.quick

    def pack(self, tickets: Sequence[Ticket]) -> Sequence[Ticket | bytes]:
        # Tickets without elements are pickled together.
        if tickets[0].elements is None:
            return tickets
        return [task_queue.pack(ticket, self._known) for ticket in tickets]

    def offer(self, numbers: Sequence[int], packed: Sequence[Ticket | bytes]) -> None:
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
            most, (_, first) = 1, unsent[0]
            if isinstance(first, Ticket) and not self._one_each:
                limit = max(1, _MOST_INDICES // len(first.indices))
                # During a change of the workers there is none for a moment.
                most = self._sizes.next(len(unsent), max(1, len(self._workers)), limit)
            token = self._last_token + 1
            numbers, chosen = zip(*itertools.islice(unsent, most), strict=True)
            try:
                if not self._queue.send(token, numbers[0], _body(chosen)):
                    return
            except OSError:
                # stop() has closed the sockets while the loop's thread read an iterable.
                if self._is_closed:
                    return
                raise
            self._last_token = token
            self._offered[token] = numbers
            if len(self._offered) > self._most_tokens:
                self._forget_done()
            for _ in chosen:
                unsent.popleft()

    def assign(self, worker: ProcessWorker, number: int, packed: Ticket | bytes) -> None:
        self._last_token += 1
        assigned = self._assigned.setdefault(worker, {})
        assigned[self._last_token] = number
        if len(assigned) > _MOST_ASSIGNED:
            # It was done long ago.
            del assigned[next(iter(assigned))]
        owed = self._owed.setdefault(worker, deque())
        owed.append((self._last_token, number, _body([packed])))
        self._send_owed(worker)

    def _send_owed(self, worker: ProcessWorker) -> None:
        """Send a worker its own tickets, as many as there is room for."""
        owed, send = self._owed[worker], worker.inbox.control.assign
        while owed and send(*owed[0]):
            owed.popleft()
        if not owed:
            del self._owed[worker]

    def current(self, worker: ProcessWorker) -> Sequence[int]:
        assigned, numbers = self._assigned.get(worker, {}), list[int]()
        for token in worker.inbox.claimed:
            numbers += [assigned[token]] if token in assigned else self._offered.get(token, ())
        return numbers

    def safe(self) -> Container[int]:
        first, safe = self._queue.first(), {number for number, _ in self._unsent}
        if first is not None:
            for token, numbers in self._offered.items():
                if token >= first:
                    safe.update(numbers)
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
            token: numbers
            for token, numbers in self._offered.items()
            if token in claimed or (first is not None and token >= first)
        }
        self._most_tokens = 2 * len(self._offered) + _MOST_TOKENS


class PacketSizes:
    """Decide how many tickets share a packet: several where the tasks are quick.

    Many tickets are offered at once where the loop takes many results at once. If that happened
    soon after the last time, twice, the tasks in between were quick.

    Example:
        >>> ms = 1_000_000
        >>> sizes = PacketSizes(clock=iter([0, 100 * ms, 101 * ms, 102 * ms, 200 * ms]).__next__)
        >>> sizes.next(16, workers=2), sizes.next(15, workers=2)
        (1, 1)
        >>> sizes.next(16, workers=2), sizes.next(16, workers=2), sizes.quick
        (1, 8, 16)
        >>> sizes.next(16, workers=2), sizes.quick
        (1, 1)

    Attributes:
        quick: Number of tasks that all workers do in the time of a packet, or 1.
    """

    def __init__(self, clock: Callable[[], int] = clock) -> None:
        self._clock = clock
        self._began = clock()
        # Tickets that were offered at once last, and those of them that are still to be sent.
        self._count = self._left = 0
        self._size = self.quick = 1
        # Time of a task, in nanoseconds.
        self._each = _PACKET_NS

    def next(self, count: int, workers: int, most: int = _MOST_TICKETS) -> int:
        """Return the number of tickets in the next packet.

        Args:
            count: Number of tickets that are offered and were not sent.
            workers: Number of workers, at least 1.
            most: Largest number of tickets in a packet.
        """
        if count > self._left:
            now = self._clock()
            each = workers * (now - self._began) // self._count if self._count else _PACKET_NS
            quick = _PACKET_NS // max(each, self._each, 1)
            self._size = max(1, min(count // workers, quick, _MOST_TICKETS))
            self.quick = max(1, workers * quick)
            self._began, self._count, self._each = now, count, each
        size = min(self._size, most, count)
        self._left = count - size
        return size


def _body(tickets: Sequence[Ticket | bytes]) -> bytes:
    """Return the body of a packet."""
    if isinstance(tickets[0], bytes):
        return tickets[0]
    # As plain tuples, of which pickle writes no class.
    return pickle.dumps(list(map(tuple, tickets)), protocol=5)
