"""The events of a run, row by row: 24 bytes a span, so that a trace of any size fits."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")


class Span(NamedTuple):
    """An activity from one time to another, in microseconds from the begin of the trace."""

    kind: str
    begin: int
    end: int


class Mark(NamedTuple):
    """An event at one time, in words."""

    kind: str
    at: int
    text: str


class Table(Generic[T]):
    """Rows of whole numbers, kept in 8 bytes each and made into objects one by one.

    Args:
        make: Makes an object of the numbers of a row.
        columns: Number of numbers in a row.
    """

    def __init__(self, make: Callable[..., T], columns: int) -> None:
        self._make = make
        self._columns = [array("q") for _ in range(columns)]

    def __len__(self) -> int:
        return len(self._columns[0])

    def __iter__(self) -> Iterator[T]:
        return map(self._make, *self._columns)

    def rows(self) -> Iterator[tuple[int, ...]]:
        """Yield the rows as they are kept."""
        return zip(*self._columns, strict=True)

    def add(self, *numbers: int) -> None:
        """Append a row."""
        for column, number in zip(self._columns, numbers, strict=True):
            column.append(number)

    def extend(self, other: Table[T]) -> None:
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
        for index in range(columns if len(self) else 0):
            moved = np.frombuffer(self._columns[index], np.int64) - by
            self._columns[index] = array("q", moved.tobytes())


# A span is stored with the index of its name. A wait that ended an epoch, and brought no item, has
# an index of its own.
NAMES = ("next", "send", "wait", "work", "read", "wait", "read")
CODES = {name: code for code, name in reversed(list(enumerate(NAMES)))}
# Distance from the index of a wait to that of one that brought no item.
NO_ITEM = 3
WORKER_KINDS = ("make", "send", "wait")
_KIND_OF_NAME = {"next": "make", "send": "send", "wait": "wait"}


def loop_spans() -> Table[Span]:
    """Return an empty table for spans of the loop; their kinds are their names."""
    return Table(lambda begin, end, code: Span(NAMES[code], begin, end), columns=3)


def worker_spans() -> Table[Span]:
    """Return an empty table for spans of a worker; their kinds are `WORKER_KINDS`."""
    return Table(lambda begin, end, code: Span(_KIND_OF_NAME[NAMES[code]], begin, end), columns=3)


def levels() -> Table[tuple[int, int]]:
    """Return an empty table for a number that changes: a time, and the number from then on."""
    return Table(lambda at, items: (at, items), columns=2)


def within_sends(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the waits that lie in a send."""
    until = 0
    for span in spans:
        if span.kind == "send":
            until = span.end
        elif span.kind == "wait" and span.end <= until:
            yield span


@dataclass
class Row:
    """One worker and its replacements, or one of its threads.

    Attributes:
        number: Index of the worker.
        name: Name of the last replacement.
        items: Number of items that it has sent.
        bytes: Size of these items, as far as it is known.
        spans: Its spans in the order of their begins; a wait may lie in a send.
        thread: Index of the thread; None for a worker that has one.
    """

    number: int
    name: str
    items: int = 0
    bytes: int = 0
    spans: Table[Span] = field(default_factory=worker_spans)
    thread: int | None = None

    @property
    def label(self) -> str:
        """Short name of the row."""
        return f"worker {self.number}" + ("" if self.thread is None else f".{self.thread}")

    def times(self) -> dict[str, int]:
        """Return the microseconds of each kind of `WORKER_KINDS`."""
        sums = dict.fromkeys(WORKER_KINDS, 0)
        for kind, begin, end in self.spans:
            sums[kind] += end - begin
        inner = sum(end - begin for kind, begin, end in within_sends(self.spans))
        sums["send"] -= inner
        return sums


@dataclass
class Recording:
    """The content of a trace, in microseconds from its begin.

    Attributes:
        path: Path of the file.
        about: Settings of the enqueuer, from the first start.
        starts: Times of the starts.
        end: Latest time of an event.
        rows: The workers.
        loop: Spans of the loop.
        items: Number of items that the loop took.
        waits: How long the loop waited, or read elements, for each item but the first of each
            start.
        first: Time at which the loop had the first item; None if it took none.
        waited: How long the loop waited, or read elements, after the first item of each start.
        worked: How long the loop did something else after the first item of each start.
        measured: The enqueuer's own measurements at each stop: number of items, and how long the
            loop waited and worked after the first.
        queue_depth: Number of waiting items, and the time from which on it is true.
        marks: All other events; the first thousand of each kind.
        counts: Number of events of each kind.
        bottleneck: The bottleneck that the enqueuer found at its last stop; empty if it found none.
        is_whole: Whether the enqueuer was stopped.
        torn: Number of lines that cannot be read, and of events that make no sense.
    """

    path: str
    about: dict[str, Any] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    end: int = 0
    rows: list[Row] = field(default_factory=list)
    loop: Table[Span] = field(default_factory=loop_spans)
    items: int = 0
    waits: array[int] = field(default_factory=lambda: array("q"))
    first: int | None = None
    waited: int = 0
    worked: int = 0
    measured: list[tuple[int, int, int]] = field(default_factory=list)
    queue_depth: Table[tuple[int, int]] = field(default_factory=levels)
    marks: list[Mark] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    bottleneck: str = ""
    is_whole: bool = False
    torn: int = 0
