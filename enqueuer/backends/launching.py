"""Starting one worker process, by fork, forkserver or spawn, and hearing of its end.

    fork        multiprocessing's own process: the child has everything, threads' locks included
    spawn       a fresh interpreter
    forkserver  a fresh interpreter that stays alone and single-minded, and forks on request

Forkserver and spawn are done here and not by multiprocessing because its own read and fix the
global start method, import the user's main module in the child (so that scripts need a guard)
and leave a socket in the temporary directory. What a child is to do reaches it over its channel.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
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
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from enqueuer.errors import StartError
from enqueuer.transport.packets import Descriptor, Packets, close_in_children, pair

_SERVER_START_S = 60.0  # a fresh interpreter that imports numpy, on a busy machine
_STATUS_S = 1.0  # between a death and the server's word on how

_FORKED = struct.Struct("<Bq")  # kind, pid
_EXITED = struct.Struct("<Bqq")  # kind, pid, exit code
_PID, _EXIT = 1, 2


class Launched(Protocol):
    """A process that was started."""

    pid: int

    def exitcode(self, timeout: float) -> int | None:
        """Wait for the process to end; return its exit code, None if nobody knows it."""


def launch(
    method: str, sock: socket.socket, lifeline: Descriptor, forked: Callable[[], None]
) -> Launched:
    """Start a process that has `sock` and `lifeline`.

    Args:
        method: "fork", "forkserver" or "spawn".
        sock: The worker's end of its channel.
        lifeline: The reading end of a pipe whose other end only this process has.
        forked: What a forked child calls; the others call `bootstrap.main`.
    """
    if method == "fork":
        return _Forked(forked)
    if method == "spawn":
        return _Spawned(_program("main", sock.fileno(), lifeline.fileno()), sock, lifeline)
    return _server.fork(sock, lifeline)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold back SIGINT in this thread: a child inherits that, until it ignores it.

    Otherwise a Ctrl-C during the start prints a traceback for each child.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Bookkeeping:
    """Guards multiprocessing's list of children.

    Python 3.10 stumbles over a process that one thread closes while another starts one.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """In a forked child: forget a lock that somebody may hold."""
        self.lock = threading.RLock()  # reentrant, for the garbage collector


_bookkeeping = _Bookkeeping()
os.register_at_fork(after_in_child=_bookkeeping.renew)


class _Forked:
    """A child by fork."""

    def __init__(self, target: Callable[[], None]) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=target)
        # Not daemonic, so that it may have children; that it dies with us is the lifeline's.
        self._process.daemon = False
        try:
            with _bookkeeping.lock:
                self._process.start()
        except AssertionError as error:
            raise StartError(
                "this process is a daemonic child of multiprocessing, which may not fork "
                "workers (a worker of a DataLoader, perhaps); use mp_context='forkserver' "
                "with a generator function, or backend='thread'"
            ) from error
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def exitcode(self, timeout: float) -> int | None:
        # Not join(timeout): it waits for a pipe, which a grandchild may hold open; and without a
        # limit once the user's code has closed that pipe in the worker.
        deadline = time.monotonic() + timeout
        while (code := self._process.exitcode) is None and _exists(self.pid):
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.001)
        if code is not None:
            with _bookkeeping.lock:
                self._process.close()
        return code


class _Spawned:
    """A child by a fresh interpreter."""

    def __init__(self, program: str, sock: socket.socket, lifeline: Descriptor) -> None:
        fds = (sock.fileno(), lifeline.fileno())
        self._popen = subprocess.Popen(
            [sys.executable, *_interpreter_flags(), "-c", program],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
        )
        self.pid: int = self._popen.pid

    def exitcode(self, timeout: float) -> int | None:
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return None


class _Served:
    """A child of the fork server."""

    def __init__(self, server: _Server, connection: Packets, pid: int) -> None:
        self._server = server
        self._connection = connection
        self.pid: int = pid

    def exitcode(self, timeout: float) -> int | None:
        return self._server.exitcode(self._connection, self.pid, timeout)


class _Server:
    """This process's end of its fork server, which is started when first needed.

    It ends with this process, by the end of its socket. Any thread may call anything.
    """

    def __init__(self) -> None:
        # reentrant, as the garbage collector may stop a forgotten enqueuer at any moment
        self._lock = threading.RLock()
        self._popen: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._packets: Packets | None = None
        self._pids: deque[int] = deque()  # of children that nobody has been told of yet
        self._codes: dict[int, int] = {}
        self._owner = 0

    def fork(self, sock: socket.socket, lifeline: Descriptor) -> _Served:
        """Have a child forked that owns `sock` and `lifeline`."""
        with self._lock:
            for attempt in range(2):
                try:
                    return self._fork_locked(sock, lifeline)
                except (OSError, EOFError):
                    self._leave_locked()  # it was killed; the next one is a new one
                    if attempt:
                        raise StartError("the fork server ends as soon as it starts") from None
        raise AssertionError

    def exitcode(self, connection: Packets, pid: int, timeout: float) -> int | None:
        """Wait for the server's word on how `pid` ended; None if there is none."""
        with self._lock:
            if connection is not self._packets:
                return None  # the server that forked it was killed, and knew its child alone
            try:
                self._wait_locked(lambda: pid in self._codes, timeout)
            except (OSError, EOFError, TimeoutError):
                pass
            return self._codes.pop(pid, None)

    def _fork_locked(self, sock: socket.socket, lifeline: Descriptor) -> _Served:
        self._join_locked()
        assert self._packets is not None
        self._packets.send(b"fork", [sock.fileno(), lifeline.fileno()])
        self._wait_locked(lambda: bool(self._pids), _SERVER_START_S)
        return _Served(self, self._packets, self._pids.popleft())

    def _wait_locked(self, done: Callable[[], bool], timeout: float) -> None:
        """Read the server's words until `done`; raise EOFError or TimeoutError."""
        deadline = time.monotonic() + timeout
        while not done():
            if self._packets is None or self._sock is None or self._owner != os.getpid():
                raise EOFError
            self._packets.drain()
            while self._packets.received:
                data, _ = self._packets.received.popleft()
                if data[0] == _PID:
                    self._pids.append(_FORKED.unpack(data)[1])
                else:
                    _, pid, code = _EXITED.unpack(data)
                    self._codes[pid] = code
            if done():
                return
            if self._packets.ended:
                raise EOFError
            if not _readable(self._sock, deadline - time.monotonic()):
                raise TimeoutError

    def _join_locked(self) -> None:
        """Start a server unless this very process has one that lives."""
        if self._owner == os.getpid() and self._popen is not None and self._popen.poll() is None:
            return
        self._leave_locked()
        ours, its = pair("seqpacket")
        with its:
            close_in_children(ours)
            self._popen = subprocess.Popen(
                [sys.executable, *_interpreter_flags(), "-c", _program("serve", its.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
            )
        self._sock, self._packets, self._owner = ours, Packets(ours), os.getpid()

    def _leave_locked(self) -> None:
        if self._packets is not None:
            self._packets.close()
        if self._popen is not None and self._owner == os.getpid():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(_STATUS_S)
        elif self._popen is not None:
            self._popen.returncode = 0  # the parent's child, not ours: nothing to wait for
        self._popen = self._sock = self._packets = None
        self._pids.clear()
        self._codes = {}

    def end(self) -> None:
        """End the server, if there is one."""
        with self._lock:
            self._leave_locked()

    def renew(self) -> None:
        """In a forked child: forget the parent's server, and a lock that somebody may hold."""
        self._lock = threading.RLock()
        self._leave_locked()


_server = _Server()
os.register_at_fork(after_in_child=_server.renew)


@atexit.register
def end_server() -> None:
    """End this process's fork server; it is started again when needed."""
    _server.end()


def _exists(pid: int) -> bool:
    """Tell whether there is a process, be it a zombie; not if somebody else has reaped it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _readable(sock: socket.socket, timeout: float) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(max(0, int(timeout * 1000) + 1)))


def _program(function: str, *fds: int) -> str:
    """Return what a fresh interpreter runs; the search path first, or it might not find us."""
    arguments = ", ".join(map(str, fds))
    return (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from enqueuer.backends.bootstrap import {function}; {function}({arguments})"
    )


def _interpreter_flags() -> list[str]:
    """Return the options that this interpreter was started with, as far as they matter."""
    flags = sys.flags
    options = ["-O"] * flags.optimize + ["-B"] * flags.dont_write_bytecode
    options += ["-I"] * flags.isolated + ["-E"] * flags.ignore_environment
    options += ["-s"] * flags.no_user_site + ["-X", "dev"] * flags.dev_mode
    return options + [f"-W{option}" for option in sys.warnoptions]


# --- the server's own process ------------------------------------------------------------------


def serve_forks(fd: int) -> tuple[int, int] | None:
    """Fork a child whenever the parent asks, and tell the parent how each ended.

    Returns:
        In a child, its two descriptors; in the server, None once the parent is gone.
    """
    sock = socket.socket(fileno=fd)
    packets = Packets(sock)
    children: dict[int, int] = {}  # pidfd -> pid
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    while True:
        for ready, _ in poller.poll():
            if ready in children:
                poller.unregister(ready)
                os.close(ready)
                _report(packets, children.pop(ready))
        packets.drain()
        while packets.received:
            _, fds = packets.received.popleft()
            pid = _fork()
            if pid == 0:
                sock.close()
                for pidfd in children:
                    os.close(pidfd)
                return fds[0], fds[1]
            for one in fds:
                os.close(one)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid
            poller.register(pidfd, select.POLLIN)
            with contextlib.suppress(OSError):
                packets.send(_FORKED.pack(_PID, pid))
        if packets.ended:
            sock.close()
            return None


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of other threads; numpy's BLAS has some, and stops them for a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _report(packets: Packets, pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        packets.send(_EXITED.pack(_EXIT, pid, os.waitstatus_to_exitcode(status)))
