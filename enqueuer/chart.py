"""A picture of a report: batches a second over workers, as SVG that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html import escape

from enqueuer.bench import Measured, Report

_WIDTH, _HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 24, 64, 56  # margins
_COLOURS = {"thread": "#0072b2", "process": "#d55e00"}  # told apart by the colour-blind, too
_NAMES = {"thread": "threads", "process": "processes"}
_GREY = "#767676"


def svg(report: Report) -> str:
    """Return a picture of what was measured."""
    settings = [one for one in report.measured if one.workers and one.batches]
    most = max((one.workers for one in settings), default=1)
    rates = [one.batches_per_s for one in report.measured]
    top = _ceiling(max(rates, default=1.0) or 1.0)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            f'width="{_WIDTH}" height="{_HEIGHT}" '
            'font-family="system-ui, sans-serif" font-size="13" fill="#222">',
            f"<title>{escape(report.name)}: batches a second</title>",
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
            _text(_LEFT, 24, f"{report.name}: batches a second", size=16),
            *_axes(settings, most, top),
            *_plain(report.plain, top),
            *(line for backend in _COLOURS for line in _series(settings, backend, most, top)),
            *_best(report.best, most, top),
            "</svg>\n",
        ]
    )


def _axes(settings: list[Measured], most: int, top: float) -> Iterator[str]:
    for at in range(5):
        value = top * at / 4
        y = _y(value, top)
        yield _line([(_LEFT, y), (_WIDTH - _RIGHT, y)], "#ddd", 1)
        yield _text(_LEFT - 8, y + 4, f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}", "end")
    for workers in sorted({one.workers for one in settings}):
        yield _text(_x(workers, most), _HEIGHT - _BOTTOM + 20, str(workers), "middle")
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield _text(middle, _HEIGHT - 14, "workers", "middle")


def _plain(plain: Measured | None, top: float) -> Iterator[str]:
    if plain is not None:
        y = _y(plain.batches_per_s, top)
        yield _line([(_LEFT, y), (_WIDTH - _RIGHT, y)], _GREY, 1.5, "6 4")
        yield _legend(0, _GREY, "plain loop")


def _series(settings: list[Measured], backend: str, most: int, top: float) -> Iterator[str]:
    points = [
        (_x(one.workers, most), _y(one.batches_per_s, top))
        for one in settings
        if one.backend == backend
    ]
    if not points:
        return
    colour = _COLOURS[backend]
    yield _line(points, colour, 2.5)
    for x, y in points:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
    yield _legend(1 + list(_COLOURS).index(backend), colour, _NAMES[backend])


def _best(best: Measured | None, most: int, top: float) -> Iterator[str]:
    if best is not None:
        x, y = _x(best.workers, most), _y(best.batches_per_s, top)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="#222"/>'
        yield _legend(3, "none", "best choice")
        x = _LEFT + 3 * 130
        yield f'<circle cx="{x + 8}" cy="42" r="7" fill="none" stroke="#222"/>'


def _legend(place: int, colour: str, text: str) -> str:
    x = _LEFT + place * 130
    return _line([(x, 42), (x + 18, 42)], colour, 3) + _text(x + 24, 46, text)


def _line(points: Iterable[tuple[float, float]], colour: str, width: float, dash: str = "") -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    stroke = f'stroke="{colour}" stroke-width="{width}"'
    if dash:
        stroke += f' stroke-dasharray="{dash}"'
    return f'<polyline points="{places}" fill="none" {stroke}/>'


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 13) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
        f"{escape(text)}</text>"
    )


def _x(workers: int, most: int) -> float:
    """Return where a number of workers is: each doubling takes the same room."""
    share = math.log2(workers) / math.log2(most) if most > 1 else 0.5
    return _LEFT + 24 + share * (_WIDTH - _LEFT - _RIGHT - 48)


def _y(rate: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - rate / top * (_HEIGHT - _TOP - _BOTTOM)


def _ceiling(value: float) -> float:
    """Return a round number that is not less.

    Example:
        >>> _ceiling(0.7), _ceiling(787.1), _ceiling(2001)
        (0.8, 800.0, 4000.0)
    """
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(float(f"{power * n:.3g}") for n in (1, 2, 4, 6, 8, 10) if power * n >= value)
