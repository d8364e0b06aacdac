"""A shard, or a task: its share of the work and its random numbers.

(random_seed, epoch, index) -> seed, rng, and words for the global generators
"""

from __future__ import annotations

import itertools
import logging
import secrets
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar, overload

import numpy as np

# Imported here, since it is loaded lazily: the fork server then has it for all workers.
import numpy.random

from enqueuer.common.text import an

T = TypeVar("T")

_log = logging.getLogger("enqueuer")


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

    @cached_property
    def rng(self) -> np.random.Generator:
        """The random generator of this shard or task.

        It draws from `SeedSequence(random_seed, spawn_key=(epoch, index))`.
        """
        return np.random.default_rng(self._sequence())

    def _sequence(self, *key: int) -> np.random.SeedSequence:
        spawn_key = (self.epoch, self.index, *key)
        return np.random.SeedSequence(self.random_seed, spawn_key=spawn_key)


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
        if isinstance(items, (Set, Mapping)):
            raise TypeError(
                f"split() needs items with an order, got {an(type(items).__name__)}; "
                "pass sorted(items) instead"
            )
        if isinstance(items, Sequence) or hasattr(items, "ndim"):
            return items[self.index :: self.count]
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


class CaughtErrors(list[CaughtError]):
    """The reports of a shard that were not sent.

    Attributes:
        heard: Function that is called after each new report; or None.
    """

    heard: Callable[[], None] | None = None

    def append(self, report: CaughtError) -> None:
        """Add a report."""
        super().append(report)
        heard = self.heard
        if heard is not None:
            heard()


def collect_reports(shard: Shard) -> CaughtErrors:
    """Return a list to which a shard's reports are appended from now on."""
    reports = CaughtErrors()
    object.__setattr__(shard, "_reports", reports)
    return reports


def fresh_seed() -> int:
    """Draw a random seed from the operating system, without touching any global generator.

    It is below `2**31`, so that other libraries accept it, too.
    """
    return secrets.randbits(31)


def words_of(place: Seeded) -> np.ndarray:
    """Return eight words of 64 bits from which the global generators are seeded."""
    return place._sequence(1).generate_state(8, np.uint64)


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
