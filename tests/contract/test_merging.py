"""States of some ranks, from which other numbers of ranks go on."""

import itertools
import json

import pytest
from trials import Gaps, Lengths, drawn, run_trials, turns

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, StateMismatch, merge_states

EQUAL, UNEQUAL = Lengths((4,)), Lengths((1, 2, 3, 4, 5))


def shards(source, **options):
    def make(rank, world_size, **others):
        own = dict(random_seed=7, rank=rank, world_size=world_size, **options, **others)
        return GeneratorEnqueuer(source, shards=48, **own)

    return make


def tasks(count, *args, iterable=False, **options):
    def make(rank, world_size, **others):
        own = dict(random_seed=7, rank=rank, world_size=world_size, **options, **others)
        elements = iter(range(count)) if iterable else range(count)
        return OrderedEnqueuer(elements, *args, **own)

    return make


def skips(element):
    if element % 7 == 3:
        raise ValueError(element)
    return element


def is_none(element):
    return None if element % 7 == 3 else element


def read(make, state, rank, world_size, count, **options):
    """Return what a rank gives next, at most so many, and its state."""
    enqueuer = make(rank, world_size, **options)
    if state is not None:
        enqueuer.load_state_dict(state)
    with enqueuer:
        got = list(itertools.islice(enqueuer, count))
        return got, json.loads(json.dumps(enqueuer.state_dict()))


SOURCES = {
    "equal shards": shards(EQUAL),
    "unequal shards": shards(UNEQUAL),
    "samples": shards(EQUAL, batch_size=2, collate=list, shuffle_buffer=3),
    "tasks": tasks(500, drawn),
    "skipped": tasks(500, skips, on_error="skip"),
    "may be skipped": tasks(500, drawn, on_error="skip"),
    "left out": tasks(500, is_none),
    "unordered": tasks(500, drawn, ordered=False),
}


def elements(batches):
    """Return what is in batches, if they are lists, in a certain order."""
    flat = [one for batch in batches for one in (batch if isinstance(batch, list) else [batch])]
    return sorted(flat)


ONE_SEQUENCE = {
    "shards": shards(EQUAL),
    "items of None": shards(Gaps((4,))),
    "samples": shards(EQUAL, batch_size=2, collate=list),
    "shuffled tasks": tasks(500, drawn, True),
    "iterable": tasks(500, drawn, iterable=True),
}


@pytest.mark.thorough
@pytest.mark.parametrize("make", ONE_SEQUENCE.values(), ids=ONE_SEQUENCE)
def test_at_the_same_step_the_order_is_that_of_one_rank(make):
    state, got = None, []
    for world_size, count in ((8, 3), (6, 2), (16, 1), (1, 10**6)):
        ranks = [read(make, state, rank, world_size, count) for rank in range(world_size)]
        got += turns(batches for batches, _ in ranks)
        state = merge_states(reversed([own for _, own in ranks]))
    assert got == list(make(0, 1))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [450, 470])
def test_random_trials_get_what_one_uninterrupted_rank_gets(seed):
    counts, failures, _ = run_trials(20, seed)
    assert (counts.total(), failures) == (20, {})


def test_a_rank_that_has_ended_its_epoch_is_merged_with_those_that_have_not():
    for make in (shards(UNEQUAL), tasks(20, drawn)):
        first, saved = read(make, None, 0, 2, 10**6)
        second, other = read(make, None, 1, 2, 3)
        assert (saved["epoch"], other["epoch"]) == (1, 0)
        merged = merge_states([saved, other])
        rest = [read(make, merged, rank, 3, 10**6)[0] for rank in range(3)]
        assert sorted([*first, *second, *turns(rest)]) == sorted(make(0, 1))


def test_the_state_of_one_rank_is_enough_at_the_same_step_of_tasks():
    make = tasks(100, drawn, True)
    had = [read(make, None, rank, 4, 5)[0] for rank in range(4)]
    state = read(make, None, 2, 4, 5)[1]
    rest = [read(make, state, rank, 6, 10**6)[0] for rank in range(6)]
    assert [*turns(had), *turns(rest)] == list(make(0, 1))


def test_as_many_ranks_that_went_on_from_one_state_are_merged_again():
    make = tasks(25, drawn, True, batch_size=2, collate=list)
    had = [read(make, None, rank, 4, 4) for rank in range(4)]
    # Rank 0 has four batches, the others have three.
    state = had[0][1]
    ranks = [read(make, state, rank, 4, 0)[1] for rank in range(4)]
    assert [own["positions"] for own in ranks] == [[[0, 4]], [[0, 3]], [[0, 3]], [[0, 3]]]
    rest = read(make, merge_states(ranks), 0, 1, 10**6)[0]
    assert elements([*turns(batches for batches, _ in had), *rest]) == elements(make(0, 1))


@pytest.mark.thorough
@pytest.mark.parametrize("name", SOURCES)
def test_between_epochs_any_state_is_enough(name):
    make = SOURCES[name]
    state = read(make, None, 1, 2, 10**6)[1]
    assert state["epoch"] == 1
    again = [read(make, state, rank, 3, 10**6)[0] for rank in range(3)]
    merged = merge_states([read(make, None, rank, 2, 10**6)[1] for rank in range(2)])
    assert again == [read(make, merged, rank, 3, 10**6)[0] for rank in range(3)]


# --- what cannot be merged ---


def test_batches_that_were_left_out_are_counted_over_all_runs_of_an_epoch():
    make = SOURCES["left out"]
    state = None
    for _ in range(3):
        _, state = read(make, state, 0, 2, 5, workers=2)
    # Element 31 is the last of fifteen that are none of 3, 10, 17, 24 and so on.
    assert (state["positions"], state["left_out"]) == ([[0, 17]], 2)
    with pytest.raises(StateMismatch, match="or results of None"):
        make(0, 1).load_state_dict(state)
    with pytest.raises(StateMismatch, match="left_out is out of range"):
        make(0, 2).load_state_dict({**state, "left_out": 18})
    _, state = read(make, state, 0, 2, 10**6)
    assert "left_out" not in state


def states_of(make, count=2, world_size=3):
    return [read(make, None, rank, world_size, count)[1] for rank in range(world_size)]


def test_what_is_not_the_states_of_all_ranks_of_a_run_says_what_is_wrong():
    states = states_of(SOURCES["tasks"])
    with pytest.raises(StateMismatch, match="no states to merge"):
        merge_states([])
    with pytest.raises(StateMismatch, match=r"each of 3 ranks once, .* none of the ranks \[2\]"):
        merge_states(states[:2])
    with pytest.raises(StateMismatch, match="twice that of rank 0"):
        merge_states([*states, states[0]])
    with pytest.raises(StateMismatch, match="length is 500 in one and 400 in another"):
        merge_states([*states[:2], {**states[2], "length": 400}])
    with pytest.raises(StateMismatch, match="merged already"):
        merge_states([merge_states(states)])
    with pytest.raises(StateMismatch, match="rank 2 is in epoch 1, and another one in epoch 0"):
        merge_states([*states[:2], {**states[2], "epoch": 1}])
    for wrong in ({"version": 1}, [], 7):
        with pytest.raises(StateMismatch, match="not the state of an enqueuer"):
            merge_states([wrong])
    with pytest.raises(StateMismatch, match="the state is empty"):
        merge_states([*states[:2], {}])
    with pytest.raises(StateMismatch, match="version 9, and this enqueuer reads version 1"):
        merge_states([*states[:2], {**states[2], "version": 9}])
    with pytest.raises(StateMismatch, match="8 in another; give all ranks the same random_seed"):
        merge_states([*states[:2], {**states[2], "random_seed": 8}])
    of_shards = states_of(SOURCES["equal shards"])
    with pytest.raises(
        StateMismatch, match=r"shards is 9 in one .* give all ranks the same shards$"
    ):
        merge_states([{**of_shards[0], "shards": 9}, *of_shards[1:]])
    with pytest.raises(StateMismatch, match="kind is 'OrderedEnqueuer' in one and 'Gen"):
        merge_states([states[0], states_of(SOURCES["equal shards"])[1], states[2]])
    with pytest.raises(StateMismatch, match="world_size is 3 in one and 2 in another"):
        merge_states([states[0], states_of(SOURCES["tasks"], world_size=2)[1]])
    with pytest.raises(StateMismatch, match=r"step of steps_per_epoch is 2 in one .* None in"):
        merge_states([{**states[0], "step": 2}, *states[1:]])


def test_ranks_that_were_resumed_from_different_states_do_not_make_one():
    for name in ("tasks", "unequal shards"):
        make = SOURCES[name]
        merged = [merge_states(states_of(make, count)) for count in (1, 2)]
        own = [read(make, merged[rank], rank, 2, 1)[1] for rank in range(2)]
        with pytest.raises(StateMismatch, match="resumed from different"):
            merge_states(own)


@pytest.mark.parametrize(
    "name", ["unequal shards", "skipped", "left out", "may be skipped", "unordered"]
)
def test_one_state_that_does_not_tell_of_the_others_says_to_merge(name):
    make = SOURCES[name]
    state = read(make, None, 0, 3, 10)[1]
    with pytest.raises(StateMismatch, match=r"rank 0 of 3, .*merge_states\(\) makes one"):
        make(1, 2).load_state_dict(state)


def test_an_iterable_whose_end_is_not_known_needs_states_of_one_step():
    make = tasks(10, drawn, iterable=True)
    ended, other = read(make, None, 0, 2, 10**6)[1], read(make, None, 1, 2, 1)[1]
    with pytest.raises(StateMismatch, match="rank 0 has had all of its elements"):
        merge_states([ended, other])


def test_more_ranks_than_shards_are_refused():
    state = merge_states(states_of(SOURCES["equal shards"]))
    enqueuer = GeneratorEnqueuer(EQUAL, rank=0, world_size=49, random_seed=7)
    with pytest.raises(StateMismatch, match="48 shards, which cannot be divided over 49 ranks"):
        enqueuer.load_state_dict(state)
