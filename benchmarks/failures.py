"""The failure table: one worker, eight faults, and what the consumer of each loader sees.

Each pair of a loader and a fault is tried in a process of its own; `faults/verdict.py` says what
counts as right. A first try without a fault shows that the loader is used as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine
from faults import COUNT, FAULTS, LOADERS, NO_FAULT, Fault, Loader
from faults.table import MISSING, NOT_APPLICABLE, OK, UNUSABLE, table
from faults.verdict import Seen, remarks

_HERE = Path(__file__).parent
_LIMIT_S, _QUICK_LIMIT_S = 15.0, 6.0  # from the first item on; what takes longer is a hang
_QUICK_FAULTS = ("ValueError", "unpicklable", "SIGKILL")
_START_S = 30.0  # to the first item, with all that is imported; a machine may be busy
_END_S = 2.0  # to end by itself, after its report
_POLL_S = 0.05  # between two readings of the report
_TAIL = 2000  # characters of what a consumer and its workers printed


def main() -> None:
    """Run what the command line asks for."""
    options = _options()
    loaders = [LOADERS[name] for name in LOADERS if name in options.only]
    missing = [f"{one.name} needs {one.needs}" for one in loaders if not one.installed]
    if missing and options.needs_all:
        raise SystemExit(f"not installed: {', '.join(missing)}")
    faults = [name for name in FAULTS if name in options.faults]
    about = _about(loaders, options)
    try:
        cells = {one.name: _observe_all(one, faults, options.limit) for one in loaders}
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None
    if options.json:
        everything = {"about": about, "cells": cells}
        options.json.write_text(json.dumps(everything, indent=1) + "\n")
    print("\n".join([*_lines(about), "", table(cells, faults)]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=LOADERS, default=list(LOADERS), help="loaders"
    )
    parser.add_argument("--faults", nargs="+", metavar="NAME", choices=FAULTS)
    parser.add_argument(
        "--limit",
        type=float,
        metavar="S",
        help=f"after which a loop hangs: {_LIMIT_S:.0f} s; with --quick {_QUICK_LIMIT_S:.0f} s",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="save all that was seen")
    parser.add_argument("--needs-all", action="store_true", help="fail if a loader is missing")
    parser.add_argument("--quick", action="store_true", help="three faults, and a shorter limit")
    options = parser.parse_args()
    if options.faults is None:
        options.faults = list(_QUICK_FAULTS if options.quick else FAULTS)
    if options.limit is None:
        options.limit = _QUICK_LIMIT_S if options.quick else _LIMIT_S
    return options


def _observe_all(loader: Loader, faults: list[str], limit: float) -> dict[str, dict[str, Any]]:
    """Return a row of the table."""
    if not loader.installed:
        return {fault: {"verdict": MISSING} for fault in faults}
    control = _observe(loader.name, NO_FAULT, limit)
    if (control["end"], control["items"]) != ("end", list(range(COUNT))):
        print(f"{loader.name} {UNUSABLE}:\n{json.dumps(control, indent=1)}", file=sys.stderr)
        return {fault: {**control, "verdict": UNUSABLE} for fault in faults}
    return {fault: _cell(loader, FAULTS[fault], limit) for fault in faults}


def _cell(loader: Loader, fault: Fault, limit: float) -> dict[str, Any]:
    if not loader.faces(fault):
        return {"verdict": NOT_APPLICABLE}
    saw = _observe(loader.name, fault.name, limit)
    known = {key: saw[key] for key in Seen.__dataclass_fields__ if key in saw}
    found = remarks(fault, Seen(**{**known, "items": tuple(saw["items"])}))
    return {"verdict": ", ".join(found) or OK, **saw}


def _observe(loader: str, fault: str, limit: float) -> dict[str, Any]:
    """Return what the consumer of a loader sees; it lives in a process of its own."""
    print(f"{loader}, {fault}:", end=" ", file=sys.stderr, flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="failures-") as folder:
        report, said = Path(folder, "report"), Path(folder, "said")
        with report.open("w") as out, said.open("w") as err:
            process = subprocess.Popen(
                [sys.executable, _HERE / "observe.py", loader, fault],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # so that its children, and theirs, can be found
            )
        try:
            saw = _wait(process, report, limit)
        finally:
            machine.end(process.pid)
            process.wait()
        saw["said"] = said.read_text(errors="replace")[-_TAIL:]
    print(f"{saw['end']} after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return saw


def _wait(process: subprocess.Popen[bytes], report: Path, limit: float) -> dict[str, Any]:
    """Wait for the report's last line, as long as the limits allow, and put its lines together."""
    deadline = time.monotonic() + _START_S
    started = False
    while True:
        over = process.poll() is not None  # asked before the report is read: then it is complete
        whole, _, _ = report.read_text().rpartition("\n")
        lines = [json.loads(line) for line in whole.splitlines()]
        items = [line["item"] for line in lines if "item" in line]
        if lines and "end" in lines[-1]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            return {"items": items, **lines[-1]}
        if over:
            return {"items": items, "end": "gone", "exitcode": process.returncode}
        if items and not started:
            started, deadline = True, time.monotonic() + limit
        if time.monotonic() > deadline:
            return {"items": items, "end": "hang"}
        time.sleep(_POLL_S)


def _about(loaders: list[Loader], options: argparse.Namespace) -> dict[str, Any]:
    packages = dict.fromkeys(loader.needs for loader in loaders if loader.needs)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "limit": options.limit,
        "load": os.getloadavg(),
        "machine": machine.describe(["numpy", *packages]),
    }


def _lines(about: dict[str, Any]) -> Iterator[str]:
    box = about["machine"]
    yield f"{about['date']}, {box['cpu']}, {box['cores']} cores, Python {box['python']}"
    yield ", ".join(f"{name} {version}" for name, version in box["versions"].items() if version)
    yield f"hang: neither an error nor an end within {about['limit']:.0f} s of the first item"


if __name__ == "__main__":
    main()
