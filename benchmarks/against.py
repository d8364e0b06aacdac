"""Is this tree faster or slower than another one? In turns, as ratios.

    python benchmarks/against.py ../before            # another checkout, of the commit before
    python benchmarks/against.py ../before --repeats 25 --only large larger

Each number is taken in a fresh process, which imports `enqueuer` from one of the two trees. The
trees are measured in turn, and the order changes each time. The program prints the ratio of the
medians, and that of the best. Above 1, this tree is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# What makes the enqueuer of each case, and what percentage of the items threads and processes read.
SOURCES = {
    "ints": ("GeneratorEnqueuer(sources.ints, max_queue_size=10, {})", 100, 100),
    "ints, queue 256": ("GeneratorEnqueuer(sources.ints, max_queue_size=256, {})", 100, 100),
    "tiny": ("GeneratorEnqueuer(sources.tiny, max_queue_size=10, {})", 100, 100),
    "tiny, queue 256": ("GeneratorEnqueuer(sources.tiny, max_queue_size=256, {})", 100, 100),
    "large": ("GeneratorEnqueuer(ring(sources.IMAGES, 'uint8', 8), {})", 100, 1),
    "larger": ("GeneratorEnqueuer(ring(sources.IMAGES, 'float32', 4), {})", 100, 0.5),
    "tasks-batch": ("OrderedEnqueuer(range(1 << 20), row, batch_size=64, workers=2, {})", 5, 5),
}
CASES = [(name, backend) for name in SOURCES for backend in ("thread", "process")]
MEASURE = """
import functools, itertools, sys, time
import sources
from enqueuer import GeneratorEnqueuer, OrderedEnqueuer
ring = functools.partial(functools.partial, sources.ring)
row = functools.partial(sources.row, (3, 64, 64), 2048)
count = int(sys.argv[2])
with eval(sys.argv[1]) as enqueuer:
    batches = iter(enqueuer)
    for _ in itertools.islice(batches, max(5, count // 5)):
        pass
    began = time.perf_counter()
    for _ in itertools.islice(batches, count):
        pass
    print(count / (time.perf_counter() - began))
"""


def main() -> int:
    """Take turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the folder of the other tree")
    parser.add_argument("--repeats", type=int, default=9, help="of each number (default: 9)")
    parser.add_argument("--items", type=int, default=100_000, help="in each (default: 100000)")
    parser.add_argument("--only", nargs="+", choices=SOURCES, help="these cases (default: all)")
    parser.add_argument("--json", type=Path, help="where to write all numbers, too")
    options = parser.parse_args()
    trees = {"other": options.other.resolve(), "this": HERE.parent}
    if not (trees["other"] / "enqueuer" / "__init__.py").is_file():
        parser.error(f"there is no package enqueuer in {options.other}")
    rates: dict[str, dict[str, list[float]]] = {}
    for turn in range(options.repeats):
        for case in CASES:
            if case[0] not in (options.only or SOURCES):
                continue
            name = "{}, {}".format(*case)
            for tree in sorted(trees, reverse=bool(turn % 2)):
                rate = measure(trees[tree], case, options.items)
                rates.setdefault(name, {"other": [], "this": []})[tree].append(rate)
    print(f"{'items/s':26}{'other':>10}{'this':>10}{'ratio':>8}{'best':>8}")
    for name, found in rates.items():
        other, this = (statistics.median(found[tree]) for tree in ("other", "this"))
        best = max(found["this"]) / max(found["other"])
        print(f"{name:26}{other:10.0f}{this:10.0f}{this / other:8.3f}{best:8.3f}")
    if options.json:
        options.json.write_text(json.dumps(rates, indent=1))
    return 0


def measure(tree: Path, case: tuple[str, str], items: int) -> float:
    """Return items a second with the package of one tree."""
    source, backend = case
    program, *percent = SOURCES[source]
    count = max(1, round(items / 100 * percent[backend == "process"]))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, program.format(f"backend={backend!r}"), str(count)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(HERE)])},
        cwd=HERE,
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
