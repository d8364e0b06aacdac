"""Measuring how fast a loop would be if its data cost nothing: a few batches, given repeatedly.

    given, kept -> given, timed -> the kept ones given repeatedly, timed -> the end
    (warm-up)      as it is        as it could be

The loop is the user's own and is not called from here: it takes batches from a generator.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from enqueuer.common import checks
from enqueuer.common.text import percent, rate

Batch = TypeVar("Batch")

# Ratio of the speeds; a smaller one may be chance.
WORTH_IT = 1.05


@dataclass(frozen=True)
class Headroom:
    """The speed of a loop, and its speed if its data cost nothing.

    Attributes:
        steps_per_s: Steps a second with the batches as they came.
        could_reach: Steps a second with batches that were there already.
        waiting_share: Share of its time in which the loop waited for the batches that came, 0 to 1.
        steps: Number of steps that were timed for the first number.
        kept: Number of batches that were kept for the second one.
    """

    steps_per_s: float
    could_reach: float
    waiting_share: float
    steps: int
    kept: int

    @property
    def gain(self) -> float:
        """Ratio of the speed that it could reach to its speed."""
        return self.could_reach / self.steps_per_s

    def __str__(self) -> str:
        found = (
            f"{rate(self.steps_per_s)} steps a second, and {rate(self.could_reach)} if data cost "
            f"nothing"
        )
        if self.gain < WORTH_IT:
            return f"{found}: faster data would not make it faster."
        return (
            f"{found}: {self.gain:.2f} times as fast. The loop waits "
            f"{percent(self.waiting_share)} of its time for batches."
        )


def headroom(
    batches: Iterable[Batch],
    *,
    seconds: float = 3.0,
    keep: int = 8,
    report: Callable[[Headroom], object] = print,
) -> Iterator[Batch]:
    """Measure how much faster your loop would be if its data cost nothing.

    Put it around the iterable of the loop. The first batches, of which it keeps some, warm the
    loop up. Then the loop is timed with more batches, and then with those that were kept, which
    are repeated. Then the iteration ends. Unlike the waits in `stats()`, this also shows what
    making batches takes from the loop: CPUs, or the GIL.

    The loop must not change the batches, nor give them away (as donated arrays of JAX are), since
    they are repeated. Work that a GPU does later is timed rightly if the loop waits for it now
    and then, or if `seconds` are many steps.

    Args:
        batches: An enqueuer, or any iterable; one that is not an iterator is iterated over again
            if it ends too soon.
        seconds: Time of each of the two measurements in seconds; 3 by default.
        keep: Number of batches that are kept, and first given untimed; 8 by default.
        report: Function that is called with the result at the end; by default it is printed.

    Raises:
        TypeError: An argument has the wrong type. It is raised at once, not by the first `next()`.
        ValueError: An argument is out of its range, or there are no more than `keep` batches.

    Example:
        >>> import time
        >>> from enqueuer import GeneratorEnqueuer, headroom
        >>> def batches():
        ...     while True:
        ...         time.sleep(0.01)
        ...         yield "data"
        >>> found = []
        >>> with GeneratorEnqueuer(batches) as enqueuer:
        ...     for batch in headroom(enqueuer, seconds=0.2, report=found.append):
        ...         time.sleep(0.001)
        >>> found[0].gain > 2
        True
    """
    keep = checks.positive("keep", keep)
    seconds = checks.seconds("seconds", seconds)
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches must be an enqueuer or another iterable, got {batches!r}")
    return _headroom(batches, seconds, keep, report)


def _headroom(
    batches: Iterable[Batch], seconds: float, keep: int, report: Callable[[Headroom], object]
) -> Iterator[Batch]:
    stream = epochs(itertools.repeat(batches))
    kept = []
    for batch in itertools.islice(stream, keep):
        kept.append(batch)
        yield batch
    steps, took_s, waited_s = yield from _timed(stream, seconds)
    if not steps:
        raise ValueError(
            f"headroom needs more than keep={keep} batches, got {len(kept)}; give a smaller keep, "
            "or an iterable that can be iterated over again"
        )
    repeated, repeated_s, _ = yield from _timed(itertools.cycle(kept), seconds)
    could_reach, share = repeated / repeated_s, min(1.0, waited_s / took_s)
    report(Headroom(steps / took_s, could_reach, share, steps, len(kept)))


def _timed(
    batches: Iterable[Batch], seconds: float
) -> Generator[Batch, None, tuple[int, float, float]]:
    """Yield batches for some seconds; return their number, the time, and that of the waits."""
    clock, steps, waited_s = time.perf_counter, 0, 0.0
    began = asked = clock()
    for batch in batches:
        waited_s += clock() - asked
        yield batch
        del batch
        steps, asked = steps + 1, clock()
        if asked >= began + seconds:
            break
    return steps, clock() - began, waited_s


def epochs(each: Iterable[Iterable[Batch]]) -> Generator[Batch, None, None]:
    """Yield the batches of one epoch after another, until one is empty."""
    for batches in each:
        is_empty = True
        for batch in batches:
            is_empty = False
            yield batch
            del batch
        if is_empty:
            return
