"""The engine for tasks, which are submitted one by one, to any number of workers."""

from __future__ import annotations

import itertools

from enqueuer.backends.engine import Engine
from enqueuer.backends.job import Job
from enqueuer.backends.order import TaskOrder
from enqueuer.backends.pool import HAS_ENDED, W, WorkerPool
from enqueuer.backends.task_schedule import TaskSchedule
from enqueuer.common import interrupts
from enqueuer.errors import StartError
from enqueuer.monitoring.loop_meter import LoopMeter
from enqueuer.workers.messages import Failure, Ticket


class TaskEngine(Engine[W]):
    """An engine that takes tickets. It overrides nothing of `Engine`."""

    def __init__(
        self, job: Job, pool: WorkerPool[W], schedule: TaskSchedule[W], loop_meter: LoopMeter
    ) -> None:
        super().__init__(job, pool, schedule, loop_meter)
        self._tasks = schedule
        self._buffer = schedule.buffer
        self._size = job.workers  # how many workers there are, without those that are leaving

    @property
    def outstanding(self) -> int:
        """How many tickets there are of tasks whose results were not taken."""
        return self._buffer.outstanding

    @property
    def largest_bytes(self) -> int:
        """The size of the largest result so far, if there is a bound on bytes; else 0."""
        return self._buffer.largest_bytes

    def tickets(self) -> list[Ticket]:
        """Return the tickets of tasks whose results were not taken."""
        return list(self._buffer.tickets.values())

    def submit(self, ticket: Ticket) -> None:
        """Let whichever worker is free do a task.

        Raises:
            ItemNotPicklable: An element cannot be sent to a worker.
        """
        self._tasks.submit(ticket, self._pool.dispatch.pack(ticket))

    def fail(self, failure: Failure) -> None:
        """Let a task have failed that could not be read."""
        self._tasks.fail(failure)

    def poll(self, order: TaskOrder) -> bool:
        """Return whether something can be taken now; waits for nothing."""
        return self._tasks.poll(order)

    @property
    def is_resizing(self) -> bool:
        """Whether a worker that was asked to exit still runs."""
        running = [worker for worker in self._pool.workers if worker.state not in HAS_ENDED]
        return len(running) > self._size

    def resize(self, workers: int) -> None:
        """Add workers, or let some exit; of a job that may grow.

        Raises:
            StartError: One could not be started; there are as many as before, or a few more.
        """
        all_workers, before = self._pool.workers, self._size
        surplus = before - workers
        if surplus > 0:
            for worker in self._staying()[-surplus:]:
                worker.ask_to_exit()  # what it cannot finish, another one does
        self._size = min(before, workers)
        try:
            with interrupts.held():  # or there might be a worker that is in no list
                while self._size < workers:
                    used = {worker.index for worker in all_workers}
                    index = next(index for index in itertools.count() if index not in used)
                    all_workers.append(self._pool.start_worker(index))
                    self._size += 1
        except StartError as error:
            self.resize(before)
            raise StartError(f"another worker could not be started: {error}") from error
