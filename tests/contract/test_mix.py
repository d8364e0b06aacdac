"""mix(): fixed proportions at every prefix, the same items for any workers, resumable."""

import itertools
import math

import numpy as np
import pytest
from helpers import Resumable, rest_of, taken

from enqueuer import GeneratorEnqueuer, Shard, mix, prefetch
from enqueuer.mixing import Turns

THREADS = {"backend": "thread"}
WEIGHTS = [[1, 1], [3, 1], [0.7, 0.2, 0.1], [5, 3, 1, 1], [1] * 9, [100, 1], [0.123, 4.5, 2.7]]
# With many small shares, two turns of one of them in a row are too many.
WEIGHTS += [[10] + [1] * 10, [1] * 40]


def first(shard):
    for number in shard.split(range(60)):
        yield "first", number, shard.rng.random()


def second(shard):
    for number in shard.split(range(40)):
        yield "second", number, shard.rng.random()


def no_shard():
    yield from (("none", number, 0.0) for number in range(20))


def rows_a(shard):
    return Resumable([("a", number) for number in shard.split(range(30))])


def rows_b(shard):
    return Resumable([("b", number) for number in shard.split(range(9))])


MIXED = mix({"first": first, "second": second, "none": no_shard}, weights=[3, 2, 1])


def names(weights):
    return [f"g{index}" for index in range(len(weights))]


def endless(weights):
    return {name: lambda name=name: itertools.repeat(name) for name in names(weights)}


def worst(items, weights):
    """Return the largest difference of a share, in units of 1 / sqrt(n), and of a count."""
    chosen = np.array(list(items))
    counts = np.cumsum(chosen[:, None] == np.array(names(weights)), axis=0)
    n = np.arange(1, len(chosen) + 1)
    most = abs(counts - np.outer(n, np.array(weights) / sum(weights))).max(axis=1)
    return (most / np.sqrt(n)).max(), most.max()


@pytest.mark.thorough
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("shards", [1, 2, 3, 5, 16])
def test_the_proportions_hold_at_every_prefix(weights, shards):
    mixed = mix(endless(weights), weights)
    each = [iter(mixed(Shard(index, shards, 0, 7))) for index in range(shards)]
    turns = itertools.chain.from_iterable(zip(*each, strict=True))
    share, count = worst(itertools.islice(turns, 2000), weights)
    assert share <= 1
    if shards == 1:
        assert count < 1
    for index in range(shards):
        items = mixed(Shard(index, shards, 0, 7))
        assert worst(itertools.islice(items, 500), weights)[0] <= 1


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1e-320, 1], "differ too much: the share of '.*' is below 1e-12"),
        ([1, 1e-13], "differ too much: the share of '.*' is below"),
        ([1e308, 1e308], "the sum of the weights is too large"),
        ([10**400, 1], "the sum of the weights is too large"),
        ([1, math.inf], "the weight of '.*' must be > 0"),
        ([math.nan, 1], "the weight of '.*' must be > 0"),
    ],
    ids=str,
)
def test_weights_that_no_schedule_can_keep_are_rejected(weights, said):
    with pytest.raises(ValueError, match=said):
        mix(endless(weights), weights)


@pytest.mark.parametrize("weights", [[1e-320, 1e-320], [1e300, 2e300], [1e-11, 1]], ids=str)
def test_small_and_large_weights_that_are_alike_are_kept(weights):
    items = mix(endless(weights), weights)(Shard(0, 1, 0, 7))
    assert worst(itertools.islice(items, 500), weights)[0] <= 1


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_a_schedule_continues_after_the_turns_that_were_taken(weights):
    whole = Turns(weights)
    for _ in range(30):
        later = Turns(weights, whole.taken)
        turns = [whole.next() for _ in range(7)]
        assert [later.next() for _ in range(7)] == turns


def test_the_items_do_not_depend_on_the_workers(backend):
    with GeneratorEnqueuer(MIXED, shards=3, random_seed=7, **THREADS) as enqueuer:
        whole = [list(enqueuer) for _ in range(2)]
    assert whole[0] != whole[1]
    with GeneratorEnqueuer(MIXED, shards=3, workers=2, random_seed=7, **backend) as enqueuer:
        assert [list(enqueuer) for _ in range(2)] == whole


@pytest.mark.thorough
@pytest.mark.parametrize("at_end", ["stop", "restart", "continue"])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_sources_with_a_state_are_resumed_by_it(backend, at_end, batch_size):
    """Also by the same mixture in another order, with weights of another sum."""
    source = mix({"a": rows_a, "b": rows_b}, [2, 1], at_end=at_end)
    turned = mix({"b": rows_b, "a": rows_a}, [0.1, 0.2], at_end=at_end)
    options = {"shards": 2, "batch_size": batch_size, "random_seed": 7}
    if batch_size:
        options["collate"] = list
    with GeneratorEnqueuer(source, **options) as enqueuer:
        whole = list(enqueuer)
    for count in range(0, len(whole), 5):
        _, state = taken(GeneratorEnqueuer(source, **options, **THREADS), count)
        if count > 2:
            assert len(state["states"]) > 0
        later = GeneratorEnqueuer(turned, **{**options, **(backend if count == 15 else THREADS)})
        assert rest_of(later, state) == whole[count:]


SHAPES = [[1, 1, 1], [2, 1, 1], [0.1, 0.3, 0.6], [7, 3, 11]]


def cut(weights, order, scale):
    """Return a mixture of a, b and c in another order, with weights in the same proportions."""
    parts = {"a": rows_a, "b": rows_b, "c": first}
    given = {name: weights["abc".index(name)] * scale for name in order}
    return mix({name: parts[name] for name in order}, given, at_end="continue")


@pytest.mark.thorough("processes")
@pytest.mark.parametrize("weights", SHAPES, ids=str)
@pytest.mark.parametrize("order", ["abc", "cab", "bca"])
@pytest.mark.parametrize("scale", [1, 1 / 3, 0.1])
def test_the_order_of_the_dict_and_the_scale_of_the_weights_change_nothing(weights, order, scale):
    whole = list(prefetch(cut(weights, "abc", 1), random_seed=7, shards=2))
    source = cut(weights, order, scale)
    assert list(prefetch(source, random_seed=7, shards=2)) == whole


class Loader(Resumable):
    """Rows whose iteration is a start, as that of a loader with workers; it notes where."""

    def __init__(self, name, began):
        super().__init__([(name, number) for number in range(5)])
        self.name, self.began = name, began

    def __iter__(self):
        self.began.append((self.name, self.at))
        return map(next, itertools.repeat(super().__iter__()))


def test_a_source_with_a_state_is_iterated_only_after_that_was_loaded():
    began = []
    loaders = {name: lambda name=name: Loader(name, began) for name in "ab"}
    _, state = taken(GeneratorEnqueuer(mix(loaders), random_seed=7), 3)
    began.clear()
    rest = rest_of(GeneratorEnqueuer(mix(loaders), random_seed=7), state)
    assert rest == [("b", 1), ("a", 2), ("b", 2), ("a", 3), ("b", 3), ("a", 4), ("b", 4)]
    assert began == [("a", 2), ("b", 1)]


def test_stop_ends_with_the_first_that_ends(backend):
    source = mix({"first": first, "second": second})
    with GeneratorEnqueuer(source, **backend) as enqueuer:
        items = [name for name, *_ in enqueuer]
    assert items == ["first", "second"] * 40 + ["first"]


def test_continue_gives_every_item_once(backend):
    source = mix({"first": first, "second": second}, at_end="continue")
    with GeneratorEnqueuer(source, shards=3, workers=2, **backend) as enqueuer:
        items = [item[:2] for item in enqueuer]
    assert sorted(items) == [("first", n) for n in range(60)] + [("second", n) for n in range(40)]


def test_restart_gives_new_random_numbers_until_all_have_ended():
    source = mix({"first": first, "second": second}, at_end="restart")
    items = list(prefetch(source, random_seed=7))
    assert [n for name, n, _ in items if name == "first"] == list(range(60))
    of_second = [item for item in items if item[0] == "second"]
    assert [n for _, n, _ in of_second] == [*range(40), *range(20)]
    assert of_second[0][2] != of_second[40][2]


def test_each_source_has_random_numbers_of_its_own():
    """They depend on its name alone, and not on the other sources."""
    alone = list(prefetch(mix({"second": second}), random_seed=7))
    both = list(prefetch(mix({"b": second, "second": second}), random_seed=7))
    assert both[1::2] == alone
    assert both[0::2] != alone


def test_none_takes_no_turn():
    def gaps():
        for number in range(4):
            yield None
            yield number

    assert list(prefetch(mix({"gaps": gaps, "letters": lambda: iter("abcde")}))) == [
        *(0, "a", 1, "b", 2, "c", 3, "d")
    ]


def test_sources_report_to_their_shard(backend):
    with GeneratorEnqueuer(mix({"a": reports, "b": no_shard}), **backend) as enqueuer:
        list(enqueuer)
        assert enqueuer.error_count == 3


def reports(shard):
    for number in range(3):
        shard.report(ValueError(f"bad {number}"), log=False)
        yield "good", number, 0.0


def test_all_generators_are_closed(tmp_path, backend):
    def endless(name):
        try:
            while True:
                yield name
        finally:
            (tmp_path / name).touch()

    source = mix({name: lambda name=name: endless(name) for name in "ab"})
    with GeneratorEnqueuer(source, **backend) as enqueuer:
        batches = iter(enqueuer)
        assert [next(batches), next(batches)] == ["a", "b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_stop_closes_those_that_have_not_ended():
    closed = []

    def endless():
        try:
            yield from itertools.repeat(1)
        finally:
            closed.append(True)

    list(prefetch(mix({"a": lambda: iter("xy"), "b": endless})))
    assert closed == [True]


def test_mixtures_can_be_mixed():
    inner = mix({"a": lambda: itertools.repeat("a"), "b": lambda: itertools.repeat("b")})
    outer = mix({"inner": inner, "other": lambda: iter("ccc")})
    assert "".join(prefetch(outer)) == "acbcacb"


def test_an_empty_source_cannot_be_restarted():
    source = mix({"a": lambda: iter("abc"), "empty": lambda: iter(())}, at_end="restart")
    with pytest.raises(ValueError, match=r"'empty' has no items in shard 0 of 1, .*'continue'"):
        list(prefetch(source))


@pytest.mark.parametrize(
    ("given", "options", "error", "says"),
    [
        ([first, second], {}, TypeError, "needs a dict of generator functions by name, got a list"),
        ({}, {}, ValueError, "at least one"),
        ({1: first}, {}, TypeError, "names of mix.. must be strings, got 1"),
        ({"a": iter("a")}, {}, TypeError, "'a' is a str_a?s?c?i?i?_?iterator; pass a function"),
        ({"a": lambda x, y: None}, {}, TypeError, "must take no argument or one"),
        ({"a": first}, {"weights": [1, 2]}, ValueError, "weights must be 1, one for each name"),
        ({"a": first}, {"weights": {"b": 1}}, ValueError, r"for \['a'\], got them for \['b'\]"),
        ({"a": first}, {"weights": [0]}, ValueError, "weight of 'a' must be > 0, got 0; leave"),
        ({"a": first}, {"weights": [math.inf]}, ValueError, "weight of 'a' must be > 0"),
        ({"a": first}, {"weights": ["x"]}, TypeError, "weight of 'a' must be a number"),
        ({"a": first}, {"weights": 3}, TypeError, "a dict or a list of numbers, got 3"),
        ({"a": first}, {"at_end": "end"}, ValueError, "'stop', 'restart' or 'continue', got 'end'"),
    ],
)
def test_arguments_that_cannot_work_are_refused(given, options, error, says):
    with pytest.raises(error, match=says):
        mix(given, **options)
