"""FileBatches: each file exactly once an epoch, whatever happens to the others."""

import functools
import itertools
import json
import pickle
import re
import textwrap
from pathlib import Path

import helpers
import numpy as np
import pytest
from helpers import needs_installed
from hypothesis import given
from hypothesis import strategies as st

from enqueuer import (
    FrameworkUnavailable,
    GeneratorEnqueuer,
    OrderedEnqueuer,
    OverwrittenDataWarning,
    Shard,
    StateMismatch,
)
from enqueuer.datasets.files import FileBatches, load_array, load_image, read_list

SEED = 7


def epoch_of(batches, shards=1, epoch=0, own=None, seed=SEED):
    """Return the batches of an epoch in the enqueuers' order, made here; without those of None."""
    shares = [iter(batches(Shard(i, shards, epoch, seed))) for i in own or range(shards)]
    turns = itertools.zip_longest(*shares, fillvalue=None)
    return [batch for turn in turns for batch in turn if batch is not None]


def numbers(count):
    return [str(number) for number in range(count)]


def joined(batches):
    return [int(number) for batch in batches for number in batch]


def lists(batches):
    return [np.asarray(batch).tolist() for batch in batches]


def noisy(path, task):
    """Return the number in a file's name, and a random one of its own."""
    return np.array([float(path), task.rng.random()])


@pytest.fixture
def folder(tmp_path):
    """Make ten files of an array each, full of its number; return their paths."""
    paths = [tmp_path / f"{number}.npy" for number in range(10)]
    for number, path in enumerate(paths):
        np.save(path, np.full((2, 3), number, np.float32))
    return paths


# --- the shares ----------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 9), st.integers(0, 3), st.booleans())
def test_batches_and_their_order_do_not_depend_on_the_shards(count, size, shards, epoch, shuffle):
    batches = FileBatches(numbers(count), int, size, shuffle=shuffle)
    whole = lists(epoch_of(batches, 1, epoch))
    assert lists(epoch_of(batches, shards, epoch)) == whole
    assert sorted(joined(whole)) == list(range(count))
    assert [len(batch) for batch in whole[:-1]] == [size] * (len(whole) - 1)
    if not shuffle:
        assert joined(whole) == list(range(count))


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 4), st.integers(1, 3))
def test_the_ranks_together_have_each_file_once(count, size, per_rank, world_size):
    batches, shards = FileBatches(numbers(count), int, size), per_rank * world_size
    whole = lists(epoch_of(batches))
    for rank in range(world_size):
        own = range(rank, shards, world_size)
        assert lists(epoch_of(batches, shards, own=own)) == whole[rank::world_size]


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 9))
def test_drop_last_makes_all_shards_equally_long(count, size, shards):
    whole = lists(epoch_of(FileBatches(numbers(count), int, size)))
    if count < size:
        with pytest.raises(ValueError, match="do not fill a batch"):
            FileBatches(numbers(count), int, size, drop_last=True)
        return
    batches = FileBatches(numbers(count), int, size, drop_last=True)
    kept = count // size // shards * shards
    if kept == 0:
        with pytest.raises(ValueError, match=r"cannot be divided evenly over . shards"):
            epoch_of(batches, shards)
        return
    assert lists(epoch_of(batches, shards)) == whole[:kept]
    assert {len(list(batches(Shard(i, shards, 0, SEED)))) for i in range(shards)} == {
        kept // shards
    }


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    batches = FileBatches(numbers(40), int, 8)
    orders = [joined(epoch_of(batches, 2, epoch, seed=s)) for epoch in (0, 1) for s in (7, 8)]
    assert len(set(map(tuple, orders))) == 4
    assert joined(epoch_of(batches, 2)) == orders[0]


def test_they_are_the_batches_of_an_ordered_enqueuer():
    options = dict(batch_size=4, shuffle=True)
    with OrderedEnqueuer(numbers(10), noisy, random_seed=SEED, **options) as enqueuer:
        expected = [lists(enqueuer), lists(enqueuer)]
    batches = FileBatches(numbers(10), noisy, **options)
    assert [lists(epoch_of(batches, 3, epoch)) for epoch in (0, 1)] == expected


@pytest.mark.parametrize(("workers", "shards"), [(1, 1), (2, 2), (2, 5)])
def test_enqueuers_give_the_same(backend, workers, shards):
    batches = FileBatches(numbers(10), noisy, 3, with_names=True)
    with GeneratorEnqueuer(
        batches, workers=workers, shards=shards, random_seed=SEED, **backend
    ) as enqueuer:
        for epoch in range(2):
            made, expected = list(enqueuer), epoch_of(batches, 1, epoch)
            assert lists(batch for batch, _ in made) == lists(batch for batch, _ in expected)
            assert [names for _, names in made] == [names for _, names in expected]


def test_a_file_has_random_numbers_of_its_own_in_each_epoch():
    batches = FileBatches(numbers(6), noisy, 2)
    first, again, second = (
        {row[0]: row[1] for batch in epoch_of(batches, shards, epoch) for row in batch}
        for shards, epoch in ((1, 0), (3, 0), (1, 1))
    )
    assert first == again
    assert all(first[name] != second[name] for name in first)


def test_the_order_is_left_at_home_when_it_is_pickled():
    batches = FileBatches(numbers(1000), int, 10)
    before = len(pickle.dumps(batches))
    list(batches(Shard(0, 1, 0, SEED)))
    assert len(pickle.dumps(batches)) == before
    assert lists(epoch_of(pickle.loads(pickle.dumps(batches)))) == lists(epoch_of(batches))


# --- what a batch is -----------------------------------------------------------------------------


def test_names_and_labels_come_on_request(tmp_path):
    files = [("0", 5), (tmp_path / "1", 6)]
    load, shard = (lambda path: len(str(path)) > 1), Shard(0, 1, 0, SEED)
    make = functools.partial(FileBatches, files, load, 2, shuffle=False)
    assert next(make()(shard)).tolist() == [False, True]
    _, labels, names = next(make(with_labels=True, with_names=True)(shard))
    assert labels.dtype == np.int64
    assert (labels.tolist(), names) == ([5, 6], ["0", str(tmp_path / "1")])
    assert next(make(with_names=True)(shard))[1] == names
    assert next(make(with_labels=True)(shard))[1].tolist() == [5, 6]


def with_label(path, label):
    return {"x": int(path), "y": label}


def with_label_and_task(path, label, task):
    return {"x": int(path), "y": label, "index": task.index}


@pytest.mark.parametrize("load", [with_label, with_label_and_task])
def test_load_gets_the_label_by_its_name(load):
    batches = FileBatches([("10", 5), ("11", 6)], load, 2, shuffle=False)
    batch = next(batches(Shard(0, 1, 0, 7)))
    assert {name: values.tolist() for name, values in batch.items()} == {
        "x": [10, 11],
        "y": [5, 6],
        **({"index": [0, 1]} if load is with_label_and_task else {}),
    }
    bound = functools.partial(load, label=9)
    if load is with_label:
        batch = next(FileBatches(["10"], bound, 1)(Shard(0, 1, 0, 7)))
        assert batch["y"].tolist() == [9]


def test_labels_that_are_no_numbers_stay_a_list():
    batches = FileBatches([("0", "cat"), ("1", "dog")], int, 2, shuffle=False, with_labels=True)
    assert next(batches(Shard(0, 1, 0, SEED)))[1] == ["cat", "dog"]


def test_samples_may_be_nested():
    def load(path):
        return {"x": np.full(2, int(path)), "rest": (int(path), path)}

    (batch,) = epoch_of(FileBatches(numbers(2), load, 2, shuffle=False))
    assert batch["x"].tolist() == [[0, 0], [1, 1]]
    assert batch["rest"][0].tolist() == [0, 1]
    assert batch["rest"][1] == ["0", "1"]


def test_mixed_types_are_promoted_as_numpy_does():
    def load(path):
        return np.zeros(2, np.float32 if path == "0" else np.int32)

    (batch,) = epoch_of(FileBatches(numbers(2), load, 2))
    assert batch.dtype == np.float64


def test_arrays_are_stacked_into_memory_that_needs_no_copy(monkeypatch):
    made = []

    def maker(shape, dtype):
        made.append(np.empty(shape, dtype))
        return made[-1]

    monkeypatch.setattr("enqueuer.workers.arrays.allocate", maker)
    (batch,) = epoch_of(FileBatches(numbers(3), lambda path: np.full(9999, int(path)), 3))
    assert batch is made[0]
    assert sorted(batch[:, 0].tolist()) == [0, 1, 2]


def test_collate_may_be_ones_own():
    assert epoch_of(FileBatches(numbers(3), int, 2, shuffle=False, collate=sum)) == [1, 2]


def test_unequal_shapes_name_two_files():
    def load(path):
        return {"x": np.zeros((2, 3 if path == "1" else 2))}

    with pytest.raises(ValueError, match=r"'0' and '1' cannot be.*\(\(2, 2\), \(2, 3\)\)"):
        epoch_of(FileBatches(numbers(3), load, 3, shuffle=False, on_error="skip"))


def test_an_error_of_collate_names_the_batch():
    def collate(samples):
        raise KeyError("no")

    with pytest.raises(KeyError) as caught:
        epoch_of(FileBatches(numbers(3), int, 3, shuffle=False, collate=collate))
    assert caught.value.__notes__ == ["while joining '0' to '2', 3 files"]


def test_none_leaves_a_file_out():
    batches = FileBatches(numbers(4), lambda path: int(path) % 2 or None, 2, with_names=True)
    assert sorted(name for _, names in epoch_of(batches) for name in names) == ["1", "3"]


# --- files that cannot be loaded -----------------------------------------------------------------


def spoil(paths):
    paths[3].write_bytes(b"")
    paths[7].unlink()


def test_an_error_is_raised_as_itself_with_the_path(folder, backend):
    paths = folder[7:]
    paths[1].unlink()
    with GeneratorEnqueuer(FileBatches(paths, load_array, 2, shuffle=False), **backend) as enqueuer:
        with pytest.raises(FileNotFoundError) as caught:
            list(enqueuer)
    assert f"while loading {str(paths[1])!r}" in caught.value.__notes__


def test_bad_files_are_skipped_counted_and_logged_once(folder, backend, caplog):
    batches = FileBatches(folder, load_array, 3, with_names=True, on_error="skip")
    with GeneratorEnqueuer(batches, workers=2, shards=3, random_seed=SEED, **backend) as enqueuer:
        before = list(enqueuer)
        spoil(folder)
        bad = {str(folder[3]), str(folder[7])}
        for epoch in range(1, 4):
            expected = FileBatches(folder, str, 3)  # loads nothing
            wanted = [[n for n in b if n not in bad] for b in epoch_of(expected, 1, epoch)]
            made = list(enqueuer)
            assert [names for _, names in made] == [names for names in wanted if names]
            for batch, names in made:
                assert [f"{int(x)}.npy" for x in batch[:, 0, 0]] == [n[-5:] for n in names]
            assert enqueuer.error_count == 2 * epoch
    assert len(before) == 4
    logged = [record for record in caplog.records if record.name == "enqueuer"]
    assert len(logged) == 2
    for path in bad:
        (record,) = [r for r in logged if f"while loading {path!r}" in r.getMessage()]
        assert "load_array" in record.exc_text


def test_max_errors_bounds_them(folder, backend):
    spoil(folder)
    batches = FileBatches(folder, load_array, 3, shuffle=False, on_error="skip")
    with GeneratorEnqueuer(batches, max_errors=1, **backend) as enqueuer:
        with pytest.raises(FileNotFoundError) as caught:
            list(enqueuer)
    assert "max_errors=1" in caught.value.__notes__[-1]


def test_a_function_may_give_a_sample_in_its_place(folder, backend, caplog):
    spoil(folder)

    def instead(error):
        return np.zeros((2, 3)) if isinstance(error, EOFError) else None

    batches = FileBatches(folder, load_array, 10, shuffle=False, on_error=instead)
    with GeneratorEnqueuer(batches, **backend) as enqueuer:
        (batch,) = enqueuer
        assert enqueuer.error_count == 2
    assert batch[:, 0, 0].tolist() == [0, 1, 2, 0, 4, 5, 6, 8, 9]
    assert not caplog.records


def test_a_batch_of_nothing_but_bad_files_is_left_out(folder, backend, caplog):
    for path in folder[2:4]:
        path.unlink()
    batches = FileBatches(folder, load_array, 2, shuffle=False, on_error="skip")
    assert list(batches(Shard(0, 1, 0, SEED)))[1] is None
    with GeneratorEnqueuer(batches, **backend) as enqueuer:
        made = [int(batch[0, 0, 0]) for batch in enqueuer]
        assert (made, enqueuer.error_count) == ([0, 4, 6, 8], 2)


def test_stop_iteration_is_no_end(folder):
    def load(path):
        raise StopIteration

    batches = FileBatches(folder, load, 2)
    with GeneratorEnqueuer(batches) as enqueuer:
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            list(enqueuer)
    assert epoch_of(FileBatches(folder, load, 2, on_error="skip")) == []


def test_a_missing_package_is_no_fault_of_a_file():
    def load(path):
        raise FrameworkUnavailable("pip install it")

    with pytest.raises(FrameworkUnavailable):
        epoch_of(FileBatches(numbers(3), load, 2, on_error="skip"))


# --- positions -----------------------------------------------------------------------------------


class Counted:
    """A load function that writes down what it loads."""

    def __init__(self, log):
        self.log = log

    def __call__(self, path):
        with open(self.log, "a") as file:
            file.write(f"{path}\n")
        return int(path)


def test_it_is_resumed_anywhere_and_loads_nothing_twice(backend, tmp_path):
    log = tmp_path / "log"
    batches = FileBatches(numbers(22), Counted(log), 3)
    options = dict(shards=3, random_seed=SEED, **backend)
    whole = lists(epoch_of(batches))
    for had in range(len(whole)):
        with GeneratorEnqueuer(batches, workers=2, **options) as enqueuer:
            batches_of_it = iter(enqueuer)
            assert lists(next(batches_of_it) for _ in range(had)) == whole[:had]
            state = json.loads(json.dumps(enqueuer.state_dict()))
        log.write_text("")
        later = GeneratorEnqueuer(batches, workers=1, **options)
        later.load_state_dict(state)
        with later:
            assert lists(later) == whole[had:]
        assert sorted(map(int, log.read_text().split())) == sorted(joined(whole[had:]))


def test_a_state_of_other_files_is_refused():
    def share_of(count=10, size=2, **options):
        return FileBatches(numbers(count), int, size, **options)(Shard(0, 1, 0, SEED))

    others = {
        "files=9": share_of(count=9),
        "batch_size=5": share_of(size=5),
        "shuffle=False": share_of(shuffle=False),
    }
    for said, other in others.items():
        next(other)
        with pytest.raises(StateMismatch, match=said):
            share_of().load_state_dict(other.state_dict())


class Deadly:
    """A load function that kills its worker at one file, once, and cannot load another."""

    def __init__(self, path):
        self.path = path

    def __call__(self, name):
        if name == "8":
            raise OSError("a bad one")
        if name == "5" and not self.path.exists():
            self.path.touch()
            helpers.kill_self()
        return int(name)


def test_a_killed_worker_costs_no_file(process, tmp_path, caplog):
    batches = FileBatches(numbers(20), Deadly(tmp_path / "died"), 2, on_error="skip")
    with GeneratorEnqueuer(
        batches, workers=2, random_seed=SEED, max_restarts=1, **process
    ) as enqueuer:
        made = lists(enqueuer)
        assert enqueuer.restart_count == 1
        assert enqueuer.error_count == 1
    assert sorted(joined(made)) == sorted({*range(20)} - {8})
    assert caplog.text.count("a bad one")


# --- at the door ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        (TypeError, dict(files="a.png"), "must be a list of paths"),
        (TypeError, dict(files={"a", "b"}), "must have an order, got a set"),
        (TypeError, dict(files=["a", 3]), "a path, or a path and its label, got 3"),
        (TypeError, dict(files=[("a", 1, 2)]), "a path, or a path and its label"),
        (ValueError, dict(files=[]), "there are no files"),
        (ValueError, dict(files=[("a", 1), "b"], with_labels=True), "'b' has no label"),
        (ValueError, dict(files=["b"], load=lambda path, label: 1), "takes a label, but 'b' has"),
        (TypeError, dict(load=lambda path, label, more: 1), "and if it needs them the label and"),
        (TypeError, dict(load=None), "load must be a function"),
        (TypeError, dict(load=lambda a, b, c: 1), "load must take the path, or"),
        (ValueError, dict(batch_size=0), "batch_size must be >= 1"),
        (TypeError, dict(collate=3), "collate must be a function"),
        (ValueError, dict(on_error="ignore"), "on_error must be"),
    ],
)
def test_nonsense_is_refused_at_the_door(kind, change, said):
    arguments = dict(files=["a"], load=int, batch_size=1) | change
    with pytest.raises(kind, match=said):
        FileBatches(**arguments)


def test_its_repr_describes_it():
    assert repr(FileBatches(numbers(3), int, 2)) == "<FileBatches of 3 files, 2 a batch>"


# --- whole -------------------------------------------------------------------------------------


def test_a_list_of_images_becomes_batches(backend, tmp_path):
    needs_installed("PIL")
    from PIL import Image

    lines = []
    for number in range(7):
        name = f"image {number}.png"
        Image.fromarray(np.full((5, 4, 3), 30 * number, np.uint8)).save(tmp_path / name)
        lines.append(f'"{name}" {number}  # it is grey\n')
    (tmp_path / "train.txt").write_text("".join(lines))
    batches = FileBatches(
        read_list(tmp_path / "train.txt"),
        functools.partial(load_image, mode="BGR", size=(8, 6)),
        3,
        with_labels=True,
    )
    with GeneratorEnqueuer(batches, workers=2, shards=2, **backend) as enqueuer:
        for _ in range(2):
            seen = []
            for images, labels in enqueuer:
                assert images.shape == (len(labels), 8, 6, 3)
                assert (images == 30 * labels[:, None, None, None]).all()
                seen.extend(labels.tolist())
            assert sorted(seen) == list(range(7))


def test_what_the_page_begins_with_runs(tmp_path, monkeypatch, capsys):
    page = Path(__file__).parents[2] / "docs" / "howto" / "read_files.rst"
    block = page.read_text().split(".. code-block:: python\n\n", 1)[1]
    program = textwrap.dedent(block[: re.search(r"^\S", block, re.MULTILINE).start()])
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    whole, rest = "(64, 224, 224, 3) (64,)", "(36, 224, 224, 3) (36,)"
    assert capsys.readouterr().out.splitlines() == [whole, rest] * 2


def test_a_load_that_reuses_its_buffer_is_told_of():
    buffer = np.zeros(4)

    def load(path):
        buffer[:] = len(path)
        return buffer

    with pytest.warns(OverwrittenDataWarning, match="a result of load was changed"):
        epoch_of(FileBatches(["a", "bb", "ccc"], load, 3))
