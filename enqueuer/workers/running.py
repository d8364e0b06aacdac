"""Running the loop of a worker: in any process, and with a trace that divides its time.

    WorkerConfig.serve(): a worker in another process makes its plan and seeds -> run_worker()
    run_worker: serve(plan, channel), or serve(plan, recorder), of a WorkerRecorder
    send_item(), send(): the user's code ran until now, and then the item is sent
    Meter.waited(): the worker waited until now, for room or for an order: an epoch or a task

With `concurrency`, each thread of the worker has a row of its own. A worker without a trace has no
cost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from enqueuer.common.objects import SAMPLED, size_of
from enqueuer.monitoring.trace import Row, TraceTarget, text_of
from enqueuer.order.messages import Empty, End, Epoch, Failure, Ticket
from enqueuer.workers import logs, loop
from enqueuer.workers.plan import OnError, Plan, Sender, Watch, serve_failure
from enqueuer.workers.settings import after_import
from enqueuer.workers.shards import FRAMEWORKS, GlobalStreams, TaskSeeds
from enqueuer.workers.sources import Source
from enqueuer.workers.task_loop import ElementThreads, ThreadJob, serve_concurrently, serve_tasks
from enqueuer.workers.tasks import TaskSource


def run_worker(
    plan: Plan,
    channel: Any,
    index: int,
    target: TraceTarget | None,
    enter: Callable[[Any], None] | None = None,
) -> None:
    """Run the loop of a worker until there are no more orders or the consumer left.

    Args:
        plan: Work of the worker.
        channel: Channel of the worker.
        index: Index of the worker.
        target: File in which it records what it does; None if it records nothing.
        enter: Function that is called with a shard or a task before its code runs.
    """
    source = plan.source
    serve: Callable[..., None] = loop.serve
    if isinstance(source, TaskSource):
        serve = serve_concurrently if source.has_threads else serve_tasks
    if target is None:
        serve(plan, channel, enter)
        return
    recorder = WorkerRecorder(target, index, channel)
    try:
        serve(plan, recorder, enter)
    finally:
        recorder.close()


class _WorkerRow(Row):
    """The row of a worker, or of one of its threads that run elements; see `Row`.

    Attributes:
        order: What the worker does.
        sending: What the spans of the item show that is being sent; None if none is.
    """

    def __init__(self, target: TraceTarget, tid: int, name: str, rank: int) -> None:
        super().__init__(target, tid, name, rank)
        self.order: Epoch | Ticket = Epoch(0)
        self.sending: dict[str, Any] | None = None

    def args_of(self, shard: int, number: int) -> dict[str, Any]:
        """Return what the spans of an item show."""
        if isinstance(self.order, Epoch):
            return {"shard": shard, "item": number, "epoch": self.order.number}
        return {"task": number, "element": self.order.indices[0], "epoch": self.order.epoch}


class WorkerRecorder:
    """The Channel of a worker, which records each call.

    Args:
        target: File of the trace.
        index: Index of the worker.
        channel: The channel, with a meter.
        tid: Number of its row, in which any thread records; None: each thread has a row.
    """

    def __init__(
        self, target: TraceTarget, index: int, channel: Any, tid: int | None = None
    ) -> None:
        self._target, self._index, self._tid = target, index, tid
        self._channel = channel
        # The channel, or what its threads share.
        self._sender = channel
        self._rows: dict[int, _WorkerRow] = {}
        # Called for an item that was None, whose time counts to the next item.
        self.check = channel.check
        self.meter = channel.meter
        self.meter.waited = self._waited

    @property
    def _row(self) -> _WorkerRow:
        """The row of the current thread."""
        tid, name = self._tid or threading.get_native_id(), f"worker {self._index}"
        if tid not in self._rows:
            # The first thread of a worker has its first row.
            thread = threading.current_thread().name.rpartition(".")[2]
            name = f"{name}.{thread}" if self._rows else name
            self._rows[tid] = _WorkerRow(self._target, tid, name, self._index)
        return self._rows[tid]

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        args = self._row.args_of(shard, number) | {"bytes": size_of(value, SAMPLED)}
        self._record(args, self._sender.send_item, shard, number, value, state)

    def send(self, message: End | Failure | Empty) -> None:
        shard = 0 if isinstance(message, Empty) else message.shard
        args = self._row.args_of(shard, message.number)
        if isinstance(message, Failure):
            args["error"] = text_of(message.error)
        else:
            args[type(message).__name__.lower()] = True
        self._record(args, self._sender.send, message)

    def _record(self, args: dict[str, Any], send: Callable[..., None], *message: Any) -> None:
        row = self._row
        row.spent("next", args)
        row.sending = args
        try:
            send(*message)
        finally:
            row.spent("send", args)
            row.sending = None

    def _waited(self, since: int) -> None:
        """Record the end of a wait; the meter calls this."""
        row = self._row
        row.spent("send", row.sending, since)
        row.spent("wait", {"for": "order" if row.sending is None else "room"})

    def next_epoch(self) -> Epoch | None:
        epoch: Epoch | None = self._channel.next_epoch()
        self._begin(epoch)
        return epoch

    def next_ticket(self) -> Ticket | None:
        ticket: Ticket | None = self._channel.next_ticket()
        self._begin(ticket)
        return ticket

    def _begin(self, order: Epoch | Ticket | None) -> None:
        """Note that the user's code runs from now on, for an order."""
        self._row.spent("wait", None)
        self._row.order = order or self._row.order

    def share(self, threads: ElementThreads) -> Sender:
        """Return a Sender for several threads, of which each has a row of its own."""
        self._sender, threads.do = self._channel.share(threads), self._do
        return cast(Sender, self)

    def _do(self, job: ThreadJob) -> None:
        """Do a job, in a thread that runs elements."""
        row, ticket = self._row, job.ticket
        row.spent("wait", {"for": "order"})
        row.order = ticket._replace(indices=job.indices)
        job.run()
        row.spent("next", row.args_of(0, ticket.number))

    def close(self) -> None:
        """Write the events that are kept, and close the files, once the threads have ended."""
        for row in self._rows.values():
            row.close()


class WorkerConfig(NamedTuple):
    """Configuration of all workers of an enqueuer that run in other processes; not the source.

    Attributes:
        shard_count: Number of shards, over all ranks.
        random_seed: Seed of the enqueuer.
        levels: Levels of the loggers whose records are wanted; None if none are.
        trace: File in which workers record what they do; None if they record nothing.
    """

    shard_count: int
    random_seed: int
    levels: logs.Levels | None
    trace: TraceTarget | None

    def serve(
        self,
        index: int,
        shards: tuple[int, ...],
        source: Source | TaskSource,
        on_error: OnError,
        channel: Any,
        watch: Watch | None = None,
    ) -> None:
        """Run the loop of a worker until there are no more orders.

        Args:
            index: Index of the worker.
            shards: Indices of its shards; empty for tasks.
            source: Source that it runs.
            on_error: Handling of an exception of the source.
            channel: Channel of the worker.
            watch: See `Plan`.
        """
        plan = Plan(source, shards, self.shard_count, self.random_seed, on_error, watch)
        seeds = TaskSeeds() if isinstance(source, TaskSource) else GlobalStreams()
        after_import(FRAMEWORKS, seeds.seed_imported)
        enter: Callable[[Any], None] = seeds.enter
        if isinstance(source, TaskSource) and source.begin_worker is not None:
            try:
                enter = source.begin_worker(index) or enter
            except BaseException as error:
                serve_failure(error, shards, channel)
                return
        run_worker(plan, channel, index, self.trace, enter)
