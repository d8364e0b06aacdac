"""The program whose instructions `instructions.py` counts: rounds in which neither side waits.

    the worker   makes the items of a round -> `made`  -> waits for the loop
    the loop     waits for the worker       -> takes the items of the round -> `taken`

How often a loop and a worker sleep depends on the scheduler, and so does the number of
instructions of a plain loop. Here one of the two stands still while the other one works, and the
queue has room for two rounds. So the worker never waits for room, and the loop never for an item.

    python benchmarks/counted.py ints-process 16    # a case and the number of its rounds
"""

from __future__ import annotations

import functools
import gc
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

# The statistics are sampled by the clock, so a slow machine would execute more instructions.
# Here each reading of the clock takes 10 us. The package binds the function when it is imported.
time.monotonic_ns = itertools.count(10**9, 10_000).__next__

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes  # noqa: E402

ITEMS = 64  # in a round
LARGE_ITEMS = 4
MOST_ROUNDS = 32
# glibc copies with an instruction that valgrind counts once per byte. In a larger array these
# instructions would hide those of the package.
LARGE_BYTES = 256 * 1024

_SWITCH_S = 1000.0  # longer than any round


class Turns:
    """The two semaphores on which the worker and the loop wait for each other.

    They serve threads and forked processes, and hold the GIL unless they have to wait.
    """

    def __init__(self, rounds: int) -> None:
        fork = multiprocessing.get_context("fork")
        self._made, self._taken = fork.Semaphore(0), fork.Semaphore(0)
        self._rounds = self._left = rounds
        self._consumer = os.getpid()

    def rest(self) -> None:
        """Let the loop take a round; end the worker process after the last one."""
        self._made.release()
        self._taken.acquire()
        self._left -= 1
        if not self._left:
            os._exit(0)

    def take(self, items: Iterator[Any], count: int, backend: str) -> None:
        """Take all rounds, and end this process without a shutdown of the workers.

        How a shutdown is waited for depends on the scheduler as well.
        """
        for number in range(self._rounds):
            if number:
                self._taken.release()
            self._made.acquire()
            for _ in itertools.islice(items, count):
                pass
        if backend == "process":
            self._taken.release()
            os.waitid(os.P_ALL, 0, os.WEXITED)
        os._exit(0)


def ints() -> Iterator[int]:
    """Yield integers, each an object of its own."""
    yield from itertools.count(1 << 40)


def tiny() -> Iterator[dict[str, np.ndarray]]:
    """Yield dicts of two small arrays, all of which are made before the first."""
    yield from [
        {"x": np.full(8, n, np.float32), "y": np.full(1, n, np.int64)}
        for n in range(ITEMS * MOST_ROUNDS)
    ]


def large() -> Iterator[dict[str, np.ndarray]]:
    """Yield four large dicts in turn."""
    yield from itertools.cycle(
        {"x": np.full(LARGE_BYTES, n, np.uint8), "y": np.full(64, n, np.int64)}
        for n in range(LARGE_ITEMS)
    )


def take_items(
    make: Callable[[], Iterator[Any]],
    count: int,
    backend: Literal["thread", "process"],
    rounds: int,
) -> None:
    """Take rounds of `count` items from a generator."""
    turns = Turns(rounds)

    def source() -> Iterator[Any]:
        made = make()
        while True:
            yield from itertools.islice(made, count)
            turns.rest()

    enqueuer = GeneratorEnqueuer(
        source,
        backend=_forked(backend),
        max_queue_size=2 * count,
    )
    enqueuer.start()
    turns.take(iter(enqueuer), count, backend)


def take_results(backend: Literal["thread", "process"], rounds: int) -> None:
    """Take rounds of results; the task after each round waits until the loop has taken it."""
    turns = Turns(rounds)

    def task(n: int) -> int:
        if n and n % ITEMS == 0:
            turns.rest()
        return n + (1 << 40)

    # The sequence is long enough that tickets are sent until the last round.
    enqueuer = OrderedEnqueuer(
        range(ITEMS * (MOST_ROUNDS + 4)),
        task,
        backend=_forked(backend),
        max_queue_size=2 * ITEMS,
    )
    enqueuer.start()
    turns.take(iter(enqueuer), ITEMS, backend)


def _forked(backend: Literal["thread", "process"]) -> Literal["thread"] | Processes:
    """Return the backend, with processes that fork: nothing but the loop and its workers runs."""
    return Processes(start_method="fork") if backend == "process" else "thread"


PROGRAMS: dict[str, Callable[[int], None]] = {
    "ints-thread": functools.partial(take_items, ints, ITEMS, "thread"),
    "ints-process": functools.partial(take_items, ints, ITEMS, "process"),
    "tiny-thread": functools.partial(take_items, tiny, ITEMS, "thread"),
    "tiny-process": functools.partial(take_items, tiny, ITEMS, "process"),
    "task-thread": functools.partial(take_results, "thread"),
    "task-process": functools.partial(take_results, "process"),
    "large-process": functools.partial(take_items, large, LARGE_ITEMS, "process"),
}

if __name__ == "__main__":
    sys.setswitchinterval(_SWITCH_S)
    # A collection falls into one round or into the next, and costs as much as a whole round.
    gc.disable()
    PROGRAMS[sys.argv[1]](int(sys.argv[2]))
