"""The pool of `workers=0`: its only worker runs in the loop's own thread, for debuggers.

    the loop --wait()--> engine --sleep()--> a turn of the worker --> its inbox --> the loop

The worker does one turn of its shards, or one task, each time the loop waits. Nothing is made
ahead, and no thread and no process is started. Another thread may stop the pool in the middle of a
turn; the thread of the turn then closes the generators.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, cast

from enqueuer.backends.job import Job
from enqueuer.backends.pool import (
    Death,
    Dispatch,
    WorkerPool,
    WorkerSnapshot,
    WorkerState,
)
from enqueuer.backends.stall import warn_of_hanging
from enqueuer.backends.thread_channel import UNBOUNDED, ThreadInbox, ThreadSender, WorkQueue
from enqueuer.common import interrupts
from enqueuer.errors import Closed, StartError
from enqueuer.monitoring.meters import WAITING, WorkerStats, clock, worker_stats
from enqueuer.monitoring.trace import TraceTarget
from enqueuer.monitoring.usage import Usage
from enqueuer.order.messages import Empty, End, Epoch, Failure, Ticket
from enqueuer.workers.event_loop import check_awaited
from enqueuer.workers.loop import turns
from enqueuer.workers.plan import Plan
from enqueuer.workers.running import WorkerRecorder
from enqueuer.workers.shards import GlobalStreams, SwappedStates, do_nothing, seed_globals
from enqueuer.workers.sources import LiveSource
from enqueuer.workers.task_loop import serve_tasks
from enqueuer.workers.tasks import TaskSource

# The code of the user sees the global random states of the loop, as in a thread.
_SHARED: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
# Number of its row in a trace: no thread of Linux has it, and that of the loop's row is the loop's.
_ROW = 1 << 22
_seed = functools.partial(seed_globals, is_alone=False)


class InlineWorker(ThreadSender):
    """See `enqueuer.backends.pool.Worker`; it is its own Channel.

    Args:
        plan: Work of the worker, which has all shards.
        tickets: Tickets of the tasks that are to be done.
        has_globals: Whether the code of the user draws from global random states of its own, as
            in another process.
        trace: File in which the worker records what it does; None: nothing is recorded.
    """

    is_leaving = False

    def __init__(
        self, plan: Plan, tickets: deque[Ticket], has_globals: bool, trace: TraceTarget | None
    ) -> None:
        inbox = ThreadInbox(UNBOUNDED)
        super().__init__(0, inbox, WorkQueue(), WorkQueue(), measured=False)
        # No item waits, so that none is used again meanwhile.
        self._digests = None
        self.shards = plan.shards
        self._plan = plan
        self._offered = tickets
        self._last_epoch = -1
        # The rest of the epoch; None between epochs.
        self._turns: Iterator[None] | None = None
        self._ticket: Ticket | None = None
        self._enter: Callable[[Any], None] = do_nothing
        self._globals = _SHARED
        if has_globals:
            self._globals = SwappedStates().swapped
            self._enter = GlobalStreams(is_alone=False).enter if plan.shards else _seed
        self._recorder: WorkerRecorder | None = None
        if trace is not None:
            self._recorder = WorkerRecorder(trace, 0, self, _ROW)
        self.meter.begin()
        self.meter.pause(WAITING)

    def begin(self, epoch: Epoch) -> None:
        # An order comes twice if an exception ends the call that gives it.
        if epoch.number > self._last_epoch:
            self._last_epoch = epoch.number
            self.orders.put(epoch)

    def ask_to_exit(self) -> None:
        raise AssertionError("there is one worker in the loop's own thread")

    def death(self) -> Death:
        return Death("was interrupted", f"{self} was interrupted.", counts=False)

    def __str__(self) -> str:
        return "worker 0 (the loop's own thread)"

    # --- the loop ---

    def step(self) -> bool:
        """Run until something was sent, or the worker cannot go on.

        Returns:
            False if there is nothing to do.

        Raises:
            KeyboardInterrupt: The user has interrupted it.
        """
        if not (self._turns or self.orders or self._offered):
            return False
        self.meter.resume()
        try:
            with self._globals():
                self._advance()
        except Closed:
            pass
        except BaseException:
            # What it was about to send is lost; a new worker makes it again.
            self.state = WorkerState.DEAD
            raise
        finally:
            self.meter.pause(WAITING)
        return True

    def _advance(self) -> None:
        channel: Any = self._recorder or self
        plan = self._plan
        if isinstance(plan.source, TaskSource):
            self._ticket = self._offered.popleft()
            serve_tasks(plan, channel, self._enter)
            return
        if self._turns is None:
            self._turns = turns(plan, channel.next_epoch(), channel, self._enter, one_by_one=True)
        if next(self._turns, self) is self:
            self._turns = None

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        check_awaited(value)
        with interrupts.held():
            super().send_item(shard, number, value, state)

    def send(self, message: End | Failure | Empty) -> None:
        if isinstance(message, Failure):
            error = message.error
            if isinstance(error, KeyboardInterrupt) or interrupts.is_of_handler(error):
                # It came from a signal to the loop, not from the generator.
                raise error
        with interrupts.held():
            super().send(message)

    def next_ticket(self) -> Ticket | None:
        # There is one each time.
        ticket, self._ticket = self._ticket, None
        return ticket

    def close(self) -> None:
        """Close the generators, so that their `finally` runs."""
        unfinished, self._turns = self._turns, None
        if unfinished is not None:
            with self._globals(), contextlib.suppress(Closed):
                cast(Any, unfinished).close()
        if self._recorder is not None:
            self._recorder.close()


class InlineDispatch(Dispatch[InlineWorker]):
    """See `enqueuer.backends.pool.Dispatch`."""

    def __init__(self) -> None:
        self.tickets: deque[Ticket] = deque()

    def offer(self, numbers: Sequence[int], packed: Sequence[Ticket]) -> None:
        self.tickets.extend(packed)

    def assign(self, worker: InlineWorker, number: int, packed: Ticket) -> None:
        self.tickets.appendleft(packed)

    def safe(self) -> Container[int]:
        return {ticket.number for ticket in self.tickets}


class InlinePool(WorkerPool[InlineWorker]):
    """See `enqueuer.backends.pool.WorkerPool`."""

    dispatch: InlineDispatch

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

    def start_worker(self, index: int) -> InlineWorker:
        job = self._job
        # It takes the place of one that has died.
        if self.workers and isinstance(job.source, LiveSource):
            raise StartError(
                "a running iterator that was interrupted cannot be read again; pass the "
                "generator function itself"
            )
        (plan,) = job.plans()
        return InlineWorker(plan, self.dispatch.tickets, job.has_globals, job.trace)

    def sleep(self, awaited: InlineWorker | None, deadline: float | None) -> None:
        if not self._take_turn():
            raise AssertionError("the loop waits, and the worker has nothing to do")

    def _take_turn(self) -> bool:
        """Let the worker run; return False if it has nothing to do."""
        with interrupts.taken(self._turn):
            # stop() has been called.
            if self._is_closed or not self.workers:
                return True
            (worker,) = self.workers
            self._runner = threading.get_ident()
            try:
                return interrupts.interruptible(worker.step)
            finally:
                self._runner = None
                if self._is_closed:
                    worker.close()

    def discard(self, worker: InlineWorker) -> None:
        worker.close()

    def measures(self, workers: Sequence[InlineWorker]) -> list[WorkerStats]:
        return [
            # The CPU time of this thread is also that of the loop.
            worker_stats(worker, worker.meter.words, worker.sent, Usage(), self._began)
            for worker in workers
        ]

    def snapshots(self, workers: Sequence[InlineWorker]) -> list[WorkerSnapshot]:
        why = "works only while the loop waits"
        return [WorkerSnapshot(str(worker), worker.shards, None, why) for worker in workers]

    def close(self) -> None:
        self._is_closed = True
        for worker in self.workers.copy():
            worker.inbox.close()

    def stop(self, timeout: float) -> None:
        self.close()
        # The code of the user stops the enqueuer: the turn closes the generators at its end.
        if self._runner == threading.get_ident():
            return
        with interrupts.taken(self._turn, timeout) as is_taken:
            if is_taken:
                for worker in self.workers.copy():
                    worker.close()
                self.workers.clear()
                return
        warn_of_hanging(
            f"the generator did not end within {timeout:g} s and cannot be ended, as it runs "
            "in the loop's own thread; it is closed after its next batch",
            self._runner,
        )
