"""The seeds of the global generators."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enqueuer.workers.shards import Shard, Task, TaskSeeds, borrowed_globals, seeds_of

NUMBERS = st.integers(0, 2**70)
TASKS = st.builds(Task, NUMBERS, st.integers(0, 3), NUMBERS)


@given(first=TASKS, second=TASKS)
def test_equal_tasks_have_equal_seeds_and_others_have_others(first, second):
    assert seeds_of(first) == seeds_of(Task(first.index, first.epoch, first.random_seed))
    assert (seeds_of(first).python == seeds_of(second).python) == (first == second)


@given(place=st.one_of(TASKS, st.builds(Shard, NUMBERS, st.just(1), NUMBERS, NUMBERS)))
def test_the_generators_accept_their_seeds(place):
    seeds = seeds_of(place)
    for seed, limit in ((seeds.legacy, 2**32), (seeds.torch, 2**63), (seeds.tensorflow, 2**31)):
        assert 0 <= seed < limit


@pytest.mark.thorough
@pytest.mark.parametrize("begin", [0, 2**32 - 50_000, 2**40])
def test_no_two_elements_of_an_epoch_have_the_same_seed_of_numpy(begin):
    """100,000 random numbers of 32 bits would have one such pair or more."""
    seeds = {seeds_of(Task(index, 1, 7)).legacy for index in range(begin, begin + 50_000)}
    assert len(seeds) == 50_000


@pytest.mark.thorough
def test_two_epochs_share_few_seeds_of_numpy():
    """Of 65,536 numbers of 32 bits in each, about one. The two were all alike by a mere XOR."""
    first, second = (
        {seeds_of(Task(index, epoch, 0)).legacy for index in range(65_536)} for epoch in (28, 872)
    )
    assert len(first & second) < 20


def test_neighbours_draw_unrelated_numbers():
    """The first numbers of many elements are as if one generator had drawn them."""
    python, legacy = random.getstate(), np.random.get_state()
    try:
        seeds = TaskSeeds()
        drawn = []
        for index in range(4000):
            seeds.enter(Task(index, 0, 0))
            drawn.append((random.random(), *np.random.rand(2), random.random()))
        table = np.array(drawn)
        # Standard deviations of a mean, and of a correlation, of 4000 numbers.
        assert abs(table.mean(axis=0) - 0.5).max() < 5 * 0.289 / 4000**0.5
        beside = np.hstack([table[:-1], table[1:]])
        related = np.corrcoef(beside, rowvar=False) - np.eye(8)
        assert abs(related).max() < 5 / 4000**0.5
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


def draws():
    return random.random(), random.getrandbits(70), *np.random.rand(3), np.random.randint(1000)


@pytest.mark.parametrize("index", [5, 2**32 + 5])
def test_a_worker_and_a_replay_seed_alike(index):
    python, legacy = random.getstate(), np.random.get_state()
    try:
        seeds = TaskSeeds()
        for number in (index, index + 1, index):
            task = Task(number, 2, 11)
            seeds.enter(task)
            drawn = draws()
            with borrowed_globals(task):
                assert drawn == draws()
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
