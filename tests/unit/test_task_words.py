"""The words that seed a task's global generators."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enqueuer.workers.seeding import TaskSeeds, seed_globals
from enqueuer.workers.shards import Task, words_of
from enqueuer.workers.task_words import TaskWords

NUMBERS = st.integers(0, 2**32 - 1)


@given(tasks=st.lists(st.builds(Task, NUMBERS, st.integers(0, 3), NUMBERS), min_size=1))
def test_the_words_are_those_of_numpy(tasks):
    words = TaskWords()
    for task in tasks:
        of_numpy = [int(word) for word in words_of(task)]
        python, legacy = words.of(task)
        assert python == of_numpy[0] << 64 | of_numpy[1]
        assert legacy == of_numpy[2] & 0xFFFFFFFF


@pytest.mark.parametrize("task", [Task(2**32, 0, 7), Task(0, 2**32, 7), Task(0, 0, 2**32)])
def test_larger_numbers_are_left_to_numpy(task):
    assert TaskWords().of(task) is None


def draws():
    return random.random(), random.getrandbits(70), *np.random.rand(3), np.random.randint(1000)


@pytest.mark.parametrize("index", [5, 2**32 + 5])
def test_a_task_draws_the_same_as_with_the_words_of_numpy(index):
    python, legacy = random.getstate(), np.random.get_state()
    try:
        seeds = TaskSeeds()
        for number in (index, index + 1, index):
            task = Task(number, 2, 11)
            seeds.enter(task)
            drawn = draws()
            seed_globals(task)
            assert drawn == draws()
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
