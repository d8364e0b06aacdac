"""The fork server's own process: it forks a worker whenever the parent asks.

    parent --request, the two descriptors of a worker--> serve_forks() --fork()--> a worker
           <--pid, exit code, errno---------------------

The other side is `fork_server.py`. This file imports nothing that only the parent needs, as each
import delays the first batch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import struct
import warnings
from collections.abc import Iterator

from enqueuer.transport.packets import Packets

# The number of a request.
REQUEST = struct.Struct("<q")
# Number of a request for nothing; the others begin with 1.
NOTHING = 0
# Kind, number of the request, and the value that the kind describes.
ANSWER = struct.Struct("<Bqq")
PID, EXIT, ERRNO = 1, 2, 3


def serve_forks(fd: int) -> tuple[int, int] | None:
    """Fork a child whenever the parent asks, and send the parent the exit code of each.

    Returns:
        In a child, its two descriptors; in the server, None once the parent is gone.
    """
    sock = socket.socket(fileno=fd)
    packets = Packets(sock)
    # Number of the request for each process, by its pid.
    children: dict[int, int] = {}
    with _deaths() as deaths:
        poller = select.poll()
        for one in (sock, deaths):
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
                    _say(packets, ERRNO, number, error.errno or 0)
                    continue
                if pid == 0:
                    sock.close()
                    return fds[0], fds[1]
                children[pid] = number
                _say(packets, PID, number, pid)
            if packets.ended:
                sock.close()
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
