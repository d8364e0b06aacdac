"""How fast a loop would be if its data cost nothing: a few batches, kept and given again.

    given, kept -> given, timed -> the kept ones given again and again, timed -> the end
    (warm-up)      as it is         as it could be

The loop is the user's own and is not called from here: it takes batches from a generator.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from enqueuer import arguments
from enqueuer.formats import percent, rate

Batch = TypeVar("Batch")

WORTH_IT = 1.05  # times as fast; what is less may be chance


@dataclass(frozen=True)
class Headroom:
    """What a loop reaches, and what it could reach if its data cost nothing.

    Attributes:
        steps_per_s: Steps a second with the batches as they came.
        could_reach: Steps a second with batches that were there already.
        waiting_share: How much of its time the loop waited for the batches that came, from 0 to 1.
        steps: How many steps the first number is made of.
        kept: How many batches were kept for the second one.
    """

    steps_per_s: float
    could_reach: float
    waiting_share: float
    steps: int
    kept: int

    @property
    def gain(self) -> float:
        """How many times as fast it could be."""
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
    tell: Callable[[Headroom], object] = print,
) -> Iterator[Batch]:
    """Tell how much faster your loop would be if its data cost nothing.

    Put it around what the loop iterates over. The first batches, of which it keeps some, warm the
    loop up; then it is timed with more of them; then with those that were kept, again and again.
    Then the iteration ends. Unlike the waits that `stats()` tells, this also shows what making
    batches takes from the loop: CPUs, or the GIL.

    The loop must not change the batches, nor give them away (as donated arrays of JAX are), since
    they come again. Work that a GPU does later is timed rightly if the loop waits for it now and
    then, or if `seconds` are many steps.

    Args:
        batches: An enqueuer, or any iterable; one that is no iterator is gone through again if it
            ends too soon.
        seconds: How long each of the two is timed; 3 by default.
        keep: How many batches are kept, and first given untimed; 8 by default.
        tell: Called with the result at the end; by default it is printed.

    Raises:
        TypeError: An argument has the wrong type (at once, not at the first `next()`).
        ValueError: An argument is out of its range (likewise); or there are no more than `keep`
            batches.

    Example:
        >>> import time
        >>> from enqueuer import GeneratorEnqueuer, headroom
        >>> def batches():
        ...     while True:
        ...         time.sleep(0.01)
        ...         yield "data"
        >>> found = []
        >>> with GeneratorEnqueuer(batches) as enqueuer:
        ...     for batch in headroom(enqueuer, seconds=0.2, tell=found.append):
        ...         time.sleep(0.001)  # the training step
        >>> found[0].gain > 2
        True
    """
    keep = arguments.positive("keep", keep)
    seconds = arguments.seconds("seconds", seconds)
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches must be an enqueuer or another iterable, got {batches!r}")
    return _headroom(batches, seconds, keep, tell)


def _headroom(
    batches: Iterable[Batch], seconds: float, keep: int, tell: Callable[[Headroom], object]
) -> Iterator[Batch]:
    clock = time.perf_counter
    stream = epochs(batches)
    kept = []
    for batch in itertools.islice(stream, keep):
        kept.append(batch)
        yield batch
    steps, waited_s, began = 0, 0.0, clock()
    end, asked = began + seconds, began
    for batch in stream:
        waited_s += clock() - asked
        yield batch
        steps, asked = steps + 1, clock()
        if asked >= end:
            break
    took_s = clock() - began
    if not steps:
        raise ValueError(
            f"headroom needs more than keep={keep} batches, got {len(kept)}; give a smaller keep, "
            "or an iterable that can be gone through again"
        )
    del batch
    again, replayed = itertools.cycle(kept), 0
    began = clock()
    end = began + seconds
    while not replayed or clock() < end:
        yield next(again)
        replayed += 1
    could_reach = replayed / (clock() - began)
    tell(Headroom(steps / took_s, could_reach, min(1.0, waited_s / took_s), steps, len(kept)))


def epochs(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield what there is, again and again, until nothing more comes of it."""
    is_empty = False
    while not is_empty:
        is_empty = True
        for batch in batches:
            is_empty = False
            yield batch
            del batch
