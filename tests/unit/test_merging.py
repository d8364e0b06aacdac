"""Whose turn it is, against a model: sort by (round, shard)."""

from hypothesis import given
from hypothesis import strategies as st

from enqueuer.merging import ANY, AsTheyCome, RoundRobin

LENGTHS = st.lists(st.integers(0, 5), max_size=6)


@given(LENGTHS)
def test_round_robin_reads_by_round_and_shard(lengths):
    order, numbers, seen = RoundRobin(range(len(lengths))), [0] * len(lengths), []
    while not order.done:
        shard = order.turn()
        if numbers[shard] == lengths[shard]:
            order.ended(shard)
        else:
            seen.append((numbers[shard], shard))
            numbers[shard] += 1
            order.took(shard)
    assert seen == sorted((n, shard) for shard, size in enumerate(lengths) for n in range(size))


@given(LENGTHS, st.integers(1, 4))
def test_a_workers_own_turns_are_those_of_the_whole(lengths, workers):
    """Then its channel holds the items in the order in which they are read."""

    def read(shards):
        order, left, seen = RoundRobin(shards), list(lengths), []
        while not order.done:
            shard = order.turn()
            if left[shard]:
                left[shard] -= 1
                seen.append(shard)
                order.took(shard)
            else:
                order.ended(shard)
        return seen

    whole = read(range(len(lengths)))
    for worker in range(workers):
        mine = range(worker, len(lengths), workers)
        assert read(mine) == [shard for shard in whole if shard in mine]


def test_as_they_come_takes_any_until_all_have_ended():
    order = AsTheyCome(range(2))
    assert order.turn() is ANY
    order.took(1)
    order.ended(1)
    assert not order.done
    order.ended(0)
    assert order.done
