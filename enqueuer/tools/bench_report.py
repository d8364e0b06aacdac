"""The measurements, as a table, as JSON, and as a line of code for the best choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from enqueuer.common.text import duration, percent, pluralize, rate, ratio, size, table

# Twice the workers are worth it if they are this many times as fast.
HELPS = 1.15
# The best choice is the one with the fewest workers among those that reach this share of the
# fastest rate.
_AS_GOOD = 0.95
# Workers that lack a CPU for this share of the time in which they could run, while all of them
# together use less than the second share of the CPUs, do so because of other programs.
_MUCH_CPU_WAIT = 0.3
_FREE_CPUS = 0.6
_HEAD = ("", "batches/s", "bytes/s", "a batch", "first", "waiting", "CPUs", "memory", "shared")
# Default max_queue_size of GeneratorEnqueuer.
DEFAULT_QUEUE = 10


@dataclass(frozen=True)
class Measurement:
    """The rates of one way to run a generator.

    Attributes:
        backend: `"none"` for the plain loop, `"thread"` or `"process"`.
        workers: Number of workers; 0 for the plain loop.
        max_queue_size: Queue size of the enqueuer.
        batches: Number of batches after the first round of all workers.
        seconds: Time in which these batches arrived.
        batch_bytes: Average size of a batch.
        first_batch_s: Seconds until the first batch, starting the workers included.
        waiting_share: Share of its time that the loop waited for batches, from 0 to 1. The plain
            loop makes the batches in this time.
        cpus_used: Average number of busy CPUs; None if the system does not provide it.
        cpu_wait_share: Share of the time in which the workers could have run that they had no
            CPU; None if the system does not provide it.
        rss_bytes: Memory of all worker processes at the end, memory that they share included;
            None for threads.
        block_bytes: Size of the shared memory that holds batches.
        failed: The error, if this way could not be measured; the numbers are 0 then.
    """

    backend: Literal["none", "thread", "process"]
    workers: int
    max_queue_size: int
    batches: int = 0
    seconds: float = 0.0
    batch_bytes: float = 0.0
    first_batch_s: float = 0.0
    waiting_share: float = 0.0
    cpus_used: float | None = None
    cpu_wait_share: float | None = None
    rss_bytes: int | None = None
    block_bytes: int = 0
    failed: str | None = None

    @property
    def batches_per_s(self) -> float:
        """Number of batches a second."""
        return ratio(self.batches, self.seconds)

    @property
    def bytes_per_s(self) -> float:
        """Number of bytes a second."""
        return self.batches_per_s * self.batch_bytes

    @property
    def name(self) -> str:
        """A name such as `"4 threads"`."""
        if self.backend == "none":
            return "plain loop"
        return pluralize(self.workers, self.backend)


@dataclass(frozen=True)
class Report:
    """All measurements of a generator so far.

    Attributes:
        name: Name of the generator function.
        takes_shard: Whether it takes a `Shard`; if not, all workers make the same batches.
        cpus: Number of available CPUs.
        seconds: Shortest time of a measurement.
        max_workers: Largest number of workers to try.
        step_s: Seconds that the loop took for each batch, in place of a training step.
        gil_share: Share of its time that the generator holds the GIL, from 0 to 1. It is precise
            to some tenths only if the generator takes and releases the GIL several times a
            millisecond. None if it is not known.
        measured: The plain loop, then each setting in the order in which they were tried.
    """

    name: str
    takes_shard: bool
    cpus: float
    seconds: float
    max_workers: int
    step_s: float
    gil_share: float | None = None
    measured: tuple[Measurement, ...] = ()

    @property
    def best(self) -> Measurement | None:
        """The fewest workers that are within 5 % of the fastest; threads rather than processes."""
        settings = [found for found in self.measured if found.workers and found.batches]
        enough = _AS_GOOD * max((found.batches_per_s for found in settings), default=0.0)
        good = [found for found in settings if found.batches_per_s >= enough]
        return min(good, key=lambda found: (found.workers, found.backend != "thread"), default=None)

    @property
    def gain(self) -> float:
        """Rate of the best choice as a multiple of the plain loop's; 0 if it is not known."""
        return self.best.batches_per_s / self.measured[0].batches_per_s if self.best else 0.0

    @property
    def line(self) -> str | None:
        """The line of code that makes the best choice."""
        best = self.best
        if best is None:
            return None
        options = [f"workers={best.workers}", f'backend="{best.backend}"']
        if best.max_queue_size != DEFAULT_QUEUE:
            options.append(f"max_queue_size={best.max_queue_size}")
        return f"GeneratorEnqueuer({self.name}, {', '.join(options)})"

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs took CPUs from the workers."""
        return any(
            (found.cpu_wait_share or 0.0) > _MUCH_CPU_WAIT
            and (found.cpus_used or 0.0) < _FREE_CPUS * self.cpus
            for found in self.measured
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain data, for JSON."""
        best = self.best
        measured = [
            dataclasses.asdict(found)
            | {"batches_per_s": found.batches_per_s, "bytes_per_s": found.bytes_per_s}
            for found in self.measured
        ]
        return dataclasses.asdict(self) | {
            "measured": measured,
            "best": None if best is None else self.measured.index(best),
            "gain": self.gain,
            "line": self.line,
            "is_disturbed": self.is_disturbed,
        }

    def __str__(self) -> str:
        """Return a table, and the conclusions from it."""
        rows = [_cells(found) for found in self.measured if found.failed is None]
        failures = (
            f"{found.name}: {found.failed}" for found in self.measured if found.failed is not None
        )
        return "\n".join([*table([_HEAD, *rows]), *failures, *self._conclusions()])

    def _conclusions(self) -> Iterator[str]:
        if self.gil_share is not None:
            yield (
                f"{self.name} holds the GIL for about {percent(self.gil_share)} of its time, and "
                f"there are {self.cpus:g} CPUs."
            )
        best = self.best
        if best is None:
            return
        if not self.takes_shard and best.workers > 1:
            yield (
                f"{self.name} takes no shard, so each worker makes the same batches: let it take "
                "one, and do its share of the work, before you train with several."
            )
        if self.gain >= 1 / _AS_GOOD:
            waits = f"; the loop waits {percent(best.waiting_share)} of its time"
            waits = waits if self.step_s else ""
            yield f"Best: {best.name}, {self.gain:.1f} times the plain loop{waits}."
        else:
            yield f"No setting is faster than the plain loop; best of them: {best.name}."
            if not self.step_s:
                yield "It makes batches while your step runs: try --consume."
        yield f"    {self.line}"
        if self.is_disturbed:
            yield "Other programs kept the CPUs busy: measure again when they do not."


def _cells(found: Measurement) -> tuple[str, ...]:
    """Return a row of the table."""
    return (
        found.name,
        rate(found.batches_per_s),
        size(found.bytes_per_s) if found.batch_bytes else "-",
        size(found.batch_bytes) if found.batch_bytes else "-",
        duration(found.first_batch_s),
        percent(found.waiting_share),
        "-" if found.cpus_used is None else f"{found.cpus_used:.1f}",
        "-" if found.rss_bytes is None else size(found.rss_bytes),
        size(found.block_bytes) if found.block_bytes else "-",
    )
