"""A state says of which source it is; another source is refused, or taken with a warning."""

import functools
import json
import time
import types
import warnings

import numpy as np
import pytest
from helpers import check_prompt, needs, retry_if_disturbed, taken

from enqueuer import (
    EnqueuerWarning,
    GeneratorEnqueuer,
    OrderedEnqueuer,
    StateMismatch,
    merge_states,
    mix,
)
from enqueuer.datasets.arrays import ArraySource

OWN = dict(shards=2, random_seed=7)


def numbers(shard):
    yield from shard.split(range(40))


def others(shard):
    yield from shard.split(range(40))


class Numbers:
    def __call__(self, shard):
        yield from shard.split(range(40))

    def read(self, shard):
        yield from shard.split(range(40))


class Squares:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index**2


class Cubes(Squares):
    pass


def double(element):
    return 2 * element


def rows(**columns):
    return ArraySource(columns, 4)


def shards(source, **options):
    return GeneratorEnqueuer(source, **OWN, **options)


def tasks(*args, **options):
    return OrderedEnqueuer(*args, random_seed=7, **options)


def saved(enqueuer, count=3):
    return taken(enqueuer, count)[1]


CHANGED = {
    "function": (
        lambda: shards(numbers),
        lambda: shards(others),
        "name is 'numbers' in the state and 'others' here",
    ),
    "object": (lambda: shards(Numbers()), lambda: shards(numbers), "name is 'Numbers' in"),
    "method": (lambda: shards(Numbers().read), lambda: shards(Numbers()), "is 'Numbers.read' in"),
    "iterator": (
        lambda: GeneratorEnqueuer(Numbers()(_Whole), random_seed=7),
        lambda: GeneratorEnqueuer(others(_Whole), random_seed=7),
        "name is 'Numbers.__call__' in the state and 'others' here",
    ),
    "partial": (
        lambda: shards(functools.partial(others)),
        lambda: shards(functools.partial(numbers)),
        "name is 'others' in the state and 'numbers'",
    ),
    "batches": (
        lambda: shards(rows(x=np.zeros(80))),
        lambda: shards(ArraySource({"x": np.zeros(80)}, 5)),
        "batch_size is 4 in the state and 5 here",
    ),
    "rows": (
        lambda: shards(rows(x=np.zeros(80))),
        lambda: shards(rows(x=np.zeros(84))),
        "it had 80 rows, and here are 84",
    ),
    "shapes": (
        lambda: shards(rows(x=np.zeros((80, 2)), y=np.zeros(80, "i4"))),
        lambda: shards(rows(x=np.zeros((80, 3), "f4"), y=np.zeros(80, "i4"))),
        r"is \"{'x': 'float64\[2\]', 'y': 'int32\[\]'}\" in the state and \"{'x': 'float32\[3\]',",
    ),
    "weights": (
        lambda: shards(mix({"a": numbers, "b": others}, [1, 2])),
        lambda: shards(mix({"a": numbers, "b": others}, [2, 1])),
        "weights is {'a': 0.333333333333, 'b': 0.666666666667} in the state and",
    ),
    "end": (
        lambda: shards(mix({"a": numbers, "b": others}, at_end="stop")),
        lambda: shards(mix({"a": numbers, "b": others}, at_end="continue")),
        "at_end is 'stop' in the state and 'continue' here",
    ),
    "parts": (
        lambda: shards(mix({"a": numbers, "b": others})),
        lambda: shards(mix({"a": others, "b": others})),
        "in 'a', name is 'numbers' in the state and 'others' here",
    ),
    "sequence": (
        lambda: tasks(Squares()),
        lambda: tasks(Cubes()),
        "name is 'Squares' in the state and 'Cubes'",
    ),
    "map": (
        lambda: tasks(range(40), double),
        lambda: tasks(range(40), Numbers()),
        "map is 'double' in the state and 'Numbers' here",
    ),
    "length": (
        lambda: tasks(range(40)),
        lambda: tasks(range(39)),
        "length is 40 in the state and 39 here",
    ),
}


class _Whole:
    """Stands for a shard of everything."""

    split = staticmethod(iter)


@pytest.mark.parametrize("name", CHANGED)
def test_another_source_is_refused_with_what_has_changed(name):
    before, here, says = CHANGED[name]
    state = saved(before())
    enqueuer = here()
    with pytest.raises(StateMismatch, match=says) as caught:
        enqueuer.load_state_dict(state)
    assert "strict=False" in str(caught.value)
    # Nothing has changed.
    assert enqueuer.state_dict() == here().state_dict()
    before().load_state_dict(state)


@pytest.mark.parametrize("name", ["rows", "function", "length"])
def test_another_source_is_taken_with_a_warning(name):
    before, here, says = CHANGED[name]
    state = saved(before())
    enqueuer = here()
    with pytest.warns(EnqueuerWarning, match=says):
        enqueuer.load_state_dict(state, strict=False)
    enqueuer.reconfigure(workers=2)
    with enqueuer:
        rest = list(enqueuer)
    whole = here()
    with whole:
        assert len(rest) == len(list(whole)) - 3
    # The state is of the source that is here.
    assert enqueuer.state_dict()["epoch"] == 1
    here().load_state_dict(enqueuer.state_dict())


def test_workers_of_any_kind_take_it(backend):
    state = saved(shards(rows(x=np.zeros(120))))
    enqueuer = shards(rows(x=np.zeros(119)), workers=2, **backend)
    with pytest.warns(EnqueuerWarning, match="had 120 rows, and here are 119"):
        enqueuer.load_state_dict(state, strict=False)
    with enqueuer:
        assert len(list(enqueuer)) == 27


def test_what_does_not_belong_to_the_source_is_refused_all_the_same():
    state = saved(shards(numbers))
    with pytest.raises(StateMismatch, match="random_seed is 7 in the state and 8 here"):
        GeneratorEnqueuer(numbers, random_seed=8).load_state_dict(state, strict=False)


def local(speed):
    def numbers(shard):
        yield from shard.split(range(40))

    return numbers


def of_main():
    """Return a function as a script has it, that is imported in another run."""
    made = types.FunctionType(numbers.__code__, numbers.__globals__, "numbers")
    made.__module__ = "__main__"
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda: shards(of_main()),
        lambda: shards(local(1)),
        lambda: shards(lambda shard: numbers(shard)),
        lambda: shards(functools.partial(numbers)),
        lambda: shards(functools.partial(lambda shard: numbers(shard))),
        lambda: shards(functools.lru_cache(numbers)),
    ],
)
def test_a_name_that_means_nothing_refuses_nothing(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make().load_state_dict(saved(shards(numbers)))
        shards(numbers).load_state_dict(saved(make()))


@pytest.mark.parametrize("elements", [list(range(40)), tuple(range(40)), np.arange(40)])
def test_a_list_may_become_another_kind_of_list(elements):
    tasks(elements).load_state_dict(saved(tasks(range(40))))


def test_a_state_of_a_version_without_fingerprints_is_loaded():
    for before, here, _ in [CHANGED["function"], CHANGED["sequence"]]:
        state = saved(before())
        assert state.pop("source")
        here().load_state_dict(state)


def test_a_damaged_fingerprint_is_refused():
    for wrong in (7, "numbers", [1]):
        with pytest.raises(StateMismatch, match="not the state of an enqueuer"):
            shards(numbers).load_state_dict({**saved(shards(numbers)), "source": wrong})


def test_ranks_with_other_sources_are_not_merged():
    def state(source, rank):
        return saved(shards(source, rank=rank, world_size=2), 1)

    def of(count):
        return rows(x=np.zeros(count))

    merge_states([state(lambda shard: numbers(shard), 0), state(numbers, 1)])
    says = "source of rank 1 is not that of rank 0, as it had 120 rows, and here are 119"
    with pytest.raises(StateMismatch, match=says):
        merge_states([state(of(120), 0), state(of(119), 1)])
    # The merged state has it, too.
    merged = merge_states([state(of(120), 0), state(of(120), 1)])
    with pytest.raises(StateMismatch, match="had 120 rows, and here are 119"):
        shards(of(119)).load_state_dict(merged)


def test_files_of_rows_are_known_by_their_name_and_their_rows(tmp_path):
    needs("h5py")
    from enqueuer.datasets.hdf5 import HDF5Source, pack

    for name, count in (("a.h5", 60), ("b.h5", 60), ("copy/a.h5", 61)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pack([np.arange(count)], tmp_path / name, chunk_rows=10, merge=True)

    def make(name, **options):
        return shards(HDF5Source(tmp_path / name, batch_size=4, **options))

    state = saved(make("a.h5"))
    make("a.h5").load_state_dict(state)
    with pytest.raises(StateMismatch, match=r"file is 'a\.h5' in the state and 'b\.h5' here"):
        make("b.h5").load_state_dict(state)
    with pytest.raises(StateMismatch, match="it had 60 rows, and here are 61"):
        make("copy/a.h5").load_state_dict(state)
    with pytest.raises(StateMismatch, match="first is 0 in the state and 1 here"):
        make("copy/a.h5", rows=slice(1, None)).load_state_dict(state)


@pytest.mark.thorough
def test_a_state_of_64_shards_is_small():
    source = ArraySource({f"column {at}": np.zeros((64 * 20, at)) for at in range(99)}, 1)
    state = saved(GeneratorEnqueuer(source, random_seed=2**31 - 1, shards=64), 64 * 15)
    assert len(json.dumps(state)) < 1024
    assert len(json.dumps(merge_states([state]))) < 1024


@retry_if_disturbed
def test_saving_at_each_step_takes_less_than_100_us():
    with shards(rows(x=np.zeros(120_000))) as enqueuer:
        next(enqueuer.get())
        began = time.thread_time()
        for _ in range(1000):
            enqueuer.state_dict()
        check_prompt(time.thread_time() - began, 0.1)


def test_keys_of_arrays_in_another_order_are_the_same_source():
    x, y = np.arange(80), np.arange(80.0)
    state = saved(shards(rows(x=x, y={"b": x, "a": y})))
    later = shards(rows(y={"a": y, "b": x}, x=x))
    later.load_state_dict(state)
    with later:
        assert next(iter(later))["x"].tolist() == [12, 13, 14, 15]
