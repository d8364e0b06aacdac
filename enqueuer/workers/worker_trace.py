"""Recording the spans of a worker, if there is a trace: next, send, wait.

    serve(plan, orders, sender) -> serve(plan, recorder, recorder), of a WorkerRecorder

With `concurrency`, each thread of the worker has a recorder.

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
from enqueuer.monitoring.trace_file import TraceTarget, Track, text_of
from enqueuer.workers.element_threads import ElementThreads, ThreadJob
from enqueuer.workers.messages import (
    ClosedAfterSending,
    Empty,
    End,
    Epoch,
    Failure,
    Sender,
    Ticket,
)
from enqueuer.workers.plan import Plan

_log = logging.getLogger("enqueuer")

_now = time.monotonic_ns
# Number of a row for which there is no thread; no thread of Linux has it.
_ROW = 1 << 22

Serve = Callable[..., None]
"""`loop.serve` or `task_loop.serve_tasks`."""


def traced(serve: Serve, target: TraceTarget | None, index: int) -> Serve:
    """Return the loop of a worker, with recording if there is a trace file."""
    if target is None:
        return serve

    def record(
        plan: Plan, orders: Any, sender: Any, enter: Callable[[Any], None] | None = None
    ) -> None:
        recorder = WorkerRecorder(target, index, orders, sender)
        try:
            serve(plan, recorder, recorder, enter)
        finally:
            recorder.close()

    return record


class WorkerRecorder:
    """The Sender of a worker, and its Orders or Tickets, which record each call.

    Args:
        target: File of the trace.
        index: Index of the worker.
        orders: Its Orders or Tickets; None for one of its threads.
        sender: Its Sender, with a meter.
        in_loop: Whether it runs in the loop's own thread.
        thread: Index of the thread that runs elements, as ".0"; "" for the worker's own.
    """

    def __init__(
        self,
        target: TraceTarget,
        index: int,
        orders: Any,
        sender: Any,
        in_loop: bool = False,
        thread: str = "",
    ) -> None:
        self._orders = orders
        self._sender = sender
        self._run = target.run
        self._target = target, index
        # Those of the threads that run elements, once there are some.
        self._by_thread: list[WorkerRecorder] = []
        self._has_threads = False
        # The row of the loop has the number of the thread.
        self._track = Track(target, _ROW if in_loop else threading.get_native_id())
        # The loop reports errors of later writes.
        if self._track.trouble is not None:
            _log.warning("worker %d records nothing in a trace: %s", index, self._track.trouble)
        name, pid = f"worker {index}{thread}", os.getpid()
        if in_loop:
            self._track.name(None, f"{name} (the loop's own thread)", index)
        elif pid == target.pid:
            self._track.name(None, f"{name} (thread)", index)
        else:
            process = None if thread else f"{name} (process {pid})"
            self._track.name(process, name, index)
        # Written at once, so that the trace names a worker that is killed soon.
        self._track.flush()
        self._epoch = 0
        self._ticket: Ticket | None = None
        # Time at which the user's code began to run.
        self._since = _now()
        self._is_sending = False
        # Whether the job of this thread has sent something.
        self._has_sent = False
        # Begin and end of each wait within the current call of the sender.
        self._waits: list[tuple[int, int]] = []
        # Called for an item that was None, whose time counts to the next item.
        self.check = sender.check
        if not thread:
            self.meter = sender.meter
            self.meter.waited = self._waited

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        began, size = _now(), size_of(value, SAMPLED)
        args = self._args_of(shard, number)
        self._track.span("next", self._since, began, args)
        self._is_sending, was_sent = True, False
        try:
            self._sender.send_item(shard, number, value, state)
            was_sent = True
        except ClosedAfterSending:
            was_sent = True
            raise
        finally:
            self._since, self._has_sent = _now(), True
            self._track.span("send", began, self._since, args | {"bytes": size} if size else args)
            if was_sent:
                self._track.arrow(True, began, self._run, self._epoch, shard, number)
            self._record_waits()

    def send(self, message: End | Failure | Empty) -> None:
        began = _now()
        match message:
            case End(shard=shard):
                args: dict[str, Any] = {"shard": shard, "end": True}
            case Empty(number=number):
                args = {**self._args_of(0, number), "empty": True}
            case Failure(shard=shard, number=number, error=error):
                args = {**self._args_of(shard, number), "error": text_of(error)}
        self._track.span("next", self._since, began, args)
        self._is_sending = True
        try:
            self._sender.send(message)
        finally:
            self._since, self._has_sent = _now(), True
            self._record_waits()

    def next_epoch(self) -> Epoch | None:
        began = _now()
        # The wait may be long, and the process may be killed meanwhile.
        self._track.flush()
        epoch: Epoch | None = self._orders.next_epoch()
        if epoch is not None:
            self._epoch = epoch.number
        self._waited_for("epoch", began)
        return epoch

    def share(self, threads: ElementThreads) -> Sender:
        """Return a Sender for several threads, of which each has a row of its own."""
        shared, self._has_threads = self._sender.share(threads), True

        def recorder_of_thread() -> WorkerRecorder:
            number = threading.current_thread().name.rpartition(".")[2]
            self._by_thread.append(WorkerRecorder(*self._target, None, shared, thread=f".{number}"))
            return self._by_thread[-1]

        recorders = _ThreadRecorders(recorder_of_thread)
        threads.do = lambda job: recorders.recorder.do(job)
        return cast(Sender, recorders)

    def next_ticket(self) -> Ticket | None:
        if self._has_threads:
            # The threads wait, and record that.
            ticket: Ticket | None = self._orders.next_ticket()
            return ticket
        began = _now()
        ticket = self._orders.next_ticket()
        if ticket is not None:
            self._epoch, self._ticket = ticket.epoch, ticket
        self._waited_for("task", began)
        return ticket

    def do(self, job: ThreadJob) -> None:
        """Do a job, in a thread that runs elements."""
        self._epoch, self._ticket = job.ticket.epoch, job.ticket._replace(indices=job.indices)
        self._waited_for("task", self._since)
        job.run()
        now = _now()
        # After a send there is nothing more to record.
        if not self._has_sent:
            self._track.span("next", self._since, now, self._args_of(0, job.ticket.number))
        self._since, self._has_sent = now, False

    def close(self) -> None:
        """Write the events that are kept, and close the files, once the threads have ended."""
        for recorder in [self, *self._by_thread]:
            recorder._track.close()

    def _waited(self, since: int) -> None:
        """Note the end of a wait; the meter calls this."""
        if self._is_sending:
            self._waits.append((since, _now()))
        else:
            self._since = _now()

    def _args_of(self, shard: int, number: int) -> dict[str, Any]:
        if self._ticket is None:
            return {"shard": shard, "item": number, "epoch": self._epoch}
        return {"task": number, "element": self._ticket.indices[0], "epoch": self._epoch}

    def _waited_for(self, order: str, since: int) -> None:
        self._since = _now()
        if self._since // 1000 > since // 1000:
            self._track.span("wait", since, self._since, {"for": order})

    def _record_waits(self) -> None:
        """Record the waits of a call of the sender, after its span, which is around them."""
        for wait in self._waits:
            self._track.span("wait", *wait, {"for": "room"})
        self._waits.clear()
        self._is_sending = False


class _ThreadRecorders(threading.local):
    """A Sender for the threads of one worker: in each thread it is the recorder of that thread."""

    def __init__(self, make: Callable[[], WorkerRecorder]) -> None:
        self._make = make

    @functools.cached_property
    def recorder(self) -> WorkerRecorder:
        """The recorder of the current thread."""
        return self._make()

    def __getattr__(self, name: str) -> Any:
        """Return a method of that recorder."""
        return getattr(self.recorder, name)
