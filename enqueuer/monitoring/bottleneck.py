"""Find the bottleneck: from a few numbers to its kind, a reason and advice.

    Stats --> sums and shares --> find_bottleneck() --> Bottleneck(kind, reason, advice)
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

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from enqueuer.common.text import duration, percent, pluralize, ratio, size
from enqueuer.monitoring import gil
from enqueuer.monitoring.worker_stats import WorkerStats

if TYPE_CHECKING:
    from enqueuer.monitoring.stats import Stats

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


def workers_waiting_share(stats: Stats) -> float:
    """Return the share of their time in which the workers waited for room or a task, 0 to 1."""
    waited = total(stats, "waiting_s")
    return ratio(waited, waited + total(stats, "busy_s"))


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


def _computing_share(stats: Stats) -> float:
    """Return the share of its work in which a worker computes, if it never lacks a CPU, 0 to 1."""
    worked = total(stats, "busy_s") - total(stats, "lacked_s")
    return min(1.0, ratio(total(stats, "cpu_s"), max(worked, 1e-9)))


def _other_wait_share(stats: Stats) -> float:
    """Return the share of its work in which a worker waited, but not for a CPU, from 0 to 1."""
    return ratio(total(stats, "other_wait_s"), total(stats, "busy_s"))


def _are_several_busy(stats: Stats) -> bool:
    return on_average(stats, "busy_s") > SEVERAL


def _cpus_used(stats: Stats) -> float:
    """Return the number of CPUs that were busy with the loop and the workers, on average."""
    by_loop = ratio(stats.loop_cpu_s, stats.seconds)
    return by_loop if stats.backend == "thread" else by_loop + on_average(stats, "cpu_s")


def _holds_gil(stats: Stats) -> bool:
    """Return whether threads wait for the GIL, rather than for something outside of Python."""
    used, switch_s = on_average(stats, "cpu_s"), gil.switch_s()
    if stats.backend != "thread" or switch_s is None or used > MORE_THAN_GIL:
        return False
    if _are_several_busy(stats) and _other_wait_share(stats) < LEAST_GIL_WAIT:
        # They compute at the same time, or would on a free machine.
        return False
    worked, lacked = total(stats, "busy_s"), total(stats, "lacked_s")
    # The loop does not hold it while it waits.
    by_loop_s = min(max(0.0, stats.loop_cpu_s - total(stats, "cpu_s")), stats.working_s)
    by_loop = ratio(by_loop_s, stats.seconds)
    # With the waits for a CPU: a thread that holds the GIL keeps it meanwhile. That is the
    # most of the time that it can have been held, and what follows is the least.
    if used + on_average(stats, "lacked_s") + by_loop < GIL_IS_BUSY:
        return False
    if used * ratio(worked, worked - lacked) + by_loop >= GIL_IS_BUSY:
        return True
    # Others take the CPUs, so that either may be: then it is the GIL unless the threads have
    # waited longer at a time than the GIL lets them.
    outside = sum(worker.outside_s(switch_s) for worker in stats.workers)
    return outside < IS_OUTSIDE * total(stats, "other_wait_s")


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
    return Bottleneck(
        "loop",
        "The bottleneck is the loop itself: "
        f"it waited {percent(stats.waiting_share)} of its time for batches "
        f"(p99 {duration(stats.wait_p99_s)}), and takes {duration(use_s(stats))} for each itself.",
        f"{pluralize(enough, 'worker')} would do as well as {workers}."
        if enough < workers
        else "Faster data would not make it faster.",
    )


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
    return Bottleneck(
        "transport",
        "The bottleneck is passing batches to the loop: a batch takes "
        f"{duration(per_item(stats, 'making_s'))} to make, and longer than that to pass.",
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


def _slow_shard(stats: Stats, slow: WorkerStats) -> Bottleneck:
    """Return the finding that one worker works while the others wait for it."""
    others = statistics.median(w.per_item_s for w in stats.workers if w is not slow)
    return Bottleneck(
        "slow shard",
        f"The bottleneck is one slow shard: {slow.name} takes {duration(slow.per_item_s)} for an "
        f"item, the others {duration(others)}, and {percent(stats.waiting_share)} of the loop's "
        "time goes into waiting, for it.",
        "Split the work more evenly (shard.split divides it item by item), or use ordered=False "
        "if the order does not matter.",
    )


def _queue(stats: Stats) -> Bottleneck:
    """Return the finding that workers and loop wait for each other."""
    return Bottleneck(
        "queue",
        f"The bottleneck is the queue: {_waited(stats)} for batches, and the workers "
        f"{percent(workers_waiting_share(stats))} of theirs for room, so that they wait for each "
        "other.",
        f"Give a larger max_queue_size than {stats.max_queue_size}, or fewer and larger batches.",
    )


def _transport(stats: Stats) -> Bottleneck:
    """Return the finding that the workers pickle and copy more than they make."""
    each = per_item(stats, "bytes")
    advice = (
        "Make the large arrays with enqueuer.empty(), which are not copied"
        if each > 100_000
        else "Yield larger batches"
    )
    return Bottleneck(
        "transport",
        f"The bottleneck is the transport: {percent(stats.waiting_share)} of the loop's time goes "
        f"into waiting; an item of {size(each)} takes {duration(per_item(stats, 'making_s'))} "
        f"to make and {duration(per_item(stats, 'sending_s'))} to send.",
        f"{advice}; or use backend='thread', which sends nothing, if the work leaves Python.",
    )


def _cpus(stats: Stats, by_others: bool) -> Bottleneck:
    """Return the finding that the loop and the workers, or other programs, use all CPUs."""
    lacked, used = total(stats, "lacked_s"), total(stats, "cpu_s")
    missed = percent(ratio(lacked, lacked + used))
    return Bottleneck(
        "cpus",
        f"The bottleneck is the CPUs: {_waited(stats)}; it and the workers used "
        f"{min(_cpus_used(stats), stats.cpus):.1f} of {stats.cpus:g} CPUs, and "
        f"the workers had none for {missed} of the time in which they could have run"
        f"{', because other programs use the CPUs' if by_others else ''}.",
        "End these programs, or use other CPUs. More workers would only take CPU time from them."
        if by_others
        else "More workers would not help here: make the work cheaper, do it beforehand "
        "(`enqueuer pack`), or spread it over more CPUs.",
    )


def _source(stats: Stats) -> Bottleneck:
    """Return the finding that making the batches takes too long."""
    return Bottleneck(
        "source",
        f"The bottleneck is the source: {_waited(stats)}; a batch takes "
        f"{duration(per_item(stats, 'making_s'))} to make, and {duration(use_s(stats))} to use.",
        _advice_on_source(stats),
    )


def _waited(stats: Stats) -> str:
    return f"the loop waited {percent(stats.waiting_share)} of its time"


def _advice_on_source(stats: Stats) -> str:
    workers, share = len(stats.workers), _computing_share(stats)
    most, holds_gil = most_on(stats.cpus, share), _holds_gil(stats)
    if holds_gil and not _are_several_busy(stats):
        return (
            f"The thread computes {percent(share)} of its time. If that is Python "
            "code, which runs in one thread at a time, use backend='process'. If it releases the "
            f"GIL, as numpy does for large arrays, {pluralize(most, 'thread')} would help, too."
        )
    if holds_gil:
        return (
            f"The {pluralize(workers, 'thread')} used {on_average(stats, 'cpu_s'):.1f} CPUs in "
            "all, so the work is probably in Python, which runs in one thread at a time: use "
            "backend='process'."
        )
    # By the time of a batch, as there may have been fewer workers before. But the loop does wait,
    # so at least one more is wanted.
    times = per_item(stats, "busy_s") / max(use_s(stats), 1e-9)
    wanted = max(workers + 1, math.ceil(times - 0.05))
    if wanted > MANY_WORKERS and most > workers and share < IS_COMPUTING:
        limit = "memory" if most > MANY_WORKERS else f"memory, up to about {most}"
        return (
            f"The loop hardly does anything itself, so more workers than the {workers} now would "
            f"help, as long as there is {limit}.{_or_concurrency(stats)}"
        )
    if most <= workers:
        return (
            f"A worker computes {percent(share)} of its time, so more workers than "
            f"the {workers} now would hardly help on {stats.cpus:g} CPUs: make the work cheaper."
        )
    if wanted > most:
        return (
            f"A worker computes {percent(share)} of its time, so no more than "
            f"{pluralize(most, 'worker')} would help on {stats.cpus:g} CPUs, and about {wanted} "
            f"would be needed (now {workers}): make the work cheaper, too."
        )
    enough = f"About {pluralize(wanted, 'worker')} would keep up with the loop (now {workers})."
    return enough + _or_concurrency(stats)


def _or_concurrency(stats: Stats) -> str:
    """Return what else helps elements that wait, if workers are processes: threads in each."""
    are_tasks = not any(worker.shards for worker in stats.workers)
    if not are_tasks or stats.backend == "thread" or _computing_share(stats) >= IS_COMPUTING:
        return ""
    return (
        " They mostly wait, so a larger `concurrency`, the elements that each worker runs at "
        "once, would help as well, with less memory."
    )


def find_bottleneck(stats: Stats) -> Bottleneck:
    """Find what limits the rate of the loop."""
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
    often_wait = workers_waiting_share(stats) > OFTEN_WAITS
    # More room would not help workers that send most of their time, waits included.
    if total(stats, "sending_s") > MOSTLY * (worked + waited if often_wait else worked):
        return _transport(stats)
    if _cpus_used(stats) > CPUS_ARE_BUSY * stats.cpus:
        return _cpus(stats, by_others=False)
    # Waiting for the GIL looks like waiting for room.
    if _holds_gil(stats):
        return _source(stats)
    # Beside other programs, workers that mostly wait lack a CPU for a while after each wait.
    lacks_cpus = total(stats, "lacked_s") > OFTEN_LACKS_CPU * worked
    if lacks_cpus and _other_wait_share(stats) < MOSTLY_OTHER_WAITS:
        return _cpus(stats, by_others=True)
    slow = _slow_worker(stats)
    if slow is not None:
        return _slow_shard(stats, slow)
    return _queue(stats) if often_wait else _source(stats)


def _slow_worker(stats: Stats) -> WorkerStats | None:
    """Return the worker for which the loop waits while others wait for room."""
    if not stats.ordered or len(stats.workers) < 2:
        return None
    waits = [stats.waited_for.get(worker.index, 0.0) for worker in stats.workers]
    slow = stats.workers[waits.index(max(waits))]
    others = [worker for worker in stats.workers if worker is not slow]
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
