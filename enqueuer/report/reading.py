"""A trace -> what happened, row by row, and the numbers that come of it.

    lines -> events, each checked -> tables of whole numbers, 24 bytes a span -> Recording

What a crash has left is read as far as it goes: a line that is torn, too long, or no event, is
counted and left out. The file is read line by line, and what is kept of an event is small, so a
trace of any size fits into memory.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar

import numpy as np

from enqueuer.errors import DataFileError
from enqueuer.formats import pluralize, printable, ratio
from enqueuer.trace import HEAD

_WORKER = re.compile(r"worker (\d{1,9})\b")
_WAITS = ("wait", "read")  # of the loop: what it does not work on a batch
_MARKS = ("epoch", "error", "skipped", "restart", "reconfigured", "full")

_LONGEST_LINE = 1 << 20  # bytes; ours have a few hundred, and a file may be a single line
# Microseconds that a clock that began when the machine was started can show: ten years. One
# event with a wrong time would make all others too small to be seen.
_LATEST_US = 10 * 366 * 86_400 * 1_000_000
_LARGEST = 1 << 53  # of any other number
_LONGEST_TEXT = 1000  # characters of an error or a name
_MOST_MARKS = 1000  # of each kind that are kept, the earliest; all are counted

T = TypeVar("T")


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


class Table(Generic[T]):
    """Rows of whole numbers that are kept in 8 bytes each, and made into objects one by one.

    Args:
        make: Makes an object of the numbers of a row.
        columns: How many numbers a row has.
    """

    def __init__(self, make: Callable[..., T], columns: int) -> None:
        self._make = make
        self._columns = [array("q") for _ in range(columns)]

    def __len__(self) -> int:
        return len(self._columns[0])

    def __iter__(self) -> Iterator[T]:
        return map(self._make, *self._columns)

    def add(self, *numbers: int) -> None:
        """Append a row."""
        for column, number in zip(self._columns, numbers, strict=True):
            column.append(number)

    def take(self, other: Table[T]) -> None:
        """Append the rows of another table."""
        for column, more in zip(self._columns, other._columns, strict=True):
            column.extend(more)

    def sort(self) -> None:
        """Order the rows by their first number; those that have the same keep their order."""
        if len(self):
            order = np.argsort(np.frombuffer(self._columns[0], np.int64), kind="stable")
            self._columns = [
                array("q", np.frombuffer(column, np.int64)[order].tobytes())
                for column in self._columns
            ]

    def shift(self, by: int, columns: int) -> None:
        """Subtract a number from the first columns."""
        for at in range(columns if len(self) else 0):
            moved = np.frombuffer(self._columns[at], np.int64) - by
            self._columns[at] = array("q", moved.tobytes())


# What a span is stored as; the last two are waits that ended an epoch, and brought no item.
_NAMES = ("next", "send", "wait", "work", "read", "wait", "read")
_CODES = {name: code for code, name in reversed(list(enumerate(_NAMES)))}
_END = 3  # from the code of a wait to that of one that brought no item
_KINDS = {"next": "make", "send": "send", "wait": "wait"}
_WORKERS_ONLY = ("next", "send")


def _loop_span(begin: int, end: int, code: int) -> Span:
    return Span(_NAMES[code], begin, end)


def _worker_span(begin: int, end: int, code: int) -> Span:
    return Span(_KINDS[_NAMES[code]], begin, end)


def _level(at: int, items: int) -> tuple[int, int]:
    return at, items


@dataclass
class Row:
    """One worker, its successors included.

    Attributes:
        number: Of the worker.
        name: The last one, if it was replaced.
        items: How many it has sent.
        spans: In the order of their begins; a wait may lie in a send.
        bytes: Of its items, as far as known.
    """

    number: int
    name: str
    items: int = 0
    bytes: int = 0
    spans: Table[Span] = field(default_factory=lambda: Table(_worker_span, 3))

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
        items: That the loop took.
        waits: For each of them but the first of each start, how long it had waited, or read
            elements.
        first: When it had the first item; None: it took none.
        waited: How long the loop waited, or read elements, after the first item of each start.
        worked: How long it did something else, likewise.
        measured: What the enqueuer itself said at each stop: items, and how long its loop waited
            and worked after the first.
        fill: How many items waited, from when on.
        marks: What else happened; of each kind the first thousand.
        counts: How often each kind of mark happened.
        bottleneck: As the enqueuer itself found it at its last stop; empty if it did not.
        is_whole: Whether the enqueuer was stopped.
        torn: Lines that cannot be read, and events that make no sense.
    """

    path: str
    about: dict[str, Any] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    end: int = 0
    rows: list[Row] = field(default_factory=list)
    loop: Table[Span] = field(default_factory=lambda: Table(_loop_span, 3))
    items: int = 0
    waits: array[int] = field(default_factory=lambda: array("q"))
    first: int | None = None
    waited: int = 0
    worked: int = 0
    measured: list[tuple[int, int, int]] = field(default_factory=list)
    fill: Table[tuple[int, int]] = field(default_factory=lambda: Table(_level, 2))
    marks: list[Mark] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    bottleneck: str = ""
    is_whole: bool = False
    torn: int = 0


@dataclass(frozen=True)
class Numbers:
    """The totals of a recording; times in seconds, shares from 0 to 1.

    Rate, waits and their share are those of `Stats`: of the loop's time after the first item of
    each start, without what was between two epochs.

    Attributes:
        items: That the loop took.
        seconds: From the start to the end.
        items_per_second: How many the loop took after the first, by its time after that.
        first_batch: From the start to the first item; None: there was none.
        waited: For how long the loop waited, or read elements, after the first item.
        waited_share: Of the loop's time after the first item.
        percentiles: Of the waits after the first item: 50, 90, 99.
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
    events = _Events()
    with _opened(path) as file:
        for line in _lines(file):
            line = line.strip().rstrip(b",")
            if line in (b"[", b"]", b""):
                recording.is_whole = line == b"]"
                continue
            try:
                events.add(json.loads(line))
            except (ValueError, KeyError, TypeError, RecursionError):
                recording.torn += 1
            else:
                recording.is_whole = False  # what ended is going on
    if events.first is None:
        raise DataFileError(f"{path}: nothing was recorded", path)
    events.into(recording, events.first)
    return recording


def _opened(path: str) -> BinaryIO:
    """Open a trace, or raise DataFileError that says why that is none."""
    try:
        # without O_NONBLOCK a pipe that nobody writes to would be waited for
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    except FileNotFoundError:
        raise DataFileError(f"{path}: no such file", path) from None
    except OSError as error:
        raise DataFileError(f"{path}: cannot be read: {error.strerror}", path) from error
    try:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise DataFileError(f"{path}: a trace is an ordinary file, and no pipe", path)
        if file.read(len(HEAD)) != HEAD:
            raise DataFileError(
                f"{path}: not a trace; trace='run.json' of an enqueuer writes one", path
            )
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; of one that is too long, something that is no event."""
    while line := file.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
            while (rest := file.readline(_LONGEST_LINE)) and not rest.endswith(b"\n"):
                pass
            line = b"too long"
        yield line


class _Track:
    """What one thread of a process did."""

    def __init__(self) -> None:
        self.spans = Table(_loop_span, 3)
        self.items = self.bytes = 0
        self.is_worker = False


class _Events:
    """The events of a trace, in the order of the file.

    Attributes:
        first: The time of the earliest event; None: there is none.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._last = 0
        self._tracks: dict[tuple[int, int | None], _Track] = {}
        self._rows: dict[int, Row] = {}
        self._numbers: dict[tuple[int, int | None], int] = {}  # of the worker of each track
        self._fill = Table(_level, 2)
        self._starts: list[tuple[int, dict[str, Any]]] = []
        self._bottleneck = (0, "")
        self._measured: list[tuple[int, int, int]] = []
        self._marks: dict[str, list[Mark]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, event: Any) -> None:
        """Note an event.

        Raises:
            KeyError: Something is missing.
            TypeError: Something has the wrong type.
            ValueError: A number is out of its range.
        """
        phase, name, args = event["ph"], event.get("name", ""), event.get("args", {})
        if not isinstance(phase, str) or not isinstance(name, str) or not isinstance(args, dict):
            raise TypeError("phases and names are texts, and args are a dict")
        where = _number(event["pid"]), _number(event["tid"]) if "tid" in event else None
        at = _time(event["ts"]) if "ts" in event else None
        until = at
        if phase == "M":
            self._name(name, where, args)
        elif phase == "X":
            at = _time(event["ts"])
            until = _time(at + _time(event["dur"]))
            self._span(name, where, at, until, args)
        elif phase == "C":
            self._fill.add(_time(event["ts"]), _number(args.get("items", 0)))
        elif phase == "i":
            self._note(name, _time(event["ts"]), args)
        if at is not None and until is not None:
            self.first = at if self.first is None else min(at, self.first)
            self._last = max(until, self._last)

    def into(self, recording: Recording, zero: int) -> None:
        """Put all of it into a recording, in the order of time, from `zero` on."""
        recording.end = self._last - zero
        for where, track in self._tracks.items():
            row = self._rows.get(self._numbers.get(where, -1))
            if row is not None:
                row.items += track.items
                row.bytes += track.bytes
                row.spans.take(track.spans)
            elif not track.is_worker:  # else one whose name was lost
                recording.loop.take(track.spans)
        self._tracks.clear()
        recording.rows = sorted(self._rows.values(), key=lambda row: row.number)
        recording.fill = self._fill
        for spans in (recording.loop, *(row.spans for row in recording.rows)):
            spans.sort()
            spans.shift(zero, columns=2)
        recording.fill.sort()
        recording.fill.shift(zero, columns=1)
        self._starts.sort(key=lambda start: start[0])
        recording.starts = [at - zero for at, _ in self._starts]
        recording.about = next((args for _, args in self._starts if args), {})
        recording.bottleneck, recording.measured = self._bottleneck[1], self._measured
        marks = [mark for kind in self._marks.values() for mark in _earliest(kind)]
        marks.sort(key=lambda mark: mark.at)
        recording.marks = [mark._replace(at=mark.at - zero) for mark in marks]
        recording.counts = self._counts
        _count_waits(recording)

    def _name(self, name: str, where: tuple[int, int | None], args: dict[str, Any]) -> None:
        if name not in ("thread_name", "process_name"):
            return
        text = _text(args.get("name", ""))
        found = _WORKER.match(text)
        if found is None:
            return
        row = self._rows.setdefault(int(found[1]), Row(int(found[1]), ""))
        if name == "process_name" or "(" in text:
            row.name = text
        if name == "thread_name":
            self._numbers[where] = row.number

    def _span(
        self, name: str, where: tuple[int, int | None], at: int, until: int, args: dict[str, Any]
    ) -> None:
        if name not in _CODES:
            return
        size = _number(args.get("bytes", 0))
        track = self._tracks.setdefault(where, _Track())
        is_end = name in _WAITS and bool(args.get("end"))
        track.spans.add(at, until, _CODES[name] + (_END if is_end else 0))
        if name in _WORKERS_ONLY:
            track.is_worker = True
        if name == "send":
            track.items += 1
            track.bytes += size

    def _note(self, name: str, at: int, args: dict[str, Any]) -> None:
        if name == "start":
            self._starts.append((at, {_text(key): _plain(args[key]) for key in args}))
        elif name == "bottleneck":
            text = _text(args.get("text", ""))
            if "items" in args:
                names = ("items", "waiting_us", "working_us")
                items, waiting, working = (_number(args[name]) for name in names)
                self._measured.append((items, waiting, working))
            if at >= self._bottleneck[0]:
                self._bottleneck = at, text
        elif name in _MARKS:
            kept = self._marks.setdefault(name, [])
            kept.append(Mark(name, at, _words(name, args)))
            self._counts[name] += 1
            if len(kept) > 2 * _MOST_MARKS:
                kept[:] = _earliest(kept)


def _earliest(marks: list[Mark]) -> list[Mark]:
    return sorted(marks, key=lambda mark: mark.at)[:_MOST_MARKS]


def _count_waits(recording: Recording) -> None:
    """Add up how long the loop waited before it had each item, and how long it worked."""
    starts, pending = deque(recording.starts), 0
    is_first = True
    begins, ends, codes = recording.loop._columns
    for begin, end, code in zip(begins, ends, codes, strict=True):
        if starts and begin >= starts[0]:
            starts.popleft()
            is_first, pending = True, 0
        took = end - begin
        if _NAMES[code] == "work":
            recording.items += 1
            if is_first:
                recording.first = begin if recording.first is None else recording.first
            else:
                recording.waits.append(pending)
            is_first, pending = False, 0
            recording.worked += took
        else:
            pending += took if code < _END + _CODES["wait"] else 0
            recording.waited += 0 if is_first else took


def _time(value: Any) -> int:
    return _number(value, _LATEST_US)


def _number(value: Any, most: int = _LARGEST) -> int:
    if type(value) is not int:
        raise TypeError("not a whole number")
    if not 0 <= value <= most:
        raise ValueError("out of its range")
    return value


def _plain(value: Any) -> str | int | float | None:
    """Return a text or a number; raise TypeError if it is anything else."""
    if value is None or isinstance(value, float):
        return value
    return _text(value) if isinstance(value, str) else _number(int(value))


def _text(value: Any) -> str:
    """Return a text that may be shown; raise TypeError if it is anything else."""
    if not isinstance(value, (str, int, float, type(None))):
        raise TypeError("not a text")
    return printable(str(value)[:_LONGEST_TEXT])


def _words(name: str, args: dict[str, Any]) -> str:
    told = {key: _text(value) for key, value in args.items()}
    where = [f"{key} {told[key]}" for key in ("shard", "item") if key in told]
    match name:
        case "epoch":
            return f"epoch {told.get('epoch')} began"
        case "error" | "skipped":
            return f"{told.get('error')} in {told.get('worker')}, {', '.join(where)}"
        case "restart":
            return f"a worker was replaced (restart {told.get('restarts')})"
        case "reconfigured":
            return f"from here on {pluralize(_number(args.get('workers', 0)), 'worker')}"
        case _:
            return "the file was as large as it may be; nothing more was recorded"


def within_sends(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the waits that lie in a send."""
    until = 0
    for span in spans:
        if span.kind == "send":
            until = span.end
        elif span.kind == "wait" and span.end <= until:
            yield span


# --- numbers ------------------------------------------------------------------------------------


def count(recording: Recording) -> Numbers:
    """Add up what a recording tells."""
    seconds = recording.end / 1e6
    first = recording.first
    start = recording.starts[0] if recording.starts else 0
    later, waited, worked = _after_the_first(recording)
    times = [row.times() for row in recording.rows]
    by_kind = {kind: sum(each[kind] for each in times) for kind in ("make", "send", "wait")}
    return Numbers(
        items=recording.items,
        seconds=seconds,
        items_per_second=1e6 * ratio(later, waited + worked),
        first_batch=None if first is None else (first - start) / 1e6,
        waited=waited / 1e6,
        waited_share=ratio(waited, waited + worked),
        percentiles={p: percentile(recording.waits, p) / 1e6 for p in (50, 90, 99)},
        making=ratio(by_kind["make"], sum(by_kind.values())),
        sending=ratio(by_kind["send"], sum(by_kind.values())),
        waiting=ratio(by_kind["wait"], sum(by_kind.values())),
        errors=recording.counts["error"],
        skipped=recording.counts["skipped"],
        restarts=recording.counts["restart"],
    )


def _after_the_first(recording: Recording) -> tuple[int, int, int]:
    """Return how many items the loop took after the first, how long it waited, and worked.

    As the enqueuer has measured it, since that is what its bottleneck says, too; of a run that did
    not end by the spans, in which recording itself takes a little time.
    """
    if recording.measured and len(recording.measured) == len(recording.starts):
        items, waited, worked = zip(*recording.measured, strict=True)
        return sum(max(0, count - 1) for count in items), sum(waited), sum(worked)
    return len(recording.waits), recording.waited, recording.worked


def percentile(values: Sequence[int], percent: int) -> int:
    """Return the smallest value that so many percent do not exceed; 0 if there are none.

    Example:
        >>> percentile(range(1, 101), 90), percentile([], 50)
        (90, 0)
    """
    if not values:
        return 0
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
