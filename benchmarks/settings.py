"""Compare numbers of threads and processes for a generator function of your own.

    python benchmarks/settings.py mydata:batches --consume 0.02

A loop takes the batches and sleeps with each one, as for a training step on a GPU. The first line
is a loop without workers. The last line has the fewest workers that are nearly the fastest.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import operator
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from enqueuer import GeneratorEnqueuer
from enqueuer.common.text import duration, percent, pluralize, rate, table

# Share of the fastest rate from which on a setting is as good.
AS_GOOD = 0.95


def endless(enqueuer: GeneratorEnqueuer[Any]) -> Iterator[Any]:
    """Yield the batches of one epoch after another, until one is empty."""
    is_empty = False
    while not is_empty:
        is_empty = True
        for batch in enqueuer:
            is_empty = False
            yield batch


def take(batches: Iterator[Any], seconds: float, consume: float) -> None:
    """Take batches for some seconds, at least one, and sleep with each."""
    end = time.perf_counter() + seconds
    for _ in batches:
        time.sleep(consume)
        if time.perf_counter() >= end:
            return
    sys.exit("the generator yields no batch")


def measure(
    source: Any, options: dict[str, Any], seconds: float, consume: float
) -> tuple[float, float, float]:
    """Return the batches a second, the share of waiting, and the time to the first batch."""
    with GeneratorEnqueuer(source, **options) as enqueuer:
        batches = endless(enqueuer)
        # The first batches of all workers come late, or together.
        take(batches, seconds / 2, consume)
        before = enqueuer.stats()
        take(batches, seconds, consume)
        found = enqueuer.stats()
    during = found.since(before)
    return during.items_per_s, during.waiting_share, found.first_batch_s or 0.0


def load(text: str) -> Any:
    """Import MODULE:FUNCTION, from the current directory first."""
    module, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    return operator.attrgetter(name)(importlib.import_module(module))


def main() -> None:
    """Measure each setting, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=load, metavar="MODULE:FUNCTION")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--backends", nargs="+", default=["thread", "process"])
    parser.add_argument("--seconds", type=float, default=2.5, help="of each measurement")
    parser.add_argument("--consume", type=float, default=0.0, help="seconds of a step of the loop")
    given = parser.parse_args()

    settings: dict[str, dict[str, Any]] = {"without workers": {"workers": 0}}
    for backend, workers in itertools.product(given.backends, given.workers):
        settings[pluralize(workers, backend)] = {"workers": workers, "backend": backend}
    rates = {}
    rows = [("", "batches/s", "waiting", "first batch")]
    for name, options in settings.items():
        rates[name], waiting, first_s = measure(given.source, options, given.seconds, given.consume)
        rows.append((name, rate(rates[name]), percent(waiting), duration(first_s)))
    print("\n".join(table(rows)))
    good = [name for name in rates if rates[name] >= AS_GOOD * max(rates.values())]
    best = min(good, key=lambda name: settings[name]["workers"])
    print("best:", ", ".join(f"{option}={value!r}" for option, value in settings[best].items()))


if __name__ == "__main__":
    main()
