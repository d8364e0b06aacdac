"""A trace -> its numbers, and a page of what Perfetto does not show of it.

    lines -> events -> Recording.add(), which checks them -> numbers_of() -> page()

The page has the bottleneck, who waited how long, and the slowest items. A trace that a crash has
left is read as far as possible: a line that is torn, too long, or no event, is counted and left
out. What one thread wrote is in the order of time, so all is added up as it is read.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import re
import stat
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from enqueuer.common.text import duration, percent, pluralize, printable, rate, ratio, size
from enqueuer.errors import DataFileError
from enqueuer.monitoring.trace_file import HEAD

# Bytes of a line. Ours have a few hundred, but a file may be a single line.
_LONGEST_LINE = 1 << 20
# Ten years, in microseconds, of a clock that began when the machine was started.
_LATEST_US = 10 * 366 * 86_400 * 1_000_000
# Largest value of any other number.
_LARGEST = 1 << 53
# Most characters of an error or a name.
_LONGEST_TEXT = 1000
_MOST_SLOW = 10

# A worker, or one of its threads.
_WORKER = re.compile(r"worker (\d{1,9})(?:\.(\d{1,9}))?\b")

Place = tuple[int, int | None]
"""A process and one of its threads."""


class Slow(NamedTuple):
    """An item that took long to make: its microseconds, its begin, and which one it was."""

    took: int
    at: int
    what: str


@dataclass
class Row:
    """One worker and its replacements, or one of its threads.

    Attributes:
        name: Name of the last replacement.
        items: Number of items that it has sent.
        bytes: Size of these items, as far as it is known.
        times: Microseconds in spans of each name; a wait within a send counts only as a wait.
        sent: Time at which its last send ended.
    """

    name: str
    items: int = 0
    bytes: int = 0
    times: Counter[str] = field(default_factory=Counter)
    sent: int = 0

    def add(self, name: str, begin: int, end: int, nbytes: int) -> None:
        """Add a span."""
        self.times[name] += end - begin
        if name == "send":
            self.items += 1
            self.bytes += nbytes
            self.sent = max(self.sent, end)
        # A wait within a send is recorded after it.
        elif name == "wait" and end <= self.sent:
            self.times["send"] -= end - begin


def shares_of(times: Counter[str]) -> list[float]:
    """Return the shares of making, sending and waiting."""
    parts = [times[name] for name in ("next", "send", "wait")]
    return [ratio(part, sum(parts)) for part in parts]


@dataclass
class Recording:
    """The content of a trace, added up event by event; times are in microseconds.

    A trace may come from a crash, or from anyone, so each field is checked.

    Attributes:
        path: Path of the file.
        about: Settings of the enqueuer, from the first start.
        starts: Times of the starts.
        first, last: Times of the earliest and of the latest event; None if there is none.
        items: Number of items that the loop took.
        first_item: Time at which it took the first one; None if there was none.
        waits: Its waits for each item but the first one of each start.
        waited: Time that it waited, or read elements, after the first item of each start.
        worked: Time that it worked.
        measured: The enqueuer's own measurements at each stop: number of items, and how long the
            loop waited and worked after the first.
        slowest: The items that took longest to make, as a heap.
        counts: Number of instants of each kind.
        bottleneck: The bottleneck that the enqueuer found at its last stop; empty if it found none.
        is_whole: Whether the enqueuer was stopped.
        torn: Number of lines that cannot be read, and of events that make no sense.
    """

    path: str
    about: dict[str, Any] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    first: int | None = None
    last: int = 0
    items: int = 0
    first_item: int | None = None
    waits: array[int] = field(default_factory=lambda: array("q"))
    waited: int = 0
    worked: int = 0
    measured: list[tuple[int, int, int]] = field(default_factory=list)
    slowest: list[Slow] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    bottleneck: str = ""
    is_whole: bool = False
    torn: int = 0
    # By the index of the worker and that of its thread, or -1.
    _rows: dict[tuple[int, int], Row] = field(default_factory=dict)
    # A worker writes its name before anything else; all other spans are the loop's.
    _row_of: dict[Place, Row] = field(default_factory=dict)
    # Wait for the next item, and whether this start has had one.
    _pending: int = 0
    _has_item: bool = False

    @property
    def rows(self) -> list[Row]:
        """The workers; one whose threads have rows has none itself."""
        by_threads = {(worker, -1) for worker, thread in self._rows if thread >= 0}
        return [self._rows[key] for key in sorted(self._rows.keys() - by_threads)]

    def add(self, event: Any) -> None:
        """Add an event; raise KeyError, TypeError or ValueError if it makes no sense."""
        phase, name, args = event["ph"], event.get("name", ""), _checked(event.get("args", {}))
        if not isinstance(phase, str) or not isinstance(name, str):
            raise TypeError("phases and names are texts")
        place = _number(event["pid"]), _number(event["tid"]) if "tid" in event else None
        if phase == "M":
            self._add_name(name, place, args)
            return
        begin = end = _number(event["ts"], _LATEST_US)
        if phase == "X":
            end = _number(begin + _number(event["dur"]), _LATEST_US)
            self._add_span(name, place, begin, end, args)
        elif phase == "C":
            _number(args.get("items", 0))
        elif phase == "i":
            self._add_instant(name, begin, args)
        self.first = begin if self.first is None else min(begin, self.first)
        self.last = max(end, self.last)

    def _add_name(self, name: str, place: Place, args: dict[str, Any]) -> None:
        text = str(args.get("name", ""))
        found = _WORKER.match(text)
        if found is None or name not in ("thread_name", "process_name"):
            return
        key = int(found[1]), int(found[2]) if found[2] else -1
        row = self._rows.setdefault(key, Row(text))
        # The row of a process has a shorter name than the process.
        if name == "process_name" or "(" in text:
            row.name = text
        if name == "thread_name":
            self._row_of[place] = row

    def _add_span(
        self, name: str, place: Place, begin: int, end: int, args: dict[str, Any]
    ) -> None:
        nbytes, row = _number(args.get("bytes", 0)), self._row_of.get(place)
        if row is None:
            self._add_span_of_loop(name, begin, end - begin, bool(args.get("end")))
        else:
            row.add(name, begin, end, nbytes)
        if name == "next":
            keys = ("shard", "task", "item", "element", "epoch")
            what = ", ".join(f"{key} {_number(args[key])}" for key in keys if key in args)
            slow = Slow(end - begin, begin, what)
            push = heapq.heappush if len(self.slowest) < _MOST_SLOW else heapq.heappushpop
            push(self.slowest, slow)

    def _add_span_of_loop(self, name: str, begin: int, took: int, is_end: bool) -> None:
        """Add a span; `is_end` is true of a wait that ended an epoch, and brought no item."""
        if name == "work":
            self.items += 1
            self.first_item = begin if self.first_item is None else self.first_item
            if self._has_item:
                self.waits.append(self._pending)
            self.worked += took
            self._pending, self._has_item = 0, True
        elif name in ("wait", "read"):
            self._pending += 0 if is_end else took
            self.waited += took if self._has_item else 0

    def _add_instant(self, name: str, at: int, args: dict[str, Any]) -> None:
        self.counts[name] += 1
        if name == "start":
            self.about = self.about or args
            self.starts.append(at)
            self._pending, self._has_item = 0, False
        elif name == "bottleneck":
            self.bottleneck = str(args.get("text", ""))
            if "items" in args:
                keys = ("items", "waiting_us", "working_us")
                items, waited, worked = (_number(args[key]) for key in keys)
                self.measured.append((items, waited, worked))


@dataclass(frozen=True)
class Numbers:
    """The totals of a recording; times in seconds, shares from 0 to 1.

    Rate, waits and their share are those of `Stats`: of the loop's time after the first item of
    each start, without the time between two epochs.

    Attributes:
        items: Number of items that the loop took.
        seconds: Time from the start to the end.
        items_per_second: Number of items after the first, by the loop's time after the first.
        first_batch: Time from the start to the first item; None if there was none.
        waited: Time that the loop waited, or read elements, after the first item.
        waited_share: Share of the loop's time after the first item.
        percentiles: Percentiles 50, 90 and 99 of the waits after the first item.
        making: Share of the workers' time that the user's code took.
        sending: Share of the workers' time that encoding and copying took.
        waiting: Share of the workers' time that they waited for room, for an epoch or for a task.
        errors: Number of raised errors.
        skipped: Number of skipped errors.
        restarts: Number of replaced workers.
    """

    items: int
    seconds: float
    items_per_second: float
    first_batch: float | None
    waited: float
    waited_share: float
    percentiles: dict[int, float]
    making: float
    sending: float
    waiting: float
    errors: int
    skipped: int
    restarts: int


# --- reading ---


def read(path: str) -> Recording:
    """Read a trace.

    Raises:
        DataFileError: The file is missing, or no trace of an enqueuer.
    """
    recording = Recording(path)
    with _opened(path) as file:
        for line in _lines(file):
            line = line.strip().rstrip(b",")
            if line in (b"[", b"]", b""):
                recording.is_whole = line == b"]"
                continue
            try:
                recording.add(json.loads(line))
            except (ValueError, KeyError, TypeError, RecursionError):
                recording.torn += 1
            else:
                # An enqueuer that was stopped was started again.
                recording.is_whole = False
    if recording.first is None:
        raise DataFileError(f"{path}: nothing was recorded", path)
    return recording


def _opened(path: str) -> BinaryIO:
    """Open a trace, or raise a DataFileError that says why it is none."""
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    except FileNotFoundError:
        raise DataFileError(f"{path}: no such file", path) from None
    except OSError as error:
        raise DataFileError(f"{path}: cannot be read: {error.strerror}", path) from error
    why = ""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        why = "a trace must be an ordinary file, not a pipe"
    elif file.read(len(HEAD)) != HEAD:
        why = "not a trace; trace='run.json' of an enqueuer writes one"
    if why:
        file.close()
        raise DataFileError(f"{path}: {why}", path)
    file.seek(0)
    return file


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; for one that is too long, text that is no event."""
    while line := file.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
            while (rest := file.readline(_LONGEST_LINE)) and not rest.endswith(b"\n"):
                pass
            line = b"too long"
        yield line


def _number(value: Any, most: int = _LARGEST) -> int:
    """Return a whole number from 0 to `most`; raise ValueError if it is none."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError("not a whole number, or out of its range")
    return value


def _checked(args: Any) -> dict[str, Any]:
    """Return arguments with short texts; raise TypeError if they are neither texts nor numbers."""
    if not isinstance(args, dict) or not all(
        isinstance(value, (str, int, float, type(None))) for value in args.values()
    ):
        raise TypeError("the arguments of an event are a dict of texts and numbers")
    return {
        key: printable(value[:_LONGEST_TEXT]) if isinstance(value, str) else value
        for key, value in args.items()
    }


# --- numbers ---


def numbers_of(recording: Recording) -> Numbers:
    """Add up a recording."""
    counts, waits, start = recording.counts, recording.waits, recording.first or 0
    later, waited, worked = len(waits), recording.waited, recording.worked
    # The enqueuer's own measurements are preferred, as its bottleneck follows from them.
    if recording.measured and len(recording.measured) == len(recording.starts):
        items, of_waits, of_work = zip(*recording.measured, strict=True)
        later, waited, worked = sum(max(0, n - 1) for n in items), sum(of_waits), sum(of_work)
    making, sending, waiting = shares_of(sum((row.times for row in recording.rows), Counter()))
    first, began = recording.first_item, min(recording.starts, default=start)
    return Numbers(
        items=recording.items,
        seconds=(recording.last - start) / 1e6,
        items_per_second=1e6 * ratio(later, waited + worked),
        first_batch=None if first is None else (first - began) / 1e6,
        waited=waited / 1e6,
        waited_share=ratio(waited, waited + worked),
        percentiles={p: percentile(waits, p) / 1e6 for p in (50, 90, 99)},
        making=making,
        sending=sending,
        waiting=waiting,
        errors=counts["error"],
        skipped=counts["skipped"],
        restarts=counts["restart"],
    )


def percentile(values: Sequence[int], percent: int) -> int:
    """Return the smallest value that so many percent do not exceed; 0 if there are none.

    Example:
        >>> percentile(range(1, 101), 90), percentile([], 50)
        (90, 0)
    """
    if not values:
        return 0
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


# --- the page ---

_STYLE = """
:root { color-scheme: light dark; }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
.note { border-left: 4px solid #3b78c3; padding-left: .9rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid #8886; }
td:first-child { text-align: left; }
.bar { display: flex; height: .8rem; min-width: 12rem; }
.make { background: #3b78c3; } .send { background: #e0a100; } .wait { background: #8886; }
"""


def page(recording: Recording) -> str:
    """Return the page of a recording: HTML that stands alone, without scripts."""
    numbers, start = numbers_of(recording), recording.first or 0
    name, about = escape(printable(Path(recording.path).name)), recording.about
    settings = (
        f"{pluralize(about.get('workers', 0), 'worker')} ({about.get('backend')}), "
        f"max_queue_size={about.get('max_queue_size')}, {about.get('cpus')} CPUs"
    )
    slowest = [
        (escape(slow.what), _time(slow.took), _time(slow.at - start))
        for slow in sorted(recording.slowest, reverse=True)
    ]
    columns = ("", "items", "sent", "making", "sending", "waiting", "")
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{name} - enqueuer</title><style>{_STYLE}</style></head><body>",
        f"<h1>{name}</h1><p>{escape(settings)}. "
        "To see each item and error on a timeline, open the trace in Perfetto.</p>",
        *(f"<p class='note'>{escape(note)}</p>" for note in _notes(recording)),
        *(f"<p>{escape(line)}</p>" for line in in_lines(numbers)),
        *_table("Who waited", columns, _bars(recording, numbers)),
        *_table("Slowest items", ("item", "took", "begun after"), slowest),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def in_lines(numbers: Numbers) -> Iterator[str]:
    """Put the numbers into words, a line each."""
    yield (
        f"{numbers.items:,} items in {duration(numbers.seconds)}, "
        f"{rate(numbers.items_per_second)} a second after the first"
    )
    if numbers.first_batch is not None:
        waits = ", ".join(f"p{rank} {duration(at)}" for rank, at in numbers.percentiles.items())
        yield f"first batch after {duration(numbers.first_batch)}"
        yield f"after that the loop waited {percent(numbers.waited_share)} of its time ({waits})"
    yield (
        f"workers: {percent(numbers.making)} making, {percent(numbers.sending)} sending, "
        f"{percent(numbers.waiting)} waiting"
    )
    yield (
        f"{pluralize(numbers.errors, 'error')}, {numbers.skipped} skipped, "
        f"{pluralize(numbers.restarts, 'restart')}"
    )


def _notes(recording: Recording) -> Iterator[str]:
    """Return the bottleneck, and what is to be known of the file."""
    if recording.bottleneck:
        yield recording.bottleneck
    if recording.counts["full"]:
        yield "The file reached its largest size: this is the begin of the run only."
    if not recording.is_whole:
        yield "The trace has no end: the run goes on, or was killed."
    if recording.torn:
        yield f"Events that could not be read and were left out: {recording.torn:,}."


def _time(microseconds: int) -> str:
    return duration(microseconds / 1e6)


def _bars(recording: Recording, numbers: Numbers) -> Iterator[Sequence[str]]:
    """Return the cells of the loop and of each worker: shares of time as numbers and as a bar."""
    waited = numbers.waited_share
    working = 1 - waited if numbers.items else 0.0
    loop_bar = _bar([working, 0.0, waited])
    yield "the loop", f"{numbers.items:,}", "", percent(working), "", percent(waited), loop_bar
    for row in recording.rows:
        sent, shares = size(row.bytes) if row.bytes else "", shares_of(row.times)
        name = escape(row.name)
        yield name, f"{row.items:,}", sent, *map(percent, shares), _bar(shares)


def _bar(shares: Sequence[float]) -> str:
    parts = (
        f'<i class="{kind}" style="width:{100 * share:.1f}%"></i>'
        for kind, share in zip(("make", "send", "wait"), shares, strict=True)
    )
    return f'<div class="bar">{"".join(parts)}</div>'


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Return a table of cells that are HTML, and its title; nothing if there are no rows."""
    body = ["".join(f"<td>{cell}</td>" for cell in row) for row in rows]
    if body:
        yield f"<h2>{title}</h2>"
        yield f"<table><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>"
        yield from (f"<tr>{row}</tr>" for row in body)
        yield "</table>"
