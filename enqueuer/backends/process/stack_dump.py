"""Asking worker processes for their Python stacks, whatever they are doing.

    parent:  ask() --a signal--> worker: faulthandler, in C --the stack as text--> parent's pipe

The signal's handler needs no GIL and runs no Python, so that a worker answers from the middle of
a sleep, a loop in C or a deadlock. Only one that is stopped, or hangs in the system, does not:
hence the deadline. A worker that has its pipe says so by one byte; no worker is signalled before,
since the signal would end it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import time
from collections.abc import Iterable
from typing import Protocol

from enqueuer.backends.pool import Stack
from enqueuer.backends.stall import decode_threads, encode_threads, parse
from enqueuer.common import interrupts
from enqueuer.common.descriptors import Descriptor, close_in_children
from enqueuer.workers.element_threads import ElementThreads, ThreadSnapshot

# Seconds for all workers at once; an answer takes about a millisecond.
ASK_S = 1.0

_MOST = 1 << 16  # bytes at once: all that a pipe holds


# A signal that no program uses; macOS has no others.
_ASK: int = signal.SIGRTMAX - 5 if hasattr(signal, "SIGRTMAX") else getattr(signal, "SIGEMT", 0)


class Stacks:
    """The parent's end of the pipe on which one worker answers."""

    def __init__(self, read: Descriptor) -> None:
        self._read = read
        self._text = ""
        self._can_answer = False
        # The last answer of the worker: its stack, or those of its threads.
        self.stack: Stack | None = None
        self.threads: list[ThreadSnapshot] | None = None

    def fileno(self) -> int:
        return self._read.fileno()

    def close(self) -> None:
        self._read.close()

    def prepare(self) -> bool:
        """Forget what an earlier question brought; return whether another one may be asked."""
        self.hear()
        self._text, self.stack, self.threads = "", None, None
        return self._can_answer

    def hear(self) -> bool:
        """Read what has come; return whether the answer is whole, or none will come."""
        with interrupts.ignored(BlockingIOError):
            while data := os.read(self.fileno(), _MOST):
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


def pipe() -> tuple[Stacks, Descriptor]:
    """Return the parent's end, and the descriptor that a worker gets.

    Raises:
        OSError: There is no descriptor left.
    """
    read, write = map(Descriptor, os.pipe())
    for end in (read, write):
        # A worker must not wait in the signal's handler.
        os.set_blocking(end.fileno(), False)
    close_in_children(read)
    return Stacks(read), write


def answer(fd: int) -> None:
    """Answer from now on. Called in the worker, by the thread that runs the user's code.

    Only that thread's stack is written: those of others could change meanwhile.
    """
    if _ASK:
        faulthandler.register(_ASK, file=fd, all_threads=False, chain=False)
        os.write(fd, b"\n")


def answer_for(fd: int, threads: ElementThreads) -> None:
    """Answer from now on with the stacks of the threads that run elements.

    Called in the worker, by its own thread, in which Python runs the handler. So there is no
    answer if C code holds the GIL.
    """

    def write(number: int, frame: object) -> None:
        data = encode_threads(threads.snapshots())
        # The pipe may be full of answers that were not read.
        with contextlib.suppress(OSError):
            os.write(fd, data)

    if _ASK:
        faulthandler.unregister(_ASK)
        signal.signal(_ASK, write)
        signal.siginterrupt(_ASK, False)


class Asked(Protocol):
    """A worker process that may be asked."""

    @property
    def stacks(self) -> Stacks | None:
        """The pipe on which it answers; None if it has none."""

    def handles(self, number: int) -> bool:
        """Return whether it has a handler for a signal, which would end it otherwise."""

    def send_signal(self, number: int) -> None:
        """Signal it."""


def ask(those: Iterable[Asked], seconds: float = ASK_S) -> list[Stacks]:
    """Ask workers where they are, all at once, and wait for their answers.

    Args:
        those: The workers.
        seconds: Time after which the stacks that have not come are left out.

    Returns:
        Those that could be asked; after an answer they have a `stack`.
    """
    # The user's code may have reset the signal after the worker had said that it handles it.
    asked = [
        (one.stacks, one.send_signal)
        for one in those
        if one.stacks is not None and one.stacks.prepare() and one.handles(_ASK)
    ]
    missing = {stacks.fileno(): stacks for stacks, _ in asked}
    poller = select.poll()
    for fd in missing:
        poller.register(fd, select.POLLIN)
    for _, send in asked:
        send(_ASK)
    end = time.monotonic() + seconds
    while missing and (left := end - time.monotonic()) > 0:
        for fd, _ in poller.poll(left * 1000 + 1):
            if missing[fd].hear():
                poller.unregister(fd)
                del missing[fd]
    return [stacks for stacks, _ in asked]
