"""The totals of a recording."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from enqueuer.common.text import ratio
from enqueuer.tools.trace.recording import WORKER_KINDS, Recording


@dataclass(frozen=True)
class Numbers:
    """The totals of a recording; times in seconds, shares from 0 to 1.

    Rate, waits and their share are those of `Stats`: of the loop's time after the first item of
    each start, without the time between two epochs.

    Attributes:
        items: Number of items that the loop took.
        seconds: Time from the start to the end.
        items_per_second: Number of items after the first, by the loop's time after the first.
        first_batch: Time from the start to the first item; None if there was none.
        waited: Time that the loop waited, or read elements, after the first item.
        waited_share: Share of the loop's time after the first item.
        percentiles: Percentiles 50, 90 and 99 of the waits after the first item.
        making: Share of the workers' time that the user's code took.
        sending: Share of the workers' time that encoding and copying took.
        waiting: Share of the workers' time that they waited for room, for an epoch or for a task.
        errors: Number of raised errors.
        skipped: Number of skipped errors.
        restarts: Number of replaced workers.
    """

    items: int
    seconds: float
    items_per_second: float
    first_batch: float | None
    waited: float
    waited_share: float
    percentiles: dict[int, float]
    making: float
    sending: float
    waiting: float
    errors: int
    skipped: int
    restarts: int


def totals_of(recording: Recording) -> Numbers:
    """Add up a recording."""
    first = recording.first
    start = recording.starts[0] if recording.starts else 0
    later, waited, worked = _after_the_first(recording)
    making, sending, waiting = _worker_shares(recording)
    return Numbers(
        items=recording.items,
        seconds=recording.end / 1e6,
        items_per_second=1e6 * ratio(later, waited + worked),
        first_batch=None if first is None else (first - start) / 1e6,
        waited=waited / 1e6,
        waited_share=ratio(waited, waited + worked),
        percentiles={p: percentile(recording.waits, p) / 1e6 for p in (50, 90, 99)},
        making=making,
        sending=sending,
        waiting=waiting,
        errors=recording.counts["error"],
        skipped=recording.counts["skipped"],
        restarts=recording.counts["restart"],
    )


def _after_the_first(recording: Recording) -> tuple[int, int, int]:
    """Return the number of items after the first, and how long the loop waited and worked.

    The enqueuer's own measurements are preferred, as its bottleneck follows from them. A run that
    did not end has spans only, and writing these takes a little time.
    """
    if recording.measured and len(recording.measured) == len(recording.starts):
        items, waited, worked = zip(*recording.measured, strict=True)
        return sum(max(0, count - 1) for count in items), sum(waited), sum(worked)
    return len(recording.waits), recording.waited, recording.worked


def _worker_shares(recording: Recording) -> list[float]:
    """Return the share of the workers' time for each of `WORKER_KINDS`."""
    times = [row.times() for row in recording.rows]
    sums = [sum(each[kind] for each in times) for kind in WORKER_KINDS]
    return [ratio(part, sum(sums)) for part in sums]


def percentile(values: Sequence[int], percent: int) -> int:
    """Return the smallest value that so many percent do not exceed; 0 if there are none.

    Example:
        >>> percentile(range(1, 101), 90), percentile([], 50)
        (90, 0)
    """
    if not values:
        return 0
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
