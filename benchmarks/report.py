"""From results to a table and a plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cases import CASES
from contestants import CONTESTANTS

OURS, OURS_IN_THREADS = "enqueuer-process", "enqueuer-thread"

_NONE = "-"
_GAP = "  "
_WIDE = 30  # times; bars that differ by more are drawn on a logarithmic axis

# {case: {row: {contestant: {"status": ..., "median": ..., "repeats": [...]}}}}
Results = dict[str, dict[str, dict[str, dict[str, Any]]]]


def summary(tries: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the repeats of one number together."""
    values = [one["value"] for one in tries if one.get("value") is not None]
    failed = [one for one in tries if "status" in one]
    cell: dict[str, Any] = {"status": "ok" if values else "none", "repeats": tries}
    if values:
        cell |= {"median": statistics.median(values), "min": min(values), "max": max(values)}
    elif failed:
        cell["status"] = failed[0]["status"]
    return cell


def table(results: Results) -> str:
    """Return all numbers, and the ratios below them, as text."""
    names = _names(results)
    head = _head(names)
    rows = list(_rows(results, names, _cell))
    ratios = list(_rows(results, names, _ratio))
    full = [line for line in head + rows + ratios if len(line) > 1]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    lines = [_line(line, widths) for line in head]
    rule = "-" * len(lines[-1])
    lines += [rule, *(_line(line, widths) for line in rows)]
    if ratios:
        lines += [
            "",
            f"How many times as good {OURS} is as each, or {OURS_IN_THREADS} as those in threads:",
            "how many times as much in the same time, or how many times less time or memory.",
            rule,
            *(_line(line, widths) for line in ratios),
        ]
    return "\n".join(lines)


def _names(results: Results) -> list[str]:
    used = {name for rows in results.values() for row in rows.values() for name, _ in row.items()}
    return [name for name in CONTESTANTS if name in used]


def _head(names: list[str]) -> list[list[str]]:
    words = [CONTESTANTS[name].heading.split() for name in names]
    height = max((len(one) for one in words), default=1)
    padded = [[""] * (height - len(one)) + one for one in words]
    return [["case" if n == height - 1 else "", *(one[n] for one in padded)] for n in range(height)]


def _rows(
    results: Results, names: list[str], show: Callable[[str, dict[str, Any], str], str]
) -> Iterable[list[str]]:
    """Yield a line of cells for each row; before several rows of a case, its title alone."""
    for case, rows in results.items():
        title = f"{case}: {CASES[case].title}, {CASES[case].unit}"
        shown = {row: [show(case, cells, name) for name in names] for row, cells in rows.items()}
        shown = {row: cells for row, cells in shown.items() if set(cells) != {_NONE}}
        if shown and list(rows) != [""]:
            yield [title]
        for row, cells in shown.items():
            yield [f"  {row}" if row else title, *cells]


def _cell(case: str, cells: dict[str, Any], name: str) -> str:
    cell = cells.get(name, {"status": "none"})
    if cell["status"] == "none":
        return _NONE
    if cell["status"] != "ok":
        return cell["status"]
    failed = any("status" in one for one in cell["repeats"])
    return number(cell["median"]) + ("*" if failed else "")


def _ratio(case: str, cells: dict[str, Any], name: str) -> str:
    threads = CASES[case].threads or CONTESTANTS[name].kind == "thread"
    we = OURS_IN_THREADS if threads else OURS
    ours, theirs = (cells.get(one, {}).get("median") for one in (we, name))
    if not CASES[case].ratios or not ours or not theirs or name in (OURS, OURS_IN_THREADS):
        return _NONE
    return number(ours / theirs if CASES[case].more_is_better else theirs / ours)


def number(value: float) -> str:
    """Return three digits that count."""
    if abs(value) >= 999_950:
        return f"{number(value / 1e6)}M"
    if abs(value) >= 9999.5:
        return f"{number(value / 1e3)}k"
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    if abs(value) >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.0995 else f"{value:.2g}"


def _line(cells: list[str], widths: list[int]) -> str:
    label, *others = cells
    right = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=False)]
    return _GAP.join([label.ljust(widths[0]), *right]).rstrip()


def plot(results: Results, path: Path) -> None:
    """Draw each case: bars if it has one row, else lines over its rows.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")  # no window
    from matplotlib import pyplot

    names = _names(results)
    palette = pyplot.get_cmap("turbo", len(names))
    colours = {name: palette(at) for at, name in enumerate(names)}
    across = 3
    down = max(1, -(-len(results) // across))
    figure, axes = pyplot.subplots(down, across, figsize=(18, 4.5 * down), squeeze=False)
    for axis in axes.flat[len(results) :]:
        axis.axis("off")
    for axis, (case, rows) in zip(axes.flat, results.items(), strict=False):
        (_bars if len(rows) == 1 else _lines)(axis, rows, names, colours)
        axis.set_title(f"{case}: {CASES[case].title}, {CASES[case].unit}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def _bars(axis: Any, rows: dict[str, Any], names: list[str], colours: dict[str, Any]) -> None:
    (cells,) = rows.values()
    shown = [name for name in reversed(names) if "median" in cells.get(name, {})]
    for n, name in enumerate(shown):
        cell = cells[name]
        ends = [[cell["median"] - cell["min"]], [cell["max"] - cell["median"]]]
        axis.barh(n, cell["median"], color=colours[name], xerr=ends, capsize=3)
        axis.text(cell["max"], n, f" {number(cell['median'])}", va="center", fontsize=8)
    axis.set_yticks(range(len(shown)), shown, fontsize=8)
    axis.margins(x=0.15)
    medians = [cells[name]["median"] for name in shown]
    if medians and max(medians) > _WIDE * min(medians) > 0:
        axis.set_xscale("log")


def _lines(axis: Any, rows: dict[str, Any], names: list[str], colours: dict[str, Any]) -> None:
    for name in names:
        points = [(row, cells.get(name, {}).get("median")) for row, cells in rows.items()]
        points = [(row, value) for row, value in points if value is not None]
        if points:
            axis.plot(*zip(*points, strict=True), "o-", color=colours[name], label=name)
    axis.set_yscale("symlog", linthresh=0.1)
    axis.tick_params(axis="x", rotation=20, labelsize=8)
    axis.legend(fontsize=6)
