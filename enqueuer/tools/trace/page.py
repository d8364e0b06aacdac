"""A recording -> a page that stands alone: pictures as SVG, no script, nothing from a network."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from enqueuer.common.text import duration, percent, pluralize, printable, rate, size
from enqueuer.tools.svg import element
from enqueuer.tools.trace.numbers import Numbers, totals_of
from enqueuer.tools.trace.pictures import MOST_MARKS, WORKER_LABELS, depths, legend, waits
from enqueuer.tools.trace.recording import Recording, Row
from enqueuer.tools.trace.style import STYLE
from enqueuer.tools.trace.timeline import timeline


def page(recording: Recording) -> str:
    """Return the page for a recording, as HTML."""
    numbers = totals_of(recording)
    name = printable(Path(recording.path).name)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(name)} - enqueuer</title><style>{STYLE}</style></head><body>",
        *_head(recording, name),
        *_bottleneck(recording),
        *_warnings(recording),
        *_tiles(numbers),
        *timeline(recording),
        *depths(recording),
        *waits(recording, numbers),
        *_workers(recording),
        *_marks(recording),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _head(recording: Recording, name: str) -> Iterator[str]:
    about = recording.about
    settings = [
        f"{pluralize(about.get('workers', 0), 'worker')} ({about.get('backend')})",
        f"max_queue_size={about.get('max_queue_size')}",
        f"{about.get('cpus')} CPUs",
    ]
    if len(recording.starts) > 1:
        settings.append(f"started {len(recording.starts)} times")
    yield f"<h1>{escape(name)}</h1>"
    yield f'<p class="faint">{escape(", ".join(settings))}. The file itself opens in Perfetto.</p>'


def _bottleneck(recording: Recording) -> Iterator[str]:
    if recording.bottleneck:
        yield element("div", escape(recording.bottleneck), class_="bottleneck")


def _warnings(recording: Recording) -> Iterator[str]:
    if any(mark.kind == "full" for mark in recording.marks):
        yield _warning("The file reached its largest size: this is the begin of the run only.")
    if not recording.is_whole:
        yield _warning("The trace has no end: the run goes on, or was killed.")
    if recording.torn:
        yield _warning(f"Events that could not be read and were left out: {recording.torn:,}.")


def _warning(text: str) -> str:
    return element("div", text, class_="warning")


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
    yield from (f"<div><b>{value}</b><span>{label}</span></div>" for label, value in tiles.items())
    yield "</div>"


def _workers(recording: Recording) -> Iterator[str]:
    if not recording.rows:
        return
    yield "<h2>Workers</h2>"
    yield legend(WORKER_LABELS)
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
    sent = size(row.bytes) if row.bytes else ""
    bar = "".join(
        f'<i class="{kind}" style="width:{100 * share:.1f}%"></i>'
        for kind, share in zip(times, shares, strict=True)
    )
    cells = [
        escape(row.name or row.label),
        f"{row.items:,}",
        *each,
        sent,
        *map(percent, shares),
        element("div", bar, class_="bar"),
    ]
    columns = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr>{columns}</tr>"


def _marks(recording: Recording) -> Iterator[str]:
    marks = [mark for mark in recording.marks if mark.kind != "epoch"]
    count = recording.counts.total() - recording.counts["epoch"]
    if not marks:
        return
    yield "<h2>Events</h2><table>"
    for mark in marks[:MOST_MARKS]:
        yield f'<tr><td>{duration(mark.at / 1e6)}</td><td class="text">{mark.kind}</td>'
        yield f'<td class="text">{escape(mark.text)}</td></tr>'
    yield "</table>"
    if count > MOST_MARKS:
        yield f'<p class="faint">The first {MOST_MARKS} of {count:,}.</p>'
