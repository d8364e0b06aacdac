"""A shard, its share and its random numbers."""

import ctypes
import dataclasses
import itertools
import pickle
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enqueuer import Shard, Task
from enqueuer.workers.shards import GlobalStreams, collect_reports, fresh_seed


def shards(count, epoch=0):
    return [Shard(index, count, epoch, 7) for index in range(count)]


def test_one_can_be_made_by_hand():
    assert Shard() == Shard(index=0, count=1, epoch=0, random_seed=0)
    assert Task() == Task(index=0, epoch=0, random_seed=0)
    assert Shard().split([1, 2]) == [1, 2]
    assert Shard().rng.integers(1000) == Shard(0, 1, 0, 0).rng.integers(1000)


@given(st.integers(0, 40), st.integers(1, 7))
def test_shares_read_in_turn_are_the_whole_in_its_order(size, count):
    items = list(range(size))
    for source in (items, tuple(items), np.arange(size), range(size)):
        shares = [list(shard.split(source)) for shard in shards(count)]
        in_turn = itertools.chain(*itertools.zip_longest(*shares))
        assert [int(item) for item in in_turn if item is not None] == items


@given(st.integers(0, 40), st.integers(1, 7))
def test_an_iterator_is_split_like_a_list(size, count):
    for shard in shards(count):
        assert list(shard.split(iter(range(size)))) == list(shard.split(range(size)))


def test_a_map_style_dataset_is_read_item_by_item():
    class Dataset:
        def __len__(self):
            return 5

        def __getitem__(self, at):
            return "abcde"[int(at)]

    assert [list(shard.split(Dataset())) for shard in shards(2)] == [["a", "c", "e"], ["b", "d"]]


@pytest.mark.parametrize("items", [{"a", "b"}, frozenset("ab"), {"a": 1}, {"a": 1}.keys()])
def test_what_has_no_order_is_refused(items):
    with pytest.raises(TypeError, match=r"pass sorted\(items\) instead"):
        Shard(0, 2, 0, 7).split(items)


def test_seeds_differ_by_seed_epoch_and_index():
    seeds = {Shard(i, 4, e, s).seed for i in range(4) for e in range(4) for s in range(4)}
    assert len(seeds) == 64
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.usefixtures("restored")
def test_other_libraries_take_a_seed_as_it_is():
    for seed in (Shard(1, 2, 3, 4).seed, Task(5, 6, 7).seed, fresh_seed()):
        np.random.seed(seed)
        # OpenCV takes 32 bits with a sign.
        assert ctypes.c_int32(seed).value == seed


def test_a_shard_is_frozen_and_travels():
    shard = Shard(1, 2, 3, 4)
    assert pickle.loads(pickle.dumps(shard)) == shard
    with pytest.raises(AttributeError):
        shard.index = 5


def test_a_fresh_seed_touches_no_generator():
    before = random.getstate(), np.random.get_state()[1].tobytes()
    assert fresh_seed() != fresh_seed()
    assert all(0 <= fresh_seed() < 2**31 for _ in range(100))
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before


@pytest.fixture
def restored():
    python, legacy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(legacy)


@pytest.mark.usefixtures("restored")
def test_global_streams_of_shards_do_not_mix():
    def draw(streams, shard):
        streams.enter(shard)
        return random.random(), np.random.random()

    alone = {}
    for epoch in range(2):
        for shard in shards(3, epoch):
            streams = GlobalStreams()
            alone[shard] = [draw(streams, shard) for _ in range(4)]
    together, streams = {shard: [] for shard in alone}, GlobalStreams()
    for epoch in range(2):
        for index in [0, 1, 2, 2, 0, 1, 1, 0, 0, 2, 2, 1]:
            shard = shards(3, epoch)[index]
            together[shard].append(draw(streams, shard))
    assert together == alone


def test_a_report_without_an_enqueuer_is_logged_with_its_traceback(caplog):
    try:
        raise OSError("cannot read it")
    except OSError as error:
        Shard(1, 3, 0, 7).report(error)
        Shard(1, 3, 0, 7).report(error, log=False)
    (record,) = caplog.records
    assert record.name == "enqueuer"
    assert record.getMessage().startswith("skipped in shard 1: OSError('cannot read it')\nTrace")


def test_listening_changes_nothing_else_of_a_shard():
    shard = Shard(1, 3, 0, 7)
    reports = collect_reports(shard)
    shard.report(error := OSError("bad"))
    assert reports == [(error, True)]
    assert shard == Shard(1, 3, 0, 7)
    assert hash(shard) == hash(Shard(1, 3, 0, 7))
    assert repr(shard) == repr(Shard(1, 3, 0, 7))
    assert dataclasses.asdict(shard) == dict(index=1, count=3, epoch=0, random_seed=7)


def test_a_shard_in_another_process_logs_its_reports_itself(caplog):
    shard = Shard(0, 1, 0, 7)
    reports = collect_reports(shard)
    carried = pickle.loads(pickle.dumps(shard))
    carried.report(ValueError("spoilt"))
    assert (carried, reports) == (shard, [])
    assert "spoilt" in caplog.text
