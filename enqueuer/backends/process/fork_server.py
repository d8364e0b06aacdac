"""The fork server: a fresh interpreter that runs no user code and forks workers on request.

    this process  Server --two descriptors of a worker, a socket--> serve_forks() --> workers
                  Served <--its pid or an errno, its exit code, on that socket

That of multiprocessing reads and fixes the global start method, imports the user's main module in
the child (so scripts need a guard), and leaves a socket in the temporary directory.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import math
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from enqueuer.common import interrupts
from enqueuer.common.descriptors import Descriptor, close_in_children
from enqueuer.errors import StartError
from enqueuer.transport.channel import Packets, pair
from enqueuer.workers import native

# What the server answers to a request: the pid of the child, or an errno times -1; then, once the
# child has ended, its exit code.
ANSWER = struct.Struct("<q")

# What a scheduler, or the end of a terminal, sends to all processes of a job. The program decides
# what follows, and its end is the end of the others.
JOB_SIGNALS = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU


def pass_over_job_signals() -> None:
    """Let this worker survive the signals of its job.

    They get a handler. If they were ignored, so they would be in the programs that the user's code
    starts, and `terminate()` would not end these. A forked child forgets the handler.
    """
    for number in JOB_SIGNALS:
        signal.signal(number, _pass_over)
        # C code must not see its system calls fail.
        signal.siginterrupt(number, False)
    _watch_forks()


def _pass_over(number: int, frame: object) -> None:
    """Do nothing."""


@functools.cache
def _watch_forks() -> None:
    """Have a forked child end by the signals of the job, from its very beginning."""
    masks: dict[int, set[Any]] = {}

    def block() -> None:
        masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop(threading.get_ident()))

    def reset() -> None:
        for number in JOB_SIGNALS:
            if signal.getsignal(number) is _pass_over:
                signal.signal(number, signal.SIG_DFL)
        restore()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=block, after_in_parent=restore, after_in_child=reset)


def serve_forks(fd: int) -> tuple[int, int] | None:
    """Fork a child whenever the parent asks, and send the parent the exit code of each.

    Returns:
        In a child, its two descriptors; in the server, None once the parent is gone.
    """
    packets = Packets(socket.socket(fileno=fd))
    # The socket for the answers about each child, by its pid.
    children: dict[int, int] = {}
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The program may raise its own limit later, and have many workers.
    _limit_descriptors(limits[1], limits[1])
    with _deaths() as deaths:
        poller = select.poll()
        for end in (packets, deaths):
            poller.register(end, select.POLLIN)
        while True:
            poller.poll()
            # Emptied before the children are looked at, so that a later death fills it again.
            with contextlib.suppress(BlockingIOError):
                while deaths.recv(4096):
                    pass
            _report(children)
            packets.drain()
            while packets.received:
                _, (status, *fds) = packets.received.popleft()
                pid = _fork(fds)
                if pid == 0:
                    packets.close()
                    for other in (status, *children.values()):
                        os.close(other)
                    _limit_descriptors(*limits)
                    return fds[0], fds[1]
                children[pid] = status
                _answer(status, pid)
                if pid < 0:
                    os.close(children.pop(pid))
            if packets.ended:
                packets.close()
                return None


def _limit_descriptors(soft: int, hard: int) -> None:
    # A system may refuse the limit that it has set itself.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def _deaths() -> Iterator[socket.socket]:
    """Give a socket that can be read when a child has ended.

    It replaces a pidfd for each child: older kernels have none, sandboxes forbid them, and they
    count against the limit of descriptors.
    """
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        # If the pipe is full, there is enough to read.
        there.setblocking(False)
        signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
        # Without a handler nothing is written there.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        try:
            yield here
        finally:
            signal.set_wakeup_fd(-1)


def _report(children: dict[int, int]) -> None:
    """Send the exit codes of all children that have ended."""
    while children:
        pid, code = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        # A module that was preloaded has started the other processes.
        if pid in children:
            status = children.pop(pid)
            _answer(status, os.waitstatus_to_exitcode(code))
            os.close(status)


def _answer(status: int, value: int) -> None:
    with contextlib.suppress(OSError):
        os.write(status, ANSWER.pack(value))


def _fork(fds: list[int]) -> int:
    """Fork; only the child keeps `fds`. Return the pid, or an errno times -1."""
    pid = -errno.EMFILE
    try:
        # Fewer come if there is no room for them.
        if len(fds) == 2:
            with warnings.catch_warnings():
                # Python 3.12 warns of other threads. numpy's BLAS has some, and stops them for it.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
    except OSError as error:
        pid = -(error.errno or errno.EAGAIN)
    finally:
        if pid != 0:
            for fd in fds:
                os.close(fd)
    return pid


@contextlib.contextmanager
def silent_children() -> Iterator[None]:
    """Start children with the signals of the job blocked, until they pass them over.

    Otherwise one during the start would end them, and a Ctrl-C print a traceback for each.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, *JOB_SIGNALS])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def program(function: str, *arguments: int | list[str]) -> str:
    """Return the program of a fresh interpreter, which sets the search path to find us.

    What it imports lives as long as the interpreter does. So the garbage collector does not look
    at it, neither during the imports nor later.
    """
    written = ", ".join(map(repr, arguments))
    return (
        f"import gc, sys; collects = gc.isenabled(); gc.disable(); sys.path[:] = {sys.path!r}; "
        f"from enqueuer.backends.process.child import {function}; "
        f"gc.freeze(); collects and gc.enable(); {function}({written})"
    )


def fresh_interpreter(
    text: str, fds: Sequence[int], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start an interpreter with the options of this one.

    Args:
        text: Program that it runs.
        fds: Descriptors that it inherits.
        environment: Variables that it has besides those of this process.
    """
    flags: Any = subprocess
    # A set of strings then has the same order in all workers of all runs.
    hashes = {"PYTHONHASHSEED": "0"}
    with silent_children():
        return subprocess.Popen(
            # As multiprocessing does.
            [sys.executable, *flags._args_from_interpreter_flags(), "-c", text],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            env={**hashes, **os.environ, **environment},
        )


# Seconds: a fresh interpreter imports numpy, perhaps on a busy machine.
_SERVER_START_S = 60.0
# Seconds in which no signal handler ends the wait for a fork. It takes longer than the interval of
# some alarms, and with each of them all would be tried again.
_QUIET_S = 1.0
# For the fork server, which runs no native code: each fork would have to stop threads of its BLAS.
_ONE_THREAD = dict.fromkeys(native.THREAD_VARIABLES, "1")
# Seconds until a fork server whose socket was closed has ended.
_STATUS_S = 1.0

_NO_SERVER = "the fork server ends as soon as it starts"
_NO_ANSWER = f"the fork server did not respond within {_SERVER_START_S:.0f} s"


def _with_cause(text: str) -> str:
    """Return what happened to the server with a likely cause, and what to do."""
    if modules := _modules_to_preload():
        names = ", ".join(modules)
        return (
            f"{text}; a likely cause is a module that was given to "
            f"multiprocessing.set_forkserver_preload(): {names}"
        )
    return (
        f"{text}; a likely cause is a busy machine, too little memory, or a slow disk: try again "
        "with fewer programs, or give backend=Processes(start_method='spawn')"
    )


class _NoAnswer(Exception):
    """The server did not answer in time."""


class Served:
    """A child of the fork server.

    Args:
        pid: Its pid.
        status: Socket on which the server sends its exit code.
    """

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid, self._status = pid, status

    def exitcode(self, timeout: float) -> int | None:
        if not readable(self._status, timeout):
            return None
        # It stays there, for the next question. If the server was killed, none ever comes.
        answer = self._status.recv(ANSWER.size, socket.MSG_PEEK)
        return ANSWER.unpack(answer)[0] if answer else None

    def has_pid(self) -> bool:
        return self.exitcode(0) is None

    def close(self) -> None:
        """Close the socket."""
        self._status.close()


class Server:
    """The fork server as this process sees it; it is started when first needed.

    The server ends when its socket does, at the latest with this process. Any thread may call
    anything.

    Each request has a socket of its own for the answers. So the answer to a request that an
    interrupt has ended is taken for no other request. The child of such a request ends by its
    lifeline.
    """

    def __init__(self) -> None:
        # Reentrant, as the garbage collector may stop a forgotten enqueuer at any moment.
        self._lock = threading.RLock()
        self.popen: subprocess.Popen[bytes] | None = None
        self._packets: Packets | None = None
        self._owner = 0

    def fork(self, sock: socket.socket, lifeline: Descriptor) -> Served:
        """Let the server fork a child that owns `sock` and `lifeline`.

        Raises:
            OSError: The system has no room for another process, or for its descriptors.
            StartError: There is no server.
        """
        with self._lock:
            for attempt in range(2):
                try:
                    pid, status = self._ask_locked(sock, lifeline)
                    break
                except _NoAnswer:
                    # The server hangs, and so would another one.
                    if self.popen is not None and self._owner == os.getpid():
                        self.popen.kill()
                    self._leave_locked()
                    raise StartError(_with_cause(_NO_ANSWER)) from None
                except ConnectionError:
                    # The server was killed; the next attempt starts a new one.
                    self._leave_locked()
                    if attempt:
                        raise StartError(_with_cause(_NO_SERVER)) from None
            if pid < 0:
                status.close()
                raise OSError(-pid, os.strerror(-pid))
            return Served(pid, status)

    def begin(self) -> None:
        """Start a server unless there is one; the first fork waits for it.

        If the system has no room for it now, the first fork tries again, and reports that.
        """
        with self._lock, contextlib.suppress(OSError):
            self._join_locked()

    def _ask_locked(self, sock: socket.socket, lifeline: Descriptor) -> tuple[int, socket.socket]:
        """Ask for a child; return its pid, or an errno times -1, and the socket of its answers."""
        self._join_locked()
        assert self._packets is not None
        status, its = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(status.close)
            with its:
                # A child that kept the other end would hide the end of the server.
                for end in (status, its):
                    close_in_children(end)
                fds = [end.fileno() for end in (its, sock, lifeline)]
                # There is no room if the server has not read what interrupted starts have sent.
                is_sent = self._packets.send(b"+", fds, wait=False)
            if not is_sent or not (
                readable(status, _QUIET_S)
                or interrupts.interruptible(readable, status, _SERVER_START_S)
            ):
                raise _NoAnswer
            answer = status.recv(ANSWER.size)
            if not answer:
                raise ConnectionResetError
            undo.pop_all()
        return ANSWER.unpack(answer)[0], status

    def _join_locked(self) -> None:
        """Start a server unless this process has one that lives."""
        if self._owner == os.getpid() and self.popen is not None and self.popen.poll() is None:
            return
        self._leave_locked()
        ours, its = pair(socket.SOCK_SEQPACKET)
        with its:
            close_in_children(ours)
            text = program("serve", its.fileno(), _modules_to_preload())
            environment = native.short_spinning(os.environ) | _ONE_THREAD
            self.popen = fresh_interpreter(text, [its.fileno()], environment)
        self._packets, self._owner = Packets(ours), os.getpid()

    def _leave_locked(self) -> None:
        if self._packets is not None:
            self._packets.close()
        if self.popen is not None and self._owner == os.getpid():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(_STATUS_S)
        elif self.popen is not None:
            # It is a child of the parent, so this process cannot wait for it.
            self.popen.returncode = 0
        self.popen = self._packets = None

    def end(self) -> None:
        """End the server, if there is one."""
        with self._lock:
            self._leave_locked()

    def renew(self) -> None:
        """Forget, in a forked child, the parent's server and its lock."""
        self._lock = threading.RLock()
        self._leave_locked()


# That of this process.
server = Server()
atexit.register(server.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=server.renew)


def readable(source: socket.socket | Packets | Descriptor, timeout: float) -> bool:
    """Wait until there is something to read, at most `timeout` seconds; return whether there is."""
    # `select()` accepts no descriptor beyond 1023.
    poller = select.poll()
    poller.register(source.fileno(), select.POLLIN)
    return bool(poller.poll(math.ceil(timeout * 1000)))


def _modules_to_preload() -> list[str]:
    """Return the names that the program gave to `multiprocessing.set_forkserver_preload()`.

    multiprocessing has no public function that returns them. It imports its own fork server when
    that function is called; importing that here would take longer than to fork a worker. The main
    module, which is its default, is left out: our workers do not import it.
    """
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    names: list[str] = getattr(server, "_preload_modules", [])
    return [name for name in names if name != "__main__"]
