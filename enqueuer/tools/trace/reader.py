"""A trace -> a recording.

    lines -> events, each checked -> tables of whole numbers -> Recording

A trace that a crash has left is read as far as possible: a line that is torn, too long, or no
event, is counted and left out.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from enqueuer.errors import DataFileError
from enqueuer.monitoring.trace_file import HEAD
from enqueuer.tools.trace.events import Events
from enqueuer.tools.trace.recording import Recording

# Bytes of a line. Ours have a few hundred, but a file may be a single line.
_LONGEST_LINE = 1 << 20


def read(path: str) -> Recording:
    """Read a trace.

    Raises:
        DataFileError: The file is missing, or no trace of an enqueuer.
    """
    recording = Recording(path)
    events = Events()
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
                # An enqueuer that was stopped was started again.
                recording.is_whole = False
    if events.first is None:
        raise DataFileError(f"{path}: nothing was recorded", path)
    events.into(recording, events.first)
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
    try:
        _check(file, path)
    except BaseException:
        file.close()
        raise
    return file


def _check(file: BinaryIO, path: str) -> None:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise DataFileError(f"{path}: a trace must be an ordinary file, not a pipe", path)
    if file.read(len(HEAD)) != HEAD:
        text = f"{path}: not a trace; trace='run.json' of an enqueuer writes one"
        raise DataFileError(text, path)
    file.seek(0)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; for one that is too long, text that is no event."""
    while line := file.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
            while (rest := file.readline(_LONGEST_LINE)) and not rest.endswith(b"\n"):
                pass
            line = b"too long"
        yield line
