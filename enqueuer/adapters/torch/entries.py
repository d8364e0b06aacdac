"""The number by which DataLoader workers tell each other which epoch they have begun."""

from __future__ import annotations

from typing import NamedTuple

# Of the 63 bits of an `Entry`; the other 23 count epochs.
SEED_BITS = 24
_ITERATION_BITS = 16


class Entry(NamedTuple):
    """The latest epoch of a DataLoader worker, as one number that is written in one step.

    Args:
        begun: Number of epochs that the worker has begun.
        seed: Lowest `SEED_BITS` of the DataLoader's seed; 0: no worker has written this.
        iteration: Number of iterations of the DataLoader before this one.

    Example:
        >>> entry = Entry(begun=3, seed=7, iteration=1)
        >>> Entry.of(entry.number()) == entry
        True
        >>> entry.epoch_at(1), entry.epoch_at(2)
        (2, 3)
    """

    begun: int
    seed: int = 0
    iteration: int = 0

    @classmethod
    def of(cls, number: int) -> Entry:
        """Return what a number stands for."""
        rest, iteration = divmod(number, (1 << _ITERATION_BITS))
        begun, seed = divmod(rest, (1 << SEED_BITS))
        return cls(begun, seed, iteration)

    def number(self) -> int:
        """Return the number that stands for this."""
        iteration = self.iteration % (1 << _ITERATION_BITS)
        return (self.begun << SEED_BITS | self.seed) << _ITERATION_BITS | iteration

    def epoch_at(self, iteration: int) -> int:
        """Return the number of the epoch that an iteration of the same DataLoader begins."""
        half = 1 << (_ITERATION_BITS - 1)
        later = (iteration - self.iteration + half) % (2 * half) - half
        return self.begun - 1 + later
