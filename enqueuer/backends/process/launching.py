"""Starting one worker process, by fork, forkserver or spawn, and learning its exit code.

    fork        multiprocessing's own process: the child has everything, threads' locks included
    spawn       a fresh interpreter
    forkserver  a fresh interpreter, which runs no user code and forks on request

The fork server (`fork_server.py`) and the spawn are our own. The spawn of multiprocessing reads and
fixes the global start method, and imports the user's main module in the child, so scripts need a
guard. A child receives its job over its channel.
"""

from __future__ import annotations

import multiprocessing.context

# multiprocessing would import it at the first start.
import multiprocessing.popen_fork
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from enqueuer.backends.process import fork_server
from enqueuer.backends.process.interpreter import (
    SAME_HASHES,
    interpreter_flags,
    program,
    silent_children,
)
from enqueuer.common.descriptors import Descriptor
from enqueuer.errors import StartError


class Launched(Protocol):
    """A process that was started."""

    pid: int

    def exitcode(self, timeout: float) -> int | None:
        """Wait for the process to end; return its exit code, None if it cannot be known."""

    def has_pid(self) -> bool:
        """Return whether `pid` is still its own; once it was reaped, another may have got it."""


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
        return _Spawned(
            program("main", sock.fileno(), lifeline.fileno()), sock, lifeline, environment
        )
    return fork_server.fork(sock, lifeline)


class _Bookkeeping:
    """Guards multiprocessing's list of children.

    Python 3.10 fails if one thread closes a process while another one starts one.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Make a new lock in a forked child: a thread of the parent may hold the old one."""
        # Reentrant, as the garbage collector may run under it.
        self.lock = threading.RLock()


_bookkeeping = _Bookkeeping()
os.register_at_fork(after_in_child=_bookkeeping.renew)


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


class _Forked:
    """A child by fork."""

    def __init__(self, target: Callable[[], None]) -> None:
        self._process = ForkProcess(target=target)
        # Not daemonic, so that it may have children. The lifeline ends it with this process.
        self._process.daemon = False
        try:
            with _bookkeeping.lock, silent_children():
                self._process.start()
        except AssertionError as error:
            raise StartError(
                "this process is a daemonic child of multiprocessing, which may not fork "
                "workers (a worker of a DataLoader, perhaps); with a generator function "
                "use backend=Processes(start_method='forkserver'), else backend='thread'"
            ) from error
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def has_pid(self) -> bool:
        return _is_child(self.pid)

    def exitcode(self, timeout: float) -> int | None:
        # Not join(timeout): it waits for a pipe, which a grandchild may hold open. Once the user's
        # code has closed that pipe in the worker, it waits without a limit.
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

    def __init__(
        self,
        program: str,
        sock: socket.socket,
        lifeline: Descriptor,
        environment: Mapping[str, str],
    ) -> None:
        fds = (sock.fileno(), lifeline.fileno())
        with silent_children():
            self._popen = subprocess.Popen(
                [sys.executable, *interpreter_flags(), "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                env={**SAME_HASHES, **os.environ, **environment},
            )
        self.pid: int = self._popen.pid

    def has_pid(self) -> bool:
        return _is_child(self.pid)

    def exitcode(self, timeout: float) -> int | None:
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return None


def _is_child(pid: int) -> bool:
    """Return whether a process is a child of this one that was not reaped."""
    if not hasattr(os, "waitid"):
        return _exists(pid)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _exists(pid: int) -> bool:
    """Return whether a process exists, be it a zombie; False if other code has reaped it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
