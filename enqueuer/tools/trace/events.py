"""The events of a trace, collected in the order of the file and sorted into a recording."""

from __future__ import annotations

import re
from collections import Counter, deque
from typing import Any, TypeAlias

from enqueuer.tools.trace.fields import event_text, setting, shown_text, time_us, whole_number
from enqueuer.tools.trace.recording import (
    CODES,
    NAMES,
    NO_ITEM,
    Mark,
    Recording,
    Row,
    levels,
    loop_spans,
)

# A worker, or one of its threads.
_WORKER = re.compile(r"worker (\d{1,9})(?:\.(\d{1,9}))?\b")
# Spans of the loop in which it does not work on a batch.
_WAITS = ("wait", "read")
_WORKERS_ONLY = ("next", "send")
_MARKS = ("epoch", "error", "skipped", "restart", "reconfigured", "full")
# Of each kind the earliest are kept, and all are counted.
_MOST_MARKS = 1000

# The process and thread that an event is of.
ThreadKey: TypeAlias = "tuple[int, int | None]"


class _Track:
    """The spans of one thread of a process."""

    def __init__(self) -> None:
        self.spans = loop_spans()
        self.items = self.bytes = 0
        self.is_worker = False


class Events:
    """The events of a trace, in the order of the file.

    Attributes:
        first: Time of the earliest event; None if there is none.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._last = 0
        self._tracks: dict[ThreadKey, _Track] = {}
        # By the index of the worker and that of its thread, or -1.
        self._rows: dict[tuple[int, int], Row] = {}
        self._keys: dict[ThreadKey, tuple[int, int]] = {}
        self._queue_depth = levels()
        self._starts: list[tuple[int, dict[str, Any]]] = []
        self._bottleneck = (0, "")
        self._measured: list[tuple[int, int, int]] = []
        self._marks: dict[str, list[Mark]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, event: Any) -> None:
        """Add an event.

        Raises:
            KeyError: A field is missing.
            TypeError: A field has the wrong type.
            ValueError: A number is out of its range.
        """
        phase, name, args = event["ph"], event.get("name", ""), event.get("args", {})
        if not isinstance(phase, str) or not isinstance(name, str) or not isinstance(args, dict):
            raise TypeError("phases and names are texts, and args are a dict")
        place = whole_number(event["pid"]), whole_number(event["tid"]) if "tid" in event else None
        begin = time_us(event["ts"]) if "ts" in event else None
        end = begin
        if phase == "M":
            self._add_name(name, place, args)
        elif phase == "X":
            begin = time_us(event["ts"])
            end = time_us(begin + time_us(event["dur"]))
            self._add_span(name, place, begin, end, args)
        elif phase == "C":
            self._queue_depth.add(time_us(event["ts"]), whole_number(args.get("items", 0)))
        elif phase == "i":
            self._add_instant(name, time_us(event["ts"]), args)
        if begin is not None and end is not None:
            self.first = begin if self.first is None else min(begin, self.first)
            self._last = max(end, self._last)

    def into(self, recording: Recording, zero: int) -> None:
        """Move all events into a recording, in the order of time; `zero` is its begin."""
        recording.end = self._last - zero
        self._move_spans(recording, zero)
        recording.queue_depth = self._queue_depth
        recording.queue_depth.sort()
        recording.queue_depth.shift(zero, columns=1)
        self._starts.sort(key=lambda start: start[0])
        recording.starts = [at - zero for at, _ in self._starts]
        recording.about = next((args for _, args in self._starts if args), {})
        recording.bottleneck, recording.measured = self._bottleneck[1], self._measured
        marks = [mark for kind in self._marks.values() for mark in _earliest(kind)]
        marks.sort(key=lambda mark: mark.at)
        recording.marks = [mark._replace(at=mark.at - zero) for mark in marks]
        recording.counts = self._counts
        _count_waits(recording)

    def _move_spans(self, recording: Recording, zero: int) -> None:
        for place, track in self._tracks.items():
            row = self._rows.get(self._keys.get(place, (-1, -1)))
            if row is not None:
                row.items += track.items
                row.bytes += track.bytes
                row.spans.extend(track.spans)
            elif not track.is_worker:
                # A worker without a row is one whose name was lost; any other track is the loop's.
                recording.loop.extend(track.spans)
        self._tracks.clear()
        # The row of a worker is empty if its threads have rows.
        by_threads = {(worker, -1) for worker, thread in self._rows if thread >= 0}
        recording.rows = [self._rows[key] for key in sorted(self._rows.keys() - by_threads)]
        for spans in (recording.loop, *(row.spans for row in recording.rows)):
            spans.sort()
            spans.shift(zero, columns=2)

    def _add_name(self, name: str, place: ThreadKey, args: dict[str, Any]) -> None:
        if name not in ("thread_name", "process_name"):
            return
        text = shown_text(args.get("name", ""))
        found = _WORKER.match(text)
        if found is None:
            return
        worker, thread = int(found[1]), int(found[2]) if found[2] else None
        key = worker, -1 if thread is None else thread
        row = self._rows.setdefault(key, Row(worker, "", thread=thread))
        if name == "process_name" or "(" in text:
            row.name = text
        if name == "thread_name":
            self._keys[place] = key

    def _add_span(
        self, name: str, place: ThreadKey, begin: int, end: int, args: dict[str, Any]
    ) -> None:
        if name not in CODES:
            return
        size = whole_number(args.get("bytes", 0))
        track = self._tracks.setdefault(place, _Track())
        brought_no_item = name in _WAITS and bool(args.get("end"))
        track.spans.add(begin, end, CODES[name] + (NO_ITEM if brought_no_item else 0))
        if name in _WORKERS_ONLY:
            track.is_worker = True
        if name == "send":
            track.items += 1
            track.bytes += size

    def _add_instant(self, name: str, at: int, args: dict[str, Any]) -> None:
        if name == "start":
            self._starts.append((at, {shown_text(key): setting(args[key]) for key in args}))
        elif name == "bottleneck":
            self._add_bottleneck(at, args)
        elif name in _MARKS:
            kept = self._marks.setdefault(name, [])
            kept.append(Mark(name, at, event_text(name, args)))
            self._counts[name] += 1
            if len(kept) > 2 * _MOST_MARKS:
                kept[:] = _earliest(kept)

    def _add_bottleneck(self, at: int, args: dict[str, Any]) -> None:
        text = shown_text(args.get("text", ""))
        if "items" in args:
            names = ("items", "waiting_us", "working_us")
            items, waiting, working = (whole_number(args[name]) for name in names)
            self._measured.append((items, waiting, working))
        if at >= self._bottleneck[0]:
            self._bottleneck = at, text


def _earliest(marks: list[Mark]) -> list[Mark]:
    return sorted(marks, key=lambda mark: mark.at)[:_MOST_MARKS]


def _count_waits(recording: Recording) -> None:
    """Add up how long the loop waited before it had each item, and how long it worked."""
    starts, pending = deque(recording.starts), 0
    is_first = True
    for begin, end, code in recording.loop.rows():
        if starts and begin >= starts[0]:
            starts.popleft()
            is_first, pending = True, 0
        took = end - begin
        if NAMES[code] == "work":
            recording.items += 1
            if is_first:
                recording.first = begin if recording.first is None else recording.first
            else:
                recording.waits.append(pending)
            is_first, pending = False, 0
            recording.worked += took
        else:
            pending += took if code < NO_ITEM + CODES["wait"] else 0
            recording.waited += 0 if is_first else took
