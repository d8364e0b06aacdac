"""mix(): several generator functions as one, in proportions that may change.

The next source is chosen so that each has its share in every prefix. The rule is Tijdeman's for the
chairman assignment problem: after `n` turns, the number of turns of each source differs from the
sum of its shares until then by less than 1.

Shares are whole numbers of parts, and so are the sums: what is resumed is the same to the bit.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from enqueuer.common import checks
from enqueuer.common.text import an
from enqueuer.order.position import fingerprint_of, named
from enqueuer.workers.shards import Shard, part_for
from enqueuer.workers.sources import FunctionSource, as_source, close, is_stateful, iterate

# All shares of a turn together.
_PARTS = 2**60
# Parts by which rounded shares may be off after billions of samples.
_ROUNDED = 2**33
# Turns that a schedule is looked at ahead, which are enough for shares of a thousandth.
_AHEAD = 1000


class Schedule:
    """The shares of several sources at each sample.

    Args:
        weights: Weights at all samples; a list of stages, each a number of samples and its weights,
            of which the last one does not end; or a function of the number of samples before.
        names: Names of the sources, in the order of their shares.
    """

    def __init__(self, weights: Any, names: Sequence[str]) -> None:
        self.names = tuple(sorted(names))
        self._order = names
        self._function = weights if callable(weights) else None
        # The number of the sample at which each stage ends, and its shares.
        self._stages: list[tuple[float, tuple[int, ...]]] = []
        if self._function is not None:
            self.at(0)
            return
        stages, end = _stages_in(weights), 0
        for count, own in stages:
            end += count
            self._stages.append((end, shares_of(names, own, may_be_0=len(stages) > 1)))
        self._stages[-1] = math.inf, self._stages[-1][1]
        for name, *shares in zip(self.names, *(own for _, own in self._stages), strict=True):
            if not any(shares):
                raise ValueError(f"the weight of {name!r} is 0 in all stages; leave it out")

    def at(self, sample: int) -> tuple[tuple[int, ...], float]:
        """Return the shares at a sample, and the number of the first one that may have others."""
        if self._function is None:
            return next((shares, end) for end, shares in self._stages if sample < end)
        weights = self._function(sample)
        try:
            return shares_of(self._order, weights, may_be_0=True), sample + 1
        except (TypeError, ValueError) as error:
            raise type(error)(f"weights({sample}): {error}") from None

    def identity(self) -> dict[str, Any]:
        """Return what a state says of the weights, by names."""
        if self._function is not None:
            return named(weights=self._function)
        stages = [
            [end, {name: part / _PARTS for name, part in zip(self.names, parts, strict=True)}]
            for end, parts in self._stages
        ]
        return {"weights": stages[0][1] if len(stages) == 1 else [*stages[:-1], stages[-1][1:]]}


class Turns:
    """The turns of several sources, in a fixed order.

    A source may have its next turn as soon as its shares are more than its turns by a margin, and
    should have it before they are more by 1 without the margin. Of those that may, the one that
    should have it first is next.

    Args:
        schedule: Shares at each sample of all shards.
        shard: Shard whose turns these are: every `count`-th sample.
        names: Names of the sources that have not ended; None: all of the schedule.
        begun: Number of samples of the shard before.
        lags: Parts that each source is owed, by its name.

    Attributes:
        samples: Number of samples of the shard until now.
        lags: Parts that each source is owed, in the order of the names.

    Example:
        >>> turns = Turns(Schedule([2, 1], ["a", "b"]), Shard())
        >>> [turns.next() for _ in range(6)]
        [0, 1, 0, 0, 1, 0]
    """

    def __init__(
        self,
        schedule: Schedule,
        shard: Shard,
        names: Iterable[str] | None = None,
        begun: int = 0,
        lags: Sequence[int] | None = None,
    ) -> None:
        self._schedule = schedule
        self._shard = shard
        kept = schedule.names if names is None else tuple(names)
        self._places = [schedule.names.index(name) for name in kept]
        self.samples = begun
        self.lags = [0] * len(kept) if lags is None else list(lags)
        self._margin = _PARTS // (2 * len(kept) - 2) if len(kept) > 1 else 0
        # The next turns that have the same shares, and the turn behind them; those ahead last.
        self._runs: list[tuple[float, Sequence[int]]] = []

    def next(self) -> int:
        """Return the index of the source whose turn is next."""
        if self._runs and self._runs[0][0] <= self.samples:
            del self._runs[0]
        _, shares = self._run(0)
        self._before = self.lags
        self.lags = lags = [lag + share for lag, share in zip(self.lags, shares, strict=True)]
        self.samples += 1
        ready = [at for at, lag in enumerate(lags) if lag >= self._margin - _ROUNDED]
        # Rounding can leave none.
        chosen = ready[0] if len(ready) == 1 else self._first_due(ready or range(len(lags)))
        lags[chosen] -= _PARTS
        return chosen

    def undo(self) -> None:
        """Take back the last turn, which gave no sample; it is the next one again."""
        self.samples, self.lags = self.samples - 1, self._before

    def shares(self) -> Sequence[int]:
        """Return the shares of the next turn."""
        return self._run(0)[1]

    def _first_due(self, ready: Sequence[int]) -> int:
        """Return the source that first should have had its turn."""
        most = _PARTS - self._margin
        needs = [most - self.lags[at] for at in ready]
        turn, index = self.samples, 0
        while True:
            end, shares = self._run(index)
            if end > turn:
                # Turns until each is due, if these shares stay.
                dues = [
                    round(need / shares[at], 6) if shares[at] else (need > 0) * _AHEAD
                    for need, at in zip(needs, ready, strict=True)
                ]
                due = min(dues)
                if turn + due <= end or turn - self.samples >= _AHEAD:
                    return ready[dues.index(due)]
                count = int(end) - turn
                needs = [need - shares[at] * count for need, at in zip(needs, ready, strict=True)]
                turn = int(end)
            index += 1

    def _run(self, index: int) -> tuple[float, Sequence[int]]:
        """Return a run of the next turns with equal shares: the turn behind it, and the shares."""
        count = self._shard.count
        while len(self._runs) <= index:
            turn = int(self._runs[-1][0]) if self._runs else self.samples
            # Turns before the first sample have its shares.
            all_shares, end = self._schedule.at(max(turn, 0) * count + self._shard.index)
            shares: Sequence[int] = [all_shares[at] for at in self._places]
            if sum(shares) != _PARTS:
                # Those that are left have no turns here by the weights: all have the same.
                shares = parts_of(shares if any(shares) else [1] * len(shares))
            behind = end if end == math.inf else -((self._shard.index - int(end)) // count)
            self._runs.append((behind, shares))
        return self._runs[index]


Item = TypeVar("Item")
AtEnd = Literal["stop", "restart", "continue"]
Weights = Mapping[str, float] | Sequence[float]

_END = object()
# A share below this would have its first turn after 500 billion items.
_LEAST_SHARE = 1e-12


def mix(
    generators: Mapping[str, Callable[[Shard], Iterable[Item]] | Callable[[], Iterable[Item]]],
    weights: Weights | Sequence[tuple[int, Weights]] | Callable[[int], Weights] | None = None,
    *,
    at_end: AtEnd = "stop",
) -> Callable[[Shard], Iterable[Item]]:
    """Return a generator function whose items come from several, in proportions that may change.

    Of the first `n` items of a shard, the share of each generator differs from its weight by less
    than `2 / n`, and in the only shard by less than `1 / n`; for weights that change, from the mean
    of its weights until then. Of all items, it differs from fixed weights by at most
    `1 / sqrt(n)`. The order is always the same
    for the same names, proportions of the weights and shards. Each generator has random numbers of
    its own, which depend on its name.

    Args:
        generators: Generator functions, by name. Each takes no argument, or the `Shard`.
        weights: Positive number for each generator, by name or in the same order, and at least
            1e-12 of their sum. None, the default: all have the same. Or a list of stages, each the
            number of samples of all shards that it lasts, and its weights; the last one goes on.
            Or a function of the number of samples so far that returns weights; it must always
            return the same, and is called up to 1000 samples ahead, so proportions hold for shares
            of a thousandth or more. In stages and functions, a weight may be 0.
        at_end: What to do when one of the generators has ended. `"stop"`, the default: the shard
            ends, and the proportions hold until its end. `"restart"`: it is called again, with
            new random numbers, until each has ended once. `"continue"`: the others continue, with
            the proportions among them, until all have ended; with the same, where their weights
            are 0.

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
        >>> stages = [(4, {"letters": 1, "numbers": 0}), (1, [1, 1])]
        >>> list(prefetch(mix({"letters": letters, "numbers": numbers}, weights=stages)))
        ['a', 'b', 'c', 'd', 'e', 0, 'f', 1]
    """
    if not isinstance(generators, Mapping):
        raise TypeError(
            "mix() needs a dict of generator functions by name, got "
            f"{an(type(generators).__name__)}"
        )
    if not generators:
        raise ValueError("mix() needs at least one generator function")
    checks.choice("at_end", at_end, get_args(AtEnd))
    sources = {name: _source(name, function) for name, function in generators.items()}
    # Of equally urgent turns, the first by name is next, in whatever order the dict was built.
    names = sorted(sources)
    schedule = Schedule([1] * len(names) if weights is None else weights, list(sources))
    if at_end == "restart" and not callable(weights) and 0 in (last := schedule.at(2**62)[0]):
        raise ValueError(
            f"the weight of {names[last.index(0)]!r} is 0 in the last stage, so that it might "
            "never end, and at_end='restart' ends when each has; give another at_end"
        )
    return Mixture({name: sources[name] for name in names}, schedule, at_end)


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


def _stages_in(weights: Any) -> list[tuple[int, Any]]:
    """Return the stages of weights, each with its number of samples."""
    is_list = isinstance(weights, (list, tuple))
    if not is_list or not any(isinstance(one, (list, tuple)) for one in weights):
        return [(1, weights)]
    for stage in weights:
        if not isinstance(stage, (list, tuple)) or len(stage) != 2:
            raise TypeError(f"a stage must be a number of samples and weights, got {stage!r}")
    return [(checks.positive("the samples of a stage", count), own) for count, own in weights]


def shares_of(names: Sequence[str], weights: object, may_be_0: bool) -> tuple[int, ...]:
    """Return the share of each name, sorted; raise TypeError or ValueError if they do not fit."""
    if isinstance(weights, Mapping):
        if set(weights) != set(names):
            raise ValueError(f"weights must be for {list(names)}, got them for {list(weights)}")
        values = [weights[name] for name in names]
    elif isinstance(weights, Iterable) and not isinstance(weights, (str, bytes, set, frozenset)):
        values = list(weights)
    else:
        raise TypeError(f"weights must be a dict or a list of numbers, got {weights!r}")
    if len(values) != len(names):
        raise ValueError(f"weights must be {len(names)}, one for each name, got {len(values)}")
    for name, value in zip(names, values, strict=True):
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            raise TypeError(f"the weight of {name!r} must be a number, got {value!r}")
        if not 0 <= value < math.inf or (value == 0 and not may_be_0):
            raise ValueError(
                f"the weight of {name!r} must be {'>= 0' if may_be_0 else '> 0'}, got {value!r}; "
                "leave the generator out to take nothing from it"
            )
    try:
        floats = [float(value) for value in values]
    except OverflowError:
        floats = [math.inf]
    if not math.isfinite(sum(floats)):
        raise ValueError(f"the sum of the weights is too large for a float: {values!r}")
    if not any(floats):
        raise ValueError(f"the sum of the weights is 0; one of {list(names)} must be > 0")
    least = min(filter(None, floats))
    if least < _LEAST_SHARE * sum(floats):
        raise ValueError(
            f"the weights differ too much: the share of {names[floats.index(least)]!r} is below "
            f"{_LEAST_SHARE:g}; leave the generator out to take nothing from it"
        )
    by_name = dict(zip(names, floats, strict=True))
    return parts_of([by_name[name] for name in sorted(names)])


def parts_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Return shares of a turn.

    Rounded, weights in the same proportions are the same shares.

    Example:
        >>> parts_of([2, 1]) == parts_of([0.2, 0.1]), sum(parts_of([1, 1, 1])) == _PARTS
        (True, True)
    """
    total = math.fsum(weights)
    parts = [round(float(f"{weight / total:.12g}") * _PARTS) for weight in weights]
    parts[parts.index(max(parts))] += _PARTS - sum(parts)
    return tuple(parts)


@dataclass(frozen=True)
class Mixture:
    """The generator function that `mix` returns.

    Attributes:
        sources: Sources by name, sorted.
        schedule: Shares of the sources.
        at_end: What happens when a source has ended.
    """

    sources: Mapping[str, FunctionSource]
    schedule: Schedule
    at_end: AtEnd

    def __call__(self, shard: Shard) -> Iterable[Any]:
        """Return an iterable over the items of a shard; with a state, if all sources have one."""
        mixed = _Mixed(self, shard)
        return mixed if mixed.is_stateful else iter(mixed)


@fingerprint_of.register
def _fingerprint_of(mixture: Mixture) -> dict[str, Any]:
    return {
        "name": "mix",
        **mixture.schedule.identity(),
        "at_end": mixture.at_end,
        "parts": {name: fingerprint_of(source) for name, source in mixture.sources.items()},
    }


class _Part:
    """One source of a mixture in one shard, and the items that are left of it.

    Attributes:
        name: Name of the source.
        has_ended: Whether it has ended, at least once.
    """

    def __init__(self, mixture: Mixture, name: str, shard: Shard) -> None:
        self.name = name
        self.has_ended = False
        self._source = mixture.sources[name]
        self._shard = shard
        # How often it was called before, and how many items it has given since.
        self._round = self._delivered = 0
        # A state of its own is used before `first_item`.
        self._can_begin = False
        self._open()
        self._can_begin = self._source.can_begin_anywhere and not is_stateful(self._items)

    def _open(self) -> None:
        """Call the generator function, which does not begin to run."""
        part = part_for(self._shard, self.name, self._round)
        items = self._source.open(part, self._delivered if self._can_begin else 0)
        # What has a state is iterated later, as one may be loaded first.
        self._items: Any = items if is_stateful(items) else iter(items)
        self._iterator: Iterator[Any] | None = None
        self._is_empty = True

    @property
    def is_stateful(self) -> bool:
        return self._can_begin or is_stateful(self._items)

    def next(self) -> Any:
        """Return the next item, or `_END`."""
        if self._iterator is None:
            self._iterator = iter(self._items)
        item = next(self._iterator, _END)
        if item is not _END:
            self._delivered += 1
            self._is_empty = self._is_empty and item is None
        return item

    def restart(self) -> None:
        """Call the generator function again; raise ValueError if it had no items."""
        if self._is_empty:
            raise ValueError(
                f"{self.name!r} has no items in shard {self._shard.index} of "
                f"{self._shard.count}, so mix() cannot restart it; give fewer shards, or "
                "at_end='continue'"
            )
        self._round, self._delivered = self._round + 1, 0
        self._open()

    def close(self) -> None:
        """Run the `finally` of a generator."""
        close(self._iterator)

    def state_dict(self) -> dict[str, Any]:
        state = self._delivered if self._can_begin else self._items.state_dict()
        return {"round": self._round, "has_ended": self.has_ended, "state": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._round = checks.count("round", state["round"])
        self.has_ended = checks.flag("has_ended", state["has_ended"])
        if self._can_begin:
            self._delivered = checks.count("state", state["state"])
        self._open()
        if not self._can_begin:
            self._iterator, _ = iterate(self._items, state["state"])
        # It had an item, or it would not have a state.
        self._is_empty = False


class _Mixed:
    """The items of a mixture in one shard."""

    def __init__(self, mixture: Mixture, shard: Shard) -> None:
        self._at_end = mixture.at_end
        self._parts = [_Part(mixture, name, shard) for name in mixture.sources]
        self._new_turns = functools.partial(Turns, mixture.schedule, shard)
        # Otherwise all shards would begin with the same source, and with many shards the first
        # items of all of them would not have the proportions. The last shard begins with the first
        # turn: in the opposite order, the second item of the first shard would be of the source
        # that the second shard has begun with, right before it if there are two shards.
        before = shard.count - 1 - shard.index
        self._turns = self._new_turns(begun=-before)
        for _ in range(before):
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
                if item is None or item is _END:
                    self._turns.undo()
                if item is not _END:
                    yield item
                    # Otherwise it would live on while the next one is made.
                    del item
                elif self._at_end == "continue":
                    self._parts.remove(part)
                    self._turns = self._turns_of_rest(self._turns.samples)
                elif not self._goes_on(part):
                    return

    def _turns_of_rest(self, samples: int, lags: Sequence[int] | None = None) -> Turns:
        return self._new_turns([part.name for part in self._parts], samples, lags)

    def _goes_on(self, part: _Part) -> bool:
        """Restart a source that has ended; return False if it is not to be restarted."""
        part.has_ended = True
        if self._at_end != "restart" or all(part.has_ended for part in self._parts):
            return False
        part.restart()
        return True

    def state_dict(self) -> dict[str, Any]:
        parts = {part.name: part.state_dict() for part in self._parts}
        return {"parts": parts, "samples": self._turns.samples, "lags": list(self._turns.lags)}

    @checks.reading("mix()")
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        names, known = set(state["parts"]), {part.name for part in self._parts}
        # Those that have ended are left out.
        if not names <= known or (self._at_end != "continue" and names != known):
            raise ValueError(f"it has parts {sorted(names)}, and here are {sorted(known)}")
        if "taken" in state:
            state = {**state, **self._owed(dict(zip(state["parts"], state["taken"], strict=True)))}
        samples = checks.count("samples", state["samples"])
        lags = dict(zip(state["parts"], map(operator.index, state["lags"]), strict=True))
        if any(abs(lag) >= 2 * _PARTS for lag in lags.values()):
            raise ValueError(f"no generator lags so far behind: {lags}")
        self._parts = [part for part in self._parts if part.name in names]
        for part in self._parts:
            part.load_state_dict(state["parts"][part.name])
        self._turns = self._turns_of_rest(samples, [lags[part.name] for part in self._parts])

    def _owed(self, taken: Mapping[str, int]) -> dict[str, Any]:
        """Return what is owed after so many turns, which versions of fixed weights have saved."""
        counts = {name: checks.count("taken", count) for name, count in taken.items()}
        total, shares = sum(counts.values()), self._new_turns([*counts]).shares()
        pairs = zip(counts.values(), shares, strict=True)
        return {"samples": total, "lags": [total * part - count * _PARTS for count, part in pairs]}
