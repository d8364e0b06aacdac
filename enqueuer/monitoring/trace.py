"""A timeline in the Chrome trace event format: how the workers and the loop divide their time.

    [                                            begun by the process of the loop
    {"name": "next", "ph": "X", "ts": 17, ...},  \\  whole lines of all workers and of the loop,
    {"name": "work", "ph": "X", "ts": 12, ...},  /  in any order
    {"name": "end", "ph": "i", "ts": 99, ...}
    ]                                            ended by the process of the loop

    LoopMeter: a wait has ended, an epoch has ended --> Trace --> the row of the loop
    Meter: a wait has ended ------> workers/running.py ----> the row of a worker

The format allows for a missing end, so nothing needs to be merged. Each row has a descriptor
of its own, opened to append, and the system orders concurrent writes. The file that a crash leaves
can be opened, too. Times are those of `time.monotonic_ns`, which is one clock for all processes of
a machine. They are whole microseconds, since viewers round fractions, and spans that touch would
then overlap.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enqueuer.common.descriptors import Descriptor, close_in_children, open_no_link
from enqueuer.common.text import str_of

_log = logging.getLogger("enqueuer")

# Bytes of a file: about two million events; viewers take no more.
MAX_BYTES = 256 * 1000 * 1000
# Bytes of one write, which the system does not split.
FLUSH_BYTES = 32 * 1024
# Nanoseconds of events that a killed worker loses at most.
FLUSH_NS = 500_000_000
# Characters of an error.
_MAX_TEXT = 200
_Args = Mapping[str, Any]

# The begin of each file, by which our own are recognized.
HEAD = b'[\n{"name": "enqueuer trace", "ph": "M"'
_TAIL = b"\n]\n"

clock = time.monotonic_ns


@dataclass
class TraceTarget:
    """The file of one run; also pickled, for workers.

    Attributes:
        path: Absolute path of the file.
        file: Device and inode of the file, as another file may have taken its name.
        pid: Process id of the loop.
        over: Whether the file was ended; known in the process of the loop only.
    """

    path: str
    file: tuple[int, int]
    pid: int
    over: bool = False


class Row:
    """One row of the timeline, which divides the time of a worker, or of the loop, into spans.

    Any thread may record instants; one at a time records spans. After an error, which is logged,
    nothing more is recorded.

    Args:
        target: File of the trace.
        tid: Number of the row: that of the thread, mostly. The row whose number is that of the
            process gives the process its name, too.
        name: Name of the row.
        rank: Place of the row among the others.
    """

    def __init__(self, target: TraceTarget, tid: int, name: str, rank: int) -> None:
        # Only a trace needs it.
        from json import dumps

        self._dumps = dumps
        self._target = target
        self._name = name
        self._pid = os.getpid()
        self._ids = {"pid": self._pid, "tid": tid}
        self._buffer = bytearray()
        # End of the last span, and when what is kept is to be written.
        self._since = self._due = clock()
        self._is_full = False
        # Reentrant, for the garbage collector.
        self._lock = threading.RLock()
        self._fd: Descriptor | None = None
        try:
            self._fd = Descriptor(open_no_link(target.path, os.O_WRONLY | os.O_APPEND))
            close_in_children(self._fd)
            found = os.fstat(self._fd.fileno())
            if (found.st_dev, found.st_ino) != target.file:
                raise OSError(errno.ESTALE, "another file has taken its name", target.path)
        except OSError as error:
            self._give_up(error)
        for kind in ("process", "thread") if tid == self._pid else ("thread",):
            self._add("M", f"{kind}_name", {"name": name})
            self._add("M", f"{kind}_sort_index", {"sort_index": rank})
        # Viewers need the names first, and a worker may be killed soon.
        self.flush()

    def spent(self, name: str, args: _Args | None, until: int = 0) -> None:
        """Record what the time since the last call was spent on.

        Args:
            name: Name of the span.
            args: What the span shows; None: this time is not recorded.
            until: Time of its end, in nanoseconds of `clock()`; 0: now.
        """
        begin = self._since
        self._since = max(begin, until or clock())
        if args is not None:
            at = begin // 1000
            self._add("X", name, args, ts=at, dur=self._since // 1000 - at)

    def instant(self, name: str, args: _Args) -> None:
        """Record that something happened now."""
        self._add("i", name, args, s="p")

    def counter(self, name: str, value: int) -> None:
        """Record a number of items."""
        self._add("C", name, {"items": value})

    def _add(self, phase: str, name: str, args: _Args, **more: Any) -> None:
        """Keep an event until the next write, or write now.

        Args:
            phase: Kind of the event.
            name: Its name.
            args: Its arguments.
            more: Its other members, such as its times.
        """
        if self._is_full or not self._is_mine():
            return
        line, now = self._line(phase, name, args, **more), clock()
        with self._lock:
            if not self._buffer:
                self._due = now + FLUSH_NS
            self._buffer += line + b",\n"
            if len(self._buffer) > FLUSH_BYTES or now > self._due:
                self.flush()

    def _line(self, phase: str, name: str, args: _Args, **more: Any) -> bytes:
        event = {"name": name, "ph": phase, "ts": clock() // 1000, **self._ids, **more}
        return self._dumps({**event, "args": args}).encode()

    def flush(self) -> None:
        """Write the events that are kept; if the file is full, only that, once."""
        with self._lock:
            buffered, self._buffer = self._buffer, bytearray()
            if not buffered or self._fd is None or not self._is_mine():
                return
            if os.fstat(self._fd.fileno()).st_size > MAX_BYTES:
                self._is_full = True
                buffered[:] = self._line("i", "full", {"limit_bytes": MAX_BYTES}, s="p") + b",\n"
            self._write(buffered)

    def end(self) -> None:
        """Record the last instant, so that the file is JSON in the strict sense, and close it."""
        with self._lock:
            self.flush()
            self._write(self._line("i", "end", {}, s="p") + _TAIL)
            self._target.over = True
            self.close()

    def close(self) -> None:
        """Write the events that are kept, and close the descriptor."""
        with self._lock:
            self.flush()
            if self._fd is not None:
                self._fd.close()
                self._fd = None

    def _write(self, data: bytes | bytearray) -> None:
        if self._fd is None or not self._is_mine():
            return
        try:
            if os.write(self._fd.fileno(), data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._target.path)
        except OSError as error:
            self._give_up(error)

    def _is_mine(self) -> bool:
        """Return whether this process has opened the file, and the file is not ended."""
        return self._fd is not None and os.getpid() == self._pid and not self._target.over

    def _give_up(self, error: OSError) -> None:
        if self._fd is not None:
            self._fd.close()
            self._fd = None
        text = "nothing more of %s is recorded in the trace %s: %s; all else goes on"
        _log.warning(text, self._name, self._target.path, error)


class Trace:
    """The recording of one enqueuer, in all its runs, and the row of the loop in it.

    The meter of the loop says when it has waited; in between it works on the item that it took
    last. Called with the lock of the run, but for `instant`, which any thread may call.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        # Number of backends: while one takes over from another there are two.
        self._users = 0
        self._target: TraceTarget | None = None
        # What the span of the item shows that the loop works on; None if there is none.
        self._item: _Args | None = None
        self._row: Row

    def open(self, about: _Args) -> TraceTarget:
        """Begin the file, or go on in it for a further backend, which calls `leave` at its end.

        Args:
            about: What is known of the backend.

        Raises:
            FileExistsError: The file is there, and is no trace.
            OSError: The file cannot be made.
        """
        if self._target is None or not self._users:
            self._target = begin(self._path, self._target)
            self._row = Row(self._target, self._target.pid, "the loop", -1)
            self.instant("start", {**about, "cpus": os.cpu_count()})
        self._users += 1
        return self._target

    def leave(self) -> None:
        """End the recording of a backend; that of the last one ends the file."""
        self._users -= 1
        if not self._users:
            self.end_work()
            self._row.end()

    def instant(self, name: str, args: _Args) -> None:
        """Record that something happened now."""
        self._row.instant(name, args)

    def take(self, shard: int, number: int, epoch: int, waiting: int) -> None:
        """Record that the loop takes an item, while so many others wait."""
        self.end_work()
        self._item = {"shard": shard, "item": number, "epoch": epoch}
        self._row.counter("queue", waiting)

    def waited(self, name: str, since: int, worker: int | None) -> None:
        """Record that the loop has waited, or read an element, until now."""
        self.end_work(since)
        self._row.spent(name, {} if worker is None else {"worker": worker})

    def end_work(self, until: int = 0) -> None:
        """Record that the loop has worked on its item until a time; 0: until now."""
        self._row.spent("work", self._item, until)
        self._item = None


def begin(path: str, last: TraceTarget | None) -> TraceTarget:
    """Begin the file, or continue that of the run before.

    Args:
        path: Path of the file.
        last: File of the run before; None if there was none.

    Raises:
        FileExistsError: There is a file, and it is not a trace.
        OSError: The file cannot be created.
    """
    path = os.path.abspath(path)
    with contextlib.suppress(OSError):
        if last is not None and _reopen(path, last.file):
            return TraceTarget(path, last.file, os.getpid())
    if os.path.lexists(path):
        # A link may be of another user, who wants a file somewhere else to be replaced.
        if os.path.islink(path) or not is_trace(path):
            raise FileExistsError(
                errno.EEXIST,
                "trace= names a link, or something that is no trace of an enqueuer",
                path,
            )
        # Not emptied, as another enqueuer may still write to it.
        os.unlink(path)
    with open(path, "xb", buffering=0) as file:
        found = os.fstat(file.fileno())
        # A full disk is reported when events cannot be written.
        with contextlib.suppress(OSError):
            file.write(HEAD + f', "pid": {os.getpid()}, "args": {{"format": 1}}}},\n'.encode())
    return TraceTarget(path, (found.st_dev, found.st_ino), os.getpid())


def _reopen(path: str, last: tuple[int, int]) -> bool:
    """Remove the end of a file that this enqueuer had written; return whether it was there."""
    with open(path, "r+b", opener=open_no_link) as file:
        found = os.fstat(file.fileno())
        if (found.st_dev, found.st_ino) != last or found.st_size < len(HEAD) + len(_TAIL):
            return False
        file.seek(-len(_TAIL), os.SEEK_END)
        if file.read() != _TAIL:
            return False
        file.seek(-len(_TAIL), os.SEEK_END)
        file.truncate()
        file.write(b",\n")
        return True


def is_trace(path: str) -> bool:
    """Return whether a file is a trace of this package, or empty.

    Raises:
        OSError: It cannot be read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        return False
    with open(path, "rb") as file:
        return file.read(len(HEAD)) in (b"", HEAD)


def path_of_part(path: str, number: int, count: int) -> str:
    """Return the path of the file for one of several that share the work.

    Example:
        >>> path_of_part("runs/first.json", 1, 4)
        'runs/first.1-of-4.json'
    """
    whole, suffix = os.path.splitext(path)
    return f"{whole}.{number}-of-{count}{suffix}"


def text_of(error: BaseException) -> str:
    """Return an error in a line, also if its `__repr__` fails."""
    text = str_of(error, repr)
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."
