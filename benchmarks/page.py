"""Results as a page of the documentation, with pictures: `python benchmarks/run.py --page`.

    benchmarks.rst             the page
    benchmarks/results.json    the results from which it was made
    benchmarks/CASE.csv        tables
    benchmarks/CASE.svg        pictures

`python benchmarks/page.py` writes the page again from the results that are there.
"""

from __future__ import annotations

import csv
import json
import math
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import summary
from cases import CASES
from contestants import CONTESTANTS

_HERE = Path(__file__).parent
DOCS = _HERE.parent / "docs"
sys.path.append(str(DOCS))

from svg import element, text  # noqa: E402

# (title, words, cases with a table, cases with a picture)
GROUPS = (
    (
        "Large batches",
        "One worker sends a dict of 64 images and their labels to a loop that drops it. "
        "Threads pass a reference, so their rate is no bandwidth. `memcpy` is the rate at which "
        "one core copies the same arrays.",
        ("large", "consumer-cpu"),
        ("large",),
    ),
    (
        "Small items",
        "One worker sends integers, or dicts of two small arrays, through a queue of 256. "
        "The plain loop shows the cost of making an item. "
        "`bare-deque` is the limit of two threads and no loader: a bounded deque without an end, "
        "errors or a stop.",
        ("ints", "tiny"),
        ("ints", "tiny"),
    ),
    (
        "Short queues and latency",
        "The same dicts through a queue of 1, 2 and 10; then the time from `yield` to `next` "
        "while the loop waits for each item.",
        ("queue", "arrival"),
        ("queue",),
    ),
    (
        "Tasks",
        "An `OrderedEnqueuer` and its peers run a function of an index, in order, with two "
        "workers.",
        ("tasks-tiny", "tasks-batch", "tasks-cpu", "tasks-straggler"),
        ("tasks-tiny", "tasks-batch"),
    ),
    (
        "Samples of a dataset",
        "torch's `DataLoader`, and `enqueuer.adapters.torch.DataLoader` in its place.",
        ("loader", "loader-training"),
        (),
    ),
    (
        "Work that takes time",
        "Work in Python; work that waits; and the time of a step beyond the slower of making and "
        "using a batch.",
        ("cpu", "latency", "overlap"),
        (),
    ),
    (
        "Start, stop and memory",
        "The time to the first batch with four workers, the first time in a process (with imports "
        "and a fork server) and again; to stop them; and the memory of all processes.",
        ("first-default", "stop", "resume-files", "memory"),
        ("first-default",),
    ),
)

# A phone shows the whole width. The name of a bar stands above it, and its number behind it.
_WIDTH, _STEP, _BAR, _LONGEST, _LINE = 340, 36, 14, 270, 18
_OURS, _THEIRS = "#0072b2", "#b8b8b8"


@dataclass(frozen=True)
class Table:
    """A table of a page, which has a file of its own: `benchmarks/NAME.csv`."""

    name: str
    title: str
    header: Iterable[str]
    lines: Iterable[Iterable[str]]


def write(folder: Path, everything: dict[str, Any]) -> None:
    """Write the page, its pictures, and the results from which they were made, to a folder."""
    (folder / "benchmarks").mkdir(parents=True, exist_ok=True)
    _results(folder).write_text(json.dumps(everything, indent=1) + "\n")
    write_page(folder / "benchmarks.rst", page(everything))
    results = everything["results"]
    for name, picture in pictures(results):
        (folder / "benchmarks" / name).write_text(picture)


def write_page(path: Path, parts: Iterable[str | Table]) -> None:
    """Write a page, and its tables beside it."""
    lines = []
    for part in parts:
        if isinstance(part, str):
            lines.append(part)
            continue
        name = f"benchmarks/{part.name}.csv"
        with path.with_name("benchmarks").joinpath(f"{part.name}.csv").open("w") as file:
            csv.writer(file, lineterminator="\n").writerows([part.header, *part.lines])
        lines += [
            f".. csv-table:: {part.title}".rstrip(),
            f"   :file: {name}",
            "   :header-rows: 1",
            "",
        ]
    path.write_text("\n".join(lines) + "\n")


def short(results: report.Results) -> report.Results:
    """Return results without the single repeats, of which a page shows nothing."""
    return {
        case: {
            row: {
                name: {k: v for k, v in cell.items() if k != "repeats"} for name, cell in c.items()
            }
            for row, c in rows.items()
        }
        for case, rows in results.items()
    }


def page(everything: dict[str, Any]) -> Iterator[str | Table]:
    """Yield the lines and the tables of the page."""
    about, results = everything["about"], everything["results"]
    box = about["machine"]
    yield from ("Benchmarks", "==========", "")
    yield from summary.main_result(results)
    yield from (
        "",
        ":doc:`benchmarks_workloads` shows real work: decoding, tokenizing, reading, training.",
    )
    losses = list(summary.losses(results))
    if losses:
        yield "See `Where it loses`_."
    yield ""
    failures = summary.Failures.read(_HERE / "README.md")
    yield from ("Failures", "--------", "")
    yield "In eight tests, a worker fails, exits or is killed at its third item."
    yield "A loader passes if the loop gets both earlier items, and then, in time, the right error."
    yield ""
    yield Table("failures", "Tests passed", ("loader", "passed"), failures.passed)
    yield from (
        *(failures.about, ""),
        *("How it was measured", "-------------------", ""),
        f"Measured on {about['date'][:10]}, {box['cpu']}, {box['cores']} cores, a load of "
        f"{box['load'][0]:.1f} before the first case, Python {box['python']}.",
        f"Each run of a case took {about['seconds']} s, and each number is {_of_runs(about)}.",
        f"The command was `{about['command']}`.",
        "Versions: "
        + ", ".join(f"{name} {version}" for name, version in box["versions"].items() if version)
        + ".",
        "Compare ratios rather than figures: the cores are shared, and machines differ.",
        "`benchmarks/README.md` describes each case and test, and how the comparison is kept fair; "
        "`docs/benchmarks/results.json` has the figures of all cases.",
        "",
    )
    for title, words, tables, shown in GROUPS:
        cases = [case for case in tables if results.get(case)]
        if not cases:
            continue
        yield from (title, "-" * len(title), "", *words.replace(". ", ".\n").split("\n"), "")
        for case in shown:
            if case in cases:
                yield f".. image:: benchmarks/{case}.svg"
                row, _ = _first(results[case])
                yield f"   :alt: Bars of {case} {row}".rstrip() + "."
                yield ""
        for case in cases:
            yield _table(case, results[case])
    yield from _sequences()
    if losses:
        yield from ("Where it loses", "--------------", "")
        title = "The best peer with the same kind of workers is better by over 5 %"
        yield Table("losses", title, ("case", "enqueuer", "best peer"), losses)


def _sequences() -> Iterator[str | Table]:
    day, (header, *rows) = summary.sequences(_HERE / "README.md")
    alone = header.index("packing alone")
    rate = {row[0]: float(row[alone].partition(";")[0]) for row in rows}
    faster = [name for name in rate if rate[name] > rate["enqueuer"]]
    yield from ("Sequences", "---------", "")
    yield f"On {day}, two workers made rows of 2048 tokens."
    if faster:
        listed = " and ".join(f"`{name}`" for name in faster)
        yield f"Packing alone, without workers, is slower than with {listed}."
    yield ""
    title = "texts to packed rows, millions of useful tokens/s (more is better)"
    yield Table("sequences", title, header, rows)


def _of_runs(about: dict[str, Any]) -> str:
    return "that of one run" if about["repeats"] == 1 else f"the median of {about['repeats']}"


def pictures(results: report.Results) -> Iterator[tuple[str, str]]:
    """Yield the name and the content of each picture."""
    for _, _, _, shown in GROUPS:
        for case in shown:
            if results.get(case):
                yield f"{case}.svg", _picture(case, results[case])


def _table(case: str, rows: dict[str, Any]) -> Table:
    """Return a table with a line for each contestant, or each setting, so that it is narrow."""
    names = [
        name for name in CONTESTANTS if any("median" in c.get(name, {}) for c in rows.values())
    ]
    header = (f"`{case}`", *(row or CASES[case].unit for row in rows))
    lines = [(name, *(_number(cells.get(name, {})) for cells in rows.values())) for name in names]
    if len(names) < len(rows):
        header, *lines = zip(header, *lines, strict=True)
    return Table(case, f"{CASES[case].title}, {_unit(case)}", header, lines)


def _unit(case: str) -> str:
    better = "more" if CASES[case].more_is_better else "less"
    return f"{CASES[case].unit} ({better} is better)"


def _number(cell: dict[str, Any]) -> str:
    return report.number(cell["median"]) if "median" in cell else ""


def _first(rows: dict[str, Any]) -> tuple[str, list[tuple[str, float]]]:
    """Return the last row, which a picture shows, and its numbers, the largest first."""
    row, cells = list(rows.items())[-1]
    numbers = [
        (name, cells[name]["median"]) for name in CONTESTANTS if "median" in cells.get(name, {})
    ]
    return row, sorted(numbers, key=lambda pair: -pair[1])


def _title(case: str, row: str) -> str:
    return f"{CASES[case].title}{row and f', {row}'}, {_unit(case)}"


def _picture(case: str, rows: dict[str, Any]) -> str:
    """Return bars of the last row."""
    row, numbers = _first(rows)
    named = [(name, value, CONTESTANTS[name].needs == "enqueuer") for name, value in numbers]
    return bars(_title(case, row), named)


def bars(title: str, numbers: list[tuple[str, float, bool]]) -> str:
    """Return a picture of horizontal bars, on a logarithmic axis if they differ much.

    Args:
        title: Title of the picture.
        numbers: Name and value of each bar, and whether it is ours.
    """
    values = [value for _, value, _ in numbers]
    is_wide = max(values) > 30 * min(values) > 0
    floor = 10 ** math.floor(math.log10(min(values))) if is_wide else 0.0

    def width(value: float) -> float:
        share = (
            math.log(value / floor) / math.log(max(values) / floor)
            if is_wide
            else (value / max(values))
        )
        return max(2.0, share * _LONGEST)

    title += ", logarithmic" if is_wide else ""
    words = textwrap.wrap(title, 44)
    shapes = [text(6, _LINE * line, each, font_weight="bold") for line, each in enumerate(words, 1)]
    top = _LINE * len(words) + 12
    for place, (name, value, is_ours) in enumerate(numbers):
        y = top + _STEP * place
        long = width(value)
        shapes += [
            text(6, y + 10, name, font_weight="bold" if is_ours else "normal"),
            element(
                "rect", x=6, y=y + 14, width=long, height=_BAR, fill=_OURS if is_ours else _THEIRS
            ),
            text(12 + long, y + 25, report.number(value)),
        ]
    return _svg(title, top + _STEP * len(numbers) + 4, shapes)


def _svg(title: str, height: int, shapes: list[str]) -> str:
    """Return a picture of shapes on white."""
    paper = element("rect", width=_WIDTH, height=height, fill="#fff")
    picture = element(
        "svg",
        "\n".join(["", element("title", title), paper, *shapes, ""]),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {height}",
        width=_WIDTH,
        height=height,
        role="img",
        font_family="system-ui, sans-serif",
        font_size=13,
        fill="#222",
    )
    return f"{picture}\n"


def _results(folder: Path) -> Path:
    return folder / "benchmarks" / "results.json"


if __name__ == "__main__":
    _folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    write(_folder, json.loads(_results(_folder).read_text()))
