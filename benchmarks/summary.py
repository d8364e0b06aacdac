"""What the results of the benchmark page show, in sentences: the main result and the losses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import report
from cases import CASES
from contestants import CONTESTANTS

# A difference of less is no loss: numbers differ by more from run to run.
_TOLERANCE = 0.05
_LIMITS = ("memcpy", "bare-deque")
# The cases of the second sentence, with the words for each.
_CASES = (
    ("large", "for batches of 9.6 MB"),
    ("tiny", "for small dicts"),
    ("tasks-batch", "for stacked rows"),
)


@dataclass(frozen=True)
class Comparison:
    """One number of ours beside the best of the peers that have the same kind of workers."""

    case: str
    row: str
    name: str
    ours: float
    peer: str
    theirs: float

    @property
    def kind(self) -> str:
        return CONTESTANTS[self.name].kind

    @property
    def is_loss(self) -> bool:
        margin = _TOLERANCE * abs(self.theirs)
        if CASES[self.case].more_is_better:
            return self.ours < self.theirs - margin
        return self.ours > self.theirs + margin


def comparisons(results: report.Results) -> Iterator[Comparison]:
    """Yield a comparison for each number of ours that has a peer."""
    for case, rows in results.items():
        pick = max if CASES[case].more_is_better else min
        for row, cells in rows.items():
            numbers = {name: cell["median"] for name, cell in cells.items() if "median" in cell}
            for name in filter(_is_ours, numbers):
                peers = [peer for peer in numbers if _is_peer(peer, name, case)]
                if peers:
                    best = pick(peers, key=numbers.__getitem__)
                    yield Comparison(case, row, name, numbers[name], best, numbers[best])


def _is_ours(name: str) -> bool:
    return name.startswith("enqueuer")


def _is_peer(peer: str, name: str, case: str) -> bool:
    """Return whether a contestant is a loader with the same kind of workers as one of ours."""
    kind = CONTESTANTS[peer].kind
    if _is_ours(peer) or kind == "loop" or peer in _LIMITS:
        return False
    return CASES[case].threads or kind == CONTESTANTS[name].kind


def main_result(results: report.Results) -> Iterator[str]:
    """Yield the two sentences with which the page begins, if there are numbers for them."""
    found = list(comparisons(results))
    counts = []
    for kind, words in (("process", "with processes"), ("thread", "with threads")):
        kept = [one for one in found if one.kind == kind]
        if kept:
            first = sum(not one.is_loss for one in kept)
            counts.append(f"in {first} of {len(kept)} measurements {words}")
    if counts:
        yield (
            "`enqueuer` is the best loader, or within 5 % of the best that has the same kind of "
            f"workers, {' and '.join(counts)}."
        )
    ratios = []
    for case, words in _CASES:
        for one in found:
            if (one.case, one.kind) == (case, "process"):
                ratios.append(f"{one.ours / one.theirs:.1f} times {words} ({one.peer})")
    if ratios:
        listed = ", ".join(ratios)
        yield f"From a worker process to the loop, its rate over that of the best peer is {listed}."


def losses(results: report.Results) -> Iterator[tuple[str, str, str]]:
    """Yield the cells of a table: each number of ours that a peer's is better than."""
    for one in comparisons(results):
        if one.is_loss:
            row = f", {one.row}" if one.row else ""
            case = f"`{one.case}`{row}, {one.kind}, {CASES[one.case].unit}"
            yield case, report.number(one.ours), f"{report.number(one.theirs)}, {one.peer}"


@dataclass(frozen=True)
class Failures:
    """The failure table, as the README of the benchmarks has it: loaders and what they passed."""

    about: str
    passed: list[tuple[str, str]]

    @classmethod
    def read(cls, readme: Path) -> Failures:
        text = readme.read_text(encoding="utf-8").partition("\n## The failure table\n")[2]
        about, _, rest = text.partition("\n```text\n")
        about = about[about.index("This was measured") :].partition("\n`hang` means")[0].strip()
        rows = rest.partition("\n```")[0]
        return cls(about, re.findall(r"^(\S.*?)  +.*?(\d of \d)$", rows, re.MULTILINE))


def sequences(readme: Path) -> tuple[str, list[list[str]]]:
    """Return the day and the table of the sequence stages, which the README has, too."""
    text = readme.read_text(encoding="utf-8").partition("\n## Sequences\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*)\|$", text, re.MULTILINE)
    day = re.findall(r"\d{4}-\d\d-\d\d", text)[0]
    return day, [[cell.strip() for cell in row.replace("`", "").split("|")] for row in rows]
