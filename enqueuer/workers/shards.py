"""A shard, or a task: its share of the work, its random numbers, and the global generators.

    (random_seed, epoch, index) -> seed, rng, and words for the global generators
    shard -> its words -> seeds of the global generators
    task  -> the words of its epoch, drawn once -> seeds, by the index of its element

A task may take less time than the construction of a `SeedSequence`, so its global seeds are mixed
from those of its epoch and its index.

No other file sets the global states. This one sets them in worker processes; in the process of the
training loop it restores them, before the loop runs again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import random
import secrets
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, overload

import numpy as np

# Imported here, since it is loaded lazily: the fork server then has it for all workers.
import numpy.random

from enqueuer.common.text import an

T = TypeVar("T")

_log = logging.getLogger("enqueuer")

_MASK = 0xFFFFFFFF


class CaughtError(NamedTuple):
    """An error that a generator has caught itself, and whether it is to be logged."""

    error: Exception
    log: bool


class Seeded:
    """An object with random numbers of its own, from `random_seed`, `epoch` and `index`."""

    index: int
    epoch: int
    random_seed: int

    @property
    def seed(self) -> int:
        """A seed below `2**31` of this shard or task, for generators of other libraries.

        `random`, `numpy.random.seed`, torch, TensorFlow, JAX, scikit-learn and OpenCV accept it.
        """
        return int(self._sequence(0).generate_state(1, np.uint64)[0]) >> 33

    @functools.cached_property
    def rng(self) -> np.random.Generator:
        """The random generator of this shard or task.

        It draws from `SeedSequence(random_seed, spawn_key=(epoch, index))`.
        """
        return np.random.default_rng(self._sequence())

    def _sequence(self, *key: int) -> np.random.SeedSequence:
        spawn_key = (self.epoch, self.index, *key)
        return np.random.SeedSequence(self.random_seed, spawn_key=spawn_key)


def has_labels(items: object) -> bool:
    """Return whether `[i]` takes a label, and `.iloc[i]` a place, as for a Series of pandas."""
    # The class is asked, as a dataset may pass on the attributes of its table. One that has only
    # `iloc`, and `[i]` of its own, is no table.
    return all(hasattr(type(items), name) for name in ("iloc", "loc", "ndim"))


@dataclass(frozen=True)
class Task(Seeded):
    """One element of a sequence in one epoch, and its random numbers.

    The random numbers depend on the element, and not on its worker, its batch or the order.

    Args:
        index: Index of the element, from 0; 0 by default, to call `map` by hand.
        epoch: Number of the epoch, from 0; 0 by default.
        random_seed: Seed of the enqueuer; 0 by default.

    Example:
        >>> task = Task(index=3, epoch=0, random_seed=7)
        >>> int(task.rng.integers(100)) == int(Task(3, 0, 7).rng.integers(100))
        True
    """

    index: int = 0
    epoch: int = 0
    random_seed: int = 0


class EpochSeeds(Seeded):
    """The random numbers of an epoch that belong to no element: one of three series."""

    # No element has these keys: the keys of elements end in 0 or 1, that of a shard's shuffle in 4.
    END, BEGIN, SHARED = 2, 3, 5

    def __init__(self, epoch: int, random_seed: int, key: int) -> None:
        self.index, self.epoch, self.random_seed = 0, epoch, random_seed
        self._key = key

    def _sequence(self, *key: int) -> np.random.SeedSequence:
        spawn_key = (self.epoch, 0, self._key, *key)
        return np.random.SeedSequence(self.random_seed, spawn_key=spawn_key)


@dataclass(frozen=True)
class Shard(Seeded):
    """One logical run of a generator function.

    The data depend on shards and never on workers: the same `random_seed` and `count` give the
    same batches on any worker.

    Args:
        index: Index of this shard, from 0 to `count - 1`; 0 by default, to call the function by
            hand.
        count: Number of shards; 1 by default.
        epoch: Number of the epoch, from 0; 0 by default.
        random_seed: Seed of the enqueuer; 0 by default.

    Example:
        >>> def batches(shard):
        ...     for number in shard.split(range(5)):
        ...         yield number * 2
        >>> list(batches(Shard()))  # without an enqueuer
        [0, 2, 4, 6, 8]
        >>> shard = Shard(index=1, count=3, epoch=0, random_seed=7)
        >>> shard.split(["a", "b", "c", "d", "e"])
        ['b', 'e']
        >>> int(shard.rng.integers(100)) == int(Shard(1, 3, 0, 7).rng.integers(100))
        True
    """

    index: int = 0
    count: int = 1
    epoch: int = 0
    random_seed: int = 0
    # Set on an object whose reports are collected.
    _reports: ClassVar[list[CaughtError] | None] = None

    @overload
    def split(self, items: Sequence[T]) -> Sequence[T]: ...
    @overload
    def split(self, items: Iterable[T]) -> Iterable[T]: ...
    def split(self, items: Any) -> Any:
        """Return the part of this shard: every `count`-th of `items`, from the `index`-th on.

        The parts of all shards are disjoint, and together they are `items`. An ordered enqueuer
        takes one item of each shard in turn, so the items come in the original order.

        Args:
            items: Sequence or array, of which a slice is returned. For another object with a
                length and items, or any iterable, an iterator is returned (each shard reads
                through the whole iterable).

        Raises:
            TypeError: `items` is a set or a mapping. The order of a set of strings differs
                between processes, so that parts would overlap: sort it first.
        """
        if isinstance(items, int):
            raise TypeError(f"split() divides items, got {items}: give range({items})")
        if isinstance(items, (Set, Mapping)):
            raise TypeError(
                f"split() needs items with an order, got {an(type(items).__name__)}; "
                "pass sorted(items) instead"
            )
        if isinstance(items, Sequence) or hasattr(items, "ndim"):
            # A slice of a pandas object may be one of labels.
            by_place = items.iloc if has_labels(items) else items
            return by_place[self.index :: self.count]
        if hasattr(items, "__len__") and hasattr(items, "__getitem__"):
            # Not every map-style dataset takes a slice or returns the same elements for it.
            return (items[index] for index in range(self.index, len(items), self.count))
        return itertools.islice(items, self.index, None, self.count)

    def report(self, error: Exception, log: bool = True) -> None:
        """Report an error that the generator has caught, and after which it continues.

        The enqueuer counts it in `error_count`; the error after `max_errors` is raised in the
        loop. It is logged with its traceback by the logger `enqueuer`, but not again in a later
        epoch with the same text; `skipped` of the enqueuer lists it. The report is sent with the
        next item; if none may come for long, yield None. Threads of the generator may report, too.

        Args:
            error: Exception that was caught. Its text should name the item that is left out.
            log: Whether the error is logged; True by default.

        Example:
            >>> from enqueuer import GeneratorEnqueuer
            >>> def inverses(shard):
            ...     for number in shard.split([1, 0, 2]):
            ...         try:
            ...             yield 1 / number
            ...         except ZeroDivisionError as error:
            ...             shard.report(error, log=False)
            >>> with GeneratorEnqueuer(inverses) as enqueuer:
            ...     print(list(enqueuer), enqueuer.error_count)
            [1.0, 0.5] 1
        """
        if self._reports is not None:
            self._reports.append(CaughtError(error, log))
        elif log:
            # No enqueuer runs this shard. The traceback is text, as frames keep much alive.
            text = "".join(traceback.format_exception(error)).rstrip()
            _log.error("skipped in shard %d: %r\n%s", self.index, error, text)

    def __getstate__(self) -> dict[str, Any]:
        # The reports of a copy in another process would not be collected.
        return {name: value for name, value in self.__dict__.items() if name != "_reports"}


def collect_reports(shard: Shard) -> list[CaughtError]:
    """Return a list to which a shard's reports are appended from now on."""
    reports: list[CaughtError] = []
    object.__setattr__(shard, "_reports", reports)
    return reports


def fresh_seed() -> int:
    """Draw a random seed from the operating system, without touching any global generator.

    It is below `2**31`, so that other libraries accept it, too.
    """
    return secrets.randbits(31)


def seed_of_shuffle(shard: Shard) -> int:
    """Return the seed of the shuffle buffer of a shard."""
    # No other sequence of a shard has this key: the global generators have 1, `seed` has 0.
    return int(shard._sequence(4).generate_state(1, np.uint64)[0])


def part_for(shard: Shard, name: str, number: int) -> Shard:
    """Return a shard for one of several sources that share a shard, with other random numbers.

    Args:
        shard: Shard that the sources share, and to which they report.
        name: Name of the source.
        number: How often the source was called for this shard before.
    """
    entropy = (shard.random_seed, number, *name.encode())
    seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 33
    part = Shard(shard.index, shard.count, shard.epoch, seed)
    object.__setattr__(part, "_reports", shard._reports)
    return part


def do_nothing(place: Seeded) -> None:
    """Leave the global states alone, as threads share them with the training loop."""


# --- the global random generators -----------------------------------------------------------------


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
    # Words of 64 bits.
    words = [int(word) for word in place._sequence(1).generate_state(8, np.uint64)]
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
    seeds = seeds_of(place)
    random.seed(seeds.python)
    np.random.seed(seeds.legacy)
    # Looked up before the calls, as they take a part of the time of a quick task.
    if "torch" in sys.modules:
        _seed_torch(seeds, gpus and is_alone)
    if is_alone and "tensorflow" in sys.modules:
        _seed_tensorflow(seeds)


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
