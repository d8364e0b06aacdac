"""Find the bottleneck: from a few numbers to one sentence, and what to do about it.

    the loop hardly waits ------------------------------> the loop
    it waited for the first batch most of all ----------> start-up
    it reads slow elements itself ----------------------> the source
    a batch takes no longer to make than to hand over --> the transport
    the workers pickle and copy more than they make ----> the transport
    no CPU is left -------------------------------------> the CPUs
    threads wait for the GIL, as Python code does ------> the source
    one worker works while the others wait for it ------> a slow shard
    workers and loop both wait, for each other ---------> the queue
    else -----------------------------------------------> the source

The first that holds is reported. Every threshold stands at the head of this file.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from enqueuer.formats import duration, percent, pluralize, ratio, size

Kind = Literal["unknown", "loop", "start-up", "slow shard", "queue", "transport", "cpus", "source"]

FEWEST_BATCHES = 8  # fewer tell nothing
HAND_OVER_S = 30e-6  # a loop that takes no longer for a batch does little but take it
CHEAP_S = 10e-6  # what takes no longer to make, no worker makes faster than it hands it over
MANY_WORKERS = 64  # nobody needs so many; the loop does nothing
HARDLY_WAITS = 0.05  # of the loop's time; less is no reason to change anything
LONG_S = 0.2  # to the first batch; less is nothing to speak of
MOSTLY = 0.5
ALWAYS_BUSY = 0.75  # of a worker's time; one that everybody waits for is hardly ever idle
OFTEN_WAITS = 0.3  # of a worker's time, for room: it could have made so much more
TIMES_SLOWER = 1.5  # than the others, for each item
WAITED_FOR = 0.6  # of the loop's waits, for one worker
CPUS_ARE_BUSY = 0.85  # of what there are
STARVED = 0.3  # of a worker's work it had no CPU
IS_COMPUTING = 0.6  # of the time to make something
GIL_IS_BUSY = 0.85  # of one CPU, which is all that Python code can use
MORE_THAN_GIL = 1.2  # CPUs; threads that use more are not kept from it by the GIL
IS_OUTSIDE = 0.1  # of the threads' time, spent waiting for something other than the GIL


@dataclass(frozen=True)
class Bottleneck:
    """What the loop waits for, and what would help.

    Attributes:
        kind: `"loop"`: the training itself, all is well. `"source"`: making batches.
            `"transport"`: sending them between processes. `"cpus"`: there are too few.
            `"slow shard"`: one worker, for which all wait. `"queue"`: it is too short for batches
            that take unequal times. `"start-up"`: the time to the first batch. `"unknown"`:
            too little was seen.
        reason: The numbers that say so, in a sentence.
        advice: What to change, in a sentence.
    """

    kind: Kind
    reason: str
    advice: str

    def __str__(self) -> str:
        return f"{self.reason} {self.advice}"


@dataclass(frozen=True)
class Work:
    """What a worker did: seconds, and `items` of so many `bytes`; None is not known."""

    name: str
    items: int
    bytes: int
    making_s: float
    sending_s: float
    waiting_s: float
    cpu_s: float | None
    starved_s: float | None
    waited_for_s: float  # by the loop
    runs_shards: bool
    switches: int | None = None  # how often it gave up its CPU to wait

    @property
    def busy_s(self) -> float:
        """Seconds that it worked."""
        return self.making_s + self.sending_s

    @property
    def waiting_share(self) -> float:
        """How much of its time it waited, from 0 to 1."""
        return ratio(self.waiting_s, self.busy_s + self.waiting_s)

    @property
    def per_item_s(self) -> float:
        """Seconds of work for each item."""
        return ratio(self.busy_s, self.items)

    @property
    def lacked_s(self) -> float:
        """Seconds of its work in which it had no CPU; the system counts its waits, too."""
        return min(self.starved_s or 0.0, self.busy_s)

    @property
    def computed_s(self) -> float:
        """Seconds of its work in which it computed, or would have with a CPU of its own."""
        return min((self.cpu_s or 0.0) + self.lacked_s, self.busy_s)

    def outside_s(self, switch_s: float) -> float:
        """Return the least that a thread can have waited for something other than the GIL.

        A thread that waits for the GIL asks for it again each `switch_s`, and gives up its CPU
        each time: what it waited longer than that, it waited for a file, a network, a sleep.

        Example:
            >>> facts = dict(name="", items=9, bytes=0, sending_s=0.0, waiting_s=0.0, cpu_s=1.0,
            ...              starved_s=0.0, waited_for_s=0.0, runs_shards=True)
            >>> Work(making_s=10.0, switches=300, **facts).outside_s(0.005)
            7.5
            >>> Work(making_s=10.0, switches=3000, **facts).outside_s(0.005)
            0.0
        """
        if self.switches is None or self.cpu_s is None:
            return 0.0
        return max(0.0, self.busy_s - self.computed_s - self.switches * switch_s)


@dataclass(frozen=True)
class Evidence:
    """All that the bottleneck is found from; `seconds` of a run of which the rest is a part.

    `switch_s` is after how long a thread that waits for the GIL asks for it again; None: there
    is no GIL.
    """

    seconds: float
    items: int
    first_wait_s: float
    waiting_s: float
    reading_s: float
    working_s: float
    wait_p99_s: float
    in_threads: bool
    ordered: bool
    max_queue_size: int
    cpus: float
    loop_cpu_s: float
    workers: Sequence[Work]
    switch_s: float | None = 0.005

    @property
    def waiting_share(self) -> float:
        """How much of its time the loop waited, after the first batch."""
        return ratio(self.waiting_s, self.waiting_s + self.working_s)

    def on_average(self, name: str) -> float:
        """Return how many workers, or CPUs of theirs, did something at a time."""
        # not in the time of the run: they may be idle between epochs, or younger than that
        times = [worker.busy_s + worker.waiting_s for worker in self.workers]
        return ratio(self.total(name), max(times, default=0.0))

    @property
    def use_s(self) -> float:
        """Seconds that the loop takes for each batch, without its waits."""
        return ratio(self.working_s, self.items)

    @property
    def computing_share(self) -> float:
        """How much of its work a worker computes, on average, from 0 to 1."""
        return ratio(self.total("computed_s"), self.total("busy_s"))

    @property
    def most_that_help(self) -> int:
        """How many workers there are CPUs for, by what each needs of one."""
        return most_on(self.cpus, self.computing_share)

    @property
    def loop_gil_share(self) -> float:
        """How much of the time the loop may have held the GIL: not while it waited."""
        by_loop = max(0.0, self.loop_cpu_s - self.total("cpu_s"))
        return ratio(min(by_loop, self.working_s), self.seconds)

    def total(self, name: str) -> float:
        """Return the sum of something over the workers."""
        return sum(getattr(worker, name) or 0.0 for worker in self.workers)

    @property
    def cpus_used(self) -> float:
        """How many CPUs were busy with the loop and the workers, on average."""
        by_loop = ratio(self.loop_cpu_s, self.seconds)
        return by_loop if self.in_threads else by_loop + self.on_average("cpu_s")

    @property
    def worker_cpus(self) -> float:
        """How many CPUs the workers used while there was something to do, all together."""
        return self.per_s("cpu_s")

    def per_s(self, name: str) -> float:
        """Return the sum of something over the workers, for each second of the longest at work."""
        longest = max((worker.busy_s + worker.waiting_s for worker in self.workers), default=0.0)
        return ratio(self.total(name), longest)


def most_on(cpus: float, computing_share: float) -> int:
    """Return for how many workers there are CPUs, if each computes for a share of its time.

    Example:
        >>> most_on(4, 1.0), most_on(4, 0.9), most_on(2, 0.1), most_on(0.5, 1.0)
        (4, 4, 20, 1)
        >>> most_on(4, 0.0) > 1000
        True
    """
    return max(1, int(cpus / max(computing_share, 1e-6)))


def find_bottleneck(found: Evidence) -> Bottleneck:
    """Find what limits the rate of the loop."""
    all_s = found.first_wait_s + found.waiting_s + found.working_s
    if found.first_wait_s > max(LONG_S, MOSTLY * all_s):
        return _start_up(found, all_s)
    if found.items < FEWEST_BATCHES or not found.workers:
        return Bottleneck(
            "unknown",
            f"Not enough data to find the bottleneck: {pluralize(found.items, 'batch')}.",
            f"At least {FEWEST_BATCHES} are needed.",
        )
    if found.waiting_share < HARDLY_WAITS:
        return _hand_over(found) if found.use_s < HAND_OVER_S else _loop(found)
    if found.reading_s > MOSTLY * found.waiting_s:
        return _reading(found)
    if _is_cheap(found):
        return _cheap(found)
    waited, worked = found.total("waiting_s"), found.total("busy_s")
    often_wait = waited > OFTEN_WAITS * (waited + worked)
    if found.total("sending_s") > MOSTLY * worked and not often_wait:
        return _transport(found)
    if found.cpus_used > CPUS_ARE_BUSY * found.cpus or (
        found.total("lacked_s") > STARVED * worked and not _holds_gil(found)
    ):
        return _cpus(found)
    if _holds_gil(found):  # and waiting for it looks like waiting for room
        return _source(found)
    slow = _slow_worker(found)
    if slow is not None:
        return _slow_shard(found, slow)
    if often_wait:
        return _queue(found)
    return _source(found)


def _start_up(found: Evidence, all_s: float) -> Bottleneck:
    return Bottleneck(
        "start-up",
        "The bottleneck is the start: "
        f"the loop waited {duration(found.first_wait_s)} for the first batch, of "
        f"{duration(all_s)} in all.",
        "Start the enqueuer before the model is built, keep it over epochs, and import less in "
        "the module of the generator.",
    )


def _loop(found: Evidence) -> Bottleneck:
    workers = len(found.workers)
    # with those that are busy a whole turn, and one in five to spare
    enough = math.ceil(1.2 * found.on_average("busy_s"))
    spare = (
        f"{pluralize(max(1, enough), 'worker')} would do as well as {workers}."
        if max(1, enough) < workers
        else "Faster data would not make it faster."
    )
    return Bottleneck(
        "loop",
        "The bottleneck is the loop itself: "
        f"it waited {percent(found.waiting_share)} of its time for batches "
        f"(p99 {duration(found.wait_p99_s)}), and takes {duration(found.use_s)} for each itself.",
        spare,
    )


def _hand_over(found: Evidence) -> Bottleneck:
    return Bottleneck(
        "transport",
        "The bottleneck is handing over batches: "
        f"the loop takes {duration(found.use_s)} for each batch, with what it "
        "takes to receive it, and hardly waits.",
        "Yield larger batches; if these are only tests, there is nothing to be changed.",
    )


def _is_cheap(found: Evidence) -> bool:
    # What is large costs its copy, whoever has made it: that is for the transport to say.
    made, busy = found.total("making_s"), found.total("busy_s")
    items = found.total("items")
    return made < CHEAP_S * items and busy < HAND_OVER_S * items


def _cheap(found: Evidence) -> Bottleneck:
    make_s = ratio(found.total("making_s"), found.total("items"))
    return Bottleneck(
        "transport",
        "The bottleneck is handing over batches: "
        f"a batch takes {duration(make_s)} to make, and longer than that to "
        "hand over.",
        "Batches this cheap gain nothing from workers, be they threads or processes: yield "
        "larger ones, or use a plain loop.",
    )


def _reading(found: Evidence) -> Bottleneck:
    return Bottleneck(
        "source",
        "The bottleneck is reading the elements: "
        f"the loop waited {percent(found.waiting_share)} of its time, "
        f"most of that while it read them from the iterable, {duration(found.reading_s)} in all.",
        "That is done in the loop's own thread, so more workers would not help: let the iterable "
        "yield what is cheap, such as paths, and do the rest in `map`; or pass a sequence.",
    )


def _slow_worker(found: Evidence) -> Work | None:
    """Return the worker for which the loop waits while others wait for room."""
    if not found.ordered or len(found.workers) < 2:
        return None
    slow = max(found.workers, key=lambda worker: worker.waited_for_s)
    others = [worker for worker in found.workers if worker is not slow]
    is_slow = (
        slow.runs_shards
        and slow.waited_for_s > WAITED_FOR * found.total("waited_for_s")
        and slow.waiting_share < 1 - ALWAYS_BUSY
        and slow.lacked_s < STARVED * slow.busy_s  # that would be chance
        and statistics.mean(worker.waiting_share for worker in others) > OFTEN_WAITS
        and slow.per_item_s > TIMES_SLOWER * statistics.median(w.per_item_s for w in others)
    )
    return slow if is_slow else None


def _slow_shard(found: Evidence, slow: Work) -> Bottleneck:
    others = statistics.median(w.per_item_s for w in found.workers if w is not slow)
    return Bottleneck(
        "slow shard",
        "The bottleneck is one slow shard: "
        f"{slow.name} takes {duration(slow.per_item_s)} for an item, the "
        f"others {duration(others)}, and {percent(found.waiting_share)} of the loop's time goes "
        "into waiting, for it.",
        "Split the work more evenly (shard.split deals it out item by item), or take ordered=False "
        "if the order does not matter.",
    )


def _queue(found: Evidence) -> Bottleneck:
    waited = ratio(found.total("waiting_s"), found.total("waiting_s") + found.total("busy_s"))
    return Bottleneck(
        "queue",
        "The bottleneck is the queue: "
        f"the loop waited {percent(found.waiting_share)} of its time for batches, "
        f"and the workers {percent(waited)} of theirs for room, so that they wait for each other.",
        f"Give a larger max_queue_size than {found.max_queue_size}, or fewer and larger batches.",
    )


def _transport(found: Evidence) -> Bottleneck:
    items, sent = found.total("items"), found.total("bytes")
    each = ratio(sent, items)
    advice = (
        "Make the large arrays with enqueuer.empty(), which are not copied"
        if each > 100_000
        else "Yield larger batches"
    )
    return Bottleneck(
        "transport",
        "The bottleneck is the transport: "
        f"{percent(found.waiting_share)} of the loop's time goes into "
        f"waiting; an item of {size(each)} takes "
        f"{duration(ratio(found.total('making_s'), items))} to make and "
        f"{duration(ratio(found.total('sending_s'), items))} to send.",
        f"{advice}; or take backend='thread', which sends nothing, if the work leaves Python.",
    )


def _cpus(found: Evidence) -> Bottleneck:
    lacked, used = found.total("lacked_s"), found.total("cpu_s")
    missed = percent(ratio(lacked, lacked + used))
    return Bottleneck(
        "cpus",
        "The bottleneck is the CPUs: "
        f"the loop waited {percent(found.waiting_share)} of its time; it and the "
        f"workers used {found.cpus_used:.1f} of {found.cpus:g} CPUs, and the workers had none for "
        f"{missed} of the time in which they could have run.",
        "More workers would not help here: make the work cheaper, do it beforehand (`enqueuer "
        "pack`), or spread it over more CPUs.",
    )


def _source(found: Evidence) -> Bottleneck:
    workers, made = len(found.workers), found.total("items")
    # by what a batch takes, as there may have been fewer workers before; but it does wait
    make_s = ratio(found.total("busy_s"), made)
    wanted = max(workers + 1, math.ceil(make_s / max(found.use_s, 1e-9) - 0.05))
    reason = (
        "The bottleneck is the source: "
        f"the loop waited {percent(found.waiting_share)} of its time; a batch "
        f"takes {duration(ratio(found.total('making_s'), made))} to make, and "
        f"{duration(found.use_s)} to use."
    )
    if _holds_gil(found):
        return Bottleneck(
            "source",
            reason,
            f"The {pluralize(workers, 'thread')} used {found.worker_cpus:.1f} CPUs in all, so the "
            "work is probably in Python, which runs in one thread at a time: take "
            "backend='process'.",
        )
    most = found.most_that_help
    if wanted > MANY_WORKERS and most > workers and found.computing_share < IS_COMPUTING:
        limit = "memory" if most > MANY_WORKERS else f"memory, up to about {most}"
        return Bottleneck(
            "source",
            reason,
            f"The loop does next to nothing, so each worker more than the {workers} now would "
            f"help, as long as there is {limit}.",
        )
    if wanted > most:
        return Bottleneck(
            "source",
            reason,
            f"A worker computes {percent(found.computing_share)} of its time, so no more than "
            f"{pluralize(most, 'worker')} would help on {found.cpus:g} CPUs, and about {wanted} "
            f"would be needed (now {workers}): make the work cheaper, too.",
        )
    return Bottleneck(
        "source",
        reason,
        f"About {pluralize(wanted, 'worker')} would keep up with the loop (now {workers}).",
    )


def _holds_gil(found: Evidence) -> bool:
    """Return whether threads wait for the GIL, rather than for something outside of Python."""
    used, switch_s = found.worker_cpus, found.switch_s
    if not found.in_threads or switch_s is None or used > MORE_THAN_GIL:
        return False
    by_loop, worked = found.loop_gil_share, found.total("busy_s")
    # With what they had no CPU for: who holds the GIL keeps it meanwhile. That is the most of
    # the time that it can have been held, and what follows is the least.
    if used + found.per_s("lacked_s") + by_loop < GIL_IS_BUSY:
        return False
    on_a_free_machine = used * ratio(worked, worked - found.total("lacked_s"))
    if on_a_free_machine + by_loop >= GIL_IS_BUSY:
        return True
    # Others take the CPUs, so that either may be: then it is the GIL unless the threads have
    # waited longer at a time than the GIL lets them.
    return sum(work.outside_s(switch_s) for work in found.workers) < IS_OUTSIDE * worked
