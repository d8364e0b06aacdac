"""Snapshots of the work of the workers and the waits of the loop, as text and as HTML.

    LoopMeter, WorkerStats (one a worker) --> Stats --> Stats.since(earlier) --> Bottleneck

A snapshot is plain data: it can be kept, compared, printed and pickled.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping
from dataclasses import dataclass

from enqueuer.common.text import duration, percent, pluralize, rate, ratio, size, table
from enqueuer.monitoring.bottleneck import Bottleneck, find_bottleneck
from enqueuer.monitoring.worker_stats import WorkerStats


@dataclass(frozen=True, repr=False)
class Stats:
    """The work of an enqueuer since its start, and the waits of the loop.

    The loop's time begins with its first batch; the time before that is `first_batch_s`.
    `print()` shows a table, and so does a notebook.

    Attributes:
        seconds: Seconds since the start.
        backend: `"thread"`, `"process"` or `"ray"`; `"inline"` with `workers=0`.
        ordered: Whether batches come in order.
        epoch: Number of the epoch that is read, from 0.
        items: Number of batches that were given to the loop.
        first_batch_s: Seconds from the start to the first batch; None if there was none yet.
        first_wait_s: Seconds of these in which the loop waited.
        waiting_s: Seconds in which the loop waited for batches, after the first.
        reading_s: Seconds of these in which the loop read elements of an iterable itself.
        working_s: Seconds in which the loop did something else.
        idle_s: Seconds between epochs, after the last one, or after an error; they are neither.
        waits: Number of waits of each length, by an upper limit of the length in seconds, which
            is at most a sixteenth too large. A batch that was ready was not waited for.
        waited_for: Seconds of `waiting_s` for each worker, by its index; empty without order.
        queue_size: Number of finished batches that wait.
        max_queue_size: Largest number of finished batches that may wait.
        queue_depth: Samples of a time, in seconds since the start, and the number of finished
            batches then; up to 256, taken when the loop had taken some.
        error_count: Number of errors that were skipped.
        restart_count: Number of workers that died and were replaced.
        cpus: Number of CPUs for this process and the workers; in a container, its share.
        loop_cpu_s: Seconds of CPU time of the loop's process, with all its threads.
        workers: Work of each worker.
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
    queue_depth: tuple[tuple[float, int], ...]
    error_count: int
    restart_count: int
    cpus: float
    loop_cpu_s: float
    workers: tuple[WorkerStats, ...]
    is_later: bool = False

    @property
    def bytes(self) -> int:
        """Approximate number of bytes that all workers have sent."""
        return sum(worker.bytes for worker in self.workers)

    @property
    def block_bytes(self) -> int:
        """Size of all shared memory in bytes, for items that wait, are in use or to come."""
        return sum(worker.block_bytes for worker in self.workers)

    @property
    def items_per_s(self) -> float:
        """Number of batches a second that the loop has taken after the first one.

        The time is the sum of `waiting_s` and `working_s`, without `idle_s`.
        """
        return ratio(self._later_items, self.waiting_s + self.working_s)

    @property
    def _later_items(self) -> int:
        return self.items if self.is_later else max(0, self.items - 1)

    @property
    def waiting_share(self) -> float:
        """Share of its time in which the loop waited for batches after the first one, from 0 to 1.

        The time is the sum of `waiting_s` and `working_s`, without `idle_s`. The bottleneck, the
        progress bar, the log line and `enqueuer report` show this share, and `items_per_s` as the
        rate.
        """
        return ratio(self.waiting_s, self.waiting_s + self.working_s)

    @property
    def wait_p50_s(self) -> float:
        """Seconds in which half of the batches came."""
        return self.wait_quantile(0.5)

    @property
    def wait_p90_s(self) -> float:
        """Seconds in which nine of ten batches came."""
        return self.wait_quantile(0.9)

    @property
    def wait_p99_s(self) -> float:
        """Seconds in which 99 of 100 batches came."""
        return self.wait_quantile(0.99)

    def wait_quantile(self, share: float) -> float:
        """Return the seconds in which a share of the batches came; accurate to 6 %."""
        left = max(self._later_items, sum(self.waits.values())) * (1 - share)
        for length in sorted(self.waits, reverse=True):
            left -= self.waits[length]
            if left < 0:
                return length
        return 0.0

    def since(self, earlier: Stats) -> Stats:
        """Return the work between an earlier snapshot of the same run and this one.

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
        waits = {at: count - earlier.waits.get(at, 0) for at, count in self.waits.items()}
        return dataclasses.replace(
            self,
            **{name: getattr(self, name) - getattr(earlier, name) for name in _COUNTED},
            waits={at: count for at, count in waits.items() if count > 0},
            waited_for={
                index: max(0.0, seconds - earlier.waited_for.get(index, 0.0))
                for index, seconds in self.waited_for.items()
            },
            queue_depth=tuple(at for at in self.queue_depth if at[0] > earlier.seconds),
            is_later=earlier.is_later or earlier.first_batch_s is not None,
            workers=tuple(
                worker.since(before[key])
                if (key := (worker.index, worker.started)) in before
                else worker
                for worker in self.workers
            ),
        )

    def bottleneck(self) -> Bottleneck:
        """Find the cause for which the loop waits, and a change that would help.

        Example:
            >>> from enqueuer import GeneratorEnqueuer
            >>> with GeneratorEnqueuer(lambda: iter(range(3))) as enqueuer:
            ...     _ = list(enqueuer)
            ...     print(enqueuer.stats().bottleneck())
            Not enough data to find the bottleneck: 3 batches. At least 8 are needed.
        """
        return find_bottleneck(self)

    def __repr__(self) -> str:
        """Return one line with the rate and the share of the waits."""
        waited, workers = percent(self.waiting_share), pluralize(len(self.workers), "worker")
        return (
            f"<Stats {pluralize(self.items, 'batch')} in {duration(self.seconds)}, "
            f"{rate(self.items_per_s)} a second, {workers}, the loop waited {waited}>"
        )

    def _repr_html_(self) -> str:
        """Return the table as HTML, which notebooks show."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def __str__(self) -> str:
        """Return a table, with the bottleneck."""
        waits = [f"p{rank} {duration(self.wait_quantile(rank / 100))}" for rank in (50, 90, 99)]
        first = self.first_batch_s
        if first is not None:
            waits.append(f"first batch {duration(first)}")
        lines = [
            f"{pluralize(self.items, 'batch')} in {duration(self.seconds)}, "
            f"{rate(self.items_per_s)} a second",
            f"the loop waited {percent(self.waiting_share)} of its time; {', '.join(waits)}",
            f"{self.queue_size} of {pluralize(self.max_queue_size, 'batch')} wait, "
            f"{size(self.block_bytes)} in shared memory",
            *table([_HEAD, *map(_row, self.workers)]),
            str(self.bottleneck()),
        ]
        return "\n".join(lines)


# What only grows, so that a difference has a meaning.
_COUNTED = (
    *("seconds", "items", "first_wait_s", "waiting_s", "reading_s", "working_s", "idle_s"),
    *("error_count", "restart_count", "loop_cpu_s"),
)
_HEAD = ("worker", "items", "bytes", "making", "sending", "waiting", "CPU", "memory")


def _row(worker: WorkerStats) -> tuple[str, ...]:
    """Return the cells of a worker; shares are of its time since it was ready.

    The share of the CPU is more than 100 % if the worker has threads of its own.
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
