"""Rows of arrays: every row once, the same batches for any shards, resumed at once."""

import json
import pickle

import numpy as np
import pytest

from enqueuer import DataFileError, GeneratorEnqueuer, OrderedEnqueuer, Shard, StateMismatch
from enqueuer.datasets.arrays import ArraySource

X = np.random.default_rng(7).random((23, 3)).astype("f4")


@pytest.fixture
def path(tmp_path):
    np.save(tmp_path / "x.npy", X)
    return tmp_path / "x.npy"


def rows_of(source, shards=1, epoch=0, seed=7):
    """Return the batches of all shards in turn, as lists."""
    each = [list(source(Shard(index, shards, epoch, seed))) for index in range(shards)]
    return [
        batches[turn].tolist()
        for turn in range(max(map(len, each)))
        for batches in each
        if turn < len(batches)
    ]


def test_without_shuffle_batches_are_slices(path):
    batches = rows_of(ArraySource(path, 5), shards=3)
    assert batches == [X[start : start + 5].tolist() for start in range(0, 23, 5)]


def test_an_epoch_has_every_row_once_in_an_order_of_its_own():
    source = ArraySource(np.arange(1000), 64, shuffle=True)
    epochs = [sum(rows_of(source, epoch=epoch), []) for epoch in range(2)]  # noqa: RUF017
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(1000))
    assert epochs[0] != epochs[1]
    assert rows_of(source, shards=3) == rows_of(source)
    assert rows_of(source, seed=8) != rows_of(source)


def test_drop_last_gives_each_shard_the_same_number():
    source = ArraySource(np.arange(23), 3, drop_last=True)
    assert [len(list(source(Shard(index, 2, 0, 7)))) for index in range(2)] == [3, 3]
    assert {len(batch) for batch in rows_of(source, shards=2)} == {3}


def test_drop_last_refuses_more_shards_than_batches():
    source = ArraySource(np.arange(23), 10, drop_last=True)
    with pytest.raises(ValueError, match="2 batches cannot be divided evenly over 3 shards"):
        source(Shard(0, 3, 0, 7))


def test_the_structure_is_kept(path):
    labels = np.arange(23)
    source = ArraySource({"x": path, "rest": (labels, str(path))}, 4, shuffle=True)
    for batch in source(Shard(0, 1, 0, 7)):
        at = batch["rest"][0]
        assert np.array_equal(batch["x"], X[at])
        assert np.array_equal(batch["rest"][1], X[at])
    assert np.array_equal(source[3]["x"], X[3])
    assert np.array_equal(source[-2:]["rest"][0], [21, 22])
    assert len(source) == 23
    with pytest.raises(IndexError, match="row 23 is out of range: there are 23"):
        source[23]


def test_raw_files_are_mapped(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"head" + X.tobytes())
    mapped = np.memmap(tmp_path / "x.bin", "f4", "r", offset=4, shape=X.shape)
    assert rows_of(pickle.loads(pickle.dumps(ArraySource(mapped, 10)))) == rows_of(
        ArraySource(X, 10)
    )
    assert len(pickle.dumps(ArraySource(mapped))) < 1000
    part = ArraySource(mapped[5:], 10)
    assert rows_of(part) == rows_of(ArraySource(X[5:], 10))


def test_the_batches_arrive_on_every_backend(backend, path):
    source = ArraySource((path, np.arange(23)), 4, shuffle=True)
    expected = [at.tolist() for _, at in source(Shard(0, 1, 0, 7))]
    with GeneratorEnqueuer(source, workers=2, random_seed=7, **backend) as enqueuer:
        for (x, at), rows in zip(enqueuer, expected, strict=True):
            assert at.tolist() == rows
            assert np.array_equal(x, X[rows])


def test_a_position_is_resumed_without_reading_earlier_rows(path):
    source = ArraySource(path, 4, shuffle=True)
    with GeneratorEnqueuer(source, shards=2, random_seed=7) as enqueuer:
        whole = [batch.tolist() for batch in enqueuer]
    with GeneratorEnqueuer(source, shards=2, random_seed=7) as enqueuer:
        had = [next(enqueuer.get()).tolist() for _ in range(3)]
        state = json.loads(json.dumps(enqueuer.state_dict()))
    assert [number for _, number in state["positions"]] in ([2, 1], [1, 2])
    later = GeneratorEnqueuer(source, workers=2)
    later.load_state_dict(state)
    with later:
        assert had + [batch.tolist() for batch in later] == whole
    other = GeneratorEnqueuer(ArraySource(path, 5, shuffle=True), workers=2)
    with pytest.raises(StateMismatch, match="batch_size is 4 in the state and 5 here"):
        other.load_state_dict(state)


def test_a_position_may_be_loaded_after_some_batches(path):
    batches = ArraySource(path, 4, shuffle=True)(Shard(0, 1, 0, 7))
    state = batches.state_dict()
    first = next(batches)
    next(batches)
    batches.load_state_dict(state)
    assert np.array_equal(next(batches), first)


def test_it_is_a_sequence_for_tasks(path):
    with OrderedEnqueuer(ArraySource(path), batch_size=23) as enqueuer:
        (batch,) = enqueuer
    assert np.array_equal(batch, X)


@pytest.mark.parametrize(
    ("given", "options", "error", "says"),
    [
        (3, {}, TypeError, "needs paths of .npy files or arrays, got an int"),
        ([], {}, ValueError, "there are no arrays"),
        ((X, X[1:]), {}, ValueError, r"must have equally many rows, got \[22, 23\]"),
        (np.array(3), {}, ValueError, "got a single value"),
        ("missing.npy", {}, DataFileError, r"missing\.npy: it cannot be mapped"),
        (X, {"batch_size": 0}, ValueError, "batch_size must be >= 1, got 0"),
        (X, {"batch_size": 24, "drop_last": True}, ValueError, "23 rows do not fill a batch"),
    ],
)
def test_arrays_that_cannot_be_a_source_are_refused(given, options, error, says):
    with pytest.raises(error, match=says):
        ArraySource(given, **options)


@pytest.mark.parametrize("content", [b"", b"no array", "objects", "zip"])
def test_files_that_are_no_array_are_refused(tmp_path, content):
    path = tmp_path / "a.npy"
    if content == "objects":
        np.save(path, np.array([{}, {}]), allow_pickle=True)
    elif content == "zip":
        np.savez(tmp_path / "a.npz", x=X)
        path = tmp_path / "a.npz"
    else:
        path.write_bytes(content)
    with pytest.raises(DataFileError, match=str(path)):
        ArraySource(path)


def test_the_mask_of_an_array_is_not_lost_silently():
    with pytest.raises(TypeError, match="whose mask would be lost"):
        ArraySource(np.ma.masked_array(np.arange(6.0), mask=[0, 1, 0, 0, 1, 0]), 3)


def test_a_copied_memmap_keeps_its_changes(tmp_path):
    np.arange(12, dtype="i4").tofile(tmp_path / "raw")
    copied = np.memmap(tmp_path / "raw", "i4", "c", shape=(6, 2))
    copied[0] = 99
    assert ArraySource(copied)[0].tolist() == [99, 99]


def test_arrays_without_rows_and_a_broken_npz_file_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the arrays have no rows"):
        ArraySource(np.zeros((0, 3)))
    (tmp_path / "a.npz").write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(DataFileError, match=r"a\.npz: it cannot be mapped as an array: "):
        ArraySource(tmp_path / "a.npz")
