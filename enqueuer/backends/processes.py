"""Workers as processes: start, watch and end them; the messages of each come over its channel.

    worker 0 (process) ==channel 0==> \\
    worker 1 (process) ==channel 1==>  > poll() in the consumer's own thread -> inboxes -> receive()
      their deaths     ---pidfds---->  |
      close()          ---wake-up--->  /

There is no helper thread: the thread that wants the next item reads the channels. Two things
show a death: the end of the channel, and a pidfd. Neither a grandchild that holds the channel
open, nor another waitpid in the program, nor an ignored SIGCHLD can hide it. All messages that the
dead worker had sent are read first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import multiprocessing.util
import os
import pickle
import select
import signal
import socket
import time
import warnings
import weakref
from collections.abc import Iterator

from enqueuer import interrupts, logs, native_threads, usage
from enqueuer.backends import (
    ESCALATION_S,
    Job,
    WorkerState,
    bunch_of,
    check_owner,
    history,
    in_rotation,
    owners_of,
    split_bound,
    stacks,
    until,
)
from enqueuer.backends.bootstrap import ParentEnvironment, Part, WorkerConfig, main_forked
from enqueuer.backends.launching import launch
from enqueuer.backends.payload import pickled_payload
from enqueuer.backends.watched import (
    Watched,
    death_message,
    has_ended,
    how_it_ended,
    open_pidfd,
    wait_for_exitcode,
)
from enqueuer.errors import Closed, StartError, StopWarning, WorkerDied
from enqueuer.merging import ANY, Order, ShardOrder
from enqueuer.messages import End, Epoch, Failure, Item
from enqueuer.meters import LoopMeter
from enqueuer.stalls import DeadlineExpired, WaitSnapshot, WorkerSnapshot, awaited, first_for
from enqueuer.stats import WorkerStats
from enqueuer.transport.blocks import nameless_file, remove_names_of
from enqueuer.transport.channel import Credit
from enqueuer.transport.item_receiver import ItemReceiver
from enqueuer.transport.packets import Descriptor, Packets, close_in_children, pair
from enqueuer.transport.ring import LIMIT, Ring, open_ring

# Until the first frame of a worker. A longer wait is a deadlock: imports come after that frame.
START_TIMEOUT_S = 60.0

_log = logging.getLogger("enqueuer")

_EXITCODE_S = 1.0  # between the end of a process and its exit code


class ProcessBackend:
    """See `enqueuer.backends.Backend`."""

    def __init__(self, job: Job, loop_meter: LoopMeter) -> None:
        self._job = job
        self._loop_meter = loop_meter
        self._plans = job.plans()
        self._owners = owners_of(self._plans)
        self._owner = os.getpid()
        self._workers: list[Watched] = []
        self._by_fd: dict[int, Watched] = {}
        self._found = 0  # index of the last worker whose message was next
        self._ending: tuple[ItemReceiver, int, End, Order] | None = None  # see _note_end
        self._failed: ItemReceiver | None = None  # the channel of the failure that was returned
        self._bunch = bunch_of(job)
        self._poller = select.poll()
        self._closed = False
        self._resources = contextlib.ExitStack()
        self._wake: socket.socket | None = None
        self._started = 0.0
        self._payload: Descriptor | None = None
        self._epoch = Epoch(0)
        self._deaths: list[
            tuple[int, int]
        ] = []  # shard and item of each death after which a worker was replaced

    @property
    def restarts(self) -> int:
        return len(self._deaths)

    # --- start ---

    def start(self) -> None:
        with interrupts.held():
            self._start()

    def _start(self) -> None:
        try:
            self._write_payload()  # first, so that mistakes in the source show before a start
            self._open_wake_up()
            if self._job.forward_logs == logs.MULTIPROCESSING_LOGGING:
                self._resources.enter_context(logs.multiprocessing_logging())
            for index in range(len(self._plans)):
                self._workers.append(self._start_one(index))
                interrupts.check()
        except BaseException as error:
            started = len(self._workers)
            self.stop(0)
            if isinstance(error, OSError):
                raise StartError(
                    f"worker {started} of {len(self._plans)} could not be started: "
                    f"{error}; none is running now. A worker takes about 8 descriptors "
                    "(`ulimit -n`) and a process (`ulimit -u`): try fewer workers"
                ) from error
            raise
        finally:
            may_need_it = self._job.max_restarts or self._job.may_grow
            if self._payload is not None and not may_need_it:
                self._payload.close()
        self._started = time.monotonic()
        _running.add(self)
        _register_exit()

    def _write_payload(self) -> None:
        job = self._job
        if job.start_method != "fork":
            # Handlers are held back: an exception of theirs would be reported as the source's.
            data = pickled_payload(self._config, job.source, job.on_error, job.start_method)
            interrupts.check()
            self._payload = Descriptor(nameless_file(data))
            self._resources.callback(self._payload.close)

    @functools.cached_property
    def _config(self) -> WorkerConfig:
        """The configuration of all workers; made once, as it reads the levels of all loggers."""
        job = self._job
        levels = logs.Levels.of_this_process() if job.forward_logs is True else None
        fork = job.start_method == "fork"
        around = None if fork else ParentEnvironment.of_this_process()
        return WorkerConfig(
            job.shards, job.random_seed, levels, around, job.trace, self._thread_limits
        )

    @functools.cached_property
    def _thread_limits(self) -> dict[str, str]:
        given = self._job.threads_per_worker
        threads = given or self._job.share_of(usage.cpus())
        return native_threads.limits(threads, given is not None, os.environ)

    @functools.cached_property
    def _loaded(self) -> native_threads.Loaded | None:
        """The native libraries that forked workers inherit."""
        return native_threads.Loaded() if self._job.start_method == "fork" else None

    def _open_wake_up(self) -> None:
        wake, woken = socket.socketpair()
        wake.setblocking(False)
        for end in (wake, woken):
            close_in_children(end)
            self._resources.callback(end.close)
        self._wake = wake
        self._poller.register(woken, select.POLLIN)

    def _start_one(self, index: int) -> Watched:
        job, plan = self._job, self._plans[index]
        part = Part(index, plan.shards, self._credit(index), job.longest_wait_s is not None)
        with contextlib.ExitStack() as passing, contextlib.ExitStack() as undo:
            ours, its = pair()
            passing.callback(its.close)
            undo.callback(ours.close)
            read, write = map(Descriptor, os.pipe())
            passing.callback(read.close)
            undo.callback(write.close)
            memory = Descriptor(open_ring())
            passing.callback(memory.close)
            heard, its_stack = stacks.pipe() if part.is_asked else (None, None)
            if heard is not None and its_stack is not None:
                passing.callback(its_stack.close)
                undo.callback(heard.close)
            task_socket = self._task_socket()
            if task_socket is not None:
                passing.callback(task_socket.close)
            for thing in (ours, write):
                close_in_children(thing)
            packets, ring = Packets(ours), Ring.of(memory.fileno())
            ring.words[LIMIT] = part.credit.items  # before the start: the worker may send at once
            forked = functools.partial(
                main_forked,
                its,
                read,
                ring,
                self._config,
                self._loaded,
                part,
                job.source,
                job.on_error,
                task_socket,
                its_stack,
            )
            process = launch(job.start_method, its, read, forked, self._thread_limits)
            if self._payload is not None:
                passed = [self._payload, memory, its_stack, task_socket]
                fds = [thing.fileno() for thing in passed if thing is not None]
                packets.send(pickle.dumps(part), fds)
            undo.pop_all()
        name = f"worker {index} (process {process.pid}, {job.start_method})"
        channel = ItemReceiver(packets, ring, part.credit, name)
        pidfd = open_pidfd(process.pid)
        worker = Watched(
            index, job.start_method, process, channel, write, pidfd, plan.shards, heard
        )
        for fd in [channel.fileno()] + ([] if pidfd is None else [pidfd.fileno()]):
            self._by_fd[fd] = worker
            self._poller.register(fd, select.POLLIN)
        return worker

    def _credit(self, index: int) -> Credit:
        job = self._job
        quota = split_bound(job.max_queue_size, len(self._plans))[index]
        share = None if job.max_queue_bytes is None else job.max_queue_bytes // len(self._plans)
        return Credit(quota, share, ask=not job.ordered)

    def _task_socket(self) -> socket.socket | None:
        """Return the socket from which a worker takes tickets, to be closed; None for shards."""
        return None

    # --- run ---

    def begin(self, epoch: Epoch) -> None:
        check_owner(self._owner)
        self._epoch = epoch
        for worker in self._workers:
            worker.channel.begin(epoch.part(worker.shards))

    def wait(self, order: Order, deadline: float | None) -> Failure | None:
        check_owner(self._owner)
        expired = False
        self._failed = None
        self._note_end()
        while not order.done:
            if self._closed:
                raise Closed("the enqueuer was stopped")
            wanted = self._worker_of(order.turn())
            found = self._with_message(wanted)
            if self._closed:  # a handler of a log record has called stop()
                continue
            if found is not None:
                match found.channel.other():
                    case None:
                        return None
                    case End() as end:
                        self._ending = found.channel, found.channel.position, end, order
                        self._note_end()
                    case Failure() as failure:
                        failure = dataclasses.replace(failure, worker=str(found))
                        self._failed = found.channel
                        return failure
                continue
            dead = self._dead(wanted, order)
            if dead is not None:
                death = self._replace(dead, order)
                if death is not None:
                    return death
                continue
            if expired:
                raise DeadlineExpired("no batch in time")
            self._loop_meter.pause(None if wanted is None else wanted.index)
            deadline = until(deadline, self._job.longest_wait_s)
            watched = self._workers if wanted is None else [wanted]
            is_coming = self._ask_for(wanted)
            self._sleep(watched, is_coming, deadline)
            expired = deadline is not None and time.monotonic() >= deadline
        return None

    def _note_end(self) -> None:
        """Note the end of a shard that is next, and pass over it; or finish that.

        The end must not stay behind after an interrupt: it would end the shard in the next epoch.
        """
        if self._ending is not None:
            channel, position, end, order = self._ending
            if channel.position == position:
                order.ended(end.shard, end.state, end.number)
                channel.pass_over()
            self._ending = None

    def pass_over(self) -> None:
        if self._failed is not None:
            self._failed.pass_over()

    def take(self, order: Order) -> Iterator[Item]:
        assert isinstance(order, ShardOrder)
        shard = order.turn()
        if shard is ANY or len(self._workers) == 1:
            return self._workers[self._found].channel.items(self._bunch, order)
        return self._take_in_turn(order)

    def _take_in_turn(self, order: ShardOrder) -> Iterator[Item]:
        for _ in range(self._bunch):
            worker = None if order.done else self._worker_of(order.turn())
            if worker is None or not worker.channel.has_message:
                return
            yield from worker.channel.items(1, order)

    def acknowledge(self) -> None:
        for worker in self._workers:
            if not worker.channel.is_settled:
                worker.channel.acknowledge()
                worker.channel.grant(self._room())

    def cpus(self) -> float:
        return usage.cpus()

    def worker_bytes(self) -> int | None:
        found = (usage.own_bytes(worker.process.pid) for worker in list(self._workers))
        return max((size for size in found if size is not None), default=None)

    def measures(self) -> list[WorkerStats]:
        return [worker.measure() for worker in list(self._workers)]

    def waiting(self) -> int:
        check_owner(self._owner)
        return sum(worker.channel.waiting for worker in self._workers)

    def has_news(self, order: Order) -> bool:
        self._poll(time.monotonic())
        return any(
            worker.channel.has_message or worker.state is WorkerState.DEAD
            for worker in self._workers
        )

    def look(self, order: Order) -> WaitSnapshot:
        able = stacks.ask([w for w in self._workers if w.state is WorkerState.RUNNING])
        workers = [_snapshot_of(worker, worker.stacks in able) for worker in self._workers]
        return WaitSnapshot(self._awaited(order), self.waiting(), first_for(order, workers))

    def _awaited(self, order: Order) -> str:
        return awaited(order)

    def _worker_of(self, shard: int | None) -> Watched | None:
        return None if shard is None else self._workers[self._owners[shard]]

    def _with_message(self, wanted: Watched | None) -> Watched | None:
        """Return the worker whose message is next, if any; read its packets first."""
        for worker in in_rotation(self._workers, self._found) if wanted is None else (wanted,):
            if worker.channel.has_packets or worker.channel.records:
                self._read(worker)
            if worker.channel.has_message:
                self._found = worker.index
                return worker
        return None

    def _room(self) -> int:
        """Return how many more items may wait; an item that was wanted may have taken a place."""
        return self._job.max_queue_size - sum(worker.channel.load for worker in self._workers)

    def _dead(self, wanted: Watched | None, order: Order) -> Watched | None:
        """Return a worker whose death must be reported now; all that it sent was delivered.

        With `ordered`, another worker's turn may come first. If the loop had to wait for that
        worker, the death is reported at once.
        """
        for worker in self._workers:
            told = worker.state is not WorkerState.DEAD or worker.channel.has_message
            if not told and (worker is wanted or order.next_of(worker.shards) is not None):
                return worker
        return None

    def _replace(self, dead: Watched, order: Order) -> Failure | None:
        """Replace a dead worker; return a failure if that is not allowed, or fails.

        All that the dead worker sent was delivered, so each of its shards begins with the first
        item that it did not send.
        """
        shard = order.next_of(dead.shards)
        if shard is None:  # it had sent all of this epoch
            shard = dead.shards[0]
        number = order.number_of(shard)
        with interrupts.held():  # else a worker might run that is in no list
            new = self._successor(dead, (shard, number), f"shard {shard}, item {number}")
            if isinstance(new, Failure):
                return new
            if new is not None:
                new.channel.begin(Epoch(self._epoch.number, order.rest()).part(new.shards))
        return None

    def _successor(
        self, dead: Watched, place: tuple[int, int], name: str
    ) -> Watched | Failure | None:
        """Start a worker in the place of a dead one. Called with interrupts held.

        Args:
            dead: Worker that has ended, and whose messages were delivered.
            place: Shard and item at which it died.
            name: The same place in words.

        Returns:
            The new worker; the failure, if no more restarts are allowed or the start failed; None
            if `stop()` was called meanwhile.
        """
        often = history(self._deaths, place, self._job.max_restarts)
        error = WorkerDied(death_message(dead) + often, dead.index, dead.exitcode)
        failure = Failure(*place, error, worker=str(dead))
        if len(self._deaths) + self._job.restarts >= self._job.max_restarts:
            return failure
        try:
            worker = self._start_one(dead.index)
        except (OSError, StartError) as trouble:
            error.__cause__ = trouble
            return failure
        self._deaths.append(place)
        if self._closed:  # stop() was called, and does not know of this worker
            worker.send_signal(signal.SIGKILL)
            self._end(worker)
            return None
        self._started = time.monotonic()
        worker.before = dead.measure()
        self._workers[self._workers.index(dead)] = worker
        self._end(dead)
        _log.warning(
            "%s %s; %s goes on with %s (restart %d, of max_restarts=%d)",
            str(dead),  # as text: a handler may keep the record, and with it descriptors
            how_it_ended(dead),
            str(worker),
            name,
            len(self._deaths) + self._job.restarts,
            self._job.max_restarts,
        )
        return worker

    def _ask_for(self, wanted: Watched | None) -> bool:
        """Grant credit for the item that the consumer is about to wait for.

        Returns:
            Whether a worker has an item that it may send now.
        """
        if wanted is not None:
            wanted.channel.grant(self._room(), wanted=True)
            return True
        is_coming = False
        for worker in in_rotation(self._workers, self._found):
            now = worker.channel.is_asking and not is_coming
            is_coming = is_coming or now
            worker.channel.grant(self._room(), wanted=now)
        return is_coming

    def _sleep(self, watched: list[Watched], is_coming: bool, deadline: float | None) -> None:
        """Sleep until something comes, and read it. Woken by packets, deaths and close()."""
        try:
            for worker in watched:
                worker.channel.arm_wake_up()
            if not any(_has_news(worker, is_coming) for worker in watched):
                self._poll(deadline)
        finally:
            for worker in watched:
                worker.channel.disarm_wake_up()

    def _poll(self, deadline: float | None) -> None:
        starting = [w for w in self._workers if w.state is WorkerState.STARTING]
        limits = [] if deadline is None else [deadline]
        if starting:
            limits.append(self._started + START_TIMEOUT_S)
        timeout = None if not limits else max(0.0, min(limits) - time.monotonic()) * 1000
        ready = self._poller.poll(timeout)
        for fd, _ in ready:
            worker = self._by_fd.get(fd)
            if worker is not None:
                if worker.pidfd is not None and fd == worker.pidfd.fileno():
                    worker.gone = True
                self._read(worker)
        if starting and not ready and time.monotonic() >= self._started + START_TIMEOUT_S:
            raise StartError(
                f"{starting[0]} did not respond within {START_TIMEOUT_S:g} s. With fork, a likely "
                "cause is a lock that another thread held: use mp_context='forkserver'"
            )

    def _read(self, worker: Watched) -> None:
        """Read the messages of a worker, and reap it if it has ended."""
        if worker.state in (WorkerState.DEAD, WorkerState.ENDED):
            return
        worker.channel.pump()
        self._deliver_records(worker)
        if self._closed:  # a handler of a log record has called stop()
            return
        if worker.channel.is_ready and worker.state is WorkerState.STARTING:
            worker.move(WorkerState.RUNNING)
        if worker.gone or worker.channel.ended:
            self._reap_dead(worker)

    def _reap_dead(self, worker: Watched) -> None:
        """Read the last messages of a process that has ended, and find out how it ended."""
        worker.move(WorkerState.DRAINING)
        self._forget(worker)
        worker.channel.pump()  # messages that it sent after the last reading
        self._deliver_records(worker)
        worker.exitcode = wait_for_exitcode(worker, _EXITCODE_S)
        if worker.exitcode is None:  # it runs on: the user's code has closed all descriptors
            worker.send_signal(signal.SIGKILL)
            wait_for_exitcode(worker, _EXITCODE_S)
        worker.move(WorkerState.DEAD)

    def _deliver_records(self, worker: Watched) -> None:
        records = worker.channel.records
        while records:
            logs.deliver(records.popleft())

    # --- stop ---

    def close(self) -> None:
        if self._owner != os.getpid():
            return
        self._closed = True
        for worker in self._workers:
            if worker.state is not WorkerState.ENDED:
                worker.channel.ask_to_stop()
        with contextlib.suppress(OSError):
            if self._wake is not None:
                self._wake.send(b"\0")

    def stop(self, timeout: float) -> None:
        if self._owner == os.getpid():
            with interrupts.held():
                self._stop(timeout)

    def _stop(self, timeout: float) -> None:
        """End the workers. A signal handler may end a wait; then it can be called again."""
        self.close()
        end = time.monotonic() + timeout
        escalation = min(ESCALATION_S, timeout / 2)
        self._reap_until(end - escalation)
        for number, limit in ((signal.SIGTERM, end - escalation / 2), (signal.SIGKILL, end)):
            for worker in self._left():
                worker.send_signal(number)
            self._reap_until(limit)
        # SIGKILL ends a process at once, unless it waits for a disk that does not respond.
        self._reap_until(end + ESCALATION_S)
        for worker in self._left():
            warnings.warn(
                f"{worker} could not be killed; it may hang in a system call",
                StopWarning,
                stacklevel=3,
            )
        self._workers = self._left()
        if not self._workers:
            _running.discard(self)
            self._resources.close()
            self._by_fd.clear()

    def _left(self) -> list[Watched]:
        return [worker for worker in self._workers if worker.state is not WorkerState.ENDED]

    def _reap_until(self, deadline: float) -> None:
        """Read and drop the messages of the workers, until all have ended or time is over."""
        for worker in self._left():
            if worker.state is WorkerState.DEAD:
                self._end(worker)
        while left := self._left():
            poller = select.poll()
            for worker in left:
                end = worker.channel if worker.pidfd is None else worker.pidfd
                poller.register(end.fileno(), select.POLLIN)
                if not worker.channel.ended:  # an ended channel would wake the poll every time
                    poller.register(worker.channel.fileno(), select.POLLIN)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            if not interrupts.interruptible(poller.poll, remaining * 1000 + 1):
                return
            for worker in left:
                self._reap(worker)

    def _reap(self, worker: Watched) -> None:
        with contextlib.suppress(Exception):  # it is ending: errors no longer matter
            worker.channel.pump()
        self._deliver_records(worker)
        if has_ended(worker):
            self._end(worker)

    def _end(self, worker: Watched) -> None:
        try:
            if worker.state is not WorkerState.DEAD:
                self._forget(worker)
                with contextlib.suppress(Exception):
                    worker.channel.pump()
                self._deliver_records(worker)
                worker.exitcode = wait_for_exitcode(worker, _EXITCODE_S)
        finally:  # the user's handler of a log record may raise anything
            worker.close()
            with contextlib.suppress(OSError):
                remove_names_of(worker.process.pid)
            # Code that runs in the wait above, such as a finalizer, may have called stop().
            if worker.state is not WorkerState.ENDED:
                worker.move(WorkerState.ENDED)

    def _forget(self, worker: Watched) -> None:
        """Stop polling the descriptors of a worker."""
        for fd in [fd for fd, owner in self._by_fd.items() if owner is worker]:
            del self._by_fd[fd]
            self._poller.unregister(fd)


def _has_news(worker: Watched, is_coming: bool) -> bool:
    """Return whether a worker sent something before it was asked to wake the consumer."""
    channel = worker.channel
    if channel.has_message:
        return True
    if worker.state is WorkerState.DEAD:
        return False
    return channel.has_packets or (channel.is_asking and not is_coming)


def _snapshot_of(worker: Watched, was_asked: bool) -> WorkerSnapshot:
    if worker.state in (WorkerState.DEAD, WorkerState.ENDED):
        why = "has ended"
    elif was_asked:
        why = (
            f"did not tell its stack within {stacks.ASK_S:g} s: it is stopped, has the signal "
            "blocked, or hangs in the system"
        )
    else:
        why = "cannot tell its stack: it is starting, or its code has reset the signal for that"
    stack = worker.stacks.stack if worker.stacks is not None and was_asked else None
    return WorkerSnapshot(str(worker), worker.shards, stack, why)


# --- the end of the interpreter ----------------------------------------------------------------

_running: weakref.WeakSet[ProcessBackend] = weakref.WeakSet()
_EXIT_TIMEOUT_S = 2.0


@functools.cache
def _register_exit() -> None:
    # multiprocessing joins its children at exit, without a limit. This runs before that.
    multiprocessing.util.Finalize(None, _stop_all, exitpriority=100)


# In forked children, multiprocessing forgets all registered finalizers.
os.register_at_fork(after_in_child=_register_exit.cache_clear)


def _stop_all() -> None:
    for backend in list(_running):
        backend.stop(_EXIT_TIMEOUT_S)
