"""The order of the elements of an epoch, and its division among ranks.

    length, seed, epoch --> order_of() --> indices of a rank

Pure: it keeps nothing and waits for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from enqueuer.workers.tasks import TaskSource


class Reading(NamedTuple):
    """The rules by which the elements of an epoch are divided among ranks.

    Attributes:
        shuffle: Whether each epoch has an order of its own, drawn from the seed.
        drop_last: Whether an incomplete batch is left out, and elements that cannot be divided
            evenly.
        rank: Rank of this reader.
        world_size: Number of ranks, of which each reads its own elements.
    """

    shuffle: bool
    drop_last: bool
    rank: int
    world_size: int


def places_of(source: TaskSource, reading: Reading) -> range:
    """Return the places of an epoch's order that belong to a rank."""
    count = source.length
    kept = count - count % reading.world_size if reading.drop_last else count
    return range(reading.rank, kept, reading.world_size)


def order_of(source: TaskSource, reading: Reading, epoch: int) -> range | np.ndarray:
    """Return the indices of a rank in an epoch, in its order."""
    places = places_of(source, reading)
    if not reading.shuffle:
        return places
    order = permutation(source.length, source.random_seed, epoch)
    return order[places.start : places.stop : places.step]


def permutation(count: int, random_seed: int, epoch: int) -> np.ndarray:
    """Return the order of so many elements in an epoch, which is the same in every process."""
    seeds = np.random.SeedSequence(random_seed, spawn_key=(epoch,))
    return np.random.default_rng(seeds).permutation(count)


def steps_in(count: int, size: int, drop_last: bool) -> int:
    """Return the number of batches that so many elements make."""
    return count // size if drop_last else -(-count // size)
