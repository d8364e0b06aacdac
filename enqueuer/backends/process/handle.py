r"""One worker process as the consumer's process sees it: its start, its state, its end.

    STARTING --READY--> RUNNING --its process ends, and all is read--> DEAD
        \__________________\_________ was asked to stop ___________\--> ENDED

    fork        multiprocessing's own process: the child has everything, threads' locks included
    spawn       a fresh interpreter
    forkserver  a fresh interpreter, which runs no user code and forks on request

The fork server (`fork_server.py`) and the spawn are our own. The spawn of multiprocessing reads and
fixes the global start method, and imports the user's main module in the child, so scripts need a
guard. A child receives its job over its channel.
"""

from __future__ import annotations

import multiprocessing.context
import multiprocessing.popen_fork
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from enqueuer.backends.pool import Death, WorkerState
from enqueuer.backends.process import fork_server
from enqueuer.backends.process.fork_server import (
    Served,
    fresh_interpreter,
    program,
    readable,
    silent_children,
)
from enqueuer.backends.process.stack_dump import ASK, ASK_S, Stacks
from enqueuer.common.catching import raised_here, suppressed
from enqueuer.common.descriptors import Descriptor, close_in_children, is_portable
from enqueuer.errors import StartError
from enqueuer.monitoring import usage
from enqueuer.monitoring.meters import WorkerStats, clock, worker_stats
from enqueuer.transport.receiver import ItemReceiver
from enqueuer.workers.messages import Epoch


def launch(
    method: str,
    sock: socket.socket,
    lifeline: Descriptor,
    forked: Callable[[], None],
    environment: Mapping[str, str],
) -> Launched:
    """Start a process that has `sock` and `lifeline`.

    Args:
        method: "fork", "forkserver" or "spawn".
        sock: The worker's end of its channel.
        lifeline: Reading end of a pipe whose other end only this process has.
        forked: Function that a forked child calls; the others call `child.main`.
        environment: Variables that a fresh interpreter must have before it imports anything.
    """
    if method == "fork":
        return _Forked(forked)
    if method == "spawn":
        fds = sock.fileno(), lifeline.fileno()
        return _Spawned(fresh_interpreter(program("main", *fds), fds, environment))
    return fork_server.server.fork(sock, lifeline)


# Guards multiprocessing's list of children: Python 3.10 fails if one thread closes a process while
# another one starts one. Reentrant, as the garbage collector may run under it.
_children_lock = threading.RLock()


def _renew_lock() -> None:
    """Make a new lock in a forked child: a thread of the parent may hold the old one."""
    global _children_lock
    _children_lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class ForkProcess(multiprocessing.context.ForkProcess):
    """A child that only its parent joins.

    At its exit, multiprocessing joins all children that it knows of. In a copy of this process
    that os.fork() has made, these are children of another process, and joining them is an error.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._owner = os.getpid()

    def join(self, timeout: float | None = None) -> None:
        if os.getpid() == self._owner:
            super().join(timeout)


class _Child:
    """A child of this process."""

    pid: int

    def has_pid(self) -> bool:
        """Return whether `pid` is still its own; once it was reaped, another may have got it."""
        if not hasattr(os, "waitid"):
            return _exists(self.pid)
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        return True


class _Forked(_Child):
    """A child by fork."""

    def __init__(self, target: Callable[[], None]) -> None:
        self._process = ForkProcess(target=target)
        # Not daemonic, so that it may have children. The lifeline ends it with this process.
        self._process.daemon = False
        try:
            with _children_lock, silent_children():
                self._process.start()
        except AssertionError as error:
            raise StartError(
                "this process is a daemonic child of multiprocessing, which may not fork "
                "workers (a worker of a DataLoader, perhaps); with a generator function "
                "use backend=Processes(start_method='forkserver'), else backend='thread'"
            ) from error
        assert self._process.pid is not None
        self.pid = self._process.pid

    def exitcode(self, timeout: float) -> int | None:
        # Not join(timeout): it waits for a pipe, which a grandchild may hold open. Once the user's
        # code has closed that pipe in the worker, it waits without a limit.
        deadline = time.monotonic() + timeout
        while (code := self._process.exitcode) is None and _exists(self.pid):
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.001)
        if code is not None:
            with _children_lock:
                self._process.close()
        return code


class _Spawned(_Child):
    """A child by a fresh interpreter."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid

    def exitcode(self, timeout: float) -> int | None:
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return None


def _exists(pid: int) -> bool:
    """Return whether a process exists, be it a zombie; False if other code has reaped it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


Launched: TypeAlias = _Forked | _Spawned | Served
"""A process that was started."""


@dataclass(eq=False, repr=False)
class ProcessWorker:
    """A worker process as this process sees it; see `enqueuer.backends.pool.Worker`.

    Attributes:
        method: How it was started: "fork", "forkserver" or "spawn".
        process: The process.
        inbox: This process's end of its channel.
        lifeline: Pipe whose closing ends the worker.
        pidfd: Descriptor that shows its end; None where there are none.
        stacks: Where it writes its stack if it is asked; None: it is never asked.
        exitcode: Exit code of the process, once it is known.
        gone: Whether the pidfd has shown its end.
        began: When it was started.
    """

    index: int
    method: str
    process: Launched
    inbox: ItemReceiver
    lifeline: Descriptor
    pidfd: Descriptor | None
    shards: tuple[int, ...]
    stacks: Stacks | None = None
    state: WorkerState = WorkerState.STARTING
    exitcode: int | None = None
    gone: bool = False
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
        how = _how_it_ended(self.exitcode)
        advice = _ADVICE.get(
            self.exitcode, "Look for os._exit or a crash in the libraries that the generator uses."
        )
        message = f"{self} {how}; what it had sent was delivered. {advice}"
        return Death(how, message, self.exitcode)

    def measure(self, has_threads: bool) -> WorkerStats:
        """Return what it has done so far; `has_threads`: several run the elements."""
        inbox, pid = self.inbox, self.process.pid
        used, blocks = usage.of_process(pid, has_threads), inbox.blocks.size
        return worker_stats(self, inbox.meter, inbox.sent, used, self.began, blocks)

    def send_signal(self, number: int) -> None:
        """Signal the process, and never another one that has got its pid."""
        with suppressed(ProcessLookupError):
            if self.pidfd is not None and _signalled(self.pidfd, number):
                return
            if self.process.has_pid():
                os.kill(self.process.pid, number)

    def handles(self, number: int) -> bool:
        """Return whether the process has a handler for a signal; True if that is not known."""
        try:
            with open(f"/proc/{self.process.pid}/status") as file:
                caught = next(line for line in file if line.startswith("SigCgt:"))
        except raised_here(OSError, StopIteration):
            return True
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)

    def close(self) -> None:
        """Close all that this process has of it."""
        self.inbox.close()
        for one in (self.lifeline, self.stacks, self.pidfd):
            if one is not None:
                one.close()

    def __str__(self) -> str:
        return f"worker {self.index} (process {self.process.pid}, {self.method})"


def _signalled(pidfd: Descriptor, number: int) -> bool:
    """Signal a process; return False where a sandbox forbids that for a pidfd."""
    try:
        signal.pidfd_send_signal(pidfd.fileno(), number)
    except ProcessLookupError:
        raise
    except OSError:
        return False
    return True


def ask_stacks(workers: Iterable[ProcessWorker]) -> list[Stacks]:
    """Ask workers where they are, all at once, and wait for their answers.

    Returns:
        Those that could be asked; after an answer they have a `stack`.
    """
    # The user's code may have reset the signal after the worker had said that it handles it.
    asked = [
        (worker, worker.stacks)
        for worker in workers
        if worker.stacks is not None and worker.stacks.prepare() and worker.handles(ASK)
    ]
    missing = {stacks.fileno(): stacks for _, stacks in asked}
    poller = select.poll()
    for fd in missing:
        poller.register(fd, select.POLLIN)
    for worker, _ in asked:
        worker.send_signal(ASK)
    end = time.monotonic() + ASK_S
    while missing and (left := end - time.monotonic()) > 0:
        for fd, _ in poller.poll(left * 1000 + 1):
            if missing[fd].hear():
                poller.unregister(fd)
                del missing[fd]
    return [stacks for _, stacks in asked]


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


def has_ended(worker: ProcessWorker, timeout: float = 0) -> bool:
    """Return whether the process is gone, or goes within `timeout` seconds."""
    if worker.pidfd is None:
        return worker.inbox.control.packets.ended
    return readable(worker.pidfd, timeout)


def wait_for_exitcode(worker: ProcessWorker, timeout: float) -> int | None:
    """Wait for the process to end; return its exit code, None if it is not known."""
    # It can be collected once; other code may have asked for it.
    if worker.exitcode is not None:
        return worker.exitcode
    if worker.pidfd is not None and not has_ended(worker, timeout):
        return None
    return worker.process.exitcode(timeout)


_ADVICE: dict[int | None, str] = {
    -signal.SIGKILL: "Unless you killed it, the system was probably out of memory: try fewer "
    "workers, smaller batches or a smaller max_queue_size.",
    -signal.SIGSEGV: "A crash in C code; its Python stack was written to stderr.",
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
