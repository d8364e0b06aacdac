"""The seeds of the global generators for a shard or a task.

    shard -> its words -> seeds
    task  -> the words of its epoch, drawn once -> seeds, by the index of its element

A task may take less time than the construction of a `SeedSequence`, so its seeds are mixed from
those of its epoch and its index.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from enqueuer.workers.shards import EpochSeeds, Seeded, Task, words_of

_MASK = 0xFFFFFFFF


class GlobalSeeds(NamedTuple):
    """The seeds of the global generators.

    Attributes:
        python: Seed of `random`, of 128 bits or more.
        legacy: Seed of `numpy.random`, of 32 bits. A longer one takes numpy seven times as long.
        torch: Seed of torch, of 63 bits; its generator of the CPU uses the lower 32.
        tensorflow: Seed of tensorflow, of 31 bits.
    """

    python: int
    legacy: int
    torch: int
    tensorflow: int


def seeds_of(place: Seeded) -> GlobalSeeds:
    """Return the seeds of the global generators for a shard or a task.

    Those of the elements of an epoch differ, `numpy.random`'s too, up to 2**32 elements; but
    tensorflow's have only 31 bits.

    Example:
        >>> first, second = seeds_of(Task(0, 0, 7)), seeds_of(Task(1, 0, 7))
        >>> second.python - first.python, first.legacy == second.legacy
        (1, False)
    """
    if not isinstance(place, Task):
        return _drawn(place)
    index = place.index
    python, legacy, torch, tensorflow, factor = _of_epoch(place.random_seed, place.epoch)
    mixed = _mix((index ^ index >> 32) * factor & _MASK ^ legacy)
    # `random` mixes all words of a seed.
    return GlobalSeeds(python + index, mixed, torch ^ mixed, tensorflow ^ mixed >> 1)


@functools.lru_cache(maxsize=16)
def _of_epoch(random_seed: int, epoch: int) -> tuple[int, int, int, int, int]:
    """Return the seeds of an epoch, that of `random` 64 bits higher, and a factor of its indices.

    The factor is odd: otherwise two epochs would share all of their seeds, or none.
    """
    seeds = _drawn(EpochSeeds(epoch, random_seed))
    return seeds.python << 64, seeds.legacy, seeds.torch, seeds.tensorflow, seeds.torch | 1


def _drawn(place: Seeded) -> GlobalSeeds:
    words = [int(word) for word in words_of(place)]
    python = words[0] << 64 | words[1]
    return GlobalSeeds(python, words[2] & _MASK, words[6] >> 1, words[7] >> 33)


def _mix(word: int) -> int:
    """Return a word of 32 bits, each of which depends on all bits of `word`; one for each word.

    Source: C. Wellons, "Prospecting for Hash Functions", 2018: `lowbias32`.
    """
    word = (word ^ word >> 16) * 0x7FEB352D & _MASK
    word = (word ^ word >> 15) * 0x846CA68B & _MASK
    return word ^ word >> 16
