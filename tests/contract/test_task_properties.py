"""An OrderedEnqueuer against the plain serial loop, for whatever is drawn."""

import json

import numpy as np
import pytest
from helpers import Elements
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enqueuer import OrderedEnqueuer, Task

pytestmark = [
    pytest.mark.repeats,
    pytest.mark.filterwarnings("ignore::enqueuer.EmptyEpochWarning"),  # some are empty
]

SEED = 7
KWARGS = settings(
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def work(x, task):
    """Return None, something small, or something that crosses in a block."""
    if x % 6 == 5:
        return None
    return x, task.rng.integers(0, 255, 40_000 if x % 7 == 0 else 2, np.uint8).tobytes()


def serial(length, epoch, *, shuffle, batch_size, drop_last, rank, world_size):
    """The model: one loop, no workers."""
    order = np.arange(length)
    if shuffle:
        seeds = np.random.SeedSequence(SEED, spawn_key=(epoch,))
        order = np.random.default_rng(seeds).permutation(length)
    if drop_last:
        order = order[: length - length % world_size]
    mine = order[rank::world_size].tolist()
    size = batch_size or 1
    for at in range(0, len(mine), size):
        part = mine[at : at + size]
        if drop_last and len(part) < size:
            continue
        results = [result for x in part if (result := work(x, Task(x, epoch, SEED))) is not None]
        if results:
            yield results[0] if batch_size is None else results


def identity(results):
    return results


@st.composite
def shapes(draw):
    world_size = draw(st.integers(1, 3))
    return draw(st.integers(0, 25)), {
        "shuffle": draw(st.booleans()),
        "batch_size": draw(st.sampled_from([None, 1, 2, 5])),
        "drop_last": draw(st.booleans()),
        "rank": draw(st.integers(0, world_size - 1)),
        "world_size": world_size,
    }


def make(length, shape, as_iterable, **options):
    collate = identity if shape["batch_size"] else None
    elements = Elements(length) if as_iterable else range(length)
    return OrderedEnqueuer(elements, work, collate=collate, random_seed=SEED, **shape, **options)


@pytest.mark.thorough
@settings(KWARGS, max_examples=15)
@given(shape=shapes(), data=st.data())
def test_saved_anywhere_and_loaded_elsewhere_it_is_the_serial_loop(backend, shape, data):
    length, shape = shape
    as_iterable = not shape["shuffle"] and data.draw(st.booleans())
    wanted = [list(serial(length, epoch, **shape)) for epoch in range(3)]
    everything = [result for epoch in wanted for result in epoch]
    cuts = data.draw(st.lists(st.integers(0, len(everything)), max_size=2).map(sorted))
    seen, state = [], None
    for number, end in enumerate([*cuts, len(everything)]):
        workers = data.draw(st.integers(1, 3))
        # every other one on threads, so that states cross between backends
        options = backend if number % 2 == 0 else {"backend": "thread"}
        enqueuer = make(
            length, shape, as_iterable, workers=workers,
            max_queue_size=data.draw(st.sampled_from([1, 3, 10])), **options,
        )  # fmt: skip
        if state is not None:
            enqueuer.load_state_dict(json.loads(json.dumps(state)))
        with enqueuer:
            while len(seen) < end:
                for result in enqueuer:
                    seen.append(result)
                    if len(seen) == end:
                        break
            state = enqueuer.state_dict()
    assert seen == everything


@pytest.mark.thorough("processes")
@settings(KWARGS, max_examples=10)
@given(shape=shapes(), workers=st.integers(1, 3), skip=st.integers(2, 5))
def test_out_of_order_and_with_errors_each_result_comes_once(backend, shape, workers, skip):
    length, shape = shape
    shape = shape | {"batch_size": None}

    def failing(x, task):
        if x % skip == 1:
            raise ValueError(x)
        return work(x, task)

    with OrderedEnqueuer(
        range(length), failing, random_seed=SEED, workers=workers, ordered=False,
        on_error=lambda error: None, **shape, **backend,
    ) as enqueuer:  # fmt: skip
        seen = list(enqueuer)
    wanted = [result for result in serial(length, 0, **shape) if result[0] % skip != 1]
    assert sorted(seen) == sorted(wanted)
