"""How tickets reach worker processes: idle workers take them from one pair of sockets.

    consumer --offer()--> tickets --> whichever worker is free takes one and claims it by its token
             --assign()-> the channel of one worker, for tasks of a dead one

Tokens only grow, so the first ticket that still lies in the socket tells which ones were taken. A
worker that has taken one writes the token into its ring. What was taken and is claimed by no
living worker was done, or was the dead one's.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from enqueuer.backends.pool import HAS_ENDED
from enqueuer.backends.process.handle import ProcessWorker
from enqueuer.transport import task_queue
from enqueuer.transport.task_queue import TaskQueue
from enqueuer.workers.messages import Ticket

_MOST_TOKENS = 1000  # that are kept, beside as many as are needed, before some are forgotten


class QueueDispatch:
    """See `enqueuer.backends.pool.Dispatch`.

    Args:
        workers: The workers of the pool.
        are_forked: Whether the workers have the classes of `__main__`.
    """

    def __init__(self, workers: Sequence[ProcessWorker], are_forked: bool) -> None:
        self._workers = workers
        self._are_forked = are_forked
        self._queue: TaskQueue | None = None
        self._is_closed = False
        self._last_token = 0
        # Numbers of tasks by their tokens: of the queue, and of what one worker alone got.
        self._offered: dict[int, int] = {}
        self._assigned: dict[ProcessWorker, dict[int, int]] = {}
        self._most_tokens = _MOST_TOKENS

    def open(self) -> TaskQueue:
        """Make the queue."""
        self._queue = TaskQueue()
        return self._queue

    def close(self) -> None:
        """Close this process's ends of the queue."""
        self._is_closed = True
        if self._queue is not None:
            self._queue.close()

    def pack(self, ticket: Ticket) -> bytes:
        return task_queue.pack(ticket, self._are_forked)

    def offer(self, number: int, packed: bytes) -> bool:
        assert self._queue is not None
        token = self._last_token + 1
        try:
            if not self._queue.send(token, number, packed):
                return False
        except OSError:
            # stop() has closed the sockets while the loop's thread read an iterable.
            if self._is_closed:
                return False
            raise
        self._last_token = token
        self._offered[token] = number
        if len(self._offered) > self._most_tokens:
            self._forget_done()
        return True

    def assign(self, worker: ProcessWorker, number: int, packed: bytes) -> None:
        self._last_token += 1
        self._assigned.setdefault(worker, {})[self._last_token] = number
        worker.channel.assign(self._last_token, number, packed)

    def current(self, worker: ProcessWorker) -> int:
        token = worker.channel.claimed
        return self._assigned.get(worker, {}).get(token, self._offered.get(token, -1))

    def safe(self) -> Container[int]:
        assert self._queue is not None
        first, safe = self._queue.first(), set[int]()
        if first is not None:
            safe.update(number for token, number in self._offered.items() if token >= first)
        for worker in self._workers:
            if worker.state not in HAS_ENDED:
                safe.add(self.current(worker))
                safe.update(self._assigned.get(worker, {}).values())
        return safe

    def forget(self, worker: ProcessWorker) -> None:
        self._assigned.pop(worker, None)

    def _forget_done(self) -> None:
        """Forget the tokens that were taken and that no worker claims."""
        assert self._queue is not None
        first = self._queue.first()
        claimed = {worker.channel.claimed for worker in self._workers}
        self._offered = {
            token: number
            for token, number in self._offered.items()
            if token in claimed or (first is not None and token >= first)
        }
        self._most_tokens = 2 * len(self._offered) + _MOST_TOKENS
