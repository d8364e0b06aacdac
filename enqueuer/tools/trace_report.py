"""A trace -> its numbers, and a page of what Perfetto does not show of it.

    lines -> events -> Recording.add() -> numbers_of() -> page()

The page has the bottleneck, who waited how long, and the slowest items. A trace that a crash has
left is read as far as possible: a line that is torn, or no event, is counted and left out. What
one thread wrote is in the order of time, so all is added up as it is read.
"""

from __future__ import annotations

import heapq
import json
import math
import re
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from enqueuer.common.text import duration, percent, pluralize, printable, rate, ratio, size, table
from enqueuer.errors import DataFileError
from enqueuer.monitoring.trace_file import is_trace

# Largest time, and largest size of an item.
_LARGEST = 1 << 53
_MOST_SLOW = 10
# Bytes; an event of an enqueuer is far shorter.
_LONGEST_LINE = 1 << 20

# A worker, or one of its threads.
_WORKER = re.compile(r"worker (\d{1,9})(?:\.(\d{1,9}))?\b")

Place = tuple[int, int]
"""A process and one of its threads."""


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

    Attributes:
        path: Path of the file.
        about: Settings of the enqueuer, from the first start.
        starts: Times of the starts.
        first, last: Times of the earliest and of the latest event.
        items: Number of items that the loop took.
        first_item: Time at which it took the first one; None if there was none.
        waits: Its waits for each item but the first one of each start.
        waited: Time that it waited, or read elements, after the first item of each start.
        worked: Time that it worked.
        measured: The enqueuer's own measurements at each stop: number of items, and how long the
            loop waited and worked after the first.
        slowest: The items that took longest to make, as a heap: microseconds, begin, which one.
        counts: Number of instants of each kind.
        bottleneck: The bottleneck that the enqueuer found at its last stop; empty if it found none.
        is_whole: Whether the enqueuer was stopped.
        torn: Number of lines that cannot be read, and of events that make no sense.
    """

    path: str
    about: dict[str, Any] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    first: int = sys.maxsize
    last: int = -1
    items: int = 0
    first_item: int | None = None
    waits: array[int] = field(default_factory=lambda: array("q"))
    waited: int = 0
    worked: int = 0
    measured: list[list[int]] = field(default_factory=list)
    slowest: list[tuple[int, int, str]] = field(default_factory=list)
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
        """Add an event; raise an exception if it makes no sense."""
        phase, name, args = event["ph"], event.get("name"), event.get("args", {})
        place = event["pid"], event.get("tid", 0)
        if not isinstance(phase, str) or not isinstance(name, str):
            raise TypeError("no phase or no name")
        if phase == "M":
            self._add_name(place, args.get("name", ""))
            return
        begin = end = _number(event["ts"])
        if phase == "X":
            end += _number(event["dur"])
            self._add_span(name, place, begin, end, args)
        elif phase == "i":
            self._add_instant(name, begin, args)
        self.first = min(begin, self.first)
        self.last = max(end, self.last)

    def _add_name(self, place: Place, text: str) -> None:
        if found := _WORKER.match(text):
            key = int(found[1]), int(found[2] or -1)
            row = self._row_of[place] = self._rows.setdefault(key, Row(text))
            # The row of a process has a shorter name than the process.
            if "(" in text:
                row.name = text

    def _add_span(
        self, name: str, place: Place, begin: int, end: int, args: dict[str, Any]
    ) -> None:
        row, nbytes = self._row_of.get(place), _number(args.get("bytes", 0))
        if row is None:
            self._add_span_of_loop(name, begin, end - begin, bool(args.get("end")))
            return
        row.add(name, begin, end, nbytes)
        if name == "next":
            keys = ("shard", "task", "item", "element", "epoch")
            what = ", ".join(f"{key} {args[key]}" for key in keys if key in args)
            push = heapq.heappush if len(self.slowest) < _MOST_SLOW else heapq.heappushpop
            push(self.slowest, (end - begin, begin, what))

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
            if "items" in args:
                keys = ("items", "waiting_us", "working_us")
                self.measured.append([_number(args[key]) for key in keys])
            self.bottleneck = str(args.get("text", ""))


def _number(value: Any) -> int:
    """Return a time or a size; raise ValueError if it is none."""
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError("not a whole number, or out of its range")
    return value


def read(path: str) -> Recording:
    """Read a trace.

    Raises:
        DataFileError: The file is missing, or no trace of an enqueuer.
    """
    recording = Recording(path)
    try:
        is_ours = is_trace(path)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        why = "no such file" if is_missing else f"cannot be read: {error.strerror}"
        raise DataFileError(f"{path}: {why}", path) from error
    if not is_ours:
        why = "not a trace; trace='run.json' of an enqueuer writes one"
        raise DataFileError(f"{path}: {why}", path)
    with open(path, "rb") as file:
        while line := file.readline(_LONGEST_LINE):
            rest = line
            # Of a file that is damaged, one line may be larger than the memory.
            while len(rest) == _LONGEST_LINE and not rest.endswith(b"\n"):
                rest = file.readline(_LONGEST_LINE)
            _read_line(recording, line.strip().rstrip(b","))
    if recording.last < 0:
        raise DataFileError(f"{path}: nothing was recorded", path)
    return recording


def _read_line(recording: Recording, line: bytes) -> None:
    if line in (b"[", b"]", b""):
        recording.is_whole = line == b"]"
        return
    try:
        recording.add(json.loads(line))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        recording.torn += 1
    else:
        # An enqueuer that was stopped was started again.
        recording.is_whole = False


def numbers_of(recording: Recording) -> dict[str, Any]:
    """Return the totals of a recording; times in seconds, shares from 0 to 1.

    Rate, waits and their share are those of `Stats`: of the loop's time after the first item of
    each start, without the time between two epochs.
    """
    counts, waits = recording.counts, sorted(recording.waits)
    later, waited, worked = len(waits), recording.waited, recording.worked
    # The enqueuer's own measurements are preferred, as its bottleneck follows from them.
    if recording.measured and len(recording.measured) == len(recording.starts):
        items, of_waits, of_work = zip(*recording.measured, strict=True)
        later, waited, worked = sum(max(0, n - 1) for n in items), sum(of_waits), sum(of_work)
    making, sending, waiting = shares_of(sum((row.times for row in recording.rows), Counter()))
    first, began = recording.first_item, min(recording.starts, default=recording.first)
    return {
        "items": recording.items,
        "seconds": (recording.last - recording.first) / 1e6,
        # After the first.
        "items_per_second": 1e6 * ratio(later, waited + worked),
        # From the start.
        "first_batch": None if first is None else (first - began) / 1e6,
        # By the loop, after the first item; and percentiles of these waits.
        "waited": waited / 1e6,
        "waited_share": ratio(waited, waited + worked),
        "percentiles": {rank: percentile(waits, rank) / 1e6 for rank in (50, 90, 99)},
        # Shares of the workers' time.
        "making": making,
        "sending": sending,
        "waiting": waiting,
        "errors": counts["error"],
        "skipped": counts["skipped"],
        "restarts": counts["restart"],
    }


def percentile(ordered: Sequence[int], percent: int) -> int:
    """Return the smallest value that so many percent do not exceed; 0 if there are none.

    Example:
        >>> percentile(range(1, 101), 90), percentile([], 50)
        (90, 0)
    """
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else 0


def page(recording: Recording) -> str:
    """Return the page of a recording: HTML that stands alone, without scripts."""
    about, name = recording.about, printable(Path(recording.path).name)
    slowest = [
        (printable(what), duration(took / 1e6), duration((begin - recording.first) / 1e6))
        for took, begin, what in sorted(recording.slowest, reverse=True)
    ]
    lines = [
        *map(printable, (recording.bottleneck, *in_lines(recording))),
        f"{pluralize(about.get('workers', 0), 'worker')} ({about.get('backend')}), "
        f"max_queue_size={about.get('max_queue_size')}, {about.get('cpus')} CPUs\n",
        *table(list(_who_waited(recording))),
        "\nTo see each item and error on a timeline, open the trace in Perfetto.\n",
        *table([("Slowest items", "took", "begun after"), *slowest]),
    ]
    text = escape("\n".join(lines).lstrip())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(name)} - enqueuer</title></head><body><h1>{escape(name)}</h1>"
        f'<pre style="white-space: pre-wrap">{text}</pre></body></html>\n'
    )


def _who_waited(recording: Recording) -> Iterator[Sequence[str]]:
    """Return the cells of the loop and of each worker: items and shares of time."""
    yield "Who waited", "items", "sent", "making", "sending", "waiting"
    waited = numbers_of(recording)["waited_share"]
    working = 1 - waited if recording.items else 0.0
    yield "the loop", f"{recording.items:,}", "", percent(working), "", percent(waited)
    for row in recording.rows:
        sent, shares = size(row.bytes) if row.bytes else "", shares_of(row.times)
        yield printable(row.name), f"{row.items:,}", sent, *map(percent, shares)


def in_lines(recording: Recording) -> Iterator[str]:
    """Put the numbers, and what is to be known of the file, into words, a line each."""
    numbers = numbers_of(recording)
    seconds, per_second = duration(numbers["seconds"]), rate(numbers["items_per_second"])
    yield f"{numbers['items']:,} items in {seconds}, {per_second} a second after the first"
    if numbers["first_batch"] is not None:
        waits = ", ".join(f"p{rank} {duration(at)}" for rank, at in numbers["percentiles"].items())
        waited = percent(numbers["waited_share"])
        yield f"first batch after {duration(numbers['first_batch'])}"
        yield f"after that the loop waited {waited} of its time ({waits})"
    shares = (f"{percent(numbers[name])} {name}" for name in ("making", "sending", "waiting"))
    yield f"workers: {', '.join(shares)}"
    errors, restarts = pluralize(numbers["errors"], "error"), numbers["restarts"]
    yield f"{errors}, {numbers['skipped']} skipped, {pluralize(restarts, 'restart')}"
    if recording.counts["full"]:
        yield "the file reached its largest size: this is only the beginning of the run"
    if not recording.is_whole:
        yield "the trace has no end: the run goes on, or was killed"
    if recording.torn:
        yield f"{pluralize(recording.torn, 'event')} could not be read and left out"
