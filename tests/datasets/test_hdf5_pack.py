"""Packing: the same file for any workers, whole or not there, and what cannot be packed."""

import collections
import functools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers import LIMIT, DiesOnce, Once, needs, packable

h5py = needs("h5py")

from enqueuer import (  # noqa: E402
    DataFileError,
    GeneratorEnqueuer,
    InvalidState,
    OrderedEnqueuer,
    StateMismatch,
    WorkerDied,
)
from enqueuer.datasets.arrays import ArraySource  # noqa: E402
from enqueuer.datasets.hdf5 import HDF5Source, pack  # noqa: E402

Pair = collections.namedtuple("Pair", "x y")
THREAD = {"backend": "thread", "random_seed": 7}


def contents(path):
    """Return all that is in a file, in a form that can be compared."""
    found = {}

    def note(name, item):
        if isinstance(item, h5py.Dataset):
            rows = [row.tolist() if hasattr(row, "tolist") else row for row in item[()]]
            found[name] = (str(item.dtype), item.shape, dict(item.attrs), rows)

    with h5py.File(path) as file:
        file.visititems(note)
        return dict(file.attrs), found


def packed(source, path, **options):
    pack(source, path, **{"shards": 4, **THREAD, **options})
    return contents(path)[1]


# --- the same for any workers ---


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("merge", [False, True])
def test_content_depends_on_seed_and_shards_alone(tmp_path, process, workers, merge):
    options = dict(shards=5, random_seed=7, ragged=["tail"], merge=merge)
    pack(packable, tmp_path / "a.h5", workers=3, backend="process", **options)
    pack(packable, tmp_path / "b.h5", workers=workers, **process, **options)
    assert contents(tmp_path / "a.h5") == contents(tmp_path / "b.h5")
    if merge:  # then also byte for byte
        assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def test_threads_write_the_same_but_for_global_random_numbers(tmp_path):
    found = packed(packable, tmp_path / "a.h5", ragged=["tail"], workers=3)
    same = packed(packable, tmp_path / "b.h5", ragged=["tail"], backend="process", workers=2)
    del found["global"], same["global"]
    assert found == same


def test_another_seed_gives_another_content(tmp_path):
    found = [
        packed(packable, tmp_path / f"{seed}.h5", random_seed=seed, ragged=["tail"])["x"]
        for seed in (7, 8)
    ]
    assert found[0] != found[1]


def test_merged_and_virtual_hold_the_same(tmp_path):
    virtual = packed(packable, tmp_path / "a.h5", ragged=["tail"], backend="process")
    merged = packed(
        packable, tmp_path / "b.h5", ragged=["tail"], backend="process", merge=True, chunk_rows=7
    )
    assert virtual == merged
    assert sorted(os.listdir(tmp_path)) == ["a.h5", "a.h5.parts", "b.h5"]


# --- what comes out is what went in ---


@pytest.mark.parametrize(
    "rows",
    [
        np.array([True, False]),
        np.array([1, 2], ">i4"),
        np.array([[1.5, 2.5]], "float16"),
        np.array([1j], "complex64"),
        np.array([b"ab", b"c"], "S5"),
        np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
        np.zeros((3, 2, 2, 2), "uint16"),
    ],
    ids=lambda rows: str(rows.dtype),
)
@pytest.mark.parametrize("merge", [False, True])
def test_dtype_and_shape_are_kept(tmp_path, rows, merge):
    pack([rows], tmp_path / "a.h5", merge=merge, compression="gzip", checksum=True)
    back = HDF5Source(tmp_path / "a.h5", keys="data")
    assert (back[:].dtype, back[:].shape) == (rows.dtype, rows.shape)
    assert np.array_equal(back[:], rows)


def test_strings_come_back_as_str(tmp_path):
    pack([{"name": ["ä", "", "c" * 300]}, {"name": np.array(["x"])}], tmp_path / "a.h5")
    with_names = HDF5Source(tmp_path / "a.h5", keys="name")
    assert list(with_names[:]) == ["ä", "", "c" * 300, "x"]
    assert with_names[0] == "ä"


def test_rows_of_any_length_come_back_as_arrays(tmp_path):
    rows = [np.arange(n, dtype="int16") for n in (3, 0, 1)]
    pack([{"a": rows}, {"a": rows[:1]}, {"a": rows[:1] * 2}], tmp_path / "a.h5", ragged=["a"])
    back = HDF5Source(tmp_path / "a.h5", keys="a")
    assert [row.tolist() for row in back[:]] == [[0, 1, 2], [], [0], *[[0, 1, 2]] * 3]
    assert back[0].dtype == "int16"


@pytest.mark.parametrize("lengths", [[0], [0, 0], [1], [3, 3], [2, 2, 2]])
def test_rows_that_could_be_of_any_length_may_be_alike(tmp_path, lengths):
    rows = [np.arange(length, dtype="uint8") for length in lengths]
    for merge in (False, True):
        path = tmp_path / f"{merge}.h5"
        pack([{"a": rows}], path, ragged=["a"], merge=merge)
        back = HDF5Source(path, keys="a")
        assert [row.tolist() for row in back[:]] == [row.tolist() for row in rows]


@pytest.mark.parametrize(
    ("source", "options", "names"),
    [
        ([np.zeros(2)], {}, ["data"]),
        ([np.zeros(2)], {"keys": ["x"]}, ["x"]),
        ([(np.zeros(2), np.ones(2))], {}, ["0", "1"]),
        ([(np.zeros(2), np.ones(2))], {"keys": ("x", "y")}, ["x", "y"]),
        ([(np.zeros(2),)], {"keys": ("data",)}, ["data"]),
        ([Pair(np.zeros(2), np.ones(2))], {}, ["x", "y"]),
        ([{"a": np.zeros(2), "b": np.ones(2)}], {"keys": ["b"]}, ["b"]),
        ([{"train/x": np.zeros(2)}], {}, ["train/x"]),
    ],
)
def test_keys_name_what_the_source_yields(tmp_path, source, options, names):
    assert sorted(packed(source, tmp_path / "a.h5", shards=1, **options)) == names


def test_samples_are_stacked(tmp_path):
    samples = [{"x": np.full(3, n), "y": n, "name": f"n{n}"} for n in range(10)]
    found = packed(samples, tmp_path / "a.h5", shards=1, batched=False, chunk_rows=4)
    assert found["x"][1] == (10, 3)
    assert found["y"][3] == list(range(10))
    assert found["name"][3] == [f"n{n}".encode() for n in range(10)]


@pytest.mark.parametrize("batched", [True, False])
def test_a_source_may_fill_the_same_array_again(tmp_path, batched):
    def batches():
        x, tail = np.zeros((2, 3)), np.zeros(2)
        for number in range(5):
            x[:], tail[:] = number, number
            yield {"x": x if batched else x[0], "tail": [tail, tail] if batched else tail}

    found = packed(batches, tmp_path / "a.h5", shards=1, batched=batched, ragged=["tail"])
    numbers = np.repeat(range(5), 2 if batched else 1)
    assert found["x"][3] == [[number] * 3 for number in numbers]
    assert found["tail"][3] == [[number] * 2 for number in numbers]


def test_a_long_text_makes_no_others_long(tmp_path):
    texts = ["a"] * 500 + ["b" * 1_000_000]
    tracemalloc.start()
    try:
        pack([{"text": texts}], tmp_path / "a.h5")
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()
    assert HDF5Source(tmp_path / "a.h5", "text")[:].tolist() == texts


def test_none_is_left_out_as_by_enqueuers(tmp_path):
    found = packed([None, {"x": [1]}, None, {"x": [2]}, None], tmp_path / "a.h5", shards=1)
    assert found["x"][3] == [1, 2]


@pytest.mark.parametrize("name", ["a b'\".h5", "\u65e5\n.h5", "100%.h5", "a%b.h5", "a%%b.h5"])
@pytest.mark.parametrize("key", ["x", "50% x", "%b/x"])
def test_names_may_be_odd(tmp_path, name, key):
    found = packed([{key: [1, 2]}], tmp_path / name, shards=1)
    assert found[key][3] == [1, 2]
    assert HDF5Source(tmp_path / name, key)[:].tolist() == [1, 2]


def test_a_path_need_not_be_utf8_but_the_name_that_is_written_down_must_be(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    assert packed([{"x": [1, 2]}], folder / "a.h5", shards=1)["x"][3] == [1, 2]
    assert HDF5Source(folder / "a.h5", "x")[:].tolist() == [1, 2]
    odd = tmp_path / os.fsdecode(b"\xff.h5")
    with pytest.raises(ValueError, match=r"which must be UTF-8, got .* merge=True"):
        pack([{"x": [1]}], odd)
    assert packed([{"x": [1, 2]}], odd, shards=1, merge=True)["x"][3] == [1, 2]


def test_chunks_are_along_the_first_axis(tmp_path):
    pack([np.zeros((5000, 100), "uint8")], tmp_path / "a.h5", merge=True)
    pack([np.zeros((5000, 100))], tmp_path / "b.h5", merge=True, chunk_rows=10)
    pack([np.zeros((4, 3 << 20), "uint8")], tmp_path / "c.h5", merge=True)
    chunks = []
    for name in "abc":
        with h5py.File(tmp_path / f"{name}.h5") as file:
            chunks.append(file["data"].chunks)
    assert chunks == [(1024, 100), (10, 100), (1, 3 << 20)]


@pytest.mark.parametrize("kind", ["list", "iterator", "generator", "function", "enqueuer", "tasks"])
def test_whatever_can_be_iterated_is_a_source(tmp_path, kind):
    batches = [np.arange(n, n + 3) for n in range(0, 12, 3)]
    source = {
        "list": batches,
        "iterator": iter(batches),
        "generator": (batch for batch in batches),
        "function": lambda: iter(batches),
        "enqueuer": GeneratorEnqueuer(lambda shard: iter(batches)),
        "tasks": OrderedEnqueuer(batches, workers=2),
    }[kind]
    found = packed(source, tmp_path / "a.h5", shards=None, backend="thread")
    assert found["data"][3] == list(range(12))


# --- what is refused ---


@pytest.mark.parametrize(
    ("item", "options", "error", "says"),
    [
        ({"x": {"y": [1]}}, {}, TypeError, "'x' is a dict"),
        ({"x": 3}, {}, ValueError, "'x' is a single int .*batched=False"),
        ({"x": np.zeros((2, 0))}, {}, ValueError, r"rows of 'x' are empty, their shape is \(0,\)"),
        ({"x": [1]}, {"shards": 2}, ValueError, "only a generator function of a shard"),
        ({"x": ["a", 1]}, {}, TypeError, r"'x' holds Python objects \(int\)"),
        ({"x": [None]}, {}, TypeError, r"'x' holds Python objects \(NoneType\)"),
        ({"x": np.ma.array([1, 2], mask=[0, 1])}, {}, TypeError, "'x' is masked, .*filled"),
        ({1: [1], "1": [2]}, {}, ValueError, r"keys that are alike as texts: \[1, '1'\]"),
        ({"x": [[], [1]]}, {"ragged": ["x"]}, TypeError, "'x' differ in dtype; .* empty list"),
        ({"x": [b"ab"]}, {}, TypeError, r"\(bytes\); .*ragged=\['x'\] .*frombuffer"),
        ({"x": np.zeros(1, "M8[s]")}, {}, ValueError, "'x' cannot be stored in HDF5: .*M8"),
        (
            {"x": [np.zeros(1), np.zeros(2)]},
            {},
            TypeError,
            r"the rows differ in shape, .*ragged=\['x'\]",
        ),
        ({"x": [np.zeros((1, 1))]}, {"ragged": ["x"]}, TypeError, "'x' is ragged, so .* 1-D"),
        ({"x": ["a\0b"]}, {}, ValueError, "'x' cannot be stored"),
        ({"x": [1], "y": [1, 2]}, {}, ValueError, "different numbers of rows"),
        ({"x": [1]}, {"keys": ["y"]}, ValueError, r"yields no \['y'\]"),
        (([1], [2]), {"keys": ["y"]}, ValueError, "do not name the 2 arrays"),
        ([1], {"keys": ["x", "y"]}, ValueError, "do not name the 1 arrays"),
        ({"x": [1]}, {"ragged": ["z"]}, ValueError, r"ragged names \['z'\]"),
        ({"x": [1]}, {"compression": "zip"}, ValueError, "'x' cannot be stored in HDF5: .*zip"),
        ({"x": [1]}, {"keys": "x"}, TypeError, "keys must be names"),
        ({"x": []}, {}, ValueError, "yielded no rows"),
    ],
)
@pytest.mark.filterwarnings("ignore:Creating an ndarray from ragged")  # numpy 1.23, beside
def test_items_that_cannot_be_packed_are_refused(tmp_path, item, options, error, says):
    with pytest.raises(error, match=says):
        pack([item], tmp_path / "a.h5", **options)
    assert not (tmp_path / "a.h5").exists()


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (
            {"x": np.zeros(2, "f4")},
            "after 2 rows .*'x': float32 of shape .*before it was .'x': float64",
        ),
        ({"x": np.zeros((2, 1))}, r"yields .'x': float64 of shape \(1,\)"),
        ({"y": np.zeros(2)}, "the source yields .'y': "),
        ({"x": ["a"]}, "'x': text"),
    ],
)
def test_rows_of_a_key_must_be_alike(tmp_path, second, says):
    with pytest.raises(ValueError, match=says):
        pack([{"x": np.zeros(2)}, second], tmp_path / "a.h5")
    assert os.listdir(tmp_path) == []


def test_shards_must_be_alike(tmp_path):
    with pytest.raises(ValueError, match=r"not alike: .*shard-00001.h5: 'data' is float32"):
        packed(lambda shard: [np.zeros(2, "i8" if shard.index == 0 else "f4")], tmp_path / "a.h5")


def test_a_shard_without_rows_is_none(tmp_path):
    def third(shard):
        if shard.index == 2:
            yield np.arange(4)

    assert packed(third, tmp_path / "a.h5")["data"][3] == [0, 1, 2, 3]


def test_a_file_that_is_there_is_not_replaced(tmp_path):
    (tmp_path / "a.h5").write_text("precious")
    with pytest.raises(FileExistsError, match=r"a\.h5 is there already"):
        pack([np.zeros(2)], tmp_path / "a.h5")
    with pytest.raises(DataFileError, match="there is no folder"):
        pack([np.zeros(2)], tmp_path / "b" / "a.h5")
    assert os.listdir(tmp_path) == ["a.h5"]


# --- interruptions ---


@pytest.fixture
def precious(tmp_path):
    """A file that another user wants to have overwritten, by a link to it."""
    path = tmp_path / "precious"
    path.write_text("mine")
    yield path
    assert path.read_text() == "mine"


def three(shard):
    yield np.zeros(3)


def test_a_link_in_the_folder_of_the_parts_is_not_followed(tmp_path, precious):
    folder = tmp_path / "a.h5.parts"
    folder.mkdir()
    (folder / "pack.json").symlink_to(precious)
    before = precious.stat().st_mtime_ns
    with pytest.raises(OSError, match="symbolic link, perhaps of another user"):
        pack(three, tmp_path / "a.h5", shards=2, backend="thread")
    assert precious.stat().st_mtime_ns == before


def test_a_link_in_the_place_of_a_draft_is_replaced(tmp_path, precious):
    folder = tmp_path / "a.h5.parts"
    folder.mkdir()

    def batches(shard):
        (folder / f"a.h5.{os.getpid()}.tmp").symlink_to(precious)
        yield np.zeros(3)

    assert pack(batches, tmp_path / "a.h5", shards=1, backend="thread") == 3


def test_the_folder_of_the_parts_may_not_be_a_link(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / "thesis.tmp").touch()
    (tmp_path / "a.h5.parts").symlink_to(work)
    with pytest.raises(DataFileError, match="it is no folder of yours"):
        pack(three, tmp_path / "a.h5", shards=2, backend="thread")
    assert [path.name for path in work.iterdir()] == ["thesis.tmp"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_folder_of_the_parts_may_not_be_another_users(tmp_path):
    folder = tmp_path / "a.h5.parts"
    folder.mkdir()
    os.chown(folder, 12345, -1)
    with pytest.raises(DataFileError, match="it is no folder of yours"):
        pack(three, tmp_path / "a.h5", shards=2, backend="thread")
    # Its owner may exchange the folder anyway.
    os.chown(tmp_path, 12345, -1)
    assert pack(three, tmp_path / "a.h5", shards=2, backend="thread") == 6


def test_errors_of_the_source_arrive_and_what_was_finished_is_kept(tmp_path, backend):
    ran = tmp_path / "ran"
    ran.mkdir()
    path = tmp_path / "a.h5"
    source = Once(ran, fails_in=2)
    with pytest.raises(KeyError, match="no such file"):
        pack(source, path, shards=4, **backend)
    assert not path.exists()
    whole = {p.name for p in Path(f"{path}.parts").glob("shard*.h5")}
    assert {"shard-00000.h5", "shard-00001.h5"} <= whole
    assert "shard-00002.h5" not in whole
    assert list(Path(f"{path}.parts").glob("*.tmp")) == []
    for name in os.listdir(ran):
        (ran / name).unlink()
    (ran / "fixed").touch()
    assert pack(source, path, shards=4, **backend) == 20
    again = {name.split(".")[0] for name in os.listdir(ran)} - {"fixed"}
    assert again == {"0", "1", "2", "3"} - {str(int(name[6:11])) for name in whole}
    assert contents(path)[1]["data"][3] == [10 * s + n for s in range(4) for n in range(5)]


def test_a_run_that_goes_on_keeps_the_seed(tmp_path):
    ran = tmp_path / "ran"
    ran.mkdir()
    source = Once(ran, fails_in=3)
    with pytest.raises(KeyError):
        pack(source, tmp_path / "a.h5", shards=4, backend="thread")
    drawn = json.loads((tmp_path / "a.h5.parts" / "pack.json").read_text())["random_seed"]
    (ran / "fixed").touch()
    pack(source, tmp_path / "a.h5", shards=4, backend="thread")
    assert contents(tmp_path / "a.h5")[0]["enqueuer.random_seed"] == str(drawn)


@pytest.mark.parametrize(
    "other", [{"random_seed": 8}, {"shards": 5}, {"chunk_rows": 3}, {"batched": False}]
)
def test_another_run_does_not_go_on(tmp_path, other):
    ran = tmp_path / "ran"
    ran.mkdir()
    with pytest.raises(KeyError):
        packed(Once(ran, fails_in=3), tmp_path / "a.h5")
    with pytest.raises(StateMismatch, match=next(iter(other))):
        packed(Once(ran, fails_in=None), tmp_path / "a.h5", **other)


def test_what_a_finished_run_left_is_not_taken_for_a_new_one(tmp_path):
    pack([np.zeros(2)], tmp_path / "a.h5", random_seed=7)
    (tmp_path / "a.h5").unlink()
    with pytest.raises(StateMismatch, match=r"a\.h5\.parts is of a run that was finished"):
        pack([np.ones(2)], tmp_path / "a.h5", random_seed=7)


def test_shards_of_an_unknown_run_are_not_used(tmp_path):
    pack([np.zeros(2)], tmp_path / "a.h5")
    (tmp_path / "a.h5").unlink()
    (tmp_path / "a.h5.parts" / "pack.json").write_text("{")
    with pytest.raises(StateMismatch, match="is of a run that was finished"):
        pack([np.ones(2)], tmp_path / "a.h5")


def test_only_what_packing_made_is_removed(tmp_path):
    mine = tmp_path / "a.h5.parts" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("precious")
    pack([np.zeros(2)], tmp_path / "a.h5", merge=True)
    with pytest.raises(ValueError, match="no rows"):
        pack([], tmp_path / "b.h5")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a.h5", "a.h5.parts", "notes.txt"]


def test_another_process_may_not_pack_to_the_same_path(tmp_path):
    reached, gate = multiprocessing.Pipe(), multiprocessing.Pipe()

    def waits():
        yield np.zeros(2)
        reached[0].send(1)
        gate[1].recv()

    child = multiprocessing.get_context("fork").Process(
        target=lambda: pack(waits, tmp_path / "a.h5", backend="thread")
    )
    child.start()
    assert reached[1].poll(LIMIT)
    with pytest.raises(InvalidState, match="another process is packing"):
        pack([np.zeros(2)], tmp_path / "a.h5")
    with pytest.raises(DataFileError, match=r"a\.h5: not there yet, but a\.h5\.parts is"):
        HDF5Source(tmp_path / "a.h5")
    gate[0].send(1)
    child.join(LIMIT)
    assert HDF5Source(tmp_path / "a.h5")[:]["data"].tolist() == [0, 0]
    for end in (*reached, *gate):
        end.close()
    child.close()


class Numbers:
    """A source with a number of its own, which is interrupted once."""

    def __init__(self, number, fails, extra=None):
        self.number, self.extra = number, extra
        self._fails = np.array(fails, object)  # which is not compared

    def __call__(self, shard):
        yield [self.number]
        if shard.index == 1 and self._fails:
            raise ValueError("interrupted")

    def method(self, shard):
        yield from self(shard)


def _partial(number, fails, extra=None):
    return functools.partial(_numbers, number=number, extra=extra, fails=np.array(fails, object))


def _numbers(shard, number, extra, fails):
    yield from Numbers(number, fails)(shard)


def _closure(number, fails, extra=None):
    source = Numbers(0, fails)

    def batches(shard):
        _ = source.number, extra
        for _ in source(shard):
            yield [number]

    return batches


@pytest.mark.parametrize(
    "make",
    [Numbers, lambda *a: Numbers(*a).method, _partial, _closure],
    ids=["object", "method", "partial", "closure"],
)
def test_bound_values_distinguish_sources(tmp_path, make):
    paths = [Path("a"), {"b": np.arange(3)}, len]
    with pytest.raises(ValueError, match="interrupted"):
        packed(make(1, True, paths), tmp_path / "a.h5")
    with pytest.raises(StateMismatch, match=r"by a run with another bound number;"):
        packed(make(2, False, paths), tmp_path / "a.h5")
    with pytest.raises(StateMismatch, match=r"by a run with another bound extra;"):
        packed(make(1, False, [*paths[:1], {"b": np.arange(4)}, len]), tmp_path / "a.h5")
    with pytest.raises(StateMismatch, match=r"by a run with another bound extra;"):
        packed(make(1, False, [*paths[:2], max]), tmp_path / "a.h5")
    found = packed(make(1, False, [Path("a"), {"b": np.arange(3)}, len]), tmp_path / "a.h5")
    assert found["data"][3] == [1] * 4


class FailsOnce:
    """A mixin for sources of batches: the second shard is interrupted once."""

    fails = True  # of the class: attributes of the source are compared

    def __call__(self, shard, first_item=0):
        if shard.index == 1 and type(self).fails:
            type(self).fails = False
            raise ValueError("interrupted")
        return super().__call__(shard, first_item)


@pytest.fixture
def pair(tmp_path):
    """Return the path of a file with two datasets of the same type."""
    with h5py.File(tmp_path / "pair.h5", "w") as file:
        file["x"], file["y"] = np.arange(16), -np.arange(16)
    return tmp_path / "pair.h5"


@pytest.mark.parametrize(
    "other", [{"keys": ("y", "x")}, {"rows": slice(8, None)}, {"shuffle": True}], ids=str
)
def test_a_run_over_other_rows_of_a_file_is_not_resumed(tmp_path, pair, other):
    class Source(FailsOnce, HDF5Source):
        pass

    asked = {"keys": ("x", "y"), "rows": slice(0, 8), "batch_size": 2}
    with pytest.raises(ValueError, match="interrupted"):
        packed(Source(pair, **asked), tmp_path / "a.h5")
    with pytest.raises(StateMismatch, match="by a run with another source, "):
        packed(Source(pair, **{**asked, **other}), tmp_path / "a.h5")
    found = packed(Source(pair, **asked), tmp_path / "a.h5")
    assert (found["0"][3], found["1"][3]) == ([*range(8)], [-number for number in range(8)])


@pytest.mark.parametrize(
    ("kind", "data"), [(ArraySource, {"x": np.arange(16)}), (HDF5Source, "pair.h5")]
)
def test_a_source_of_this_package_is_resumed(tmp_path, monkeypatch, pair, kind, data):
    class Source(FailsOnce, kind):
        pass

    monkeypatch.chdir(tmp_path)
    # The same object, which has been used.
    source = Source(data, batch_size=2, shuffle=True)
    with pytest.raises(ValueError, match="interrupted"):
        pack(source, "a.h5", shards=4, **THREAD)
    assert source[0]["x"] == 0
    assert pack(source, "a.h5", shards=4, **THREAD) == 16


def test_values_that_are_bound_are_not_written_down(tmp_path):
    source = functools.partial(_numbers, number=123454321, extra="secret", fails=True)
    with pytest.raises(ValueError, match="interrupted"):
        packed(source, tmp_path / "a")
    written = (tmp_path / "a.parts" / "pack.json").read_text()
    assert "bound extra" in written
    assert "secret" not in written
    assert "123454321" not in written


def test_another_list_does_not_go_on_with_what_the_first_one_left(tmp_path):
    def batches(rows, meanwhile):
        yield rows
        meanwhile()

    with pytest.raises(FileExistsError):  # so that the part is written, and the whole is not
        pack(batches([1, 2], (tmp_path / "a.h5").touch), tmp_path / "a.h5")
    (tmp_path / "a.h5").unlink()
    assert (tmp_path / "a.h5.parts" / "shard-00000.h5").exists()
    pack(batches([3, 4, 5], int), tmp_path / "a.h5")
    assert HDF5Source(tmp_path / "a.h5", "data")[:].tolist() == [3, 4, 5]


def test_a_version_is_compared_instead_of_what_is_bound(tmp_path):
    with pytest.raises(ValueError, match="interrupted"):
        packed(Numbers(1, True), tmp_path / "a.h5", version="1")
    with pytest.raises(StateMismatch, match="by a run with another version;"):
        packed(Numbers(1, False), tmp_path / "a.h5", version="2")
    found = packed(Numbers(2, False), tmp_path / "a.h5", version="1")["data"][3]
    assert found[:2] == [1, 2]  # the first shard was there, the second was not


def test_a_path_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "a.h5.parts").write_text("precious")
    with pytest.raises(DataFileError, match=r"a\.h5\.parts cannot be written: "):
        pack([[1]], tmp_path / "a.h5")


def test_another_thread_may_not_pack_to_the_same_path(tmp_path):
    def batches():
        yield [1]
        with pytest.raises(InvalidState, match=r"another thread is packing to .*a\.h5"):
            pack([[2]], tmp_path / "a.h5")

    assert packed(batches, tmp_path / "a.h5", shards=1)["data"][3] == [1]


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path):
    def batches():
        yield [1]
        (tmp_path / "a.h5").write_text("precious")

    with pytest.raises(FileExistsError, match="is there already"):
        pack(batches, tmp_path / "a.h5")
    assert (tmp_path / "a.h5").read_text() == "precious"
    (tmp_path / "a.h5").unlink()
    assert packed(batches, tmp_path / "a.h5", shards=1, random_seed=None)["data"][3] == [1]


def test_a_worker_that_is_killed_is_named_or_replaced(tmp_path, process):
    with pytest.raises(WorkerDied, match="SIGKILL"):
        pack(DiesOnce(tmp_path), tmp_path / "a.h5", shards=4, **process)
    (tmp_path / "died").unlink()
    pack(DiesOnce(tmp_path), tmp_path / "a.h5", shards=4, max_restarts=1, **process)
    assert list(tmp_path.rglob("*.tmp")) == []
    found = contents(tmp_path / "a.h5")[1]["data"][3]
    assert found == [n for n in range(4) for _ in range(5)]


def test_threads_end_when_one_of_them_fails(tmp_path):
    """A thread cannot be killed; it looks after each batch whether it should go on."""
    other_began = threading.Event()

    def source(shard):
        if shard.index == 0:
            assert other_began.wait(LIMIT)
            raise KeyError("no such file")
        while True:
            yield np.zeros(2)
            other_began.set()

    with pytest.raises(KeyError):
        pack(source, tmp_path / "a.h5", shards=2, workers=2, backend="thread")
    assert os.listdir(tmp_path) == []


PROGRAM = """
import sys
from enqueuer.datasets.hdf5 import pack
from helpers import announced
pack(announced, sys.argv[1], shards=12, workers=2, random_seed=7, ragged=["tail"],
     merge=sys.argv[2] == "merge")
"""


@pytest.mark.parametrize("merge", ["merge", "virtual"])
def test_killed_at_any_moment_it_goes_on_to_the_same_content(tmp_path, merge):
    """Kill -9 of the packing process, whose workers then end by themselves."""
    chance = random.Random(7)
    assert end(run(tmp_path / "whole.h5", merge)) == 0
    expected = contents(tmp_path / "whole.h5")
    path = tmp_path / "a.h5"
    kills = 0
    for _ in range(int(os.environ.get("ENQUEUER_ROUNDS", 1))):
        for _ in range(3):
            process = run(path, merge)
            process.stdout.read(chance.randint(0, 12))  # batches, of 20
            process.send_signal(signal.SIGKILL)
            kills += end(process) == -signal.SIGKILL
            if path.exists():
                break
        else:
            assert end(run(path, merge)) == 0
        assert contents(path) == expected
        assert list(tmp_path.rglob("*.tmp")) == []
        shutil.rmtree(tmp_path / "a.h5.parts", ignore_errors=True)
        path.unlink()
    assert kills


def run(path, merge):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, path, merge],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )


def end(process):
    """Wait for the end of a process and of its workers, which write to the same pipe."""
    process.stdout.read()
    process.stdout.close()
    return process.wait(LIMIT)
