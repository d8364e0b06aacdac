"""`ordered=k` of shards: at most k later items overtake one, and the order is repeated."""

from collections import Counter

import pytest
from helpers import DiesOnce, Gated, packed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enqueuer import GeneratorEnqueuer, StateMismatch, merge_states, prefetch
from enqueuer.backends.order_log import numbers_in

THREADS = {"backend": "thread"}


def most_overtaken(seen):
    """Return by how many later items the one was overtaken that was overtaken most.

    An item of a shard is later than one of another shard that has had fewer before it; of two that
    have had equally many, that of the shard with the higher index is.
    """
    had, places = Counter(), []
    for shard, *_ in seen:
        places.append((had[shard], shard))
        had[shard] += 1
    return max((sum(p > place for p in places[:at]) for at, place in enumerate(places)), default=0)


def ragged(shard):
    """Yield the shard, the number and something random; some take longer, and some are None."""
    for number in range(3 + 5 * shard.index % 13):
        sum(range(20_000 if number % 4 == shard.index else 10))
        random = int(shard.rng.integers(1 << 30))
        yield None if (number + shard.index) % 5 == 3 else (shard.index, number, random)


def make(source=ragged, **options):
    options = {"random_seed": 7, "ordered": 4, "workers": 3, "shards": 5} | options
    return GeneratorEnqueuer(source, **options)


def recorded(**options):
    """Return an epoch, and the state at its end."""
    with make(**options) as enqueuer:
        seen = list(enqueuer)
        return seen, packed(enqueuer.state_dict())


# --- the bound ---


@pytest.mark.parametrize(("most", "size"), [(1, 2), (7, 2), (30, 10)])
def test_a_slow_shard_is_overtaken_by_so_many_and_no_more(options, most, size, tmp_path):
    source = Gated(tmp_path, stops=[(0, 1)], count=30)
    options = dict(workers=3, shards=3, max_queue_size=size, **options)
    with GeneratorEnqueuer(source, ordered=most, **options) as enqueuer:
        batches = iter(enqueuer)
        # the first ones of all shards, and those that overtake the second one of this shard
        first = [next(batches) for _ in range(3 + most)]
        source.let_on()
        seen = [*first, *batches]
    assert (0, 1) not in first
    assert sorted(seen) == [(shard, number) for shard in range(3) for number in range(30)]
    assert most_overtaken(seen) == most


def test_no_later_one_overtakes_with_0(backend):
    with make(ordered=True, **backend) as enqueuer:
        wanted = list(enqueuer)
    with make(ordered=0, **backend) as enqueuer:
        assert list(enqueuer) == wanted
        assert "order" not in enqueuer.state_dict()


# --- the log, and its repetition ---


@settings(
    derandomize=True,
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
@pytest.mark.repeats
def test_saved_anywhere_the_bound_holds_and_the_order_is_repeated(backend, data):
    shards, ordered = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([1, 3, 10, 1000]))
    with make(ordered=True, shards=shards) as enqueuer:
        wanted = list(enqueuer)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wanted)), max_size=2)))
    sizes = st.fixed_dictionaries(
        {"workers": st.integers(1, 4), "max_queue_size": st.sampled_from([1, 2, 10])}
    )
    seen, states = [], []
    for at, end in enumerate([*cuts, None]):
        options = backend if at % 2 == 0 else THREADS
        enqueuer = make(ordered=ordered, shards=shards, **data.draw(sizes), **options)
        if states:
            enqueuer.load_state_dict(states[-1])
        with enqueuer:
            batches = iter(enqueuer)
            while end is None or len(seen) < end:
                batch = next(batches, None)
                if batch is None:
                    break
                seen.append(batch)
                log = enqueuer.state_dict()["order"][1]
                assert numbers_in(log) == [shard for shard, *_ in seen]
            states.append(packed(enqueuer.state_dict()))
    assert sorted(seen) == sorted(wanted)
    for shard in range(shards):
        assert [i for i in seen if i[0] == shard] == [i for i in wanted if i[0] == shard]
    assert most_overtaken(seen) <= ordered
    again = dict(ordered=ordered, shards=shards, **data.draw(sizes))
    with make(replay_order=states[-1], **again, **backend) as enqueuer:
        assert list(enqueuer) == seen
    # what of the order was not saved comes as `ordered` says
    with make(replay_order=states[0], **again, **backend) as enqueuer:
        other = list(enqueuer)
    known = len(numbers_in(states[0]["order"][1]))
    assert other[:known] == seen[:known]
    assert sorted(other) == sorted(seen)
    assert most_overtaken(other) <= ordered
    later = make(replay_order=states, **again, **backend)
    if cuts:
        later.load_state_dict(states[0])
        with later:
            assert seen[: cuts[0]] + list(later) == seen


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_the_order_does_not_depend_on_workers(backend, workers):
    seen, state = recorded(workers=5, max_queue_size=16, ordered=9)
    options = dict(workers=workers, max_queue_size=1, **backend)
    with make(ordered=9, replay_order=state, **options) as enqueuer:
        assert list(enqueuer) == seen
        assert enqueuer.state_dict()["order"] == state["order"]


def test_each_epoch_has_its_order(backend):
    def read(**options):
        states, epochs = [], []
        with make(**options) as batches:
            for _ in range(3):
                epochs.append(list(batches))
                states.append(packed(batches.state_dict()))
        return epochs, states

    epochs, states = read(workers=5)
    assert [state["order"][0] for state in states] == [0, 1, 2]
    assert read(replay_order=states, workers=2, **backend)[0] == epochs


def test_prefetch_repeats_an_order():
    seen, state = recorded(workers=5)
    options = dict(random_seed=7, ordered=4, workers=1, shards=5, replay_order=state)
    assert list(prefetch(ragged, **options)) == seen


def test_a_death_changes_nothing_and_the_order_is_repeated(process, tmp_path):
    def read(folder, **options):
        options = dict(shards=4, random_seed=7, ordered=2, max_restarts=1, **options, **process)
        with GeneratorEnqueuer(DiesOnce(folder), **options) as enqueuer:
            seen = [(int(batch[0]), len(batch)) for batch in enqueuer]
            assert enqueuer.restart_count == 1
            return seen, enqueuer.state_dict()

    for name in "ab":
        tmp_path.joinpath(name).mkdir()
    seen, state = read(tmp_path / "a", workers=4)
    assert sorted(seen) == [(shard, size) for shard in range(4) for size in (2, 3)]
    assert most_overtaken(seen) <= 2
    assert read(tmp_path / "b", workers=2, replay_order=state)[0] == seen


def test_other_workers_in_the_middle_change_nothing(backend):
    seen, state = recorded(workers=5)
    with make(replay_order=state, **backend) as enqueuer:
        batches = iter(enqueuer)
        first = [next(batches) for _ in range(9)]
        enqueuer.reconfigure(2)
        assert first + list(batches) == seen


# --- states ---


def test_states_of_all_ranks_are_merged():
    def of(rank, world_size, **options):
        return make(shards=6, rank=rank, world_size=world_size, **options)

    states, seen = [], []
    for rank in range(2):
        with of(rank, 2) as enqueuer:
            batches = iter(enqueuer)
            seen += [next(batches) for _ in range(5 + rank)]
            states.append(packed(enqueuer.state_dict()))
    merged = merge_states(states)
    assert "order" not in merged
    for rank in range(3):
        later = of(rank, 3)
        later.load_state_dict(merged)
        with later:
            seen += later
            # the beginning is not known, and so neither is the order
            assert "order" not in later.state_dict()
    assert sorted(seen) == sorted(recorded(shards=6)[0])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"random_seed": 8}, "random_seed is 7 in the state and 8 here"),
        ({"shards": 4}, "shards is 5 in the state and 4 here"),
        ({"ordered": False}, "ordered is 4 in the state and False here"),
    ],
)
def test_the_order_of_another_run_is_refused(options, says):
    _, state = recorded()
    with pytest.raises(StateMismatch, match=says):
        make(replay_order=state, **options).start()


def test_a_source_that_gives_less_ends_the_repetition():
    _, state = recorded()

    def less(shard):
        return (item for item, _ in zip(ragged(shard), range(2), strict=False))

    with make(less, replay_order=state) as enqueuer:
        assert len(list(enqueuer)) == 8
