"""Recording what workers and the loop do: wrappers that are there only if a trace is wanted.

    worker:  serve(plan, orders, sender) -> the same with a _Worker as both: next, send, wait
    loop:    Backend                     -> _Watched: wait, read, what waits, errors, restarts
             what is ready               -> _Ready: which item was taken when, so: work

A worker's time is its sender's, its orders', or else the user's. So nothing is asked while an
item is made, and who wants no trace pays nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

from enqueuer import backends
from enqueuer.backends import Backend, BackendName, Job
from enqueuer.merging import Order
from enqueuer.messages import Empty, End, Epoch, Failure, Item, Sender, Ticket
from enqueuer.meters import LoopMeter
from enqueuer.sizes import SAMPLED, size_of
from enqueuer.tasks import TaskSource
from enqueuer.trace import Lines, Place, Track, begin, full_text, text_of
from enqueuer.worker import Plan

_log = logging.getLogger("enqueuer")

_now = time.monotonic_ns
_NO_ARGS: Mapping[str, Any] = {}

Serve = Callable[..., None]
"""`worker.serve` or `worker.serve_tasks`."""


# --- a worker -----------------------------------------------------------------------------------


def traced(serve: Serve, place: Place | None, index: int) -> Serve:
    """Return the loop of a worker that also records, if there is a place for that."""
    return serve if place is None else functools.partial(_serve, serve, place, index)


def _serve(
    serve: Serve,
    place: Place,
    index: int,
    plan: Plan,
    orders: Any,
    sender: Sender,
    enter: Callable[[Any], None] | None = None,
) -> None:
    worker = _Worker(place, index, orders, sender)
    sender.watch(worker.waited)
    try:
        serve(plan, worker, worker, enter)
    finally:
        worker.close()


class _Worker:
    """A worker's Sender, and its Orders or Tickets, for one that records."""

    def __init__(self, place: Place, index: int, orders: Any, sender: Sender) -> None:
        self._orders = orders
        self._sender = sender
        self._run = place.run
        pid = os.getpid()
        self._lines = Lines(place)
        if self._lines.trouble is not None:  # what cannot be written later is the loop's to tell
            _log.warning("worker %d records nothing in a trace: %s", index, self._lines.trouble)
        self._track = Track(self._lines, pid, threading.get_native_id())
        if pid == place.pid:
            self._track.name(None, f"worker {index} (thread)", index)
        else:
            self._track.name(f"worker {index} (process {pid})", f"worker {index}", index)
        self._lines.flush()  # a worker that is killed soon has a name at least
        self._epoch = 0
        self._ticket: Ticket | None = None
        self._since = _now()  # when the user's code began to run
        self._is_sending = False
        self._loop_meter: list[tuple[int, int]] = []  # while it sends

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        at, size = _now(), size_of(value, SAMPLED)
        args = self._what(shard, number)
        self._track.span("next", self._since, at, args)
        self._is_sending, was_sent = True, False
        try:
            self._sender.send_item(shard, number, value, state)
            was_sent = True
        finally:
            self._since = _now()
            self._track.span("send", at, self._since, args | {"bytes": size} if size else args)
            if was_sent:
                self._track.arrow(True, at, self._run, self._epoch, shard, number)
            self._tell_waits()

    def send(self, message: End | Failure | Empty) -> None:
        at = _now()
        match message:
            case End(shard=shard):
                args: dict[str, Any] = {"shard": shard, "end": True}
            case Empty(number=number):
                args = {**self._what(0, number), "empty": True}
            case Failure(shard=shard, number=number, error=error):
                args = {**self._what(shard, number), "error": text_of(error)}
        self._track.span("next", self._since, at, args)
        self._is_sending = True
        try:
            self._sender.send(message)
        finally:
            self._since = _now()
            self._tell_waits()

    def check(self) -> None:
        self._sender.check()  # an item that is None: its time counts to the next one

    def watch(self, waited: Callable[[int], None]) -> None:
        self._sender.watch(waited)

    def next_epoch(self) -> Epoch | None:
        at = _now()
        self._lines.flush()  # it may be long
        epoch: Epoch | None = self._orders.next_epoch()
        if epoch is not None:
            self._epoch = epoch.number
        self._waited_for("epoch", at)
        return epoch

    def next_ticket(self) -> Ticket | None:
        at = _now()
        ticket: Ticket | None = self._orders.next_ticket()
        if ticket is not None:
            self._epoch, self._ticket = ticket.epoch, ticket
        self._waited_for("task", at)
        return ticket

    def waited(self, since: int) -> None:
        """Take note of a wait that is over. Called by the sender."""
        if self._is_sending:
            self._loop_meter.append((since, _now()))

    def close(self) -> None:
        """Write what is left."""
        self._lines.close()

    def _what(self, shard: int, number: int) -> dict[str, Any]:
        if self._ticket is None:
            return {"shard": shard, "item": number, "epoch": self._epoch}
        return {"task": number, "element": self._ticket.indices[0], "epoch": self._epoch}

    def _waited_for(self, what: str, since: int) -> None:
        self._since = _now()
        if self._since // 1000 > since // 1000:
            self._track.span("wait", since, self._since, {"for": what})

    def _tell_waits(self) -> None:
        """Tell of the waits within what was sent; after that, as its span is the outer one."""
        for wait in self._loop_meter:
            self._track.span("wait", *wait, {"for": "room"})
        self._loop_meter.clear()
        self._is_sending = False


# --- the loop -----------------------------------------------------------------------------------


class Trace:
    """What is recorded of one enqueuer, in all its runs, and the row of the loop.

    Any thread may call anything: the loop's own tells, another one may stop it.

    Attributes:
        path: Of the file, as it was given.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.RLock()  # reentrant, for the garbage collector
        self._pid = os.getpid()
        self._runs = 0
        self._users = 0  # backends: while one takes over from another there are two
        self._place: Place | None = None
        self._lines: Lines | None = None
        self._track: Track | None = None
        self._told = False  # that it is full, or cannot be written
        self._at = 0  # the end of the last span: they do not overlap, whoever takes
        self._taken = 0  # when the item was that the loop works on; 0: it has none
        self._item = Item(0, 0, None)
        self._epoch = 0
        self._fill = -1
        self._is_closing = False

    # --- its life ---

    def load(self, name: BackendName, job: Job, loop_meter: LoopMeter) -> Backend:
        """Return a backend for a job that is recorded.

        Raises:
            FileExistsError: The file is there, and is no trace.
            OSError: The file cannot be made.
        """
        with self._lock:
            if not self._users:
                self._begin(name, job)
            self._users += 1
        try:
            inner = backends.load(name, dataclasses.replace(job, trace=self._place), loop_meter)
        except BaseException:
            self.leave()
            raise
        return cast(Backend, _Watched(inner, self, job))

    def ready(self) -> deque[Item]:
        """Return a place for what is ready which tells what is taken of it."""
        ready = _Ready()
        ready.tell = self._took
        return ready

    def leave(self) -> None:
        """Take leave of a backend; the last one ends the file."""
        with self._lock:
            self._users -= 1
            if self._users or self._track is None or self._lines is None:
                return
            self._look_after()
            self._track.last("end", _now())
            self._lines.close()
            self._lines = self._track = None

    def _begin(self, name: str, job: Job) -> None:
        last = None if self._place is None else self._place.file
        self._place = begin(self.path, self._runs, last)
        self._lines = Lines(self._place)
        self._pid = os.getpid()
        self._track = Track(self._lines, self._pid, self._pid)
        self._track.name(f"loop (process {self._pid})", "loop", -1)
        about = dict(
            run=self._runs,
            backend=name if name == "thread" else f"{name}, {job.start_method}",
            workers=job.workers,
            shards=len(job.own),
            max_queue_size=job.max_queue_size,
            cpus=os.cpu_count(),
        )
        self._track.instant("start", _now(), about)
        self._lines.flush()  # before workers write: a viewer likes to know the names first
        self._runs += 1
        self._told, self._at, self._taken, self._fill = False, 0, 0, -1
        self._is_closing = False

    # --- what happens ---

    def instant(self, name: str, args: Mapping[str, Any] = _NO_ARGS) -> None:
        """Tell what happened now."""
        with self._lock:
            if self._track is not None:
                self._track.instant(name, _now(), args)

    def began(self, epoch: int) -> None:
        """Tell that an epoch begins."""
        with self._lock:
            self._epoch = epoch
            self.instant("epoch", {"epoch": epoch})

    def filled(self, count: int) -> None:
        """Tell how many items wait, if that is news."""
        with self._lock:
            if count != self._fill and self._track is not None:
                self._fill = count
                self._track.counter("queue", _now(), count)

    def waited(self, asked: int, since: int, args: Mapping[str, Any]) -> None:
        """Tell that the loop has waited until now.

        Args:
            asked: When it asked for the next item; then its work was done.
            since: When it began to wait; in between elements were read.
            args: What for.
        """
        with self._lock:
            self._end_work(asked)
            if since // 1000 > asked // 1000:
                self._span("read", asked, since, {})
            self._span("wait", since, _now(), args)
            self._look_after()

    def closing(self) -> None:
        """Tell that a backend is about to be stopped: the only one, or one that was replaced."""
        with self._lock:
            if self._users > 1:
                return
            self.rest()
            self._is_closing = True  # what is taken from now on goes nowhere
            self.instant("stop")

    def rest(self) -> None:
        """Tell that the loop has nothing in hand: an epoch is over, or all."""
        with self._lock:
            self._end_work(_now())

    def _took(self, item: Item) -> None:
        at = _now()
        with self._lock:
            if not self._is_closing:
                self._end_work(at)
                # without the value, which is the loop's
                self._taken, self._item = at, Item(item.shard, item.number, None)

    def _end_work(self, at: int) -> None:
        if not self._taken or self._track is None:
            return
        begun, item = max(self._taken, self._at), self._item
        args = {"shard": item.shard, "item": item.number, "epoch": self._epoch}
        self._span("work", begun, at, args)
        run = self._runs - 1
        self._track.arrow(False, begun, run, self._epoch, item.shard, item.number)
        self._taken = 0

    def _span(self, name: str, since: int, until: int, args: Mapping[str, Any]) -> None:
        if self._track is not None:
            since = max(since, self._at)
            self._at = max(since, until)
            self._track.span(name, since, self._at, args)

    def _look_after(self) -> None:
        """Say once that nothing more is recorded, and why."""
        if self._told or self._lines is None:
            return
        if self._lines.is_full:
            self._told = True
            self._lines.write(full_text(self._pid, _now()))
        elif self._lines.trouble is not None:
            self._told = True
            _log.warning(
                "the trace %s is no longer written: %s; all else goes on",
                self.path,
                self._lines.trouble,
            )


_NOTHING: deque[Item] = deque()


class _Ready(deque[Item]):
    """What was taken from a backend and waits for the loop."""

    tell: Callable[[Item], None] | None = None
    _told: Item | None = None

    def __bool__(self) -> bool:
        """Tell of the first one, once: it is asked for right before it is taken."""
        if len(self) and self.tell is not None:
            with contextlib.suppress(IndexError):  # another thread was faster
                item = self[0]
                if item is not self._told:
                    self.tell(item)
                    self._told = item
        # No call: after one another thread could take it, and `self[0]` would raise.
        return self != _NOTHING


class _Watched:
    """A backend that is recorded; what is not here is the backend's own."""

    def __init__(self, backend: Backend, trace: Trace, job: Job) -> None:
        self._backend = backend
        self._trace = trace
        self._owner = os.getpid()
        self._owners = backends.owners_of(job.plans())
        self._reads = isinstance(job.source, TaskSource)
        self._asked = 0  # when the loop asked for the next item
        self._is_closed = self._has_left = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def start(self) -> None:
        try:
            self._backend.start()
        except BaseException:
            self._leave()
            raise

    def begin(self, epoch: Epoch) -> None:
        self._trace.rest()
        self._trace.began(epoch.number)
        self._backend.begin(epoch)

    def acknowledge(self) -> None:
        self._asked = _now()
        self._backend.acknowledge()

    def wait(self, order: Order, deadline: float | None) -> Failure | None:
        since = _now()
        asked = self._asked if self._reads and self._asked else since
        self._asked = 0
        is_poll = deadline is not None and deadline * 1e9 <= since
        wanted = None if order.done else order.turn()
        args: dict[str, Any] = {}
        if wanted is not None:
            args = {"shard": wanted, "worker": self._owners[wanted]}
        restarts = self._backend.restarts
        self._trace.filled(self._backend.waiting())
        try:
            failure = self._backend.wait(order, deadline)
        except TimeoutError:
            if not is_poll:
                self._trace.waited(asked, since, {**args, "timeout": True})
            raise
        except BaseException:
            self._trace.waited(asked, since, {**args, "stopped": True})
            raise
        finally:
            if self._backend.restarts > restarts:
                self._trace.instant("restart", {"restarts": self._backend.restarts})
        if order.done:
            args = {"end": True}
        self._trace.waited(asked, since, args)
        if failure is not None:
            self._tell_of(failure)
        elif order.done:
            self._trace.rest()
        else:
            self._trace.filled(self._backend.waiting() - 1)  # one of them is about to be taken
        return failure

    def close(self) -> None:
        if self._owner == os.getpid() and not self._is_closed:
            self._is_closed = True
            self._trace.closing()
        self._backend.close()

    def stop(self, timeout: float) -> None:
        self.close()
        self._backend.stop(timeout)
        self._leave()

    def _leave(self) -> None:
        if self._owner == os.getpid() and not self._has_left:
            self._has_left = True
            self._trace.leave()

    def _tell_of(self, failure: Failure) -> None:
        self._trace.instant(
            "skipped" if failure.skipped else "error",
            {
                "error": text_of(failure.error),
                "worker": failure.worker,
                "shard": failure.shard,
                "item": failure.number,
            },
        )
