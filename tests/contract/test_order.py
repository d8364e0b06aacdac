"""Order and determinism: the data depend on shards, never on workers."""

import pytest
from helpers import bytes_of, random_batches, twelve, uneven, wait_until

from enqueuer import GeneratorEnqueuer, Shard


def serial(function, shards, seed, epochs):
    """Return what a plain loop makes of `function`: the model of the contract."""
    batches = []
    for epoch in range(epochs):
        streams = [iter(function(Shard(i, shards, epoch, seed))) for i in range(shards)]
        while streams:
            for stream in list(streams):
                try:
                    batches.append(next(stream))
                except StopIteration:
                    streams.remove(stream)
    return batches


@pytest.mark.thorough("processes")
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_batches_are_the_same_for_any_number_of_workers(backend, workers):
    with GeneratorEnqueuer(
        random_batches, workers=workers, shards=5, random_seed=7, max_queue_size=4, **backend
    ) as enqueuer:
        batches = [bytes_of(batch) for _ in range(2) for batch in enqueuer]
    assert batches == [bytes_of(batch) for batch in serial(random_batches, 5, 7, epochs=2)]


@pytest.mark.parametrize("max_queue_size", [1, 2, 3, 10, 1000])
def test_the_bound_does_not_change_the_data(backend, max_queue_size):
    with GeneratorEnqueuer(
        uneven, workers=3, shards=4, max_queue_size=max_queue_size, **backend
    ) as enqueuer:
        assert list(enqueuer) == serial(uneven, 4, 0, epochs=1)


def test_more_workers_than_shards_do_no_harm(backend):
    with GeneratorEnqueuer(twelve, workers=5, shards=2, **backend) as enqueuer:
        assert list(enqueuer) == list(range(12))


@pytest.mark.parametrize("max_queue_size", [1, 2, 10])
def test_unordered_has_every_item_once_and_each_shard_in_order(backend, max_queue_size):
    with GeneratorEnqueuer(
        uneven, workers=3, shards=4, ordered=False, max_queue_size=max_queue_size, **backend
    ) as enqueuer:
        batches = list(enqueuer)
    assert sorted(batches) == sorted(serial(uneven, 4, 0, epochs=1))
    for shard in range(4):
        assert [b for b in batches if b[0] == shard] == [(shard, n) for n in range(3 * shard)]


@pytest.mark.parametrize("max_queue_size", [1, 4])
def test_unordered_does_not_wait_for_a_slow_shard(options, max_queue_size, tmp_path):
    gate = tmp_path / "gate"

    def source(shard):
        if shard.index == 0:
            wait_until(gate.exists)
        yield from [shard.index] * 20

    with GeneratorEnqueuer(
        source, workers=3, ordered=False, max_queue_size=max_queue_size, **options
    ) as enqueuer:
        batches = iter(enqueuer)
        assert sorted(next(batches) for _ in range(40)) == [1] * 20 + [2] * 20
        gate.touch()
        assert list(batches) == [0] * 20
