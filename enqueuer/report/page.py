"""A recording -> a page that stands alone: pictures as SVG, no script, nothing from a network.

What is drawn is summed up in columns, so that a page is as small for a million events as for a
thousand; whoever wants to see single ones opens the trace itself, in Perfetto.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from enqueuer.formats import duration, percent, pluralize, printable, rate, size
from enqueuer.report.reading import (
    Numbers,
    Recording,
    Row,
    Span,
    count,
    within_sends,
)

_COLUMNS = 720  # of a picture's width
_LEFT, _WIDTH = 90, 810  # of the labels, of the picture, in its units
_ROW = 26
_MOST_ROWS = 64  # of workers that are drawn
_MOST_MARKS = 200  # that are listed

_WORKER_KINDS = {"make": "making items", "send": "sending", "wait": "waiting"}
_LOOP_KINDS = {"work": "working", "wait": "waiting for a batch", "read": "reading elements"}

_STYLE = """
:root { --back: #ffffff; --text: #1c2024; --faint: #6b7280; --line: #d9dde3; --card: #f5f6f8;
  --make: #3b78c3; --send: #e0a100; --wait: #c4cad3; --work: #3a9a5f; --idle: #d1495b;
  --read: #8a63b8; }
@media (prefers-color-scheme: dark) {
  :root { --back: #15181c; --text: #e6e8eb; --faint: #9aa2ad; --line: #343a42; --card: #1f242a;
    --make: #5b95dd; --send: #e8b53a; --wait: #4a525d; --work: #4fb477; --idle: #e46475;
    --read: #a583d0; } }
body { background: var(--back); color: var(--text); margin: 2rem auto; max-width: 60rem;
  padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.faint, td.faint, .legend, figcaption { color: var(--faint); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .7rem;
  margin: 1rem 0; }
.tiles div, .bottleneck, .warning { background: var(--card); border-radius: 8px;
  padding: .6rem .9rem; }
.tiles b { display: block; font-size: 1.3rem; } .tiles span { color: var(--faint); }
.bottleneck { border-left: 4px solid var(--make); margin: 1rem 0; }
.warning { border-left: 4px solid var(--idle); margin: 1rem 0; }
figure { margin: 0; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--faint); font: 12px system-ui, sans-serif; }
.make { fill: var(--make); background: var(--make); }
.send { fill: var(--send); background: var(--send); }
.wait { fill: var(--wait); background: var(--wait); }
.work { fill: var(--work); background: var(--work); }
.idle { fill: var(--idle); background: var(--idle); }
.read { fill: var(--read); background: var(--read); }
.grid { stroke: var(--line); } .frame { fill: none; stroke: var(--line); }
.edge { stroke: var(--text); stroke-dasharray: 4 3; }
.mark { stroke: var(--faint); stroke-dasharray: 2 3; } .fault { fill: var(--idle); }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
  margin: 0 .3em 0 1em; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; }
td:first-child, th:first-child, td.text { text-align: left; }
td { white-space: nowrap; } td.text { white-space: normal; } th { font-weight: 500; }
.bar { display: flex; height: .8rem; min-width: 9rem; border-radius: 3px; overflow: hidden; }
.bar i { display: block; }
"""


def page(recording: Recording) -> str:
    """Return the page for a recording, as HTML."""
    numbers = count(recording)
    name = printable(Path(recording.path).name)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(name)} - enqueuer</title><style>{_STYLE}</style></head><body>",
        *_head(recording, name),
        *_bottleneck(recording),
        *_warnings(recording),
        *_tiles(numbers),
        *_timeline(recording),
        *_fill(recording),
        *_loop_meter(recording, numbers),
        *_workers(recording),
        *_marks(recording),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _head(recording: Recording, name: str) -> Iterator[str]:
    about = recording.about
    told = [
        f"{pluralize(about.get('workers', 0), 'worker')} ({about.get('backend')})",
        f"max_queue_size={about.get('max_queue_size')}",
        f"{about.get('cpus')} CPUs",
    ]
    if len(recording.starts) > 1:
        told.append(f"started {len(recording.starts)} times")
    yield f"<h1>{escape(name)}</h1>"
    yield f'<p class="faint">{escape(", ".join(told))}. The file itself opens in Perfetto.</p>'


def _bottleneck(recording: Recording) -> Iterator[str]:
    if recording.bottleneck:
        yield f'<div class="bottleneck">{escape(recording.bottleneck)}</div>'


def _warnings(recording: Recording) -> Iterator[str]:
    if any(mark.kind == "full" for mark in recording.marks):
        yield _warning("The file was as large as it may be: this is the begin of the run only.")
    if not recording.is_whole:
        yield _warning("The trace has no end: the run goes on, or was killed.")
    if recording.torn:
        yield _warning(f"Events that could not be read and were left out: {recording.torn:,}.")


def _warning(text: str) -> str:
    return f'<div class="warning">{text}</div>'


def _tiles(numbers: Numbers) -> Iterator[str]:
    first = "none" if numbers.first_batch is None else duration(numbers.first_batch)
    tiles = {
        "items": f"{numbers.items:,}",
        "items a second, after the first": rate(numbers.items_per_second),
        "in all": duration(numbers.seconds),
        "to the first batch": first,
        "of its time the loop waited, after that": percent(numbers.waited_share),
        "of their time the workers made items": percent(numbers.making),
        "errors raised": str(numbers.errors),
        "errors skipped": str(numbers.skipped),
        "restarts": str(numbers.restarts),
    }
    yield '<div class="tiles">'
    yield from (f"<div><b>{value}</b><span>{what}</span></div>" for what, value in tiles.items())
    yield "</div>"


def _centred(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{text}</text>'


# --- the timeline -------------------------------------------------------------------------------


def _timeline(recording: Recording) -> Iterator[str]:
    rows = recording.rows[:_MOST_ROWS]
    bottom = 20 + _ROW * (len(rows) + 1)
    end = max(recording.end, 1)
    yield "<h2>Timeline</h2>"
    loop = {"work": "the loop works", "idle": "it waits for a batch"}
    if any(span.kind == "read" for span in recording.loop):
        loop["read"] = "it reads elements and hands out tasks"
    yield _legend(loop)
    yield _legend({kind: f"a worker: {what}" for kind, what in _WORKER_KINDS.items()})
    yield f'<figure><svg viewBox="0 0 {_LEFT + _WIDTH} {bottom + 24}" role="img">'
    yield from _axis(end, bottom)
    yield from _painted("the loop", recording.loop, [], _LOOP_KINDS, end, 20)
    for index, row in enumerate(rows):
        name, inner = f"worker {row.number}", within_sends(row.spans)
        yield from _painted(name, row.spans, inner, _WORKER_KINDS, end, 20 + _ROW * (index + 1))
    for mark in recording.marks[:_MOST_MARKS]:
        x = _LEFT + _WIDTH * mark.at / end
        told = f"<title>{escape(f'{duration(mark.at / 1e6)}: {mark.text}')}</title>"
        yield f'<path class="mark" d="M{x:.1f} 18V{bottom}">{told}</path>'
        if mark.kind != "epoch":
            yield f'<path class="fault" d="M{x - 5:.1f} 6h10l-5 10z">{told}</path>'
    yield "</svg></figure>"
    if len(recording.rows) > len(rows):
        yield f'<p class="faint">The first {len(rows)} of {len(recording.rows)} workers.</p>'


def _legend(kinds: dict[str, str]) -> str:
    keys = (f'<i class="{kind}"></i>{what}' for kind, what in kinds.items())
    return f'<div class="legend">{"".join(keys)}</div>'


def _axis(end: int, bottom: int) -> Iterator[str]:
    for at in ticks(end):
        x = _LEFT + _WIDTH * at / end
        yield f'<path class="grid" d="M{x:.1f} 20V{bottom}"/>'
        yield _centred(x, bottom + 16, duration(at / 1e6))


def _painted(
    name: str,
    spans: Iterable[Span],
    inner: Iterable[Span],
    kinds: dict[str, str],
    end: int,
    top: int,
) -> Iterator[str]:
    """Yield one row: each column shows what share of its time went into what."""
    shares = {kind: [0.0] * _COLUMNS for kind in kinds}
    for span in spans:
        if span.kind in shares:
            _spread(span, end, shares[span.kind], 1)
    for span in inner:  # what lies in a send counts only once
        _spread(span, end, shares["send"], -1)
    whole = sum(map(sum, shares.values())) or 1.0
    sums = {what: sum(shares[kind]) for kind, what in kinds.items()}
    told = ", ".join(
        # Of the loop no share: that is told once, and of its time after the first batch.
        f"{what} {duration(part * end / _COLUMNS / 1e6)}"
        if kinds is _LOOP_KINDS
        else f"{what} {percent(part / whole)}"
        for what, part in sums.items()
    )
    yield f"<g><title>{name}: {told}</title>"
    yield f'<text x="{_LEFT - 8}" y="{top + 16}" text-anchor="end">{name}</text>'
    yield f'<rect class="frame" x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_ROW - 6}"/>'
    below = [0] * _COLUMNS
    for kind in kinds:
        heights = [round(min(1.0, max(0.0, share)) * (_ROW - 6)) for share in shares[kind]]
        path = "".join(_blocks(heights, below, top))
        colour = "idle" if kinds is _LOOP_KINDS and kind == "wait" else kind
        yield f'<path class="{colour}" d="{path}"/>'
        below = [low + height for low, height in zip(below, heights, strict=True)]
    yield "</g>"


def _spread(span: Span, end: int, shares: list[float], factor: int) -> None:
    """Add a span to the columns that it touches, as shares of theirs."""
    width = end / _COLUMNS
    first = min(_COLUMNS - 1, int(span.begin / width))
    last = min(_COLUMNS - 1, int(span.end / width))
    for column in range(first, last + 1):
        begin, until = max(span.begin, column * width), min(span.end, (column + 1) * width)
        shares[column] += factor * max(0.0, until - begin) / width


def _blocks(heights: Sequence[int], below: Sequence[int], top: int) -> Iterator[str]:
    """Yield rectangles, one for all neighbours that are alike."""
    column, step = 0, _WIDTH / _COLUMNS
    while column < _COLUMNS:
        until = column + 1
        alike = heights[column], below[column]
        while until < _COLUMNS and (heights[until], below[until]) == alike:
            until += 1
        height, low = min(alike[0], _ROW - 6 - alike[1]), alike[1]
        if height > 0:
            x, width = _LEFT + column * step, (until - column) * step
            y = top + _ROW - 6 - low
            yield f"M{x:.4g} {y}h{width:.4g}v-{height}h-{width:.4g}z"
        column = until


# --- the other pictures -------------------------------------------------------------------------

_HEIGHT = 120


def _fill(recording: Recording) -> Iterator[str]:
    """Draw how many items waited: their mean in each column."""
    if not recording.fill:
        return
    end, top = max(recording.end, 1), 10
    most = max(max(items for _, items in recording.fill), 1)
    means = [0.0] * _COLUMNS
    levels = itertools.chain(recording.fill, [(recording.end, 0)])
    for (at, items), (until, _) in itertools.pairwise(levels):
        _spread(Span("", at, until), end, means, items)
    yield "<h2>What waited in the queue</h2>"
    yield f'<figure><svg viewBox="0 0 {_LEFT + _WIDTH} {_HEIGHT + 34}" role="img">'
    yield from _axis(end, top + _HEIGHT)
    yield from _scale(most, top)
    step = _WIDTH / _COLUMNS
    points = (
        f"L{_LEFT + column * step:.4g} {top + _HEIGHT * (1 - mean / most):.4g}h{step:.4g}"
        for column, mean in enumerate(means)
    )
    path = f"M{_LEFT} {top + _HEIGHT}{''.join(points)}V{top + _HEIGHT}z"
    yield f'<path class="make" d="{path}"/>'
    yield "</svg><figcaption>Items that were ready when the loop asked for one or had taken one."
    yield "</figcaption></figure>"


def _scale(most: float, top: int) -> Iterator[str]:
    for value in (0, most):
        y = top + _HEIGHT * (1 - value / most)
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}h{_WIDTH}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:,.0f}</text>'


def _loop_meter(recording: Recording, numbers: Numbers) -> Iterator[str]:
    """Draw how many items were waited for how long, on a logarithmic scale."""
    if not recording.waits:
        return
    edges = _edges(max(recording.waits))
    counts = [0] * len(edges)
    for wait in recording.waits:
        counts[bisect.bisect_right(edges, wait) - 1] += 1
    most, top, step = max(counts), 24, _WIDTH / len(edges)
    yield "<h2>How long the loop waited for a batch</h2>"
    yield f'<figure><svg viewBox="0 0 {_LEFT + _WIDTH} {_HEIGHT + 46}" role="img">'
    yield from _scale(most, top)
    for index, (edge, number) in enumerate(zip(edges, counts, strict=True)):
        height, x = _HEIGHT * number / most, _LEFT + index * step
        upper = duration(edges[index + 1] / 1e6) if index + 1 < len(edges) else "longer"
        told = f"<title>{duration(edge / 1e6)} to {upper}: {number:,}</title>"
        yield (
            f'<rect class="idle" x="{x + 1:.1f}" y="{top + _HEIGHT - height:.1f}" '
            f'width="{step - 2:.1f}" height="{height:.1f}">{told}</rect>'
        )
        if index == 0:
            yield _centred(x + step / 2, top + _HEIGHT + 16, "at once")
        elif index % 3 == 1 and index > 1:  # there is no room for the first one
            yield _centred(x, top + _HEIGHT + 16, duration(edge / 1e6))
    places: dict[int, list[int]] = {}
    for rank, value in numbers.percentiles.items():
        places.setdefault(bisect.bisect_right(edges, value * 1e6) - 1, []).append(rank)
    for index, ranks in places.items():
        x = _LEFT + (index + 0.5) * step
        label = " ".join(f"p{rank}" for rank in ranks)
        yield f'<path class="edge" d="M{x:.1f} {top - 4}V{top + _HEIGHT}"/>'
        yield _centred(x, top - 8, label)
    told = ", ".join(f"p{rank} {duration(value)}" for rank, value in numbers.percentiles.items())
    told += f"; in all {duration(numbers.waited)} after the first batch"
    yield f"</svg><figcaption>{told}.</figcaption></figure>"


def _edges(longest: int) -> list[int]:
    """Return the lower bounds of classes of waits, in microseconds: three to each power of ten."""
    edges, power = [0], 10
    while edges[-1] <= longest:
        edges += [power, 2 * power, 5 * power]
        power *= 10
    return edges


def _workers(recording: Recording) -> Iterator[str]:
    if not recording.rows:
        return
    yield "<h2>Workers</h2>"
    yield _legend(_WORKER_KINDS)
    yield "<table><tr><th></th><th>items</th><th>to make one</th><th>to send one</th>"
    yield "<th>sent</th><th>making</th><th>sending</th><th>waiting</th><th></th></tr>"
    yield from (_worker(row) for row in recording.rows)
    yield "</table>"


def _worker(row: Row) -> str:
    times = row.times()
    whole = sum(times.values()) or 1
    shares = [time / whole for time in times.values()]
    each = [
        duration(times[kind] / row.items / 1e6) if row.items else "" for kind in ("make", "send")
    ]
    bar = "".join(
        f'<i class="{kind}" style="width:{100 * share:.1f}%"></i>'
        for kind, share in zip(times, shares, strict=True)
    )
    cells = [f"{row.items:,}", *each, size(row.bytes) if row.bytes else "", *map(percent, shares)]
    told = "".join(f"<td>{cell}</td>" for cell in cells)
    name = escape(row.name or f"worker {row.number}")
    return f'<tr><td>{name}</td>{told}<td><div class="bar">{bar}</div></td></tr>'


def _marks(recording: Recording) -> Iterator[str]:
    marks = [mark for mark in recording.marks if mark.kind != "epoch"]
    count = recording.counts.total() - recording.counts["epoch"]
    if not marks:
        return
    yield "<h2>What happened</h2><table>"
    for mark in marks[:_MOST_MARKS]:
        yield f'<tr><td>{duration(mark.at / 1e6)}</td><td class="text">{mark.kind}</td>'
        yield f'<td class="text">{escape(mark.text)}</td></tr>'
    yield "</table>"
    if count > _MOST_MARKS:
        yield f'<p class="faint">The first {_MOST_MARKS} of {count:,}.</p>'


# --- an axis ---


def ticks(end: int) -> list[int]:
    """Return round times for an axis, at most nine, in microseconds.

    Example:
        >>> ticks(1000), ticks(7_300_000)[:3]
        ([0, 200, 400, 600, 800, 1000], [0, 1000000, 2000000])
    """
    step = 10 ** max(0, math.floor(math.log10(max(end, 1))) - 1)
    while end / step > 8:
        step = step * 2 if end / step <= 16 else step * 5 if end / step <= 40 else step * 10
    return list(range(0, end + 1, step))
