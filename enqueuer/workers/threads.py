"""Where the threads and shards of each worker are, for reports of stalls and of deaths.

set_snapshots()    by a worker's own thread, if other threads run its code, or several shards
snapshots_of()     by any thread that makes a report
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple


class ThreadSnapshot(NamedTuple):
    """Where elements or shards of a worker are: their Python stack, the outermost frame first."""

    indices: tuple[int | str, ...]
    stack: list[traceback.FrameSummary]


class _Listener(threading.local):
    on_change: Callable[[bool], object] = bool


_listener = _Listener()
# By the identifiers of the workers' own threads, which wait for those that are shown.
_snapshots: dict[int, Callable[[], list[ThreadSnapshot]]] = {}

if hasattr(os, "register_at_fork"):
    # Those threads do not exist in a forked child.
    os.register_at_fork(after_in_child=_snapshots.clear)


def set_snapshots(snapshots: Callable[[], list[ThreadSnapshot]] | None) -> None:
    """Have a report of this worker show other threads or shards; None: its own thread again.

    Called by the worker's own thread.
    """
    ident = threading.get_ident()
    if snapshots is None:
        _snapshots.pop(ident, None)
    else:
        _snapshots[ident] = snapshots
    _listener.on_change(snapshots is not None)


def on_change(function: Callable[[bool], object]) -> None:
    """Have `set_snapshots` call a function in this thread, with whether others are shown."""
    _listener.on_change = function


def snapshots_of(ident: int | None) -> list[ThreadSnapshot]:
    """Return where the threads or shards of a worker are; [] if its own thread runs its code."""
    return [] if ident is None else _snapshots.get(ident, list)()


def element_snapshots(
    current: dict[int, Any], stack_of: Callable[[int], list[traceback.FrameSummary]] | None = None
) -> list[ThreadSnapshot]:
    """Return where each thread is that runs elements.

    Args:
        current: A tuple that begins with the indices of its elements, by the thread.
        stack_of: Function that returns the stack of the coroutine that a thread waits for, if any.
    """
    before = current.copy()
    frames, after = sys._current_frames(), current.copy()
    # Threads begin and end jobs meanwhile: only the frames of those that did not are known.
    return [
        ThreadSnapshot(
            indices,
            (stack_of(ident) if stack_of is not None else [])
            or list(traceback.extract_stack(frames[ident])),
        )
        for ident, (indices, *_) in before.items()
        if ident in frames and after.get(ident) is before[ident]
    ]
