r"""One worker process as the consumer's process sees it: its start, its state, its end.

    STARTING --READY--> RUNNING --its process ends, and all is read--> DEAD
        \__________________\_________ was asked to stop ___________\--> ENDED

    fork        multiprocessing's own process: the child has everything, threads' locks included
    spawn       a fresh interpreter
    forkserver  a fresh interpreter, which runs no user code and forks on request

The fork server (`fork_server.py`) and the spawn are our own. The spawn of multiprocessing reads and
fixes the global start method, and imports the user's main module in the child, so scripts need a
guard. A child receives its job over its channel; all workers have one payload.

    Starter.start(): channel, status, lifeline, stack pipe -> launch() -> the ends that the worker
                     has are closed here -> ProcessWorker
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing.context
import multiprocessing.popen_fork
import os
import pickle
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from enqueuer.backends.job import Job
from enqueuer.backends.pool import HAS_ENDED, Death, Stack, WorkerSnapshot, WorkerState
from enqueuer.backends.process.child import (
    ASK,
    Ends,
    ParentEnvironment,
    ProcessConfig,
    ProcessStart,
    main_forked,
)
from enqueuer.backends.process.fork_server import (
    JOB_SIGNALS,
    Served,
    fresh_interpreter,
    program,
    readable,
    server,
    silent_children,
)
from enqueuer.backends.stall import decode_threads, parse
from enqueuer.common.descriptors import Closable, Descriptor, close_in_children, is_portable
from enqueuer.errors import ElementTimeout, StartError
from enqueuer.monitoring import usage
from enqueuer.monitoring.meters import WorkerStats, clock, worker_stats
from enqueuer.order.messages import Epoch, Failure
from enqueuer.transport.channel import (
    Credit,
    Packets,
    Status,
    TaskQueue,
    open_status,
    pair,
    send_descriptors,
)
from enqueuer.transport.memory import write_payload
from enqueuer.transport.receiver import ItemReceiver
from enqueuer.workers import logs, native
from enqueuer.workers.plan import COLLATING, FETCHING
from enqueuer.workers.running import WorkerConfig
from enqueuer.workers.sources import FunctionSource, Source
from enqueuer.workers.tasks import TaskSource
from enqueuer.workers.threads import ThreadSnapshot


class Child:
    """A child of this process, be it forked or a fresh interpreter.

    A forked one is a process of multiprocessing that is not on its list of children. At its exit,
    multiprocessing joins all children on that list. In a copy of this process that os.fork() has
    made, these are children of another process, and joining them is an error.
    """

    def __init__(self, popen: subprocess.Popen[bytes] | multiprocessing.popen_fork.Popen) -> None:
        self._popen, self.pid = popen, popen.pid

    def has_pid(self) -> bool:
        """Return whether `pid` is still its own; once it was reaped, another may have got it."""
        if not hasattr(os, "waitid"):
            return _exists(self.pid)
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True

    def exitcode(self, timeout: float) -> int | None:
        # Not wait(timeout) of multiprocessing: it waits for a pipe, which a grandchild may hold
        # open. Once the user's code has closed that pipe in the worker, it waits without a limit.
        deadline = time.monotonic() + timeout
        while (code := self._popen.poll()) is None and _exists(self.pid):
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.001)
        return code

    def close(self) -> None:
        """Close the pipes that multiprocessing has to a child."""
        if isinstance(self._popen, multiprocessing.popen_fork.Popen):
            self._popen.close()


def fork(target: Callable[[], None]) -> Child:
    """Fork a child that calls a function.

    Raises:
        StartError: This process may have no children.
    """
    if multiprocessing.current_process().daemon:
        raise StartError(
            "this process is a daemonic child of multiprocessing, which may not fork "
            "workers (a worker of a DataLoader, perhaps); with a generator function "
            "use backend=Processes(start_method='forkserver'), else backend='thread'"
        )
    process = multiprocessing.context.ForkProcess(target=target)
    # Not daemonic, so that it may have children. The lifeline ends it with this process.
    process.daemon = False
    with silent_children():
        return Child(multiprocessing.popen_fork.Popen(process))


def _exists(pid: int) -> bool:
    """Return whether a process exists, be it a zombie; False if other code has reaped it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


Launched: TypeAlias = Child | Served
"""A process that was started."""


# Seconds for all workers at once; an answer takes about a millisecond.
ASK_S = 1.0
# Bytes at once: all that a pipe holds.
_MAX_BYTES = 1 << 16


class Stacks(Descriptor):
    """The parent's end of the pipe on which one worker answers."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._text = ""
        self._can_answer = False
        # Whether the worker was asked last time.
        self.is_asked = False
        # The last answer of the worker: its stack, or those of its threads.
        self.stack: Stack | None = None
        self.threads: list[ThreadSnapshot] | None = None

    def prepare(self) -> bool:
        """Forget what an earlier question brought; return whether another one may be asked."""
        self.receive()
        self._text, self.stack, self.threads, self.is_asked = "", None, None, False
        return self._can_answer

    def receive(self) -> bool:
        """Read what has come; return whether the answer is whole, or none will come."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.fileno(), _MAX_BYTES):
                self._can_answer = True
                self._text += data.decode(errors="replace")
            # The worker has ended.
            return True
        self.threads = decode_threads(self._text)
        if self.threads is not None:
            return True
        stack, is_whole = parse(self._text)
        if is_whole:
            self.stack = stack
        return is_whole


def stack_pipe() -> tuple[Stacks, Descriptor]:
    """Return the parent's end, and the descriptor that a worker gets.

    Raises:
        OSError: There is no descriptor left.
    """
    read, write = os.pipe()
    for end in (read, write):
        # A worker must not wait in the signal's handler.
        os.set_blocking(end, False)
    return Stacks(read), Descriptor(write)


@dataclass(eq=False, repr=False)
class ProcessWorker:
    """A worker process as this process sees it; see `enqueuer.backends.pool.Worker`.

    Attributes:
        name: Its name, with its process and how that was started.
        process: The process.
        inbox: This process's end of its channel.
        lifeline: Pipe whose closing ends the worker.
        pidfd: Descriptor that shows its end; None where there are none.
        stacks: Where it writes its stack if it is asked; None: it is never asked.
        exitcode: Exit code of the process, once it is known.
        gone: Whether the pidfd has shown its end.
        late: The limit and where it was when it was killed, as an element took too long; and when
            what it ran then had begun, by its thread. None: it was not killed.
        began: When it was started.
    """

    index: int
    name: str
    process: Launched
    inbox: ItemReceiver
    lifeline: Descriptor
    pidfd: Descriptor | None
    shards: tuple[int, ...]
    stacks: Stacks | None = None
    state: WorkerState = WorkerState.STARTING
    exitcode: int | None = None
    gone: bool = False
    late: tuple[str, str, Mapping[int, int]] | None = None
    began: int = field(default_factory=clock)
    is_leaving: bool = False

    def move(self, new: WorkerState) -> None:
        """Change state; the only method that assigns `state` after the start."""
        self.state = self.state.to(new)

    def begin(self, epoch: Epoch) -> None:
        """Have it run its shards for an epoch."""
        self.inbox.control.begin(epoch)

    def ask_to_exit(self) -> None:
        """Have it exit; what it cannot finish, another worker does."""
        self.is_leaving = True
        self.inbox.control.ask_to_stop()

    def death(self) -> Death:
        """Return how it ended, once it is dead, with a remedy."""
        if self.late is not None:
            how = f"was killed, as an element took longer than {self.late[0]}"
            return Death(how, f"{self} {how}.", self.exitcode, counts=False, late=self._late())
        how = _how_it_ended(self.exitcode)
        advice = _ADVICE.get(
            self.exitcode, "Look for os._exit or a crash in the libraries that the generator uses."
        )
        message = f"{self} {how}; what it had sent was delivered. {advice}"
        watches = self.inbox.status.watches.read()
        running = tuple((place, number) for began, place, number in watches if began)
        return Death(how, message, self.exitcode, running=running)

    def runs(self) -> dict[int, int]:
        """Return when what it runs now has begun, by its thread; see `Watch`."""
        records = enumerate(self.inbox.status.watches.read())
        return {thread: began for thread, (began, _, _) in records if began}

    def _late(self) -> tuple[Failure, ...]:
        """Return the failures of what it was killed for, without what it has completed since."""
        assert self.late is not None, "it was killed"
        (limit, where, late), found = self.late, []
        for thread, (began, shard, number) in enumerate(self.inbox.status.watches.read()):
            if late.get(thread) != began:
                continue
            what, advice = _CALLS.get(shard, "an element"), "give it more time, or leave it out"
            if self.shards:
                what = f"item {number} of shard {shard}"
                advice += "; behind it, only a function with first_item=0 goes on"
            text = f"{what} took longer than {limit}, so its worker was killed: {advice}"
            found.append(Failure(shard, number, ElementTimeout(f"{text}. {where}")))
        return tuple(found)

    def measure(self, has_threads: bool) -> WorkerStats:
        """Return what it has done so far; `has_threads`: several run the elements."""
        inbox, pid = self.inbox, self.process.pid
        used, blocks = usage.of_process(pid, has_threads), inbox.blocks.size
        return worker_stats(self, inbox.meter, inbox.sent, used, self.began, blocks)

    def has_ended(self, timeout: float = 0) -> bool:
        """Return whether the process is gone, or goes within `timeout` seconds."""
        if self.pidfd is None:
            return self.inbox.control.packets.ended
        return readable(self.pidfd, timeout)

    def wait_for_exitcode(self, timeout: float) -> None:
        """Wait for the process to end, and note its exit code if it is known."""
        # It can be collected once; other code may have asked for it.
        if self.exitcode is None and (self.pidfd is None or self.has_ended(timeout)):
            self.exitcode = self.process.exitcode(timeout)

    def collect_exitcode(self, timeout: float) -> None:
        """Wait for the exit code of a process whose channel has ended; then kill the process."""
        self.wait_for_exitcode(timeout)
        if self.exitcode is None:
            # The user's code may have closed all its descriptors. Nothing asks for the code again,
            # so a busy machine must have time for the end.
            self.send_signal(signal.SIGKILL)
            self.process.exitcode(10 * timeout)

    def snapshot(self) -> WorkerSnapshot:
        """Return where it is, as it has answered the last question."""
        stacks = self.stacks
        assert stacks is not None, "it is asked if a wait may be cut"
        if self.state in HAS_ENDED:
            return WorkerSnapshot(str(self), self.shards, None, "has ended")
        if stacks.threads is not None:
            why = "waits for a task"
        elif stacks.is_asked:
            why = (
                f"did not send its stack within {ASK_S:g} s: it is stopped, has the signal "
                "blocked, or hangs in the system"
            )
        else:
            why = "cannot send its stack: it is starting, or its code has reset the signal for that"
        return WorkerSnapshot(str(self), self.shards, stacks.stack, why, stacks.threads or ())

    def send_signal(self, number: int) -> None:
        """Signal the process, and never another one that has got its pid."""
        with contextlib.suppress(ProcessLookupError):
            if self.pidfd is not None and _signalled(self.pidfd, number):
                return
            if self.process.has_pid():
                os.kill(self.process.pid, number)

    def handles(self, number: int) -> bool:
        """Return whether the process has a handler for a signal; True if that is not known."""
        try:
            with open(f"/proc/{self.process.pid}/status") as file:
                caught = next(line for line in file if line.startswith("SigCgt:"))
        except (OSError, StopIteration):
            return True
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)

    def close(self) -> None:
        """Close all that this process has of it."""
        self.inbox.close()
        for resource in (self.process, self.lifeline, self.stacks, self.pidfd):
            if resource is not None:
                resource.close()

    def __str__(self) -> str:
        return self.name


def _signalled(pidfd: Descriptor, number: int) -> bool:
    """Signal a process; return False where a sandbox forbids that for a pidfd."""
    try:
        signal.pidfd_send_signal(pidfd.fileno(), number)
    except ProcessLookupError:
        raise
    except OSError:
        return False
    return True


def ask_stacks(workers: Iterable[ProcessWorker]) -> None:
    """Ask workers where they are, all at once, and wait for their answers."""
    asked = []
    for worker in workers:
        # The user's code may have reset the signal after the worker had said that it handles it.
        if worker.stacks is not None and worker.stacks.prepare() and worker.handles(ASK):
            worker.stacks.is_asked = True
            asked.append(worker.stacks)
            worker.send_signal(ASK)
    end = time.monotonic() + ASK_S
    for stacks in asked:
        while not stacks.receive() and (remaining := end - time.monotonic()) > 0:
            readable(stacks, remaining)


def open_pidfd(process: Launched) -> Descriptor | None:
    """Return a descriptor that shows a process's end; None where there are none."""
    if is_portable() or not hasattr(os, "pidfd_open"):
        return None
    try:
        pidfd = Descriptor(os.pidfd_open(process.pid))
    except OSError:
        # The process was reaped already, the kernel is older than 5.3, or a sandbox forbids it.
        return None
    # Asked only now: before, the process could still be reaped in between.
    if not process.has_pid():
        pidfd.close()
        return None
    close_in_children(pidfd)
    return pidfd


# What was called if not one element took too long.
_CALLS = {FETCHING: "the call that fetches all elements of a batch", COLLATING: "collate"}
_ADVICE: dict[int | None, str] = {
    -signal.SIGKILL: "Unless you killed it, the system was probably out of memory: try fewer "
    "workers, smaller batches or a smaller max_queue_size.",
    -signal.SIGSEGV: "A crash in C code; its Python stack was written to stderr.",
    **dict.fromkeys(
        [-number for number in JOB_SIGNALS],
        "Another program has sent it, perhaps a job scheduler. Workers pass this signal over, but "
        "the code that this one runs has reset its handler: look for signal.signal.",
    ),
}


def _how_it_ended(code: int | None) -> str:
    """Say how a worker that was not asked to ended: "was killed by SIGKILL"."""
    if code is None:
        return "ended with an unknown exit code (other code of this program collected it)"
    if code < 0:
        return f"was killed by {_signal_name(-code)}"
    return f"ended with exit code {code} and said nothing"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# --- the start ----------------------------------------------------------------------------------


def resource_tracker() -> list[int]:
    """Return the descriptor of this program's resource tracker, which is started if none runs.

    A worker that started one of its own would destroy, at its end, each `SharedMemory` that it has
    opened by its name.

    Returns:
        Nothing if the system has no room for another process, or the standard streams are closed.
    """
    # Its import takes longer than to fork a worker.
    module = importlib.import_module("multiprocessing.resource_tracker")
    # It ignores the others of a job scheduler's signals, and inherits these as blocked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        with contextlib.suppress(OSError, ValueError):
            return [module.getfd()]
        return []
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_local(source: Source | TaskSource) -> bool:
    """Return whether the user's code, its class, or one of its module was made by a function."""
    if isinstance(source, TaskSource):
        parts: list[object] = [source.map, source.items]
    else:
        parts = [source.function if isinstance(source, FunctionSource) else source.iterable]
    names = [getattr(part, "__qualname__", type(part).__qualname__) for part in parts]
    spaces = [getattr(part, "__globals__", {}) for part in parts]
    kinds = (kind for space in spaces for kind in list(space.values()) if isinstance(kind, type))
    return any("<locals>" in str(name) for name in (*names, *(k.__qualname__ for k in kinds)))


_INSTEAD = "backend='thread' or backend=Processes(start_method='fork')"


class Starter:
    """Starts worker processes.

    Args:
        job: Description of what they run.

    Attributes:
        known: Definitions that the workers get with the source, by their ids; None if the workers
            are forked, and so have all.
    """

    def __init__(self, job: Job) -> None:
        self.known: dict[str, Any] | None = None if job.start_method == "fork" else {}
        self._job = job
        self._plans = job.plans()
        self._queue: TaskQueue | None = None
        self._payload: Descriptor | None = None
        # Of objects that the source shares with the workers.
        self._shared: list[Descriptor] = []
        # The source of forked workers, which inherit it.
        self._source = job.source

    def open(self, resources: contextlib.ExitStack, queue: TaskQueue | None) -> None:
        """Pickle the source if the workers are not forked, else pack its list if that is long.

        Args:
            resources: What is closed after the last worker has ended.
            queue: Queue from which the workers take tickets; None for shards.

        Raises:
            SourceNotPicklable: The source cannot be sent.
        """
        job, self._queue = self._job, queue
        if self.known is None:
            if isinstance(job.source, TaskSource):
                self._source = job.source.packed()
            if _is_local(job.source):
                # Its errors may be local as well, and a worker that has run out of descriptors or
                # memory could not import what sends them.
                from enqueuer.transport.definitions import announce

                announce(job.source)
        else:
            # Forked workers do not need it, and its import takes some milliseconds.
            from enqueuer.backends.payload import Handover, pickled_source, program_settings

            shared = Handover()
            resources.callback(shared.close)
            # The source has a pickle of its own: an error while that is loaded is the user's.
            where = f"a process started by {job.start_method}"
            pickled = pickled_source(
                job.source, job.on_error, where, _INSTEAD, self.known, shared, job.initializer
            )
            head = pickle.dumps((self._config, program_settings(), *pickled), protocol=5)
            self._shared = shared.descriptors
            self._payload = Descriptor(write_payload(head, shared.buffers))
            # The source may have made them for its pickle.
            shared.buffers.clear()
            resources.callback(self._payload.close)
            if job.start_method == "forkserver":
                # It starts beside the fork server; with spawn, beside the first worker.
                resource_tracker()

    @functools.cached_property
    def _config(self) -> ProcessConfig:
        """The configuration of all workers; made once, as it reads the levels of all loggers."""
        job = self._job
        levels = logs.Levels.of_this_process() if job.forward_logs is True else None
        fork = job.start_method == "fork"
        around = None if fork else ParentEnvironment.of_this_process()
        worker = WorkerConfig(job.shards, job.random_seed, levels, job.trace)
        is_watched, keep = job.element_timeout is not None, job.keep_freed_memory
        return ProcessConfig(worker, around, self._thread_limits, keep, is_watched)

    @functools.cached_property
    def _thread_limits(self) -> dict[str, str]:
        explicit = self._job.threads_per_worker
        threads = explicit or self._job.share_of(usage.cpus())
        return native.limits(threads, explicit is not None, os.environ)

    @functools.cached_property
    def _loaded(self) -> native.Loaded:
        """The native libraries that forked workers inherit."""
        return native.Loaded(self._thread_limits)

    def start(self, index: int, room: Callable[[], int] | None) -> ProcessWorker:
        """Start a worker.

        Args:
            index: Index of the worker.
            room: Function that returns how many more items may wait, over all workers; None: any
                number, as tickets are the bound.

        Raises:
            OSError: The system has no room for it.
            StartError: It cannot be started.
        """
        # With tasks, all plans are alike.
        plan, is_asked = self._plans[index % len(self._plans)], self._job.asks_stacks
        start = ProcessStart(index, plan.shards, self._credit(index), is_asked, len(self._shared))
        # What only the worker needs is closed here once it has started; the rest, if it does not.
        with contextlib.ExitStack() as passed, contextlib.ExitStack() as undo:

            def connect(ours: Closable, its: Closable) -> None:
                undo.callback(ours.close)
                passed.callback(its.close)
                close_in_children(ours)

            sock, its_sock = pair()
            connect(sock, its_sock)
            its_lifeline, lifeline = map(Descriptor, os.pipe())
            connect(lifeline, its_lifeline)
            stacks = its_stack = None
            if is_asked:
                stacks, its_stack = stack_pipe()
                connect(stacks, its_stack)
            memory = passed.enter_context(contextlib.closing(Descriptor(open_status())))
            status = Status.of(memory.fileno())
            tasks = None
            if self._queue is not None:
                tasks = passed.enter_context(self._queue.worker_socket())
            process = self.launch(Ends(its_sock, its_lifeline, status, its_stack, tasks), start)
            undo.callback(process.close)
            packets = Packets(sock)
            if self._payload is not None:
                self._send(packets, start, [self._payload, memory, its_stack, tasks])
            undo.pop_all()
        self._close_payload_after(index)
        name = f"worker {index} (process {process.pid}, {self._job.start_method})"
        inbox = ItemReceiver(packets, status, start.credit, name, room)
        pidfd = open_pidfd(process)
        return ProcessWorker(index, name, process, inbox, lifeline, pidfd, plan.shards, stacks)

    def _send(
        self,
        packets: Packets,
        start: ProcessStart,
        its: Iterable[socket.socket | Descriptor | None],
    ) -> None:
        """Send a worker what it needs; it has been started, and is not forked."""
        fds, tracker = [end.fileno() for end in its if end is not None], resource_tracker()
        packets.send(pickle.dumps(start._replace(has_tracker=bool(tracker))), fds + tracker)
        send_descriptors(packets, [shared.fileno() for shared in self._shared])

    def launch(self, ends: Ends, start: ProcessStart) -> Launched:
        """Start the process of a worker."""
        job = self._job
        if job.start_method == "fork":
            arguments = ends, self._config, start, self._loaded, self._source, job.on_error
            return fork(functools.partial(main_forked, *arguments, job.initializer))
        if job.start_method == "spawn":
            fds = ends.sock.fileno(), ends.lifeline.fileno()
            return Child(fresh_interpreter(program("main", *fds), fds, self._thread_limits))
        return server.fork(ends.sock, ends.lifeline)

    def _close_payload_after(self, index: int) -> None:
        """Give the memory of the payload back once no other worker can need it."""
        job = self._job
        is_last = index + 1 == len(self._plans)
        if self._payload is not None and is_last and not (job.may_replace or job.may_grow):
            self._payload.close()
            for shared in self._shared:
                shared.close()

    def _credit(self, index: int) -> Credit:
        job = self._job
        # The tickets are the bound, and one worker may run all of them.
        if self._queue is not None:
            tickets = job.max_queue_size + job.workers * job.source.tickets_at_once
            return Credit(tickets, None, ask=False)
        return Credit(*job.quota_of(index), ask=not job.ordered)
