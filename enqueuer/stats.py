"""Snapshots of what was measured: what the workers did, and how long the loop waited.

    meters, usage --> WorkerStats (one a worker) --> Stats --> Stats.since(earlier) --> Bottleneck

A snapshot is plain data: it can be kept, compared, printed and pickled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enqueuer import gil, meters
from enqueuer.bottleneck import Bottleneck, Evidence, Work, find_bottleneck
from enqueuer.formats import duration, percent, pluralize, rate, ratio, size, table
from enqueuer.usage import Usage


@dataclass(frozen=True)
class WorkerStats:
    """What one worker has done since it was started, and those whose place it took.

    Its time is divided into five: starting, making, sending, waiting, idle.

    Attributes:
        index: Which worker, from 0.
        name: Such as `"worker 0 (process 4711, forkserver)"`.
        shards: Which it runs; empty for tasks, which are anybody's.
        items: How many it has sent.
        bytes: About how many these had: in processes as they were sent, in threads the data
            in every 64th item stand for the others.
        started: When, in nanoseconds of `time.monotonic_ns()`.
        starting_s: Seconds from its start until it was ready for the first order.
        making_s: Seconds in the generator, or in `map` and `__getitem__`.
        sending_s: Seconds of pickling and copying; of small items a sample stands for all.
            0 in threads.
        waiting_s: Seconds in which it had an item and no room for it, or no task.
        idle_s: Seconds between epochs, or after its last item.
        cpu_s: Seconds of CPU time since it was ready, with all threads of a process; None if the
            system does not tell, here and below.
        starved_s: Seconds since then in which it could have run, but had no CPU.
        rss_bytes: Memory of its process, with what it shares with others; None for a thread.
        blocks: How many blocks of shared memory its items lie in, waiting, in use or free.
        block_bytes: Of these.
        switches: How often it gave up its CPU to wait for something; None for a process.
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
    starved_s: float | None = None
    rss_bytes: int | None = None
    blocks: int = 0
    block_bytes: int = 0
    switches: int | None = None

    @property
    def busy_share(self) -> float:
        """How much of its time, without starting and idling, it did not wait; 0 to 1."""
        busy = self.making_s + self.sending_s
        return ratio(busy, busy + self.waiting_s)

    def since(self, earlier: WorkerStats) -> WorkerStats:
        """Return what it has done since an earlier snapshot."""
        return self._with(earlier, -1)

    def after(self, before: WorkerStats) -> WorkerStats:
        """Return the same with what the worker did that was in this place before."""
        return self._with(before, 1)

    def _with(self, other: WorkerStats, sign: int) -> WorkerStats:
        changed: dict[str, Any] = {
            name: getattr(self, name) + sign * (getattr(other, name) or 0)
            for name in _COUNTED
            if getattr(self, name) is not None
        }
        if sign > 0:
            changed["started"] = other.started
        return dataclasses.replace(self, **changed)


_COUNTED = (
    *("items", "bytes", "starting_s", "making_s", "sending_s", "waiting_s", "idle_s"),
    *("cpu_s", "starved_s", "switches"),
)


def worker_stats(
    index: int,
    name: str,
    shards: tuple[int, ...],
    words: memoryview[int],
    sent: tuple[int, int],
    used: Usage,
    began: int,
    memory: tuple[int, int] = (0, 0),
) -> WorkerStats:
    """Make a snapshot of a worker.

    Args:
        index: Which one.
        name: What it is called.
        shards: Which it runs.
        words: Of its meter.
        sent: How many items, and their bytes.
        used: CPU and memory.
        began: When it was started, of `meters.clock()`.
        memory: How many blocks, and their bytes.
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
        index=index,
        name=name,
        shards=shards,
        items=sent[0],
        bytes=sent[1],
        started=began,
        starting_s=max(0, (ready or now) - began) / 1e9,  # it may be quicker than we look
        making_s=max(0, working - sending) / 1e9,
        sending_s=min(sending, max(0, working)) / 1e9,
        waiting_s=waiting / 1e9,
        idle_s=idle / 1e9,
        cpu_s=_since_ready(used.cpu_s, ready, words[meters.CPU_BEFORE]),
        starved_s=_since_ready(used.starved_s, ready, words[meters.STARVED_BEFORE]),
        rss_bytes=used.rss_bytes,
        blocks=memory[0],
        block_bytes=memory[1],
        switches=used.switches,
    )


def _since_ready(used_s: float | None, ready: int, before_ns: int) -> float | None:
    """Return a time without that of the start, which is no part of the work."""
    if used_s is None:
        return None
    return max(0.0, used_s - before_ns / 1e9) if ready else 0.0


@dataclass(frozen=True)
class Stats:
    """What an enqueuer has done since its start: how long the loop waited, and for what.

    The loop's time begins with its first batch; what came before is `first_batch_s`.

    Attributes:
        seconds: Since the start.
        backend: `"thread"`, `"process"` or `"ray"`.
        ordered: Whether batches come in order.
        epoch: Which is read, from 0.
        items: How many batches were given to the loop.
        first_batch_s: Seconds from the start to the first batch; None if there was none yet.
        first_wait_s: How many of these the loop waited.
        waiting_s: Seconds that the loop waited for batches, after the first.
        reading_s: How many of these it read elements itself, of an iterable that is no sequence.
        working_s: Seconds that it did something else.
        idle_s: Seconds between epochs, after the last one, or after an error; they are neither.
        waits: How many waits there were of each length: a length in seconds, under which they
            are, by at most a sixteenth; and their number. A batch that was ready was not
            waited for.
        waited_for: Of `waiting_s`, how long for which worker, by its index; without order
            nobody knows.
        queue_size: How many finished batches wait.
        max_queue_size: How many may.
        fill: How many waited at what time, in seconds since the start: up to 256 samples, taken
            when the loop had taken some.
        error_count: Errors that were skipped.
        restart_count: Workers that died and were replaced.
        cpus: How many CPUs there are for this process and the workers; of a container, its share.
        loop_cpu_s: Seconds of CPU time of the loop's process, with all its threads.
        workers: What each has done.
        is_later: Whether the first batch came before, as in most differences of two snapshots.
    """

    seconds: float
    backend: str
    ordered: bool
    epoch: int
    items: int
    first_batch_s: float | None
    first_wait_s: float
    waiting_s: float
    reading_s: float
    working_s: float
    idle_s: float
    waits: Mapping[float, int]
    waited_for: Mapping[int, float]
    queue_size: int
    max_queue_size: int
    fill: tuple[tuple[float, int], ...]
    error_count: int
    restart_count: int
    cpus: float
    loop_cpu_s: float
    workers: tuple[WorkerStats, ...]
    is_later: bool = False

    @property
    def bytes(self) -> int:
        """About how many bytes all workers have sent."""
        return sum(worker.bytes for worker in self.workers)

    @property
    def block_bytes(self) -> int:
        """How many bytes of shared memory there are, for items that wait, are in use or to come."""
        return sum(worker.block_bytes for worker in self.workers)

    @property
    def items_per_s(self) -> float:
        """How many batches a second the loop has taken, after the first and by its time then.

        That time is `waiting_s` and `working_s`, so without `idle_s`.
        """
        return ratio(self._later_items, self.waiting_s + self.working_s)

    @property
    def _later_items(self) -> int:
        return self.items if self.is_later else max(0, self.items - 1)

    @property
    def waiting_share(self) -> float:
        """How much of its time after the first batch the loop waited for others, from 0 to 1.

        That time is `waiting_s` and `working_s`, so without `idle_s`. The bottleneck, the progress
        bar, the log line and `enqueuer report` show this share, and `items_per_s` as the rate.
        """
        return ratio(self.waiting_s, self.waiting_s + self.working_s)

    @property
    def wait_p50_s(self) -> float:
        """Half of the batches were waited for at most so many seconds."""
        return self.wait_quantile(0.5)

    @property
    def wait_p90_s(self) -> float:
        """Nine of ten batches were waited for at most so many seconds."""
        return self.wait_quantile(0.9)

    @property
    def wait_p99_s(self) -> float:
        """99 of 100 batches were waited for at most so many seconds."""
        return self.wait_quantile(0.99)

    def wait_quantile(self, share: float) -> float:
        """Return how many seconds a share of the batches was waited for at most; to 6 %."""
        left = max(self._later_items, sum(self.waits.values())) * (1 - share)
        for length in sorted(self.waits, reverse=True):
            left -= self.waits[length]
            if left < 0:
                return length
        return 0.0

    def since(self, earlier: Stats) -> Stats:
        """Return what was done between an earlier snapshot of the same run and this one.

        Example:
            >>> from enqueuer import GeneratorEnqueuer
            >>> with GeneratorEnqueuer(lambda: iter(range(9))) as enqueuer:
            ...     batches = iter(enqueuer)
            ...     _ = next(batches), next(batches)
            ...     earlier = enqueuer.stats()
            ...     _ = next(batches)
            ...     enqueuer.stats().since(earlier).items
            1
        """
        before = {(worker.index, worker.started): worker for worker in earlier.workers}
        waits = {
            length: count - earlier.waits.get(length, 0)
            for length, count in self.waits.items()
            if count > earlier.waits.get(length, 0)
        }
        return dataclasses.replace(
            self,
            seconds=self.seconds - earlier.seconds,
            items=self.items - earlier.items,
            first_wait_s=self.first_wait_s - earlier.first_wait_s,
            waiting_s=self.waiting_s - earlier.waiting_s,
            reading_s=self.reading_s - earlier.reading_s,
            working_s=self.working_s - earlier.working_s,
            idle_s=self.idle_s - earlier.idle_s,
            waits=waits,
            waited_for={
                index: max(0.0, seconds - earlier.waited_for.get(index, 0.0))
                for index, seconds in self.waited_for.items()
            },
            fill=tuple(sample for sample in self.fill if sample[0] > earlier.seconds),
            error_count=self.error_count - earlier.error_count,
            restart_count=self.restart_count - earlier.restart_count,
            loop_cpu_s=self.loop_cpu_s - earlier.loop_cpu_s,
            is_later=earlier.is_later or earlier.first_batch_s is not None,
            workers=tuple(
                worker.since(before[key])
                if (key := (worker.index, worker.started)) in before
                else worker
                for worker in self.workers
            ),
        )

    def bottleneck(self) -> Bottleneck:
        """Find the bottleneck: what the loop waits for, and what would help.

        Example:
            >>> from enqueuer import GeneratorEnqueuer
            >>> with GeneratorEnqueuer(lambda: iter(range(3))) as enqueuer:
            ...     _ = list(enqueuer)
            ...     print(enqueuer.stats().bottleneck())
            Not enough data to find the bottleneck: 3 batches. At least 8 are needed.
        """
        return find_bottleneck(
            Evidence(
                seconds=self.seconds,
                items=self.items,
                first_wait_s=self.first_wait_s,
                waiting_s=self.waiting_s,
                reading_s=self.reading_s,
                working_s=self.working_s,
                wait_p99_s=self.wait_p99_s,
                in_threads=self.backend == "thread",
                ordered=self.ordered,
                max_queue_size=self.max_queue_size,
                cpus=self.cpus,
                loop_cpu_s=self.loop_cpu_s,
                workers=[
                    Work(
                        name=worker.name,
                        items=worker.items,
                        bytes=worker.bytes,
                        making_s=worker.making_s,
                        sending_s=worker.sending_s,
                        waiting_s=worker.waiting_s,
                        cpu_s=worker.cpu_s,
                        starved_s=worker.starved_s,
                        waited_for_s=self.waited_for.get(worker.index, 0.0),
                        runs_shards=bool(worker.shards),
                        switches=worker.switches,
                    )
                    for worker in self.workers
                ],
                switch_s=gil.switch_s(),
            )
        )

    def __str__(self) -> str:
        """Return a table, with the bottleneck."""
        waits = [f"p{rank} {duration(self.wait_quantile(rank / 100))}" for rank in (50, 90, 99)]
        first = self.first_batch_s
        if first is not None:
            waits.append(f"first batch {duration(first)}")
        return "\n".join(
            [
                f"{pluralize(self.items, 'batch')} in {duration(self.seconds)}, "
                f"{rate(self.items_per_s)} a second",
                f"the loop waited {percent(self.waiting_share)} of its time; {', '.join(waits)}",
                f"{self.queue_size} of {pluralize(self.max_queue_size, 'batch')} wait, "
                f"{size(self.block_bytes)} in shared memory",
                *table([_HEAD, *map(_row, self.workers)]),
                str(self.bottleneck()),
            ]
        )


_HEAD = ("worker", "items", "bytes", "making", "sending", "waiting", "CPU", "memory")


def _row(worker: WorkerStats) -> tuple[str, ...]:
    """Return what is told of a worker; shares are of its time since it was ready.

    That of the CPU is more than 100 % if the worker has threads of its own.
    """
    whole = worker.making_s + worker.sending_s + worker.waiting_s + worker.idle_s
    shares = (worker.making_s, worker.sending_s, worker.waiting_s)
    cpu = worker.cpu_s
    return (
        worker.name,
        f"{worker.items:,}",
        size(worker.bytes),
        *(f"{ratio(part, whole):.0%}" for part in shares),
        "-" if cpu is None else f"{ratio(cpu, whole):.0%}",
        "-" if worker.rss_bytes is None else size(worker.rss_bytes),
    )
