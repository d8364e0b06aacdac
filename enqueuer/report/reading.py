"""A trace -> what happened, row by row, and the numbers that come of it.

What a crash has left is read as far as it goes: a line that is torn is counted and left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from enqueuer.errors import DataFileError
from enqueuer.formats import many, share_of
from enqueuer.trace import HEAD

_WORKER = re.compile(r"worker (\d+)\b")
_WAITS = ("wait", "read")  # of the loop: what it does not work on a batch
_MARKS = ("epoch", "error", "skipped", "restart", "reconfigured", "full")


class Span(NamedTuple):
    """What was done from when to when, in microseconds from the begin of the trace."""

    kind: str
    begin: int
    end: int


class Mark(NamedTuple):
    """What happened at a time, in words."""

    kind: str
    at: int
    text: str


@dataclass
class Row:
    """One worker, its successors included.

    Attributes:
        number: Of the worker.
        name: The last one, if it was replaced.
        items: How many it has sent.
        spans: In the order of their begins; a wait may lie in a send.
        bytes: Of the arrays and byte strings in its items, as far as known.
    """

    number: int
    name: str
    items: int = 0
    bytes: int = 0
    spans: list[Span] = field(default_factory=list)

    def times(self) -> dict[str, int]:
        """Return for how many microseconds it did what: make, send, wait."""
        sums = dict.fromkeys(("make", "send", "wait"), 0)
        for kind, begin, end in self.spans:
            sums[kind] += end - begin
        inner = sum(end - begin for kind, begin, end in within_sends(self.spans))
        sums["send"] -= inner
        return sums


@dataclass
class Recording:
    """All that a trace tells, in microseconds from its begin.

    Attributes:
        path: Of the file.
        about: What the first start said of the enqueuer.
        starts: When it was started, again and again perhaps.
        end: The last that is known.
        rows: Of the workers.
        loop: The spans of the loop.
        waits: For each item that the loop took, how long it had waited, or read elements.
        first: When it had the first item; None: it took none.
        fill: How many items waited, from when on.
        marks: What else happened.
        verdict: What binds, as the enqueuer itself said at its last stop; empty: it did not.
        is_whole: Whether the enqueuer was stopped.
        torn: Lines that cannot be read.
    """

    path: str
    about: dict[str, Any] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    end: int = 0
    rows: list[Row] = field(default_factory=list)
    loop: list[Span] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    first: int | None = None
    fill: list[tuple[int, int]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    verdict: str = ""
    is_whole: bool = False
    torn: int = 0


@dataclass(frozen=True)
class Numbers:
    """The totals of a recording; times in seconds, shares from 0 to 1.

    Attributes:
        items: That the loop took.
        seconds: From the start to the end.
        items_per_second: Over all of that; 0 if it took no time.
        first_batch: From the start to the first item; None: there was none.
        waited: For how long the loop waited, or read elements, the first item included.
        waited_share: Of the loop's time after the first item.
        percentiles: Of the waits: 50, 90, 99.
        making: Of the workers' time, the share of the user's code.
        sending: Of encoding and copying.
        waiting: Of waits for room, for an epoch or for a task.
        errors: That were raised.
        skipped: Errors that were skipped.
        restarts: Of workers.
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


def read(path: str) -> Recording:
    """Read a trace.

    Raises:
        DataFileError: It is missing, or no trace of an enqueuer.
    """
    recording = Recording(path)
    events = list(_events(recording))
    times = [event["ts"] for event in events if "ts" in event]
    if not times:
        raise DataFileError(f"{path}: nothing was recorded", path)
    zero = min(times)
    recording.end = max(event.get("ts", zero) + event.get("dur", 0) for event in events) - zero
    rows = _rows(events)
    events.sort(key=lambda event: event.get("ts", 0))  # stable: what is outside comes first
    waited = 0
    for event in events:
        phase, name, at = event["ph"], str(event.get("name")), event.get("ts", zero) - zero
        args = event.get("args", {})
        row = rows.get((event.get("pid"), event.get("tid")))
        if phase == "X" and row is not None:
            _add(row, name, at, event["dur"], args)
        elif phase == "X":
            recording.loop.append(Span(name, at, at + event["dur"]))
            if name == "work":
                recording.waits.append(waited)
                recording.first = at if recording.first is None else recording.first
                waited = 0
            elif name in _WAITS and not args.get("end"):
                waited += event["dur"]
        elif phase == "C":
            recording.fill.append((at, args.get("items", 0)))
        elif phase == "i":
            _note(recording, name, at, args)
    recording.rows = sorted({row.number: row for row in rows.values()}.values(), key=_number)
    return recording


def _events(recording: Recording) -> Iterator[dict[str, Any]]:
    """Yield what the lines of a trace say, those that are whole."""
    path = recording.path
    try:
        with open(path, "rb") as file:
            head = file.read(len(HEAD))
    except FileNotFoundError:
        raise DataFileError(f"{path}: no such file", path) from None
    except OSError as error:
        raise DataFileError(f"{path}: cannot be read: {error.strerror}", path) from error
    if head != HEAD:
        raise DataFileError(
            f"{path}: not a trace; trace='run.json' of an enqueuer writes one", path
        )
    with open(path, "rb") as file:
        for line in file:
            line = line.strip().rstrip(b",")
            if line in (b"[", b"]", b""):
                recording.is_whole = line == b"]"
                continue
            event = _event(line)
            if event is None:
                recording.torn += 1
            else:
                recording.is_whole = False  # what ended is going on
                yield event


def _event(line: bytes) -> dict[str, Any] | None:
    """Return what a line tells; None if it is torn, or somebody else's."""
    try:
        event: dict[str, Any] = json.loads(line)
        span = event["ts"] + event["dur"] if event["ph"] == "X" else event.get("ts", 0)
        is_event = isinstance(event["pid"] + span, int) and isinstance(event.get("args", {}), dict)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return event if is_event else None


def _rows(events: Sequence[dict[str, Any]]) -> dict[tuple[Any, Any], Row]:
    """Return the row of each worker by process and thread; successors share one."""
    by_number: dict[int, Row] = {}
    rows = {}
    for event in events:
        if event["ph"] != "M" or event.get("name") not in ("thread_name", "process_name"):
            continue
        name = str(event.get("args", {}).get("name"))
        found = _WORKER.match(name)
        if found is None:
            continue
        row = by_number.setdefault(int(found[1]), Row(int(found[1]), ""))
        if event["name"] == "process_name" or "(" in name:
            row.name = name
        if event["name"] == "thread_name":
            rows[event["pid"], event.get("tid")] = row
    return rows


def _number(row: Row) -> int:
    return row.number


_KINDS = {"next": "make", "send": "send", "wait": "wait"}


def _add(row: Row, name: str, at: int, duration: int, args: dict[str, Any]) -> None:
    if name not in _KINDS:
        return
    row.spans.append(Span(_KINDS[name], at, at + duration))
    if name == "send":
        row.items += 1
        row.bytes += args.get("bytes", 0)


def within_sends(spans: Sequence[Span]) -> Iterator[Span]:
    """Yield the waits that lie in a send."""
    until = 0
    for span in spans:
        if span.kind == "send":
            until = span.end
        elif span.kind == "wait" and span.end <= until:
            yield span


def _note(recording: Recording, name: Any, at: int, args: dict[str, Any]) -> None:
    if name == "start":
        recording.starts.append(at)
        recording.about = recording.about or args
    elif name == "verdict":
        recording.verdict = str(args.get("text", ""))
    elif name in _MARKS:
        where = [f"{key} {args[key]}" for key in ("shard", "item") if key in args]
        words = {
            "epoch": f"epoch {args.get('epoch')} began",
            "error": f"{args.get('error')} in {args.get('worker')}, {', '.join(where)}",
            "skipped": f"{args.get('error')} in {args.get('worker')}, {', '.join(where)}",
            "restart": f"a worker was replaced (restart {args.get('restarts')})",
            "reconfigured": f"from here on {many(args.get('workers', 0), 'worker')}",
            "full": "the file was as large as it may be; nothing more was recorded",
        }
        recording.marks.append(Mark(name, at, words[name]))


# --- numbers ------------------------------------------------------------------------------------


def count(recording: Recording) -> Numbers:
    """Add up what a recording tells."""
    seconds = recording.end / 1e6
    items = len(recording.waits)
    first = recording.first
    start = recording.starts[0] if recording.starts else 0
    later = {"work": 0, "wait": 0, "read": 0}
    for kind, begin, end in recording.loop:
        if first is not None and begin >= first:
            later[kind] = later.get(kind, 0) + end - begin
    times = [row.times() for row in recording.rows]
    by_kind = {kind: sum(each[kind] for each in times) for kind in ("make", "send", "wait")}
    kinds = [mark.kind for mark in recording.marks]
    return Numbers(
        items=items,
        seconds=seconds,
        items_per_second=items / seconds if seconds else 0.0,
        first_batch=None if first is None else (first - start) / 1e6,
        waited=sum(end - begin for kind, begin, end in recording.loop if kind in _WAITS) / 1e6,
        waited_share=share_of(sum(later[kind] for kind in _WAITS), sum(later.values())),
        percentiles={p: percentile(recording.waits, p) / 1e6 for p in (50, 90, 99)},
        making=share_of(by_kind["make"], sum(by_kind.values())),
        sending=share_of(by_kind["send"], sum(by_kind.values())),
        waiting=share_of(by_kind["wait"], sum(by_kind.values())),
        errors=kinds.count("error"),
        skipped=kinds.count("skipped"),
        restarts=kinds.count("restart"),
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
