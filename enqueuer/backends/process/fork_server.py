"""The fork server: a fresh interpreter that runs no user code and forks workers on request.

    this process  Server --request, the two descriptors of a worker--> serve_forks() --> workers
                          <--pid, exit code, errno-------------------------

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
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from enqueuer.common import interrupts
from enqueuer.common.catching import raised_here, suppressed
from enqueuer.common.descriptors import Descriptor, close_in_children
from enqueuer.errors import StartError
from enqueuer.transport.packets import Packets, pair
from enqueuer.workers import native

# The number of a request.
REQUEST = struct.Struct("<q")
# Number of a request for nothing; the others begin with 1.
NOTHING = 0
# Kind, number of the request, and a value: the pid, or an errno times -1; the exit code.
ANSWER = struct.Struct("<Bqq")
STARTED, EXIT = 1, 2


def serve_forks(fd: int) -> tuple[int, int] | None:
    """Fork a child whenever the parent asks, and send the parent the exit code of each.

    Returns:
        In a child, its two descriptors; in the server, None once the parent is gone.
    """
    packets = Packets(socket.socket(fileno=fd))
    # Number of the request for each process, by its pid.
    children: dict[int, int] = {}
    with _deaths() as deaths:
        poller = select.poll()
        for one in (packets, deaths):
            poller.register(one, select.POLLIN)
        while True:
            poller.poll()
            # Emptied before the children are looked at, so that a later death fills it again.
            with contextlib.suppress(BlockingIOError):
                while deaths.recv(4096):
                    pass
            _report(packets, children)
            packets.drain()
            while packets.received:
                data, fds = packets.received.popleft()
                (number,) = REQUEST.unpack(data)
                try:
                    pid = _fork(fds)
                except OSError as error:
                    _say(packets, STARTED, number, -(error.errno or 0))
                    continue
                if pid == 0:
                    packets.close()
                    return fds[0], fds[1]
                children[pid] = number
                _say(packets, STARTED, number, pid)
            if packets.ended:
                packets.close()
                return None


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


def _report(packets: Packets, children: dict[int, int]) -> None:
    """Send the exit codes of all children that have ended."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        number = children.pop(pid, None)
        # A module that was preloaded has started the other processes.
        if number is not None:
            _say(packets, EXIT, number, os.waitstatus_to_exitcode(status))


def _say(packets: Packets, kind: int, number: int, value: int) -> None:
    with contextlib.suppress(OSError):
        packets.send(ANSWER.pack(kind, number, value))


def _fork(fds: list[int]) -> int:
    """Fork; only the child keeps `fds`.

    Raises:
        OSError: There is no room for a process, or there was none for the descriptors.
    """
    pid = -1
    try:
        if len(fds) != 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        with warnings.catch_warnings():
            # Python 3.12 warns of other threads; numpy's BLAS has some, and stops them for a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    finally:
        if pid != 0:
            for fd in fds:
                os.close(fd)
    return pid


@contextlib.contextmanager
def silent_children() -> Iterator[None]:
    """Start children with SIGINT blocked, until they ignore it.

    Otherwise a Ctrl-C during the start prints a traceback for each child.
    """
    # A handler that raises could otherwise leave SIGINT blocked here.
    with interrupts.held():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
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
# For the fork server, which runs no native code: each fork would have to stop threads of its BLAS.
_ONE_THREAD = dict.fromkeys(native.THREAD_VARIABLES, "1")
# Seconds until a fork server whose socket was closed has ended.
_STATUS_S = 1.0

_PRELOADED = "a module that was given to multiprocessing.set_forkserver_preload()"
_NO_SERVER = f"the fork server ends as soon as it starts; a likely cause is {_PRELOADED}"
_NO_ANSWER = (
    f"the fork server did not respond within {_SERVER_START_S:.0f} s; a likely cause is "
    f"{_PRELOADED} and takes longer to import"
)


class Served:
    """A child of the fork server; `wait` waits for its exit code."""

    def __init__(self, pid: int, wait: Callable[[float], int | None]) -> None:
        self.pid, self._wait = pid, wait
        self._code: int | None = None

    def exitcode(self, timeout: float) -> int | None:
        if self._code is None:
            self._code = self._wait(timeout)
        return self._code

    def has_pid(self) -> bool:
        return self.exitcode(-1) is None


class Server:
    """The fork server as this process sees it; it is started when first needed.

    The server ends when its socket does, at the latest with this process. Any thread may call
    anything.

    Each answer bears the number of its request. So the answer to a request that an interrupt has
    ended is taken for no other request. The child of such a request ends by its lifeline.
    """

    def __init__(self) -> None:
        # Reentrant, as the garbage collector may stop a forgotten enqueuer at any moment.
        self._lock = threading.RLock()
        self.popen: subprocess.Popen[bytes] | None = None
        self._packets: Packets | None = None
        # Number of the last request, and of the last one that was answered by a child or an error.
        self._requests = self._answered = 0
        # Requests that wait for an answer or whose child lives; then the answers, by request.
        self.open_requests: set[int] = set()
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._owner = 0
        # Number of waits of this thread, one within the other.
        self._depth = 0

    def fork(self, sock: socket.socket, lifeline: Descriptor) -> Served:
        """Let the server fork a child that owns `sock` and `lifeline`.

        Raises:
            OSError: The system has no room for another process, or for its descriptors.
            StartError: There is no server.
        """
        with interrupts.held(), self._lock:
            for attempt in range(2):
                try:
                    number = self._ask_locked(sock, lifeline)
                    break
                except raised_here(TimeoutError):
                    # The server hangs, and so would another one.
                    if self.popen is not None and self._owner == os.getpid():
                        self.popen.kill()
                    self._leave_locked()
                    raise StartError(_NO_ANSWER) from None
                except raised_here(OSError, EOFError):
                    # The server was killed; the next attempt starts a new one.
                    self._leave_locked()
                    if attempt:
                        raise StartError(_NO_SERVER) from None
            pid = self._pids.pop(number)
            if pid <= 0:
                self.open_requests.discard(number)
                raise OSError(-pid, os.strerror(-pid))
            return Served(pid, functools.partial(self.exitcode, self._packets, number))

    def begin(self) -> None:
        """Start a server unless there is one; the first fork waits for it.

        If the system has no room for it now, the first fork tries again, and reports that.
        """
        with interrupts.held(), self._lock, contextlib.suppress(OSError):
            self._join_locked()

    def exitcode(self, connection: Packets | None, number: int, timeout: float) -> int | None:
        """Wait for a child's exit code from the server; None if none comes.

        Args:
            connection: Connection to the server that forked the child.
            number: Number of the request for the child.
            timeout: Seconds to wait at most.
        """
        with interrupts.held(), self._lock:
            if connection is not self._packets:
                # The server that forked it was killed, and no other can ask for its exit code.
                return None
            with suppressed(OSError, EOFError):
                self._wait_locked(lambda: number in self._codes, timeout)
            if number in self._codes:
                self.open_requests.discard(number)
            return self._codes.pop(number, None)

    def _ask_locked(self, sock: socket.socket, lifeline: Descriptor) -> int:
        """Ask for a child, and wait for the answer; return the number of the request."""
        self._join_locked()
        assert self._packets is not None
        # One that an interrupt has ended: if they piled up, sending would have to wait.
        self._wait_locked(lambda: self._answered == self._requests, _SERVER_START_S)
        self._requests = number = self._requests + 1
        self.open_requests.add(number)
        try:
            self._packets.send(REQUEST.pack(number), [sock.fileno(), lifeline.fileno()])
            self._wait_locked(lambda: number in self._pids, _SERVER_START_S)
        except BaseException:
            self.open_requests.discard(number)
            raise
        return number

    def _wait_locked(self, done: Callable[[], bool], timeout: float) -> None:
        """Read until `done`; EOFError or TimeoutError if not. At 0 s, no signal handler runs."""
        deadline = time.monotonic() + timeout
        self._depth += 1
        try:
            while not done():
                if self._packets is None or self._owner != os.getpid():
                    raise EOFError
                self._packets.drain()
                while self._packets.received:
                    self._keep(self._packets.received.popleft()[0])
                if done():
                    return
                if self._packets.ended:
                    raise EOFError
                left = deadline - time.monotonic()
                if left <= 0 or not interrupts.interruptible(readable, self._packets, left):
                    raise TimeoutError
        finally:
            self._depth -= 1
            if self._depth and self._packets is not None:
                # A signal handler, or the garbage collector, has called this within another wait,
                # whose answer may have been read here. A request for nothing, which has no
                # descriptors, is answered too, and that answer wakes the other wait.
                with contextlib.suppress(OSError):
                    self._packets.send(REQUEST.pack(NOTHING))

    def _keep(self, answer: bytes) -> None:
        kind, number, value = ANSWER.unpack(answer)
        if kind != EXIT and number != NOTHING:
            self._answered = number
        if number in self.open_requests:
            answers = self._codes if kind == EXIT else self._pids
            answers[number] = value

    def _join_locked(self) -> None:
        """Start a server unless this process has one that lives."""
        if self._owner == os.getpid() and self.popen is not None and self.popen.poll() is None:
            return
        self._leave_locked()
        ours, its = pair("seqpacket")
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
        self._answered = self._requests
        for answers in (self.open_requests, self._pids, self._codes):
            answers.clear()

    def end(self) -> None:
        """End the server, if there is one."""
        with interrupts.held(), self._lock:
            self._leave_locked()

    def renew(self) -> None:
        """Forget, in a forked child, the parent's server and its lock."""
        self._lock = threading.RLock()
        self._depth = 0
        self._leave_locked()


# That of this process.
server = Server()
atexit.register(server.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=server.renew)


def readable(source: Packets | Descriptor, timeout: float) -> bool:
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
