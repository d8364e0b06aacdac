"""Describing each bottleneck: the numbers that show it, and advice.

RunInputs --> Bottleneck(kind, reason, advice); `bottleneck.py` decides which one it is
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Literal

from enqueuer.common.text import duration, percent, pluralize, ratio, size
from enqueuer.monitoring import gil
from enqueuer.monitoring.bottleneck_inputs import RunInputs, WorkerInputs

Kind = Literal["unknown", "loop", "start-up", "slow shard", "queue", "transport", "cpus", "source"]

# Workers; if more are needed, the loop hardly does anything with a batch.
MANY_WORKERS = 64
# Share of the time to make something.
IS_COMPUTING = 0.6


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


def slow_shard(run: RunInputs, slow: WorkerInputs) -> Bottleneck:
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
    waited = ratio(run.total("waiting_s"), run.total("waiting_s") + run.total("busy_s"))
    return Bottleneck(
        "queue",
        "The bottleneck is the queue: "
        f"the loop waited {percent(run.waiting_share)} of its time for batches, "
        f"and the workers {percent(waited)} of theirs for room, so that they wait for each other.",
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


def cpus(run: RunInputs) -> Bottleneck:
    """Return the finding that the loop and the workers use all CPUs."""
    return Bottleneck(
        "cpus",
        f"{_lack_of_cpus(run)}.",
        "More workers would not help here: make the work cheaper, do it beforehand (`enqueuer "
        "pack`), or spread it over more CPUs.",
    )


def other_programs(run: RunInputs) -> Bottleneck:
    """Return the finding that other programs use the CPUs."""
    return Bottleneck(
        "cpus",
        f"{_lack_of_cpus(run)}, because other programs use the CPUs.",
        "End these programs, or use other CPUs. More workers would only take CPU time from them.",
    )


def _lack_of_cpus(run: RunInputs) -> str:
    lacked, used = run.total("lacked_s"), run.total("cpu_s")
    missed = percent(ratio(lacked, lacked + used))
    return (
        f"The bottleneck is the CPUs: the loop waited {percent(run.waiting_share)} of its time; "
        f"it and the workers used {min(run.cpus_used, run.cpus):.1f} of {run.cpus:g} CPUs, and "
        f"the workers had none for {missed} of the time in which they could have run"
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
    workers, most = len(run.workers), run.most_that_help
    held = run.gil_share
    if run.holds_gil and not run.has_several_busy and held is not None:
        if held >= gil.IS_PYTHON:
            return (
                f"The workers held the GIL for {percent(held)} of the time, so it is Python code, "
                "which runs in one thread at a time: use backend='process'."
            )
        return (
            f"The workers held the GIL for {percent(held)} of the time, so "
            f"{pluralize(most, 'thread')} would be faster."
        )
    if run.holds_gil and not run.has_several_busy:
        return (
            f"The thread computes {percent(run.computing_share)} of its time. If that is Python "
            "code, which runs in one thread at a time, use backend='process'. If it releases the "
            f"GIL, as numpy does for large arrays, {pluralize(most, 'thread')} would help, too."
        )
    if run.holds_gil:
        return (
            f"The {pluralize(workers, 'thread')} used {run.worker_cpus:.1f} CPUs in all, so the "
            "work is probably in Python, which runs in one thread at a time: use "
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
    are_tasks = not any(worker.runs_shards for worker in run.workers)
    if not are_tasks or run.in_threads or run.computing_share >= IS_COMPUTING:
        return ""
    return (
        " They mostly wait, so a larger `concurrency`, the elements that each worker runs at "
        "once, would help as well, with less memory."
    )
