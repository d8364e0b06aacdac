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
from typing import Any

from enqueuer.common.sizes import SAMPLED, size_of
from enqueuer.monitoring.meters import Meter
from enqueuer.monitoring.trace_file import Lines, TraceTarget, Track, text_of
from enqueuer.workers.element_threads import ElementThreads, Job
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


def traced(serve: Serve, place: TraceTarget | None, index: int) -> Serve:
    """Return the loop of a worker, with recording if there is a trace file."""
    return serve if place is None else functools.partial(_serve, serve, place, index)


def _serve(
    serve: Serve,
    place: TraceTarget,
    index: int,
    plan: Plan,
    orders: Any,
    sender: Sender,
    enter: Callable[[Any], None] | None = None,
) -> None:
    recorder = WorkerRecorder(place, index, orders, sender)
    sender.watch(recorder.waited)
    try:
        serve(plan, recorder, recorder, enter)
    finally:
        recorder.close()


def recorder_in_loop(place: TraceTarget, index: int, orders: Any, sender: Sender) -> WorkerRecorder:
    """Return the recorder of a worker that runs in the loop's own thread."""
    recorder = WorkerRecorder(place, index, orders, sender, in_loop=True)
    sender.watch(recorder.waited)
    return recorder


class WorkerRecorder:
    """The Sender of a worker, and its Orders or Tickets, which record each call."""

    def __init__(
        self,
        place: TraceTarget,
        index: int,
        orders: Any,
        sender: Sender,
        in_loop: bool = False,
        thread: str = "",
    ) -> None:
        self._orders = orders
        self._sender = sender
        self._run = place.run
        self._place = place, index
        # The recorders of threads that run elements, once there are some.
        self._threads: _ThreadRecorders | None = None
        pid = os.getpid()
        self._lines = Lines(place)
        # The loop reports errors of later writes.
        if self._lines.trouble is not None:
            _log.warning("worker %d records nothing in a trace: %s", index, self._lines.trouble)
        # The row of the loop has the number of the thread.
        self._track = Track(self._lines, pid, _ROW if in_loop else threading.get_native_id())
        name = f"worker {index}{thread}"
        if in_loop:
            self._track.name(None, f"{name} (the loop's own thread)", index)
        elif pid == place.pid:
            self._track.name(None, f"{name} (thread)", index)
        else:
            process = None if thread else f"{name} (process {pid})"
            self._track.name(process, name, index)
        # Written at once, so that the trace names a worker that is killed soon.
        self._lines.flush()
        self._epoch = 0
        self._ticket: Ticket | None = None
        # Time at which the user's code began to run.
        self._since = _now()
        self._is_sending = False
        # Whether the job of this thread has sent something.
        self._has_sent = False
        # Begin and end of each wait within the current call of the sender.
        self._waits: list[tuple[int, int]] = []

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

    def check(self) -> None:
        # The item was None. Its time counts to the next item.
        self._sender.check()

    def watch(self, waited: Callable[[int], None]) -> None:
        self._sender.watch(waited)

    def next_epoch(self) -> Epoch | None:
        began = _now()
        # The wait may be long, and the process may be killed meanwhile.
        self._lines.flush()
        epoch: Epoch | None = self._orders.next_epoch()
        if epoch is not None:
            self._epoch = epoch.number
        self._waited_for("epoch", began)
        return epoch

    @property
    def meter(self) -> Meter:
        """The meter of the sender."""
        meter: Meter = self._orders.meter
        return meter

    def share(self, threads: ElementThreads) -> Sender:
        """Return a Sender for several threads, of which each has a row of its own."""
        shared: Sender = self._orders.share(threads)
        self._threads = threads.observer = _ThreadRecorders(*self._place, shared)
        return self._threads

    def next_ticket(self) -> Ticket | None:
        if self._threads is not None:
            # The threads wait, and record that.
            ticket: Ticket | None = self._orders.next_ticket()
            return ticket
        began = _now()
        ticket = self._orders.next_ticket()
        if ticket is not None:
            self._epoch, self._ticket = ticket.epoch, ticket
        self._waited_for("task", began)
        return ticket

    def waited(self, since: int) -> None:
        """Note the end of a wait; the sender calls this."""
        if self._is_sending:
            self._waits.append((since, _now()))
        else:
            self._since = _now()

    def begin(self, job: Job) -> None:
        """Note that a job begins, in a thread that runs elements."""
        self._epoch, self._ticket = job.ticket.epoch, job.ticket._replace(indices=job.indices)
        self._waited_for("task", self._since)

    def end(self, job: Job) -> None:
        """Note the end of a job."""
        now = _now()
        # After a send there is nothing more to tell.
        if self._ticket is not None and not self._has_sent:
            self._track.span("next", self._since, now, self._args_of(0, job.ticket.number))
        self._since, self._has_sent = now, False

    def close(self) -> None:
        """Write the events that are kept, and close the file."""
        self._lines.close()
        if self._threads is not None:
            self._threads.close()

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


class _ThreadRecorders:
    """A Sender for the threads of one worker, with a recorder for each."""

    def __init__(self, place: TraceTarget, index: int, sender: Sender) -> None:
        self._place = place, index
        self._sender = sender
        # By the thread.
        self._recorders: dict[int, WorkerRecorder] = {}

    @property
    def _own(self) -> WorkerRecorder:
        """The recorder of the current thread."""
        ident = threading.get_ident()
        if ident not in self._recorders:
            number = threading.current_thread().name.rpartition(".")[2]
            recorder = WorkerRecorder(*self._place, None, self._sender, thread=f".{number}")
            self._recorders[ident] = recorder
        return self._recorders[ident]

    def begin(self, job: Job) -> None:
        self._own.begin(job)

    def end(self, job: Job) -> None:
        self._own.end(job)

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        self._own.send_item(shard, number, value, state)

    def send(self, message: End | Failure | Empty) -> None:
        self._own.send(message)

    def check(self) -> None:
        self._sender.check()

    def watch(self, waited: Callable[[int], None]) -> None:
        self._sender.watch(waited)

    def close(self) -> None:
        """Write the events that are kept, once the threads have ended."""
        for recorder in list(self._recorders.values()):
            recorder.close()
