"""Which of several sources is next, so that each has its share in every prefix.

The rule is Tijdeman's for the chairman assignment problem: after `n` turns, the number of turns
of each source differs from `n` times its share by less than 1.
"""

from __future__ import annotations

from collections.abc import Sequence


class Schedule:
    """The turns of several sources, in a fixed order.

    A source may have its next turn from its release on, and should have it before its deadline.
    Of those that may, the one with the earliest deadline is next.

    Args:
        weights: Weights of the sources, which are positive.
        taken: Number of turns that each source has had; by default none.

    Attributes:
        taken: Number of turns that each source has had.

    Example:
        >>> schedule = Schedule([2, 1])
        >>> [schedule.next() for _ in range(6)]
        [0, 1, 0, 0, 1, 0]
    """

    def __init__(self, weights: Sequence[float], taken: Sequence[int] | None = None) -> None:
        self.taken = [0] * len(weights) if taken is None else list(taken)
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        self._margin = 1 / (2 * len(weights) - 2) if len(weights) > 1 else 0.0
        self._turn = sum(self.taken)
        self._releases = [0.0] * len(weights)
        self._deadlines = [0.0] * len(weights)
        for at in range(len(weights)):
            self._plan(at)

    def next(self) -> int:
        """Return the index of the source whose turn is next."""
        self._turn = turn = self._turn + 1
        ready = [at for at, release in enumerate(self._releases) if release <= turn]
        # Rounding can leave none.
        chosen = min(ready or range(len(self._shares)), key=self._deadlines.__getitem__)
        self.taken[chosen] += 1
        self._plan(chosen)
        return chosen

    def _plan(self, at: int) -> None:
        taken, share = self.taken[at], self._shares[at]
        self._releases[at] = (taken + self._margin) / share
        self._deadlines[at] = (taken + 1 - self._margin) / share
