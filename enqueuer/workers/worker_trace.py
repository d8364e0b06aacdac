"""Running the loop of a worker, and recording its spans if there is a trace: next, send, wait.

    run_worker: serve(plan, channel), or serve(plan, recorder), of a WorkerRecorder

With `concurrency`, each thread of the worker has a row of its own.

A worker's time is that of its sender, that of its orders, or else that of the user's code. So the
recorder does nothing while an item is made, and a worker without a trace has no cost.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, cast

from enqueuer.common.sizes import SAMPLED, size_of
from enqueuer.errors import Closed
from enqueuer.monitoring.trace_file import TraceTarget, Track, text_of
from enqueuer.workers import loop
from enqueuer.workers.messages import Empty, End, Epoch, Failure, Sender, Ticket
from enqueuer.workers.plan import Plan
from enqueuer.workers.task_loop import ElementThreads, ThreadJob, serve_concurrently, serve_tasks
from enqueuer.workers.tasks import TaskSource

_log = logging.getLogger("enqueuer")

_now = time.monotonic_ns
# Number of a row for which there is no thread; no thread of Linux has it.
_ROW = 1 << 22


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


class _Row:
    """The row of a worker, or of one of its threads that run elements.

    Args:
        target: File of the trace.
        index: Index of the worker.
        tracks: List to which the track is added.
        in_loop: Whether the worker runs in the loop's own thread.
    """

    def __init__(
        self, target: TraceTarget, index: int, tracks: list[Track], in_loop: bool = False
    ) -> None:
        # The row of the loop has the number of the thread.
        self.track = Track(target, _ROW if in_loop else threading.get_native_id())
        # The loop reports errors of later writes.
        if self.track.trouble is not None:
            _log.warning("worker %d records nothing in a trace: %s", index, self.track.trouble)
        is_process = os.getpid() != target.pid
        # The first thread of a worker has its first row.
        thread = f".{threading.current_thread().name.rpartition('.')[2]}" if tracks else ""
        name = f"worker {index}{thread}"
        process = f"{name} (process {os.getpid()})" if is_process and not thread else None
        where = " (the loop's own thread)" if in_loop else "" if is_process else " (thread)"
        self.track.name(process, name + where, index)
        # Written at once, so that the trace names a worker that is killed soon.
        self.track.flush()
        tracks.append(self.track)
        self.epoch = 0
        self.ticket: Ticket | None = None
        # Time at which the user's code began to run.
        self.since = _now()
        self.is_sending = False
        # Begin and end of each wait within the current call of the sender.
        self.waits: list[tuple[int, int]] = []

    def args_of(self, shard: int, number: int) -> dict[str, Any]:
        """Return what the events of an item show."""
        if self.ticket is None:
            return {"shard": shard, "item": number, "epoch": self.epoch}
        return {"task": number, "element": self.ticket.indices[0], "epoch": self.epoch}

    def waited_for(self, order: str, since: int) -> None:
        """Record a wait for an epoch or a task."""
        self.since = _now()
        if self.since // 1000 > since // 1000:
            self.track.span("wait", since, self.since, {"for": order})


class _ThreadRow(threading.local, _Row):
    """The row of the current thread: each thread that uses this object has a row of its own."""


class WorkerRecorder:
    """The Channel of a worker, which records each call.

    Args:
        target: File of the trace.
        index: Index of the worker.
        channel: The channel, with a meter.
        in_loop: Whether it runs in the loop's own thread.
    """

    def __init__(
        self, target: TraceTarget, index: int, channel: Any, in_loop: bool = False
    ) -> None:
        self._channel = channel
        # The channel, or what its threads share.
        self._sender = channel
        self._tracks: list[Track] = []
        # Any thread may take a turn of the loop.
        row = _Row if in_loop else _ThreadRow
        self._row = row(target, index, self._tracks, in_loop)
        self._has_threads = False
        # Called for an item that was None, whose time counts to the next item.
        self.check = channel.check
        self.meter = channel.meter
        self.meter.waited = self._waited

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        args = self._row.args_of(shard, number)
        send = functools.partial(self._sender.send_item, shard, number, value, state)
        self._record(send, args, (shard, number), size_of(value, SAMPLED))

    def send(self, message: End | Failure | Empty) -> None:
        match message:
            case End(shard=shard):
                args: dict[str, Any] = {"shard": shard, "end": True}
            case Empty(number=number):
                args = {**self._row.args_of(0, number), "empty": True}
            case Failure(shard=shard, number=number, error=error):
                args = {**self._row.args_of(shard, number), "error": text_of(error)}
        self._record(functools.partial(self._sender.send, message), args)

    def _record(
        self,
        send: Callable[[], None],
        args: dict[str, Any],
        item: tuple[int, int] | None = None,
        size: int = 0,
    ) -> None:
        """Record the time of the user's code until now, and call the sender.

        Args:
            send: The call.
            args: What the events show.
            item: Shard and number of an item, of which the call and its arrow are recorded, too.
            size: Size of the item in bytes; 0 if it is not known.
        """
        row, began, was_sent = self._row, _now(), True
        row.track.span("next", row.since, began, args)
        row.is_sending = True
        try:
            send()
        except BaseException as error:
            # The loop may have taken it before it left.
            was_sent = isinstance(error, Closed)
            raise
        finally:
            row.since = _now()
            if item is not None:
                row.track.span("send", began, row.since, args | {"bytes": size} if size else args)
                if was_sent:
                    row.track.arrow(True, began, row.epoch, *item)
            # After the span of the call, which is around them.
            for wait in row.waits:
                row.track.span("wait", *wait, {"for": "room"})
            row.waits.clear()
            row.is_sending = False

    def next_epoch(self) -> Epoch | None:
        row, began = self._row, _now()
        # The wait may be long, and the process may be killed meanwhile.
        row.track.flush()
        epoch: Epoch | None = self._channel.next_epoch()
        if epoch is not None:
            row.epoch = epoch.number
        row.waited_for("epoch", began)
        return epoch

    def next_ticket(self) -> Ticket | None:
        row, began = self._row, _now()
        ticket: Ticket | None = self._channel.next_ticket()
        if self._has_threads:
            # These wait, and record that.
            return ticket
        if ticket is not None:
            row.epoch, row.ticket = ticket.epoch, ticket
        row.waited_for("task", began)
        return ticket

    def share(self, threads: ElementThreads) -> Sender:
        """Return a Sender for several threads, of which each has a row of its own."""
        self._sender, self._has_threads = self._channel.share(threads), True
        threads.do = self._do
        return cast(Sender, self)

    def _do(self, job: ThreadJob) -> None:
        """Do a job, in a thread that runs elements."""
        row, ticket = self._row, job.ticket
        row.epoch, row.ticket = ticket.epoch, ticket._replace(indices=job.indices)
        row.waited_for("task", row.since)
        began = row.since
        job.run()
        # After a send there is nothing more to record.
        if row.since == began:
            row.since = _now()
            row.track.span("next", began, row.since, row.args_of(0, ticket.number))

    def close(self) -> None:
        """Write the events that are kept, and close the files, once the threads have ended."""
        for track in self._tracks:
            track.close()

    def _waited(self, since: int) -> None:
        """Note the end of a wait; the meter calls this."""
        row = self._row
        if row.is_sending:
            row.waits.append((since, _now()))
        else:
            row.since = _now()
