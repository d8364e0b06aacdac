"""Pictures of the queue depth, and of how long the loop waited.

Time is divided into columns and summed up in each, so that the picture of a million events is as
small as that of a thousand. The trace itself shows single events, in Perfetto.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator

from enqueuer.common.text import duration
from enqueuer.tools.svg import element, text
from enqueuer.tools.trace.numbers import Numbers
from enqueuer.tools.trace.recording import Recording, Span

COLUMNS = 720
# Pixels: the width of the labels, and that of the picture.
LEFT, WIDTH = 90, 810
# Most marks that are drawn or listed.
MOST_MARKS = 200
WORKER_LABELS = {"make": "making items", "send": "sending", "wait": "waiting"}

_HEIGHT = 120


def figure(height: int, content: Iterator[str], caption: str = "") -> Iterator[str]:
    """Yield a picture of the full width."""
    yield f'<figure><svg viewBox="0 0 {LEFT + WIDTH} {height}" role="img">'
    yield from content
    yield f"</svg>{element('figcaption', caption) if caption else ''}</figure>"


def legend(labels: dict[str, str]) -> str:
    """Return a legend: a label for each class of the style sheet."""
    keys = (f'<i class="{kind}"></i>{label}' for kind, label in labels.items())
    return element("div", "".join(keys), class_="legend")


def time_axis(end: int, bottom: int) -> Iterator[str]:
    """Yield a line and a label for each of some round times."""
    for at in ticks(end):
        x = LEFT + WIDTH * at / end
        yield element("path", class_="grid", d=f"M{x:.1f} 20V{bottom}")
        yield text(x, bottom + 16, duration(at / 1e6), "middle")


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


def spread(span: Span, end: int, columns: list[float], factor: int) -> None:
    """Add a span to the columns that it touches, as shares of their time."""
    width = end / COLUMNS
    first = min(COLUMNS - 1, int(span.begin / width))
    last = min(COLUMNS - 1, int(span.end / width))
    for column in range(first, last + 1):
        begin, until = max(span.begin, column * width), min(span.end, (column + 1) * width)
        columns[column] += factor * max(0.0, until - begin) / width


def depths(recording: Recording) -> Iterator[str]:
    """Draw how many items waited: their mean in each column."""
    if not recording.queue_depth:
        return
    caption = "Items that were ready when the loop asked for one or had taken one."
    yield "<h2>Queue depth</h2>"
    yield from figure(_HEIGHT + 34, _depth_steps(recording), caption)


def _depth_steps(recording: Recording) -> Iterator[str]:
    end, top = max(recording.end, 1), 10
    most = max(max(items for _, items in recording.queue_depth), 1)
    means = [0.0] * COLUMNS
    levels = itertools.chain(recording.queue_depth, [(recording.end, 0)])
    for (at, items), (until, _) in itertools.pairwise(levels):
        spread(Span("", at, until), end, means, items)
    yield from time_axis(end, top + _HEIGHT)
    yield from _scale(most, top)
    step = WIDTH / COLUMNS
    points = (
        f"L{LEFT + column * step:.4g} {top + _HEIGHT * (1 - mean / most):.4g}h{step:.4g}"
        for column, mean in enumerate(means)
    )
    path = f"M{LEFT} {top + _HEIGHT}{''.join(points)}V{top + _HEIGHT}z"
    yield element("path", class_="make", d=path)


def _scale(most: float, top: int) -> Iterator[str]:
    for value in (0, most):
        y = top + _HEIGHT * (1 - value / most)
        yield element("path", class_="grid", d=f"M{LEFT} {y:.1f}h{WIDTH}")
        yield text(LEFT - 8, y + 4, f"{value:,.0f}", "end")


def waits(recording: Recording, numbers: Numbers) -> Iterator[str]:
    """Draw for how many items the loop waited how long, on a logarithmic scale."""
    if not recording.waits:
        return
    percentiles = ", ".join(f"p{rank} {duration(at)}" for rank, at in numbers.percentiles.items())
    caption = f"{percentiles}; in all {duration(numbers.waited)} after the first batch."
    yield "<h2>How long the loop waited for a batch</h2>"
    yield from figure(_HEIGHT + 46, _wait_bars(recording, numbers), caption)


def _wait_bars(recording: Recording, numbers: Numbers) -> Iterator[str]:
    edges = _edges(max(recording.waits))
    counts = [0] * len(edges)
    for wait in recording.waits:
        counts[bisect.bisect_right(edges, wait) - 1] += 1
    most, top, step = max(counts), 24, WIDTH / len(edges)
    yield from _scale(most, top)
    for index, number in enumerate(counts):
        height, x = _HEIGHT * number / most, LEFT + index * step
        yield element(
            "rect",
            element("title", f"{_class_of_waits(edges, index)}: {number:,}"),
            class_="idle",
            x=x + 1,
            y=top + _HEIGHT - height,
            width=step - 2,
            height=height,
        )
        if index == 0:
            yield text(x + step / 2, top + _HEIGHT + 16, "at once", "middle")
        # There is no room for a label at the first edge.
        elif index % 3 == 1 and index > 1:
            yield text(x, top + _HEIGHT + 16, duration(edges[index] / 1e6), "middle")
    yield from _percentiles(edges, numbers, top)


def _class_of_waits(edges: list[int], index: int) -> str:
    upper = duration(edges[index + 1] / 1e6) if index + 1 < len(edges) else "longer"
    return f"{duration(edges[index] / 1e6)} to {upper}"


def _percentiles(edges: list[int], numbers: Numbers, top: int) -> Iterator[str]:
    """Draw a line for each bar that a percentile is in."""
    ranks_of_bar: dict[int, list[int]] = {}
    for rank, value in numbers.percentiles.items():
        bar = bisect.bisect_right(edges, value * 1e6) - 1
        ranks_of_bar.setdefault(bar, []).append(rank)
    for bar, ranks in ranks_of_bar.items():
        x = LEFT + (bar + 0.5) * WIDTH / len(edges)
        yield element("path", class_="edge", d=f"M{x:.1f} {top - 4}V{top + _HEIGHT}")
        yield text(x, top - 8, " ".join(f"p{rank}" for rank in ranks), "middle")


def _edges(longest: int) -> list[int]:
    """Return the lower bounds of classes of waits, in microseconds: three to each power of ten."""
    edges, power = [0], 10
    while edges[-1] <= longest:
        edges += [power, 2 * power, 5 * power]
        power *= 10
    return edges
