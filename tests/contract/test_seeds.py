"""Seeds: each shard and epoch draws from a stream of its own, and the parent is left alone."""

import random

import numpy as np
import pytest
from helpers import twelve

from enqueuer import GeneratorEnqueuer


def draws(shard):
    for _ in range(3):
        yield shard.epoch, shard.index, shard.seed, float(shard.rng.random())


def global_draws(shard):
    for _ in range(3):
        yield random.random(), float(np.random.random())


def test_the_streams_are_those_of_the_seed_sequence(backend):
    with GeneratorEnqueuer(draws, workers=2, random_seed=7, **backend) as enqueuer:
        batches = [batch for _ in range(2) for batch in enqueuer]
    for epoch in range(2):
        for index in range(2):
            sequence = np.random.SeedSequence(7, spawn_key=(epoch, index))
            expected = list(np.random.default_rng(sequence).random(3))
            assert [b[3] for b in batches if b[:2] == (epoch, index)] == expected


def test_every_shard_and_epoch_has_a_stream_of_its_own(backend):
    with GeneratorEnqueuer(draws, workers=3, random_seed=7, **backend) as enqueuer:
        batches = [batch for _ in range(2) for batch in enqueuer]
    assert len({b[3] for b in batches}) == len(batches) == 18
    assert len({b[2] for b in batches}) == 6


def test_no_seed_draws_one_and_tells_it(backend):
    with GeneratorEnqueuer(draws, workers=2, **backend) as first:
        batches = list(first)
    other = GeneratorEnqueuer(draws, workers=2, random_seed=first.random_seed, **backend)
    with other:
        assert list(other) == batches
    assert GeneratorEnqueuer(draws).random_seed != first.random_seed


def test_a_process_seeds_the_global_generators_by_shard(process):
    runs = []
    for workers in (1, 2, 4):
        with GeneratorEnqueuer(
            global_draws, workers=workers, shards=4, random_seed=7, **process
        ) as enqueuer:
            runs.append([batch for _ in range(2) for batch in enqueuer])
    assert runs[0] == runs[1] == runs[2]
    assert len(set(runs[0])) == 24


def test_the_parents_generators_are_never_touched(backend):
    random.seed(1), np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tobytes()
    with GeneratorEnqueuer(twelve, workers=2, random_seed=7, **backend) as enqueuer:
        list(enqueuer)
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before


def test_starting_again_repeats_the_data(backend):
    enqueuer = GeneratorEnqueuer(draws, workers=2, **backend)
    with enqueuer:
        first = list(enqueuer)
    with enqueuer:
        assert list(enqueuer) == first


@pytest.mark.parametrize(("seed", "error"), [(-1, ValueError), (1.5, TypeError), ("a", TypeError)])
def test_a_bad_seed_is_refused(seed, error):
    with pytest.raises(error, match="random_seed must be"):
        GeneratorEnqueuer(draws, random_seed=seed)
