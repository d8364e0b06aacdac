"""The global random generators of a worker: their seeds for a shard or a task, and their states.

    shard -> its words -> seeds
    task  -> the words of its epoch, drawn once -> seeds, by the index of its element

A task may take less time than the construction of a `SeedSequence`, so its seeds are mixed from
those of its epoch and its index.

No other file sets the global states. This one sets them in worker processes; in the process of the
training loop it restores them, before the loop runs again.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

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
    # A word of 32 bits, each of which depends on all bits of the one before; one for each word.
    # Source: C. Wellons, "Prospecting for Hash Functions", 2018: `lowbias32`.
    word = (index ^ index >> 32) * factor & _MASK ^ legacy
    word = (word ^ word >> 16) * 0x7FEB352D & _MASK
    word = (word ^ word >> 15) * 0x846CA68B & _MASK
    mixed = word ^ word >> 16
    # `random` mixes all words of a seed.
    return GlobalSeeds(python + index, mixed, torch ^ mixed, tensorflow ^ mixed >> 1)


@functools.lru_cache(maxsize=16)
def _of_epoch(random_seed: int, epoch: int) -> tuple[int, int, int, int, int]:
    """Return the seeds of an epoch, that of `random` 64 bits higher, and a factor of its indices.

    The factor is odd: otherwise two epochs would share all of their seeds, or none.
    """
    seeds = _drawn(EpochSeeds(epoch, random_seed, EpochSeeds.SHARED))
    return seeds.python << 64, seeds.legacy, seeds.torch, seeds.tensorflow, seeds.torch | 1


def _drawn(place: Seeded) -> GlobalSeeds:
    words = [int(word) for word in words_of(place)]
    python = words[0] << 64 | words[1]
    return GlobalSeeds(python, words[2] & _MASK, words[6] >> 1, words[7] >> 33)


class TaskSeeds:
    """Seed the global generators of one worker process for each task that it runs."""

    def __init__(self) -> None:
        # The task, or the shard, whose code runs.
        self._current: Seeded | None = None

    def enter(self, task: Task) -> None:
        """Seed all that are imported, except for those of GPUs, which take far longer."""
        self._current = task
        seed_globals(task, gpus=False)

    def seed_imported(self, framework: str) -> None:
        """Seed a framework that the code of the current task has just imported."""
        if self._current is not None:
            FRAMEWORKS[framework](seeds_of(self._current))


class GlobalStreams(TaskSeeds):
    """Keep the global random states of several shards apart in one worker process.

    Generators that use `random`, `numpy.random` or `torch` draw from a stream of their shard,
    even if one worker runs several shards in turn. `tensorflow`'s state cannot be exchanged, so
    it is only seeded. Frameworks that are imported later are seeded by `seed_imported`.

    Args:
        is_alone: As for `seed_globals`.
    """

    def __init__(self, is_alone: bool = True) -> None:
        super().__init__()
        self._is_alone = is_alone
        # Functions that restore the states of each shard in this epoch, by its index.
        self._states: dict[int, Callable[[], None]] = {}

    def enter(self, shard: Seeded) -> None:
        """Set the global generators to those of `shard`: seeded at first, later as it left them."""
        before = self._current
        if shard == before:
            return
        if before is not None and before.epoch == shard.epoch:
            self._states[before.index] = _save(before)
        else:
            self._states.clear()
        restore = self._states.pop(shard.index, None)
        if restore is None:
            seed_globals(shard, is_alone=self._is_alone)
        else:
            restore()
        self._current = shard


class SwappedStates:
    """The global random states of a worker that runs in the loop's own thread, in turns."""

    def __init__(self) -> None:
        # Function that restores the states as the worker left them; none before its first turn.
        self._restore: Callable[[], None] | None = None

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Set the states to those of the worker, and at the end to those of the loop."""
        restore_loop = _save()
        try:
            if self._restore is not None:
                self._restore()
            yield
            self._restore = _save()
        finally:
            restore_loop()


@contextlib.contextmanager
def borrowed_globals(shard: Seeded) -> Iterator[None]:
    """Seed the global generators as in a worker process, and restore them at the end.

    Those of tensorflow and of GPUs are left alone, as they cannot be restored.
    """
    with SwappedStates().swapped():
        seed_globals(shard, is_alone=False)
        yield


def seed_globals(place: Seeded, gpus: bool = True, is_alone: bool = True) -> None:
    """Seed the global generators of this process.

    Args:
        place: Shard or task whose seeds they get.
        gpus: Whether to seed torch's generators of GPUs, which takes far longer.
        is_alone: Whether no loop uses them, so that those are seeded, too, which cannot be
            restored: tensorflow's, and torch's of GPUs.
    """
    seeds = seed_python_and_numpy(place)
    # Looked up before the calls, as they take a part of the time of a quick task.
    if "torch" in sys.modules:
        _seed_torch(seeds, gpus and is_alone)
    if is_alone and "tensorflow" in sys.modules:
        _seed_tensorflow(seeds)


def seed_python_and_numpy(place: Seeded) -> GlobalSeeds:
    """Seed `random` and `numpy.random`; return the seeds of all global generators."""
    seeds = seeds_of(place)
    random.seed(seeds.python)
    np.random.seed(seeds.legacy)
    return seeds


def _seed_torch(seeds: GlobalSeeds, gpus: bool = True) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "manual_seed"):
        seed = torch.manual_seed if gpus else torch.default_generator.manual_seed
        seed(seeds.torch)


def _seed_tensorflow(seeds: GlobalSeeds) -> None:
    tf = sys.modules.get("tensorflow")
    if tf is not None and hasattr(tf, "random"):
        tf.random.set_seed(seeds.tensorflow)


FRAMEWORKS: dict[str, Callable[[GlobalSeeds], None]] = {
    "torch": _seed_torch,
    "tensorflow": _seed_tensorflow,
}
"""Frameworks that are seeded when they are imported, and the functions that do so."""


def _save(shard: Seeded | None = None) -> Callable[[], None]:
    """Return a function that restores the present states of the global generators.

    Args:
        shard: Shard whose states they are: torch is seeded for it if it is imported until then.
    """
    python, legacy = random.getstate(), np.random.get_state()
    torch: Any = sys.modules.get("torch")
    state = torch.get_rng_state() if hasattr(torch, "get_rng_state") else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(legacy)
        if state is not None:
            torch.set_rng_state(state)
        elif shard is not None and torch is None:
            _seed_torch(seeds_of(shard))

    return restore
