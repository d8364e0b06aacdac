"""Stages over samples of different lengths, with a state of their own; batches of like length.

    samples --SampleStream.windows()--> Window --planned--> plans --made--> batches or rows

A stage reads a window of its stream, plans from the lengths what it gives of it, and makes that one
by one. A position is the place of a window in the stream, and how much of it was delivered. So
nothing that waits in a window is saved: it is read and planned again, from the same seed.

With `shard`, all shards make the same plans of all samples, and each makes only what its turn is.
So no shard has to know what another one has, and all can end at the same number.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from enqueuer.common import checks
from enqueuer.common.text import an
from enqueuer.errors import StateMismatch
from enqueuer.sequences.lengths import as_lengths
from enqueuer.workers.shards import Shard
from enqueuer.workers.sources import FunctionSource, as_source, iterate, takes_next

Batch = TypeVar("Batch")
# Iterables of something else, or without an order that is the same in each process.
_NO_SAMPLES = (str, bytes, Mapping, set, frozenset)


class WindowPlace(NamedTuple):
    """Where a stage stands in its stream.

    Attributes:
        first_item: Number of the first item of the window.
        delivered: How much of the window: batches or rows, or tokens with `method="concat"`.
        source: State of the stream at the beginning of the window, if it has one.
    """

    first_item: int = 0
    delivered: int = 0
    source: Any = None


# What is planned of a stream, each with the place behind it.
Plans = Iterator[tuple[WindowPlace, Any]]


@dataclass(frozen=True)
class Window:
    """Samples that are planned together.

    Attributes:
        place: Its beginning.
        numbers: Number of each sample in the stream.
        lengths: Length of each sample.
        samples: The samples; None if they are fetched by their numbers.
    """

    place: WindowPlace
    numbers: Sequence[int]
    lengths: list[int]
    samples: list[Any] | None


class SampleStream:
    """The samples of a stage: an iterable, a function that returns one, or a sequence.

    Args:
        name: Name of the stage, for messages.
        samples: What the user passed.
        lengths: Length of each sample of a sequence; None: each is measured when it is read.
        measure: Function that returns the length of a sample; raises if there is none.
    """

    def __init__(
        self, name: str, samples: object, lengths: object, measure: Callable[[Any], object]
    ) -> None:
        self.name = name
        self._measure = measure
        self._lengths = None if lengths is None else as_lengths("lengths", lengths)
        self._samples: Any = samples
        if self._lengths is not None:
            self._check_sequence(len(self._lengths))
        elif callable(samples):
            is_bound = takes_next(samples, 0, "shard") is False
            self._samples = source = as_source(samples) if is_bound else None
            if not isinstance(source, FunctionSource) or source.is_async:
                raise TypeError(
                    f"{name}() needs an iterable, or a function without arguments but first_item=0 "
                    f"that returns one, got {samples!r:.80}; bind others with functools.partial"
                )
        elif isinstance(samples, _NO_SAMPLES) or not hasattr(samples, "__iter__"):
            raise TypeError(
                f"{name}() needs an iterable of samples in a fixed order, or a function that "
                f"returns one, got {an(type(samples).__name__)}"
            )

    def _check_sequence(self, count: int) -> None:
        if not hasattr(self._samples, "__getitem__") or not hasattr(self._samples, "__len__"):
            raise TypeError(
                "with lengths, samples are fetched by their numbers, so "
                f"{self.name}() needs a sequence, got {an(type(self._samples).__name__)}"
            )
        if (known := len(self._samples)) != count:
            raise ValueError(f"lengths must be {known}, one for each sample, got {count}")

    def windows(self, at: WindowPlace, size: int) -> Iterator[Window]:
        """Yield the windows from a place on, of so many samples; None belongs to none."""
        first = at.first_item
        if self._lengths is not None:
            for start in range(first, len(self._lengths), size):
                lengths = self._lengths[start : start + size].tolist()
                yield Window(WindowPlace(start), range(start, start + len(lengths)), lengths, None)
            return
        items, stateful = self._open(at)
        source = at.source
        while True:
            if source is None and stateful is not None:
                # It may change its state in place.
                source = copy.deepcopy(stateful.state_dict())
            place, source = WindowPlace(first, 0, source), None
            read = list(itertools.islice(items, size))
            if not read:
                return
            numbers = [first + k for k, sample in enumerate(read) if sample is not None]
            samples = [sample for sample in read if sample is not None]
            lengths = [self._length(n, s) for n, s in zip(numbers, samples, strict=True)]
            yield Window(place, numbers, lengths, samples)
            first += len(read)

    def plans(
        self,
        at: WindowPlace,
        size: int,
        seed: int | None,
        planned: Callable[[Window, np.random.Generator | None], list[Any]],
    ) -> Plans:
        """Yield each plan of the windows from a place on, with the place behind it.

        Args:
            at: WindowPlace to begin with.
            size: Number of samples of a window.
            seed: Seed of the order of the plans; None: they are sorted.
            planned: Function that returns the plans of a window.
        """
        delivered = at.delivered
        for window in self.windows(at, size):
            first, _, source = window.place
            rng = None if seed is None else np.random.default_rng([seed, first])
            plans = planned(window, rng)
            order = (
                sorted(plans) if rng is None else [plans[k] for k in rng.permutation(len(plans))]
            )
            for count, plan in enumerate(order[delivered:], delivered + 1):
                yield WindowPlace(first, count, source), plan
            delivered = 0

    def _open(self, at: WindowPlace) -> tuple[Iterator[Any], Any]:
        """Return the samples from a place on, and the object that has their state, or None."""
        items, first = self._samples, at.first_item
        if isinstance(items, FunctionSource):
            if items.can_begin_anywhere:
                return iter(items.open(Shard(), first)), None
            items = items.open(Shard())
        # Before its first sample, a stream may still have the state of the end of an earlier epoch.
        iterator, stateful = iterate(items, copy.deepcopy(at.source), is_at_end=first == 0)
        if stateful is None:
            # They are made again, as nothing says how to begin behind them.
            next(itertools.islice(iterator, first, first), None)
        return iterator, stateful

    def _length(self, number: int, sample: object) -> int:
        try:
            length = self._measure(sample)
        except TypeError as error:
            raise TypeError(
                f"{self.name}(): sample {number} has no length: {sample!r:.50}"
            ) from error
        if type(length) is int and length > 0:
            return length
        checked = checks.count(f"{self.name}(): the length of sample {number}", length)
        if checked == 0:
            raise ValueError(f"{self.name}(): sample {number} is empty; leave it out before")
        return checked

    def sample(self, window: Window, k: int) -> Any:
        """Return a sample of a window; raise ValueError if it has not the length it should have."""
        if window.samples is not None:
            return window.samples[k]
        number = window.numbers[k]
        sample = self._samples[number]
        if (length := self._length(number, sample)) != window.lengths[k]:
            raise ValueError(
                f"{self.name}(): sample {number} has length {length}, and lengths says "
                f"{window.lengths[k]}; give the lengths of these samples in their order"
            )
        return sample


class SequenceStage(Generic[Batch]):
    """What `pack` and `batch_by_length` return: an iterable with a state of its own.

    Iterating over it begins with the first item, or after `load_state_dict` at the position
    that was loaded.

    Args:
        plans: Function that returns the plans of all shards from a place on, by a seed.
        make: Function that returns what was planned.
        options: What the plans depend on.
        rng: Generator of the seed, or None.
        shard: The shard whose plans are made; None: all.
        drop_last: Whether the last plans are left out if not every shard can have one.
    """

    def __init__(
        self,
        plans: Callable[[WindowPlace, int | None], Plans],
        make: Callable[[Any], Batch],
        options: dict[str, Any],
        rng: np.random.Generator | None,
        shard: Shard | None,
        drop_last: bool,
    ) -> None:
        self._plans, self._make = plans, make
        self._seed = _seed_of(rng, shard)
        self._drop_last = checks.flag("drop_last", drop_last)
        if drop_last and shard is None:
            raise ValueError(
                "drop_last=True leaves out what cannot be divided evenly among all shards; pass "
                "shard=shard with it, and the samples of all shards"
            )
        self._index, self._count = (0, 1) if shard is None else (shard.index, shard.count)
        self._options = {**options, "shards": self._count}
        self._place = WindowPlace()
        self._loaded: WindowPlace | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Yield what this shard gets; its place is already that of the next one."""
        at, self._loaded = self._loaded or WindowPlace(), None
        self._place = at
        plans = self._plans(at, self._seed)
        while turn := list(itertools.islice(plans, self._count)):
            if self._drop_last and len(turn) < self._count:
                return
            self._place = turn[-1][0]
            if self._index < len(turn):
                yield self._make(turn[self._index][1])

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last item: a few numbers, and the state of the stream."""
        first, count, source = self._place
        state = {"first_item": first, "delivered": count, "seed": self._seed}
        if source is not None:
            state["source"] = source
        return {**state, "options": self._options}

    @checks.reading("a stage of sequences")
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin at a position that `state_dict` returned.

        Raises:
            StateMismatch: It is that of another stage, or of one with other options.
        """
        for name, here in self._options.items():
            if (saved := state["options"].get(name)) != here:
                raise StateMismatch(f"{name} is {saved!r} in the state and {here!r} here")
        seed = state["seed"]
        self._seed = None if seed is None else checks.count("seed", seed)
        first, count = (checks.count(name, state[name]) for name in ("first_item", "delivered"))
        self._place = self._loaded = WindowPlace(first, count, state.get("source"))


def _seed_of(rng: object, shard: Shard | None) -> int | None:
    if shard is not None and not isinstance(shard, Shard):
        raise TypeError(f"shard must be a Shard or None, got {shard!r}")
    if rng is None:
        return None
    if not isinstance(rng, np.random.Generator):
        raise TypeError(f"rng must be a numpy.random.Generator, such as shard.rng, got {rng!r}")
    if shard is not None and rng is shard.rng:
        raise ValueError(
            "with shard=shard all shards must draw alike, and shard.rng differs between them; "
            "pass rng=numpy.random.default_rng([shard.random_seed, shard.epoch])"
        )
    return int(rng.integers(2**63))


def batch_by_length(
    samples: Any,
    *,
    length: Callable[[Any], int] = len,
    max_tokens: int | None = None,
    batch_size: int | None = None,
    window: int = 1000,
    rng: np.random.Generator | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    lengths: Sequence[int] | np.ndarray | None = None,
    shard: Shard | None = None,
    drop_last: bool = False,
) -> SequenceStage[Any]:
    """Put samples of like length into a batch, so that little of it is padding.

    The samples of a window are sorted by length and cut into batches ("buckets"). Each sample is
    in exactly one batch.

    Args:
        samples: Iterable of samples, or a function that returns one. If the function has a
            parameter `first_item=0`, as for `GeneratorEnqueuer`, no earlier sample is read again
            on resumption. With `lengths`, a sequence.
        length: Function that returns the length of a sample; `len` by default.
        max_tokens: Largest size of a batch with its padding: number of samples times the longest.
        batch_size: Largest number of samples of a batch. Give this, `max_tokens`, or both.
        window: Number of samples that wait in memory, 1000 by default. A larger one needs less
            padding, and mixes more. It is rounded up to a multiple of `batch_size`.
        rng: Generator, usually `shard.rng`, from which a seed of the order of the batches is drawn
            once. None, the default: they have the order of their first samples.
        collate: Function of the list of samples, such as `pad`; without it the batch is the list.
        lengths: Length of each sample of a sequence. Then a sample is fetched only for its batch.
        shard: The shard, if `samples` are those of all shards: all make the same batches, and each
            has those that are its turn. None, the default: the batches are all for this shard.
        drop_last: With `shard`, leave out the last batches if not every shard can have one, so that
            all have the same number.

    Returns:
        An iterable with `state_dict` and `load_state_dict`, which a generator function may return.

    Raises:
        TypeError: An argument, or a length, has the wrong type.
        ValueError: An argument is out of its range; a sample is empty, or longer than `max_tokens`.

    Example:
        >>> from enqueuer import batch_by_length
        >>> words = ["a", "bb", "cccc", "d", "eeee", "ff"]
        >>> list(batch_by_length(words, max_tokens=4))
        [['a', 'd'], ['bb', 'ff'], ['cccc'], ['eeee']]
    """
    if max_tokens is None and batch_size is None:
        raise ValueError("batch_by_length() needs max_tokens, batch_size or both")
    if not callable(length):
        raise TypeError(f"length must be a function of a sample, got {length!r:.50}; see lengths")
    checks.function("collate", collate, "of a list of samples")
    most = checks.optional(checks.positive)
    budget, largest = most("max_tokens", max_tokens), most("batch_size", batch_size)
    size = checks.positive("window", window)
    size += -size % (largest or 1)
    stream = SampleStream("batch_by_length", samples, lengths, length)
    options = {"max_tokens": budget, "batch_size": largest, "window": size}
    planner = Buckets(stream, size, budget or math.inf, largest or math.inf, collate)
    return SequenceStage(planner.plans, planner.made, options, rng, shard, drop_last)


@dataclass(frozen=True)
class Buckets:
    """Batches of like length; a plan is the places of its samples in a window, and the window."""

    stream: SampleStream
    window: int
    max_tokens: float
    batch_size: float
    collate: Callable[[list[Any]], Any] | None

    def plans(self, at: WindowPlace, seed: int | None) -> Plans:
        """Yield each batch with the place behind it."""
        return self.stream.plans(at, self.window, seed, self._planned)

    def _planned(
        self, window: Window, rng: np.random.Generator | None
    ) -> list[tuple[list[int], Window]]:
        lengths = np.array(window.lengths, np.int64)
        order = np.arange(len(lengths)) if rng is None else rng.permutation(len(lengths))
        batches: list[list[int]] = []
        for k in order[np.argsort(lengths[order], kind="stable")].tolist():
            # In this order, it is the longest of its batch.
            longest = window.lengths[k]
            if longest > self.max_tokens:
                raise ValueError(
                    f"batch_by_length(): sample {window.numbers[k]} has length {longest}, which "
                    f"is more than max_tokens={self.max_tokens}; give a larger budget, or leave "
                    "such samples out before"
                )
            if not batches or len(batches[-1]) >= min(self.batch_size, self.max_tokens // longest):
                batches.append([])
            batches[-1].append(k)
        return [(sorted(batch), window) for batch in batches]

    def made(self, plan: tuple[list[int], Window]) -> Any:
        """Return the batch of a plan."""
        places, window = plan
        samples = [self.stream.sample(window, k) for k in places]
        return samples if self.collate is None else self.collate(samples)
