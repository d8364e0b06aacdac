"""Workers as processes: start, watch and end them; the messages of each come over its channel.

    worker 0 (process) ==channel 0==> \\
    worker 1 (process) ==channel 1==>  > poll() in the consumer's own thread -> inboxes
      their deaths     ---pidfds---->  |
      close()          ---wake-up--->  /

There is no helper thread: the thread that wants the next item reads the channels. Two things
show a death: the end of the channel, and a pidfd. Neither a grandchild that holds the channel
open, nor another waitpid in the program, nor an ignored SIGCHLD can hide it. All messages that the
dead worker had sent are read first.

Idle workers take tickets from one pair of sockets:

    consumer --offer()--> packets --> a free worker takes one and claims it by its token
             --assign()-> the channel of one worker, for tasks of a dead one, or in turn

Tokens only grow, so the first ticket that still lies in the socket shows which ones were taken. A
worker that has taken one writes the token on its page. What was taken and is claimed by no
living worker was done, or was the dead one's.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.util
import select
import signal
import socket
import time
import weakref
from collections import deque
from collections.abc import Container, Mapping, Sequence
from typing import Any, ClassVar

from enqueuer.backends.job import Job
from enqueuer.backends.pool import (
    ESCALATION_S,
    HAS_ENDED,
    Dispatch,
    NoRoom,
    WorkerPool,
    WorkerSnapshot,
    WorkerState,
    deliver_all,
)
from enqueuer.backends.process.handle import ProcessWorker, Starter, ask_stacks
from enqueuer.backends.stall import line_of
from enqueuer.common import interrupts
from enqueuer.common.descriptors import owned_sockets
from enqueuer.common.text import warn
from enqueuer.errors import StartError, StopWarning
from enqueuer.monitoring import usage
from enqueuer.monitoring.meters import WorkerStats, clock
from enqueuer.order.messages import Ticket
from enqueuer.transport.channel import TaskQueue, pack_ticket
from enqueuer.transport.memory import remove_names_of
from enqueuer.workers import logs
from enqueuer.workers.tasks import TaskSource

# --- tickets --------------------------------------------------------------------------------------

# Tokens that are kept, beside as many as are needed, before some are forgotten.
_MAX_TOKENS = 1000
# Tokens of tickets for one worker; far more than it ever has.
_MAX_ASSIGNED = 100_000


class QueueDispatch(Dispatch[ProcessWorker]):
    """See `enqueuer.backends.pool.Dispatch`.

    Args:
        workers: The workers of the pool.
        known: Definitions that the workers have got with the source; None if they are forked.
    """

    def __init__(self, workers: Sequence[ProcessWorker], known: Mapping[str, Any] | None) -> None:
        self._workers = workers
        self._known = known
        self._is_closed = False
        # Numbers of tasks and their tickets, for which there is no room in the queue yet.
        self._unsent: deque[tuple[int, bytes]] = deque()
        self._last_token = 0
        # Numbers of tasks by their tokens: of the queue, and of what one worker alone got.
        self._offered: dict[int, int] = {}
        self._assigned: dict[ProcessWorker, dict[int, int]] = {}
        # Tokens, numbers and tickets for which there was no room in the channel of one worker.
        self._owed: dict[ProcessWorker, deque[tuple[int, int, bytes]]] = {}
        self._max_tokens = _MAX_TOKENS

    def open(self) -> TaskQueue:
        """Make the queue."""
        self._queue = TaskQueue()
        return self._queue

    def close(self) -> None:
        """Close this process's ends of the queue."""
        self._is_closed = True
        self._queue.close()

    def pack(self, tickets: Sequence[Ticket]) -> Sequence[bytes]:
        return [pack_ticket(ticket, self._known) for ticket in tickets]

    def offer(self, numbers: Sequence[int], packed: Sequence[bytes]) -> None:
        self._unsent.extend(zip(numbers, packed, strict=True))
        self.feed()

    @property
    def full_queue(self) -> int | None:
        """Descriptor of the queue, if tickets wait for room that a poll shows; else None."""
        waits = self._unsent and self._queue.shows_room and not self._is_closed
        return self._queue.fileno() if waits else None

    def owes(self, worker: ProcessWorker) -> bool:
        """Return whether tickets of one worker alone wait for room in its channel."""
        return worker in self._owed

    def feed(self) -> None:
        for worker in list(self._owed):
            self._send_owed(worker)
        unsent = self._unsent
        while unsent:
            token, (number, packed) = self._last_token + 1, unsent[0]
            try:
                if not self._queue.send(token, number, packed):
                    return
            except OSError:
                # stop() has closed the sockets while the loop's thread read an iterable.
                if self._is_closed:
                    return
                raise
            self._last_token = token
            self._offered[token] = number
            if len(self._offered) > self._max_tokens:
                self._forget_finished()
            unsent.popleft()

    def assign(self, worker: ProcessWorker, number: int, packed: bytes) -> None:
        self._last_token += 1
        assigned = self._assigned.setdefault(worker, {})
        assigned[self._last_token] = number
        if len(assigned) > _MAX_ASSIGNED:
            # It was done long ago.
            del assigned[next(iter(assigned))]
        owed = self._owed.setdefault(worker, deque())
        owed.append((self._last_token, number, packed))
        self._send_owed(worker)

    def _send_owed(self, worker: ProcessWorker) -> None:
        """Send a worker its own tickets, as many as there is room for."""
        owed, send = self._owed[worker], worker.inbox.control.assign
        while owed and send(*owed[0]):
            owed.popleft()
        if not owed:
            del self._owed[worker]

    def current(self, worker: ProcessWorker) -> Sequence[int]:
        numbers = self._offered | self._assigned.get(worker, {})
        return [numbers[token] for token in worker.inbox.claimed if token in numbers]

    def safe(self) -> Container[int]:
        first, safe = self._queue.first(), {number for number, _ in self._unsent}
        if first is not None:
            safe.update(number for token, number in self._offered.items() if token >= first)
        for worker in self._workers:
            if worker.state not in HAS_ENDED:
                safe.update(self.current(worker))
                safe.update(self._assigned.get(worker, {}).values())
        return safe

    def forget(self, worker: ProcessWorker) -> None:
        self._assigned.pop(worker, None)
        self._owed.pop(worker, None)

    def _forget_finished(self) -> None:
        """Forget the tokens that were taken and that no worker claims."""
        first = self._queue.first()
        claimed = {token for worker in self._workers for token in worker.inbox.claimed}
        self._offered = {
            token: number
            for token, number in self._offered.items()
            if token in claimed or (first is not None and token >= first)
        }
        self._max_tokens = 2 * len(self._offered) + _MAX_TOKENS


# --- the pool -------------------------------------------------------------------------------------

# Until the first frame of a worker. A longer wait is a deadlock: imports come after that frame.
START_TIMEOUT_S = 60.0

# A part of `element_timeout`, after which elements that began soon after a late one are late, too.
_GRACE = 16
# Seconds between the end of a process and its exit code.
_EXITCODE_S = 1.0


class ProcessPool(WorkerPool[ProcessWorker]):
    """See `enqueuer.backends.pool.WorkerPool`."""

    are_processes: ClassVar[bool] = True
    dispatch: QueueDispatch

    def __init__(self, job: Job) -> None:
        self.workers: list[ProcessWorker] = []
        self._starter = Starter(job)
        self.dispatch = QueueDispatch(self.workers, self._starter.known)
        self._job = job
        self._does_tasks = isinstance(job.source, TaskSource)
        # The worker of each descriptor, and whether that is its pidfd.
        self._by_fd: dict[int, tuple[ProcessWorker, bool]] = {}
        self._poller = select.poll()
        self._is_closed = False
        self._resources = contextlib.ExitStack()
        # Both ends of the connection by which `sleep()` is woken.
        self._wake: socket.socket | None = None
        self._woken: socket.socket | None = None
        # Time at which the last worker was started.
        self._started = 0.0
        # Index of the worker that was last allowed an item for which it had asked.
        self._allowed = 0

    # --- start ---

    def open(self) -> None:
        # multiprocessing joins its children at exit, without a limit. This runs before that.
        pool, util = weakref.ref(self), multiprocessing.util
        at_exit = util.Finalize(self, _stop_at_exit, (pool,), exitpriority=100)
        resources, queue = self._resources, None
        resources.callback(at_exit.cancel)
        try:
            if self._does_tasks:
                queue = self.dispatch.open()
                resources.callback(self.dispatch.close)
            self._starter.open(resources, queue)
            self._wake, self._woken = owned_sockets(socket.socketpair())
            for end in (self._wake, self._woken):
                resources.callback(end.close)
            self._poller.register(self._woken, select.POLLIN)
            if self._job.forward_logs == logs.MULTIPROCESSING_LOGGING:
                resources.enter_context(logs.multiprocessing_logging())
        except OSError as error:
            raise _no_room(error) from error

    def start_worker(self, index: int) -> ProcessWorker:
        try:
            worker = self._starter.start(index, None if self._does_tasks else self._room)
        except OSError as error:
            raise _no_room(error) from error
        self._started = time.monotonic()
        worker.inbox.read = functools.partial(self._read, worker)
        for end in (worker.inbox.control.packets, worker.pidfd):
            if end is not None:
                self._by_fd[end.fileno()] = worker, end is worker.pidfd
                self._poller.register(end.fileno(), select.POLLIN)
        return worker

    # --- run ---

    def sleep(self, awaited: ProcessWorker | None, deadline: float | None) -> None:
        if not self._does_tasks:
            self._ask_for(awaited)
        watched = list(self.workers) if awaited is None else [awaited]
        # Code that a signal handler ran may have read the packets.
        if any(worker.inbox.has_message for worker in watched):
            return
        full = [worker for worker in watched if self._is_full(worker)]
        queue = self.dispatch.full_queue if self._does_tasks else None
        if full or queue is not None:
            self._poll_for_room(full, queue, deadline)
        else:
            self._poll(deadline)

    def _is_full(self, worker: ProcessWorker) -> bool:
        """Return whether something waits for room in the channel of a worker."""
        return worker.inbox.settle() or (self._does_tasks and self.dispatch.owes(worker))

    def _poll_for_room(
        self, full: Sequence[ProcessWorker], queue: int | None, deadline: float | None
    ) -> None:
        """Sleep as `_poll`, and end when there is room in a full channel, or in the queue."""
        channels = [worker.inbox.control.packets.fileno() for worker in full]
        for fd in channels:
            if fd in self._by_fd:
                self._poller.modify(fd, select.POLLIN | select.POLLOUT)
        if queue is not None:
            self._poller.register(queue, select.POLLOUT)
        try:
            self._poll(deadline)
        finally:
            # A worker that has ended is not polled any more.
            for fd in channels:
                if fd in self._by_fd:
                    self._poller.modify(fd, select.POLLIN)
            if queue is not None:
                self._poller.unregister(queue)

    def _room(self) -> int:
        """Return how many more items may wait; an item that was wanted may have taken a place."""
        room = self._job.max_queue_size
        for worker in self.workers:
            room -= worker.inbox.load
        return room

    def _ask_for(self, awaited: ProcessWorker | None) -> None:
        """Grant credit for the item that the consumer is about to wait for."""
        if awaited is not None:
            awaited.inbox.grant(self._room(), wanted=True)
            return
        # Other packets may have ended the wait for the item that was wanted before.
        is_coming = any(worker.inbox.is_coming for worker in self.workers)
        count = len(self.workers)
        for index in range(self._allowed + 1, self._allowed + 1 + count):
            worker = self.workers[index % count]
            now = worker.inbox.is_asking and not is_coming
            if now:
                is_coming, self._allowed = True, index % count
            worker.inbox.grant(self._room(), wanted=now)

    def _poll(self, deadline: float | None) -> None:
        starting = next((w for w in self.workers if w.state is WorkerState.STARTING), None)
        limit = self._started + START_TIMEOUT_S
        if starting is not None:
            deadline = limit if deadline is None else min(deadline, limit)
        if self._job.element_timeout is not None:
            until = self._end_late(int(1e9 * self._job.element_timeout))
            deadline = until if deadline is None else min(deadline, until)
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        ready = interrupts.interruptible(self._poller.poll, timeout)
        for fd, _ in ready:
            if fd in self._by_fd:
                worker, is_pidfd = self._by_fd[fd]
                worker.gone = worker.gone or is_pidfd
                self._read(worker)
            elif self._woken is not None and not self._is_closed:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(1024)
        if starting is not None and not ready and time.monotonic() >= limit:
            raise StartError(
                f"{starting} did not respond within {START_TIMEOUT_S:g} s. With fork, a likely "
                "cause is a lock that another thread held: use "
                "backend=Processes(start_method='forkserver')"
            )

    def _end_late(self, limit_ns: int) -> float:
        """Kill workers in which an element takes too long; return when to look again."""
        until = clock() + limit_ns
        for worker in self.workers:
            if worker.state is not WorkerState.RUNNING or worker.late is not None:
                continue
            end = min(worker.runs().values(), default=clock()) + limit_ns + limit_ns // _GRACE
            if end > clock():
                until = min(until, end)
                continue
            ask_stacks([worker])
            now = clock()
            late = {at: began for at, began in worker.runs().items() if began + limit_ns <= now}
            if late:
                limit = f"element_timeout={limit_ns / 1e9:g} s"
                worker.late = limit, line_of(worker.snapshot()), late
                worker.send_signal(signal.SIGKILL)
        return until / 1e9

    def _read(self, worker: ProcessWorker) -> None:
        """Read the messages of a worker, and reap it if it has ended."""
        # Its inbox calls this, too.
        if worker.state in (WorkerState.DEAD, WorkerState.ENDED):
            return
        control = worker.inbox.control
        control.pump()
        if control.records:
            deliver_all(control.records)
        # A handler of a log record may have called `stop()`.
        if self._is_closed:
            return
        if worker.inbox.control.is_ready and worker.state is WorkerState.STARTING:
            worker.move(WorkerState.RUNNING)
        if worker.gone or worker.inbox.control.packets.ended:
            self._reap_dead(worker)

    def _reap_dead(self, worker: ProcessWorker) -> None:
        """Read the last messages of a process that has ended, and find out how it ended."""
        # The worker may have sent messages after the last reading.
        worker.inbox.control.pump()
        deliver_all(worker.inbox.control.records)
        worker.collect_exitcode(_EXITCODE_S)
        worker.move(WorkerState.DEAD)
        self._forget(worker)

    # --- what is known of the workers ---

    def measures(self, workers: Sequence[ProcessWorker]) -> list[WorkerStats]:
        return [worker.measure(self._job.source.has_threads) for worker in workers]

    def snapshots(self, workers: Sequence[ProcessWorker]) -> list[WorkerSnapshot]:
        ask_stacks(worker for worker in workers if worker.state is WorkerState.RUNNING)
        return [worker.snapshot() for worker in workers]

    def worker_bytes(self) -> int | None:
        found = (usage.unshared_bytes(worker.process.pid) for worker in list(self.workers))
        return max((size for size in found if size is not None), default=None)

    # --- stop ---

    def close(self) -> None:
        self._is_closed = True
        for worker in list(self.workers):
            if worker.state is not WorkerState.ENDED:
                worker.inbox.control.ask_to_stop()
        self.wake()

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            if self._wake is not None:
                self._wake.send(b"\0")

    def discard(self, worker: ProcessWorker) -> None:
        if worker.state not in (WorkerState.DEAD, WorkerState.ENDED):
            worker.send_signal(signal.SIGKILL)
        self._end(worker)

    def stop(self, timeout: float) -> None:
        # A signal handler may end a wait; then it can be called again.
        self.close()
        end = time.monotonic() + timeout
        escalation = min(ESCALATION_S, timeout / 2)
        self._reap_until(end - escalation)
        for number, limit in ((signal.SIGTERM, end - escalation / 2), (signal.SIGKILL, end)):
            for worker in self._living():
                worker.send_signal(number)
            self._reap_until(limit)
        # SIGKILL ends a process at once, unless it waits for a disk that does not respond.
        self._reap_until(end + ESCALATION_S)
        for worker in self._living():
            warn(f"{worker} could not be killed; it may hang in a system call", StopWarning)
        self.workers[:] = self._living()
        if not self.workers:
            self._resources.close()

    def _living(self) -> list[ProcessWorker]:
        return [worker for worker in self.workers if worker.state is not WorkerState.ENDED]

    def _reap_until(self, deadline: float) -> None:
        """Read and drop the messages of the workers, until all have ended or time is over."""
        for worker in self._living():
            if worker.state is WorkerState.DEAD:
                self._end(worker)
        while living := self._living():
            poller = select.poll()
            for worker in living:
                end = worker.inbox.control.packets if worker.pidfd is None else worker.pidfd
                poller.register(end.fileno(), select.POLLIN)
                # An ended channel would wake the poll every time.
                if not worker.inbox.control.packets.ended:
                    poller.register(worker.inbox.control.packets.fileno(), select.POLLIN)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            if not interrupts.interruptible(poller.poll, remaining * 1000 + 1):
                return
            # A signal handler that ran in the wait may have called stop().
            for worker in living:
                if worker.state is not WorkerState.ENDED:
                    _read_last(worker)
                if worker.state is not WorkerState.ENDED and worker.has_ended():
                    self._end(worker)

    def _end(self, worker: ProcessWorker) -> None:
        try:
            self._forget(worker)
            if worker.state is not WorkerState.DEAD:
                _read_last(worker)
                worker.collect_exitcode(_EXITCODE_S)
        finally:
            # The user's handler of a log record may raise anything.
            worker.close()
            with contextlib.suppress(OSError):
                remove_names_of(worker.process.pid)
            # Code that runs in the wait above, such as a finalizer, may have called stop().
            if worker.state is not WorkerState.ENDED:
                worker.move(WorkerState.ENDED)

    def _forget(self, worker: ProcessWorker) -> None:
        """Stop polling the descriptors of a worker."""
        for fd in [fd for fd, (owner, _) in self._by_fd.items() if owner is worker]:
            self._poller.unregister(fd)
            del self._by_fd[fd]


def _no_room(error: OSError) -> NoRoom:
    return NoRoom(
        f"{error}. A worker takes about 8 descriptors (`ulimit -n`) and a process "
        "(`ulimit -u`): try fewer workers"
    )


def _read_last(worker: ProcessWorker) -> None:
    """Read the messages of a worker that is ending, so that errors no longer matter."""
    with contextlib.suppress(Exception):
        worker.inbox.control.pump()
    deliver_all(worker.inbox.control.records)


# Seconds for a stop at the end of the interpreter.
_EXIT_TIMEOUT_S = 2.0


def _stop_at_exit(pool: weakref.ref[ProcessPool]) -> None:
    running = pool()
    if running is not None:
        running.stop(_EXIT_TIMEOUT_S)
