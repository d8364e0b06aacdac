"""Find the bottleneck: from a few numbers to its kind, a reason and advice.

    Stats --> RunInputs: sums and shares --> find_bottleneck() --> Bottleneck(kind, reason, advice)
                                         --> Autoscaler (`autoscaler.py`), for `workers="auto"`

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
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from enqueuer.common.text import duration, percent, pluralize, ratio, size
from enqueuer.monitoring import gil
from enqueuer.monitoring.worker_stats import WorkerStats

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
# Seconds; a loop that takes no longer for a batch does little but receive it.
PASSING_S = 30e-6
# Seconds; if a batch takes no longer to make, workers cannot help, as they take longer to pass it.
CHEAP_S = 10e-6
# Share of the loop's time; less is no reason to change anything.
HARDLY_WAITS = 0.05
# Seconds to the first batch; less is not worth a mention.
LONG_S = 0.2
MOSTLY = 0.5
# Share of a worker's time; one that all others wait for is hardly ever idle.
ALWAYS_BUSY = 0.75
# Share of a worker's time in which it waits for room, and could have made more batches.
OFTEN_WAITS = 0.3
# Ratio of the time for an item to that of the other workers.
TIMES_SLOWER = 1.5
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
# Workers; if more are needed, the loop hardly does anything with a batch.
MANY_WORKERS = 64
# Share of the time to make something.
IS_COMPUTING = 0.6


@dataclass(frozen=True)
class RunInputs:
    """The numbers of `Stats` from which the bottleneck and the number of workers are found."""

    seconds: float
    backend: str
    ordered: bool
    items: int
    first_wait_s: float
    waiting_s: float
    reading_s: float
    working_s: float
    wait_p99_s: float
    waited_for: Mapping[int, float]
    max_queue_size: int
    cpus: float
    loop_cpu_s: float
    workers: Sequence[WorkerStats]

    @classmethod
    def of(cls, stats: Any) -> RunInputs:
        """Return the numbers of `Stats`."""
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: getattr(stats, name) for name in names})

    @property
    def in_threads(self) -> bool:
        """Whether the workers are threads of the loop's process."""
        return self.backend == "thread"

    @property
    def waiting_share(self) -> float:
        """Share of its time in which the loop waited, after the first batch."""
        return ratio(self.waiting_s, self.waiting_s + self.working_s)

    @property
    def longest_s(self) -> float:
        """Seconds that the worker was there that was there for longest."""
        # Not the time of the run: workers may be idle between epochs, or be started later.
        return max((worker.busy_s + worker.waiting_s for worker in self.workers), default=0.0)

    def on_average(self, name: str) -> float:
        """Return the number of workers, or of their CPUs, that were busy at a time, on average."""
        return ratio(self.total(name), self.longest_s)

    @property
    def workers_waiting_share(self) -> float:
        """Share of their time in which the workers waited for room or a task, from 0 to 1."""
        waited = self.total("waiting_s")
        return ratio(waited, waited + self.total("busy_s"))

    @property
    def is_cheap(self) -> bool:
        """Whether items are so cheap to make that workers do not help.

        Large ones cost their copy, however cheap they are to make: that is the transport.
        """
        made = self.total("items")
        is_small = self.total("bytes") < SMALL_BYTES * made
        is_quick = self.total("making_s") < CHEAP_S * made
        return is_quick and (is_small or self.total("busy_s") < PASSING_S * made)

    @property
    def use_s(self) -> float:
        """Seconds that the loop takes for each batch, without its waits."""
        return ratio(self.working_s, self.items)

    @property
    def computing_share(self) -> float:
        """Share of its work in which a worker computes, if it never lacks a CPU, from 0 to 1."""
        worked = self.total("busy_s") - self.total("lacked_s")
        return min(1.0, ratio(self.total("cpu_s"), max(worked, 1e-9)))

    @property
    def other_wait_share(self) -> float:
        """Share of its work in which a worker waited, but not for a CPU, from 0 to 1."""
        return ratio(self.total("other_wait_s"), self.total("busy_s"))

    @property
    def has_several_busy(self) -> bool:
        """Whether several workers worked at a time, on average."""
        return self.on_average("busy_s") > SEVERAL

    def total(self, name: str) -> float:
        """Return the sum of an attribute over the workers."""
        return sum(getattr(worker, name) or 0.0 for worker in self.workers)

    @property
    def cpus_used(self) -> float:
        """Number of CPUs that were busy with the loop and the workers, on average."""
        by_loop = ratio(self.loop_cpu_s, self.seconds)
        return by_loop if self.in_threads else by_loop + self.on_average("cpu_s")

    @property
    def holds_gil(self) -> bool:
        """Whether threads wait for the GIL, rather than for something outside of Python."""
        used, switch_s = self.on_average("cpu_s"), gil.switch_s()
        if not self.in_threads or switch_s is None or used > MORE_THAN_GIL:
            return False
        if self.has_several_busy and self.other_wait_share < LEAST_GIL_WAIT:
            # They compute at the same time, or would on a free machine.
            return False
        worked = self.total("busy_s")
        # The loop does not hold it while it waits.
        by_loop_s = min(max(0.0, self.loop_cpu_s - self.total("cpu_s")), self.working_s)
        by_loop = ratio(by_loop_s, self.seconds)
        # With the waits for a CPU: a thread that holds the GIL keeps it meanwhile. That is the
        # most of the time that it can have been held, and what follows is the least.
        if used + self.on_average("lacked_s") + by_loop < GIL_IS_BUSY:
            return False
        on_a_free_machine = used * ratio(worked, worked - self.total("lacked_s"))
        if on_a_free_machine + by_loop >= GIL_IS_BUSY:
            return True
        # Others take the CPUs, so that either may be: then it is the GIL unless the threads have
        # waited longer at a time than the GIL lets them.
        outside = sum(work.outside_s(switch_s) for work in self.workers)
        return outside < IS_OUTSIDE * self.total("other_wait_s")


def most_on(cpus: float, computing_share: float) -> int:
    """Return the number of workers for which there are CPUs, if each computes for some of its time.

    These are as many as there are CPUs, and those that wait meanwhile. Waits are not spread evenly
    over time, so half as many more of the latter keep the CPUs busy.

    Example:
        >>> most_on(4, 1.0), most_on(4, 0.9), most_on(2, 0.1), most_on(0.5, 1.0)
        (4, 4, 29, 1)
        >>> most_on(4, 0.0) > 1000
        True
    """
    share = min(max(computing_share, 1e-6), 1.0)
    return max(1, int(cpus * (1 + _SPARE_WAITS * (1 - share) / share)))


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
        reason: Sentence with the numbers that show it.
        advice: Sentence with a change that helps.
    """

    kind: Kind
    reason: str
    advice: str

    def __str__(self) -> str:
        return f"{self.reason} {self.advice}"


def too_few(items: int, fewest: int) -> Bottleneck:
    """Return the finding that there is not enough data."""
    return Bottleneck(
        "unknown",
        f"Not enough data to find the bottleneck: {pluralize(items, 'batch')}.",
        f"At least {fewest} are needed.",
    )


def start_up(run: RunInputs, all_s: float) -> Bottleneck:
    """Return the finding that the loop waited for its first batch most of all."""
    return Bottleneck(
        "start-up",
        "The bottleneck is the start: "
        f"the loop waited {duration(run.first_wait_s)} for the first batch, of "
        f"{duration(all_s)} in all.",
        "Start the enqueuer before the model is built, keep it over epochs, and import less in "
        "the module of the generator.",
    )


def loop(run: RunInputs) -> Bottleneck:
    """Return the finding that the loop hardly waits."""
    workers = len(run.workers)
    # The workers that are busy all the time, and one in five to spare.
    enough = math.ceil(1.2 * run.on_average("busy_s"))
    spare = (
        f"{pluralize(max(1, enough), 'worker')} would do as well as {workers}."
        if max(1, enough) < workers
        else "Faster data would not make it faster."
    )
    return Bottleneck(
        "loop",
        "The bottleneck is the loop itself: "
        f"it waited {percent(run.waiting_share)} of its time for batches "
        f"(p99 {duration(run.wait_p99_s)}), and takes {duration(run.use_s)} for each itself.",
        spare,
    )


def passing(run: RunInputs) -> Bottleneck:
    """Return the finding that the loop does little but receive batches."""
    return Bottleneck(
        "transport",
        "The bottleneck is passing batches to the loop: "
        f"the loop takes {duration(run.use_s)} for each batch, including the time to receive it, "
        "and hardly waits.",
        "Yield larger batches. If this is only a test, no change is needed.",
    )


def cheap(run: RunInputs) -> Bottleneck:
    """Return the finding that a batch takes no longer to make than to pass to the loop."""
    make_s = ratio(run.total("making_s"), run.total("items"))
    return Bottleneck(
        "transport",
        "The bottleneck is passing batches to the loop: "
        f"a batch takes {duration(make_s)} to make, and longer than that to pass.",
        "Such cheap batches gain nothing from workers, neither threads nor processes: yield "
        "larger ones, or use a plain loop.",
    )


def inline(run: RunInputs) -> Bottleneck:
    """Return the finding that the loop makes the batches itself."""
    return Bottleneck(
        "source",
        "The bottleneck is making the batches: "
        f"the loop makes them itself, and spends {percent(run.waiting_share)} of its time on that.",
        "workers=0 is for debugging: give workers=1 or more, which work while the loop is busy.",
    )


def reading(run: RunInputs) -> Bottleneck:
    """Return the finding that the loop reads slow elements itself."""
    return Bottleneck(
        "source",
        "The bottleneck is reading the elements: "
        f"the loop waited {percent(run.waiting_share)} of its time, "
        f"most of that while it read them from the iterable, {duration(run.reading_s)} in all.",
        "The loop's own thread reads them, so more workers would not help: let the iterable yield "
        "objects that are cheap, such as paths, and do the rest in `map`; or pass a sequence.",
    )


def slow_shard(run: RunInputs, slow: WorkerStats) -> Bottleneck:
    """Return the finding that one worker works while the others wait for it."""
    others = statistics.median(w.per_item_s for w in run.workers if w is not slow)
    return Bottleneck(
        "slow shard",
        "The bottleneck is one slow shard: "
        f"{slow.name} takes {duration(slow.per_item_s)} for an item, the "
        f"others {duration(others)}, and {percent(run.waiting_share)} of the loop's time goes "
        "into waiting, for it.",
        "Split the work more evenly (shard.split divides it item by item), or use ordered=False "
        "if the order does not matter.",
    )


def queue(run: RunInputs) -> Bottleneck:
    """Return the finding that workers and loop wait for each other."""
    return Bottleneck(
        "queue",
        "The bottleneck is the queue: "
        f"the loop waited {percent(run.waiting_share)} of its time for batches, "
        f"and the workers {percent(run.workers_waiting_share)} of theirs for room, so that they "
        "wait for each other.",
        f"Give a larger max_queue_size than {run.max_queue_size}, or fewer and larger batches.",
    )


def transport(run: RunInputs) -> Bottleneck:
    """Return the finding that the workers pickle and copy more than they make."""
    items, sent = run.total("items"), run.total("bytes")
    each = ratio(sent, items)
    advice = (
        "Make the large arrays with enqueuer.empty(), which are not copied"
        if each > 100_000
        else "Yield larger batches"
    )
    return Bottleneck(
        "transport",
        "The bottleneck is the transport: "
        f"{percent(run.waiting_share)} of the loop's time goes into "
        f"waiting; an item of {size(each)} takes "
        f"{duration(ratio(run.total('making_s'), items))} to make and "
        f"{duration(ratio(run.total('sending_s'), items))} to send.",
        f"{advice}; or use backend='thread', which sends nothing, if the work leaves Python.",
    )


def cpus(run: RunInputs, by_others: bool) -> Bottleneck:
    """Return the finding that the loop and the workers, or other programs, use all CPUs."""
    lacked, used = run.total("lacked_s"), run.total("cpu_s")
    missed = percent(ratio(lacked, lacked + used))
    return Bottleneck(
        "cpus",
        f"The bottleneck is the CPUs: the loop waited {percent(run.waiting_share)} of its time; "
        f"it and the workers used {min(run.cpus_used, run.cpus):.1f} of {run.cpus:g} CPUs, and "
        f"the workers had none for {missed} of the time in which they could have run"
        f"{', because other programs use the CPUs' if by_others else ''}.",
        "End these programs, or use other CPUs. More workers would only take CPU time from them."
        if by_others
        else "More workers would not help here: make the work cheaper, do it beforehand "
        "(`enqueuer pack`), or spread it over more CPUs.",
    )


def source(run: RunInputs) -> Bottleneck:
    """Return the finding that making the batches takes too long."""
    made = run.total("items")
    return Bottleneck(
        "source",
        "The bottleneck is the source: "
        f"the loop waited {percent(run.waiting_share)} of its time; a batch "
        f"takes {duration(ratio(run.total('making_s'), made))} to make, and "
        f"{duration(run.use_s)} to use.",
        _advice_on_source(run),
    )


def _advice_on_source(run: RunInputs) -> str:
    workers, most = len(run.workers), most_on(run.cpus, run.computing_share)
    if run.holds_gil and not run.has_several_busy:
        return (
            f"The thread computes {percent(run.computing_share)} of its time. If that is Python "
            "code, which runs in one thread at a time, use backend='process'. If it releases the "
            f"GIL, as numpy does for large arrays, {pluralize(most, 'thread')} would help, too."
        )
    if run.holds_gil:
        return (
            f"The {pluralize(workers, 'thread')} used {run.on_average('cpu_s'):.1f} CPUs in all, "
            "so the work is probably in Python, which runs in one thread at a time: use "
            "backend='process'."
        )
    # By the time of a batch, as there may have been fewer workers before. But the loop does wait,
    # so at least one more is wanted.
    make_s = ratio(run.total("busy_s"), run.total("items"))
    wanted = max(workers + 1, math.ceil(make_s / max(run.use_s, 1e-9) - 0.05))
    if wanted > MANY_WORKERS and most > workers and run.computing_share < IS_COMPUTING:
        limit = "memory" if most > MANY_WORKERS else f"memory, up to about {most}"
        return (
            f"The loop hardly does anything itself, so more workers than the {workers} now would "
            f"help, as long as there is {limit}.{_or_concurrency(run)}"
        )
    if most <= workers:
        return (
            f"A worker computes {percent(run.computing_share)} of its time, so more workers than "
            f"the {workers} now would hardly help on {run.cpus:g} CPUs: make the work cheaper."
        )
    if wanted > most:
        return (
            f"A worker computes {percent(run.computing_share)} of its time, so no more than "
            f"{pluralize(most, 'worker')} would help on {run.cpus:g} CPUs, and about {wanted} "
            f"would be needed (now {workers}): make the work cheaper, too."
        )
    enough = f"About {pluralize(wanted, 'worker')} would keep up with the loop (now {workers})."
    return enough + _or_concurrency(run)


def _or_concurrency(run: RunInputs) -> str:
    """Return what else helps elements that wait, if workers are processes: threads in each."""
    are_tasks = not any(worker.shards for worker in run.workers)
    if not are_tasks or run.in_threads or run.computing_share >= IS_COMPUTING:
        return ""
    return (
        " They mostly wait, so a larger `concurrency`, the elements that each worker runs at "
        "once, would help as well, with less memory."
    )


def find_bottleneck(run: RunInputs) -> Bottleneck:
    """Find what limits the rate of the loop."""
    all_s = run.first_wait_s + run.waiting_s + run.working_s
    if run.first_wait_s > max(LONG_S, MOSTLY * all_s):
        return start_up(run, all_s)
    if run.items < FEWEST_BATCHES or not run.workers:
        return too_few(run.items, FEWEST_BATCHES)
    if run.waiting_share < HARDLY_WAITS:
        return passing(run) if run.use_s < PASSING_S else loop(run)
    if run.backend == "inline":
        return inline(run)
    if run.reading_s > MOSTLY * run.waiting_s:
        return reading(run)
    if run.is_cheap:
        return cheap(run)
    waited, worked = run.total("waiting_s"), run.total("busy_s")
    often_wait = run.workers_waiting_share > OFTEN_WAITS
    # More room would not help workers that send most of their time, waits included.
    sending = run.total("sending_s")
    if sending > MOSTLY * (worked + waited if often_wait else worked):
        return transport(run)
    if run.cpus_used > CPUS_ARE_BUSY * run.cpus:
        return cpus(run, by_others=False)
    lacks_cpus = run.total("lacked_s") > OFTEN_LACKS_CPU * worked
    # Beside other programs, workers that mostly wait lack a CPU for a while after each wait.
    if lacks_cpus and not run.holds_gil and run.other_wait_share < MOSTLY_OTHER_WAITS:
        return cpus(run, by_others=True)
    # Waiting for the GIL looks like waiting for room.
    if run.holds_gil:
        return source(run)
    slow = _slow_worker(run)
    if slow is not None:
        return slow_shard(run, slow)
    if often_wait:
        return queue(run)
    return source(run)


def _slow_worker(run: RunInputs) -> WorkerStats | None:
    """Return the worker for which the loop waits while others wait for room."""
    if not run.ordered or len(run.workers) < 2:
        return None
    waits = [run.waited_for.get(worker.index, 0.0) for worker in run.workers]
    slow = run.workers[waits.index(max(waits))]
    others = [worker for worker in run.workers if worker is not slow]
    is_slow = (
        bool(slow.shards)
        and max(waits) > WAITED_FOR * sum(waits)
        and slow.waiting_share < 1 - ALWAYS_BUSY
        # A worker that had no CPU is slow by chance.
        and slow.lacked_s < OFTEN_LACKS_CPU * slow.busy_s
        and statistics.mean(worker.waiting_share for worker in others) > OFTEN_WAITS
        and slow.per_item_s > TIMES_SLOWER * statistics.median(w.per_item_s for w in others)
    )
    return slow if is_slow else None
