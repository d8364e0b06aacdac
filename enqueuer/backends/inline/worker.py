"""The worker of `workers=0`: one turn of its shards, or one task, each time the loop waits."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

from enqueuer.backends.inline.sender import InlineInbox, InlineSender
from enqueuer.backends.pool import Death, WorkerState
from enqueuer.errors import Closed
from enqueuer.monitoring.meters import WAITING
from enqueuer.monitoring.trace_file import TraceTarget
from enqueuer.workers.loop import turns
from enqueuer.workers.messages import Epoch, Sender, Ticket
from enqueuer.workers.plan import Plan
from enqueuer.workers.seeding import GlobalStreams, SwappedStates, seed_globals
from enqueuer.workers.shards import do_nothing
from enqueuer.workers.task_loop import serve_tasks
from enqueuer.workers.tasks import TaskSource
from enqueuer.workers.worker_trace import WorkerRecorder, recorder_in_loop

# The code of the user sees the global random states of the loop, as in a thread.
_SHARED: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
_seed = functools.partial(seed_globals, is_alone=False)


class InlineWorker:
    """See `enqueuer.backends.pool.Worker`.

    Args:
        plan: Work of the worker, which has all shards.
        tickets: Tickets of the tasks that are to be done.
        has_globals: Whether the code of the user draws from global random states of its own, as
            in another process.
        trace: File in which the worker records what it does; None: nothing is recorded.
    """

    def __init__(
        self, plan: Plan, tickets: deque[Ticket], has_globals: bool, trace: TraceTarget | None
    ) -> None:
        self.index = 0
        self.shards = plan.shards
        self.inbox = InlineInbox()
        self.sender = InlineSender(str(self), self.inbox)
        self.state = WorkerState.RUNNING
        self._plan = plan
        self._tickets = tickets
        self._orders: deque[Epoch] = deque()
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
            self._recorder = recorder_in_loop(trace, self.index, self, self.sender)
        self.sender.meter.begin()
        self.sender.meter.pause(WAITING)

    @property
    def is_leaving(self) -> bool:
        return False

    def begin(self, epoch: Epoch) -> None:
        # An order comes twice if an exception interrupts the consumer while it gives it.
        if epoch.number > self._last_epoch:
            self._last_epoch = epoch.number
            self._orders.append(epoch)

    def ask_to_exit(self) -> None:
        raise AssertionError("there is one worker in the loop's own thread")

    def death(self) -> Death:
        return Death("was interrupted", f"{self} was interrupted.", counts=False)

    def __str__(self) -> str:
        return "worker 0 (the loop's own thread)"

    # --- the loop ---

    @property
    def has_work(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._turns or self._orders or self._tickets)

    def step(self) -> None:
        """Run until something was sent, or the worker cannot go on.

        Raises:
            KeyboardInterrupt: The user has interrupted it.
        """
        meter = self.sender.meter
        meter.resume()
        try:
            with self._globals():
                self._step()
        except Closed:
            pass
        except BaseException:
            # What it was about to send is lost; a new worker makes it again.
            self.state = WorkerState.DEAD
            raise
        finally:
            meter.pause(WAITING)

    def _step(self) -> None:
        orders: Any = self._recorder or self
        sender = cast(Sender, self._recorder or self.sender)
        plan = self._plan
        if isinstance(plan.source, TaskSource):
            self._ticket = self._tickets.popleft()
            serve_tasks(plan, orders, sender, self._enter)
            return
        if self._turns is None:
            starts = plan.of(orders.next_epoch())
            self._turns = turns(plan.source, starts, sender, self._enter, plan.on_error, True)
        if next(self._turns, self) is self:
            self._turns = None

    def next_epoch(self) -> Epoch | None:
        """See `Orders`."""
        return self._orders.popleft()

    def next_ticket(self) -> Ticket | None:
        """See `Tickets`; there is one ticket each time."""
        ticket, self._ticket = self._ticket, None
        return ticket

    def close(self) -> None:
        """Close the generators, so that their `finally` runs."""
        rest, self._turns = self._turns, None
        self._orders.clear()
        if rest is not None:
            with self._globals(), contextlib.suppress(Closed):
                cast(Any, rest).close()
        if self._recorder is not None:
            self._recorder.close()
