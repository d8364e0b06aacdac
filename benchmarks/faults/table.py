"""From verdicts to a table."""

from __future__ import annotations

import itertools
import textwrap
from typing import Any

from faults import FAULTS, LOADERS

OK, NOT_APPLICABLE = "ok", "n/a"
# Content of a whole row.
MISSING, UNUSABLE = "not installed", "does not run"

# Characters of a line of a cell, unless a word is longer.
_WIDTH = 10
_GAP = "  "
# Shortest time from the last item to the error that is shown.
_LONG_S = 1.0

# {loader: {fault: {"verdict": ..., "seconds": ..., ...}}}
Cells = dict[str, dict[str, dict[str, Any]]]
# The lines of each cell.
_Row = list[list[str]]


def table(cells: Cells, faults: list[str]) -> str:
    """Return all verdicts as text; what took a second or longer, with its time."""
    head = [[], *(FAULTS[name].heading.split() for name in faults), ["passed"]]
    rows = [_row(LOADERS[name].heading, row, faults) for name, row in cells.items()]
    widths = [
        max(len(line) for cell in column for line in ["", *cell])
        for column in zip(*(row for row in [head, *rows] if len(row) == len(head)), strict=True)
    ]
    widths[0] = max(len(row[0][0]) for row in rows)
    above = _lines(head, widths)
    lines = [*above, "-" * max(map(len, above))]
    return "\n".join(itertools.chain(lines, *(_lines(row, widths) for row in rows)))


def _row(heading: str, row: dict[str, dict[str, Any]], faults: list[str]) -> _Row:
    verdicts = [row[fault]["verdict"] for fault in faults]
    for reason in (MISSING, UNUSABLE):
        if reason in verdicts:
            return [[heading], [reason]]
    passed = f"{verdicts.count(OK)} of {len(verdicts) - verdicts.count(NOT_APPLICABLE)}"
    return [[heading], *(_wrapped(row[fault]) for fault in faults), [passed]]


def _wrapped(cell: dict[str, Any]) -> list[str]:
    seconds = cell.get("seconds", 0.0)
    late = f" ({seconds:.0f} s)" if seconds >= _LONG_S else ""
    return textwrap.wrap(cell["verdict"] + late, _WIDTH, break_long_words=False)


def _lines(row: _Row, widths: list[int]) -> list[str]:
    """Return the lines of a row, some of whose cells have several."""
    lines = []
    for n in range(max(map(len, row))):
        parts = (
            (cell[n] if n < len(cell) else "").ljust(width)
            for cell, width in zip(row, widths, strict=False)
        )
        lines.append(_GAP.join(parts).rstrip())
    return lines
