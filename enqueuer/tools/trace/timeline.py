"""A timeline of the loop and of each worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from enqueuer.common.text import duration, percent
from enqueuer.tools.svg import element, text
from enqueuer.tools.trace.pictures import (
    COLUMNS,
    LEFT,
    MOST_MARKS,
    WIDTH,
    WORKER_LABELS,
    figure,
    legend,
    spread,
    time_axis,
)
from enqueuer.tools.trace.recording import Mark, Recording, Row, Span, within_sends

_ROW = 26
_BAR = 20
_TOP = 20
# Most workers that get a row.
_MOST_ROWS = 64
_LOOP_LABELS = {"work": "working", "wait": "waiting for a batch", "read": "reading elements"}


def timeline(recording: Recording) -> Iterator[str]:
    """Draw a row for the loop and one for each worker."""
    rows = recording.rows[:_MOST_ROWS]
    yield "<h2>Timeline</h2>"
    loop = {"work": "the loop works", "idle": "it waits for a batch"}
    if any(span.kind == "read" for span in recording.loop):
        loop["read"] = "it reads elements and assigns tasks"
    yield legend(loop)
    yield legend({kind: f"a worker: {label}" for kind, label in WORKER_LABELS.items()})
    bottom = _TOP + _ROW * (len(rows) + 1)
    yield from figure(bottom + 24, _rows(recording, rows, bottom))
    if len(recording.rows) > len(rows):
        yield f'<p class="faint">The first {len(rows)} of {len(recording.rows)} workers.</p>'


def _rows(recording: Recording, rows: list[Row], bottom: int) -> Iterator[str]:
    end = max(recording.end, 1)
    yield from time_axis(end, bottom)
    yield from _loop(recording, end)
    for index, row in enumerate(rows):
        yield from _worker(row, end, _TOP + _ROW * (index + 1))
    for mark in recording.marks[:MOST_MARKS]:
        yield from _mark(mark, end, bottom)


def _mark(mark: Mark, end: int, bottom: int) -> Iterator[str]:
    x = LEFT + WIDTH * mark.at / end
    title = element("title", escape(f"{duration(mark.at / 1e6)}: {mark.text}"))
    yield element("path", title, class_="mark", d=f"M{x:.1f} 18V{bottom}")
    if mark.kind != "epoch":
        yield element("path", title, class_="fault", d=f"M{x - 5:.1f} 6h10l-5 10z")


def _loop(recording: Recording, end: int) -> Iterator[str]:
    shares = _shares(recording.loop, list(_LOOP_LABELS), end)
    # Its share of waiting is that of its time after the first batch, which another place shows.
    times = [
        f"{label} {duration(sum(shares[kind]) * end / COLUMNS / 1e6)}"
        for kind, label in _LOOP_LABELS.items()
    ]
    shares = {"idle" if kind == "wait" else kind: share for kind, share in shares.items()}
    yield from _painted("the loop", ", ".join(times), shares, _TOP)


def _worker(row: Row, end: int, top: int) -> Iterator[str]:
    shares = _shares(row.spans, list(WORKER_LABELS), end)
    # A wait in a send counts only once.
    for span in within_sends(row.spans):
        spread(span, end, shares["send"], -1)
    whole = sum(map(sum, shares.values())) or 1.0
    parts = [
        f"{label} {percent(sum(shares[kind]) / whole)}" for kind, label in WORKER_LABELS.items()
    ]
    yield from _painted(row.label, ", ".join(parts), shares, top)


def _shares(spans: Iterable[Span], kinds: Sequence[str], end: int) -> dict[str, list[float]]:
    """Return for each kind its share of the time of each column."""
    shares = {kind: [0.0] * COLUMNS for kind in kinds}
    for span in spans:
        if span.kind in shares:
            spread(span, end, shares[span.kind], 1)
    return shares


def _painted(name: str, times: str, shares: dict[str, list[float]], top: int) -> Iterator[str]:
    """Yield one row: each column shows the share of each kind in its time, one above another."""
    yield f"<g><title>{name}: {times}</title>"
    yield text(LEFT - 8, top + 16, name, "end")
    yield element("rect", class_="frame", x=LEFT, y=top, width=WIDTH, height=_BAR)
    below = [0] * COLUMNS
    for kind, columns in shares.items():
        heights = [round(min(1.0, max(0.0, share)) * _BAR) for share in columns]
        path = "".join(_blocks(heights, below, top))
        yield element("path", class_=kind, d=path)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    yield "</g>"


def _blocks(heights: Sequence[int], below: Sequence[int], top: int) -> Iterator[str]:
    """Yield rectangles, one for all neighbours that are alike."""
    column, step = 0, WIDTH / COLUMNS
    while column < COLUMNS:
        until = column + 1
        alike = heights[column], below[column]
        while until < COLUMNS and (heights[until], below[until]) == alike:
            until += 1
        height, low = min(alike[0], _BAR - alike[1]), alike[1]
        if height > 0:
            x, width = LEFT + column * step, (until - column) * step
            yield f"M{x:.4g} {top + _BAR - low}h{width:.4g}v-{height}h-{width:.4g}z"
        column = until
