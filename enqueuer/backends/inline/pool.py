"""The pool of `workers=0`: its only worker runs in the loop's own thread, for debuggers.

    the loop --wait()--> engine --sleep()--> a turn of the worker --> its inbox --> the loop

Nothing is made ahead, and no thread and no process is started. Another thread may stop the pool
in the middle of a turn; the thread of the turn then closes the generators.
"""

from __future__ import annotations

import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, ClassVar

from enqueuer.backends.inline.worker import InlineWorker
from enqueuer.backends.job import Job
from enqueuer.backends.pool import WorkerPool
from enqueuer.backends.stall import WorkerSnapshot, level_of_user, stacks_of_threads
from enqueuer.common import interrupts
from enqueuer.errors import StartError, StopWarning
from enqueuer.monitoring import usage
from enqueuer.monitoring.meters import BYTES, clock
from enqueuer.monitoring.usage import Usage
from enqueuer.monitoring.worker_stats import WorkerStats, worker_stats
from enqueuer.workers.messages import Ticket
from enqueuer.workers.sources import LiveSource


class InlineDispatch:
    """See `enqueuer.backends.pool.Dispatch`."""

    least = 1
    awaited: int | None = None

    def __init__(self) -> None:
        self.tickets: deque[Ticket] = deque()

    def pack(self, ticket: Ticket) -> Ticket:
        return ticket

    def pack_all(self, tickets: Sequence[Ticket]) -> Sequence[Ticket]:
        return tickets

    def offer(self, tickets: Sequence[tuple[int, Ticket]]) -> int:
        self.tickets.extend(ticket for _, ticket in tickets)
        return len(tickets)

    def assign(self, worker: InlineWorker, number: int, packed: Ticket) -> None:
        self.tickets.appendleft(packed)

    def current(self, worker: InlineWorker) -> Sequence[int]:
        return ()

    def safe(self) -> Container[int]:
        return {ticket.number for ticket in self.tickets}

    def forget(self, worker: InlineWorker) -> None:
        pass


class InlinePool:
    """See `enqueuer.backends.pool.WorkerPool`."""

    are_processes: ClassVar[bool] = False
    shares_gil: ClassVar[bool] = False

    def __init__(self, job: Job) -> None:
        self.workers: list[InlineWorker] = []
        self.dispatch = InlineDispatch()
        self._job = job
        self._began = clock()
        self._is_closed = False
        # Held during a turn, so that no other thread closes a generator that runs.
        self._turn = threading.RLock()
        # The identifier of the thread of the turn; None between turns. It is not the thread itself:
        # TensorFlow's threads are unknown to Python, and asking for one leaves a dummy behind.
        self._runner: int | None = None
        self._has_started = False

    def open(self) -> None:
        pass

    def start_worker(self, index: int) -> InlineWorker:
        job = self._job
        if self._has_started and isinstance(job.source, LiveSource):
            raise StartError(
                "a running iterator that was interrupted cannot be read again; pass the "
                "generator function itself"
            )
        self._has_started = True
        (plan,) = job.plans()
        return InlineWorker(plan, self.dispatch.tickets, job.has_globals, job.trace)

    def sleep(self, awaited: InlineWorker | None, deadline: float | None) -> None:
        if not self._take_turn():
            raise AssertionError("the loop waits, and the worker has nothing to do")

    def poll(self) -> None:
        if not any(worker.inbox.messages for worker in self.workers):
            self._take_turn()

    def _take_turn(self) -> bool:
        """Let the worker run; return False if it has nothing to do."""
        with self._turn:
            # stop() has been called.
            if self._is_closed or not self.workers:
                return True
            (worker,) = self.workers
            if not worker.has_work:
                return False
            self._runner = threading.get_ident()
            try:
                worker.step()
            finally:
                self._runner = None
                if self._is_closed:
                    worker.close()
            return True

    def discard(self, worker: InlineWorker) -> None:
        worker.close()

    def measures(self, workers: Sequence[InlineWorker]) -> list[WorkerStats]:
        return [
            worker_stats(
                worker.index,
                str(worker),
                worker.shards,
                worker.sender.meter.words,
                (worker.sender.items, worker.sender.meter.words[BYTES]),
                # The CPU time of this thread is also that of the loop.
                Usage(),
                self._began,
            )
            for worker in workers
        ]

    def snapshots(self, workers: Sequence[InlineWorker]) -> list[WorkerSnapshot]:
        why = "works only while the loop waits"
        return [WorkerSnapshot(str(worker), worker.shards, None, why) for worker in workers]

    def cpus(self) -> float:
        return usage.cpus()

    def worker_bytes(self) -> int | None:
        # The memory is that of the process.
        return None

    def wake(self) -> None:
        pass

    def close(self) -> None:
        self._is_closed = True
        for worker in self.workers.copy():
            worker.sender.is_closed = True

    def stop(self, timeout: float) -> None:
        self.close()
        # The code of the user stops the enqueuer: the turn closes the generators at its end.
        if self._runner == threading.get_ident():
            return
        if not interrupts.interruptible(self._turn.acquire, True, timeout):
            _warn_of(self._runner, timeout)
            return
        try:
            for worker in self.workers.copy():
                worker.close()
            self.workers.clear()
        finally:
            self._turn.release()


if TYPE_CHECKING:
    # Pools are loaded by name, so that mypy compares this one with its protocol only here.
    _implements: Callable[[Job], WorkerPool[InlineWorker]] = InlinePool


def _warn_of(runner: int | None, timeout: float) -> None:
    (stack,) = stacks_of_threads([runner])
    where = "".join(traceback.format_list(stack)) if stack else "  (unknown)\n"
    warnings.warn(
        f"the generator did not end within {timeout:g} s and cannot be ended, as it runs in the "
        f"loop's own thread; it is closed after its next batch. It is here:\n{where}",
        StopWarning,
        stacklevel=level_of_user(),
    )
