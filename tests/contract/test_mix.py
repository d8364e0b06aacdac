"""mix(): proportions at every prefix, the same items for any workers, resumable."""

import itertools
import json
import math

import numpy as np
import pytest
from helpers import Resumable, rest_of, taken
from hypothesis import given
from hypothesis import strategies as st

from enqueuer import GeneratorEnqueuer, Shard, StateMismatch, mix, prefetch
from enqueuer.mixing import Schedule, Turns

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
    schedule = Schedule(weights, names(weights))
    whole = Turns(schedule, Shard())
    for _ in range(30):
        later = Turns(schedule, Shard(), begun=whole.samples, lags=whole.lags)
        turns = [whole.next() for _ in range(7)]
        assert [later.next() for _ in range(7)] == turns


def lag_of(chosen, shares):
    """Return the largest difference of a count from the sum of the shares until then."""
    counts = np.cumsum(np.array(chosen)[:, None] == np.arange(shares.shape[1]), axis=0)
    return abs(counts - np.cumsum(shares, axis=0)).max()


def shares_at(stages, count):
    """Return the shares at each of so many samples."""
    rows = np.repeat([w for _, w in stages], [n for n, _ in stages], axis=0)
    rows = np.concatenate([rows, np.repeat(rows[-1:], count, axis=0)])[:count]
    return rows / rows.sum(axis=1, keepdims=True)


@st.composite
def schedules(draw):
    sources = draw(st.integers(1, 6))
    weight = st.one_of(st.integers(0, 9), st.floats(0.01, 5))
    row = st.lists(weight, min_size=sources, max_size=sources).filter(any)
    stages = draw(st.lists(st.tuples(st.integers(1, 40), row), min_size=2, max_size=5))
    # Each must occur in some stage.
    stages.append((draw(st.integers(1, 30)), draw(row)))
    stages[-1] = (stages[-1][0], [max(w, 0.5) for w in stages[-1][1]])
    return stages


@given(schedules(), st.integers(0, 200))
def test_the_proportions_follow_a_schedule_within_one_sample(stages, cut):
    shares = shares_at(stages, 300)
    schedule = Schedule(stages, names(shares[0]))
    turns = Turns(schedule, Shard())
    chosen = [turns.next() for _ in range(cut)]
    later = Turns(schedule, Shard(), begun=turns.samples, lags=turns.lags)
    chosen += [turns.next() for _ in range(300 - cut)]
    assert lag_of(chosen, shares) < 1
    assert [later.next() for _ in range(300 - cut)] == chosen[cut:]


@given(schedules())
def test_a_function_of_the_samples_gives_the_order_of_its_stages(stages):
    ends = list(itertools.accumulate(count for count, _ in stages))

    def weights(sample):
        return next((w for end, (_, w) in zip(ends, stages, strict=True) if sample < end), last)

    last = stages[-1][1]
    by_stages = Turns(Schedule(stages, names(last)), Shard())
    by_function = Turns(Schedule(weights, names(last)), Shard())
    assert [by_stages.next() for _ in range(200)] == [by_function.next() for _ in range(200)]


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_a_schedule_counts_the_samples_of_all_shards(shards):
    stages = [(90, [1, 0, 1]), (60, [0, 1, 0]), (300, [1, 1, 1])]
    turns = [Turns(Schedule(stages, names("abc")), Shard(i, shards)) for i in range(shards)]
    chosen = [turn.next() for _ in range(450 // shards) for turn in turns]
    assert lag_of(chosen, shares_at(stages, len(chosen))) <= (1 if shards == 1 else shards + 1)
    assert set(chosen[:90]) == {0, 2}
    # A shard may have one that it was owed.
    assert chosen[90:150].count(1) >= 60 - shards


def rises(sample):
    return {"first": 1, "second": sample / 20, "third": 1}


def from_any(shard, first_item=0):
    for number in shard.split(range(50))[first_item:]:
        MADE.append(number)
        yield "third", number, 0.0


MADE = []


@pytest.mark.parametrize("weights", [rises, [(30, [1, 0, 2]), (40, [1, 5, 1])]], ids=["f", "list"])
@pytest.mark.parametrize("at_end", ["stop", "restart", "continue"])
def test_a_mixture_that_changes_is_resumed_at_each_item(weights, at_end):
    def make():
        sources = {"first": first, "second": second, "third": from_any}
        return GeneratorEnqueuer(mix(sources, weights, at_end=at_end), shards=2, random_seed=7)

    with make() as enqueuer:
        whole = list(enqueuer)
    for count in range(0, len(whole), 7):
        _, state = taken(make(), count)
        assert rest_of(make(), state) == whole[count:]


def test_sources_that_can_begin_anywhere_make_nothing_again():
    def make():
        source = mix({"a": from_any, "b": from_any}, [(20, [3, 1]), (1, [1, 1])])
        return GeneratorEnqueuer(source, random_seed=7)

    with make() as enqueuer:
        whole = list(enqueuer)
    _, state = taken(make(), 60)
    assert len(json.dumps(state)) < 1000
    MADE.clear()
    assert rest_of(make(), state) == whole[60:]
    assert len(MADE) == len(whole) - 60


def test_continue_ends_with_those_that_the_schedule_leaves_out():
    """Each sample comes once, though the last stage has no place for the letters."""
    stages = [(4, [1, 1]), (1, [0, 1])]
    source = mix(
        {"letters": lambda: iter("abcd"), "n": lambda: iter(range(5))}, stages, at_end="continue"
    )
    assert list(prefetch(source)) == ["a", 0, "b", 1, 2, 3, 4, "c", "d"]


@pytest.mark.parametrize(
    ("weights", "error", "said"),
    [
        ([(10, [1, -1]), (1, [1, 1])], ValueError, "the weight of 'b' must be >= 0, got -1"),
        ([(10, [0, 0]), (1, [1, 1])], ValueError, "the sum of the weights is 0; one of .* > 0"),
        ([(10, [1, 0]), (1, [1, 0])], ValueError, "the weight of 'b' is 0 in all stages"),
        ([(0, [1, 1]), (1, [1, 1])], ValueError, "the samples of a stage must be >= 1, got 0"),
        ([(1.5, [1, 1]), (1, [1, 1])], TypeError, "the samples of a stage must be an int, got 1.5"),
        ([(10, [1, 1]), 5], TypeError, "a stage must be a number of samples and weights, got 5"),
        ([(10, [1])], ValueError, "weights must be 2, one for each name, got 1"),
        (lambda n: [1], ValueError, r"weights\(0\): weights must be 2, one for each name"),
        (lambda n: None, TypeError, r"weights\(0\): weights must be a dict or a list of numbers"),
    ],
)
def test_a_schedule_that_cannot_be_kept_is_refused(weights, error, said):
    with pytest.raises(error, match=said):
        mix({"a": first, "b": second}, weights)


def test_a_function_that_fails_later_says_at_which_sample():
    source = mix({"a": first, "b": second}, lambda n: [1, 1] if n < 30 else [0, 0])
    with pytest.raises(ValueError, match=r"weights\(30\): the sum of the weights is 0"):
        list(prefetch(source))


def test_another_schedule_is_another_source():
    _, state = taken(GeneratorEnqueuer(mix({"a": first, "b": second}, rises_less)), 5)
    with pytest.raises(StateMismatch, match=r"weights is 'rises_less' in the state and .* here"):
        GeneratorEnqueuer(mix({"a": first, "b": second}, [(5, [1, 1])])).load_state_dict(state)


def rises_less(sample):
    return [1, 1 + sample]


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


GAPS = st.lists(st.booleans(), min_size=1, max_size=12)


@given(GAPS, GAPS, st.sampled_from(["stop", "continue"]), st.integers(1, 9))
def test_a_mixture_goes_on_at_any_item_and_at_its_end(a, b, at_end, weight):
    """Also at one that is None, and takes no turn."""
    rows = {"a": a, "b": b}

    def source(name):
        items = [None if is_gap else (name, k) for k, is_gap in enumerate(rows[name])]
        return lambda: Resumable(items)

    def make():
        stages = [(5, [weight, 1]), (1, [1, 2])]
        return mix({name: source(name) for name in rows}, stages, at_end=at_end)(Shard())

    mixed, got, states = make(), [], []
    for item in mixed:
        got.append(item)
        states.append(mixed.state_dict())
    for count, state in enumerate([*states, mixed.state_dict()], 1):
        later = make()
        later.load_state_dict(state)
        assert list(later) == got[count:]


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
        (
            {"a": first, "b": second},
            {"weights": [(4, [1, 1]), (1, [1, 0])], "at_end": "restart"},
            ValueError,
            "weight of 'b' is 0 in the last stage",
        ),
        ({"a": first}, {"weights": [math.inf]}, ValueError, "weight of 'a' must be > 0"),
        ({"a": first}, {"weights": ["x"]}, TypeError, "weight of 'a' must be a number"),
        ({"a": first}, {"weights": {1}}, TypeError, "a dict or a list of numbers, got {1}"),
        ({"a": first}, {"weights": 3}, TypeError, "a dict or a list of numbers, got 3"),
        ({"a": first}, {"at_end": "end"}, ValueError, "'stop', 'restart', 'continue', got 'end'"),
    ],
)
def test_arguments_that_cannot_work_are_refused(given, options, error, says):
    with pytest.raises(error, match=says):
        mix(given, **options)
