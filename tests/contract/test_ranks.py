"""Ranks: each gets its own shards, and together they have all."""

import copy

import numpy as np
import pytest
from helpers import bytes_of, random_batches, twelve

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer
from enqueuer.enqueuers.enqueuer import of_rank


@pytest.mark.thorough
@pytest.mark.parametrize(("shards", "world_size"), [(4, 2), (5, 2), (3, 3), (7, 3)])
def test_the_union_over_ranks_is_the_data_of_one_host(backend, shards, world_size):
    def run(**options):
        with GeneratorEnqueuer(random_batches, shards=shards, random_seed=7, **options) as enqueuer:
            return [bytes_of(batch) for batch in enqueuer]

    parts = [
        run(workers=2, rank=rank, world_size=world_size, **backend) for rank in range(world_size)
    ]
    assert sorted(batch for part in parts for batch in part) == sorted(run())


def test_drop_last_gives_each_rank_equally_many_shards():
    def shards_of(rank):
        options = dict(shards=7, rank=rank, world_size=3, drop_last=True, random_seed=7)
        with GeneratorEnqueuer(lambda shard: iter([shard.index]), **options) as enqueuer:
            return list(enqueuer)

    assert [shards_of(rank) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]


def test_without_shards_there_are_as_many_as_workers_on_all_ranks():
    with GeneratorEnqueuer(twelve, workers=2, rank=1, world_size=3, random_seed=7) as enqueuer:
        assert list(enqueuer) == [1, 4, 7, 10]


def test_fewer_shards_than_ranks_are_refused():
    with pytest.raises(ValueError, match="shards=2 cannot be divided"):
        GeneratorEnqueuer(twelve, shards=2, world_size=3)


def shuffled(shard):
    order = np.random.default_rng([shard.random_seed, shard.epoch]).permutation(12)
    yield from map(int, shard.split(order))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "make",
    [
        lambda **options: GeneratorEnqueuer(shuffled, rank=1, world_size=2, **options),
        lambda **options: OrderedEnqueuer(range(9), abs, True, rank=1, world_size=2, **options),
        lambda **options: of_rank(GeneratorEnqueuer(shuffled, **options), 1, 2),
    ],
    ids=["shards", "shuffled tasks", "enqueuer of a rank"],
)
def test_ranks_without_a_common_seed_are_refused(make):
    enqueuer = make()
    for one in (enqueuer, copy.copy(enqueuer)):
        with pytest.raises(ValueError, match="world_size=2 needs random_seed"):
            one.start()
    seeded = make(random_seed=7)
    assert len(list(seeded)) in (4, 6)
    seeded.stop()
    enqueuer.load_state_dict(seeded.state_dict())  # that has the seed
    assert len(list(enqueuer)) in (4, 6)
    enqueuer.stop()


@pytest.mark.parametrize(
    "make",
    [
        lambda: OrderedEnqueuer(range(9), abs, rank=1, world_size=2),
        lambda: GeneratorEnqueuer(lambda: iter("abcd"), rank=1, world_size=2),
    ],
    ids=["tasks in their order", "a function without the seed"],
)
def test_ranks_that_no_seed_can_confuse_need_none(make):
    with make() as enqueuer:
        assert list(enqueuer)


def test_a_live_iterator_has_no_ranks():
    with pytest.raises(ValueError, match="2 ranks"):
        GeneratorEnqueuer(iter("ab"), world_size=2)
