"""A loop that takes batches from anywhere, and measures how long it waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from enqueuer.common.sizes import size_of

# Walking through a large batch takes long, so the 1st, 2nd, 4th, 8th .. batch are weighed, and
# one in this many batches.
_WEIGHED_EVERY = 64

clock = time.perf_counter


class Unmeasurable(Exception):
    """A generator function cannot be measured; the message says why."""


@dataclass(frozen=True)
class TrainingStep:
    """Stand in for a training step.

    Args:
        waits_s: Seconds that a step waits, as for a GPU.
        computes_s: Seconds of CPU time that a step computes in Python.
    """

    waits_s: float = 0.0
    computes_s: float = 0.0

    def __call__(self) -> None:
        if self.waits_s:
            time.sleep(self.waits_s)
        if self.computes_s:
            # CPU time is the same amount of work, however few CPUs are free.
            end = time.thread_time() + self.computes_s
            while time.thread_time() < end:
                pass


class BatchLoop:
    """Take batches, count them and weigh some of them.

    Whole rounds are counted, one batch of each worker, since the batches of a round may arrive
    together.

    Args:
        step: Function that runs after each batch.
        seconds: Shortest time to measure.
        workers: Number of workers that make the batches.

    Attributes:
        began: Time at which the first round was over and measuring began.
        ended: Time at which the last batch arrived.
        count: Number of batches since measuring began.
        waited_s: Seconds that the loop waited for these batches.
        first_batch: Event that is set with the first batch, or when there will be none.
        is_left: Whether the result is no longer needed; the loop ends at the next batch.
    """

    def __init__(self, step: TrainingStep, seconds: float, workers: int = 1) -> None:
        self.step, self.at_least_s, self.workers = step, seconds, workers
        self.began = self.ended = self.waited_s = 0.0
        self.count = 0
        self.first_batch = threading.Event()
        self.is_left = False
        self._bytes = self._weighed = 0

    @property
    def seconds(self) -> float:
        """Length of the measurement."""
        return self.ended - self.began

    @property
    def batch_bytes(self) -> float:
        """Average size of a batch."""
        return self._bytes / max(1, self._weighed)

    @property
    def waiting_share(self) -> float:
        """Share of its time that the loop waited, from 0 to 1."""
        return min(1.0, self.waited_s / self.seconds) if self.seconds > 0 else 0.0

    def run(self, batches: Iterator[Any], note: Callable[[], object]) -> None:
        """Take batches until the measurement is long enough.

        Args:
            batches: An endless iterator.
            note: Called when measuring begins, and when it ends.
        """
        asked = clock()
        for seen, batch in enumerate(batches, 1):
            now = clock()
            self._weigh(seen, batch)
            # Otherwise the batch stays alive while the next one is made.
            del batch
            if self.began:
                self._count(now, now - asked)
                if self._is_over():
                    note()
                    return
            else:
                self.first_batch.set()
                if seen == self.workers:
                    note()
                    self.began = clock()
            self.step()
            asked = clock()

    def _weigh(self, seen: int, batch: object) -> None:
        """Add the size of a batch, if it is one of those that are weighed."""
        is_power_of_two = not seen & (seen - 1)
        if is_power_of_two or not seen % _WEIGHED_EVERY:
            self._bytes += size_of(batch)
            self._weighed += 1

    def _count(self, now: float, waited_s: float) -> None:
        self.count += 1
        self.ended = now
        self.waited_s += waited_s

    def _is_over(self) -> bool:
        is_round = not self.count % self.workers
        return self.is_left or (is_round and self.seconds >= self.at_least_s)
