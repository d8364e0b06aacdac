"""Compare enqueuer with its peers: `python benchmarks/run.py` prints a table and saves it.

Each number is measured in a process of its own, one after the other: all contestants in turn,
then all again, as often as `--repeats` says; the table has the medians.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine
import page
import report
from cases import CASES
from contestants import CONTESTANTS

_HERE = Path(__file__).parent
_SECONDS, _QUICK_SECONDS = 1.5, 0.3  # that a number is measured for
_REPEATS, _QUICK_REPEATS = 3, 1
_START_S = 30.0  # to start, import, warm up and end; a machine may be busy
_EACH_S = 10.0  # the same for each further row
_POLL_S = 0.1  # between two readings of the free memory
_TAIL = 2000  # characters of what a failed measurement said


def main() -> None:
    """Run what the command line asks for."""
    options = _options()
    if options.list:
        _print_lists()
        return
    options.out.mkdir(parents=True, exist_ok=True)
    packages = [one.needs for one in CONTESTANTS.values() if one.needs]
    about = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": options.seconds,
        "repeats": options.repeats,
        "command": shlex.join(["python", "benchmarks/run.py", *sys.argv[1:]]),
        "machine": machine.describe(["numpy", *dict.fromkeys(packages)]),
    }
    try:
        tries = _measure_all(options)
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None
    results = {
        case: {row: {name: report.summary(t) for name, t in cells.items()} for row, cells in rows}
        for case, rows in ((case, rows.items()) for case, rows in tries.items())
    }
    _save(options.out, about, results)
    if options.page:
        page.write(options.page, {"about": about, "results": page.short(results)})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="once, shortly, and fewer rows")
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--contestants", nargs="+", metavar="NAME", choices=CONTESTANTS, default=list(CONTESTANTS)
    )
    parser.add_argument("--repeats", type=int, help=f"{_REPEATS}; with --quick {_QUICK_REPEATS}")
    parser.add_argument(
        "--seconds", type=float, help=f"for each number: {_SECONDS}; with --quick {_QUICK_SECONDS}"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", default=_HERE / "results")
    parser.add_argument(
        "--page",
        nargs="?",
        type=Path,
        const=page.DOCS,
        metavar="DIR",
        help="also write benchmarks.rst and its pictures, by default in docs/",
    )
    parser.add_argument("--list", action="store_true", help="name the cases and contestants")
    options = parser.parse_args()
    if options.repeats is None:
        options.repeats = _QUICK_REPEATS if options.quick else _REPEATS
    if options.seconds is None:
        options.seconds = _QUICK_SECONDS if options.quick else _SECONDS
    return options


def _print_lists() -> None:
    for name, case in CASES.items():
        print(f"{name:22} {case.title}, {case.unit}")
    print()
    for name, contestant in CONTESTANTS.items():
        print(f"{name:22} {'' if contestant.installed else f'missing: {contestant.needs}'}")


def _measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """Return every try of every number: {case: {row: {contestant: [try, ...]}}}."""
    names = [name for name in CONTESTANTS if name in options.contestants]
    tries: dict[str, Any] = {
        case: {row: {} for row in _rows(case, options.quick)}
        for case in CASES
        if case in options.only
    }
    for repeat in range(options.repeats):
        # Each repeat begins with another contestant.
        turn = repeat % max(1, len(names))
        for case in tries:
            for name in names[turn:] + names[:turn]:
                if CASES[case].takes(case, CONTESTANTS[name]):
                    _progress(f"{repeat + 1}/{options.repeats} {case} {name}")
                    for row, result in _measure(case, name, options).items():
                        tries[case][row].setdefault(name, []).append(result)
    _progress("")
    return tries


def _rows(case: str, quick: bool) -> list[str]:
    return list((quick and CASES[case].quick) or CASES[case].rows)


def _measure(case: str, name: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return what each row of a case is for a contestant; measure it in a process of its own."""
    rows = _rows(case, options.quick)
    if not CONTESTANTS[name].installed:
        missing = {"status": "missing", "why": f"{CONTESTANTS[name].needs} is not installed"}
        return dict.fromkeys(rows, missing)
    limit = _START_S + len(rows) * (_EACH_S + options.seconds)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        output, said = Path(folder, "output"), Path(folder, "said")
        output.touch()
        command = [sys.executable, _HERE / "measure.py", case, name, options.seconds, output, *rows]
        failure = _run([str(part) for part in command], said, limit)
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        results = {line.pop("row"): line for line in lines}
        if failure and len(results) < len(rows):
            failure["said"] = said.read_text(errors="replace")[-_TAIL:]
            _progress("")
            print(f"{case}, {name}: {failure['why']}\n{failure['said']}", file=sys.stderr)
    nothing = failure or {"status": "error", "why": "it ended without a number"}
    return {row: results.get(row, nothing) for row in rows}


def _run(command: list[str], said: Path, limit: float) -> dict[str, str] | None:
    """Run a command, end all that it leaves, and return what was wrong."""
    deadline = time.monotonic() + limit
    with said.open("w") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},  # a start is not to compile
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its children, and theirs, can be found
        )
    try:
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(_POLL_S)
                return {"status": "error", "why": f"exit code {code}"} if code else None
            if machine.memory_is_short():
                return {"status": "error", "why": "the machine ran out of memory"}
        return {"status": "timeout", "why": f"it took more than {limit:.0f} s"}
    finally:
        machine.end(process.pid)
        process.wait()


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:78}", end="" if text else "\r", file=sys.stderr, flush=True)


def _save(out: Path, about: dict[str, Any], results: report.Results) -> None:
    everything = {"about": about, "results": results}
    (out / "results.json").write_text(json.dumps(everything, indent=1) + "\n")
    text = "\n".join([*_about(about), "", report.table(results)])
    (out / "results.txt").write_text(text + "\n")
    print(text)
    try:
        report.plot(results, out / "results.png")
    except ModuleNotFoundError as error:
        print(f"no plot: {error.name} is not installed", file=sys.stderr)


def _about(about: dict[str, Any]) -> Iterator[str]:
    box = about["machine"]
    yield f"{about['date']}, {box['cpu']}, {box['cores']} cores, Python {box['python']}"
    yield ", ".join(f"{name} {version}" for name, version in box["versions"].items() if version)
    yield f"medians of {about['repeats']} x {about['seconds']} s"


if __name__ == "__main__":
    main()
