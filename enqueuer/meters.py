"""What is measured while it runs: where a worker's time goes, and how long the loop waits.

    worker:    Meter, words of 8 bytes that only it writes and that the loop's process can read
    consumer:  LoopMeter, the waits of the loop and the fill of the queue

An item that neither waits nor is waited for is not timed: a clock takes as long as a hundredth
of sending a tiny item. Whoever has to wait looks at the clock, since that costs more anyway; what
is left of a worker's time is that of the generator.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

clock = time.monotonic_ns  # the same in all processes of a machine

# The words of a worker; of times, nanoseconds.
BEGAN = 0  # when it was ready to work; 0 before that
BYTES = 1  # of what it has sent
SENDING = 2  # took so long, all in all
WAITING = 3  # for the right to send, or for a task
IDLE = 4  # between two epochs
PHASE = 5  # WAITING or IDLE if it is just that, else 0
SINCE = 6  # when that began
CPU_BEFORE = 7  # what it had used of the CPU when it was ready, for imports say
STARVED_BEFORE = 8  # for how long it had lacked one then

WORDS = 16  # two cache lines

_MOST_SAMPLES = 256  # of the fill; then every second one is forgotten
_SAMPLE_NS = 5_000_000  # between two of them, at first
_LONG_READ_NS = 100_000  # to sort a shorter one by its length would take too much of it


class Meter:
    """A worker's own account. One thread writes it, any thread of any process may read it.

    Args:
        words: Where it is kept, so many as `WORDS`, all 0; by default in memory of its own.

    Attributes:
        waited: Called after each wait, with its begin; None: nobody is to be told.
    """

    def __init__(self, words: memoryview[int] | None = None) -> None:
        self.waited: Callable[[int], None] | None = None
        self.words = memoryview(array("Q", [0] * WORDS)) if words is None else words

    def begin(self, cpu_s: float = 0.0, starved_s: float = 0.0) -> None:
        """Note that the worker is ready for its first order, and what it took to get there."""
        self.words[CPU_BEFORE] = int(1e9 * cpu_s)
        self.words[STARVED_BEFORE] = int(1e9 * starved_s)
        self.words[BEGAN] = clock()

    def pause(self, phase: int) -> None:
        """Note that it waits from now on: WAITING or IDLE."""
        self.words[SINCE] = clock()
        self.words[PHASE] = phase

    def resume(self) -> None:
        """Note that the wait is over."""
        words = self.words
        since = words[SINCE]
        words[words[PHASE]] += clock() - since
        words[PHASE] = 0
        if self.waited is not None:
            self.waited(since)


class LoopMeter:
    """The waits of the loop for its batches, and how many batches waited for the loop.

    One thread at a time writes it, any may read.

    Attributes:
        began: When the workers were started.
        cpu_s: What this process had used of the CPU then.
        first: When the first batch was there; 0 before that.
        first_wait: Nanoseconds that the loop waited until then.
        waited: Nanoseconds after that, all in all.
        reading: Nanoseconds of these in which the loop read elements itself.
        by_worker: The same by the worker that was waited for, where it was a certain one.
        buckets: How many waits there were of each length, see `bucket_of`.
        idle: Nanoseconds between epochs.
        ended: When the last epoch ended, if the next one has not begun; else 0.
        since: When a wait began that lasts; 0 if none does.
        worker: Who is waited for just then, if it is a certain one.
        samples: Pairs of a time and of how many items waited then.
        left: How many more items are to be taken until the next sample.
    """

    def __init__(self) -> None:
        self.began = clock()
        self.cpu_s = time.process_time()
        self.first = 0
        self.first_wait = 0
        self.waited = 0
        self.reading = 0
        self.by_worker: dict[int, int] = {}
        self.buckets: dict[int, int] = {}
        self.idle = 0
        self.ended = 0
        self.since = 0
        self.worker: int | None = None
        self.samples: list[tuple[int, int]] = []
        self.left = 1
        self._counted = 1  # with those that are left
        self._interval = _SAMPLE_NS
        self._step = 1
        self._looked = 0

    @property
    def taken(self) -> int:
        """How many items came from the workers."""
        return self._counted - self.left

    def pause(self, worker: int | None) -> None:
        """Note that the loop waits from now on, and for which worker; again does nothing."""
        if not self.since:
            self.since, self.worker = clock(), worker

    def resume(self) -> None:
        """Note that the wait is over."""
        waited, worker = clock() - self.since, self.worker
        self.since = 0
        if not self.first:
            self.first_wait += waited
            return
        self.waited += waited
        self._sort(waited)
        if worker is not None:
            self.by_worker[worker] = self.by_worker.get(worker, 0) + waited

    def read(self) -> None:
        """Note that the wait is over, in which the loop read an element itself."""
        spent = clock() - self.since
        self.since = 0
        if self.first:
            self.waited += spent
            self.reading += spent
            if spent >= _LONG_READ_NS:
                self._sort(spent)
        else:
            self.first_wait += spent

    def rest(self) -> None:
        """Note that an epoch is over; what the loop does now has nothing to do with batches."""
        if self.first and not self.ended:
            self.ended = clock()

    def go_on(self) -> None:
        """Note that the next epoch begins; again does nothing."""
        if self.ended:
            self.idle += clock() - self.ended
            self.ended = 0

    def _sort(self, waited: int) -> None:
        if waited >= _SAMPLE_NS and self.left > 1:  # what was fast is slow now
            self._counted += 1 - self.left
            self.left = self._step = 1
        bucket = bucket_of(waited)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def sample(self, waiting: int) -> None:
        """Note how many items wait; called when none is `left`."""
        now = clock()
        if not self.first:
            self.first = now
        is_late = now - self._looked >= _SAMPLE_NS
        self._looked = now
        samples = self.samples
        if not samples or now - samples[-1][0] >= self._interval:
            samples.append((now, waiting))
            if len(samples) > _MOST_SAMPLES:
                self.samples = samples[::2]
                self._interval *= 2
        self._step = max(1, self._step // 2) if is_late else self._step * 2
        self._counted += self._step - self.left
        self.left = self._step


def bucket_of(nanoseconds: int) -> int:
    """Return which of the buckets a time falls into; there are 16 for each doubling.

    Example:
        >>> [bucket_of(n) for n in (32, 33, 64, 1000, 1023)]
        [96, 96, 112, 175, 175]
    """
    nanoseconds = max(nanoseconds, 32)
    exponent = nanoseconds.bit_length()
    return 16 * exponent + (nanoseconds >> (exponent - 5) & 15)


def top_of(bucket: int) -> int:
    """Return the time in nanoseconds where a bucket ends and the next begins.

    Example:
        >>> top_of(bucket_of(1000)), bucket_of(1024) - bucket_of(1023)
        (1024, 1)
    """
    exponent, sixteenth = divmod(bucket, 16)
    return (17 + sixteenth) << (exponent - 5)
