"""Measuring the share of the time in which some code holds the GIL, from a second thread.

    the code:    ===== held =====......released......====== held ======
    the probe:      ^blocks-----|   ^does not block   ^blocks---------|

Python has one lock that only one of its threads holds at a time. Code that computes in C, or
waits, may release it. More threads make a generator faster only as far as it does.

The probe sleeps for about a millisecond, again and again, and asks for the lock whenever it wakes,
as any thread does. The kernel counts whether it had to wait: `ru_nvcsw` of getrusage(2) is how
often a thread gave up its CPU to wait for something. Once is the sleep; twice means that the lock
was held (`take_gil` in CPython's Python/ceval_gil.c waits on a condition). So no time is
compared with another one, and other programs on the same CPUs hardly matter. The probe itself
takes the lock for some microseconds of each millisecond.

A probe that waits cannot ask for the lock. It counts the times at which it would have asked as
times at which the lock was held. The times are random, as a generator with a rhythm of its own
would otherwise always be probed in the same phase.
"""

from __future__ import annotations

import random
import sys
import threading
import time

# Seconds between two probes, on average; several fit into the 5 ms of a switch interval.
_GAP_S = 0.001


def switch_s() -> float | None:
    """Return the seconds after which a waiting thread asks for the GIL; None if there is no GIL."""
    return sys.getswitchinterval() if getattr(sys, "_is_gil_enabled", lambda: True)() else None


class Probe:
    """A thread that measures within a `with` block how often the GIL is held.

    Example:
        >>> with Probe() as probe:
        ...     time.sleep(0.05)
        >>> share = probe.share
        >>> share is None or share < 0.5
        True
    """

    def __init__(self) -> None:
        self._asked = 0
        self._held = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="enqueuer-probe", daemon=True)

    @property
    def share(self) -> float | None:
        """Share of the time in which it was held, from 0 to 1; None if that is not known."""
        if switch_s() is None:
            return 0.0
        return self._held / self._asked if self._asked else None

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            from resource import RUSAGE_THREAD, getrusage
        except ImportError:
            # Only Linux counts the waits of one thread.
            return
        draw = random.Random(7).uniform
        at, was_held = time.perf_counter(), False
        while not self._done.is_set():
            at += draw(0.5, 1.5) * _GAP_S
            left = at - time.perf_counter()
            if left > 0:
                before = getrusage(RUSAGE_THREAD).ru_nvcsw
                time.sleep(left)
                was_held = getrusage(RUSAGE_THREAD).ru_nvcsw - before > 1
            self._asked += 1
            self._held += was_held
