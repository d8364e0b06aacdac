"""Snapshots of the work of the workers and the waits of the loop, and the bottleneck they show.

    LoopMeter, WorkerStats (one a worker) --> Stats --> Stats.since(earlier)
    Stats --> sums and shares --> find_bottleneck() --> Bottleneck(kind, reason, advice)
                              --> Autoscaler (`autoscaler.py`), for `workers="auto"`

A snapshot is plain data: it can be kept, compared, printed and pickled.

    the loop hardly waits, and has no CPU --------------> the CPUs
    it hardly waits for batches, but for the GIL -------> the source
    the loop hardly waits ------------------------------> the loop
    it waited for the first batch most of all ----------> start-up
    it makes the batches itself, with workers=0 --------> the source
    it reads slow elements itself ----------------------> the source
    a batch takes no longer to make than to pass -------> the transport
    the workers pickle and copy more than they make ----> the transport
    no CPU is left, also because of other programs -----> the CPUs
    threads wait for the GIL, as Python code does ------> the source
    one worker works while the others wait for it ------> a slow shard
    workers and loop both wait, for each other ---------> the queue
    else -----------------------------------------------> the source

The first that holds is reported.
"""

from __future__ import annotations

import dataclasses
import html
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from enqueuer.common.text import duration, percent, pluralize, rate, ratio, size, table
from enqueuer.monitoring import usage
from enqueuer.monitoring.meters import WorkerStats

# Share of one CPU, which is all that Python code can use.
GIL_IS_BUSY = 0.85
# Number of CPUs; threads that use more are not kept from it by the GIL.
MORE_THAN_GIL = 1.2
# Ratio of the workers that wait to the least number that could keep the CPUs busy.
_SPARE_WAITS = 1.5
# Share of the threads' waits, other than for a CPU, that were too long for the GIL.
IS_OUTSIDE = 0.25
# Share of the threads' work; several threads of Python code wait longer than that for the GIL.
LEAST_GIL_WAIT = 0.15
# Number of threads that work at a time; fewer do not wait for each other.
SEVERAL = 1.5

# Batches; fewer are not enough data.
FEWEST_BATCHES = 8
# Batches; fewer may not be like those that follow.
MANY_BATCHES = 30
# Seconds; a loop that takes no longer for a batch does little but receive it.
PASSING_S = 30e-6
# Seconds; if a batch takes no longer to make, workers cannot help, as they take longer to pass it.
CHEAP_S = 10e-6
# Share of the loop's time; less is no reason to change anything.
HARDLY_WAITS = 0.05
# Seconds to the first batch; less is not worth a mention.
LONG_S = 0.2
MOSTLY = 0.5
# Share of a worker's time in which it waits for room, and could have made more batches.
OFTEN_WAITS = 0.3
# Ratio of the time for an item to that of the other workers; less is chance.
TIMES_SLOWER = 1.25
# Ratio of the share of its time in which the slow worker waits to that of the others.
HARDLY_AS_LONG = 0.5
# Share of the loop's waits that are for one worker.
WAITED_FOR = 0.6
# Share of the CPUs there are.
CPUS_ARE_BUSY = 0.85
# Share of a worker's work in which it waited for something other than a CPU.
MOSTLY_OTHER_WAITS = 1 / 3
# Bytes; an item of that size costs its message, not its copy.
SMALL_BYTES = 1000
# Share of a worker's work in which it had no CPU.
OFTEN_LACKS_CPU = 0.3
# Share of the loop's own time in which it had no CPU, or waited for the GIL; more is not its own
# slowness.
LOOP_LACKS = 0.15
# Threads, or elements at once in a worker; the next advice can name more.
MANY = 64
# Processes; each has memory of its own, and takes a while to start.
MANY_PROCESSES = 32
# Ratio of the elements at once to those now; further away, the numbers say little.
MAX_GROWTH = 8
# Elements at once in all workers; each takes a thread.
MAX_CONCURRENCY = 1024
# Ratio of the elements at work after a change to those before; fewer are not worth a change.
_WORTH_IT = 1.15
# Ratio of the time for an item, in which all processes make and send it, to the time to make it.
_MOSTLY_SENT = 1.3
# Share of the time to make something.
IS_COMPUTING = 0.6


Kind = Literal["unknown", "loop", "start-up", "slow shard", "queue", "transport", "cpus", "source"]


@dataclass(frozen=True)
class Bottleneck:
    """The cause for which the loop waits, and what would help.

    Attributes:
        kind: `"loop"`: the training itself, and the data are fast enough. `"source"`: making
            batches. `"transport"`: sending them between processes. `"cpus"`: too few CPUs.
            `"slow shard"`: one worker, for which all wait. `"queue"`: a queue that is too short
            for batches that take unequal times. `"start-up"`: the time to the first batch.
            `"unknown"`: there is not enough data.
        reason: Sentence with the numbers that show it. A second one says why it is not sure, after
            few batches, or if the workers often had no CPU.
        advice: Sentence with a change that helps.
        change: The options of that change, as Python code: `"concurrency=64"`. "" if no option
            would help.

    Example:
        >>> found = Bottleneck("queue", "It is short.", "Give a longer one.", "max_queue_size=40")
        >>> eval(f"dict({found.change})")
        {'max_queue_size': 40}
    """

    kind: Kind
    reason: str
    advice: str
    change: str = ""

    def __str__(self) -> str:
        return f"{self.reason} {self.advice}"

    @property
    def short(self) -> str:
        """The kind and the change, which the log line and the progress bar show.

        Example:
            >>> Bottleneck("source", "It is slow.", "Make more at once.", "concurrency=64").short
            'source: concurrency=64'
        """
        return f"{self.kind}: {self.change}" if self.change else self.kind


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
        idle_cpu_s: Seconds of `loop_cpu_s` in that time.
        waits: Number of waits of each length, by an upper limit of the length in seconds, which
            is at most a sixteenth too large. A batch that was ready was not waited for.
        waited_for: Seconds of `waiting_s` for each worker, by its index; empty without order.
        queue_size: Number of finished batches that wait.
        max_queue_size: Largest number of finished batches that may wait.
        error_count: Number of errors that were skipped.
        restart_count: Number of workers that died and were replaced.
        cpus: Number of CPUs for this process and the workers; in a container, its share.
        loop_cpu_s: Seconds of CPU time of the loop's process, with all its threads.
        loop_lacked_s: Seconds in which the loop's own thread could have run, but had no CPU.
        loop_switches: Number of times that it gave up its CPU to wait for something; None if the
            system does not report it.
        workers: Work of each worker.
        elements: Number of elements in each batch; 1 without `batch_size`, and for shards.
        useful_workers: Number of workers beyond which none would make batches of its own: that of
            the shards if it was given; 1 for an iterator, and for a function that takes no shard.
            None: any number.
        side_by_side: Whether a worker runs its shards side by side, as those of an async generator
            function; False by default.
        total_items: Number of batches that were given to the loop in all runs; it goes on after
            `load_state_dict()` where the state was taken, and is no difference after `since()`.
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
    error_count: int
    restart_count: int
    cpus: float
    loop_cpu_s: float
    workers: tuple[WorkerStats, ...]
    idle_cpu_s: float = 0.0
    loop_lacked_s: float = 0.0
    loop_switches: int | None = None
    elements: int = 1
    useful_workers: int | None = None
    side_by_side: bool = False
    total_items: int = 0
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
        progress bar and the log line show this share, and `items_per_s` as the rate.
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
        remaining = max(self._later_items, sum(self.waits.values())) * (1 - share)
        for length in sorted(self.waits, reverse=True):
            remaining -= self.waits[length]
            if remaining < 0:
                return length
        return 0.0

    def since(self, earlier: Stats) -> Stats:
        """Return the work between an earlier snapshot and this one.

        If the earlier one is of another run, that is all of this run: as for a torch `DataLoader`
        without persistent workers, whose epochs are runs.

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
        if earlier.first_batch_s not in (None, self.first_batch_s):
            return self
        before = {(worker.index, worker.started): worker for worker in earlier.workers}
        return dataclasses.replace(
            self,
            **{
                name: max(0, getattr(self, name) - (getattr(earlier, name) or 0))
                for name in _COUNTED
                if getattr(self, name) is not None
            },
            waits=dict(Counter(self.waits) - Counter(earlier.waits)),
            waited_for={
                index: max(0.0, seconds - earlier.waited_for.get(index, 0.0))
                for index, seconds in self.waited_for.items()
            },
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
    *("error_count", "restart_count", "loop_cpu_s", "loop_lacked_s", "idle_cpu_s"),
    "loop_switches",
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


def waits(stats: Stats) -> str:
    """Return the share of the loop's waits, and the bottleneck if it is known, for a line."""
    found = stats.bottleneck()
    share = percent(stats.waiting_share)
    return share if found.kind == "unknown" else f"{share} ({found.short})"


def total(stats: Stats, name: str) -> float:
    """Return the sum of an attribute over the workers."""
    return sum(getattr(worker, name) or 0.0 for worker in stats.workers)


def per_item(stats: Stats, name: str) -> float:
    """Return the part of an attribute of the workers that each item has."""
    return ratio(total(stats, name), total(stats, "items"))


def longest_s(stats: Stats) -> float:
    """Return the seconds that the worker was there that was there for longest."""
    # Not the time of the run: workers may be idle between epochs, or be started later.
    return max((worker.busy_s + worker.waiting_s for worker in stats.workers), default=0.0)


def on_average(stats: Stats, name: str) -> float:
    """Return the number of workers, or of their CPUs, that were busy at a time, on average."""
    return ratio(total(stats, name), longest_s(stats))


def _workers_waiting_share(stats: Stats) -> float:
    """Return the share of their time in which the workers waited for room or a task, 0 to 1."""
    waited = total(stats, "waiting_s")
    return ratio(waited, waited + total(stats, "busy_s"))


def workers_often_wait(stats: Stats) -> bool:
    """Return whether the workers often wait, so that more of them would make no more."""
    return _workers_waiting_share(stats) > OFTEN_WAITS


def is_cheap(stats: Stats) -> bool:
    """Return whether items are so cheap to make that workers do not help.

    Large ones cost their copy, however cheap they are to make: that is the transport.
    """
    made = total(stats, "items")
    is_small = total(stats, "bytes") < SMALL_BYTES * made
    is_quick = total(stats, "making_s") < CHEAP_S * made
    return is_quick and (is_small or total(stats, "busy_s") < PASSING_S * made)


def use_s(stats: Stats) -> float:
    """Return the seconds that the loop takes for each batch, without its waits."""
    return ratio(stats.working_s, stats.items)


def elements_at_once(stats: Stats) -> int:
    """Return the number of elements, or of shards' items, that all workers make at once."""
    return sum(worker.concurrency for worker in stats.workers)


def make_s(stats: Stats) -> float:
    """Return the seconds of work for an item, if its elements were made one after the other."""
    return ratio(of_elements(stats, "busy_s"), total(stats, "items"))


def of_elements(stats: Stats, name: str) -> float:
    """Return the sum of a time over all elements, of which a worker may make several at once."""
    return math.fsum(getattr(worker, name) * worker.concurrency for worker in stats.workers)


def _computing_share(stats: Stats, of: Callable[[Stats, str], float] = total) -> float:
    """Return the share of its work in which a worker computes, if it never lacks a CPU, 0 to 1."""
    worked = of(stats, "busy_s") - of(stats, "lacked_s")
    return min(1.0, ratio(total(stats, "cpu_s"), max(worked, 1e-9)))


def _element_share(stats: Stats) -> float:
    """Return the same share of the time of an element, of which a worker may make several."""
    return _computing_share(stats, of_elements)


def elements_wait(stats: Stats) -> bool:
    """Return whether elements mostly wait, and do not compute."""
    return _element_share(stats) < IS_COMPUTING


def fills_gil(stats: Stats) -> bool:
    """Return whether the threads of a process use most of a CPU, and may wait for the GIL."""
    return on_average(stats, "cpu_s") >= IS_COMPUTING * _gils(stats)


def _gils(stats: Stats) -> float:
    """Return the number of threads that can run Python code at a time: one for each GIL."""
    if not usage.has_gil():
        return math.inf
    return 1 if stats.backend == "thread" else len(stats.workers)


def max_concurrency(workers: int, now: int) -> int:
    """Return the most elements at once in each of some workers that a change may name."""
    return min(max(MANY, MAX_GROWTH * now), MAX_CONCURRENCY // workers)


def _other_wait_share(stats: Stats) -> float:
    """Return the share of its work in which a worker waited, but not for a CPU, from 0 to 1."""
    return ratio(total(stats, "other_wait_s"), total(stats, "busy_s"))


def _are_several_busy(stats: Stats) -> bool:
    """Return whether several elements were made at a time, by threads of one worker, too."""
    return ratio(of_elements(stats, "busy_s"), longest_s(stats)) > SEVERAL


def cpus_used(stats: Stats) -> float:
    """Return the number of CPUs that were busy with the loop and the workers, on average."""
    by_loop = ratio(stats.loop_cpu_s, stats.seconds)
    return by_loop if stats.backend == "thread" else by_loop + on_average(stats, "cpu_s")


def _without_idle(stats: Stats) -> Stats:
    """Return the same without the time between epochs, and without what the loop did then."""
    # Per second of CPU time, the loop has no CPU as long as in the epochs.
    in_epochs = 1 - min(1.0, ratio(stats.idle_cpu_s, _own_cpu_s(stats)))
    return dataclasses.replace(
        stats,
        seconds=stats.seconds - stats.idle_s,
        idle_s=0.0,
        loop_cpu_s=stats.loop_cpu_s - stats.idle_cpu_s,
        idle_cpu_s=0.0,
        loop_lacked_s=in_epochs * stats.loop_lacked_s,
    )


def _holds_gil(stats: Stats) -> bool:
    """Return whether threads wait for the GIL, rather than for something outside of Python."""
    used = on_average(stats, "cpu_s")
    if stats.backend != "thread" or not usage.has_gil() or used > MORE_THAN_GIL:
        return False
    if _are_several_busy(stats) and _other_wait_share(stats) < LEAST_GIL_WAIT:
        # They compute at the same time, or would on a free machine.
        return False
    worked, lacked = total(stats, "busy_s"), total(stats, "lacked_s")
    # The loop does not hold it while it waits.
    by_loop = ratio(min(_own_cpu_s(stats), stats.working_s), stats.seconds)
    # With the waits for a CPU: a thread that holds the GIL keeps it meanwhile. That is the
    # most of the time that it can have been held, and what follows is the least.
    if used + on_average(stats, "lacked_s") + by_loop < GIL_IS_BUSY:
        return False
    if used * ratio(worked, worked - lacked) + by_loop >= GIL_IS_BUSY:
        return True
    # Others take the CPUs, so that either may be: then it is the GIL unless the threads have
    # waited longer at a time than the GIL lets them.
    outside = sum(worker.outside_s(sys.getswitchinterval()) for worker in stats.workers)
    return outside < IS_OUTSIDE * total(stats, "other_wait_s")


def max_on(cpus: float, computing_share: float) -> int:
    """Return the number of workers for which there are CPUs, if each computes for some of its time.

    These are as many as there are CPUs, and those that wait meanwhile. Waits are not spread evenly
    over time, so half as many more of the latter keep the CPUs busy.

    Example:
        >>> max_on(4, 1.0), max_on(4, 0.9), max_on(2, 0.1), max_on(0.5, 1.0)
        (4, 4, 29, 1)
        >>> max_on(4, 0.0) > 1000
        True
    """
    share = min(max(computing_share, 1e-6), 1.0)
    return max(1, int(cpus * (1 + _SPARE_WAITS * (1 - share) / share)))


def _start_up(stats: Stats, all_s: float) -> Bottleneck:
    return Bottleneck(
        "start-up",
        f"The bottleneck is the start: the loop waited {duration(stats.first_wait_s)} for the "
        f"first batch, of {duration(all_s)} in all.",
        "Start the enqueuer before the model is built, keep it over epochs, and import less in "
        "the module of the generator.",
    )


def _loop(stats: Stats) -> Bottleneck:
    """Return the finding that the loop hardly waits."""
    workers = len(stats.workers)
    # The workers that are busy all the time, and one in five to spare.
    enough = max(1, math.ceil(1.2 * on_average(stats, "busy_s")))
    itself = (
        f"it waited {percent(stats.waiting_share)} of its time for batches "
        f"(p99 {duration(stats.wait_p99_s)}), and takes {duration(use_s(stats))} for each itself"
    )
    if _loop_lacks_cpu(stats):
        return _cpus_of_loop(stats, itself, enough)
    if _takes_gil_from_loop(stats):
        return _threads_beside_loop(stats, itself, enough)
    reason, change = f"The bottleneck is the loop itself: {itself}.", f"workers={enough}"
    if enough < workers and stats.backend != "inline":
        advice = f"{pluralize(enough, 'worker')} would do as well as {workers}: {change}."
        return Bottleneck("loop", reason, advice, change)
    return Bottleneck("loop", reason, "Faster data would not make it faster.")


def _loop_lacks_cpu(stats: Stats) -> bool:
    whole_s = stats.working_s + stats.waiting_s
    return stats.backend != "inline" and stats.loop_lacked_s > LOOP_LACKS * whole_s


def _cpus_of_loop(stats: Stats, itself: str, enough: int) -> Bottleneck:
    """Return the finding that the loop is slow as it often has no CPU."""
    by_workers = on_average(stats, "cpu_s")
    # The work for a batch is the same with fewer workers: only many that are too many disturb.
    are_many = 2 * enough <= len(stats.workers) and stats.backend != "thread"
    is_less = are_many and by_workers > LOOP_LACKS
    change = f"workers={enough}" if is_less else ""
    lacked = min(1.0, ratio(stats.loop_lacked_s, stats.working_s))
    return Bottleneck(
        "cpus",
        f"The bottleneck is the CPUs: the loop has its batches in time; {itself}, of which it "
        f"had no CPU for {percent(lacked)}. The workers used {by_workers:.1f} of "
        f"{_cpus_of(stats)}.",
        f"{pluralize(enough, 'worker')} would do, and leave it more CPU time: {change}."
        if change
        else "End other programs on these CPUs, or make the work of the workers cheaper.",
        change,
    )


def _own_cpu_s(stats: Stats) -> float:
    """Return the CPU time of the loop itself, without that of threads that make batches."""
    by_threads = total(stats, "cpu_s") if stats.backend == "thread" else 0.0
    return max(0.0, stats.loop_cpu_s - by_threads)


def _takes_gil_from_loop(stats: Stats) -> bool:
    """Return whether the loop, which has its batches, waits for the GIL of the threads.

    Loop and threads then use one CPU together, and the loop computes less than it works. A loop
    that waits for a GPU leaves the CPU idle meanwhile.
    """
    if stats.backend != "thread" or stats.loop_switches is None or not usage.has_gil():
        return False
    loop_s = min(_own_cpu_s(stats), stats.working_s)
    waited_s = stats.working_s - loop_s - stats.loop_lacked_s
    by_threads = ratio(total(stats, "cpu_s"), stats.seconds)
    # As `WorkerStats.outside_s`.
    outside_s = waited_s - stats.loop_switches * sys.getswitchinterval()
    is_one_cpu = GIL_IS_BUSY < cpus_used(stats) < MORE_THAN_GIL and by_threads > LOOP_LACKS
    is_long = waited_s > LOOP_LACKS * stats.working_s < loop_s
    return is_one_cpu and is_long and outside_s < IS_OUTSIDE * waited_s


def _threads_beside_loop(stats: Stats, itself: str, enough: int) -> Bottleneck:
    """Return the finding that threads run Python code while the loop would."""
    workers = min(enough, len(stats.workers), int(stats.cpus) - 1)
    loop_s = min(_own_cpu_s(stats), stats.working_s)
    change = f"backend='process', workers={workers}"
    reason = (
        f"The bottleneck is the source: the loop has its batches in time; {itself}, of which "
        f"it computes {percent(ratio(loop_s, stats.working_s))}. Loop and threads used "
        f"{cpus_used(stats):.1f} CPUs in all, so they probably wait for each other: Python code "
        "runs in one thread at a time."
    )
    if workers > 0:
        return Bottleneck("source", reason, f"Use {change}.", change)
    return Bottleneck("source", reason, "Make the work of the threads cheaper.")


def _passing(stats: Stats) -> Bottleneck:
    """Return the finding that the loop does little but receive batches."""
    return Bottleneck(
        "transport",
        "The bottleneck is passing batches to the loop: the loop takes "
        f"{duration(use_s(stats))} for each batch, including the time to receive it, and hardly "
        "waits.",
        "Yield larger batches. If this is only a test, no change is needed.",
    )


def _cheap(stats: Stats) -> Bottleneck:
    # Of the shortest, even the sum is 0.
    made = duration(per_item(stats, "making_s")) if total(stats, "making_s") else "less than 1 us"
    return Bottleneck(
        "transport",
        f"The bottleneck is passing batches to the loop: a batch takes {made} to make, and longer "
        "than that to pass.",
        "Such cheap batches gain nothing from workers, neither threads nor processes: yield "
        "larger ones, or use a plain loop.",
    )


def _inline(stats: Stats) -> Bottleneck:
    """Return the finding that the loop makes the batches itself."""
    return Bottleneck(
        "source",
        "The bottleneck is making the batches: the loop makes them itself, and spends "
        f"{percent(stats.waiting_share)} of its time on that.",
        "workers=0 is for debugging: give workers=1 or more, which work while the loop is busy.",
        "workers=1",
    )


def _reading(stats: Stats) -> Bottleneck:
    """Return the finding that the loop reads slow elements itself."""
    return Bottleneck(
        "source",
        f"The bottleneck is reading the elements: {_waited(stats)}, most of that while it read "
        f"them from the iterable, {duration(stats.reading_s)} in all.",
        "The loop's own thread reads them, so more workers would not help: let the iterable yield "
        "objects that are cheap, such as paths, and do the rest in `map`; or pass a sequence.",
    )


def _slow_shard(stats: Stats) -> Bottleneck | None:
    """Return the finding that the loop waits for one worker while others wait for room."""
    if not stats.ordered or len(stats.workers) < 2:
        return None
    waits = [stats.waited_for.get(worker.index, 0.0) for worker in stats.workers]
    at = waits.index(max(waits))
    slow, others = stats.workers[at], stats.workers[:at] + stats.workers[at + 1 :]
    rest_s = statistics.median(worker.per_item_s for worker in others)
    waits_of_other_shards = statistics.mean(worker.waiting_share for worker in others)
    is_slow = (
        bool(slow.shards)
        and max(waits) > WAITED_FOR * sum(waits)
        and slow.waiting_share < HARDLY_AS_LONG * waits_of_other_shards
        # A worker that had no CPU is slow by chance.
        and slow.lacked_s < OFTEN_LACKS_CPU * slow.busy_s
        and slow.per_item_s > TIMES_SLOWER * rest_s
    )
    if not is_slow:
        return None
    return Bottleneck(
        "slow shard",
        f"The bottleneck is one slow shard: {slow.name} takes {duration(slow.per_item_s)} for an "
        f"item, the others {duration(rest_s)}, and {percent(stats.waiting_share)} of the loop's "
        "time goes into waiting, for it.",
        "ordered=False lets the others go ahead, as long as they have items; or give each shard as "
        "much work as the others.",
        "ordered=False",
    )


def _queue(stats: Stats) -> Bottleneck:
    """Return the finding that workers and loop wait for each other."""
    longer = 4 * stats.max_queue_size
    memory = size(longer * per_item(stats, "bytes"))
    return Bottleneck(
        "queue",
        f"The bottleneck is the queue: {_waited(stats)} for batches, and the workers "
        f"{percent(_workers_waiting_share(stats))} of theirs for room, so that they wait for each "
        "other.",
        f"Give max_queue_size={longer} instead of {stats.max_queue_size}, which may hold {memory}, "
        "or yield fewer and larger batches.",
        f"max_queue_size={longer}",
    )


def _transport(stats: Stats) -> Bottleneck:
    """Return the finding that the workers pickle and copy more than they make."""
    each, change, made_s = per_item(stats, "bytes"), "", per_item(stats, "making_s")
    advice = (
        "Make the large arrays with enqueuer.empty(), which are not copied"
        if each > 100_000 and stats.backend != "ray"
        else "Yield larger batches"
    )
    # Threads send nothing; at worst, one of them makes all.
    item_s = ratio(longest_s(stats), total(stats, "items"))
    if stats.backend == "process" and item_s > _MOSTLY_SENT * max(made_s, use_s(stats)):
        change = "backend='thread'"
        advice = f"Use backend='thread', which sends nothing. Or: {advice.lower()}"
    reason = (
        f"The bottleneck is the transport: {percent(stats.waiting_share)} of the loop's time goes "
        f"into waiting; an item of {size(each)} takes {duration(made_s)} "
        f"to make and {duration(per_item(stats, 'sending_s'))} to send."
    )
    return Bottleneck("transport", reason, f"{advice}.", change)


def _cpus(stats: Stats, by_others: bool) -> Bottleneck:
    """Return the finding that the loop and the workers, or other programs, use all CPUs."""
    return Bottleneck(
        "cpus",
        f"The bottleneck is the CPUs: {_waited(stats)}; it and the workers used "
        f"{min(cpus_used(stats), stats.cpus):.1f} of {_cpus_of(stats)}, and "
        f"the workers had none for {_missed(stats)} of the time in which they could have run"
        f"{', because other programs use the CPUs' if by_others else ''}.",
        "End these programs, or use other CPUs. More workers would only take CPU time from them."
        if by_others
        else "More workers would not help here: make the work cheaper, do it beforehand "
        "(`enqueuer pack`), or spread it over more CPUs.",
    )


def _missed(stats: Stats) -> str:
    """Return the share of the time in which the workers could have run, but had no CPU."""
    lacked = of_elements(stats, "lacked_s")
    return percent(ratio(lacked, lacked + total(stats, "cpu_s")))


def _source(stats: Stats) -> Bottleneck:
    """Return the finding that making the batches takes too long."""
    reason = f"The bottleneck is the source: {_waited(stats)}; {_making_and_using(stats)}."
    return Bottleneck("source", reason, *_advice_on_source(stats))


def _cpus_of(stats: Stats) -> str:
    return f"{stats.cpus:g} CPU{'' if stats.cpus == 1 else 's'}"


def _waited(stats: Stats) -> str:
    return f"the loop waited {percent(stats.waiting_share)} of its time"


def _making_and_using(stats: Stats) -> str:
    """Return how long it takes to make what the user knows, an element or a batch."""
    at_once, elements = elements_at_once(stats), stats.elements
    use = f"{duration(use_s(stats))} to use"
    if any(worker.shards for worker in stats.workers):
        return f"a batch takes {duration(per_item(stats, 'making_s'))} to make, and {use}"
    each = f"an element takes {duration(make_s(stats) / elements)} to make, {at_once} at once"
    return f"{each}, and {use if elements == 1 else f'a batch of {elements} takes {use}'}"


class Advice(NamedTuple):
    """What would help: a sentence, and the options of the change; see `Bottleneck`."""

    text: str
    change: str = ""


def _advice_on_source(stats: Stats) -> Advice:
    # By the time of a batch, as there may have been fewer workers before. But the loop does wait,
    # so at least one more is wanted.
    times = per_item(stats, "busy_s") / max(use_s(stats), 1e-9)
    wanted = max(len(stats.workers) + 1, math.ceil(min(times - 0.05, 1e6)))
    if stats.side_by_side and stats.useful_workers != 1 and (more := _more_shards(stats, times)):
        return more
    if len(stats.workers) >= _useful(stats):
        return _no_more_workers(stats)
    if any(worker.cpu_s is None for worker in stats.workers):
        processes = " and backend='process'" if usage.has_gil() else ""
        return Advice(
            "The system does not tell how much of it the workers compute: compare "
            f"workers=2{processes}."
        )
    if _holds_gil(stats):
        return _instead_of_threads(stats, wanted)
    if elements_wait(stats) and not any(worker.shards for worker in stats.workers):
        return _more_elements(stats, wanted)
    return _more_workers(stats, wanted)


def _more_shards(stats: Stats, times: float) -> Advice | None:
    """Return the advice to run more shards side by side in each worker, if that helps."""
    now = sum(len(worker.shards) for worker in stats.workers)
    # The code of all shards of a worker runs one at a time.
    times = min(times, 1 / max(_computing_share(stats), 1e-6))
    shards = _rounded_up(now * times, max_concurrency(1, now))
    if shards <= now or not elements_wait(stats):
        return None
    change = f"shards={shards}"
    return Advice(
        "The shards mostly wait, and a worker runs all of its shards at once, so more shards help, "
        f"and more workers hardly do: {change} (now {now}).",
        change,
    )


def _no_more_workers(stats: Stats) -> Advice:
    """Return the advice where a worker that is added would have no shard."""
    more = "shards" if stats.side_by_side else "shards and workers"
    if stats.useful_workers == 1:
        return Advice(
            "More workers would have no shard of their own: let the generator function take a "
            "shard, and divide its work by shard.split, if it does not yet; then give more "
            f"{more}."
        )
    return Advice(f"Each of the {stats.useful_workers} shards has a worker: give more {more}.")


def _useful(stats: Stats) -> float:
    """Return the number of workers that may have something to do."""
    return math.inf if stats.useful_workers is None else stats.useful_workers


def _more_workers(stats: Stats, wanted: int) -> Advice:
    """Return the advice for shards, or for elements that compute."""
    workers, share = len(stats.workers), _computing_share(stats)
    computes = f"A worker computes {percent(share)} of the time in which it has a CPU"
    most = max_on(stats.cpus, share)
    many = max(MANY if stats.backend == "thread" else MANY_PROCESSES, 2 * workers)
    enough = int(min(wanted, most, many, _useful(stats)))
    if enough <= workers:
        return Advice(
            f"{computes}, so more workers than the {workers} now would hardly help on "
            f"{_cpus_of(stats)}: make the work cheaper."
        )
    change = f"workers={enough}"
    if enough == wanted:
        text = f"About {enough} workers would keep up with the loop (now {workers}): {change}"
    elif enough < most:
        text = f"More workers would help, if there is memory: {change} (now {workers})"
    else:
        text = (
            f"{computes}, so no more than {pluralize(most, 'worker')} would help on "
            f"{_cpus_of(stats)}, and about {wanted} would be needed (now {workers}): {change}, "
            "and make the work cheaper"
        )
    return Advice(f"{text}.", change)


def _instead_of_threads(stats: Stats, wanted: int) -> Advice:
    """Return the advice for threads that wait for the GIL, or for a thread that may."""
    share, used = percent(_computing_share(stats)), on_average(stats, "cpu_s")
    processes = max(1, int(min(stats.cpus, wanted, MANY_PROCESSES, _useful(stats))))
    change = f"backend='process', workers={processes}"
    is_several = _are_several_busy(stats)
    if processes == 1:
        return Advice(
            f"The {'threads compute' if is_several else 'thread computes'} most of the time, and "
            "one process would hardly be faster: make the work cheaper."
        )
    lacked = ""
    if used < GIL_IS_BUSY:
        # So little speaks against the GIL, unless the threads also lacked CPUs.
        lacked = f" and had none for {_missed(stats)} of the time in which they could have run"
    text = (
        f"The {elements_at_once(stats)} threads used {used:.1f} CPUs in all{lacked}, so the work "
        f"is probably in Python, which runs in one thread at a time: use {change}."
        if is_several
        else f"The thread computes {share} of the time in which it has a CPU: use {change}. If "
        "the work releases the GIL, as numpy does for large arrays, "
        f"workers={processes} would help as well."
    )
    return Advice(text, change)


def _more_elements(stats: Stats, wanted: int) -> Advice:
    """Return the advice for elements that mostly wait."""
    now = elements_at_once(stats)
    needed = max(wanted * ratio(now, len(stats.workers)), now + 1)
    waits = f"An element computes {percent(_element_share(stats))} of its time and waits for the "
    # The first is the cheaper one.
    if more := _more_threads(stats, needed) or _more_processes(stats, needed):
        return Advice(f"{waits}{more.text}", more.change)
    text = f"{waits}rest; {now} at once are about as many as this machine can use"
    return Advice(f"{text}: make the elements cheaper.")


def _more_threads(stats: Stats, needed: float) -> Advice | None:
    """Return the advice to make more elements at once in each worker, if that helps."""
    workers, now = len(stats.workers), elements_at_once(stats)
    # Threads that use most of a CPU would soon wait for the GIL.
    if fills_gil(stats):
        return None
    most = max_on(min(stats.cpus, _gils(stats)), _element_share(stats))
    each = _rounded_up(min(most, needed) / workers, max_concurrency(workers, now // workers))
    if min(each * workers, most) <= _WORTH_IT * now:
        return None
    change = f"concurrency={each}"
    text = f"rest, so let each worker make more of them at once: {change} (now {now // workers})."
    return Advice(text, change)


def _more_processes(stats: Stats, needed: float) -> Advice | None:
    """Return the advice to make the elements in more processes, each with a GIL, if that helps."""
    workers, now, is_thread = len(stats.workers), elements_at_once(stats), stats.backend == "thread"
    max_of_process = max_on(1.0, _element_share(stats))
    processes = int(min(stats.cpus, MANY_PROCESSES, math.ceil(needed / max_of_process)))
    if processes <= _gils(stats):
        return None
    change, each = f"workers={processes}", now / workers
    if is_thread:
        each = _rounded_up(min(max_of_process, needed / processes), MANY)
        change = f"backend='process', {change}, concurrency={each}"
    if processes * min(each, max_of_process) <= _WORTH_IT * now:
        return None
    text = "rest, but the Python code of all threads of a process runs one at a time: use"
    return Advice(f"{text} {change}.", change)


def _rounded_up(number: float, most: int) -> int:
    """Return the next power of two, at most `most`."""
    return min(most, 1 << math.ceil(math.log2(max(1.0, number))))


def find_bottleneck(stats: Stats) -> Bottleneck:
    """Find what limits the rate of the loop."""
    stats = _without_idle(stats)
    found = _find(stats)
    return dataclasses.replace(found, reason=found.reason + _doubt(stats, found.kind))


def _doubt(stats: Stats, kind: Kind) -> str:
    """Return a sentence with the reason for which a finding is not sure, if there is one."""
    lacked = ratio(total(stats, "lacked_s"), total(stats, "busy_s"))
    # The start has passed, and the CPUs that were lacked have been counted.
    if kind not in ("unknown", "start-up") and stats.items < MANY_BATCHES:
        seconds = duration(stats.waiting_s + stats.working_s)
        why = f"there were only {pluralize(stats.items, 'batch')}, in {seconds}"
    elif kind in ("source", "queue", "slow shard") and lacked > OFTEN_LACKS_CPU:
        why = f"the workers had no CPU for {percent(lacked)} of their work"
    else:
        return ""
    return f" This is only probable, as {why}."


def _find(stats: Stats) -> Bottleneck:
    all_s = stats.first_wait_s + stats.waiting_s + stats.working_s
    if stats.first_wait_s > max(LONG_S, MOSTLY * all_s):
        return _start_up(stats, all_s)
    if stats.items < FEWEST_BATCHES or not stats.workers:
        return Bottleneck(
            "unknown",
            f"Not enough data to find the bottleneck: {pluralize(stats.items, 'batch')}.",
            f"At least {FEWEST_BATCHES} are needed.",
        )
    if stats.waiting_share < HARDLY_WAITS:
        return _passing(stats) if use_s(stats) < PASSING_S else _loop(stats)
    if stats.backend == "inline":
        return _inline(stats)
    if stats.reading_s > MOSTLY * stats.waiting_s:
        return _reading(stats)
    if is_cheap(stats):
        return _cheap(stats)
    return _of_workers(stats)


def _of_workers(stats: Stats) -> Bottleneck:
    """Find what limits the rate of the workers, for which the loop waits."""
    waited, worked = total(stats, "waiting_s"), total(stats, "busy_s")
    often_wait = workers_often_wait(stats)
    # More room would not help workers that send most of their time, waits included.
    if total(stats, "sending_s") > MOSTLY * (worked + waited if often_wait else worked):
        return _transport(stats)
    if cpus_used(stats) > CPUS_ARE_BUSY * stats.cpus:
        return _cpus(stats, by_others=False)
    # Beside other programs, workers that mostly wait lack a CPU for a while after each wait.
    lacks_cpus = total(stats, "lacked_s") > OFTEN_LACKS_CPU * worked
    if lacks_cpus and not _are_several_busy(stats) and _other_wait_share(stats) < LEAST_GIL_WAIT:
        return _cpus(stats, by_others=True)
    # Waiting for the GIL looks like waiting for room.
    if _holds_gil(stats):
        return _source(stats)
    if lacks_cpus and _other_wait_share(stats) < MOSTLY_OTHER_WAITS:
        return _cpus(stats, by_others=True)
    otherwise = _queue if often_wait else _source
    return _slow_shard(stats) or otherwise(stats)
