"""Measuring where a worker's time goes, and how long the loop waits for its batches.

    worker: Meter.pause(), resume() -> words --> read by the loop, at any time
            words, usage --worker_stats()--> WorkerStats --> since(earlier): the difference
    loop:   LoopMeter.pause(), resume() -> waits, by length and by worker
            LoopMeter.count() -> number of items

Only the worker writes its words. The loop's own thread writes the loop's meter; any thread may
read both.

A worker reads the clock when it waits and, in a process, when it sends; the rest of its time is
that of the generator.
"""

from __future__ import annotations

import bisect
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from enqueuer.common.text import ratio
from enqueuer.monitoring import usage
from enqueuer.monitoring.trace import Trace

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

WORDS = 9

# Begins of epochs that are remembered; of more, every second one is forgotten.
_MAX_EPOCHS = 256
# Nanoseconds until what is not done for each item is done again.
_LOOK_NS = 5_000_000
# Nanoseconds; counting a shorter read by its length would take too large a part of it.
_LONG_READ_NS = 100_000


class Meter:
    """The times of one worker. One thread at a time writes them, any thread may read them.

    Args:
        publish: Function that shows the words to another process, if there is one.

    Attributes:
        waited: Function that is called after each wait, with its begin; or None.
        words: `WORDS` words in which the times are kept.
    """

    def __init__(self, publish: Callable[[], None] = lambda: None) -> None:
        self.waited: Callable[[int], None] | None = None
        self.words = [0] * WORDS
        self._publish = publish

    def begin(self, cpu_s: float = 0.0, cpu_wait_s: float = 0.0) -> None:
        """Note that the worker is ready for its first order, and the CPU time of its start."""
        self.words[CPU_BEFORE] = int(1e9 * cpu_s)
        self.words[CPU_WAIT_BEFORE] = int(1e9 * cpu_wait_s)
        self.words[BEGAN] = clock()
        self._publish()

    def pause(self, phase: int) -> None:
        """Note the begin of a wait; `phase` is WAITING or IDLE."""
        self.words[SINCE] = clock()
        self.words[PHASE] = phase
        self._publish()

    def resume(self) -> None:
        """Note the end of the wait."""
        words = self.words
        since = words[SINCE]
        words[words[PHASE]] += clock() - since
        words[PHASE] = 0
        self._publish()
        if self.waited is not None:
            self.waited(since)


class LoopMeter:
    """The waits of the loop for its batches.

    One thread at a time writes it, any may read.

    Args:
        trace: Recorder of the waits; None: nothing is recorded.

    Attributes:
        trace: The same.
        began: Time at which the workers were started.
        cpu_s: CPU time that this process had used then.
        first: Time at which the first batch was there; 0 before that.
        first_wait: Nanoseconds that the loop waited until then.
        waited: Nanoseconds that it waited after that.
        reading: Nanoseconds of these in which the loop read elements itself.
        by_worker: Nanoseconds of waits for one certain worker, by its index.
        buckets: Number of waits of each length, see `bucket_of`.
        idle: Nanoseconds between epochs.
        idle_cpu_s: CPU time that this process used between epochs.
        ended: Time at which the last epoch ended, if the next one has not begun; else 0.
        since: Time at which the current wait began; 0 if the loop does not wait.
        worker: Index of the worker that is waited for now, if it is a certain one.
        taken: Number of items that came from the workers.
    """

    def __init__(self, trace: Trace | None = None) -> None:
        self.trace = trace
        self.began = clock()
        self.cpu_s = time.process_time()
        self.first = 0
        self.first_wait = 0
        self.waited = 0
        self.reading = 0
        self.by_worker: dict[int, int] = {}
        self.buckets: dict[int, int] = {}
        self.idle = 0
        self.idle_cpu_s = 0.0
        self.ended = 0
        self.since = 0
        self.worker: int | None = None
        # Times at which epochs began, and the idle time until then.
        self._epochs: list[tuple[int, int]] = []
        self._begun, self._each = 0, 1
        # CPU time that this process had used when the last epoch ended.
        self._cpu_s_at_end = 0.0
        self.taken = 0
        # Number of the thread that took the first batch, and what it had used then.
        self._thread: int | None = None
        self._used_before = usage.Usage()
        # Time of the last `look`.
        self._looked = 0

    @property
    def used(self) -> usage.Usage:
        """What the thread that took the first batch has used since."""
        if self._thread is None:
            return usage.Usage()
        return usage.of_native_thread(self._thread).since(self._used_before)

    def pause(self, worker: int | None) -> None:
        """Note the begin of a wait, and the worker that it is for; repeating it is harmless."""
        if not self.since:
            self.since, self.worker = clock(), worker

    def resume(self, has_read: bool = False) -> None:
        """Note the end of the wait.

        Args:
            has_read: Whether the loop has read an element itself, instead of sleeping.
        """
        waited, worker = clock() - self.since, self.worker
        if self.trace is not None:
            self.trace.waited("read" if has_read else "wait", self.since, worker)
        self.since = 0
        if not self.first:
            self.first_wait += waited
            return
        self.waited += waited
        if has_read:
            self.reading += waited
        if not has_read or waited >= _LONG_READ_NS:
            self._sort(waited)
        if worker is not None:
            self.by_worker[worker] = self.by_worker.get(worker, 0) + waited

    def epoch_ended(self) -> None:
        """Note the end of an epoch; the time until the next one is idle."""
        if self.first and not self.ended:
            self.ended, self._cpu_s_at_end = clock(), time.process_time()
            if self.trace is not None:
                self.trace.end_work()

    def epoch_began(self) -> None:
        """Note the begin of the next epoch; repeating it is harmless."""
        if self.ended:
            now = clock()
            self.idle, self.idle_cpu_s = self.idled(now)
            self.ended = 0
            self._begun += 1
            # Of a long run every second one, then every fourth, and so on.
            if self._begun % self._each == 0:
                self._epochs.append((now, self.idle))
            if len(self._epochs) > _MAX_EPOCHS:
                self._epochs = self._epochs[1::2]
                self._each *= 2

    def idled(self, now: int) -> tuple[int, float]:
        """Return the nanoseconds between epochs until now, and the CPU time of the process then."""
        if not self.ended:
            return self.idle, self.idle_cpu_s
        used_s = time.process_time() - self._cpu_s_at_end
        return self.idle + now - self.ended, self.idle_cpu_s + used_s

    def idled_since(self, began: int, now: int) -> int:
        """Return the nanoseconds between epochs since a time, such as the start of a worker."""
        at = bisect.bisect_right(self._epochs, (began, self.idle))
        before = self._epochs[at - 1][1] if at else 0
        return min(self.idled(now)[0] - before, max(0, now - began))

    def _sort(self, waited: int) -> None:
        bucket = bucket_of(waited)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def count(self, items: int) -> bool:
        """Count items that were taken; return whether it is time for `look`."""
        self.taken += items
        return clock() - self._looked >= _LOOK_NS

    def look(self) -> None:
        """Note that what is not done for each item is done now, as for the first one."""
        self._looked = clock()
        if not self.first:
            self.first = self._looked
            # `current_thread()` would leave an object behind for a thread of another library.
            self._thread = threading.get_native_id()
            self._used_before = usage.of_native_thread(self._thread)


def bucket_of(nanoseconds: int) -> int:
    """Return the number of the bucket of a time; there are 16 buckets for each doubling.

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


# --- a snapshot of a worker ---------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerStats:
    """The work of one worker since its start, and of the workers that it replaced.

    Its time is divided into five: starting, making, sending, waiting, idle.

    Attributes:
        index: Index of the worker, from 0.
        name: Its name, such as `"worker 0 (process 4711, forkserver)"`.
        shards: Shards that it runs; empty for tasks, which any worker may take.
        items: Number of items that it has sent.
        bytes: Approximate size of these items: in processes as they were sent; in threads and
            without workers every 256th item is measured and stands for the others.
        started: Time of its start, in nanoseconds of `time.monotonic_ns()`.
        starting_s: Seconds from its start until it was ready for the first order.
        making_s: Seconds in the generator, or in `map` and `__getitem__`.
        sending_s: Seconds of pickling and copying; 0 in threads.
        waiting_s: Seconds in which it had an item and no room for it, or no task.
        idle_s: Seconds between epochs, or after its last item.
        cpu_s: Seconds of CPU time since it was ready, with all threads of a process; None if the
            system does not report it, here and below.
        cpu_wait_s: Seconds since then in which it could have run, but had no CPU.
        rss_bytes: Memory of its process, with what it shares with others; None for a thread.
        blocks: Number of blocks of shared memory in which its items lie, waiting, in use or free.
        block_bytes: Size of these blocks.
        switches: Number of times that it gave up its CPU to wait for something; None for a
            process.
        concurrency: Number of elements that it runs at once, each in a thread; 1 for shards. The
            seconds of CPU time, and those without a CPU, are sums over these threads. Its other
            times are their means.
    """

    index: int
    name: str
    shards: tuple[int, ...]
    items: int
    bytes: int
    started: int
    starting_s: float
    making_s: float
    sending_s: float
    waiting_s: float
    idle_s: float
    cpu_s: float | None = None
    cpu_wait_s: float | None = None
    rss_bytes: int | None = None
    blocks: int = 0
    block_bytes: int = 0
    switches: int | None = None
    concurrency: int = 1

    @property
    def busy_share(self) -> float:
        """Share of its time, without starting and idling, in which it did not wait; 0 to 1."""
        return ratio(self.busy_s, self.busy_s + self.waiting_s)

    @property
    def busy_s(self) -> float:
        """Seconds in which it worked."""
        return self.making_s + self.sending_s

    @property
    def waiting_share(self) -> float:
        """Share of its time, without starting and idling, in which it waited; 0 to 1."""
        return ratio(self.waiting_s, self.busy_s + self.waiting_s)

    @property
    def per_item_s(self) -> float:
        """Seconds of work for each item."""
        return ratio(self.busy_s, self.items)

    @property
    def lacked_s(self) -> float:
        """Seconds of its work in which it had no CPU; the system counts its waits, too."""
        return min((self.cpu_wait_s or 0.0) / self.concurrency, self.busy_s)

    @property
    def other_wait_s(self) -> float:
        """Seconds of its work in which it waited for a file, a network, a lock or the GIL."""
        cpu_s = (self.cpu_s or 0.0) / self.concurrency
        return self.busy_s - min(cpu_s + self.lacked_s, self.busy_s)

    def outside_s(self, switch_s: float) -> float:
        """Return the least time that a thread can have waited for something other than the GIL.

        A thread that waits for the GIL asks for it again each `switch_s`, and gives up its CPU
        each time. If it waited longer than that, it waited for a file, a network or a sleep.

        Example:
            >>> facts = (0, "worker 0", (), 9, 0, 0)
            >>> times = dict(starting_s=0.0, making_s=10.0, sending_s=0.0, waiting_s=0.0)
            >>> worker = WorkerStats(*facts, **times, idle_s=0.0, cpu_s=1.0, switches=300)
            >>> worker.outside_s(0.005)
            7.5
        """
        if self.switches is None or self.cpu_s is None:
            return 0.0
        return max(0.0, self.other_wait_s - self.switches * switch_s / self.concurrency)

    def since(self, earlier: WorkerStats) -> WorkerStats:
        """Return its work since an earlier snapshot."""
        return self._with(earlier, -1)

    def with_idle(self, idle_s: float) -> WorkerStats:
        """Return the same, with the time between epochs, in which there are no tasks, as idle.

        A worker that waits for a task does not know whether the epoch is over.
        """
        if self.shards:
            return self
        idle_s = min(idle_s, self.waiting_s)
        waiting_s = self.waiting_s - idle_s
        return dataclasses.replace(self, waiting_s=waiting_s, idle_s=self.idle_s + idle_s)

    def after(self, before: WorkerStats) -> WorkerStats:
        """Return the same with the work of the worker that was in this place before."""
        return self._with(before, 1)

    def _with(self, other: WorkerStats, sign: int) -> WorkerStats:
        changed: dict[str, Any] = {
            name: getattr(self, name) + sign * (getattr(other, name) or 0)
            for name in _COUNTED
            if getattr(self, name) is not None
        }
        # Between epochs that failed, it may have worked.
        changed["waiting_s"] = max(0.0, changed["waiting_s"])
        if sign > 0:
            changed["started"] = other.started
        elif changed["making_s"] < 0:
            # An item that was being sent then counted as being made: sending is noted at its end.
            changed["sending_s"] = max(0.0, changed["sending_s"] + changed["making_s"])
            changed["making_s"] = 0.0
        return dataclasses.replace(self, **changed)


_COUNTED = (
    *("items", "bytes", "starting_s", "making_s", "sending_s", "waiting_s", "idle_s"),
    *("cpu_s", "cpu_wait_s", "switches"),
)


def worker_stats(
    worker: Any,
    words: Sequence[int],
    sent: tuple[int, int],
    used: usage.Usage,
    began: int,
    memory: tuple[int, int] = (0, 0),
) -> WorkerStats:
    """Make a snapshot of a worker.

    Args:
        worker: The worker, with its index and its shards.
        words: Words of its meter.
        sent: Number of items that it has sent, and their bytes.
        used: CPU time and memory that it has used.
        began: Time of its start, of `clock()`.
        memory: Number of its blocks, and their bytes.
    """
    now = clock()
    ready, phase, since = words[BEGAN], words[PHASE], words[SINCE]
    spent = {WAITING: words[WAITING], IDLE: words[IDLE]}
    if phase in spent:
        spent[phase] += max(0, now - since)
    waiting, idle = spent.values()
    sending = words[SENDING]
    working = now - ready - waiting - idle if ready else 0
    # The start is not part of the work.
    before = used._replace(switches=0)
    if ready:
        before = usage.Usage(words[CPU_BEFORE] / 1e9, words[CPU_WAIT_BEFORE] / 1e9, switches=0)
    return WorkerStats(
        index=worker.index,
        name=str(worker),
        shards=worker.shards,
        items=sent[0],
        bytes=sent[1],
        started=began,
        # It may have been ready before its start was noted.
        starting_s=max(0, (ready or now) - began) / 1e9,
        making_s=max(0, working - sending) / 1e9,
        sending_s=min(sending, max(0, working)) / 1e9,
        waiting_s=waiting / 1e9,
        idle_s=idle / 1e9,
        blocks=memory[0],
        block_bytes=memory[1],
        **used.since(before)._asdict(),
    )
