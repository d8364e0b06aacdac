"""The state that `state_dict()` returns: saving a position, and loading one that fits.

A state is made of plain ints, strings and lists, so that JSON can hold it. Only the states of the
source's iterators (`states`) are kept as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeVar

from enqueuer.errors import StateMismatch
from enqueuer.workers.messages import Epoch, Start

T = TypeVar("T")

VERSION = 1

# Values that are left out of a state if they are None.
_OPTIONAL = {"batch_size": None, "shuffle_buffer": None}

# A word of the key of a seed. Besides, a sequence has callbacks for each epoch.
_MOST_EPOCHS = 2**32


@dataclass(frozen=True)
class SavedPosition:
    """Where an enqueuer stands while no run goes on.

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


def shards_in(identity: Mapping[str, Any]) -> range | None:
    """Return the shards of a rank, by what its batches depend on; None for tasks."""
    if "shards" not in identity:
        return None
    return range(identity["rank"], identity["shards"], identity["world_size"])


def save(
    identity: Mapping[str, Any],
    epoch: Epoch,
    error_count: int,
    total_items: int,
    own: range | None,
) -> dict[str, Any]:
    """Return the state of an enqueuer.

    Args:
        identity: Values that the data depend on.
        epoch: Items that were not given to the loop.
        error_count: Number of errors that were skipped.
        total_items: Number of batches that the loop was given, in all runs.
        own: All shards of this rank; None for tasks.
    """
    state: dict[str, Any] = {"version": VERSION, **identity, "epoch": epoch.number}
    starts = epoch.starts
    state["positions"] = None if starts is None else [[s, at.number] for s, at in starts.items()]
    if starts is not None and own is not None:
        state["ended"] = [shard for shard in own if shard not in starts]
    states = [
        [s, at.state, at.behind] if at.behind else [s, at.state]
        for s, at in (starts or {}).items()
        if at.state is not None
    ]
    if states:
        state["states"] = states
    if epoch.done:
        state["done"] = list(epoch.done)
    state["error_count"] = error_count
    state["total_items"] = total_items
    return state


def load(state: Mapping[str, Any], identity: Mapping[str, Any]) -> SavedPosition:
    """Return the position that a state holds.

    Args:
        state: Result of `save`, perhaps by way of JSON.
        identity: Values that the state must have, as far as they are fixed.

    Raises:
        StateMismatch: It is none, or of something else; the message says what differs.
    """
    if isinstance(state, Mapping) and not state:
        raise StateMismatch(
            "the state is empty: give what state_dict() returned, or do not call load_state_dict() "
            "to begin with the first batch"
        )
    try:
        version, kind = state["version"], state["kind"]
        if version != VERSION:
            raise StateMismatch(
                f"the state has version {version!r}, and this enqueuer reads version {VERSION}: "
                "it was saved by another version of the package"
            )
        if kind != identity["kind"]:
            raise StateMismatch(f"the state is that of {kind}, and this is {identity['kind']}")
        here, saved = {**_OPTIONAL, **identity}, {**_OPTIONAL, **state}
        differences = [
            f"{name} is {saved[name]!r} in the state and {value!r} here"
            for name, value in here.items()
            if saved[name] != value
        ]
        if differences:
            raise StateMismatch(f"the state does not fit: {'; '.join(differences)}")
        for name, least in (("random_seed", 0), ("shards", 1)):
            _count(name, state.get(name, least), least)
        return SavedPosition(
            _epoch(state),
            is_loaded=True,
            # Early versions saved no counts.
            error_count=_count("error_count", state.get("error_count", 0)),
            total_items=_count("total_items", state.get("total_items", 0)),
        )
    except StateMismatch:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise StateMismatch(f"this is not the state of an enqueuer: {error!r}") from error


def check_shards(state: Mapping[str, Any], epoch: Epoch, own: range) -> None:
    """Raise StateMismatch unless a position accounts for each shard of a rank exactly once."""
    strangers = [shard for shard in epoch.starts or () if shard not in own]
    if strangers:
        raise StateMismatch(f"the state has positions of shards {strangers}, not of {own}")
    # An early version saved no ends.
    if epoch.starts is None or "ended" not in state:
        return
    missing = sorted(set(own).difference(epoch.starts, state["ended"]))
    if missing:
        raise StateMismatch(f"the state has neither a position nor the end of shards {missing}")


def _epoch(state: Mapping[str, Any]) -> Epoch:
    """Return the position; raise ValueError or TypeError if that cannot be one."""
    number = _count("epoch", state["epoch"], most=_MOST_EPOCHS)
    positions = state["positions"]
    if positions is None:
        return Epoch(number)
    if not isinstance(positions, (list, tuple)):
        raise TypeError(f"positions must be a list, got {positions!r}")
    numbers = _unique("positions", [(_count("shard", s), _count("item", n)) for s, n in positions])
    states = _unique(
        "states",
        [
            (_count("shard", s), (own, *(_count("behind", b, most=numbers[s]) for b in behind)))
            for s, own, *behind in state.get("states", [])
        ],
    )
    if not states.keys() <= numbers.keys():
        raise ValueError("states has a shard that positions has not")
    starts = {shard: Start(item, *states.get(shard, ())) for shard, item in numbers.items()}
    ended = _unique("ended", [(_count("shard", s), None) for s in state.get("ended", ())])
    if not ended.keys().isdisjoint(numbers):
        raise ValueError("ended has a shard that positions has, too")
    first = min(numbers.values(), default=0)
    done = tuple(_count("done", task, least=first + 1) for task in state.get("done", ()))
    _unique("done", [(task, None) for task in done])
    return Epoch(number, starts, done)


def _unique(name: str, pairs: list[tuple[int, T]]) -> dict[int, T]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"{name} has a number twice")
    return found


def _count(name: str, value: Any, least: int = 0, most: float = math.inf) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be an int, got {value!r}")
    number = value.__index__()
    if not least <= number <= most:
        raise ValueError(f"{name} is out of range: {number}")
    return number
