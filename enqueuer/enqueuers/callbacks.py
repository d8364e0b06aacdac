"""Functions that the loop's thread calls with the statistics of a run, every few seconds."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from enqueuer import exports
from enqueuer.monitoring.meters import clock
from enqueuer.monitoring.stats import Stats

_log = logging.getLogger("enqueuer")


@dataclass(eq=False)
class _Callback:
    function: Callable[[Stats], object]
    every_ns: int
    due_ns: int
    earlier: Stats | None = None


class Call(NamedTuple):
    """A callback that is due, and the statistics for it."""

    callback: _Callback
    stats: Stats


class StatsCallbacks:
    """The callbacks of an enqueuer, and when each is due.

    Example:
        >>> callbacks = StatsCallbacks()
        >>> bool(callbacks)
        False
        >>> callbacks.add(None, every_s=10.0)
        >>> bool(callbacks)
        True
    """

    def __init__(self) -> None:
        self._callbacks: list[_Callback] = []

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def add(self, function: Callable[[Stats], object] | None, every_s: float) -> None:
        """Call a function every so many seconds from now on.

        Args:
            function: Called with the statistics since its last call; None logs a line.
            every_s: Seconds between two calls.
        """
        every_ns = int(every_s * 1e9)
        self._callbacks.append(_Callback(function or _log_line, every_ns, clock() + every_ns))

    def begin_run(self) -> None:
        """Count the time of each callback from now, and its statistics from the start."""
        for callback in self._callbacks:
            callback.earlier, callback.due_ns = None, clock() + callback.every_ns

    def due(self, stats: Callable[[], Stats]) -> list[Call]:
        """Return the calls that are due, each with the statistics since the previous one.

        Args:
            stats: Returns the statistics of the run so far; called only if a call is due.
        """
        now = clock()
        calls = []
        for callback in [callback for callback in self._callbacks if now >= callback.due_ns]:
            total, earlier = stats(), callback.earlier
            callback.due_ns, callback.earlier = now + callback.every_ns, total
            calls.append(Call(callback, total if earlier is None else total.since(earlier)))
        return calls

    def make(self, calls: list[Call]) -> None:
        """Make these calls. A callback that fails is logged, and not called again."""
        for callback, stats in calls:
            try:
                callback.function(stats)
            except Exception:
                _log.exception("a callback of on_stats() failed; it is not called again")
                # Another thread in which it failed may have removed it.
                with contextlib.suppress(ValueError):
                    self._callbacks.remove(callback)


def _log_line(stats: Stats) -> None:
    _log.info("%s", exports.line(stats))
