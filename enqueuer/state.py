"""What `state_dict()` returns, and whether a state fits: a position and what it is a position in.

A state is made of plain ints, strings and lists, so that JSON can hold it; only what a source's
iterator says of itself (`states`) is kept as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enqueuer.errors import StateMismatch
from enqueuer.messages import Epoch, Start

VERSION = 1


def save(identity: Mapping[str, Any], epoch: Epoch) -> dict[str, Any]:
    """Return the state of an enqueuer.

    Args:
        identity: What the data depend on.
        epoch: What has not been given away.
    """
    state: dict[str, Any] = {"version": VERSION, **identity, "epoch": epoch.number}
    starts = epoch.starts
    state["positions"] = None if starts is None else [[s, at.number] for s, at in starts.items()]
    own = [
        [s, at.state, at.behind] if at.behind else [s, at.state]
        for s, at in (starts or {}).items()
        if at.state is not None
    ]
    if own:
        state["states"] = own
    if epoch.done:
        state["done"] = list(epoch.done)
    return state


def load(state: Mapping[str, Any], identity: Mapping[str, Any]) -> Epoch:
    """Return the position that a state tells.

    Args:
        state: What `save` returned, perhaps by way of JSON.
        identity: What it must be a state of, as far as that is fixed.

    Raises:
        StateMismatch: It is none, or of something else; the message says what differs.
    """
    try:
        version, kind = state["version"], state["kind"]
        if version != VERSION:
            raise StateMismatch(
                f"the state has version {version!r}, and this enqueuer reads version {VERSION}: "
                "it was saved by another version of the package"
            )
        if kind != identity["kind"]:
            raise StateMismatch(f"the state is that of {kind}, and this is {identity['kind']}")
        differences = [
            f"{name} is {state[name]!r} in the state and {value!r} here"
            for name, value in identity.items()
            if state[name] != value
        ]
        if differences:
            raise StateMismatch(f"the state does not fit: {'; '.join(differences)}")
        epoch, positions = int(state["epoch"]), state["positions"]
        states = {int(s): (own, *map(int, behind)) for s, own, *behind in state.get("states", [])}
        done = tuple(int(number) for number in state.get("done", ()))
        starts = {
            int(s): Start(int(number), *states.get(int(s), ())) for s, number in positions or ()
        }
        counts = [epoch, state["random_seed"], state.get("shards", 1) - 1]
        counts += [start.number for start in starts.values()]
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise ValueError("a number in it is none, or negative")
    except StateMismatch:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise StateMismatch(f"this is not the state of an enqueuer: {error!r}") from error
    if positions is None:
        return Epoch(epoch)
    return Epoch(epoch, starts, done)
