"""Recording what the loop does, if a trace is wanted: it waits, takes an item, and meets failures.

    Run:           open, instant, closing, leave     one file for all runs of an enqueuer
    EpochReader:   ask -> wait                       the backend's wait, and what came of it
    the consumers: take                              an item is taken, so the loop works until `ask`

Without a trace there is no `Trace`. With one, items are taken one at a time, so that each is asked
for. `workers/worker_trace.py` records what workers do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from enqueuer.backends.engine import Engine
from enqueuer.backends.job import BackendName, Job
from enqueuer.backends.lifecycle import Restarts
from enqueuer.backends.task_schedule import Order
from enqueuer.monitoring.meters import LoopMeter
from enqueuer.monitoring.trace_file import TraceTarget, Track, begin, text_of
from enqueuer.workers.messages import Failure, ItemTuple

_log = logging.getLogger("enqueuer")

_now = time.monotonic_ns
_NO_ARGS: Mapping[str, Any] = {}


class Trace:
    """The recording of one enqueuer, in all its runs, and the row of the loop in it.

    Any thread may call anything: the thread of the loop records, another one may stop it.

    Attributes:
        path: Path of the file, as it was given.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # Reentrant, for the garbage collector.
        self._lock = threading.RLock()
        # Number of backends: while one takes over from another there are two.
        self._users = 0
        self._target: TraceTarget | None = None
        self._track: Track | None = None
        # Time at which the loop took the item that it works on; 0: it has none.
        self._taken = 0
        self._item = 0, 0
        self._epoch = 0
        self._is_closing = False

    # --- its life ---

    def open(self, name: BackendName, job: Job, restarts: Restarts, loop_meter: LoopMeter) -> Job:
        """Begin the file, or go on in it for a further backend; return the job with the file.

        Args:
            name: Name of the backend, which calls `leave` once its workers have ended.
            job: Description of what its workers run.
            restarts: Restarts of the run.
            loop_meter: Account of its waits.

        Raises:
            FileExistsError: The file is there, and is no trace.
            OSError: The file cannot be made.
        """
        with self._lock:
            if not self._users:
                self._begin(name, job)
            self._users += 1
            self._restarts, self._meter = restarts, loop_meter
            return dataclasses.replace(job, trace=self._target)

    def leave(self) -> None:
        """End the recording of a backend; that of the last one ends the file."""
        with self._lock:
            self._users -= 1
            if self._users or self._track is None:
                return
            self.closing()
            self._report_end()
            self._track.end(_now())
            self._track = None

    def _begin(self, name: str, job: Job) -> None:
        self._target = begin(self.path, self._target)
        self._track = Track(self._target, self._target.pid)
        self._track.name(f"loop (process {self._target.pid})", "loop", -1)
        about = dict(
            run=self._target.run,
            backend=f"{name}, {job.start_method}" if job.start_method else name,
            workers=job.workers,
            shards=len(job.own),
            max_queue_size=job.max_queue_size,
            cpus=os.cpu_count(),
        )
        self._track.instant("start", _now(), about)
        # Before workers write, as a viewer needs the names first.
        self._track.flush()
        self._max_queue_size = job.max_queue_size
        # Number of items that waited when that was recorded last.
        self._fill = -1
        # End of the last span: spans do not overlap, whichever thread takes.
        self._at = self._taken = 0
        # Whether it was logged that the file is full, or cannot be written.
        self._is_reported = self._is_closing = False

    def closing(self) -> None:
        """Record, once, that the run is about to be stopped."""
        with self._lock:
            if not self._is_closing:
                self._end_work(_now())
                # Items that are taken from now on are not recorded.
                self._is_closing = True
                self.instant("stop")

    def leave_to_parent(self) -> None:
        """Record nothing of the run in a forked child: it is the parent's."""
        # A thread that does not exist here may have held it when the parent forked.
        self._lock = threading.RLock()
        self._is_closing = True

    # --- what happens ---

    def instant(self, name: str, args: Mapping[str, Any] = _NO_ARGS) -> None:
        """Record that something happened now."""
        with self._lock:
            if self._track is not None:
                self._track.instant(name, _now(), args)

    def begin(self, epoch: int) -> None:
        """Record that an epoch begins."""
        with self._lock:
            self._end_work(_now())
            self._epoch = epoch
            self.instant("epoch", {"epoch": epoch})

    def ask(self) -> None:
        """Note when the loop asks for an item; until it waits, it reads elements."""
        self._asked = _now()

    def wait(self, backend: Engine[Any], order: Order, deadline: float | None) -> Failure | None:
        """Let the loop wait, and record what came of it; see `Engine.wait`."""
        since, restarts = _now(), self._restarts.count
        asked = since if backend.tasks is None else self._asked
        is_poll = deadline is not None and deadline * 1e9 <= since
        shard = None if order.done else order.turn()
        self._count(backend.schedule.waiting())
        failure, args = None, dict[str, Any](stopped=True)
        try:
            failure = backend.wait(order, deadline)
            args = {"end": True} if order.done else {}
        except TimeoutError:
            args = {"timeout": True}
            raise
        finally:
            if shard is not None and "end" not in args:
                args = {"shard": shard, "worker": self._meter.worker} | args
            if self._restarts.count > restarts:
                self.instant("restart", {"restarts": self._restarts.count})
            # A loop that only looks whether something has come goes on with its work.
            if not (is_poll and "timeout" in args):
                self.waited(asked, since, args)
        if failure is not None:
            args = {"error": text_of(failure.error), "worker": failure.worker}
            args |= {"shard": failure.shard, "item": failure.number}
            self.instant("skipped" if failure.skipped else "error", args)
        elif order.done:
            self._end_work(_now())
        else:
            # One of them is about to be taken.
            self._count(backend.schedule.waiting() - 1)
        return failure

    def waited(self, asked: int, since: int, args: Mapping[str, Any]) -> None:
        """Record that the loop has waited until now, if it had to.

        Args:
            asked: Time at which it asked for the next item, and its work was done.
            since: Time at which it began to wait; in between it read elements.
            args: Item that it waited for.
        """
        with self._lock:
            self._end_work(asked)
            if since // 1000 > asked // 1000:
                self._span("read", asked, since, {})
            if self._meter.since:
                self._span("wait", since, _now(), args)
            self._report_end()

    def take(self, ready: Sequence[ItemTuple]) -> None:
        """Record that the loop is about to take the first of these items. Idempotent."""
        at = _now()
        # Another thread may take it first.
        with self._lock, contextlib.suppress(IndexError):
            shard, number, *_ = ready[0]
            if self._is_closing:
                return
            if (shard, number) != self._item:
                self._end_work(at)
            self._taken, self._item = at, (shard, number)

    def _count(self, waiting: int) -> None:
        """Record how many items wait, if the number has changed."""
        with self._lock:
            # The others count as held by the workers.
            count = min(waiting, self._max_queue_size)
            if count != self._fill and self._track is not None:
                self._fill = count
                self._track.counter("queue", _now(), count)

    def _end_work(self, at: int) -> None:
        if not self._taken or self._track is None:
            return
        begun, (shard, number) = max(self._taken, self._at), self._item
        args = {"shard": shard, "item": number, "epoch": self._epoch}
        self._span("work", begun, at, args)
        self._track.arrow(False, begun, self._epoch, shard, number)
        self._taken = 0

    def _span(self, name: str, since: int, until: int, args: Mapping[str, Any]) -> None:
        if self._track is not None:
            since = max(since, self._at)
            self._at = max(since, until)
            self._track.span(name, since, self._at, args)

    def _report_end(self) -> None:
        """Log once that nothing more is recorded, and why."""
        track = self._track
        if track is None or self._is_reported:
            return
        if track.is_full:
            self._is_reported = True
            track.fill(_now())
        elif track.trouble is not None:
            self._is_reported = True
            text = "the trace %s is no longer written: %s; all else goes on"
            _log.warning(text, self.path, track.trouble)
