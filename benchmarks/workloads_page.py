"""Results of real work as a page: `python benchmarks/workloads.py --page`.

    benchmarks_workloads.rst            the page
    benchmarks/workloads.json           the results from which it was made
    benchmarks/workload-NAME.csv        a table of each workload
    benchmarks/workload-NAME.svg        a picture of each workload

`python benchmarks/workloads_page.py` writes the page again from the results that are there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import page
import report
from page import DOCS, Table

_DASH = "\N{EN DASH}"
# What a table says of a row's output.
_OUTPUTS = {"the same": "same", "not compared": "any", "other work": "other"}
_COLUMNS = ("CPU, us", "memory, MB", "lines", "output")


def write(folder: Path, everything: dict[str, Any]) -> None:
    """Write the page, its pictures, and the results from which they were made, to a folder."""
    (folder / "benchmarks").mkdir(parents=True, exist_ok=True)
    kept = {key: everything[key] for key in ("about", "found")}
    _results(folder).write_text(json.dumps(kept, indent=1) + "\n")
    page.write_page(folder / "benchmarks_workloads.rst", _page(everything))
    for name, found in everything["found"].items():
        bars = _bars(found)
        if bars:
            picture = page.bars(_title(name, found), bars)
            (folder / "benchmarks" / f"workload-{name}.svg").write_text(picture)


def _page(everything: dict[str, Any]) -> Iterator[str | Table]:
    """Yield the lines and the tables of the page."""
    about, found = everything["about"], everything["found"]
    box = about["machine"]
    yield from ("Real work", "=========", "")
    yield from _main_result(found)
    yield from (
        "",
        "Each loader is used as its documentation advises; :doc:`benchmarks` measures the "
        "transport alone.",
        "",
    )
    yield _overview(found)
    losses = list(_losses(found))
    if losses:
        yield from ("Where it loses", "--------------", "", *losses, "")
    yield from ("How it was measured", "-------------------", "")
    yield from (
        f"Measured on {about['date'][:10]}, {box['cpu']}, {box['cores']} cores, "
        f"Python {box['python']}, with a load average of {box['load'][0]:.1f} at the beginning.",
        f"Each number is {_of_runs(about)}.",
        "This command measured it, and wrote this page:",
        *("", ".. code-block:: sh", "", "   python benchmarks/workloads.py --page", ""),
        "Versions: "
        + ", ".join(f"{name} {version}" for name, version in box["versions"].items() if version)
        + ".",
        "`benchmarks/README.md` says what limits the rates, and where the CPU time goes.",
        "*CPU* is the time of all processes for an item, *memory* their most; *lines* are those of "
        "the user's code.",
        "*output* compares the batches with those of the plain loop: *same*, *any* where the order "
        "differs, and *other* for a decoder or a tokenizer of its own, which is no peer above.",
        "*speed* is that of the CPU at the time: where it is lower, all times are longer.",
        f"{_DASH} is a contestant that failed, was too slow or is not installed.",
        "",
    )
    for name, one in found.items():
        yield from (name, "-" * len(name), "", _sentence(one["about"]), "")
        bars = _bars(one)
        if bars:
            yield f".. image:: benchmarks/workload-{name}.svg"
            yield f"   :alt: Bars of {name}."
            yield ""
        yield _table(name, one)


def _main_result(found: dict[str, Any]) -> Iterator[str]:
    """Yield the sentence with which the page begins, if there are numbers for it."""
    ratios = {name: ratio for name, one in found.items() if (ratio := _ratio(one)) is not None}
    if not ratios:
        return
    wins = sum(ratio >= 1 for ratio in ratios.values())
    yield f"`enqueuer` is at least as fast as the best peer in {wins} of {len(ratios)} workloads."


def _losses(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a list: each workload that a peer, or a plain loop, does faster."""
    for name, one in found.items():
        ours = _best(one["rows"], True)
        if "rate" not in ours:
            yield f"- `{name}`: `enqueuer` has no number."
            continue
        others = [_best(one["rows"], False), *(r for r in one["rows"] if _is_plain(r))]
        faster = [row for row in others if row.get("rate", 0) > ours["rate"]]
        if faster:
            unit = f"{one['unit']}/s"
            listed = ", ".join(f"{row['name']} {_number(row, 'rate')}" for row in faster)
            yield f"- `{name}`, {unit}: {_number(ours, 'rate')}, {listed}."


def _is_plain(row: dict[str, Any]) -> bool:
    return bool(row["name"].startswith("plain loop"))


def _ratio(one: dict[str, Any]) -> float | None:
    """Return our rate over that of the best peer; None without either."""
    ours, theirs = _best(one["rows"], True), _best(one["rows"], False)
    return ours["rate"] / theirs["rate"] if "rate" in ours and "rate" in theirs else None


def _of_runs(about: dict[str, Any]) -> str:
    return "that of one run" if about["repeats"] == 1 else f"the median of {about['repeats']} runs"


def _overview(found: dict[str, Any]) -> Table:
    """Return a table of the best of ours beside the best peer, of those that do the same work."""
    header = ("workload", "ratio", "enqueuer", "best peer", "plain loop", "row of ours", "peer")
    lines = []
    for name, one in found.items():
        ours, theirs = _best(one["rows"], True), _best(one["rows"], False)
        ratio = _ratio(one)
        plain = [row for row in one["rows"] if row["name"] == "plain loop"]
        lines.append(
            (
                f"{name}, {one['unit']}/s",
                _DASH if ratio is None else f"{ratio:.2f}",
                _number(ours, "rate"),
                _number(theirs, "rate"),
                _number(plain[0], "rate") if plain else _DASH,
                *(best.get("name", _DASH) for best in (ours, theirs)),
            )
        )
    title = "The best of ours, and the best peer that does the same work"
    return Table("workloads", title, header, lines)


def _best(rows: list[dict[str, Any]], is_ours: bool) -> dict[str, Any]:
    """Return the fastest row of ours or of the peers, without plain loops and limits."""
    taken = [
        row
        for row in rows
        if "rate" in row
        and _is_ours(row) == is_ours
        and row["output"] in ("the same", "not compared")
        and not row["name"].startswith(("plain loop", "limit"))
    ]
    return max(taken, key=lambda row: row["rate"], default={})


def _table(name: str, found: dict[str, Any]) -> Table:
    has_age = any("age_ms" in row for row in found["rows"])
    has_speed = any("speed" in row for row in found["rows"])
    columns = (*_COLUMNS, *(("age, ms",) if has_age else ()), *(("speed",) if has_speed else ()))
    header = (f"`{name}`", f"{found['unit']}/s", *columns)
    lines = (_cells(row, columns) for row in found["rows"])
    return Table(f"workload-{name}", "", header, lines)


def _cells(row: dict[str, Any], columns: tuple[str, ...]) -> Iterator[str]:
    """Yield the cells of a row of a workload's table."""
    is_measured = "rate" in row
    yield from (row["name"], _number(row, "rate"))
    yield report.number(1000 * row["cpu_ms"]) if is_measured else _DASH
    yield f"{row['memory_mb']:.0f}" if is_measured else _DASH
    yield from (
        str(row["lines"]),
        _OUTPUTS.get(row["output"], row["output"]) if is_measured else _DASH,
    )
    if "age, ms" in columns:
        yield _number(row, "age_ms")
    if "speed" in columns:
        yield _number(row, "speed")


def _sentence(about: str) -> str:
    return f"{about[0].upper()}{about[1:]}."


def _number(row: dict[str, Any], key: str) -> str:
    return report.number(row[key]) if key in row else _DASH


def _title(name: str, found: dict[str, Any]) -> str:
    return f"{name}, {found['unit']}/s (more is better)"


def _bars(found: dict[str, Any]) -> list[tuple[str, float, bool]]:
    return [(row["name"], row["rate"], _is_ours(row)) for row in found["rows"] if "rate" in row]


def _is_ours(row: dict[str, Any]) -> bool:
    return bool(row["name"].startswith("enqueuer"))


def _results(folder: Path) -> Path:
    return folder / "benchmarks" / "workloads.json"


if __name__ == "__main__":
    _folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    write(_folder, json.loads(_results(_folder).read_text()))
