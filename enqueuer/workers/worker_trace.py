"""Recording the spans of a worker, if there is a trace: next, send, wait.

    serve(plan, channel) -> serve(plan, recorder), of a WorkerRecorder

With `concurrency`, each thread of the worker has a row of its own.

A worker's time is that of its sender, that of its orders, or else that of the user's code. So the
recorder does nothing while an item is made, and a worker without a trace has no cost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

from enqueuer.common.sizes import SAMPLED, size_of
from enqueuer.errors import Closed
from enqueuer.monitoring.trace_file import TraceTarget, Track, text_of
from enqueuer.workers.element_threads import ElementThreads, ThreadJob
from enqueuer.workers.messages import Empty, End, Epoch, Failure, Sender, Ticket
from enqueuer.workers.plan import Plan

_log = logging.getLogger("enqueuer")

_now = time.monotonic_ns
# Number of a row for which there is no thread; no thread of Linux has it.
_ROW = 1 << 22

Serve = Callable[..., None]
"""The loop of a worker, such as `loop.serve`."""


def traced(serve: Serve, target: TraceTarget | None, index: int) -> Serve:
    """Return the loop of a worker, with recording if there is a trace file."""
    if target is None:
        return serve

    def record(plan: Plan, channel: Any, enter: Callable[[Any], None] | None = None) -> None:
        recorder = WorkerRecorder(target, index, channel)
        try:
            serve(plan, recorder, enter)
        finally:
            recorder.close()

    return record


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
        row, size, was_sent = self._row, size_of(value, SAMPLED), True
        args = row.args_of(shard, number)
        with self._sending(args) as began:
            try:
                self._sender.send_item(shard, number, value, state)
            except BaseException as error:
                # The loop may have taken it before it left.
                was_sent = isinstance(error, Closed)
                raise
            finally:
                sent_args = args | {"bytes": size} if size else args
                row.track.span("send", began, _now(), sent_args)
                if was_sent:
                    row.track.arrow(True, began, row.epoch, shard, number)

    def send(self, message: End | Failure | Empty) -> None:
        match message:
            case End(shard=shard):
                args: dict[str, Any] = {"shard": shard, "end": True}
            case Empty(number=number):
                args = {**self._row.args_of(0, number), "empty": True}
            case Failure(shard=shard, number=number, error=error):
                args = {**self._row.args_of(shard, number), "error": text_of(error)}
        with self._sending(args):
            self._sender.send(message)

    @contextlib.contextmanager
    def _sending(self, args: dict[str, Any]) -> Iterator[int]:
        """Record the time of the user's code until now, and after a call of the sender its waits.

        Yields:
            The time at which the call begins.
        """
        row, began = self._row, _now()
        row.track.span("next", row.since, began, args)
        row.is_sending = True
        try:
            yield began
        finally:
            row.since = _now()
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
