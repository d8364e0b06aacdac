"""A snapshot of the work of one worker.

    meter, usage --worker_stats()--> WorkerStats --> since(earlier): the difference

A snapshot is plain data: it can be kept, compared, printed and pickled.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from enqueuer.common.text import ratio
from enqueuer.monitoring import meters
from enqueuer.monitoring.usage import Usage


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
        sending_s: Seconds of pickling and copying; of small items a sample stands for all.
            0 in threads.
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
    words: memoryview[int],
    sent: tuple[int, int],
    used: Usage,
    began: int,
    memory: tuple[int, int] = (0, 0),
) -> WorkerStats:
    """Make a snapshot of a worker.

    Args:
        worker: The worker, with its index and its shards.
        words: Words of its meter.
        sent: Number of items that it has sent, and their bytes.
        used: CPU time and memory that it has used.
        began: Time of its start, of `meters.clock()`.
        memory: Number of its blocks, and their bytes.
    """
    now = meters.clock()
    ready, phase, since = words[meters.BEGAN], words[meters.PHASE], words[meters.SINCE]
    spent = {meters.WAITING: words[meters.WAITING], meters.IDLE: words[meters.IDLE]}
    if phase in spent:
        spent[phase] += max(0, now - since)
    waiting, idle = spent.values()
    sending = words[meters.SENDING]
    working = now - ready - waiting - idle if ready else 0
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
        cpu_s=_since_ready(used.cpu_s, ready, words[meters.CPU_BEFORE]),
        cpu_wait_s=_since_ready(used.cpu_wait_s, ready, words[meters.CPU_WAIT_BEFORE]),
        rss_bytes=used.rss_bytes,
        blocks=memory[0],
        block_bytes=memory[1],
        switches=used.switches,
    )


def _since_ready(used_s: float | None, ready: int, before_ns: int) -> float | None:
    """Return a time without that of the start, which is not part of the work."""
    if used_s is None:
        return None
    return max(0.0, used_s - before_ns / 1e9) if ready else 0.0
