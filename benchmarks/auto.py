"""Compare `workers="auto"` with fixed numbers of workers, and of elements at once in each.

    python benchmarks/auto.py --only waiting-process --burners 2

Each number is measured in a fresh process: a loop over an `OrderedEnqueuer`, whose rate is noted
every quarter of a second. The settings run in turn, round after round.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

# Seconds of each entry of a timeline.
TICK_S = 0.25
# Share of the best fixed rate that `auto` has to reach.
NEAR = 0.9


def busy(seconds: float) -> None:
    """Compute in Python for so many seconds of CPU time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(200))


def remote_file(element: int) -> int:
    """Wait as for a file of another machine, then compute in Python."""
    time.sleep(0.035)
    busy(0.003)
    return element


def computing(element: int) -> int:
    """Compute in Python only."""
    busy(0.01)
    return element


def slow_disk(element: int) -> int:
    """Wait for a while, much shorter than the loop takes."""
    time.sleep(0.005)
    return element


_SIGNAL = np.linspace(0, 1, 200_000)


def spectrum(element: int) -> float:
    """Compute in numpy, which releases the GIL."""
    return float(np.sin(_SIGNAL + element).sum())


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of work, the loop over it, and the fixed numbers to compare with.

    These are workers, or workers and elements at once in each: "2x16".
    """

    map: Callable[[int], object]
    backend: str
    fixed: tuple[int | str, ...]
    use_s: float = 0.0
    batch_size: int | None = None
    concurrency: int | str = 1


CASES = {
    "waiting-thread": Case(remote_file, "thread", (1, 8, 16, 32, 64)),
    "waiting-process": Case(remote_file, "process", (1, 8, 16, 32, 64)),
    "waiting-batches": Case(remote_file, "process", (1, 8, 16, 32, 64), batch_size=16),
    "waiting-concurrency": Case(remote_file, "process", (1, 2, 4), batch_size=16, concurrency=16),
    "at-once-thread": Case(
        remote_file,
        "thread",
        ("1x8", "1x16", "1x32", "1x64", "4x8", "16x1"),
        batch_size=16,
        concurrency="auto",
    ),
    "at-once-process": Case(
        remote_file,
        "process",
        ("1x16", "1x32", "2x8", "2x16", "2x32", "16x1", "32x1"),
        batch_size=16,
        concurrency="auto",
    ),
    "at-once-single": Case(
        remote_file, "process", ("1x16", "2x8", "2x16", "2x32", "32x1"), concurrency="auto"
    ),
    "at-once-only-waiting": Case(
        slow_disk, "thread", ("1x8", "1x32", "1x64"), batch_size=64, concurrency="auto"
    ),
    "computing-at-once": Case(
        computing, "process", ("1x1", "2x1", "1x2", "4x1"), batch_size=4, concurrency="auto"
    ),
    "computing-process": Case(computing, "process", (1, 2, 4)),
    "numpy-thread": Case(spectrum, "thread", (1, 2, 4)),
    "python-thread": Case(computing, "thread", (1, 2, 4)),
    "quick-thread": Case(abs, "thread", (1, 2)),
    "quick-process": Case(abs, "process", (1, 2)),
    "slow-loop-thread": Case(slow_disk, "thread", (1, 2), use_s=0.02),
    "slow-loop-process": Case(slow_disk, "process", (1, 2), use_s=0.02),
}


def measure(case: Case, setting: str, seconds: float) -> dict[str, Any]:
    """Run the loop, and return its rates, the numbers of workers and the bottleneck."""
    from enqueuer import OrderedEnqueuer

    rates: list[float] = []
    workers, _, at_once = setting.partition("x")
    with OrderedEnqueuer(
        range(10**9),
        case.map,
        workers=workers if workers == "auto" else int(workers),
        backend=case.backend,
        batch_size=case.batch_size,
        concurrency=int(at_once) if at_once else case.concurrency,
    ) as enqueuer:
        began = tick = time.perf_counter()
        count, total, half, counts, earlier = 0, 0, (0.0, 0), [], enqueuer.stats()
        elements = case.batch_size or 1
        for _ in enqueuer:
            count += 1
            if case.use_s:
                time.sleep(case.use_s)
            now = time.perf_counter()
            if now - tick >= TICK_S:
                rates.append(count * elements / (now - tick))
                there = enqueuer.stats().workers
                each = there[0].concurrency
                number = f"{len(there)}x{each}" if at_once or each > 1 else str(len(there))
                counts.append((now - began, rates[-1], number))
                total, count, tick = total + count * elements, 0, now
                if now - began < seconds / 2:
                    half, earlier = (now - began, total), enqueuer.stats()
            if now - began > seconds:
                break
        # Over the whole second half: workers may end their batches at the same moments.
        rate = (total - half[1]) / max(counts[-1][0] - half[0], 1e-9)
        found = enqueuer.stats().since(earlier).bottleneck()
    changes = [(at, n) for at, _, n in counts]
    return {
        "rate": rate,
        "timeline": [(round(at, 2), round(rate, 1)) for at, rate, _ in counts],
        "workers": [
            (round(min(at for at, _ in group), 1), n)
            for n, group in ((n, list(g)) for n, g in itertools.groupby(changes, lambda c: c[1]))
        ],
        "bottleneck": [found.kind, str(found)],
    }


def reached_s(timeline: list[tuple[float, float]], rate: float) -> float | None:
    """Return the first time from which on the mean rate of a second was as high as `rate`."""
    for index, (at, _) in enumerate(timeline):
        some = [one for _, one in timeline[index : index + 4]]
        if len(some) == 4 and sum(some) / 4 >= rate:
            return at
    return None


@contextlib.contextmanager
def burning(count: int) -> Iterator[None]:
    """Run so many processes beside it that compute all the time, with a lower priority."""
    code = "while True: pass"
    burners = [
        subprocess.Popen(["nice", "-n", "5", sys.executable, "-c", code]) for _ in range(count)
    ]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def run(name: str, setting: str, seconds: float) -> dict[str, Any]:
    """Measure one setting in a fresh process."""
    command = [sys.executable, os.path.abspath(__file__), "--one", name, setting]
    done = subprocess.run(
        [*command, "--seconds", str(seconds)], stdout=subprocess.PIPE, check=True, timeout=600
    )
    return json.loads(done.stdout)


def compare(name: str, seconds: float, rounds: int) -> None:
    """Measure all fixed numbers and `auto` in turn, and print medians and what `auto` did."""
    settings = [*map(str, CASES[name].fixed), "auto"]
    found = [{setting: run(name, setting, seconds) for setting in settings} for _ in range(rounds)]
    rates = {
        setting: statistics.median(one[setting]["rate"] for one in found) for setting in settings
    }
    auto = rates.pop("auto")
    for setting, rate in rates.items():
        print(f"{name:18} {setting:>5} {rate:10.1f}", flush=True)
    best = max(rates.values())
    print(f"{name:18}  auto {auto:10.1f}  {auto / best:.2f} of the best")
    for one in found:
        at = reached_s(one["auto"]["timeline"], NEAR * best)
        at_text = "never" if at is None else f"after {at:.1f} s"
        print(f"    {NEAR:.0%} of the best {at_text}; workers {one['auto']['workers']}")
        print(f"    {one['auto']['bottleneck'][1]}", flush=True)


def main() -> None:
    """Measure the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--burners", type=int, default=0)
    parser.add_argument("--one", nargs=2, metavar=("CASE", "SETTING"))
    given = parser.parse_args()
    if given.one:
        name, setting = given.one
        print(json.dumps(measure(CASES[name], setting, given.seconds)))
        return
    with burning(given.burners):
        for name in given.only:
            compare(name, given.seconds, given.rounds)


if __name__ == "__main__":
    main()
