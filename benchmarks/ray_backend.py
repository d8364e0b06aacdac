"""backend="ray" beside bare actor calls, Ray Data and backend="process": rates of one generator.

    python benchmarks/ray_backend.py                # ten minutes or so
    python benchmarks/ray_backend.py --quick        # only to see that it runs
    python benchmarks/ray_backend.py --per-batch    # what a batch costs the driver, by actors

Batches of four sizes, from dicts of two tiny arrays to 38.5 MB, are made by the same generator
and dropped by the loop. Each contestant starts its workers and fills its queue; then the clock
starts. They come in turn, round after round; the first round is dropped, as fresh pages of the
object store are slow, and medians of the others are printed, and all as JSON with `--json`:

- `ray`: GeneratorEnqueuer(backend="ray");
- `bare`: actors with a method that returns the next batch, as many calls in flight as the queue
  is long, sent to the actors in turn, and `ray.get` of each;
- `data`: Ray Data, a task for each worker whose function yields batches, read by iter_batches;
  see `data` for how; `data, rows` is its iter_rows, of tiny batches alone;
- `process`: GeneratorEnqueuer(backend="process"), for scale.

All within one Ray of one node that is started for it. It says so and ends if Ray is not installed,
and leaves Ray Data out if its dependencies are not: pip install 'ray[data]'.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import logging
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import machine
import sources

from enqueuer import DuplicateDataWarning, GeneratorEnqueuer

Make = Callable[[], Iterator[Any]]
Open = Callable[["Batches", int, int], Any]


class Batches(NamedTuple):
    """What is sent.

    Attributes:
        make: The generator function.
        size_bytes: Of one, about.
        queue: How many may wait, unless something else is asked for.
    """

    make: Make
    size_bytes: int
    queue: int = 10


def _ring(shape: tuple[int, ...], dtype: str, size_bytes: int, count: int) -> Batches:
    make = functools.partial(sources.ring, shape, dtype, count)
    return Batches(make, size_bytes)


SIZES = {
    "tiny": Batches(sources.tiny, 40, 256),
    "middle": _ring((64, 3, 64, 64), "uint8", 786_944, 32),
    "large": _ring(sources.IMAGES, "uint8", 9_634_304, 8),
    "very large": _ring(sources.IMAGES, "float32", 38_535_680, 4),
}


# --- the contestants ----------------------------------------------------------------------------


@contextlib.contextmanager
def ours(backend: str, batches: Batches, workers: int, queue: int) -> Iterator[Iterator[Any]]:
    """Let an enqueuer run the generator."""
    with GeneratorEnqueuer(
        batches.make, workers=workers, backend=backend, max_queue_size=queue
    ) as enqueuer:
        yield iter(enqueuer)


class Maker:
    """The actor of the bare calls."""

    def __init__(self, make: Make) -> None:
        self.items = make()

    def next(self) -> Any:
        """Return the next batch."""
        return next(self.items)


@contextlib.contextmanager
def bare(batches: Batches, workers: int, queue: int) -> Iterator[Iterator[Any]]:
    """Call actors in turn, so that `queue` calls are in flight, and get the results in order."""
    import ray

    actors = [ray.remote(Maker).remote(batches.make) for _ in range(workers)]

    def items() -> Iterator[Any]:
        turns = itertools.cycle(actors)
        flying = deque(next(turns).next.remote() for _ in range(queue))
        while True:
            yield ray.get(flying.popleft())
            flying.append(next(turns).next.remote())

    try:
        yield items()
    finally:
        for actor in actors:
            ray.kill(actor)


@contextlib.contextmanager
def data(
    batches: Batches, workers: int, queue: int, as_rows: bool = False
) -> Iterator[Iterator[Any]]:
    """Let Ray Data run the generator, in the way that was the fastest of those tried.

    A dataset of one row for each worker is mapped to all that the generator yields. Ray Data puts
    that into blocks of about `target_max_block_size`, and cuts batches out of them. Its default,
    128 MB, is too much for both of its steps to go on at once within seconds; 16 to 64 MB are
    alike, and one block for each batch takes twice as long.

    A row is an image. Of tiny batches each is a row by itself, by flat_map: map_batches would make
    a table of each. `iter_rows` takes less than `iter_batches` then, but of larger batches it
    would give single images.
    """
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)  # the import has set it anew
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    tasks = ray.data.range(workers, override_num_blocks=workers)
    is_tiny = batches.size_bytes < 1000
    context.target_max_block_size = 256 << 10 if is_tiny else 32 << 20
    if is_tiny:
        rows = tasks.flat_map(_all_of, fn_args=(batches.make,))
    else:
        rows = tasks.map_batches(_all_of, fn_args=(batches.make,), batch_size=1)
    if as_rows:
        items = iter(rows.iter_rows())
    else:
        of_a_batch = 1 if is_tiny else sources.LABELS
        items = iter(rows.iter_batches(batch_size=of_a_batch, prefetch_batches=queue))
    yield items
    # The tasks are cancelled when their iterators are gone.
    del items, rows


def _all_of(_: Any, make: Make) -> Iterator[Any]:
    yield from make()


CONTESTANTS: dict[str, Open] = {
    "ray": functools.partial(ours, "ray"),
    "bare": bare,
    "data": data,
    "data, rows": functools.partial(data, as_rows=True),
    "process": functools.partial(ours, "process"),
}


# --- measuring ----------------------------------------------------------------------------------


def rate(case: Any, queue: int, seconds: float) -> float:
    """Return batches a second, once the queue was filled twice."""
    with case as items:
        for _ in itertools.islice(items, 2 * queue + 2):
            pass
        return count(items, seconds) / seconds


def count(items: Iterator[Any], seconds: float) -> float:
    """Return how many batches come in so much time; of the last one the part that did."""
    began = time.perf_counter()
    for number in itertools.count(1):
        next(items)
        took = time.perf_counter() - began
        if took >= seconds:
            return number * seconds / took
    raise AssertionError


def run(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return the rates of all rounds but the first, by size and contestant."""
    found: dict[str, dict[str, list[float]]] = {}
    for size in options.sizes:
        for turn in range(options.rounds + 1):
            cases = [(name, w) for name in options.contestants for w in options.workers]
            for name, workers in cases if turn % 2 else reversed(cases):
                if name == "data, rows" and size != "tiny":
                    continue
                queue = options.max_queue_size or SIZES[size].queue
                case = CONTESTANTS[name](SIZES[size], workers, queue)
                value = rate(case, queue, options.seconds)
                _show(f"{size}, {name} {workers}: {value:,.0f}")
                if turn:
                    found.setdefault(size, {}).setdefault(f"{name} {workers}", []).append(value)
    return found


def table(found: dict[str, dict[str, list[float]]], options: argparse.Namespace) -> str:
    """Return the medians, and how they compare with those of as many workers."""
    lines = []
    for size, rates in found.items():
        size_bytes = SIZES[size].size_bytes
        queue = options.max_queue_size or SIZES[size].queue
        lines.append(f"{size}, {size_bytes:,} B, queue {queue}".ljust(34))
        lines[-1] += f"{'items/s':>10}{'GB/s':>8}{'/ bare':>9}{'/ data':>9}    least to most"
        medians = {name: statistics.median(values) for name, values in rates.items()}
        for name, median in medians.items():
            workers = name.rpartition(" ")[2]
            line = f"  {name:32}{median:10,.0f}{median * size_bytes / 1e9:8.2f}"
            for other in ("bare", "data"):
                beside = medians.get(f"{other} {workers}")
                line += f"{median / beside:9.2f}" if beside else f"{'':9}"
            lines.append(f"{line}    {min(rates[name]):,.0f} to {max(rates[name]):,.0f}")
    return "\n".join(lines)


def per_batch(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return what batches cost the driver: CPU and time, by size and actors."""
    found: dict[str, dict[str, float]] = {}
    for size, workers in itertools.product(options.sizes, options.workers):
        batches = SIZES[size]
        queue = options.max_queue_size or batches.queue
        costs = [cost(batches, workers, queue, options.seconds) for _ in range(options.rounds + 1)]
        cpu, wall = (statistics.median(column) for column in zip(*costs[1:], strict=True))
        gigabytes = batches.size_bytes / 1e9
        found[f"{size}, queue {queue}, {workers} actor(s)"] = {
            "us of CPU a batch": 1e6 * cpu,
            "us a batch": 1e6 * wall,
            "s of CPU a GB": cpu / gigabytes,
            "s a GB": wall / gigabytes,
        }
        _show(f"{size}, {workers} actor(s): {1e6 * cpu:.0f} us of CPU a batch")
    return found


def cost(batches: Batches, workers: int, queue: int, seconds: float) -> tuple[float, float]:
    """Return the CPU seconds of this process for a batch, all its threads, and the seconds."""
    with ours("ray", batches, workers, queue) as items:
        for _ in itertools.islice(items, 2 * queue + 2):
            pass
        began = time.process_time()
        number = count(items, seconds)
        return (time.process_time() - began) / number, seconds / number


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Measure and print."""
    options = parsed()
    if importlib.util.find_spec("ray") is None:
        print("Ray is not installed: pip install 'ray[data]'")
        return
    options.contestants = [name for name in options.contestants if _can_run(name)]
    import ray

    ray.init(
        address="local",
        num_cpus=2 + 2 * max(options.workers),  # of which Ray Data takes one for each task
        object_store_memory=options.store_gb * 10**9,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    warnings.simplefilter("ignore", DuplicateDataWarning)  # each worker runs the whole source
    about = machine.describe(["enqueuer", "ray", "pyarrow", "numpy"])
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"medians of {options.rounds} x {options.seconds:g} s", flush=True)
    found: dict[str, Any]
    if options.per_batch:
        found = per_batch(options)
        for name, costs in found.items():
            cells = (f"{value:10,.3g} {unit}" for unit, value in costs.items())
            print(f"{name:36}", *cells)
    else:
        found = run(options)
        print(table(found, options))
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "found": found}, indent=1))
    ray.shutdown()


def parsed() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--workers", nargs="+", type=int, help="how many (default: 1 2)")
    parser.add_argument("--max-queue-size", type=int, help="default: 10; tiny: 256")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each rate (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="that count (default: 3)")
    parser.add_argument("--store-gb", type=int, default=3, help="of the object store (default: 3)")
    parser.add_argument("--per-batch", action="store_true", help="what a batch costs the driver")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.workers is None:
        options.workers = [1, 2, 4, 8] if options.per_batch else [1, 2]
    if options.quick:
        options.sizes, options.workers = ["tiny", "middle"], options.workers[:1]
        options.rounds, options.seconds, options.store_gb = 1, 0.2, 1
    return options


def _can_run(name: str) -> bool:
    if not name.startswith("data"):
        return True
    missing = [name for name in ("pyarrow", "pandas") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{name} is left out: {', '.join(missing)} missing, pip install 'ray[data]'")
    return not missing


if __name__ == "__main__":
    main()
