"""How the workers of a DataLoader agree on the number of an epoch.

Each worker writes an `Entry` into shared memory when it begins an epoch, and reads those of the
others. It waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        """Return the entry that a number stands for."""
        rest, iteration = divmod(number, (1 << _ITERATION_BITS))
        begun, seed = divmod(rest, (1 << SEED_BITS))
        return cls(begun, seed, iteration)

    def number(self) -> int:
        """Return the number that stands for this entry."""
        iteration = self.iteration % (1 << _ITERATION_BITS)
        return (self.begun << SEED_BITS | self.seed) << _ITERATION_BITS | iteration

    def epoch_at(self, iteration: int) -> int:
        """Return the number of the epoch that an iteration of the same DataLoader begins."""
        half = 1 << (_ITERATION_BITS - 1)
        later = (iteration - self.iteration + half) % (2 * half) - half
        return self.begun - 1 + later


def agreed_epoch(entries: Sequence[Entry], worker: int, seed: int, iteration: int) -> int:
    """Return the number of the epoch that an iteration of a DataLoader begins.

    Args:
        entries: The entry of each worker; other DataLoaders of the dataset may have written some.
        worker: Index of the worker that begins the epoch.
        seed: Seed of the DataLoader, as in `Entry`.
        iteration: Number of iterations of the DataLoader before this one.

    Example:
        >>> other = Entry(begun=3, seed=7, iteration=1)
        >>> agreed_epoch([other, Entry(begun=1)], worker=1, seed=7, iteration=1)
        2
        >>> agreed_epoch([other, Entry(begun=1)], worker=1, seed=8, iteration=0)
        3
    """
    own = entries[worker]
    known = [entry.epoch_at(iteration) for entry in entries if entry.seed == seed]
    # An epoch that this worker has begun before belongs to an earlier DataLoader, to which the
    # caller gave the same seed.
    known = [epoch for epoch in known if epoch >= own.begun or not own.seed]
    return max(known or [entry.begun for entry in entries])
