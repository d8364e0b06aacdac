"""The state that `state_dict()` returns: a position is written, read and checked.

A state is made of plain ints, strings and lists, so that JSON can hold it. Only the states of the
source's iterators (`states`) are kept as they are. By a fingerprint (`source`), a state of another
source is refused.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from enqueuer.common import checks
from enqueuer.errors import StateMismatch
from enqueuer.order.messages import Epoch, Start

VERSION = 1

# Their classes and functions say little of the data, or are names of this package.
_NAMELESS = frozenset({"builtins", "itertools", "functools", "numpy", "torch", "enqueuer"})
# Characters of a text, so that a state of many shards stays below 1 KiB.
_MAX_TEXT = 60

# Values that are left out of a state if they are None.
_OPTIONAL = {"batch_size": None, "shuffle_buffer": None}

_OF_SHARDS = (
    ": it is the number of workers unless you give shards=; leave that out to take the state's"
)

# A word of the key of a seed. Besides, a sequence has callbacks for each epoch.
_MAX_EPOCHS = 2**32
# Of a damaged state: more would take all memory, or are no size that a computer counts.
_MAX_RANKS, _MAX_NUMBER = 100_000, 2**48
# Numbers that a message lists.
_MAX_NAMED = 10

State = Mapping[str, Any]


@dataclass(frozen=True)
class SavedPosition:
    """Where an enqueuer stands.

    Attributes:
        epoch: The batches that were not given to the loop.
        identity: Values that the batches depended on when it was saved; None: as now.
        is_loaded: Whether the next run begins there, and not at the first epoch.
        error_count: Number of errors that were skipped until then.
        total_items: Number of batches that the loop was given until then, in all runs.
    """

    epoch: Epoch
    identity: dict[str, Any] | None = None
    is_loaded: bool = False
    error_count: int = 0
    total_items: int = 0


def shards_in(state: State) -> Sequence[int]:
    """Return the shards of a rank, by its state, or by what its batches depend on."""
    usual = range(state["rank"], state["shards"], state["world_size"])
    return cast("Sequence[int]", state.get("share", usual))


def save(saved: SavedPosition, identity: State, source: State) -> dict[str, Any]:
    """Return the state of an enqueuer.

    Args:
        saved: Where it stands.
        identity: Values that the data depend on.
        source: Fingerprint of the source.
    """
    epoch = saved.epoch
    state: dict[str, Any] = {"version": VERSION, **identity, "epoch": epoch.number}
    if source:
        state["source"] = dict(source)
    starts = epoch.starts
    # One name for both, as early versions have it.
    divided = epoch.division if epoch.share is None else epoch.share
    if divided is not None:
        state["share"] = list(divided)
    state["positions"] = None if starts is None else [[s, at.number] for s, at in starts.items()]
    if starts is not None and "shards" in state:
        state["ended"] = [shard for shard in shards_in(state) if shard not in starts]
    states = [
        [s, at.state, at.behind] if at.behind else [s, at.state]
        for s, at in (starts or {}).items()
        if at.state is not None
    ]
    if states:
        state["states"] = states
    if epoch.done:
        state["done"] = list(epoch.done)
    left_out = epoch.left_out or of_each({s: at.left_out for s, at in (starts or {}).items()})
    if left_out:
        state["left_out"] = left_out
    state["error_count"] = saved.error_count
    state["total_items"] = saved.total_items
    return state


def load(
    state: State, identity: State, source: State, strict: bool = True
) -> tuple[SavedPosition, str]:
    """Return the position that a state holds, and a warning if the source has changed, or "".

    Args:
        state: Result of `save`, perhaps by way of JSON.
        identity: Values that the state must have, as far as they are fixed.
        source: Fingerprint of the source that is here.
        strict: Whether the source must be the same.

    Raises:
        StateMismatch: It is none, or of something else; the message says what differs.
    """
    epoch = check_format(state, identity["kind"])
    here, saved = {**_OPTIONAL, **identity}, {**_OPTIONAL, **state}
    differences = {
        name: f"{name} is {saved[name]!r} in the state and {value!r} here"
        for name, value in here.items()
        if saved[name] != value
    }
    changed = changes(state.get("source", {}), source)
    if "length" in differences:
        changed.append(differences.pop("length"))
    if "shards" in differences:
        differences["shards"] += _OF_SHARDS
    if differences:
        raise StateMismatch(f"the state does not fit: {'; '.join(differences.values())}")
    text = f"the source has changed since the state was saved: {'; '.join(changed)}; "
    if changed and strict:
        text += "load_state_dict(state, strict=False) goes on with the one that is here"
        raise StateMismatch(text)
    text += "the rest of the epoch is that of the one that is here, from the same position on"
    checks.seed(state["random_seed"])
    # Early versions saved no counts.
    errors, items = (_count(at, state.get(at, 0)) for at in ("error_count", "total_items"))
    return SavedPosition(epoch, None, True, errors, items), text if changed else ""


# --- what a state says of its source ---


@functools.singledispatch
def fingerprint_of(source: object) -> dict[str, Any]:
    """Return values by which a state tells its source from another one, as JSON holds them.

    They take no time and run no code of the user: the names of functions and classes. Datasets
    and `mix` register functions that say more.

    Example:
        >>> fingerprint_of(functools.partial(fingerprint_of, 7)), fingerprint_of(lambda: [])
        ({}, {})
        >>> from random import Random
        >>> fingerprint_of(Random)
        {'name': 'Random'}
    """
    return named(name=source)


def named(**things: object) -> dict[str, Any]:
    """Return the names of functions, or of the classes of objects, that another run has, too.

    There is none for a lambda. Neither the module counts, which may be `__main__`, nor the
    function in which another one is defined.
    """
    found = {}
    for key, thing in things.items():
        while isinstance(thing, functools.partial):
            thing = thing.func
        owner: Any = thing if hasattr(thing, "__qualname__") else type(thing)
        name = str(owner.__qualname__).rpartition("<locals>.")[2]
        module = str(getattr(owner, "__module__", None)).partition(".")[0]
        if "<" not in name and module not in _NAMELESS:
            found[key] = name
    return found


def shortened(text: str) -> str:
    """Return a text as it is, or the beginning of a long one and a number that stands for it."""
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[: _MAX_TEXT // 2]}... ({zlib.crc32(text.encode('utf-8', 'surrogatepass'))})"


def changes(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return the differences of two fingerprints in words; what only one of them has is none.

    Example:
        >>> changes({"rows": 120, "shuffle": True, "order": 1}, {"rows": 119, "shuffle": False})
        ['it had 120 rows, and here are 119', 'shuffle is True in the state and False here']
    """
    found = []
    for name, now in here.items():
        before = saved.get(name, now)
        if name == "parts":
            for part in [part for part in now if part in before]:
                found += [f"in {part!r}, {text}" for text in changes(before[part], now[part])]
        elif before == now:
            continue
        elif name == "rows":
            found.append(f"it had {before} rows, and here are {now}")
        else:
            found.append(f"{name} is {before!r} in the state and {now!r} here")
    return found


# --- checks ---


def check_format(state: State, kind: str | None = None) -> Epoch:
    """Return the position in a state; raise StateMismatch unless it is one of this version.

    Args:
        state: The state.
        kind: Class of the enqueuer; None: any.
    """
    if isinstance(state, Mapping) and not state:
        raise StateMismatch(
            "the state is empty: give what state_dict() returned, or do not call load_state_dict() "
            "to begin with the first batch"
        )
    if not isinstance(state, Mapping) or "version" not in state:
        found = f"has the keys {[*state][:3]}" if isinstance(state, Mapping) else f"is {state!r}"
        raise StateMismatch(
            f"this is not the state of an enqueuer, as it {found}: give what its state_dict() "
            "returned, not the state of the model and not the whole checkpoint"
        )
    with checks.reading():
        version = state["version"]
        if version != VERSION:
            raise StateMismatch(
                f"the state has version {version!r}, and this enqueuer reads version {VERSION}: "
                "it was saved by another version of the package"
            )
        if kind not in (None, state["kind"]):
            raise StateMismatch(f"the state is that of {state['kind']}, and this is {kind}")
        rank, world_size = state["rank"], state["world_size"]
        # A merged one has no rank.
        if (rank, world_size) != (None, None):
            checks.rank(rank, _count("world_size", world_size, limit=_MAX_RANKS))
        for name, least in (("shards", 1), ("batch_size", 1), ("length", 0)):
            # The others may be None.
            if name in state and (name == "shards" or state[name] is not None):
                _count(name, state[name], least)
        return _epoch(state)


def check_shards(state: State, epoch: Epoch) -> None:
    """Raise StateMismatch unless a position accounts for each shard of its rank exactly once."""
    own = shards_in(state)
    known = own if isinstance(own, range) else frozenset(own)
    strangers = [shard for shard in epoch.starts or () if shard not in known][:_MAX_NAMED]
    if strangers:
        raise StateMismatch(f"the state has positions of shards {strangers}, not of {own}")
    # An early version saved no ends.
    if epoch.starts is None or "ended" not in state:
        return
    accounted = frozenset([*epoch.starts, *state["ended"]])
    # Only the first ones, as a damaged state may have any number of shards.
    lacking = (shard for shard in own if shard not in accounted)
    if missing := sorted(itertools.islice(lacking, _MAX_NAMED)):
        raise StateMismatch(f"the state has neither a position nor the end of shards {missing}")


def _epoch(state: State) -> Epoch:
    """Return the position; raise ValueError or TypeError if that cannot be one."""
    number = _count("epoch", state["epoch"], limit=_MAX_EPOCHS)
    positions = state["positions"]
    if positions is None:
        return Epoch(number)
    if not isinstance(positions, (list, tuple)):
        raise TypeError(f"positions must be a list, got {positions!r}")
    shards = _numbers("positions", [shard for shard, _ in positions])
    numbers = {s: _count("item", n) for s, (_, n) in zip(shards, positions, strict=True)}
    # Usually the state is that of the position itself.
    rows = [(*row, 0) if len(row) == 2 else row for row in state.get("states", ())]
    _numbers("states", [shard for shard, _, _ in rows])
    states = {s: (own, _count("behind", behind, limit=numbers[s])) for s, own, behind in rows}
    starts = {shard: Start(item, *states.get(shard, ())) for shard, item in numbers.items()}
    _numbers("positions and ended", [*shards, *state.get("ended", ())])
    first = min(numbers.values(), default=0)
    done = _numbers("done", state.get("done", ()), least=first + 1)
    share = _numbers("share", state["share"]) if "share" in state else None
    if "shards" in state:
        for shard, count in left_out_of(state).items():
            count = _count("left_out", count, limit=numbers[shard])
            starts[shard] = starts[shard]._replace(left_out=count)
        return Epoch(number, starts, done, share=share)
    left_out = _count("left_out", state.get("left_out", 0), limit=first + len(done))
    return Epoch(number, starts, done, left_out, division=share)


def left_out_of(state: State) -> dict[int, int]:
    """Return how many items of each open shard gave nothing to the loop."""
    left_out = state.get("left_out", 0)
    if isinstance(left_out, (list, tuple)):
        _numbers("left_out", [shard for shard, _ in left_out])
        return dict(left_out)
    return {shard: left_out for shard, _ in state["positions"] or ()}


def of_each(counts: Mapping[int, int]) -> int | list[list[int]]:
    """Return one number for all shards if they have the same one, as with a shuffle buffer."""
    if len({*counts.values()}) <= 1:
        return next(iter(counts.values()), 0)
    return [[shard, count] for shard, count in counts.items() if count]


def _numbers(name: str, values: Iterable[Any], least: int = 0) -> tuple[int, ...]:
    numbers = tuple(_count(name, value, least) for value in values)
    if len({*numbers}) < len(numbers):
        raise ValueError(f"a number comes twice in {name}")
    return numbers


def _count(name: str, value: Any, least: int = 0, limit: float = _MAX_NUMBER) -> int:
    number = checks.integer(name, value, least)
    if number > limit:
        raise ValueError(f"{name} is out of range: {number}")
    return number
