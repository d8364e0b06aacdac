"""mix(): several generator functions as one, with fixed proportions.

The next source is chosen so that each has its share in every prefix. The rule is Tijdeman's for the
chairman assignment problem: after `n` turns, the number of turns of each source differs from `n`
times its share by less than 1.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from enqueuer.common import checks
from enqueuer.common.text import an
from enqueuer.order.position import fingerprint_of
from enqueuer.workers.shards import Shard, part_for
from enqueuer.workers.sources import (
    FunctionSource,
    as_source,
    close,
    is_stateful,
    iterate,
)


class Turns:
    """The turns of several sources, in a fixed order.

    A source may have its next turn from its release on, and should have it before its deadline.
    Of those that may, the one with the earliest deadline is next.

    Args:
        weights: Weights of the sources, which are positive.
        taken: Number of turns that each source has had; by default none.

    Attributes:
        taken: Number of turns that each source has had.

    Example:
        >>> turns = Turns([2, 1])
        >>> [turns.next() for _ in range(6)]
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


Item = TypeVar("Item")
AtEnd = Literal["stop", "restart", "continue"]

_END = object()
# A share below this would have its first turn after 500 billion items.
_LEAST_SHARE = 1e-12


def mix(
    generators: Mapping[str, Callable[[Shard], Iterable[Item]] | Callable[[], Iterable[Item]]],
    weights: Mapping[str, float] | Sequence[float] | None = None,
    *,
    at_end: AtEnd = "stop",
) -> Callable[[Shard], Iterable[Item]]:
    """Return a generator function whose items come from several, in fixed proportions.

    Of the first `n` items, the share of each generator differs from its weight by at most
    `1 / sqrt(n)`; in a shard, by at most `2 / n`. The order is always the same for the same names,
    proportions of the weights and shards. Each generator has random numbers of its own, which
    depend on its name.

    Args:
        generators: Generator functions, by name. Each takes no argument, or the `Shard`.
        weights: Positive number for each generator, by name or in the same order, and at least
            1e-12 of their sum. None, the default: all have the same.
        at_end: What to do when one of the generators has ended. `"stop"`, the default: the shard
            ends, and the proportions hold until its end. `"restart"`: it is called again, with
            new random numbers, until each has ended once. `"continue"`: the others continue, with
            the proportions among them, until all have ended.

    Returns:
        A generator function for `GeneratorEnqueuer`, `prefetch` or another `mix`.

    Raises:
        TypeError: An argument has the wrong type, or a generator is not a function.
        ValueError: The weights do not fit, are not positive, or differ too much.

    Example:
        >>> from enqueuer import mix, prefetch
        >>> letters, numbers = lambda: iter("abcdef"), lambda: iter(range(9))
        >>> list(prefetch(mix({"letters": letters, "numbers": numbers}, weights=[2, 1])))
        ['a', 0, 'b', 'c', 1, 'd', 'e', 2, 'f']
    """
    if not isinstance(generators, Mapping):
        raise TypeError(
            "mix() needs a dict of generator functions by name, got "
            f"{an(type(generators).__name__)}"
        )
    if not generators:
        raise ValueError("mix() needs at least one generator function")
    if at_end not in get_args(AtEnd):
        raise ValueError(f"at_end must be 'stop', 'restart' or 'continue', got {at_end!r}")
    sources = {name: _source(name, function) for name, function in generators.items()}
    numbers = dict(zip(sources, _weights(list(sources), weights), strict=True))
    # Of equally urgent turns, the first by name is next, in whatever order the dict was built.
    # Rounded, weights in the same proportions are the same shares.
    total = math.fsum(numbers.values())
    shares = {name: float(f"{numbers[name] / total:.12g}") for name in sorted(numbers)}
    return Mixture({name: sources[name] for name in shares}, tuple(shares.values()), at_end)


def _source(name: object, function: object) -> FunctionSource:
    if not isinstance(name, str):
        raise TypeError(f"the names of mix() must be strings, got {name!r}")
    if not callable(function):
        raise TypeError(
            f"mix() needs generator functions, but {name!r} is {an(type(function).__name__)}; "
            "pass a function that returns it anew for each shard and epoch"
        )
    source = as_source(function)
    assert isinstance(source, FunctionSource), "an object that can be called and is no iterator"
    return source


def _weights(names: list[str], weights: object) -> tuple[float, ...]:
    """Return a weight for each name; raise TypeError or ValueError if they do not fit."""
    if weights is None:
        return (1.0,) * len(names)
    if isinstance(weights, Mapping):
        if set(weights) != set(names):
            raise ValueError(f"weights must be for {names}, got them for {list(weights)}")
        values = [weights[name] for name in names]
    elif isinstance(weights, Iterable) and not isinstance(weights, (str, bytes)):
        values = list(weights)
    else:
        raise TypeError(f"weights must be a dict or a list of numbers, got {weights!r}")
    if len(values) != len(names):
        raise ValueError(f"weights must be {len(names)}, one for each name, got {len(values)}")
    for name, value in zip(names, values, strict=True):
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            raise TypeError(f"the weight of {name!r} must be a number, got {value!r}")
        if not 0 < value < math.inf:
            raise ValueError(
                f"the weight of {name!r} must be > 0, got {value!r}; leave the generator out to "
                "take nothing from it"
            )
    try:
        floats = tuple(map(float, values))
    except OverflowError:
        floats = (math.inf,)
    total, least = sum(floats), min(floats)
    if not math.isfinite(total):
        raise ValueError(f"the sum of the weights is too large for a float: {values!r}")
    if least < _LEAST_SHARE * total:
        raise ValueError(
            f"the weights differ too much: the share of {names[floats.index(least)]!r} is below "
            f"{_LEAST_SHARE:g}; leave the generator out to take nothing from it"
        )
    return floats


@dataclass(frozen=True)
class Mixture:
    """The generator function that `mix` returns.

    Attributes:
        sources: Sources by name, sorted.
        weights: Share of each source.
        at_end: What happens when a source has ended.
    """

    sources: Mapping[str, FunctionSource]
    weights: tuple[float, ...]
    at_end: AtEnd

    def __call__(self, shard: Shard) -> Iterable[Any]:
        """Return an iterable over the items of a shard; with a state, if all sources have one."""
        mixed = _Mixed(self, shard)
        return mixed if mixed.is_stateful else iter(mixed)


@fingerprint_of.register
def _fingerprint_of(mixture: Mixture) -> dict[str, Any]:
    return {
        "name": "mix",
        "weights": dict(zip(mixture.sources, mixture.weights, strict=True)),
        "at_end": mixture.at_end,
        "parts": {name: fingerprint_of(source) for name, source in mixture.sources.items()},
    }


class _Part:
    """One source of a mixture in one shard, and the items that are left of it.

    Attributes:
        name: Name of the source.
        weight: Weight of the source.
        has_ended: Whether it has ended, at least once.
    """

    def __init__(self, mixture: Mixture, name: str, weight: float, shard: Shard) -> None:
        self.name = name
        self.weight = weight
        self.has_ended = False
        self._source = mixture.sources[name]
        self._shard = shard
        # How often it was called before.
        self._round = 0
        self._open()

    def _open(self) -> None:
        """Call the generator function, which does not begin to run."""
        items = self._source.open(part_for(self._shard, self.name, self._round))
        # What has a state is iterated later, as one may be loaded first.
        self._items: Any = items if is_stateful(items) else iter(items)
        self._iterator: Iterator[Any] | None = None
        self._is_empty = True

    @property
    def is_stateful(self) -> bool:
        return is_stateful(self._items)

    def next(self) -> Any:
        """Return the next item, or `_END`."""
        if self._iterator is None:
            self._iterator = iter(self._items)
        item = next(self._iterator, _END)
        if item is not _END:
            self._is_empty = False
        return item

    def restart(self) -> None:
        """Call the generator function again; raise ValueError if it had no items."""
        if self._is_empty:
            raise ValueError(
                f"{self.name!r} has no items in shard {self._shard.index} of "
                f"{self._shard.count}, so mix() cannot restart it; give fewer shards, or "
                "at_end='continue'"
            )
        self._round += 1
        self._open()

    def close(self) -> None:
        """Run the `finally` of a generator."""
        close(self._iterator)

    def state_dict(self) -> dict[str, Any]:
        state = self._items.state_dict()
        return {"round": self._round, "has_ended": self.has_ended, "state": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._round = checks.count("round", state["round"])
        self.has_ended = checks.flag("has_ended", state["has_ended"])
        self._open()
        self._iterator, _ = iterate(self._items, state["state"])
        # It had an item, or it would not have a state.
        self._is_empty = False


class _Mixed:
    """The items of a mixture in one shard."""

    def __init__(self, mixture: Mixture, shard: Shard) -> None:
        self._at_end = mixture.at_end
        weights = zip(mixture.sources, mixture.weights, strict=True)
        self._parts = [_Part(mixture, name, weight, shard) for name, weight in weights]
        self._turns = Turns(mixture.weights)
        # Otherwise all shards would begin with the same source, and with many shards the first
        # items of all of them would not have the proportions. The last shard begins with the first
        # turn: in the opposite order, the second item of the first shard would be of the source
        # that the second shard has begun with, right before it if there are two shards.
        for _ in range(shard.count - 1 - shard.index):
            self._turns.next()

    @property
    def is_stateful(self) -> bool:
        return all(part.is_stateful for part in self._parts)

    def __iter__(self) -> Iterator[Any]:
        """Yield the items of all sources; at the end, close those that have not ended."""
        with contextlib.ExitStack() as opened:
            for part in self._parts:
                opened.callback(part.close)
            while self._parts:
                part = self._parts[self._turns.next()]
                item = part.next()
                while item is None or (item is _END and self._goes_on(part)):
                    if item is None:
                        yield None
                    item = part.next()
                if item is not _END:
                    yield item
                    # Otherwise it would live on while the next one is made.
                    del item
                elif self._at_end == "continue":
                    self._parts.remove(part)
                    self._turns = Turns([part.weight for part in self._parts])
                else:
                    return

    def _goes_on(self, part: _Part) -> bool:
        """Restart a source that has ended; return False if it is not to be restarted."""
        part.has_ended = True
        if self._at_end != "restart" or all(part.has_ended for part in self._parts):
            return False
        part.restart()
        return True

    def state_dict(self) -> dict[str, Any]:
        parts = {part.name: part.state_dict() for part in self._parts}
        return {"parts": parts, "taken": list(self._turns.taken)}

    @checks.reading("mix()")
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names, known = set(state["parts"]), {part.name for part in self._parts}
        # Those that have ended are left out.
        if not names <= known or (self._at_end != "continue" and names != known):
            raise ValueError(f"it has parts {sorted(names)}, and here are {sorted(known)}")
        if len(state["taken"]) != len(names):
            raise ValueError(f"it has turns of {len(state['taken'])} parts, not of {len(names)}")
        self._parts = [part for part in self._parts if part.name in state["parts"]]
        for part in self._parts:
            part.load_state_dict(state["parts"][part.name])
        counts = [checks.count("taken", turns) for turns in state["taken"]]
        taken = dict(zip(state["parts"], counts, strict=True))
        counts = [taken[part.name] for part in self._parts]
        self._turns = Turns([part.weight for part in self._parts], counts)
