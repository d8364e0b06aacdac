"""Reading HDF5: every row once, in random order or that of the file, and what is refused."""

import contextlib
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from helpers import LIMIT, needs, packable

h5py = needs("h5py")

from enqueuer import (  # noqa: E402
    DataFileError,
    GeneratorEnqueuer,
    OrderedEnqueuer,
    Processes,
    Shard,
    StateMismatch,
    cli,
)
from enqueuer.datasets.hdf5 import (  # noqa: E402
    HDF5Source,
    describe,
    files,
    pack,
)
from enqueuer.datasets.hdf5 import source as h5source  # noqa: E402
from enqueuer.datasets.hdf5.rows import RowReader  # noqa: E402
from enqueuer.order.position import fingerprint_of  # noqa: E402

ROWS = 103  # a prime: nothing divides it


@pytest.fixture(params=["virtual", "merged", "foreign", "contiguous"])
def path(request, tmp_path):
    """A file with the columns row (0 to 102), x (2 of it) and name, stored in several ways."""
    path = tmp_path / "rows.h5"
    if request.param in ("virtual", "merged"):
        batch = columns(np.arange(ROWS))
        parts = [
            {key: column[a : a + 10] for key, column in batch.items()} for a in range(0, 103, 10)
        ]
        options = dict(chunk_rows=4, merge=request.param == "merged")

        def source(shard):  # stretches, so that rows are in order
            yield from np.array_split(np.array(parts, object), shard.count)[shard.index]

        pack(source, path, shards=3, backend="thread", random_seed=7, **options)
        return path
    chunks = {"chunks": True, "compression": "gzip"} if request.param == "foreign" else {}
    with h5py.File(path, "w") as file:
        for key, column in columns(np.arange(ROWS)).items():
            text = {"dtype": h5py.string_dtype()} if key == "name" else {}
            file.create_dataset(key, data=column, **text, **chunks)
    return path


def columns(rows):
    return {
        "row": rows,
        "x": np.stack([rows, rows], axis=1).astype("float32"),
        "name": np.array([f"n{row}" for row in rows], object),
    }


@pytest.fixture
def simple(tmp_path):
    """A small file of one dataset, packed from three shards."""
    path = tmp_path / "simple.h5"
    pack(lambda shard: iter([np.arange(20) + 20 * shard.index]), path, shards=3, backend="thread")
    return path


def rows_of(batches):
    return [int(row) for batch in batches for row in batch["row"]]


# --- batches ---


@pytest.mark.parametrize("shards", [1, 5, 200])
def test_unshuffled_batches_are_those_of_the_file(path, shards):
    batches = list(GeneratorEnqueuer(HDF5Source(path, batch_size=10), shards=shards, workers=2))
    assert rows_of(batches) == list(range(ROWS))
    assert {len(batch["row"]) for batch in batches} == {10, 3}


@pytest.mark.parametrize("shards", [1, 5, 200])
@pytest.mark.parametrize("window", [1, None])
def test_a_shuffled_epoch_has_every_row_once(path, shards, window):
    source = HDF5Source(path, batch_size=10, shuffle=True, window=window)
    with GeneratorEnqueuer(source, shards=shards, workers=2, random_seed=7) as enqueuer:
        first, second = rows_of(enqueuer), rows_of(enqueuer)
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second
    assert first != list(range(ROWS))


def test_columns_stay_together(path):
    for batch in GeneratorEnqueuer(HDF5Source(path, shuffle=True, window=20), shards=3):
        assert np.array_equal(batch["x"][:, 1], batch["row"])
        assert [f"n{row}" for row in batch["row"]] == list(batch["name"])
        assert batch["x"].dtype == "float32"


def test_the_same_seed_gives_the_same_batches_for_any_workers(path, backend):
    source = HDF5Source(path, batch_size=10, shuffle=True, window=20)
    options = dict(shards=4, random_seed=7)
    expected = rows_of(GeneratorEnqueuer(source, **options))
    assert rows_of(GeneratorEnqueuer(source, workers=2, **backend, **options)) == expected
    other = {**options, "random_seed": 8}
    assert rows_of(GeneratorEnqueuer(source, **other)) != expected


def test_with_drop_last_all_ranks_have_equally_many_full_batches(path):
    source = HDF5Source(path, batch_size=3, shuffle=True, drop_last=True)
    for shards, each in ((2, 17), (4, 16), (6, 15)):  # of 6 shards some have 18 rows, others 17
        for rank in (0, 1):
            options = dict(shards=shards, rank=rank, world_size=2, random_seed=7)
            enqueuer = GeneratorEnqueuer(source, **options)
            lengths = [len(batch["row"]) for batch in enqueuer]
            assert lengths == [3] * each
    plain = HDF5Source(path, batch_size=5, drop_last=True)
    assert rows_of(GeneratorEnqueuer(plain)) == list(range(100))


def test_a_file_of_tiny_chunks_stays_small_in_memory(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        file.create_dataset("x", (200_000,), "i4", chunks=(1,))  # none of them is written
    source = HDF5Source(tmp_path / "a.h5", "x", 64, shuffle=True)
    assert len(pickle.dumps(source)) < 1_000_000
    assert len(next(source(Shard(0, 1, 0, 7)))) == 64


def test_many_parts_keep_no_more_of_their_chunks_than_one(tmp_path):
    path = tmp_path / "a.h5"
    pack(lambda shard: iter([np.zeros((64, 4096))]), path, shards=32, backend="thread")
    source = HDF5Source(path, "data", 64)
    list(map(np.shape, (source[n : n + 64] for n in range(0, len(source), 64))))
    kept = [
        file.get_access_plist().get_cache()[2] for file in open_files() if b".parts" in file.name
    ]
    assert len(kept) == 32
    assert min(kept) >= 1 << 20  # a chunk, or each row would unpack one
    assert sum(kept) <= 64 << 20


def open_files():
    """Return the handles of the HDF5 files that this process has open."""
    return h5py.h5f.get_obj_ids(types=h5py.h5f.OBJ_FILE)


def what_is_read(monkeypatch):
    """Return a list that grows by the first row and the end of whatever is read from now on."""
    read = []
    take = RowReader.take

    def noted(self, at, low, high, *args):
        read.append((low, high))
        return take(self, at, low, high, *args)

    monkeypatch.setattr(RowReader, "take", noted)
    return read


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_only_chunks_that_must_be_unpacked_are_kept_in_a_cache(tmp_path, compression):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(100), chunks=(10,), compression=compression)
        file.create_dataset("whole", data=np.arange(100))
    with files.opened(tmp_path / "a.h5") as file:
        dataset = files.dataset_of(file, "x")
        cache = dataset.id.get_access_plist().get_chunk_cache()[1]
        assert cache == (files.CACHE_BYTES if compression else 0)
        assert np.array_equal(dataset[35:77:2], np.arange(35, 77, 2))
        assert np.array_equal(files.dataset_of(file, "whole")[3:5], [3, 4])


def test_an_epoch_reads_each_chunk_once(tmp_path, monkeypatch):
    pack([np.arange(1000)], tmp_path / "a.h5", chunk_rows=50, merge=True)
    read = what_is_read(monkeypatch)
    source = HDF5Source(tmp_path / "a.h5", "data", 8, shuffle=True, window=100)
    batches = list(source(Shard(0, 1, 0, 7)))
    assert sorted(read) == [(start, start + 50) for start in range(0, 1000, 50)]
    assert read != sorted(read)
    # a window is two chunks, and what was left of the one before
    assert max(len(set(batch // 50)) for batch in batches) <= 3
    assert any(len(set(batch // 50)) >= 2 for batch in batches)


@pytest.mark.parametrize(
    ("chunk", "window"), [(341, None), (39, 128 * 39)], ids=["all in a window", "ten windows"]
)
@pytest.mark.parametrize("shards", [1, 4, 8])
def test_a_batch_of_a_file_sorted_by_class_has_many_classes(tmp_path, shards, chunk, window):
    """A shuffle of all rows would give 47 of the 100 in a batch of 64, and 10 % less is allowed.

    128 chunks are a window of the default size in a packed file.
    """
    least = 0.9 * 47.4
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("y", data=np.repeat(np.arange(100), 500), chunks=(chunk,))
    source = HDF5Source(tmp_path / "a.h5", "y", 64, shuffle=True, window=window)
    for index in range(0, shards, 3):
        batches = list(source(Shard(index, shards, 0, 7)))[:-1]
        classes = [len(set(batch.tolist())) for batch in batches]
        assert np.mean(classes) > least
        assert min(classes) > least - 15  # nor are the last batches worse


def test_by_default_large_rows_and_large_chunks_do_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(h5source, "_WINDOW_BYTES", 1 << 20)
    with h5py.File(tmp_path / "a.h5", "w") as file:  # of 40 MiB; none of its chunks is written
        file.create_dataset("x", (640, 1 << 16), "u1", chunks=(16, 1 << 16))
    batches = HDF5Source(tmp_path / "a.h5", "x", 2, shuffle=True)(Shard(0, 1, 0, 7))
    tracemalloc.start()
    try:
        assert sum(map(len, batches)) == 640
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 3.5 * (1 << 20)  # less than two windows, a chunk, and a batch


def test_the_default_window_counts_text_by_the_size_of_its_file(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["text"] = ["x" * 20_000] * 100
    shard = Shard(0, 1, 0, 7)
    state = HDF5Source(tmp_path / "a.h5", "text", 8, shuffle=True)(shard).state_dict()
    assert 3000 < state["window"] < (128 << 20) / 20_000


def test_shards_of_a_file_with_one_chunk_have_other_rows_in_each_epoch(tmp_path):
    pack([np.arange(1000)], tmp_path / "a.h5")
    source = HDF5Source(tmp_path / "a.h5", "data", 10, shuffle=True)
    first, second = (
        set(np.concatenate(list(source(Shard(0, 4, epoch, 7)))).tolist()) for epoch in (0, 1)
    )
    assert len(first) == len(second) == 250
    assert 0 < len(first & second) < 250


def test_a_slice_of_the_rows_is_as_if_the_file_had_only_these(path):
    training = HDF5Source(path, batch_size=7, rows=slice(None, -20), shuffle=True)
    validation = HDF5Source(path, batch_size=7, rows=slice(-20, None))
    assert (len(training), len(validation)) == (83, 20)
    assert sorted(rows_of(GeneratorEnqueuer(training, shards=3))) == list(range(83))
    assert rows_of(GeneratorEnqueuer(validation, shards=3)) == list(range(83, 103))
    assert validation[0]["row"] == 83
    assert list(validation[-2:]["row"]) == [101, 102]


def test_batches_come_from_where_the_loop_stopped(path):
    source = HDF5Source(path, batch_size=10, shuffle=True)
    with GeneratorEnqueuer(source, shards=2, random_seed=7) as enqueuer:
        batches = iter(enqueuer)
        head = rows_of([next(batches), next(batches)])
        state = enqueuer.state_dict()
        tail = rows_of(batches)
    later = GeneratorEnqueuer(source, workers=2)
    later.load_state_dict(state)
    with later:
        assert rows_of(later) == tail
    assert sorted(head + tail) == list(range(ROWS))


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "drop_last": True}])
@pytest.mark.parametrize("window", [1, 30, None])
def test_a_shard_goes_on_anywhere_with_the_same_batches(path, options, window):
    source = HDF5Source(path, batch_size=4, window=window, **options)
    for index in range(3):
        shard = (index, 3, 1, 7)
        whole = [batch["row"].tolist() for batch in source(Shard(*shard))]
        for had in range(len(whole) + 1):
            before = source(Shard(*shard))
            assert [next(before)["row"].tolist() for _ in range(had)] == whole[:had]
            state = json.loads(json.dumps(before.state_dict()))
            before.close()
            after = source(Shard(*shard))
            after.load_state_dict(state)
            assert [batch["row"].tolist() for batch in after] == whole[had:]


def test_what_came_before_is_not_read_again(tmp_path, monkeypatch):
    pack([np.arange(1000)], tmp_path / "a.h5", chunk_rows=10, merge=True)
    source = HDF5Source(tmp_path / "a.h5", "data", 16, shuffle=True, window=50)
    batches = source(Shard(0, 1, 0, 7))
    head = [next(batches) for _ in range(50)]
    state = batches.state_dict()
    tail = list(batches)
    read = what_is_read(monkeypatch)
    later = source(Shard(0, 1, 0, 7))
    later.load_state_dict(state)
    assert [batch.tolist() for batch in later] == [batch.tolist() for batch in tail]
    rows = sum(stop - start for start, stop in read)
    assert rows < 1000 - 16 * len(head) + 50 + 16  # a window, and what was left of one


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"batch_size": 5}, "batch_size=5"),
        ({"rows": slice(1, None)}, "first=1"),
        ({"shuffle": False}, "window=0"),
        ({"window": 7}, "window=7"),
    ],
)
def test_a_state_of_another_source_is_refused(simple, other, says):
    options = dict(batch_size=4, shuffle=True)
    share = HDF5Source(simple, "data", **options)(Shard(0, 1, 0, 7))
    state = HDF5Source(simple, "data", **{**options, **other})(Shard(0, 1, 0, 7)).state_dict()
    with pytest.raises(StateMismatch, match=says):
        share.load_state_dict(state)


def test_a_state_that_was_saved_with_another_window_says_how_to_load_it(simple):
    def share(**window):
        return HDF5Source(simple, "data", 4, shuffle=True, **window)(Shard(0, 1, 0, 7))

    with (
        contextlib.closing(share(window=20)) as before,
        contextlib.closing(share(window=20)) as after,
    ):
        next(before)
        state = before.state_dict()
        with pytest.raises(StateMismatch, match="the state is of window=20, but here it is"):
            share().load_state_dict(state)
        after.load_state_dict(state)
        assert next(after).tolist() == next(before).tolist()


def test_a_state_of_a_version_that_shuffled_otherwise_is_refused(simple):
    shard = Shard(0, 1, 0, 7)
    shuffled = HDF5Source(simple, "data", 4, shuffle=True, window=20)(shard)
    old = {"batch": 3, "first": 0, "rows": 60, "batch_size": 4, "window": 20, "chunks": 3}
    with pytest.raises(
        StateMismatch, match=r"shuffle_version=None, but here it is 3; .*version of enqueuer"
    ):
        shuffled.load_state_dict(old)
    plain = HDF5Source(simple, "data", 4)(shard)  # its order is that of the file, as before
    plain.load_state_dict({**old, "window": 0, "chunks": 0})
    with contextlib.closing(plain):
        assert next(plain).tolist() == [12, 13, 14, 15]


def test_a_state_of_a_file_that_was_packed_in_other_chunks_is_refused(tmp_path):
    shard = Shard(0, 1, 0, 7)
    shares = []
    for chunk_rows in (5, 6):
        path = tmp_path / f"{chunk_rows}.h5"
        pack([np.arange(60)], path, chunk_rows=chunk_rows)
        shares.append(HDF5Source(path, "data", 4, shuffle=True, window=20)(shard))
    with pytest.raises(StateMismatch, match="the state is of chunks=12, but here it is 10"):
        shares[1].load_state_dict(shares[0].state_dict())


# --- keys, rows and slices ---


def test_only_the_order_of_a_tuple_of_keys_is_that_of_a_batch(path):
    def found(keys):
        return fingerprint_of(HDF5Source(path, keys, 4))

    assert found(["x", "row"]) == found(["row", "x"])
    assert found(("x", "row")) != found(("row", "x"))


def test_keys_say_what_a_batch_is(path):
    shard = Shard(0, 1, 0, 7)
    first = {
        kind: next(HDF5Source(path, keys, 4)(shard))
        for kind, keys in dict(all=None, list=["x"], tuple=("x", "row"), one="row").items()
    }
    assert sorted(first["all"]) == ["name", "row", "x"]
    assert list(first["list"]) == ["x"]
    assert [part.shape for part in first["tuple"]] == [(4, 2), (4,)]
    assert list(first["one"]) == [0, 1, 2, 3]


def test_rows_and_slices_are_read(path):
    source = HDF5Source(path)
    assert len(source) == ROWS
    row = source[-1]
    assert (row["row"], row["x"].tolist(), row["name"]) == (102, [102, 102], "n102")
    assert list(source[5:20:5]["row"]) == [5, 10, 15]
    assert list(source[50:40]["row"]) == []
    assert list(source[np.int64(3) : 5]["name"]) == ["n3", "n4"]
    with pytest.raises(IndexError, match=r"row 103 .* is out of range: it has 103"):
        source[103]
    with pytest.raises(ValueError, match="step"):
        source[::-1]
    for index in ([0, 1], "row", 1.0, None, np.array([0, 1])):
        with pytest.raises(TypeError, match="integer"):
            source[index]
    with pytest.raises(TypeError, match="slice indices must be integers"):
        source[1.5:2]


def several(folder, *columns):
    """Write a file for each number of rows and dtype; return the paths."""
    paths, start = [], 0
    for rows, dtype in columns:
        paths.append(folder / f"{start}.h5")
        with h5py.File(paths[-1], "w") as file:
            file["y"] = np.arange(start, start + rows)
            file.create_dataset("x", data=np.full((rows, 2), start), dtype=dtype, chunks=(3, 2))
        start += rows
    return paths


@pytest.mark.parametrize("shuffle", [False, True])
def test_several_files_are_one_source(tmp_path, backend, shuffle):
    paths = several(tmp_path, (10, "i4"), (5, "i4"), (12, "i4"))
    source = HDF5Source(paths, batch_size=4, shuffle=shuffle, window=8, rows=slice(2, 26))
    batches = list(GeneratorEnqueuer(source, workers=2, shards=3, random_seed=7, **backend))
    rows = [int(row) for batch in batches for row in batch["y"]]
    assert (sorted(rows) if shuffle else rows) == list(range(2, 26))
    firsts = [0] * 10 + [10] * 5 + [15] * 12
    assert all((firsts[y] == x).all() for b in batches for y, x in zip(b["y"], b["x"], strict=True))
    assert source[6:18]["y"].tolist() == list(range(8, 20))
    assert "0.h5 and 2 more (x, y), 24 rows" in repr(source)
    source.close()
    paths[1].unlink()
    assert source[0]["y"] == 2
    with pytest.raises(DataFileError, match=r"10\.h5: it was there before and is gone"):
        source[9]
    source.close()


def test_several_files_must_be_alike(tmp_path):
    paths = several(tmp_path, (10, "i4"), (5, "i8"))
    with pytest.raises(DataFileError, match=r"10\.h5: 'x' is int64 of .*0\.h5 it is int32 of"):
        HDF5Source(paths)
    assert len(HDF5Source(paths, "y")) == 15
    with h5py.File(paths[1], "a") as file:
        del file["x"]
    with pytest.raises(DataFileError, match=r"10\.h5: 'x' is missing, but in .*0\.h5 it is int32"):
        HDF5Source(paths)
    with h5py.File(paths[1], "a") as file:
        file["x"] = np.zeros((4, 2), "i4")
    with pytest.raises(DataFileError, match=r"10\.h5: .* must have equally many rows"):
        HDF5Source(paths)
    with pytest.raises(ValueError, match="at least one file"):
        HDF5Source([])


@pytest.mark.parametrize("chunks", [None, (2, 7, 1)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_may_lie_along_any_axis(tmp_path, backend, chunks, shuffle):
    rows = np.arange(20)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        values = rows[:, None] + np.arange(3)[:, None, None] * 100 + np.arange(2) * 1000
        file.create_dataset("x", data=values, chunks=chunks)
        file["text"] = np.array([[f"{name}{row}" for row in rows] for name in "ab"], object)
        file["y"] = rows
    axes = {"x": 1, "text": -1}
    options = dict(batch_size=6, shuffle=shuffle, window=7, axis=axes)
    source = HDF5Source([tmp_path / "a.h5"] * 2, ("x", "text", "y"), **options)
    assert len(source) == 40
    for x, text, y in [source[3:33:7], source[25:24], *GeneratorEnqueuer(source, **backend)]:
        assert x.shape == (len(y), 3, 2)
        assert (x[:, 2, 1] - 1200).tolist() == y.tolist()
        assert text.tolist() == [[f"a{row}", f"b{row}"] for row in y]
    assert source[-1][0].tolist() == [[19, 1019], [119, 1119], [219, 1219]]
    source.close()
    last = HDF5Source(tmp_path / "a.h5", "x", axis=-1)
    assert last[1].tolist() == values[:, :, 1].tolist()
    assert fingerprint_of(last) != fingerprint_of(HDF5Source(tmp_path / "a.h5", "x", axis=1))
    last.close()


def test_an_axis_that_is_not_there_is_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["one"] = np.zeros((3, 20)), 1
    with pytest.raises(DataFileError, match=r"a\.h5: 'x' of shape \(3, 20\) has no axis 2"):
        HDF5Source(tmp_path / "a.h5", axis=2)
    with pytest.raises(DataFileError, match=r"equally many rows, got \{'one': None\}"):
        HDF5Source(tmp_path / "a.h5", "one")
    with pytest.raises(ValueError, match=r"axis is for \['X'\], but the keys are \['x'\]"):
        HDF5Source(tmp_path / "a.h5", axis={"X": 1})
    assert len(HDF5Source(tmp_path / "a.h5", axis=-1)) == 20


def test_a_packed_file_may_be_read_along_another_axis(tmp_path):
    pack(lambda shard: iter([np.arange(12).reshape(4, 3)]), tmp_path / "a.h5", shards=3)
    source = HDF5Source(tmp_path / "a.h5", "data", axis=1)
    assert source[2].tolist() == [2, 5, 8, 11] * 3
    source.close()


def test_text_that_says_it_is_ascii_may_be_utf8(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=["é".encode(), b"e"], dtype=h5py.string_dtype("ascii"))
    assert HDF5Source(tmp_path / "a.h5", "x")[:].tolist() == ["é", "e"]


def test_batches_of_text_can_be_saved(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=["a", "b"], dtype=h5py.string_dtype())
    [batch] = HDF5Source(tmp_path / "a.h5", "x")(Shard(0, 1, 0, 7))
    np.save(tmp_path / "a.npy", batch)  # numpy warns of metadata
    assert np.load(tmp_path / "a.npy", allow_pickle=True).tolist() == ["a", "b"]


def test_text_that_is_not_utf8_is_reported_with_key_and_rows(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=[b"e", b"\xe9"], dtype=h5py.string_dtype())
    with pytest.raises(DataFileError, match=r"a\.h5: rows 0 to 2 of 'x' cannot be read: .*utf-8"):
        HDF5Source(tmp_path / "a.h5", "x")[:]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_items_of_a_dataset_may_be_arrays(tmp_path, shuffle):
    rows = np.arange(12, dtype="f4").reshape(4, 3)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (4,), np.dtype(("f4", (3,))))[...] = rows
    batches = list(HDF5Source(tmp_path / "a.h5", "x", 3, shuffle=shuffle)(Shard(0, 1, 0, 7)))
    assert sorted(np.concatenate(batches).tolist()) == rows.tolist()


def test_it_is_a_sequence_for_tasks(path, backend):
    source = HDF5Source(path, keys=("row", "x"))
    enqueuer = OrderedEnqueuer(source, shuffle=True, batch_size=10, workers=2, **backend)
    rows = [int(row) for row, _ in enqueuer for row in row]
    assert sorted(rows) == list(range(ROWS))


@pytest.mark.parametrize("workers", [0, 2])
def test_it_is_a_map_style_dataset_for_torch(path, workers):
    torch = needs("torch")
    source = HDF5Source(path)
    assert source[0]["row"] == 0  # it is open here before there are workers
    loader = torch.utils.data.DataLoader(source, 10, shuffle=True, num_workers=workers)
    batches = list(loader)
    assert sorted(rows_of(batches)) == list(range(ROWS))
    assert batches[0]["x"].dtype is torch.float32
    assert batches[0]["name"][0] == f"n{batches[0]['row'][0]}"
    source.close()
    del loader


def test_a_file_that_is_open_under_an_old_name_is_read_by_its_new_one(tmp_path):
    old, new = tmp_path / "old.h5", tmp_path / "new.h5"
    with h5py.File(old, "w") as file:
        file["x"] = np.zeros(9)
    before = HDF5Source(old, "x")
    assert before[0] == 0
    old.rename(new)
    with pytest.raises(DataFileError, match=r"old\.h5"):
        HDF5Source(old, "x")
    with h5py.File(old, "w") as file:
        file["x"] = np.ones(9)
    assert (HDF5Source(new, "x")[0], HDF5Source(old, "x")[0]) == (0, 1)
    before.close()


def test_a_handle_is_never_carried_to_another_process(simple):
    source = HDF5Source(simple, keys="data")
    assert source[1] == 1
    opened = open_files()
    copy = pickle.loads(pickle.dumps(source))
    assert open_files() == opened
    assert copy[1] == 1
    assert open_files() == opened
    copy.close()
    here, there = multiprocessing.Pipe()

    def child():
        inherited = open_files()
        numbers = {file.id for file in inherited}
        found = int(source[2])
        # The inherited handle stays valid, and is not the one that was read from.
        used = {file.id for file in open_files()} - numbers
        there.send((found, len(used), all(file.valid for file in inherited)))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert here.poll(LIMIT)
    assert here.recv() == (2, 1, True)
    process.join(LIMIT)
    process.close()
    assert source[3] == 3  # and it was not closed here
    source.close()
    for end in (here, there):
        end.close()


def test_a_source_that_is_open_here_is_no_shared_file_of_forked_workers(simple, recwarn):
    class Mine(HDF5Source):
        pass

    source = Mine(simple, "data")
    assert source[1] == 1
    backend = Processes(start_method="fork")
    for enqueuer in (
        GeneratorEnqueuer(source, workers=2, backend=backend),
        OrderedEnqueuer(source, workers=2, backend=backend),
    ):
        with enqueuer:
            assert sum(map(np.size, enqueuer)) == 60
    source.close()
    assert [str(warning.message) for warning in recwarn if "share" in str(warning.message)] == []


def test_workers_look_for_filters_where_the_program_does(simple):
    folder, folders = os.fsencode(simple.parent), h5py.h5pl.size()
    h5py.h5pl.append(folder)
    pickled = pickle.dumps(HDF5Source(simple))
    h5py.h5pl.remove(folders)
    assert folder not in files.filter_folders()
    for _ in range(2):
        pickle.loads(pickled)
        assert files.filter_folders()[folders:] == [folder]
    h5py.h5pl.remove(folders)


def test_files_are_closed_at_the_end_of_an_epoch_and_after_a_break(path):
    source = HDF5Source(path, shuffle=True, batch_size=4)
    batches = source(Shard(0, 1, 0, 7))
    next(batches)
    assert _open_descriptors(path)
    batches.close()
    assert not _open_descriptors(path)


def _open_descriptors(path):
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    return [link for link in links if link.startswith(str(path))]


TABLES = """
import sys, h5py, numpy as np
from enqueuer import GeneratorEnqueuer
from enqueuer.datasets.hdf5 import HDF5Source, describe

text, path = h5py.string_dtype(), sys.argv[1]
rows = {
    "table": (np.dtype([("name", text), ("value", "f8")]), lambda row: (f"event {row}", row)),
    "member": (np.dtype([("x", h5py.vlen_dtype("i4"))]), lambda row: (np.arange(row),)),
    "texts": (h5py.vlen_dtype(text), lambda row: np.array(["a"] * (row + 1), object)),
}
with h5py.File(path, "w") as file:
    for name, (dtype, make) in rows.items():
        for row in range(20):
            file.require_dataset(name, (20,), dtype)[row] = make(row)
for run in range(6):
    for name in rows:
        first = HDF5Source(path, name, batch_size=2, shuffle=bool(run % 2))
        with GeneratorEnqueuer(first, workers=4, shards=8, random_seed=1) as enqueuer:
            for batch in enqueuer:
                second = HDF5Source(path, name)
                second[3], describe(path), second.close()
first[0]
print(len(h5py.h5f.get_obj_ids(types=h5py.h5f.OBJ_FILE)))
"""


def test_tables_with_texts_are_read_by_several_threads(tmp_path):
    command = [sys.executable, "-c", TABLES, str(tmp_path / "a.h5")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["1"]), done.stderr


BESIDE = """
import sys, h5py, numpy as np
from enqueuer.datasets.hdf5 import HDF5Source

path = sys.argv[1]
table = np.dtype([("name", h5py.string_dtype()), ("value", "f8")])
with h5py.File(path, "w") as file:
    file.create_dataset("x", data=np.array([(f"row {row}", row) for row in range(9)], table))
for run in range(20):
    theirs, ours = (lambda: h5py.File(path)["x"]), (lambda: HDF5Source(path, "x"))
    closed, other = (one() for one in ((theirs, ours) if run % 2 else (ours, theirs)))
    closed[0], other[0]
    (closed.file if run % 2 else closed).close()
    for _ in range(3):
        h5py.File(path).close()
    assert other[3]["name"] == b"row 3", other[3:9]
    (other if run % 2 else other.file).close()
"""


def test_the_program_may_open_and_close_the_file_of_a_table_with_texts(tmp_path):
    command = [sys.executable, "-c", BESIDE, str(tmp_path / "a.h5")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_file_that_the_program_may_still_write_is_read(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(20)
        file.flush()
        source = HDF5Source(tmp_path / "a.h5", "x")
        assert source[7:9].tolist() == [7, 8]
        source.close()


@pytest.fixture(params=["text", "number", "nested", "array"])
def unsorted(request, tmp_path):
    """A file of 500 rows; the members of its table are not in the order in which they lie."""
    number = np.dtype(">f8")
    text = h5py.h5t.C_S1.copy()
    text.set_size(8)
    member = text if request.param == "text" else h5py.h5t.py_create(number)

    def table(size, *members):
        kind = h5py.h5t.create(h5py.h5t.COMPOUND, size)
        for name, offset, type in members:
            kind.insert(name, offset, type)
        return kind

    plain = table(24, (b"c", 16, member), (b"b", 8, member), (b"a", 0, member))
    kind = {
        "nested": lambda: table(48, (b"q", 24, plain), (b"p", 0, plain)),
        "array": lambda: h5py.h5t.array_create(plain, (3,)),
    }.get(request.param, lambda: plain)()
    with h5py.File(tmp_path / "a.h5", "w") as file:
        space = h5py.h5s.create_simple((500,))
        dataset = h5py.Dataset(h5py.h5d.create(file.id, b"x", kind, space))
        rows = np.zeros(dataset.shape, dataset.dtype)
        for part in [rows["p"], rows["q"]] if request.param == "nested" else [rows]:
            for at, name in enumerate("abc"):
                part[name] = at
        dataset[...] = rows
    return tmp_path / "a.h5"


def values_of(rows):
    """Return the values of each field, also of fields within others."""
    found = {}
    for name in rows.dtype.names:
        part = rows[name]
        inner = values_of(part) if part.dtype.names else {"": sorted(set(part.ravel().tolist()))}
        found |= {name[:1] + key: value for key, value in inner.items()}
    return found


def test_the_fields_of_a_table_go_by_their_names(unsorted, backend, tmp_path):
    with h5py.File(unsorted) as file:
        expected = values_of(file["x"][:1])
    for shuffle in (False, True):
        source = HDF5Source(unsorted, "x", 50, shuffle=shuffle)
        enqueuer = GeneratorEnqueuer(source, workers=2, shards=2, **backend)
        for _ in range(2):
            for batch in enqueuer:
                assert values_of(batch) == expected
    assert values_of(source[:]) == values_of(source[3:400:9]) == expected
    source.close()
    backwards = list(source[:].dtype.names)[::-1]
    for merge in (False, True):

        def batches(shard):
            for at, batch in enumerate(HDF5Source(unsorted, "x", 50)(shard)):
                yield batch[backwards] if at % 2 else batch

        packed = tmp_path / f"{merge}.h5"
        pack(batches, packed, shards=2, backend="thread", merge=merge)
        source = HDF5Source(packed, "data")
        assert values_of(source[:]) == expected
        source.close()


# --- what is refused ---


def of_type(file, kind):
    h5py.h5d.create(file.id, b"odd", kind, h5py.h5s.create_simple((20,)))


def with_a_link(file, link):
    file["odd"] = link


def of_bytes(size):
    kind = h5py.h5t.STD_I32LE.copy()
    kind.set_size(size)
    return kind


@pytest.mark.parametrize(
    ("add", "what", "says"),
    [
        (of_type, h5py.h5t.UNIX_D32LE, "its type has none like it in numpy .*Time"),
        (of_type, of_bytes(3), "its type has none like it in numpy .*i3"),
        (
            with_a_link,
            h5py.ExternalLink("no.h5", "/x"),
            r'\(a link, <ExternalLink to "/x" in file "no\.h5"\W+cannot be',
        ),
        (
            with_a_link,
            h5py.SoftLink("/odd"),
            r'\(a link, <SoftLink to "/odd">\) cannot be opened: .*too many',
        ),
        (with_a_link, h5py.SoftLink("/no"), r'\(a link, <SoftLink to "/no">\) cannot be opened: '),
    ],
    ids=["time", "three bytes", "file is missing", "circle", "dead link"],
)
def test_an_odd_dataset_does_not_hide_the_others(tmp_path, add, what, says):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["group/x"] = np.arange(20)
        add(file, what)
    assert HDF5Source(path, "group/x")[3] == 3
    columns = describe(path)
    assert (columns[0].name, columns[0].shape) == ("group/x", (20,))
    for key in ("odd",) if add is of_type else ("odd", "odd/x"):
        with pytest.raises(DataFileError, match=rf"a\.h5: '{key}' .*{says}"):
            HDF5Source(path, key)
    if add is of_type:
        assert columns[1].dtype.startswith("unreadable: its type")
        with pytest.raises(DataFileError, match="name those that you want with keys="):
            HDF5Source(path)


@pytest.mark.parametrize(
    "dtype",
    [
        h5py.ref_dtype,
        h5py.regionref_dtype,
        h5py.vlen_dtype(h5py.ref_dtype),
        np.dtype([("value", "f8"), ("odd", h5py.ref_dtype, 3)]),
    ],
    ids=["object", "region", "ragged", "field"],
)
def test_references_are_refused_by_the_name_of_their_dataset(tmp_path, dtype):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(20)
        file.create_dataset("odd", (20,), dtype)
    says = r"a\.h5: 'odd' cannot be read: .*\(references; read what they refer to by its own name\)"
    for keys in (None, "odd"):
        with pytest.raises(DataFileError, match=says):
            HDF5Source(path, keys)
    assert HDF5Source(path, "x")[3] == 3
    assert describe(path)[1].dtype.startswith("unreadable: ")


@pytest.mark.parametrize("group", ["", "group"])
def test_a_damaged_group_is_named(tmp_path, group):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(20)
        file["group/y"] = np.arange(20)
    data = path.read_bytes()
    parts = data.split(b"HEAP")
    at = 1 if not group else 2
    path.write_bytes(b"HEAP".join(parts[:at]) + b"\xff" * 4 + b"HEAP".join(parts[at:]))
    if not group:
        for look in (describe, HDF5Source):
            with pytest.raises(DataFileError, match=rf"{path}: .*heap"):
                look(path)
        return
    assert HDF5Source(path, "x")[3] == 3
    assert {column.name: column.dtype[:10] for column in describe(path)} == {
        "x": "int64",
        "group": "unreadable",
    }


@pytest.mark.parametrize("place", range(3))
def test_a_damaged_dataset_is_named(tmp_path, place):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file["x"], file["y"] = np.arange(20), np.arange(20)
    heads = path.read_bytes().split(b"OHDR")
    heads[place + 1] = b"HEAD".join(heads[place : place + 2])
    del heads[place]
    path.write_bytes(b"OHDR".join(heads))
    for key in ("x", "y"):
        if (place, key) in ((1, "y"), (2, "x")):
            assert HDF5Source(path, key)[3] == 3
        else:
            with pytest.raises(DataFileError, match=rf"{path}: .*cannot be opened|{path}: Unable"):
                HDF5Source(path, key)


def test_a_name_that_is_not_utf8_is_read_and_shown(tmp_path, capsys):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["größe".encode("latin-1")] = np.arange(20)
    [column] = describe(tmp_path / "a.h5")
    assert HDF5Source(tmp_path / "a.h5")[3:5][column.name].tolist() == [3, 4]
    assert cli.main(["inspect", str(tmp_path / "a.h5")]) == 0
    assert r"gr\udcf6\udcdfe" in capsys.readouterr().out


def test_a_filter_that_is_missing_is_named(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["y"] = np.arange(20)
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_chunk((10,))
        plist.set_filter(32999, h5py.h5z.FLAG_OPTIONAL)
        space = h5py.h5s.create_simple((20,))
        dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT64, space, plist)
        dataset.write_direct_chunk((0,), np.arange(10).tobytes())
    source = HDF5Source(tmp_path / "a.h5")
    with pytest.raises(DataFileError, match=r"'x' cannot be read: packed with filter 32999, .*5pl"):
        source[:]
    source.close()
    assert HDF5Source(tmp_path / "a.h5", "y")[3] == 3
    columns = describe(tmp_path / "a.h5")
    assert [column.compression for column in columns] == ["filter 32999", None]


def test_links_lead_to_files_and_to_datasets(simple, tmp_path):
    link = tmp_path / "elsewhere" / "link.h5"
    link.parent.mkdir()
    link.symlink_to(simple)
    assert HDF5Source(link, "data")[:].tolist() == list(range(60))
    with h5py.File(tmp_path / "links.h5", "w") as file:
        file["x"] = range(60)
        file["hard"] = file["x"]
        file["soft"] = h5py.SoftLink("/x")
        file["elsewhere"] = h5py.ExternalLink(str(simple), "/data")
    for key in ("hard", "soft", "elsewhere"):
        assert HDF5Source(tmp_path / "links.h5", key)[:].tolist() == list(range(60))


@pytest.mark.parametrize("spare", range(3))
def test_parts_that_cannot_be_opened_are_reported(simple, spare):
    resource = pytest.importorskip("resource")
    source = HDF5Source(simple, "data")
    was = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as file:
        free = file.fileno()  # the lowest, all below are open
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + spare, was[1]))
    try:
        with pytest.raises(DataFileError, match=r"shard-0000\d.h5: too many open files"):
            source[:]
        with pytest.raises(DataFileError, match="too many open files"):
            describe(simple)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, was)
    assert source[:].tolist() == list(range(60))


def test_only_a_few_parts_are_open_at_once(tmp_path):
    path = tmp_path / "many.h5"
    pack(lambda shard: iter([[shard.index] * 2]), path, shards=200, backend="thread")
    source = HDF5Source(path, "data", batch_size=7)
    assert source[:].tolist() == [n // 2 for n in range(400)]
    assert len(_open_descriptors(path)) <= 32
    assert [source[n] for n in (399, 0, 200, 0)] == [199, 0, 100, 0]
    source.close()
    assert sorted(np.concatenate(list(GeneratorEnqueuer(source))).tolist()) == [
        n // 2 for n in range(400)
    ]


def replaced(part):
    """Put a shorter part in the place of one."""
    other = part.with_name("other.h5")
    with h5py.File(other, "w") as file:
        file["data"] = np.arange(9)
    os.replace(other, part)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda part: part.unlink(), "was there before and is gone"),
        (lambda part: part.write_bytes(b""), "was changed"),
        (lambda part: os.truncate(part, part.stat().st_size - 60), "was changed"),
        (replaced, "was changed"),
    ],
    ids=["missing", "emptied", "truncated", "replaced by a shorter one"],
)
@pytest.mark.parametrize("is_open", [False, True])
def test_a_part_that_changes_gives_an_error_and_never_zeros(simple, change, says, is_open):
    source = HDF5Source(simple, "data")
    if is_open:
        assert source[25] == 5 + 20
    change(simple.with_name("simple.h5.parts") / "shard-00001.h5")
    for read in (
        lambda: source[25],
        lambda: source[15:35],
        lambda: list(GeneratorEnqueuer(source)),
    ):
        with pytest.raises(DataFileError, match=rf"shard-00001\.h5: it {says}"):
            read()
    assert source[5:15].tolist() == list(range(5, 15))


def test_what_is_cut_off_an_open_file_is_not_read_as_zeros(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.ones(100_000)
    source = HDF5Source(path, "x")
    assert source[0] == 1
    os.truncate(path, 100_000)
    with pytest.raises(DataFileError, match=r"a\.h5: it was changed"):
        source[-10:]


# --- virtual datasets of others ---


def virtual(path, layout, *mappings):
    """Write a file of the dataset x; each mapping is rows there, a file, and rows in it, or all."""
    with h5py.File(path, "w") as file:
        shown = h5py.VirtualLayout(layout, int)
        for rows, name, *there in mappings:
            with h5py.File(path.with_name(name)) as part:
                source = h5py.VirtualSource(part["x"])
                shown[rows] = source[there[0]] if there else source
        file.create_virtual_dataset("x", shown)


@pytest.fixture
def two(tmp_path):
    """Two files of ten rows, 0 to 9 and 10 to 19."""
    for name, start in (("a.h5", 0), ("b.h5", 10)):
        with h5py.File(tmp_path / name, "w") as file:
            file.create_dataset("x", data=np.arange(start, start + 10), chunks=(4,))
    return tmp_path


WAYS = {
    "in any order": (20, [(np.s_[10:], "a.h5"), (np.s_[:10], "b.h5")]),
    "interleaved": (20, [(np.s_[0::2], "a.h5"), (np.s_[1::2], "b.h5")]),
    "spread": (19, [(np.s_[0::2], "a.h5")]),
    "part of a file": (15, [(np.s_[:10], "a.h5"), (np.s_[10:], "b.h5", np.s_[5:])]),
    "gap": (20, [(np.s_[:10], "a.h5")]),
    "twice": (15, [(np.s_[:10], "a.h5"), (np.s_[5:15], "b.h5")]),
    "whole files": (20, [(np.s_[:10], "a.h5"), (np.s_[10:], "b.h5")]),
    "stacked": ((2, 10), [(np.s_[0], "a.h5"), (np.s_[1], "b.h5")]),
    "beside": ((10, 2), [(np.s_[:, 0], "a.h5"), (np.s_[:, 1], "b.h5")]),
}


@pytest.mark.parametrize(("shape", "mappings"), WAYS.values(), ids=WAYS)
def test_virtual_datasets_of_others_are_read_as_hdf5_reads_them(two, shape, mappings):
    path = two / "v.h5"
    virtual(path, shape, *mappings)
    with h5py.File(path) as file:
        expected = file["x"][:].tolist()
    source = HDF5Source(path, "x", batch_size=4, shuffle=True)
    for part in (np.s_[:], np.s_[2:12:3], np.s_[6:6], np.s_[1:12:7]):
        assert source[part].tolist() == expected[part]
    assert source[-1].tolist() == expected[-1]
    batches = list(GeneratorEnqueuer(source, shards=3))
    assert sorted(np.concatenate(batches).tolist()) == sorted(expected)
    (two / "a.h5").unlink()
    with pytest.raises(DataFileError, match=r"a\.h5: it was there before and is gone"):
        source[:1]


def test_a_packed_file_may_get_another_dataset(simple):
    with h5py.File(simple, "a") as file:
        file.move("data", "renamed")
    assert HDF5Source(simple)[25] == {"renamed": 25}
    with h5py.File(simple, "a") as file:
        file["more"], file["one"] = -np.arange(60), 1
    assert HDF5Source(simple)[25] == {"renamed": 25, "more": -25}


def test_a_virtual_dataset_may_show_another_one(two):
    for name, other in (("v.h5", "a.h5"), ("w.h5", "v.h5")):
        virtual(two / name, (10,), (np.s_[:], other))
    assert HDF5Source(two / "w.h5", "x")[:].tolist() == list(range(10))
    with pytest.raises(DataFileError, match=r"pack has not made, .* any file"):
        HDF5Source(two / "w.h5", "x", allow_outside=False)


def test_a_virtual_dataset_with_a_file_that_is_missing_is_refused(two):
    virtual(two / "v.h5", (5,), (np.s_[:], "a.h5", np.s_[::2]))
    (two / "a.h5").unlink()
    with pytest.raises(DataFileError, match=r"its part .*a\.h5 is missing"):
        HDF5Source(two / "v.h5", "x")


def raw_outside(path, there):
    there.write_bytes(np.arange(4).tobytes())
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (4,), int, external=[(str(there), 0, h5py.h5f.UNLIMITED)])


def virtual_outside(path, there):
    with h5py.File(there, "w") as file:
        file["y"] = np.arange(4)
    layout = h5py.VirtualLayout((4,), int)
    layout[:] = h5py.VirtualSource(there, "y", (4,), int)
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout)


def linked_outside(path, there):
    with h5py.File(there, "w") as file:
        file["y"] = np.arange(4)
    with h5py.File(path, "w") as file:
        file["x"] = h5py.ExternalLink(there, "y")


@pytest.mark.parametrize("leads", [raw_outside, virtual_outside, linked_outside])
def test_rows_in_files_outside_of_the_folder_can_be_refused(tmp_path, leads):
    for folder in ("inside", "elsewhere"):
        (tmp_path / folder).mkdir()
    path, there = tmp_path / "inside" / "a.h5", tmp_path / "elsewhere" / "b.h5"
    leads(path, there)
    source = HDF5Source(path, "x")
    assert source[:].tolist() == [0, 1, 2, 3]
    source.close()
    with pytest.raises(DataFileError, match=r"rows .*lie in .*elsewhere/b\.h5, ") as caught:
        HDF5Source(path, "x", allow_outside=False)
    assert caught.value.path == str(path)
    there.unlink()
    if leads is raw_outside:
        with pytest.raises(DataFileError, match=r"'x' cannot be read: .*external raw data file"):
            HDF5Source(path, "x")[:]
    elif leads is virtual_outside:
        with pytest.raises(DataFileError, match=r"b\.h5.* is missing"):
            HDF5Source(path, "x")


def test_parts_in_the_folder_are_not_outside_even_behind_a_link(simple, tmp_path):
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a.h5").symlink_to(simple)
    for path in (simple, tmp_path / "links" / "a.h5"):
        source = HDF5Source(path, "data", allow_outside=False)
        assert len(source[:]) == 60


def test_rows_that_do_not_fit_into_memory_are_reported(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:  # none of it is written
        file.create_dataset("x", (4, 1 << 50), "u1", chunks=(2, 1 << 20))
    source = HDF5Source(tmp_path / "a.h5", "x")
    for read in (
        lambda: source[1],
        lambda: next(HDF5Source(tmp_path / "a.h5", shuffle=True)(Shard(0, 1, 0, 7))),
    ):
        with pytest.raises(DataFileError, match=r"rows of 'x' need .* could not be allocated"):
            read()


@pytest.mark.parametrize("look", [HDF5Source, describe])
def test_a_pipe_is_refused_rather_than_waited_for(tmp_path, look):
    os.mkfifo(tmp_path / "a.h5")
    with pytest.raises(DataFileError, match="a pipe or a device, and no HDF5 file"):
        look(tmp_path / "a.h5")


def test_files_that_are_counted_by_a_pattern_are_read_by_hdf5(two):
    for number, name in enumerate(("a.h5", "b.h5")):
        (two / name).rename(two / f"{number}.h5")
    with h5py.File(two / "v.h5", "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        space = h5py.h5s.create_simple((20,), (h5py.h5s.UNLIMITED,))
        space.select_hyperslab((0,), (h5py.h5s.UNLIMITED,), (10,), (10,))
        there = h5py.h5s.create_simple((10,))
        plist.set_virtual(space, b"%b.h5", b"x", there)
        h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_INT64, space, plist)
    assert HDF5Source(two / "v.h5", "x")[:].tolist() == list(range(20))
    with pytest.raises(DataFileError, match="pack has not made"):
        HDF5Source(two / "v.h5", "x", allow_outside=False)


def test_an_open_file_is_refused(simple):
    with h5py.File(simple) as file, pytest.raises(TypeError, match="not File"):
        HDF5Source(file)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"keys": []}, TypeError, "keys must be"),
        ({"keys": ["data", "data"]}, ValueError, "keys must differ"),
        ({"batch_size": 0}, ValueError, "batch_size must be >= 1"),
        ({"window": 0}, ValueError, "window must be >= 1"),
        ({"rows": 5}, TypeError, "rows must be a slice"),
        ({"rows": slice(0, 5, 2)}, ValueError, "step of rows must be 1"),
        ({"keys": ["no"]}, DataFileError, r"simple.h5: there is no dataset 'no'; it has 'data'"),
    ],
)
def test_arguments_are_checked_at_the_door(simple, options, error, says):
    with pytest.raises(error, match=says):
        HDF5Source(simple, **options)


def damage(kind, path):
    part = path.with_name(path.name + ".parts") / "shard-00001.h5"
    if kind == "missing":
        path.unlink()
        shutil.rmtree(part.parent)
    elif kind == "not whole yet":
        path.unlink()
    elif kind == "text":
        path.write_text("hello")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:2500])
    elif kind == "part missing":
        part.unlink()
    elif kind == "part truncated":
        part.write_bytes(part.read_bytes()[:2500])
    elif kind == "part of another":
        with h5py.File(part, "w") as file:
            file["other"] = np.arange(20)
    elif kind == "part too short":
        with h5py.File(part, "w") as file:
            file["data"] = np.arange(19)
    elif kind == "unequal":
        with h5py.File(path, "a") as file:
            file["more"] = np.arange(19)
    elif kind == "no rows":
        with h5py.File(path, "w") as file:
            file["one"] = 3


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", r"simple\.h5: no such file"),
        ("not whole yet", r"simple\.h5: not there yet, but simple\.h5\.parts is"),
        ("text", r"simple\.h5: not an HDF5 file"),
        ("empty", r"simple\.h5: not an HDF5 file"),
        ("truncated", r"simple\.h5: truncated"),
        ("part missing", r"simple\.h5: its part simple\.h5\.parts/shard-00001\.h5 is missing"),
        ("part truncated", r"shard-00001\.h5: truncated"),
        ("part of another", r"shard-00001\.h5: there is no dataset 'data'"),
        ("part too short", "it shows 60 rows, but its parts have 59"),
        ("unequal", r"simple\.h5: .*equally many rows, got \{'data': 60, 'more': 19\}"),
        ("no rows", r"simple\.h5: there is no dataset with rows"),
    ],
)
def test_a_broken_file_is_named_by_its_path(simple, kind, says):
    damage(kind, simple)
    with pytest.raises(DataFileError, match=says) as caught:
        HDF5Source(simple)
    assert caught.value.path.startswith(str(simple))


@pytest.mark.parametrize("kind", ["missing", "part missing", "part truncated"])
def test_a_file_that_breaks_later_is_an_error_in_the_loop(simple, kind, backend):
    source = HDF5Source(simple)
    damage(kind, simple)
    with pytest.raises(DataFileError, match=r"is gone|was changed"):
        list(GeneratorEnqueuer(source, **backend))


def test_a_file_that_is_being_written_is_reported(tmp_path):
    path = tmp_path / "a.h5"
    here, there = multiprocessing.Pipe()

    def writes():
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(3)
            file.flush()
            there.send(1)
            there.recv()

    process = multiprocessing.get_context("fork").Process(target=writes)
    process.start()
    assert here.poll(LIMIT)
    with pytest.raises(DataFileError, match=r"a\.h5: another process is writing it"):
        HDF5Source(path)
    here.send(1)
    process.join(LIMIT)
    process.close()
    for end in (here, there):
        end.close()


@pytest.mark.parametrize("options", [{"checksum": True}, {"compression": "gzip"}])
def test_a_flipped_bit_is_reported_with_key_and_rows(tmp_path, options, backend):
    path = tmp_path / "a.h5"
    pack(
        [np.random.default_rng(0).integers(0, 9, 4000)],
        path,
        chunk_rows=1000,
        merge=True,
        **options,
    )
    with h5py.File(path) as file:
        where = file["data"].id.get_chunk_info(2)
    with open(path, "r+b") as file:
        file.seek(where.byte_offset + where.size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x55]))
    source = HDF5Source(path, batch_size=1000)
    with pytest.raises(DataFileError, match=r"a\.h5: rows 2000 to 3000 of 'data' cannot be read"):
        list(GeneratorEnqueuer(source, **backend))


# --- describe ---


def test_describe_lists_the_datasets(tmp_path):
    pack(
        packable, tmp_path / "a.h5", shards=4, backend="thread", ragged=["tail"], compression="lzf"
    )
    found = describe(tmp_path / "a.h5")
    columns = {c.name: (c.shape, c.dtype, c.compression) for c in found}
    assert columns == {
        "global": ((100,), "float64", "lzf"),
        "name": ((100,), "text", "lzf"),
        "row": ((100,), "int64", "lzf"),
        "tail": ((100,), "ragged int16", "lzf"),
        "x": ((100, 3), "float32", "lzf"),
    }
