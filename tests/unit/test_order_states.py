"""Any damage to a state is a StateMismatch with a short message, or leaves a position."""

import json

import pytest
from damage import LONGEST, damaged
from hypothesis import given, settings
from hypothesis import strategies as st

from enqueuer.common import checks
from enqueuer.errors import StateMismatch
from enqueuer.order.messages import Epoch, Start
from enqueuer.order.position import SavedPosition, check_format, check_shards, load, save
from enqueuer.order.ranks import merge_states, of_rank

SOURCE = {"function": "numbers"}
SHARDS = {"kind": "GeneratorEnqueuer", "random_seed": 7, "ordered": True, "shards": 3}
TASKS = {"kind": "OrderedEnqueuer", "random_seed": 7, "ordered": True, "length": 24}


def of(shared, epoch, rank=0, world_size=1, **identity):
    identity = {**shared, "rank": rank, "world_size": world_size, **identity}
    state = save(SavedPosition(epoch, error_count=1, total_items=5), identity, SOURCE)
    return json.loads(json.dumps(state)), identity


STATES = {
    "shards": of(SHARDS, Epoch(1, {0: Start(2), 1: Start(1)})),
    "between epochs": of(SHARDS, Epoch(2)),
    "shards of a rank": of(SHARDS, Epoch(0, {1: Start(3)}), 1, 3),
    "shards of a merge": of(SHARDS, Epoch(0, {2: Start(3)}, share=(2, 0)), 1, 2),
    "items that were None": of(SHARDS, Epoch(0, {0: Start(4, left_out=1), 2: Start(3)})),
    "iterators": of(SHARDS, Epoch(0, {0: Start(4, {"at": 3}, 1), 1: Start(4, {"at": 4})})),
    "tasks": of(TASKS, Epoch(0, {0: Start(5)}, (7, 9), 2), ordered=False),
    "batches of a rank": of(TASKS, Epoch(0, {0: Start(5)}), 1, 2, batch_size=2),
    "tasks of a merge": of(TASKS, Epoch(0, {0: Start(1)}, division=(5, 8)), 0, 2),
}


def read(state, identity):
    """Return the position, as `load_state_dict` of an enqueuer reads it."""
    with checks.reading():
        check_format(state, identity["kind"])
        state = of_rank(state, identity["rank"], identity["world_size"], in_step=True)
        saved, _ = load(state, identity, SOURCE)
        if "shards" in identity:
            check_shards(state, saved.epoch)
    return saved


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_read_as_it_was_saved(name):
    state, identity = STATES[name]
    saved = read(state, identity)
    assert save(saved, identity, SOURCE) == state
    assert (saved.error_count, saved.total_items) == (1, 5)


@pytest.mark.parametrize(
    "change",
    [
        *({"epoch": number} for number in ("first", None, 1e30, 1.0, True, 10**12, -1)),
        *({"random_seed": seed} for seed in (7.0, "x", None)),
        *({"shards": count} for count in (3.0, 0, 10**8, 10**12)),
        *({"positions": text} for text in ("none", [[0]], [[0, "x"]], {"0": 1})),
        {"positions": [[0, 1.5], [1, 1], [2, 1]]},
        {"positions": [["0", 1], [1, 1], [2, 1]]},
        {"positions": [[0, -1], [1, 1], [2, 1]]},
        {"positions": [[0, 1], [0, 2], [1, 1], [2, 1]]},
        {"states": [[0, {}, 1, 2]]},
        {"states": [7]},
        {"states": [[0, {}, -1]]},
        {"states": [[0, {}, 9]]},
        {"states": [[0, {}], [0, {}]]},
        {"states": [[9, {}]]},
        *({"ended": shards} for shards in (None, [0], [7, 7])),
        *({"error_count": count} for count in (-1, 1.5)),
        *({"total_items": count} for count in (-1, "4")),
    ],
    ids=repr,
)
def test_what_was_spoilt_is_refused(change):
    state, identity = STATES["shards"]
    with pytest.raises(StateMismatch) as caught:
        read(state | change, identity)
    assert len(str(caught.value)) <= LONGEST


def test_a_state_that_lacks_a_shard_is_refused():
    state, identity = STATES["shards"]
    for spoilt in ({**state, "positions": [[0, 2]]}, {**state, "ended": []}):
        with pytest.raises(StateMismatch, match="neither a position nor the end of shards"):
            read(spoilt, identity)


def check(function, *args):
    try:
        return function(*args)
    except StateMismatch as error:
        length = len(str(error))
    assert length <= LONGEST
    return None


@pytest.mark.parametrize("name", STATES)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_damage_is_refused_or_leaves_a_position(name, data):
    state, identity = STATES[name]
    changed = data.draw(damaged(state))
    for spoilt in (changed, check(merge_states, [changed])):
        saved = spoilt and check(read, spoilt, identity)
        if saved:
            # What was read can be saved and read again.
            again = save(saved, identity, SOURCE)
            assert json.loads(json.dumps(again)) == again
            assert check(read, again, identity) == saved
