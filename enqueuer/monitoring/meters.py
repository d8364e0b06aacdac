"""Measuring where a worker's time goes, in words of 8 bytes that only the worker writes.

    worker: Meter.pause(), resume() -> words --> read by the loop's process, at any time

An item that neither waits nor is waited for is not timed: a clock takes as long as a hundredth
of sending a tiny item. A worker that waits reads the clock, since waiting costs more anyway; the
rest of its time is that of the generator.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

# The same in all processes of a machine.
clock = time.monotonic_ns

# The words of a worker; times are in nanoseconds.
# Time at which the worker was ready to work; 0 before that.
BEGAN = 0
# Bytes that it has sent.
BYTES = 1
# Time that it has spent on sending.
SENDING = 2
# Time that it has waited for the right to send, or for a task.
WAITING = 3
# Time between its epochs.
IDLE = 4
# WAITING or IDLE while the worker does that, else 0; and when that began.
PHASE = 5
SINCE = 6
# CPU time that it had used when it was ready, for imports say; and for how long it had waited
# for a CPU then.
CPU_BEFORE = 7
CPU_WAIT_BEFORE = 8

# Two cache lines.
WORDS = 16


class Meter:
    """The times of one worker. One thread writes them, any thread of any process may read them.

    Args:
        words: `WORDS` words, all 0, in which the times are kept; by default in new memory.

    Attributes:
        waited: Function that is called after each wait, with its begin; or None.
        words: The words in which the times are kept.
    """

    def __init__(self, words: memoryview[int] | None = None) -> None:
        self.waited: Callable[[int], None] | None = None
        self.words = memoryview(array("Q", [0] * WORDS)) if words is None else words

    def begin(self, cpu_s: float = 0.0, cpu_wait_s: float = 0.0) -> None:
        """Note that the worker is ready for its first order, and the CPU time of its start."""
        self.words[CPU_BEFORE] = int(1e9 * cpu_s)
        self.words[CPU_WAIT_BEFORE] = int(1e9 * cpu_wait_s)
        self.words[BEGAN] = clock()

    def pause(self, phase: int) -> None:
        """Note the begin of a wait; `phase` is WAITING or IDLE."""
        self.words[SINCE] = clock()
        self.words[PHASE] = phase

    def resume(self) -> None:
        """Note the end of the wait."""
        words = self.words
        since = words[SINCE]
        words[words[PHASE]] += clock() - since
        words[PHASE] = 0
        if self.waited is not None:
            self.waited(since)
