"""A timeline in the Chrome trace event format: one file to which all workers append.

    [                                            begun by the process of the loop
    {"name": "next", "ph": "X", "ts": 17, ...},  \\  whole lines of all workers and of the loop,
    {"name": "work", "ph": "X", "ts": 12, ...},  /  in any order
    {"name": "stop", "ph": "i", "ts": 99, ...}
    ]                                            ended by the process of the loop

The format allows for a missing end, so nothing needs to be merged. Each writer has a descriptor
of its own, opened to append, and the system orders concurrent writes. The file that a crash leaves
can be opened, too. Times are those of `time.monotonic_ns`, which is one clock for all processes of
a machine. They are whole microseconds, since viewers round fractions, and spans that touch would
then overlap.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enqueuer.common.descriptors import Descriptor, close_in_children, open_no_link
from enqueuer.common.text import str_of

# Bytes of a file: about two million events; viewers take no more.
MOST_BYTES = 256 * 1000 * 1000
# Bytes of one write, which the system does not split.
FLUSH_BYTES = 32 * 1024
# Nanoseconds of events that a killed worker loses at most.
FLUSH_NS = 500_000_000
# Characters of an error.
_MOST_TEXT = 200
_Args = Mapping[str, Any]
_NO_ARGS: _Args = {}

# The begin of each file, by which our own are recognized.
HEAD = b'[\n{"name": "enqueuer trace", "ph": "M"'
_TAIL = b"\n]\n"


@dataclass
class TraceTarget:
    """The file of one run; also pickled, for workers.

    Attributes:
        path: Absolute path of the file.
        file: Device and inode of the file, as another file may have taken its name.
        run: Number of times that the enqueuer was started before.
        pid: Process id of the loop.
        over: Whether the file was ended; known in the process of the loop only.
    """

    path: str
    file: tuple[int, int]
    run: int
    pid: int
    over: bool = False


class Track:
    """One row of the timeline, and the writer of its events. Called by one thread at a time.

    After an error, events are dropped, and `trouble` is the error.

    Args:
        target: File of the trace.
        tid: Number of the row: that of the thread, mostly.

    Attributes:
        trouble: Error for which nothing is recorded any more; None if there was none.
        is_full: Whether the file is as large as it may be.
    """

    def __init__(self, target: TraceTarget, tid: int) -> None:
        # Only a trace needs it.
        from json import dumps

        self.trouble: OSError | None = None
        self.is_full = False
        self._dumps = dumps
        self._target = target
        self._pid = os.getpid()
        self._row = {"pid": self._pid, "tid": tid}
        self._kept = bytearray()
        self._due = 0
        self._fd: Descriptor | None = None
        try:
            self._fd = Descriptor(open_no_link(target.path, os.O_WRONLY | os.O_APPEND))
            close_in_children(self._fd)
            found = os.fstat(self._fd.fileno())
            if (found.st_dev, found.st_ino) != target.file:
                raise OSError(errno.ESTALE, "another file has taken its name", target.path)
        except OSError as error:
            self._give_up(error)

    def _add(self, now: int, name: str, phase: str, args: _Args = _NO_ARGS, **more: Any) -> None:
        """Keep an event until the next write, or write now.

        Args:
            now: Time by `time.monotonic_ns`.
            name: Its name.
            phase: Its kind.
            args: Its arguments.
            more: Its other members, such as its times.
        """
        if self._fd is None or self.is_full:
            return
        if not self._kept:
            self._due = now + FLUSH_NS
        self._kept += self._line(name, phase, args, **more) + b",\n"
        if len(self._kept) > FLUSH_BYTES or now > self._due:
            self.flush()

    def _line(self, name: str, phase: str, args: _Args = _NO_ARGS, **more: Any) -> bytes:
        event = {"name": name, "ph": phase, **self._row, **more}
        return self._dumps({**event, "args": args} if args else event).encode()

    def flush(self) -> None:
        """Write the events that are kept, unless the file is full."""
        kept, self._kept = self._kept, bytearray()
        if kept and self._fd is not None and self._is_mine():
            self.is_full = self.is_full or os.fstat(self._fd.fileno()).st_size > MOST_BYTES
            if not self.is_full:
                self.write(kept)

    def write(self, data: bytes | bytearray) -> None:
        """Write data as they are, also to a full file."""
        if self._fd is None or not self._is_mine():
            return
        try:
            if os.write(self._fd.fileno(), data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._target.path)
        except OSError as error:
            self._give_up(error)

    def name(self, process: str | None, thread: str, rank: int) -> None:
        """Name the row and give its rank; `process` is None if the process has a name already."""
        whose = {"thread": thread} if process is None else {"process": process, "thread": thread}
        for kind, name in whose.items():
            self._add(0, f"{kind}_name", "M", {"name": name})
            self._add(0, f"{kind}_sort_index", "M", {"sort_index": rank})

    def span(self, name: str, begin: int, end: int, args: _Args = _NO_ARGS) -> None:
        """Record a span between two times, in nanoseconds."""
        at = begin // 1000
        self._add(end, name, "X", args, ts=at, dur=end // 1000 - at)

    def instant(self, name: str, at: int, args: _Args = _NO_ARGS) -> None:
        """Record an instant."""
        self._add(at, name, "i", args, ts=at // 1000, s="p")

    def counter(self, name: str, at: int, value: int) -> None:
        """Record a number of items."""
        self._add(at, name, "C", {"items": value}, ts=at // 1000)

    def arrow(self, is_begin: bool, at: int, epoch: int, shard: int, item: int) -> None:
        """Record the begin or the end of an item's arrow, in the span that was recorded last."""
        # Perfetto reads 64 bits. Without the other bits, an arrow may be wrong, but nothing else.
        run = self._target.run & 0xFF
        name = f"{run:02x}{epoch & 0xFFF:03x}{shard & 0xFFF:03x}{item & 0xFFFFFFFF:08x}"
        where: dict[str, Any] = {} if is_begin else {"bp": "e"}
        phase = "s" if is_begin else "f"
        self._add(at, "item", phase, cat="item", id=name, ts=at // 1000, **where)

    def fill(self, at: int) -> None:
        """Mark the file as full."""
        line = self._line("full", "i", {"limit_bytes": MOST_BYTES}, ts=at // 1000, s="p")
        self.write(line + b",\n")

    def end(self, at: int) -> None:
        """Record the last instant, so that the file is JSON in the strict sense, and close it."""
        self.flush()
        self.write(self._line("end", "i", ts=at // 1000, s="p") + _TAIL)
        self._target.over = True
        self.close()

    def close(self) -> None:
        """Write the events that are kept, and close the descriptor."""
        self.flush()
        if self._fd is not None:
            self._fd.close()
            self._fd = None

    def _is_mine(self) -> bool:
        """Return whether this process opened the file, and the file is not ended."""
        return self._fd is not None and os.getpid() == self._pid and not self._target.over

    def _give_up(self, error: OSError) -> None:
        self.trouble = error
        if self._fd is not None:
            self._fd.close()
            self._fd = None


def begin(path: str, last: TraceTarget | None) -> TraceTarget:
    """Begin the file, or continue that of the run before.

    Args:
        path: Path of the file.
        last: File of the run before; None if there was none.

    Raises:
        FileExistsError: There is a file, and it is not a trace.
        OSError: The file cannot be created.
    """
    path, run = os.path.abspath(path), 0 if last is None else last.run + 1
    with contextlib.suppress(OSError):
        if last is not None and _reopen(path, last.file):
            return TraceTarget(path, last.file, run, os.getpid())
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
    return TraceTarget(path, (found.st_dev, found.st_ino), run, os.getpid())


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
    return text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + "..."
