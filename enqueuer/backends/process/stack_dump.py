"""Asking worker processes for their Python stacks, whatever they are doing.

    ask_stacks() --a signal--> worker: faulthandler, in C --the stack as text--> parent's pipe

The signal's handler needs no GIL and runs no Python, unless the worker's own thread waits for
others. So a worker answers from the middle of a sleep, a loop in C or a deadlock. Only one that is
stopped, or hangs in the system, does not: hence the deadline. A worker that has its pipe says so by
one byte; no worker is signalled before, since the signal would end it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading

from enqueuer.backends.pool import Stack
from enqueuer.backends.stall import decode_threads, encode_threads, parse
from enqueuer.common.catching import suppressed
from enqueuer.common.descriptors import Descriptor
from enqueuer.workers.event_loop import ThreadSnapshot, on_others, snapshots_of

# Seconds for all workers at once; an answer takes about a millisecond.
ASK_S = 1.0

_MOST = 1 << 16  # bytes at once: all that a pipe holds


# A signal that no program uses; macOS has no others.
ASK: int = signal.SIGRTMAX - 5 if hasattr(signal, "SIGRTMAX") else getattr(signal, "SIGEMT", 0)


class Stacks(Descriptor):
    """The parent's end of the pipe on which one worker answers."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._text = ""
        self._can_answer = False
        # The last answer of the worker: its stack, or those of its threads.
        self.stack: Stack | None = None
        self.threads: list[ThreadSnapshot] | None = None

    def prepare(self) -> bool:
        """Forget what an earlier question brought; return whether another one may be asked."""
        self.hear()
        self._text, self.stack, self.threads = "", None, None
        return self._can_answer

    def hear(self) -> bool:
        """Read what has come; return whether the answer is whole, or none will come."""
        with suppressed(BlockingIOError):
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
    read, write = os.pipe()
    for end in (read, write):
        # A worker must not wait in the signal's handler.
        os.set_blocking(end, False)
    return Stacks(read), Descriptor(write)


def answer(pipe: Descriptor | None) -> None:
    """Answer from now on. Called in the worker, by the thread that runs the user's code.

    Faulthandler writes only that thread's stack: those of others could change meanwhile. While it
    waits for others, Python's handler writes where these are, in this thread. So there is no answer
    then if C code holds the GIL.

    Args:
        pipe: The worker's end of its pipe; None: it is never asked.
    """
    if not ASK or pipe is None:
        return
    fd = pipe.fileno()

    def write(number: int, frame: object) -> None:
        data = encode_threads(snapshots_of(threading.get_ident()))
        # The pipe may be full of answers that were not read.
        with contextlib.suppress(OSError):
            os.write(fd, data)

    def choose(has_others: bool) -> None:
        faulthandler.unregister(ASK)
        # One of Python's would come above that of faulthandler when `held()` puts it back. It
        # interrupts system calls: the kernel would go on with a wait for a lock, without Python.
        signal.signal(ASK, write if has_others else signal.SIG_IGN)
        if not has_others:
            faulthandler.register(ASK, file=fd, all_threads=False, chain=False)

    choose(False)
    on_others(choose)
    os.write(fd, b"\n")
