"""Is this tree faster or slower than another one? Tiny items, in turns, as ratios.

    python benchmarks/against.py ../before            # another checkout, of the commit before
    python benchmarks/against.py ../before --repeats 15

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
CASES = [
    (source, backend, queue)
    for source in ("ints", "tiny")
    for backend in ("thread", "process")
    for queue in (10, 256)
]
MEASURE = """
import itertools, sys, time
import sources
from enqueuer import GeneratorEnqueuer
source, backend, queue, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
source = getattr(sources, source)
with GeneratorEnqueuer(source, backend=backend, max_queue_size=queue) as enqueuer:
    batches = iter(enqueuer)
    for _ in itertools.islice(batches, count // 5):
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
    parser.add_argument("--json", type=Path, help="where to write all numbers, too")
    options = parser.parse_args()
    trees = {"other": options.other.resolve(), "this": HERE.parent}
    if not (trees["other"] / "enqueuer" / "__init__.py").is_file():
        parser.error(f"there is no package enqueuer in {options.other}")
    rates: dict[str, dict[str, list[float]]] = {}
    for turn in range(options.repeats):
        for case in CASES:
            name = "{} {} {}".format(*case)
            for tree in sorted(trees, reverse=bool(turn % 2)):
                rate = measure(trees[tree], case, options.items)
                rates.setdefault(name, {"other": [], "this": []})[tree].append(rate)
    print(f"{'items/s':22}{'other':>10}{'this':>10}{'ratio':>8}{'best':>8}")
    for name, found in rates.items():
        other, this = (statistics.median(found[tree]) for tree in ("other", "this"))
        best = max(found["this"]) / max(found["other"])
        print(f"{name:22}{other:10.0f}{this:10.0f}{this / other:8.3f}{best:8.3f}")
    if options.json:
        options.json.write_text(json.dumps(rates, indent=1))
    return 0


def measure(tree: Path, case: tuple[str, str, int], items: int) -> float:
    """Return items a second with the package of one tree."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, case), str(items)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(HERE)])},
        cwd=HERE,
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
