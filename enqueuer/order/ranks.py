"""The states of several ranks as one, and one rank's part of it.

    state of each rank --merge_states()--> state of all --of_rank()--> state of each new rank

Of merged states, what is left of the epoch is divided anew. Of shards, each open one goes to one
rank, in the order of their turns. Of tasks, each rank in turn gets one of the elements that no rank
has had.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from enqueuer.common import checks
from enqueuer.errors import StateMismatch
from enqueuer.order.position import (
    State,
    changes,
    check_format,
    check_shards,
    left_out_of,
    of_each,
    shards_in,
)

# What differs between the states of one run.
_OF_RANK = {
    *("epoch", "rank", "positions", "share", "ended", "states", "done"),
    *("left_out", "error_count", "total_items"),
}
# Elements that ranks may be apart, as each is remembered.
_MAX_APART = 10**7


def merge_states(states: Iterable[State]) -> dict[str, Any]:
    """Return one state of the states of all ranks, which any number of ranks can load.

    Each new rank passes the same merged state to `load_state_dict()`. Together they go on with
    what no rank has given to its loop: no batch is lost, and none comes twice. The ranks may have
    been at different steps of the same epoch.

    A single state of an `OrderedEnqueuer` with `ordered=True` and without `on_error` is enough if
    all ranks were at the same step, and none of them had a result of None. Between two epochs,
    any state is enough. `load_state_dict()` takes these from any rank.

    Args:
        states: Results of `state_dict()` of all ranks of one run, in any order, perhaps by way of
            JSON.

    Returns:
        A state without a rank. `error_count` and `total_items` are the largest of all ranks.

    Raises:
        StateMismatch: A rank is missing or comes twice, or the states are of different runs or
            epochs; the message says what differs.

    Example:
        >>> from enqueuer import OrderedEnqueuer
        >>> def of(rank, world_size):
        ...     return OrderedEnqueuer(
        ...         range(8), rank=rank, world_size=world_size, random_seed=7
        ...     )
        >>> states = []
        >>> for rank in range(2):
        ...     with of(rank, 2) as enqueuer:
        ...         _ = next(iter(enqueuer))
        ...         states.append(enqueuer.state_dict())
        >>> later = [of(rank, 3) for rank in range(3)]
        >>> for enqueuer in later:
        ...     enqueuer.load_state_dict(merge_states(states))
        >>> [list(enqueuer) for enqueuer in later]
        [[2, 5], [3, 6], [4, 7]]
    """
    with checks.reading():
        return _merged(list(states))


def _merged(states: list[State]) -> dict[str, Any]:
    ordered = _checked(states)
    epoch = min(state["epoch"] for state in ordered)
    behind = [state for state in ordered if state["epoch"] == epoch]
    # These ranks have had all of the epoch that is theirs.
    ahead = [state["rank"] for state in ordered if state["epoch"] > epoch]
    merged = {name: value for name, value in ordered[0].items() if name not in _OF_RANK}
    merged |= {"epoch": epoch, "rank": None, "world_size": None}
    if all(state["positions"] is None for state in ordered) and not ahead:
        merged["positions"] = None
    elif "shards" in merged:
        merged |= _merged_shards(behind, bool(ahead))
    else:
        merged |= _merged_tasks(behind, ahead)
    for name in ("error_count", "total_items"):
        merged[name] = max(state.get(name, 0) for state in ordered)
    return merged


def of_rank(state: State, rank: int, world_size: int, in_step: bool) -> State:
    """Return the state of one rank, of its own state or of one that determines it.

    Args:
        state: State of any rank, or a merged one.
        rank: The rank.
        world_size: Number of ranks.
        in_step: Whether ranks at the same step are at the same task, by the options.

    Raises:
        StateMismatch: No state determines it, or there are more ranks than shards.
    """
    saved = state["rank"], state["world_size"]
    if saved == (rank, world_size):
        return state
    positions, shards = state["positions"], state.get("shards")
    if shards is not None and world_size > shards:
        raise StateMismatch(
            f"the state has {shards} shards, which cannot be divided over {world_size} ranks"
        )
    if saved[1] == 1:
        state = merge_states([state])
    elif positions is not None and saved[1] is not None:
        # Shards of other ranks may have ended.
        if shards is not None or not in_step or state.get("left_out"):
            raise StateMismatch(
                f"the state is that of rank {saved[0]} of {saved[1]}, and this is rank {rank} of "
                f"{world_size}: within an epoch it does not say where the other ranks were, with "
                "shards, ordered=False, on_error, or results of None; merge_states() makes one "
                "state of those of all ranks, for any number of ranks"
            )
        # All ranks were at the same step.
        if saved[1] == world_size and state["length"] is not None:
            return {**state, "rank": rank, "positions": [[0, _reached(state, rank)]]}
        state = merge_states([{**state, "rank": other} for other in range(saved[1])])
    part = {**state, "rank": rank, "world_size": world_size}
    if positions is None or shards is None:
        return part
    opened = [shard for shard, _ in state["positions"]][rank::world_size]
    # One rank says of all shards that have ended that they have.
    part["ended"] = state["ended"] if rank == 0 else []
    part["share"] = [*opened, *part["ended"]]
    for name in ("positions", "states"):
        part[name] = [pair for pair in state.get(name, ()) if pair[0] in opened]
    part["left_out"] = [pair for pair in left_out_of(state).items() if pair[0] in opened]
    return part


def _reached(state: State, rank: int) -> int:
    """Return the task at which another rank of a sequence is; it may have one task less."""
    number: int = state["positions"][0][1]
    base, *holes = state.get("share") or [0]
    elements = range(rank, state["length"] - base - len(holes), state["world_size"])
    return min(number, math.ceil(len(elements) / (state["batch_size"] or 1)))


def _checked(states: list[State]) -> list[State]:
    """Return the states in the order of their ranks; raise StateMismatch if they do not fit."""
    if not states:
        raise StateMismatch("there are no states to merge: give those of all ranks")
    positions = []
    for state in states:
        if isinstance(state, Mapping) and "sampler" in state:
            raise StateMismatch(
                "this is the state of a DataLoader, whose sampler decides what each rank has: load "
                "it with as many ranks; TorchLoader(OrderedEnqueuer(...)) goes on with any number"
            )
        positions.append(check_format(state))
        if state["world_size"] is None:
            raise StateMismatch("one of the states is merged already: any rank can load it")
    first, least = states[0], min(state["epoch"] for state in states)
    for state in states:
        if state.get("step") != first.get("step"):
            raise StateMismatch(
                f"the step of steps_per_epoch is {first.get('step')} in one state and "
                f"{state.get('step')} in another: take the states of all ranks at the same step"
            )
        _check_same_run(first, state)
        is_at_begin = not any(number for _, number in state["positions"] or ())
        if state["epoch"] > least + is_at_begin:
            raise StateMismatch(
                f"rank {state['rank']} is in epoch {state['epoch']}, and another one in epoch "
                f"{least}: take the states of all ranks at the same step, or between two epochs"
            )
    for state, position in zip(states, positions, strict=True):
        if "shards" in state:
            check_shards(state, position)
    _check_complete([state["rank"] for state in states], first["world_size"])
    return sorted(states, key=lambda state: state["rank"])


def _check_same_run(first: State, state: State) -> None:
    """Raise StateMismatch if two states depend on different values, or are of other sources."""
    differences = [
        f"{name} is {first.get(name)!r} in one and {state.get(name)!r} in another"
        for name in sorted((first.keys() | state.keys()) - _OF_RANK - {"source"})
        if first.get(name) != state.get(name)
    ]
    differences += [
        f"the source of rank {state['rank']} is not that of rank {first['rank']}, as {text}"
        for text in changes(first.get("source", {}), state.get("source", {}))
    ]
    if differences:
        text = "; ".join(differences)
        for name in ("random_seed", "shards"):
            if f"{name} is" in text:
                text += f"; give all ranks the same {name}"
        raise StateMismatch(f"the states are not of one run: {text}")


def _check_complete(ranks: list[int], world_size: int) -> None:
    twice = sorted(rank for rank, count in Counter(ranks).items() if count > 1)
    missing = sorted({*range(world_size)} - {*ranks})
    if twice or missing:
        what = f"twice that of rank {twice[0]}" if twice else f"none of the ranks {missing}"
        raise StateMismatch(
            f"merge_states() needs the state of each of {world_size} ranks once, and was given "
            f"{what}"
        )


def _merged_shards(states: Sequence[State], are_others_ahead: bool) -> dict[str, Any]:
    turns: list[tuple[int, int, int]] = []
    ended: list[int] = []
    left_out: dict[int, int] = {}
    for state in states:
        positions = state["positions"]
        if positions is None:
            positions = [[shard, 0] for shard in shards_in(state)]
        ended += state.get("ended", ())
        left_out |= left_out_of(state)
        rounds, before = 0, -1
        if positions:
            rounds = positions[0][1] - left_out.get(positions[0][0], 0)
        for shard, number in positions:
            # Turns go by the index, so the next round begins here.
            rounds += shard < before
            turns.append((rounds, shard, number))
            before = shard
    known = [*ended, *(shard for _, shard, _ in turns)]
    unknown = {*range(states[0]["shards"])}.difference(known)
    if len({*known}) < len(known) or (unknown and not are_others_ahead):
        raise StateMismatch(
            "the states are not of one run: together they do not have each shard once, so they "
            "were resumed from different states"
        )
    merged: dict[str, Any] = {
        "positions": [[shard, number] for _, shard, number in sorted(turns)],
        "ended": sorted([*ended, *unknown]),
    }
    if counts := of_each({shard: left_out.get(shard, 0) for _, shard, _ in turns}):
        merged["left_out"] = counts
    item_states = [pair for state in states for pair in state.get("states", ())]
    return {**merged, "states": item_states} if item_states else merged


def _merged_tasks(states: Sequence[State], ahead: Sequence[int]) -> dict[str, Any]:
    first, world_size = states[0], states[0]["world_size"]
    base, *holes = first.get("share") or [0]
    if any((state.get("share") or [0]) != [base, *holes] for state in states):
        raise StateMismatch("the states are not of one run: they were resumed from different ones")
    # Elements are counted among those that were divided.
    count, done = _counts_of(states)
    if done and "states" in first:
        raise StateMismatch(
            "the iterable has a state of its own, which is that of one step: take the states of "
            "all ranks at the same step"
        )
    if first["length"] is not None:
        divided = first["length"] - base - len(holes)
        # The last batch may have fewer elements.
        count, done = min(count, divided), {at for at in done if at < divided}
        done.update(at for rank in ahead for at in range(rank, divided, world_size))
    elif ahead:
        raise StateMismatch(
            f"rank {ahead[0]} has had all of its elements, and how many these were is not known "
            "for an iterable: take the states of all ranks at the same step"
        )
    while count in done:
        count += 1
    # Number of places that are left before each hole.
    offsets: list[int] = [hole - base - at for at, hole in enumerate(holes)]

    def place_of(number: int) -> int:
        return int(base) + number + bisect_right(offsets, number)

    begin = place_of(count)
    later = [place_of(at) for at in sorted(done) if at > count]
    share = [begin, *sorted([*later, *(hole for hole in holes if hole > begin)])]
    merged = {"positions": [[0, 0]], "share": share}
    return {**merged, "states": first["states"]} if "states" in first else merged


def _counts_of(states: Sequence[State]) -> tuple[int, set[int]]:
    """Return how many elements all ranks together have had in turn, and the later ones."""
    size, world_size = states[0]["batch_size"] or 1, states[0]["world_size"]
    numbers = [state["positions"][0][1] if state["positions"] else 0 for state in states]
    least = min(numbers)
    if size * sum(number - least for number in numbers) > _MAX_APART:
        raise StateMismatch("the ranks are too far apart: take the states of all at the same step")
    later = {
        state["rank"] + at * world_size
        for state, number in zip(states, numbers, strict=True)
        for task in (*range(least, number), *state.get("done", ()))
        for at in range(task * size, (task + 1) * size)
    }
    return least * size * world_size, later
