"""The threads of a worker that runs several elements at once.

    submit(jobs) -> a queue -> n threads, each runs one job after the other

A thread that has no job waits until the worker's own thread has got the GIL and has taken the next
ticket. If the other threads compute, each of them may be first, which takes many times as long as
a short job. So if it comes late, and jobs are short, each thread's next job waits here, too.

The worker is busy by as much as its threads are, on average. So its meter counts a wait of one
thread of n as the n-th part of a wait of the worker.

Coroutines of an async function run on the event loop of the worker, in a further thread; each of
these threads waits for one of them. So all else is as for plain functions. There are twice as many
threads: when a coroutine ends, the loop goes on with the next one at once, while the thread that
waited for it gets the GIL and takes another job.
"""

from __future__ import annotations

import logging
import operator
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

from enqueuer.common.finalizers import WorkerThread
from enqueuer.errors import Closed
from enqueuer.monitoring.meters import WAITING, Meter, clock
from enqueuer.workers.event_loop import LOOK_S, EventLoop, ThreadSnapshot, set_loop, set_others
from enqueuer.workers.messages import Ticket

_log = logging.getLogger("enqueuer")

# The ring has a word for each ticket that a worker has, and no job waits beside so many.
MOST_THREADS = 1024
# Coroutines of an async function that run at once, if the user gave no number. If each waits for
# 50 ms and computes for 3 ms, so many keep a CPU busy.
ASYNC_CONCURRENCY = 16
# Nanoseconds. Behind a job that takes longer, no ticket is taken ahead that a thread of another
# worker might do at once.
SHORT_NS = 500_000_000
# Nanoseconds, those of CPython's switch interval. If the worker's own thread comes later, threads
# compute.
LATE_NS = 5_000_000
# Nanoseconds after that for which it is taken to be late, as it comes in time now and then by
# chance.
LATE_FOR_NS = 1_000_000_000


class ThreadJob(NamedTuple):
    """The work for one element, or for all elements of a batch at once.

    Attributes:
        ticket: The ticket that it belongs to.
        indices: Indices of the elements.
        run: Function that does it, and raises Closed if the consumer left.
        is_work: Whether its time is that of work for elements, not of fetching them at once.
    """

    ticket: Ticket
    indices: tuple[int, ...]
    run: Callable[[], None]
    is_work: bool = True


class ElementThreads:
    """A few threads that run jobs. Any thread may call anything but `start` and `join`.

    Args:
        count: Number of threads.
        meter: Meter of the worker, whose waits are those of the threads.
        check: Function that raises Closed if the consumer left; called before each job.
        is_async: Whether jobs wait for coroutines.

    Attributes:
        threads: The threads.
        loop: Event loop on which coroutines of the jobs run; None: there are none.
        error: Exception of a thread that is no error of a job; or None.
        do: Function that does a job; a trace sets one that records it, too.
        on_error: Function that is called with an exception of a thread; the worker's own thread
            may be waiting for a ticket, and then does not see it.
        is_awaited: Whether the worker's own thread waits for room.

    Example:
        >>> done, threads = [], ElementThreads(2, Meter(), list)
        >>> job = ThreadJob(Ticket(0, 0, (0,)), (0,), lambda: done.append("done"))
        >>> threads.start("worker-0"); threads.submit([job, job, job])
        >>> threads.join(); len(done)
        3
    """

    def __init__(
        self,
        count: int,
        meter: Meter,
        check: Callable[[], object],
        is_async: bool = False,
    ) -> None:
        self.threads: list[threading.Thread] = []
        self.error: BaseException | None = None
        self.do: Callable[[ThreadJob], None] = operator.methodcaller("run")
        self.on_error: Callable[[BaseException], None] | None = None
        self._count = count
        self._meter = meter
        self._check = check
        self._is_async = is_async
        self.loop: EventLoop | None = None
        self._jobs: SimpleQueue[ThreadJob | None] = SimpleQueue()
        # The elements that run, and when each job began, by the thread that runs it, the oldest
        # first.
        self._current: dict[int, tuple[tuple[int, ...], int]] = {}
        self._changed = threading.Condition(threading.Lock())
        # Number of jobs that wait or run.
        self._load = 0
        # Whether the last work was short; when the worker's own thread was called to the last room,
        # and until when it is taken to be late.
        self._is_short = False
        self._called = self._late_until = 0
        self.is_awaited = False
        self._is_closed = False
        # Time of the last change of the load.
        self._since = clock()

    def start(self, name: str) -> None:
        """Start the threads, or as many as the system has room for.

        Raises:
            OSError: It has no descriptors for the event loop.
            RuntimeError: It has no room for any.
        """
        self._meter.pause(WAITING)
        if self._is_async:
            self.loop = EventLoop(f"{name}.loop", self._count)
        for_each = 1 + self._is_async
        try:
            for number in range(for_each * self._count):
                thread = WorkerThread(target=self._run, name=f"{name}.{number}", daemon=True)
                thread.start()
                self.threads.append(thread)
        except RuntimeError as error:
            if not self.threads:
                self.join()
                raise
            wanted, self._count = self._count, max(1, len(self.threads) // for_each)
            _log.warning(
                "%s runs %d elements at once, not %d: %s", name, self._count, wanted, error
            )
        set_others(lambda: snapshots_of(self._current, self.loop))

    @property
    def is_idle(self) -> bool:
        """Whether no job waits or runs."""
        return not self._load

    def wait_for_room(self) -> bool:
        """Wait until there is room for a job; return False if the threads were closed."""
        with self._changed:
            while not (self.has_room or self._is_closed):
                self.is_awaited = True
                if self.loop is None:
                    self._changed.wait()
                elif not self._changed.wait(LOOK_S):
                    # Coroutines may wait for long, and are cancelled then.
                    self._check()
                now = clock()
                if now - self._called > LATE_NS:
                    self._late_until = now + LATE_FOR_NS
            return not self._is_closed

    def submit(self, jobs: Sequence[ThreadJob]) -> None:
        """Let the next free threads run some jobs, in this order."""
        with self._changed:
            self._count_locked(len(jobs))
        for job in jobs:
            self._jobs.put(job)

    def close(self, reason: BaseException) -> None:
        """Begin no more jobs, and let `wait_for_room` return; Closed is a reason, but no error."""
        error = None if isinstance(reason, Closed) else reason
        with self._changed:
            self._is_closed = True
            self.error = self.error or error
            self._changed.notify_all()
        if error is not None and self.on_error is not None:
            self.on_error(error)

    def cancel(self) -> None:
        """Cancel the coroutines; the threads end with those that they wait for."""
        if self.loop is not None:
            self.loop.cancel()

    def join(self) -> None:
        """Wait until the threads have run all jobs, or all that they have begun if closed."""
        for _ in self.threads:
            self._jobs.put(None)
        for thread in self.threads:
            thread.join()
        set_others(None)
        if self.loop is not None:
            self.loop.close()

    def _run(self) -> None:
        ident = threading.get_ident()
        set_loop(self.loop)
        while (job := self._jobs.get()) is not None:
            began = clock()
            with self._changed:
                self._current[ident] = job.indices, began
            try:
                if not self._is_closed:
                    self._check()
                    self.do(job)
            except BaseException as error:
                self.close(error)
            with self._changed:
                del self._current[ident]
                self._count_locked(-1)
                if job.is_work:
                    self._is_short = self._since - began < SHORT_NS
                if self.is_awaited and self.has_room:
                    self.is_awaited = False
                    self._called = self._since
                    self._changed.notify()
            del job

    @property
    def has_room(self) -> bool:
        """Whether a thread has no job, or its next one may wait here; exact with the lock only."""
        if self._load < self._count:
            return True
        # There is a claim for each ticket.
        most = min(2 * self._count, MOST_THREADS)
        if self.loop is not None:
            return self._load < most
        if not (self._is_short and self._load < most):
            return False
        now = clock()
        _, oldest = next(iter(self._current.values()), (None, now))
        return now < self._late_until and now - oldest < SHORT_NS

    def _count_locked(self, change: int) -> None:
        """Change the load, and note for how long threads had nothing to do before."""
        now, meter = clock(), self._meter
        if not self._load and change:
            meter.resume()
        elif self._load < self._count:
            meter.words[WAITING] += (now - self._since) * (self._count - self._load) // self._count
        self._since = now
        self._load += change
        if not self._load:
            meter.pause(WAITING)
            # What comes next may be other work.
            self._late_until = 0


def snapshots_of(current: dict[int, Any], loop: EventLoop | None = None) -> list[ThreadSnapshot]:
    """Return where each thread is that runs elements.

    Args:
        current: A tuple that begins with the indices of its elements, by the thread.
        loop: Event loop on which its coroutines run; None: there are none.
    """
    before = current.copy()
    frames, after = sys._current_frames(), current.copy()
    # Threads begin and end jobs meanwhile: only the frames of those that did not are known.
    return [
        ThreadSnapshot(
            indices,
            (loop.stack_of(ident) if loop is not None else [])
            or list(traceback.extract_stack(frames[ident])),
        )
        for ident, (indices, *_) in before.items()
        if ident in frames and after.get(ident) is before[ident]
    ]
