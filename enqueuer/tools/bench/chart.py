"""A picture of a report: batches a second over the number of workers, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from enqueuer.tools.bench.report import Measurement, Report
from enqueuer.tools.svg import element, polyline, text

_WIDTH, _HEIGHT = 640, 400
# Margins.
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 24, 64, 56
_LEGEND_WIDTH = 130
# Colour-blind readers can distinguish these colours, too.
_COLOURS = {"thread": "#0072b2", "process": "#d55e00"}
_NAMES = {"thread": "threads", "process": "processes"}
_GREY = "#767676"


def draw(report: Report) -> str:
    """Return a picture of the measurements, as a file of its own."""
    chart = _Chart(report)
    title = f"{report.name}: batches a second"
    content = [
        element("title", escape(title)),
        element("rect", width=_WIDTH, height=_HEIGHT, fill="#fff"),
        text(_LEFT, 24, title, font_size=16),
        *chart.axes(),
        *chart.plain_loop(),
        *(line for backend in _COLOURS for line in chart.series(backend)),
        *chart.best(),
    ]
    picture = element(
        "svg",
        "\n".join(["", *content, ""]),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        width=_WIDTH,
        height=_HEIGHT,
        font_family="system-ui, sans-serif",
        font_size=13,
        fill="#222",
    )
    return f"{picture}\n"


class _Chart:
    """A chart of a report: its scales, and the shapes that they place."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._settings = [one for one in report.measured if one.workers and one.batches]
        self._most = max((setting.workers for setting in self._settings), default=1)
        rates = [measured.batches_per_s for measured in report.measured]
        self._top = _ceiling(max(rates, default=1.0) or 1.0)

    def axes(self) -> Iterator[str]:
        """Draw five lines for rates, and the numbers of workers."""
        for quarter in range(5):
            value = self._top * quarter / 4
            label = f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
            yield self._horizontal(value, stroke="#ddd", stroke_width=1)
            yield text(_LEFT - 8, self._y(value) + 4, label, "end")
        for workers in sorted({setting.workers for setting in self._settings}):
            yield text(self._x(workers), _HEIGHT - _BOTTOM + 20, str(workers), "middle")
        yield text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 14, "workers", "middle")

    def plain_loop(self) -> Iterator[str]:
        """Draw the rate of the plain loop."""
        plain = self._report.plain
        if plain is not None:
            yield self._horizontal(
                plain.batches_per_s, stroke=_GREY, stroke_width=1.5, stroke_dasharray="6 4"
            )
            yield from _legend(0, _GREY, "plain loop")

    def series(self, backend: str) -> Iterator[str]:
        """Draw the rates of a backend."""
        points = [self._place(one) for one in self._settings if one.backend == backend]
        if not points:
            return
        colour = _COLOURS[backend]
        yield polyline(points, stroke=colour, stroke_width=2.5)
        for x, y in points:
            yield element("circle", cx=x, cy=y, r=4, fill=colour)
        yield from _legend(1 + list(_COLOURS).index(backend), colour, _NAMES[backend])

    def best(self) -> Iterator[str]:
        """Draw a ring around the best choice."""
        best = self._report.best
        if best is not None:
            x, y = self._place(best)
            yield element("circle", cx=x, cy=y, r=9, fill="none", stroke="#222")
            yield from _legend(3, "none", "best choice")
            x = _LEFT + 3 * _LEGEND_WIDTH + 8
            yield element("circle", cx=x, cy=42, r=7, fill="none", stroke="#222")

    def _place(self, setting: Measurement) -> tuple[float, float]:
        return self._x(setting.workers), self._y(setting.batches_per_s)

    def _horizontal(self, rate: float, **attributes: str | float) -> str:
        y = self._y(rate)
        return polyline([(_LEFT, y), (_WIDTH - _RIGHT, y)], **attributes)

    def _x(self, workers: int) -> float:
        """Return the place of a number of workers: each doubling has the same width."""
        share = math.log2(workers) / math.log2(self._most) if self._most > 1 else 0.5
        return _LEFT + 24 + share * (_WIDTH - _LEFT - _RIGHT - 48)

    def _y(self, rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate / self._top * (_HEIGHT - _TOP - _BOTTOM)


def _legend(index: int, colour: str, words: str) -> Iterator[str]:
    x = _LEFT + index * _LEGEND_WIDTH
    yield polyline([(x, 42), (x + 18, 42)], stroke=colour, stroke_width=3)
    yield text(x + 24, 46, words)


def _ceiling(value: float) -> float:
    """Return a round number that is not less.

    Example:
        >>> _ceiling(0.7), _ceiling(787.1), _ceiling(2001)
        (0.8, 800.0, 4000.0)
    """
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(float(f"{power * n:.3g}") for n in (1, 2, 4, 6, 8, 10) if power * n >= value)
