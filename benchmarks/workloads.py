"""Real work through each loader: items a second, CPU, memory, outputs compared, lines of code.

    python benchmarks/workloads.py                      # all workloads
    python benchmarks/workloads.py remote-files --only enqueuer "Grain, 2 x 16"
    python benchmarks/workloads.py --page               # also writes docs/benchmarks_workloads.rst
    python benchmarks/workloads.py --list

Each number is measured in a fresh process, in a session of its own.

    epoch 1    starts the workers; its batches are compared by a hash of their values
    epoch 2    takes the batches that some loaders have made ahead while epoch 1 was compared
    epoch 3 .. is timed, whole epochs, for at least a second (`timed_s` of the workload)

Memory is read in the first two epochs only, as a reading takes CPU time for each process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine
import workloads_page
from workload import MODULES, Contestant, Digest, Workload, is_installed, load

# Seconds between two readings of the memory.
_MEMORY_S = 0.1
_TAIL = 2000  # characters of what a process printed
_PEERS = [
    *("numpy", "enqueuer", "pillow", "h5py"),
    *("torch", "grain", "spdl", "datasets", "torchdata", "tensorflow-cpu", "webdataset"),
]

Cells = dict[str, list[dict[str, Any]]]


def main() -> None:
    """Run what the command line asks for."""
    options = _options()
    workloads = {one.name: one for one in map(load, MODULES)}
    if options.one:
        workload = workloads[options.names[0]]
        _measure(workload, workload.contestants[options.one], options.folder, options.count)
        return
    unknown = set(options.names) - set(workloads)
    if unknown:
        raise SystemExit(f"no such workload: {', '.join(sorted(unknown))}; --list shows all")
    chosen = [workloads[name] for name in options.names or workloads]
    for missing in [one for one in chosen if not is_installed(one.needs)]:
        print(f"{missing.name} needs {missing.needs}, which is not installed")
        chosen.remove(missing)
    if options.list:
        for workload in chosen:
            print(f"{workload.name}: {workload.about}\n    {', '.join(workload.contestants)}")
        return
    about = {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "machine": machine.describe(_PEERS),
        "repeats": options.repeats,
    }
    everything: dict[str, Any] = {"about": about, "workloads": {}, "found": {}}
    try:
        for workload in chosen:
            for cells in _run(workload, options):
                everything["workloads"][workload.name] = cells
                if options.out:
                    options.out.write_text(json.dumps(everything, indent=1) + "\n")
            rows = _rows(workload, cells)
            print("\n".join(_table(workload, rows)), flush=True)
            everything["found"][workload.name] = {
                "about": workload.about,
                "why": workload.why,
                "unit": workload.unit,
                "rows": rows,
            }
            if options.page:
                workloads_page.write(options.page, everything)
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="WORKLOAD", help="workloads (default: all)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contestants (default: all)")
    parser.add_argument("--repeats", type=int, default=3, help="of each (default: 3)")
    parser.add_argument("--count", type=int, default=0, help="items of an epoch")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for each measurement")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    parser.add_argument(
        "--page",
        nargs="?",
        type=Path,
        const=workloads_page.DOCS,
        help="folder for a page with pictures (default: that of the documentation)",
    )
    parser.add_argument("--list", action="store_true", help="show workloads and contestants")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# --- one measurement, in a process of its own --------------------------------------------------


def _measure(workload: Workload, contestant: Contestant, folder: Path, count: int) -> None:
    """Take some epochs of batches, and print the numbers of the timed ones as JSON."""
    epochs = contestant.open(workload.prepare(folder, count), count)
    memory, digest = _Memory(), Digest(workload.has_order)
    use = workload.use or (lambda batch: None)
    for batch in next(epochs):
        digest.add(batch)
        use(batch)
        # Otherwise it lives on while the next one is made.
        del batch
    # Not behind the next epoch: meanwhile a loader may make batches ahead.
    speed = machine.speed()
    for batch in next(epochs):
        use(batch)
        del batch
    memory_mb = memory.stop() / 1e6
    ages: list[float] = []
    seen = expected = 0
    cpu_s, began, took = machine.cpu_of_session(), time.perf_counter(), 0.0
    while took < workload.timed_s:
        for batch in next(epochs):
            if isinstance(batch, dict) and "made_at" in batch:
                ages.append(time.perf_counter() - float(batch["made_at"]))
            seen += workload.size_of(batch)
            use(batch)
            del batch
        expected += count
        took = time.perf_counter() - began
        if seen != expected:
            raise SystemExit(f"{seen} items came instead of {expected}")
    cpu_s = machine.cpu_of_session() - cpu_s
    found: dict[str, Any] = {
        "rate": seen / took,
        "cpu_ms": 1000 * cpu_s / max(1, seen),
        "memory_mb": memory_mb,
        "speed": (speed + machine.speed()) / 2,
        "digest": digest.text(),
    }
    if ages:
        found["age_ms"] = 1000 * statistics.median(ages)
    print(json.dumps(found))
    sys.stdout.flush()
    # Some loaders leave threads or processes behind, which the parent ends.
    os._exit(0)


class _Memory:
    """The most memory that all processes of this session have had, beyond that at first."""

    def __init__(self) -> None:
        self._most = 0
        self._first = machine.memory_of_session()
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_done.wait(_MEMORY_S):
            self._most = max(self._most, machine.memory_of_session() - self._first)

    def stop(self) -> int:
        """End the thread that reads, and read once more; return the bytes."""
        self._is_done.set()
        self._thread.join()
        return max(self._most, machine.memory_of_session() - self._first)


# --- all measurements --------------------------------------------------------------------------


def _run(workload: Workload, options: argparse.Namespace) -> Iterator[Cells]:
    """Measure a workload; each repeat begins with another contestant.

    Yields:
        The results so far, after each measurement.
    """
    names = [name for name in workload.contestants if not options.only or name in options.only]
    if not names:
        raise SystemExit(
            f"{workload.name} has no such contestant; give --only some of: "
            f"{', '.join(workload.contestants)}"
        )
    count = options.count or workload.items
    cells: Cells = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        workload.prepare(Path(folder), count)
        for repeat in range(options.repeats):
            first = repeat % max(1, len(names))
            for name in names[first:] + names[:first]:
                cells[name].append(_try(workload, name, folder, count, options.limit))
                yield cells


def _try(workload: Workload, name: str, folder: str, count: int, limit_s: float) -> dict[str, Any]:
    """Measure one contestant once, in a process of its own."""
    contestant = workload.contestants[name]
    if not contestant.is_installed:
        return {"status": f"needs {contestant.needs}"}
    # In files, as a process that a loader leaves behind would keep a pipe open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [
                *(sys.executable, __file__, workload.name, "--one", name),
                *("--folder", folder, "--count", str(count)),
            ],
            stdout=out,
            stderr=err,
            start_new_session=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"status": "timeout"}
        finally:
            machine.end(process.pid)
            process.wait()
        out.seek(0)
        err.seek(0)
        lines, said = out.read().splitlines(), err.read()[-_TAIL:]
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        found = {}
    if code or "rate" not in found:
        print(f"{workload.name}, {name}:\n{said}", file=sys.stderr)
        return {"status": "error", "why": said}
    return found


def _rows(workload: Workload, cells: Cells) -> list[dict[str, Any]]:
    """Return medians and more for each contestant, the best rate first."""
    good = {name: [one for one in tries if "rate" in one] for name, tries in cells.items()}
    expected = next((tries[0]["digest"] for tries in good.values() if tries), None)
    rows = []
    for name, tries in cells.items():
        contestant = workload.contestants[name]
        row: dict[str, Any] = {"name": name, "lines": contestant.lines}
        if not good[name]:
            rows.append(row | {"status": tries[0]["status"] if tries else "not run"})
            continue
        for key in sorted(set(good[name][0]) - {"digest"}):
            row[key] = statistics.median(one[key] for one in good[name])
        rates, digests = [one["rate"] for one in good[name]], {one["digest"] for one in good[name]}
        row["range"] = [min(rates), max(rates)]
        row["output"] = "other work" if contestant.is_other else "not compared"
        if contestant.is_compared:
            row["output"] = "the same" if digests == {expected} else "ANOTHER"
        rows.append(row)
    return sorted(rows, key=lambda row: -row.get("rate", 0.0))


def _table(workload: Workload, rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table."""
    rate = f"{workload.unit}/s"
    yield f"\n{workload.name}: {workload.about}"
    head = f"{'':28}{rate:>12}{'range':>20}{'CPU us':>9}{'MB':>8}{'age ms':>8}"
    yield f"{head}{'speed':>7}{'lines':>7}  output"
    for row in rows:
        if "rate" not in row:
            yield f"{row['name']:28}{row['status']:>12}"
            continue
        spread = "-".join(f"{one:,.0f}" for one in row["range"])
        text = f"{row['name']:28}{row['rate']:12,.1f}{spread:>20}{1000 * row['cpu_ms']:9.1f}"
        age = f"{row['age_ms']:.2f}" if "age_ms" in row else ""
        text += f"{row['memory_mb']:8.0f}{age:>8}{row['speed']:7.1f}"
        yield f"{text}{row['lines']:7}  {row['output']}"


if __name__ == "__main__":  # started processes import this file
    main()
