"""Short epochs: the rate with `epochs=`, the first batch of an epoch, and a loader that rests.

    python benchmarks/epochs.py                  # about a minute
    python benchmarks/epochs.py --only process --rounds 5

Two workers take 5 ms for a batch, and the loop 2 ms; an epoch has 20 batches.

- `rate`: batches a second, as a share of those of one long epoch, without the option and with it.
- `first`: milliseconds from `iter()` to the first batch, after a pause as long as one batch; the
  median and the longest.
- `rest`: of a loader without the option, finished batches that wait 50 ms after the end of an
  epoch, and the milliseconds to the first batch of the next one; beside the milliseconds of a new
  enqueuer, from its start.

The long epoch and the short ones run in turn, round after round; the numbers are medians.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Shard

MAKE_S = 0.005
USE_S = 0.002
BATCHES = 20
EPOCHS = 20
REST_S = 0.05


def shard_of(count: int, shard: Shard) -> Iterator[int]:
    """Yield a shard's share of an epoch."""
    for number in shard.split(range(count)):
        yield element_of(number)


def element_of(number: int) -> int:
    """Wait as long as a batch takes."""
    time.sleep(MAKE_S)
    return number


def enqueuer_of(kind: str, backend: Any, count: int, epochs: int | None) -> Any:
    """Return an enqueuer of epochs of so many batches."""
    options: dict[str, Any] = dict(workers=2, backend=backend, random_seed=1, epochs=epochs)
    if kind == "shards":
        return GeneratorEnqueuer(functools.partial(shard_of, count), **options)
    return OrderedEnqueuer(range(count), element_of, **options)


def rate_of(kind: str, backend: str, count: int, epochs: int | None, loops: int) -> float:
    """Return the batches a second of some loops, without the first batch."""
    with enqueuer_of(kind, backend, count, epochs) as enqueuer:
        began, taken = 0.0, 0
        for _ in range(loops):
            for _ in enqueuer:
                began = began or time.perf_counter()
                taken += 1
                time.sleep(USE_S)
        return (taken - 1) / (time.perf_counter() - began)


def first_ms(kind: str, backend: str, epochs: int | None) -> list[float]:
    """Return the time to the first batch of each epoch but the first one."""
    found = []
    with enqueuer_of(kind, backend, BATCHES, epochs) as enqueuer:
        for _ in range(EPOCHS):
            time.sleep(MAKE_S)
            began = time.perf_counter()
            for number in enqueuer:
                if number == 0:
                    found.append(1e3 * (time.perf_counter() - began))
                time.sleep(USE_S)
    return found[1:]


def rest_of(kind: str, backend: str) -> tuple[int, float, float]:
    """Return how many batches wait in a rest, and the time to the next one; that of a new start."""
    with enqueuer_of(kind, backend, BATCHES, None) as enqueuer:
        taken = len(list(enqueuer))
        time.sleep(REST_S)
        held = sum(worker.items for worker in enqueuer.stats().workers) - taken
        began = time.perf_counter()
        next(iter(enqueuer))
        again_ms = 1e3 * (time.perf_counter() - began)
    began = time.perf_counter()
    with enqueuer_of(kind, backend, BATCHES, None) as enqueuer:
        next(iter(enqueuer))
        new_ms = 1e3 * (time.perf_counter() - began)
    return held, again_ms, new_ms


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="backends, or kinds")
    parser.add_argument("--rounds", type=int, default=3, help="of each (default: 3)")
    options = parser.parse_args()
    print(
        f"{'':16} rate without  with epochs=   first ms: without      with      rest: batches, ms"
    )
    for kind, backend in itertools.product(("shards", "tasks"), ("thread", "process")):
        if options.only and not {kind, backend} & set(options.only):
            continue
        print(f"{kind + ', ' + backend:16}", _row(kind, backend, options.rounds), flush=True)


def _row(kind: str, backend: str, rounds: int) -> str:
    shares: list[list[float]] = [[], []]
    for _ in range(rounds):
        long = rate_of(kind, backend, BATCHES * EPOCHS, None, 1)
        for found, epochs in zip(shares, (None, EPOCHS), strict=True):
            found.append(rate_of(kind, backend, BATCHES, epochs, EPOCHS) / long)
    without, with_option = map(statistics.median, shares)
    firsts = []
    for epochs in (None, EPOCHS):
        times = [one for _ in range(rounds) for one in first_ms(kind, backend, epochs)]
        firsts.append(f"{statistics.median(times):5.2f} ({max(times):5.2f})")
    held, again_ms, new_ms = rest_of(kind, backend)
    rest = f"{held}, {again_ms:.1f} (new: {new_ms:.0f})"
    return f"{without:12.1%} {with_option:12.1%}   {firsts[0]:>16} {firsts[1]:>16}   {rest}"


if __name__ == "__main__":
    main()
