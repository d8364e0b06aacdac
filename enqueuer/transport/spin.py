"""Looking for a moment whether the other process has done something, before sleeping.

To sleep and to be woken takes two system calls on each side and longer than many small items. Where
each process has a CPU of its own, the other side is often ready sooner. A wait that was in vain
makes the next waits sleep at once, twice as many each time: so long waits cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from enqueuer.monitoring.meters import clock

# Nanoseconds: about as long as to sleep and to be woken.
_SPIN_NS = 50_000
_MOST_SKIPPED = 1024


class Spin:
    """Spin before the sleeps of one side.

    Args:
        is_allowed: Whether the processes of both sides have a CPU each.

    Example:
        >>> answers = iter([False, True])
        >>> Spin(True).until(lambda: next(answers)), Spin(False).until(lambda: True)
        (True, False)
    """

    def __init__(self, is_allowed: bool) -> None:
        self._is_allowed = is_allowed
        # Waits that sleep at once, and how many after the next one in vain.
        self._skipped = 0
        self._penalty = 1

    def until(self, is_over: Callable[[], bool]) -> bool:
        """Return whether a wait is over within a moment; False at once if that is not expected."""
        if not self._is_allowed:
            return False
        if self._skipped:
            self._skipped -= 1
            return False
        end = clock() + _SPIN_NS
        while not is_over():
            if clock() >= end:
                self._skipped = self._penalty
                self._penalty = min(2 * self._penalty, _MOST_SKIPPED)
                return False
        self._penalty = 1
        return True
