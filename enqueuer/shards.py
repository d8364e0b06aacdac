"""A shard, its share of the work and its random numbers.

This is also the one file that sets global random states (`GlobalStreams`): in worker
processes only, never in the process of the training loop.
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
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar, overload

import numpy as np
import numpy.random  # here, since it is loaded lazily: the fork server then has it for all workers

from enqueuer.formats import an

T = TypeVar("T")

_log = logging.getLogger("enqueuer")


class Report(NamedTuple):
    """An error that a generator has outlived, and whether it is to be logged."""

    error: Exception
    log: bool


class Seeded:
    """What has a place of its own in the tree of seeds: `(epoch, index)` below `random_seed`."""

    index: int
    epoch: int
    random_seed: int

    @property
    def seed(self) -> int:
        """A seed of this alone below `2**31`, for other libraries' generators.

        `random`, `numpy.random.seed`, torch, TensorFlow, JAX, scikit-learn and OpenCV take it.
        """
        return int(self._sequence(0).generate_state(1, np.uint64)[0]) >> 33

    @cached_property
    def rng(self) -> np.random.Generator:
        """The random generator of this alone.

        It draws from `SeedSequence(random_seed, spawn_key=(epoch, index))`.
        """
        return np.random.default_rng(self._sequence())

    def _sequence(self, *key: int) -> np.random.SeedSequence:
        spawn_key = (self.epoch, self.index, *key)
        return np.random.SeedSequence(self.random_seed, spawn_key=spawn_key)


@dataclass(frozen=True)
class Task(Seeded):
    """One element of a sequence in one epoch, and its random numbers.

    They depend on the element and never on who works on it, nor on the order or the batch in
    which it comes.

    Args:
        index: Of the element, from 0.
        epoch: How often the sequence was gone through before, from 0.
        random_seed: Of the whole enqueuer.

    Example:
        >>> task = Task(index=3, epoch=0, random_seed=7)
        >>> int(task.rng.integers(100)) == int(Task(3, 0, 7).rng.integers(100))
        True
    """

    index: int
    epoch: int
    random_seed: int


class EpochEnd(Seeded):
    """The end of an epoch, which belongs to no element."""

    # No element has this key: the keys of elements end in 0 or 1.
    _key = 2

    def __init__(self, epoch: int, random_seed: int) -> None:
        self.index, self.epoch, self.random_seed = 0, epoch, random_seed

    def _sequence(self, *key: int) -> np.random.SeedSequence:
        spawn_key = (self.epoch, 0, self._key, *key)
        return np.random.SeedSequence(self.random_seed, spawn_key=spawn_key)


class EpochBegin(EpochEnd):
    """The beginning of an epoch, likewise."""

    _key = 3


@dataclass(frozen=True)
class Shard(Seeded):
    """One logical run of a generator function.

    The data depend on shards and never on workers: the same `random_seed` and `count` give the
    same batches, whichever worker runs the shard.

    Args:
        index: Of this shard, from 0 to `count - 1`.
        count: How many shards there are.
        epoch: How often the source was run through before, from 0.
        random_seed: Of the whole enqueuer.

    Example:
        >>> shard = Shard(index=1, count=3, epoch=0, random_seed=7)
        >>> shard.split(["a", "b", "c", "d", "e"])
        ['b', 'e']
        >>> int(shard.rng.integers(100)) == int(Shard(1, 3, 0, 7).rng.integers(100))
        True
    """

    index: int
    count: int
    epoch: int
    random_seed: int
    _reports: ClassVar[list[Report] | None] = None  # of an object, if someone listens to it

    @overload
    def split(self, items: Sequence[T]) -> Sequence[T]: ...
    @overload
    def split(self, items: Iterable[T]) -> Iterable[T]: ...
    def split(self, items: Any) -> Any:
        """Return this shard's share: every `count`-th of `items`, beginning with the `index`-th.

        The shares of all shards are disjoint and together they are `items`; read round-robin,
        as an ordered enqueuer does, they come in the original order.

        Args:
            items: A sequence or an array, of which a slice is returned; anything else with a
                length and items, or any iterable, of which an iterator is returned (of an
                iterable each shard reads through all).

        Raises:
            TypeError: `items` is a set or a mapping. A set of strings is in another order in
                each process, so that shares would overlap: sort it first.
        """
        if isinstance(items, (Set, Mapping)):
            raise TypeError(
                f"split() needs items with an order, got {an(type(items).__name__)}; "
                "pass sorted(items) instead"
            )
        if isinstance(items, Sequence) or hasattr(items, "ndim"):
            return items[self.index :: self.count]
        if hasattr(items, "__len__") and hasattr(items, "__getitem__"):
            # a map-style dataset: not all of them take a slice, or mean the same by it
            return (items[at] for at in range(self.index, len(items), self.count))
        return itertools.islice(items, self.index, None, self.count)

    def report(self, error: Exception, log: bool = True) -> None:
        """Tell the enqueuer of an error that the generator has caught, and goes on after.

        It is counted in the enqueuer's `error_count`, and one more than `max_errors` is raised in
        the loop. It is logged with its traceback as an error of the logger `enqueuer`; of errors
        that have the same text, which come again in each epoch, only the first is. It travels
        with the item that is yielded next; yield None if for long there might be none.

        Args:
            error: What was caught. Its text should tell what is left out.
            log: False, if it is not to be logged.

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
            self._reports.append(Report(error, log))
        elif log:  # no enqueuer runs this shard
            text = "".join(traceback.format_exception(error)).rstrip()  # frames hold much
            _log.error("skipped in shard %d: %r\n%s", self.index, error, text)

    def __getstate__(self) -> dict[str, Any]:
        # nobody listens to one that was carried elsewhere
        return {name: value for name, value in self.__dict__.items() if name != "_reports"}


def listen_to(shard: Shard) -> list[Report]:
    """Return a list to which a shard's reports go from now on; called by who runs it."""
    reports: list[Report] = []
    object.__setattr__(shard, "_reports", reports)
    return reports


def fresh_seed() -> int:
    """Draw a random seed from the operating system, without touching any global generator.

    It is below `2**31`, so that other libraries take it, too.
    """
    return secrets.randbits(31)


class GlobalStreams:
    """Keep the global random states of several shards apart in one worker process.

    Generators that use `random`, `numpy.random` or `torch` draw from a stream of their shard,
    even if one worker runs several shards in turn. `tensorflow`'s state cannot be exchanged, so
    it is only seeded. Frameworks that are imported later are seeded by `seed_imported`.
    """

    def __init__(self) -> None:
        self._current: Shard | None = None
        self._states: dict[int, list[Callable[[], None]]] = {}  # by index, of this epoch

    def enter(self, shard: Shard) -> None:
        """Make the global generators those of `shard`: seeded at first, later as it left them."""
        if shard == self._current:
            return
        if self._current is not None and self._current.epoch == shard.epoch:
            self._states[self._current.index] = restore = _save()
            if "torch" not in sys.modules:  # it may be when this shard has its next turn
                restore.append(functools.partial(_seed_torch, _words_of(self._current)))
        else:
            self._states.clear()
        known = self._states.pop(shard.index, None)
        if known is None:
            seed_globals(shard)
        else:
            for put_back in known:
                put_back()
        self._current = shard

    def seed_imported(self, framework: str) -> None:
        """Seed a framework that the code of the current shard has just imported."""
        if self._current is not None:
            FRAMEWORKS[framework](_words_of(self._current))


class TaskSeeds:
    """Seed the global generators of one worker process for the task that it does."""

    def __init__(self) -> None:
        self._current: Task | None = None

    def enter(self, task: Task) -> None:
        """Seed all that are imported, but for those of GPUs, which take far longer."""
        self._current = task
        seed_globals(task, gpus=False)

    def seed_imported(self, framework: str) -> None:
        """Seed a framework that the code of the current task has just imported."""
        if self._current is not None:
            FRAMEWORKS[framework](_words_of(self._current))


@contextlib.contextmanager
def borrowed_globals(shard: Seeded) -> Iterator[None]:
    """Seed this process's global generators as a worker process's, and put them back at the end.

    Those of tensorflow and of GPUs are left alone: they cannot be put back.
    """
    restore = _save()
    try:
        seed_globals(shard, gpus=False, tensorflow=False)
        yield
    finally:
        for put_back in restore:
            put_back()


def seed_globals(place: Seeded, gpus: bool = True, tensorflow: bool = True) -> None:
    """Seed the global generators of this process.

    Args:
        place: Whose seeds they get.
        gpus: Whether torch's generators of GPUs are among them, which takes far longer.
        tensorflow: Whether tensorflow's is, which cannot be put back.
    """
    words = _words_of(place)
    random.seed(int(words[0]) << 64 | int(words[1]))
    np.random.seed(words[2:6].astype(np.uint32))  # the lower halves
    _seed_torch(words, gpus)
    if tensorflow:
        _seed_tensorflow(words)


def _words_of(place: Seeded) -> np.ndarray:
    return place._sequence(1).generate_state(8, np.uint64)


def _seed_torch(words: np.ndarray, gpus: bool = True) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "manual_seed"):
        seed = torch.manual_seed if gpus else torch.default_generator.manual_seed
        seed(int(words[6]) >> 1)


def _seed_tensorflow(words: np.ndarray) -> None:
    tf = sys.modules.get("tensorflow")
    if tf is not None and hasattr(tf, "random"):
        tf.random.set_seed(int(words[7]) >> 33)


FRAMEWORKS: dict[str, Callable[[np.ndarray], None]] = {
    "torch": _seed_torch,
    "tensorflow": _seed_tensorflow,
}
"""Those that are seeded when they are imported, and how."""


def _save() -> list[Callable[[], None]]:
    """Return functions that put the global generators back to where they are now."""
    python, legacy = random.getstate(), np.random.get_state()
    restore = [lambda: random.setstate(python), lambda: np.random.set_state(legacy)]
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_rng_state"):
        state = torch.get_rng_state()
        restore.append(lambda: torch.set_rng_state(state))
    return restore
