"""A damaged state is refused with StateMismatch and a short message, or is that of a position."""

import functools
import tracemalloc

import numpy as np
import pytest
from damage import LONGEST, damaged
from hypothesis import given, settings
from hypothesis import strategies as st

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, StateMismatch, merge_states, mix
from enqueuer.adapters.loading import Loader
from enqueuer.datasets.arrays import ArraySource

# Bytes; a whole state has a thousand.
MUCH = 50 << 20


def six(shard):
    for number in range(6):
        yield shard.index, number


def halves(number):
    return number // 2 if number % 2 else None


def of(make, counts, **options):
    """Return the states of as many ranks, each after so many batches, and a maker of others."""
    states, world_size = [], len(counts)
    for rank, count in enumerate(counts):
        with make(rank=rank, world_size=world_size, workers=0, **options) as enqueuer:
            batches = iter(enqueuer)
            for _ in range(count):
                next(batches)
            states.append(enqueuer.state_dict())
    return states, functools.partial(make, rank=0, workers=0, **options)


def shards(**options):
    return GeneratorEnqueuer(six, shards=4, random_seed=7, **options)


def tasks(**options):
    return OrderedEnqueuer(range(24), random_seed=7, **options)


def with_steps(**options):
    return Loader(shards(**options), steps_per_epoch=4)


def stateful(**options):
    one, two = (ArraySource({"x": np.arange(24) + at}, batch_size=2) for at in (0, 24))
    source = mix({"one": one, "two": two}) if options.pop("is_mixed", False) else one
    return GeneratorEnqueuer(source, shards=3, random_seed=7, **options)


KINDS = {
    "shards": of(shards, [5]),
    "shards of a rank": of(shards, [3, 4]),
    "shards out of order": of(shards, [5], ordered=False),
    "between epochs": of(shards, [0]),
    "samples": of(shards, [3], batch_size=2),
    "tasks": of(tasks, [5]),
    "tasks of a rank": of(tasks, [3, 4]),
    "batches": of(tasks, [3], batch_size=3, shuffle=True),
    "tasks out of order": of(tasks, [5], ordered=False),
    "results of None": of(tasks, [5], map=halves),
    "an iterable": of(lambda **options: OrderedEnqueuer(iter(range(24)), abs, **options), [5]),
    "steps": of(with_steps, [2]),
    "rows": of(stateful, [3]),
    "a mixture": of(stateful, [3], is_mixed=True),
}


def check(load):
    """Call a function, which must be quick with the memory that it takes; return what it does."""
    tracemalloc.start()
    try:
        return load()
    except StateMismatch as error:
        length = len(str(error))
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < MUCH
    assert length <= LONGEST
    return None


def loaded(enqueuer, state):
    enqueuer.load_state_dict(state)
    return enqueuer


def test_shards_are_counted_before_they_are_listed():
    (state,), make = KINDS["shards"]
    for count in (10**8, 10**12):
        many = {**state, "shards": count}
        assert check(functools.partial(loaded, make(), many)) is None
        assert check(lambda: merge_states([many])) is None  # noqa: B023


def test_the_class_of_a_state_is_named_before_its_rank():
    (_, state), _ = KINDS["shards of a rank"]
    for rank in range(2):
        with pytest.raises(StateMismatch, match="that of GeneratorEnqueuer, and this is Ordered"):
            tasks(rank=rank, world_size=2).load_state_dict(state)


@pytest.mark.parametrize("step", [None, "x", -1, [], 1.5, 5])
def test_a_step_that_cannot_be_one_is_refused(step):
    (state,), make = KINDS["steps"]
    with pytest.raises(StateMismatch, match="step must be"):
        make().load_state_dict({**state, "step": step})


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::enqueuer.EnqueuerWarning")
@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_damage_is_refused_or_leaves_a_position(name, data):
    states, make = KINDS[name]
    world_size = data.draw(st.sampled_from([len(states), 1, 3]))
    at = data.draw(st.sampled_from(range(len(states))))
    changed = [*states]
    changed[at] = data.draw(damaged(states[at]))
    merged = check(lambda: merge_states(changed))
    for state in (changed[at], merged):
        enqueuer = make(world_size=world_size)

        load = functools.partial(loaded, enqueuer, state)
        if state is not None and check(load) is not None:
            # What it goes on with comes once, or is refused where the source does not fit.
            with enqueuer:
                rest = check(functools.partial(list, enqueuer)) or []
            texts = [repr(batch) for batch in rest]
            assert len(set(texts)) == len(texts)
