"""Find the bottleneck: from a few numbers to its kind, a reason and advice.

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

The first that holds is reported. The thresholds stand at the head of this file, those for the GIL
in `bottleneck_inputs.py`; `bottleneck_texts.py` has the sentences.
"""

from __future__ import annotations

import statistics

from enqueuer.monitoring import bottleneck_texts as texts
from enqueuer.monitoring.bottleneck_inputs import RunInputs, WorkerInputs
from enqueuer.monitoring.bottleneck_texts import Bottleneck

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


def find_bottleneck(run: RunInputs) -> Bottleneck:
    """Find what limits the rate of the loop."""
    all_s = run.first_wait_s + run.waiting_s + run.working_s
    if run.first_wait_s > max(LONG_S, MOSTLY * all_s):
        return texts.start_up(run, all_s)
    if run.items < FEWEST_BATCHES or not run.workers:
        return texts.too_few(run.items, FEWEST_BATCHES)
    if run.waiting_share < HARDLY_WAITS:
        return texts.passing(run) if run.use_s < PASSING_S else texts.loop(run)
    if run.is_inline:
        return texts.inline(run)
    if run.reading_s > MOSTLY * run.waiting_s:
        return texts.reading(run)
    waited, worked = run.total("waiting_s"), run.total("busy_s")
    if is_cheap(run.total("making_s"), worked, run.total("items"), run.total("bytes")):
        return texts.cheap(run)
    often_wait = waited > OFTEN_WAITS * (waited + worked)
    # More room would not help workers that send most of their time, waits included.
    sending = run.total("sending_s")
    if sending > MOSTLY * (worked + waited if often_wait else worked):
        return texts.transport(run)
    if run.cpus_used > CPUS_ARE_BUSY * run.cpus:
        return texts.cpus(run)
    lacks_cpus = run.total("lacked_s") > OFTEN_LACKS_CPU * worked
    # Beside other programs, workers that mostly wait lack a CPU for a while after each wait.
    if lacks_cpus and not run.holds_gil and run.other_wait_share < MOSTLY_OTHER_WAITS:
        return texts.other_programs(run)
    # Waiting for the GIL looks like waiting for room.
    if run.holds_gil:
        return texts.source(run)
    slow = _slow_worker(run)
    if slow is not None:
        return texts.slow_shard(run, slow)
    if often_wait:
        return texts.queue(run)
    return texts.source(run)


def is_cheap(making_s: float, busy_s: float, items: float, size: float) -> bool:
    """Return whether items are so cheap to make that workers do not help.

    Large ones cost their copy, however cheap they are to make: that is the transport.

    Args:
        making_s: Seconds in which all workers made items.
        busy_s: The same, with the time to send them.
        items: Number of them.
        size: Bytes of all.

    Example:
        >>> is_cheap(5.0, 20.0, 1_000_000, 0), is_cheap(5.0, 50.0, 1_000_000, 10**10)
        (True, False)
    """
    is_small = size < SMALL_BYTES * items
    return making_s < CHEAP_S * items and (is_small or busy_s < PASSING_S * items)


def _slow_worker(run: RunInputs) -> WorkerInputs | None:
    """Return the worker for which the loop waits while others wait for room."""
    if not run.ordered or len(run.workers) < 2:
        return None
    slow = max(run.workers, key=lambda worker: worker.waited_for_s)
    others = [worker for worker in run.workers if worker is not slow]
    is_slow = (
        slow.runs_shards
        and slow.waited_for_s > WAITED_FOR * run.total("waited_for_s")
        and slow.waiting_share < 1 - ALWAYS_BUSY
        # A worker that had no CPU is slow by chance.
        and slow.lacked_s < OFTEN_LACKS_CPU * slow.busy_s
        and statistics.mean(worker.waiting_share for worker in others) > OFTEN_WAITS
        and slow.per_item_s > TIMES_SLOWER * statistics.median(w.per_item_s for w in others)
    )
    return slow if is_slow else None
