"""Recording what the loop does, and when items were made for it, if a trace is wanted.

    loop:           Engine  -> _Recorded: wait, read, what waits, errors, restarts
    what is ready:  deque   -> RecordedItems: which item was taken when, so: work

`workers/worker_trace.py` records what workers do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from enqueuer.backends.job import BackendName, Job, owners_of
from enqueuer.backends.load import Backend, load
from enqueuer.backends.order import Order
from enqueuer.backends.pool import Worker
from enqueuer.backends.restarts import Restarts
from enqueuer.backends.stall import WaitSnapshot
from enqueuer.backends.task_schedule import TaskSchedule
from enqueuer.monitoring.loop_meter import LoopMeter
from enqueuer.monitoring.trace_file import Lines, TraceTarget, Track, begin, full_text, text_of
from enqueuer.monitoring.worker_stats import WorkerStats
from enqueuer.workers.messages import Epoch, Failure, Item, ItemTuple
from enqueuer.workers.tasks import TaskSource

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
        self._pid = os.getpid()
        self._runs = 0
        # Number of backends: while one takes over from another there are two.
        self._users = 0
        self._place: TraceTarget | None = None
        self._lines: Lines | None = None
        self._track: Track | None = None
        # Whether it was logged that the file is full, or cannot be written.
        self._is_reported = False
        # End of the last span: spans do not overlap, whichever thread takes.
        self._at = 0
        # Time at which the loop took the item that it works on; 0: it has none.
        self._taken = 0
        self._item = Item(0, 0, None)
        self._epoch = 0
        self._fill = -1
        self._is_closing = False

    # --- its life ---

    def load(
        self,
        name: BackendName,
        job: Job,
        restarts: Restarts,
        loop_meter: LoopMeter,
        deferred: Collection[object],
    ) -> Backend:
        """Return a backend whose work is recorded.

        Args: as for `load.load`.

        Raises:
            FileExistsError: The file is there, and is no trace.
            OSError: The file cannot be made.
        """
        with self._lock:
            if not self._users:
                self._begin(name, job)
            self._users += 1
        try:
            traced = dataclasses.replace(job, trace=self._place)
            inner = load(name, traced, restarts, loop_meter, deferred)
        except BaseException:
            self.leave()
            raise
        return _Recorded(inner, self, job, restarts)

    def ready(self) -> deque[ItemTuple]:
        """Return an empty deque that records the items that are taken from it."""
        ready = RecordedItems()
        ready.record = self._took
        return ready

    def leave(self) -> None:
        """End the recording of a backend; that of the last one ends the file."""
        with self._lock:
            self._users -= 1
            if self._users or self._track is None or self._lines is None:
                return
            self._report_end()
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
            backend=f"{name}, {job.start_method}" if job.start_method else name,
            workers=job.workers,
            shards=len(job.own),
            max_queue_size=job.max_queue_size,
            cpus=os.cpu_count(),
        )
        self._track.instant("start", _now(), about)
        # Before workers write, as a viewer needs the names first.
        self._lines.flush()
        self._runs += 1
        self._is_reported, self._at, self._taken, self._fill = False, 0, 0, -1
        self._is_closing = False

    # --- what happens ---

    def instant(self, name: str, args: Mapping[str, Any] = _NO_ARGS) -> None:
        """Record that something happened now."""
        with self._lock:
            if self._track is not None:
                self._track.instant(name, _now(), args)

    def began(self, epoch: int) -> None:
        """Record that an epoch begins."""
        with self._lock:
            self._epoch = epoch
            self.instant("epoch", {"epoch": epoch})

    def filled(self, count: int) -> None:
        """Record how many items wait, if the number has changed."""
        with self._lock:
            if count != self._fill and self._track is not None:
                self._fill = count
                self._track.counter("queue", _now(), count)

    def waited(self, asked: int, since: int, args: Mapping[str, Any]) -> None:
        """Record that the loop has waited until now.

        Args:
            asked: Time at which it asked for the next item, and its work was done.
            since: Time at which it began to wait; in between it read elements.
            args: Item that it waited for.
        """
        with self._lock:
            self._end_work(asked)
            if since // 1000 > asked // 1000:
                self._span("read", asked, since, {})
            self._span("wait", since, _now(), args)
            self._report_end()

    def closing(self) -> None:
        """Record that a backend is about to be stopped, unless another one has replaced it."""
        with self._lock:
            if self._users > 1:
                return
            self.rest()
            # Items that are taken from now on are not recorded.
            self._is_closing = True
            self.instant("stop")

    def rest(self) -> None:
        """Record that the loop has no item: an epoch is over, or the run."""
        with self._lock:
            self._end_work(_now())

    def _took(self, item: ItemTuple) -> None:
        at = _now()
        with self._lock:
            if not self._is_closing:
                self._end_work(at)
                # without the value, which is the loop's
                shard, number, *_ = item
                self._taken, self._item = at, Item(shard, number, None)

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

    def _report_end(self) -> None:
        """Log once that nothing more is recorded, and why."""
        if self._is_reported or self._lines is None:
            return
        if self._lines.is_full:
            self._is_reported = True
            self._lines.write(full_text(self._pid, _now()))
        elif self._lines.trouble is not None:
            self._is_reported = True
            _log.warning(
                "the trace %s is no longer written: %s; all else goes on",
                self.path,
                self._lines.trouble,
            )


_NOTHING: deque[ItemTuple] = deque()


class RecordedItems(deque[ItemTuple]):
    """Items that were taken from a backend and wait for the loop; records when each is taken."""

    record: Callable[[ItemTuple], None] | None = None
    _recorded: ItemTuple | None = None

    def __bool__(self) -> bool:
        """Record the first one, once: it is asked for right before it is taken."""
        if len(self) and self.record is not None:
            # Another thread may take it first.
            with contextlib.suppress(IndexError):
                item = self[0]
                if item is not self._recorded:
                    self.record(item)
                    self._recorded = item
        # No call: after one another thread could take it, and `self[0]` would raise.
        return self != _NOTHING


class _Recorded:
    """A backend that records what the loop asks of it."""

    def __init__(self, backend: Backend, trace: Trace, job: Job, restarts: Restarts) -> None:
        self._backend = backend
        self._trace = trace
        self._restarts = restarts
        self._owner = os.getpid()
        self._owners = owners_of(job.plans())
        self._reads = isinstance(job.source, TaskSource)
        self._max_queue_size = job.max_queue_size
        # Time at which the loop asked for the next item.
        self._asked = 0
        self._is_closed = self._has_left = False

    # --- what is recorded ---

    def start(self, first: Epoch | None = None) -> None:
        try:
            self._backend.start(first)
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
        restarts = self._restarts.count
        self._trace.filled(self._in_queue())
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
            if self._restarts.count > restarts:
                self._trace.instant("restart", {"restarts": self._restarts.count})
        if order.done:
            args = {"end": True}
        self._trace.waited(asked, since, args)
        if failure is not None:
            self._record_failure(failure)
        elif order.done:
            self._trace.rest()
        else:
            # One of them is about to be taken.
            self._trace.filled(self._in_queue() - 1)
        return failure

    def _in_queue(self) -> int:
        # The others count as held by the workers.
        return min(self._backend.waiting(), self._max_queue_size)

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

    def _record_failure(self, failure: Failure) -> None:
        self._trace.instant(
            "skipped" if failure.skipped else "error",
            {
                "error": text_of(failure.error),
                "worker": failure.worker,
                "shard": failure.shard,
                "item": failure.number,
            },
        )

    # --- what is not ---

    @property
    def tasks(self) -> TaskSchedule[Any] | None:
        return self._backend.tasks

    @property
    def is_resizing(self) -> bool:
        return self._backend.is_resizing

    def take(self, order: Order) -> Iterator[ItemTuple]:
        return self._backend.take(order)

    def more(self, order: Order, may_sleep: bool) -> None:
        """Return None: a wait is recorded, even one that does not sleep."""

    def pass_over(self) -> None:
        self._backend.pass_over()

    def has_news(self, order: Order) -> bool:
        return self._backend.has_news(order)

    def waiting(self) -> int:
        return self._backend.waiting()

    def cpus(self) -> float:
        return self._backend.cpus()

    def worker_bytes(self) -> int | None:
        return self._backend.worker_bytes()

    def measures(self) -> list[WorkerStats]:
        return self._backend.measures()

    def workers(self) -> Sequence[Worker]:
        return self._backend.workers()

    def wake(self) -> None:
        self._backend.wake()

    def inspect(self, order: Order) -> WaitSnapshot:
        return self._backend.inspect(order)

    def resize(self, workers: int) -> None:
        self._backend.resize(workers)
