"""Workers as threads: start, watch and end them; the messages of each come over its inbox.

    ordered:     one inbox a worker, read in turn      worker 0 -> [..] \\
                                                       worker 1 -> [..] -> the consumer
    as they come: one inbox for all                    workers  -> [......] -> the consumer
    tasks:       one buffer of tickets                 [......] -> workers -> [......] -> ...

A thread cannot be killed, but an exception outside the user's code may end its loop, such as
MemoryError. One that hangs in the generator is left behind, daemonic, with a warning that shows
where it hangs. No thread holds a reference to the enqueuer, or it could never be garbage-collected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Sequence

from enqueuer.backends.job import Job, split_bound
from enqueuer.backends.pool import (
    Death,
    Dispatch,
    NoRoom,
    WorkerPool,
    WorkerSnapshot,
    WorkerState,
)
from enqueuer.backends.stall import stacks_of_threads, warn_of_hanging
from enqueuer.backends.thread_channel import (
    EXIT,
    UNBOUNDED,
    ThreadInbox,
    ThreadSender,
    WorkQueue,
    wait_for_any,
)
from enqueuer.common import interrupts
from enqueuer.common.interrupts import WorkerThread
from enqueuer.monitoring import usage
from enqueuer.monitoring.meters import WorkerStats, clock, worker_stats
from enqueuer.monitoring.trace import TraceTarget
from enqueuer.order.messages import Ticket
from enqueuer.workers.event_loop import loop_of
from enqueuer.workers.plan import Plan
from enqueuer.workers.running import run_worker
from enqueuer.workers.sources import LiveSource
from enqueuer.workers.tasks import TaskSource
from enqueuer.workers.threads import ThreadSnapshot, snapshots_of


class ThreadWorker(ThreadSender):
    """See `enqueuer.backends.pool.Worker`; it is its own Channel.

    Args:
        index: Index of the worker.
        shards: Indices of its shards.
        inbox: Inbox to which it sends its messages.
        tickets: Queue from which it takes tickets, if it does tasks.
        measured: Whether items count by their bytes.
    """

    def __init__(
        self,
        index: int,
        shards: tuple[int, ...],
        inbox: ThreadInbox,
        tickets: WorkQueue[Ticket],
        measured: bool,
    ) -> None:
        super().__init__(index, inbox, WorkQueue(), tickets, measured)
        self.shards = shards
        self.begin = self.orders.put
        self.thread: threading.Thread | None = None

    @property
    def is_leaving(self) -> bool:
        return self.state is WorkerState.ENDED

    @property
    def threads(self) -> list[threading.Thread]:
        """The threads of the worker: those that run elements, that of coroutines, then its own."""
        elements = self.elements
        loop = loop_of(self._ident) if elements is None else elements.loop
        threads = [None if loop is None else loop.thread, self.thread]
        if elements is not None:
            threads[:0] = elements.threads
        return [thread for thread in threads if thread is not None]

    def snapshots(self) -> list[ThreadSnapshot]:
        """Return where the threads that run elements are, or shards that run on an event loop."""
        return snapshots_of(self._ident)

    @property
    def _ident(self) -> int | None:
        return None if self.thread is None else self.thread.ident

    def measure(self, began: int) -> WorkerStats:
        """Return what it has done since a time."""
        used = usage.of_threads(self.threads)
        return worker_stats(self, self.meter.words, self.sent, used, began)

    def ask_to_exit(self) -> None:
        # This worker or another one takes it.
        self._tickets.put_all((EXIT,))

    def death(self) -> Death:
        error = self.error
        assert error is not None
        how = f"ended by {type(error).__name__} outside the generator"
        message = f"{self} {how}; what it had sent was delivered. The cause has the traceback."
        return Death(how, message, error=error)


class ThreadDispatch(Dispatch[ThreadWorker]):
    """See `enqueuer.backends.pool.Dispatch`: one buffer, from which free threads take tickets."""

    def __init__(self, tickets: WorkQueue[Ticket], workers: Sequence[ThreadWorker]) -> None:
        self._tickets = tickets
        self._workers = workers

    def offer(self, numbers: Sequence[int], packed: Sequence[Ticket]) -> None:
        self._tickets.put_all(packed)

    def assign(self, worker: ThreadWorker, number: int, packed: Ticket) -> None:
        raise AssertionError("no thread takes the place of another one")

    def safe(self) -> Container[int]:
        # Nothing says which tasks a worker had whose loop has failed.
        if any(worker.state is WorkerState.DEAD for worker in self._workers):
            return ()
        # A thread that leaves has done all that it took.
        return range(UNBOUNDED)


class ThreadPool(WorkerPool[ThreadWorker]):
    """See `enqueuer.backends.pool.WorkerPool`."""

    dispatch: ThreadDispatch

    def __init__(self, job: Job) -> None:
        if isinstance(job.source, LiveSource) and job.shards > 1:
            raise AssertionError("a running iterator is one shard: threads cannot share it")
        self.workers: list[ThreadWorker] = []
        self._plans = job.plans()
        self._began = clock()
        self._does_tasks = isinstance(job.source, TaskSource)
        self._measured = job.max_queue_bytes is not None and not self._does_tasks
        self._trace = job.trace
        self._inboxes = _inboxes(job, len(self._plans))
        # The enqueuer keeps the bound: it submits no more tickets than that.
        self._tickets: WorkQueue[Ticket] = WorkQueue()
        self.dispatch = ThreadDispatch(self._tickets, self.workers)

    def start_worker(self, index: int) -> ThreadWorker:
        # The plans of tasks are all alike.
        plan = self._plans[index % len(self._plans)]
        inbox = self._inboxes[index % len(self._inboxes)]
        worker = ThreadWorker(index, plan.shards, inbox, self._tickets, self._measured)
        worker.thread = WorkerThread(
            target=_run,
            args=(plan, worker, self._trace),
            name=f"enqueuer-worker-{index}",
            daemon=True,
        )
        try:
            worker.thread.start()
        except RuntimeError as error:
            raise NoRoom(f"{error}; try fewer workers") from error
        return worker

    def sleep(self, awaited: ThreadWorker | None, deadline: float | None) -> None:
        inboxes = self._inboxes if awaited is None else (awaited.inbox,)
        wait_for_any(inboxes, deadline, self.dispatch.awaited)

    def discard(self, worker: ThreadWorker) -> None:
        worker.orders.close()
        if worker.thread is not None:
            # The thread only has to return.
            worker.thread.join()

    def measures(self, workers: Sequence[ThreadWorker]) -> list[WorkerStats]:
        return [worker.measure(self._began) for worker in workers if worker.thread is not None]

    def snapshots(self, workers: Sequence[ThreadWorker]) -> list[WorkerSnapshot]:
        stacks = stacks_of_threads([w.thread.ident for w in workers if w.thread is not None])
        return [
            WorkerSnapshot(str(worker), worker.shards, stack, "has ended", worker.snapshots())
            for worker, stack in zip(workers, stacks, strict=True)
        ]

    def wake(self) -> None:
        for inbox in self._inboxes:
            inbox.wake()

    def close(self) -> None:
        # First, so that a worker which gets no more tickets knows that the loop has left.
        for inbox in self._inboxes:
            inbox.close()
            inbox.clear()
        self._tickets.close()
        for worker in list(self.workers):
            worker.orders.close()

    def stop(self, timeout: float) -> None:
        self.close()
        deadline = time.monotonic() + timeout
        threads = [thread for worker in self.workers for thread in worker.threads]
        others = [thread for thread in threads if thread.ident != threading.get_ident()]
        # Not this thread: the generator itself may call stop().
        for thread in others:
            interrupts.interruptible(thread.join, max(0.0, deadline - time.monotonic()))
        alive = [[t for t in worker.threads if t.is_alive()] for worker in self.workers]
        self.workers.clear()
        for hanging in alive:
            # The worker's own thread is the last, and waits for the others.
            for thread in hanging[:-1] or hanging:
                if thread in others:
                    warn_of_hanging(
                        f"{thread.name} did not end within {timeout:g} s and cannot be killed, as "
                        "a thread; it exits after its next batch",
                        thread.ident,
                    )


def _run(plan: Plan, worker: ThreadWorker, trace: TraceTarget | None) -> None:
    """Run the loop of a worker; the training loop would wait forever for one that failed."""
    try:
        run_worker(plan, worker, worker.index, trace)
    except BaseException as error:
        worker.fail(error)


def _inboxes(job: Job, workers: int) -> list[ThreadInbox]:
    """Return the inboxes of so many workers."""
    if isinstance(job.source, TaskSource):
        return [ThreadInbox(UNBOUNDED)]
    if not job.ordered:
        return [ThreadInbox(job.max_queue_size, job.max_queue_bytes)]
    sizes = split_bound(job.max_queue_size, workers)
    share = job.max_queue_bytes
    if share is not None:
        share = max(1, share // workers)
    return [ThreadInbox(size, share) for size in sizes]
