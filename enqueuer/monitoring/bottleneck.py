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

The first that holds is reported. The thresholds stand at the head of this file, those for the GIL
in `evidence.py`; `findings.py` has the sentences.
"""

from __future__ import annotations

import statistics

from enqueuer.monitoring import findings
from enqueuer.monitoring.evidence import Evidence, Work
from enqueuer.monitoring.findings import Bottleneck

# Batches; fewer are not enough data.
FEWEST_BATCHES = 8
# Seconds; a loop that takes no longer for a batch does little but take it.
HAND_OVER_S = 30e-6
# Seconds; if a batch takes no longer to make, no worker makes it faster than it hands it over.
CHEAP_S = 10e-6
# Share of the loop's time; less is no reason to change anything.
HARDLY_WAITS = 0.05
# Seconds to the first batch; less is not worth a mention.
LONG_S = 0.2
MOSTLY = 0.5
# Share of a worker's time; one that all others wait for is hardly ever idle.
ALWAYS_BUSY = 0.75
# Share of a worker's time that it waits for room: it could have made so much more.
OFTEN_WAITS = 0.3
# Ratio of the time for an item to that of the other workers.
TIMES_SLOWER = 1.5
# Share of the loop's waits that are for one worker.
WAITED_FOR = 0.6
# Share of the CPUs there are.
CPUS_ARE_BUSY = 0.85
# Share of a worker's work in which it had no CPU.
OFTEN_LACKS_CPU = 0.3


def find_bottleneck(found: Evidence) -> Bottleneck:
    """Find what limits the rate of the loop."""
    all_s = found.first_wait_s + found.waiting_s + found.working_s
    if found.first_wait_s > max(LONG_S, MOSTLY * all_s):
        return findings.start_up(found, all_s)
    if found.items < FEWEST_BATCHES or not found.workers:
        return findings.too_few(found.items, FEWEST_BATCHES)
    if found.waiting_share < HARDLY_WAITS:
        return findings.hand_over(found) if found.use_s < HAND_OVER_S else findings.loop(found)
    if found.reading_s > MOSTLY * found.waiting_s:
        return findings.reading(found)
    if _is_cheap(found):
        return findings.cheap(found)
    waited, worked = found.total("waiting_s"), found.total("busy_s")
    often_wait = waited > OFTEN_WAITS * (waited + worked)
    # More room would not help workers that send most of their time, waits included.
    sending = found.total("sending_s")
    if sending > MOSTLY * (worked + waited if often_wait else worked):
        return findings.transport(found)
    if found.cpus_used > CPUS_ARE_BUSY * found.cpus or (
        found.total("lacked_s") > OFTEN_LACKS_CPU * worked and not found.holds_gil
    ):
        return findings.cpus(found)
    # Waiting for the GIL looks like waiting for room.
    if found.holds_gil:
        return findings.source(found)
    slow = _slow_worker(found)
    if slow is not None:
        return findings.slow_shard(found, slow)
    if often_wait:
        return findings.queue(found)
    return findings.source(found)


def _is_cheap(found: Evidence) -> bool:
    # Large batches cost their copy, however cheap they are to make: that is the transport.
    made, busy = found.total("making_s"), found.total("busy_s")
    items = found.total("items")
    return made < CHEAP_S * items and busy < HAND_OVER_S * items


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
        # A worker that had no CPU is slow by chance.
        and slow.lacked_s < OFTEN_LACKS_CPU * slow.busy_s
        and statistics.mean(worker.waiting_share for worker in others) > OFTEN_WAITS
        and slow.per_item_s > TIMES_SLOWER * statistics.median(w.per_item_s for w in others)
    )
    return slow if is_slow else None
