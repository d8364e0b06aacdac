"""Whose turn it is, against a model: sort by (round, shard)."""

from hypothesis import given
from hypothesis import strategies as st

from enqueuer.backends.shard_schedule import RoundRobin
from enqueuer.order.messages import Item, Start


def fresh(shards):
    return dict.fromkeys(shards, Start())


def take(order, shard, number, state=None):
    """Note that an item was taken, as the backends do."""
    order.add([Item(shard, number, None, state)])


LENGTHS = st.lists(st.integers(0, 5), max_size=6)


@given(LENGTHS)
def test_round_robin_reads_by_round_and_shard(lengths):
    order, numbers, seen = RoundRobin(fresh(range(len(lengths)))), [0] * len(lengths), []
    while not order.done:
        shard = order.turn()
        if numbers[shard] == lengths[shard]:
            order.ended(shard)
        else:
            seen.append((numbers[shard], shard))
            numbers[shard] += 1
            take(order, shard, numbers[shard] - 1)
    assert seen == sorted((n, shard) for shard, size in enumerate(lengths) for n in range(size))


@given(LENGTHS, st.integers(1, 4))
def test_a_workers_own_turns_are_those_of_the_whole(lengths, workers):
    """Then its channel holds the items in the order in which they are read."""

    def read(shards):
        order, left, seen = RoundRobin(fresh(shards)), list(lengths), []
        while not order.done:
            shard = order.turn()
            if left[shard]:
                left[shard] -= 1
                seen.append(shard)
                take(order, shard, 0)
            else:
                order.ended(shard)
        return seen

    whole = read(range(len(lengths)))
    for worker in range(workers):
        mine = range(worker, len(lengths), workers)
        assert read(mine) == [shard for shard in whole if shard in mine]


@given(LENGTHS, st.data())
def test_the_rest_after_what_was_given_away_is_what_had_not_come(lengths, data):
    """Taken, then partly given away: an order that begins with the rest gives exactly that."""

    def read(order, numbers):
        while not order.done:
            shard = order.turn()
            if numbers[shard] == lengths[shard]:
                order.ended(shard)
            else:
                take(order, shard, numbers[shard])
                yield Item(shard, numbers[shard], None)
                numbers[shard] += 1

    whole = list(read(RoundRobin(fresh(range(len(lengths)))), [0] * len(lengths)))
    taken = data.draw(st.integers(0, len(whole)))
    given_away = data.draw(st.integers(0, taken))
    order = RoundRobin(fresh(range(len(lengths))))
    source = read(order, [0] * len(lengths))
    ready = [next(source) for _ in range(taken)][given_away:]
    rest = order.rest(ready)
    numbers = list(lengths)
    for shard, start in rest.items():
        numbers[shard] = start.number
    assert list(read(RoundRobin(rest), numbers)) == whole[given_away:]


def test_the_state_of_the_last_item_given_away_is_the_one_that_is_told():
    order = RoundRobin(fresh([0]), recent=4)
    for number in range(9):
        take(order, 0, number, f"after {number}")
    ready = [Item(0, number, None) for number in (6, 7, 8)]
    assert order.rest() == {0: Start(9, "after 8")}
    assert order.rest(ready) == {0: Start(6, "after 5")}


def test_a_state_may_be_behind_its_position():
    """Some items tell no state: what stands for one that failed, say."""
    order = RoundRobin({0: Start(5, "after 3", 1)}, recent=9)
    assert order.rest() == {0: Start(5, "after 3", 1)}
    take(order, 0, 5, None)
    assert order.rest() == {0: Start(6, "after 3", 2)}
    take(order, 0, 6, "after 6")
    assert order.rest() == {0: Start(7, "after 6")}
    take(order, 0, 7, None)
    assert order.rest() == {0: Start(8, "after 6", 1)}
    ready = [Item(0, number, None) for number in (6, 7)]
    assert order.rest(ready) == {0: Start(6, "after 3", 2)}


def test_before_the_first_state_a_shard_is_run_from_its_start():
    order = RoundRobin(fresh([0]), recent=9)
    take(order, 0, 0, None)
    take(order, 0, 1, "after 1")
    assert order.rest([Item(0, 1, None)]) == {0: Start(1)}
    assert order.rest() == {0: Start(2, "after 1")}
