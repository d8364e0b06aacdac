"""Compare loaders on tasks of which some take much longer, when others may overtake these.

    python benchmarks/overtaking.py --repeats 3
    python benchmarks/overtaking.py --base-ms 20 --tasks 400    # on a busy machine

Each task sleeps for 2 ms, and some 20 or 100 times as long; 4 workers, and a queue of 16. The ideal
is the rate of 4 workers that are never idle. The limits are computed: what an epoch gives if all
but the tasks takes no time. `bare threads` only sleep, and pass no results: sleeps take longer on a
busy machine. Each other number is a median, measured in fresh processes.
"""

from __future__ import annotations

import argparse
import heapq
import importlib.util
import json
import math
import multiprocessing
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

WORKERS, QUEUE = 4, 16
# Seconds for one program.
LIMIT_S = 120.0


def every_20th(count: int) -> list[float]:
    """Return how many times as long each task takes: each 20th 20 times."""
    return [20 if number % 20 == 10 else 1 for number in range(count)]


def drawn(count: int) -> list[float]:
    """Return how many times as long each task takes: 5 % 20 times, and 1 % 100 times."""
    rng = np.random.default_rng(7)
    factors: list[float] = rng.choice([1, 20, 100], count, p=[0.94, 0.05, 0.01]).tolist()
    return factors


CASES = {"every 20th x 20": every_20th, "5 % x 20, 1 % x 100": drawn}


def work(seconds: float) -> float:
    """Sleep for so long."""
    time.sleep(seconds)
    return seconds


def limit(most: float, tasks: list[float]) -> float:
    """Return the seconds of an epoch without overhead, if so many later results overtake one."""
    now, given, submitted, first = 0.0, 0, 0, 0
    running: list[tuple[float, int]] = []
    waiting: deque[int] = deque()
    ready: dict[int, None] = {}
    ahead: set[int] = set()
    while given < len(tasks):
        # The loop takes what it may.
        while ready:
            number = first if len(ahead) >= most else next(iter(ready))
            if number not in ready:
                break
            del ready[number]
            ahead.add(number)
            given += 1
            while first in ahead:
                ahead.remove(first)
                first += 1
        while submitted < min(len(tasks), given + QUEUE + WORKERS):
            waiting.append(submitted)
            submitted += 1
        while waiting and len(running) < WORKERS:
            number = waiting.popleft()
            heapq.heappush(running, (now + tasks[number], number))
        if running:
            now, number = heapq.heappop(running)
            ready[number] = None
    return now


# --- the contestants: each returns the results of an epoch, on workers that run already ---

Epochs = Callable[[list[float]], Iterator[Callable[[], Iterable[Any]]]]


def enqueuer(ordered: bool | int, backend: Any) -> Epochs:
    """Return an `OrderedEnqueuer`."""

    def open_epochs(tasks: list[float]) -> Iterator[Callable[[], Iterable[Any]]]:
        from enqueuer import OrderedEnqueuer

        with OrderedEnqueuer(
            tasks, work, workers=WORKERS, max_queue_size=QUEUE, ordered=ordered, backend=backend
        ) as made:
            yield lambda: made

    return open_epochs


def bare(tasks: list[float]) -> Iterator[Callable[[], Iterable[Any]]]:
    """Yield epochs of threads that do nothing but sleep."""

    def run(left: Iterator[float]) -> None:
        for seconds in left:
            work(seconds)

    def epoch() -> Iterable[Any]:
        left = iter(tasks)
        threads = [threading.Thread(target=run, args=(left,)) for _ in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return tasks

    yield epoch


def pool(method: str) -> Epochs:
    """Return a pool of processes, which takes all tasks at once."""

    def open_epochs(tasks: list[float]) -> Iterator[Callable[[], Iterable[Any]]]:
        with multiprocessing.get_context("fork").Pool(WORKERS) as made:
            yield lambda: getattr(made, method)(work, tasks)

    return open_epochs


class Dataset:
    """The tasks as a dataset of torch."""

    def __init__(self, tasks: list[float]) -> None:
        self.tasks = tasks

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> float:
        return work(self.tasks[index])


def torch(in_order: bool) -> Epochs:
    """Return a `DataLoader` of torch."""

    def open_epochs(tasks: list[float]) -> Iterator[Callable[[], Iterable[Any]]]:
        from torch.utils.data import DataLoader

        made = DataLoader(
            Dataset(tasks),
            batch_size=None,
            num_workers=WORKERS,
            prefetch_factor=QUEUE // WORKERS + 1,
            persistent_workers=True,
            in_order=in_order,
        )
        yield lambda: made

    return open_epochs


def grain(tasks: list[float]) -> Iterator[Callable[[], Iterable[Any]]]:
    """Yield the epochs of threads of Grain, which knows no other order."""
    import grain.python as package

    options = package.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=QUEUE + WORKERS)
    made = package.MapDataset.source(tasks).map(work).to_iter_dataset(options)
    yield lambda: made


def spdl(tasks: list[float]) -> Iterator[Callable[[], Iterable[Any]]]:
    """Yield the epochs of threads of SPDL, in the order of their ends."""
    from spdl.pipeline import PipelineBuilder

    def epoch() -> Iterator[Any]:
        built = PipelineBuilder().add_source(tasks)
        built = built.pipe(work, concurrency=WORKERS, output_order="completion")
        with (made := built.add_sink(QUEUE).build(num_threads=WORKERS)).auto_stop():
            yield from made

    yield epoch


CONTESTANTS: dict[str, tuple[Epochs, str]] = {
    "bare threads": (bare, "threading"),
    **{
        f"enqueuer, {backend}, ordered={ordered}": (enqueuer(ordered, backend), "enqueuer")
        for backend in ("thread", "process")
        for ordered in (True, 64, 128, False)
    },
    "Pool.imap, no bound": (pool("imap"), "multiprocessing"),
    "Pool.imap_unordered, no bound": (pool("imap_unordered"), "multiprocessing"),
    "torch": (torch(True), "torch"),
    "torch, in_order=False": (torch(False), "torch"),
    "Grain, threads, in order": (grain, "grain"),
    "SPDL, threads": (spdl, "spdl"),
}


def measure(contestant: str, case: str, base_s: float, count: int) -> float:
    """Return the rate of an epoch as a share of the ideal one; the first epoch is not counted."""
    tasks = [base_s * factor for factor in CASES[case](count)]
    for epoch in CONTESTANTS[contestant][0](tasks):
        for _ in epoch():
            pass
        began = time.perf_counter()
        count = sum(1 for _ in epoch())
        took_s = time.perf_counter() - began
        assert count == len(tasks), f"{count} results came of {len(tasks)}"
    return sum(tasks) / WORKERS / took_s


def measure_apart(contestant: str, case: str, *options: str) -> float:
    """Return the same, measured in a fresh process."""
    command = [sys.executable, __file__, "--one", contestant, case, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    share: float = json.loads(done.stdout)
    return share


def main() -> None:
    """Print a table of all contestants and cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="of each number (default: 3)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts of contestants' names")
    parser.add_argument("--one", nargs=2, metavar=("CONTESTANT", "CASE"), help="in this process")
    parser.add_argument("--base-ms", type=float, default=2.0, help="of most tasks (default: 2)")
    parser.add_argument("--tasks", type=int, default=2000, help="in an epoch (default: 2000)")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one, options.base_ms / 1000, options.tasks)))
        return
    sizes = ["--base-ms", str(options.base_ms), "--tasks", str(options.tasks)]
    names = [n for n in CONTESTANTS if not options.only or any(part in n for part in options.only)]
    found: dict[tuple[str, str], list[float]] = {(n, case): [] for n in names for case in CASES}
    for _ in range(options.repeats):
        for name, case in found:
            if importlib.util.find_spec(CONTESTANTS[name][1]) is not None:
                found[name, case].append(measure_apart(name, case, *sizes))
    print(f"{'percent of the ideal rate':34}", *(f"{case:>22}" for case in CASES))
    for most in (0, 64, 128, math.inf):
        limits = [
            (tasks, limit(most, tasks)) for tasks in (of(options.tasks) for of in CASES.values())
        ]
        cells = [f"{100 * sum(tasks) / WORKERS / took:22.1f}" for tasks, took in limits]
        print(f"{f'limit of ordered={most}':34}", *cells)
    for name in names:
        shares = [found[name, case] for case in CASES]
        cells = [f"{100 * statistics.median(s):22.1f}" if s else f"{'missing':>22}" for s in shares]
        print(f"{name:34}", *cells)


if __name__ == "__main__":
    main()
