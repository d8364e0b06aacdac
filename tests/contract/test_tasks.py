"""OrderedEnqueuer: each task once, in order, with its own numbers, by whichever worker is free."""

import asyncio
import collections
import random
import subprocess
import sys
import threading
import time
from collections import OrderedDict, UserDict, defaultdict
from functools import partial
from types import MappingProxyType, ModuleType

import numpy as np
import pytest
from helpers import (
    LIMIT,
    Gated,
    Reiterable,
    augmented,
    backend_of,
    kill_once,
    kill_self,
    packed,
    rest_of,
    start_method_of,
    taken,
    wait_until,
)

from enqueuer import (
    EmptyEpochWarning,
    InvalidState,
    ItemNotPicklable,
    OrderedEnqueuer,
    StateMismatch,
    WorkerDied,
    replay,
)
from enqueuer.enqueuers.enqueuer import core_of
from enqueuer.workers.arrays import stack

Pair = collections.namedtuple("Pair", "x y")


def double(x):
    return 2 * x


def drawing(x):
    """Draw from the globals, as old augmentation does; processes only."""
    return x, random.random(), float(np.random.rand())


def make(sequence=range(23), map=augmented, random_seed=7, **options):
    return OrderedEnqueuer(sequence, map, random_seed=random_seed, **options)


@pytest.fixture(scope="module")
def whole():
    with make(shuffle=True) as enqueuer:
        return [list(enqueuer) for _ in range(3)]


# --- order, and each once ---


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_the_order_of_the_elements(backend, workers):
    with make(map=double, workers=workers, **backend) as enqueuer:
        assert list(enqueuer) == list(enqueuer) == [2 * x for x in range(23)]


def test_the_results_are_the_same_for_any_workers_and_backend(backend, whole):
    with make(shuffle=True, workers=3, **backend) as enqueuer:
        assert [list(enqueuer) for _ in range(3)] == whole


def test_global_generators_are_seeded_for_each_element(process):
    def run(**options):
        with make(map=drawing, **options) as enqueuer:
            return list(enqueuer)

    drawn = run(workers=1, **process)
    assert run(workers=3, **process) == drawn
    assert len({numbers for _, *numbers in map(tuple, drawn) for numbers in [tuple(numbers)]}) == 23


def test_as_they_come_a_slow_one_stops_no_others(options, tmp_path):
    class SlowFirst(Gated):
        def __call__(self, x):
            return self.item(0, x)[1]

    work = SlowFirst(tmp_path, stops=[(0, 0)])
    options = dict(workers=2, max_queue_size=2, ordered=False, **options)
    with OrderedEnqueuer(range(60), work, **options) as enqueuer:
        batches = iter(enqueuer)
        assert sorted(next(batches) for _ in range(59)) == list(range(1, 60))
        work.let_on()
        assert list(batches) == [0]


@pytest.mark.ahead
def test_a_slow_task_delays_only_itself_until_the_bound(backend, tmp_path):
    slow, folder = Gated(tmp_path, stops=[(0, 0)]), tmp_path / "done"
    folder.mkdir()

    def work(x):
        slow.item(0, x)
        (folder / str(x)).touch()
        return x

    def done():
        return len(list(folder.iterdir()))

    with make(range(100), work, workers=2, max_queue_size=4, **backend) as enqueuer:
        # The other worker does as many as may wait behind it.
        wait_until(lambda: done() >= 4)
        slow.let_on()
        assert next(enqueuer.get()) == 0
        wait_until(lambda: enqueuer.queue.qsize() == 4)
        assert done() <= 1 + 4 + 2


@pytest.mark.thorough
@pytest.mark.local
def test_elements_of_a_class_of_main(process):
    done = subprocess.run(
        [sys.executable, "-c", _OF_MAIN.format(start_method_of(process))],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert (done.stdout, done.stderr) == ("[0, 2, 4]\n", "")


_OF_MAIN = """
from dataclasses import dataclass
from enqueuer import OrderedEnqueuer, Processes

@dataclass
class Row:
    x: int

def double(row):
    assert isinstance(row, Row)
    return 2 * row.x

with OrderedEnqueuer(map(Row, range(3)), double, backend=Processes(start_method="{}")) as enqueuer:
    print(list(enqueuer))
"""


def test_a_sequence_may_be_longer_than_memory():
    with make(range(10**12), double, rank=1, world_size=2) as enqueuer:
        assert len(enqueuer) == 5 * 10**11
        assert next(iter(enqueuer)) == 2


# --- sequences and iterables ---


class Dataset:
    """A map-style dataset, as torch has them."""

    def __len__(self):
        return 7

    def __getitem__(self, index):
        if index >= 7:
            raise IndexError(index)
        return {"x": np.full(3, index), "y": index}


class Shuffling:
    """A Keras Sequence that shuffles itself, by the global generator, after each epoch."""

    def __init__(self):
        self.order = np.arange(6)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self.order[2 * index : 2 * index + 2].tolist()

    def on_epoch_end(self):
        np.random.shuffle(self.order)


class Told:
    """A `PyDataset` of Keras 3 whose elements are what it was told, and what was drawn then."""

    def __init__(self):
        self.told = []

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return index, list(self.told)

    def on_epoch_begin(self):
        self.told.append(("begin", random.random(), float(np.random.rand())))

    def on_epoch_end(self):
        self.told.append(("end", random.random(), float(np.random.rand())))


class ToldOfBeginnings:
    """One that shuffles itself at the beginning of each epoch, and is then one longer."""

    def __init__(self):
        self.order = np.arange(3)

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        return int(self.order[index])

    def on_epoch_begin(self):
        self.order = np.random.permutation(len(self.order) + 1)


def test_a_map_style_dataset(backend):
    with OrderedEnqueuer(Dataset(), batch_size=4, workers=2, **backend) as enqueuer:
        first, second = enqueuer
    assert first["x"].tolist() == [[0] * 3, [1] * 3, [2] * 3, [3] * 3]
    assert second["y"].tolist() == [4, 5, 6]


def test_an_array(backend):
    array = np.arange(12).reshape(6, 2)
    with OrderedEnqueuer(array, batch_size=3, workers=2, **backend) as enqueuer:
        assert np.array_equal(np.concatenate(list(enqueuer)), array)


def words(told):
    return [word for word, *_ in told]


def test_each_copy_is_told_of_each_beginning_and_each_end_once(backend):
    before = random.getstate()
    with OrderedEnqueuer(Told(), workers=2, random_seed=7, **backend) as enqueuer:
        assert words(enqueuer.sequence.told) == ["begin"]  # before the first element is asked for
        epochs = [list(enqueuer) for _ in range(3)]
    told = enqueuer.sequence.told  # the copy of the loop's process
    assert words(told) == ["begin", "end"] * 3
    for number, epoch in enumerate(epochs):
        assert epoch == [(index, told[: 2 * number + 1]) for index in range(5)]
    assert len({drawn for _, drawn, _ in told}) == len({drawn for *_, drawn in told}) == 6
    assert random.getstate() == before


def test_beginnings_and_ends_are_told_alike_after_a_resume_and_with_other_workers(backend):
    def make_told(**options):
        return OrderedEnqueuer(Told(), random_seed=7, **options)

    with make_told() as enqueuer:
        wanted = [list(enqueuer) for _ in range(3)]
    with make_told(workers=2, **backend) as enqueuer:
        assert list(enqueuer) == wanted[0]
        batches = iter(enqueuer)
        assert [next(batches) for _ in range(2)] == wanted[1][:2]
        state = packed(enqueuer.state_dict())
        enqueuer.reconfigure(workers=3)
        assert list(batches) == wanted[1][2:]
        assert list(enqueuer) == wanted[2]
    later = make_told(**backend)
    later.load_state_dict(state)
    with later:
        assert list(later) == wanted[1][2:]
        assert words(later.sequence.told) == ["begin", "end"] * 2
        assert list(later) == wanted[2]


def test_a_successor_of_a_worker_is_told_of_all_epochs(process, tmp_path):
    def dies_once(element):
        if len(element[1]) == 3 and element[0] == 2:
            kill_once(tmp_path / "killed")
        return element

    options = {"random_seed": 7, "max_restarts": 1, **process}
    with OrderedEnqueuer(Told(), dies_once, **options) as enqueuer:
        epochs = [list(enqueuer) for _ in range(2)]
        assert enqueuer.restart_count == 1
    told = enqueuer.sequence.told
    assert epochs == [
        [(index, told[: 2 * number + 1]) for index in range(5)] for number in range(2)
    ]


def test_a_second_start_tells_of_the_first_epoch_again(backend):
    enqueuer = OrderedEnqueuer(Told(), **backend)
    with enqueuer:
        list(enqueuer)
    assert words(enqueuer.sequence.told) == ["begin", "end"]
    with enqueuer:
        next(iter(enqueuer))
    assert words(enqueuer.sequence.told) == ["begin", "end", "begin"]


def test_a_beginning_may_change_order_and_length(backend):
    with OrderedEnqueuer(ToldOfBeginnings(), workers=2, random_seed=7, **backend) as enqueuer:
        epochs = [list(enqueuer) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(4 + number)) for number in range(3)]
    with OrderedEnqueuer(ToldOfBeginnings(), random_seed=7) as enqueuer:
        assert [list(enqueuer) for _ in range(3)] == epochs


class ShuffledAtFirst(ToldOfBeginnings):
    """One that keeps its length."""

    def on_epoch_begin(self):
        np.random.shuffle(self.order)


@pytest.mark.parametrize("kind", [ShuffledAtFirst, Shuffling])
def test_a_sequence_that_went_on_is_not_taken_back(kind):
    with OrderedEnqueuer(kind(), random_seed=7) as enqueuer:
        next(enqueuer.get())
        state = enqueuer.state_dict()
        list(enqueuer)
        list(enqueuer)
    with pytest.raises(InvalidState, match="with a new sequence"):
        enqueuer.load_state_dict(state)


def test_an_error_of_a_beginning_is_raised_by_the_loop(backend):
    class Failing(Told):
        def on_epoch_begin(self):
            if len(self.told) == 2:
                raise OSError("no disk")
            super().on_epoch_begin()

    with OrderedEnqueuer(Failing(), **backend) as enqueuer:
        assert len(list(enqueuer)) == 5
        with pytest.raises(OSError, match="no disk") as caught:
            list(enqueuer)
    assert "while the elements of task 0 were read" in caught.value.__notes__[0]


def test_an_iterable_is_read_by_one_reader_and_never_ahead_of_the_bound(backend):
    read = []

    def rows():
        for x in range(50):
            read.append(x)
            yield x

    with make(rows(), double, workers=2, max_queue_size=4, **backend) as enqueuer:
        for number, x in enumerate(enqueuer):
            assert x == 2 * number
            assert len(read) <= number + 1 + 4 + 2
    assert read == list(range(50))


def test_large_elements_of_an_iterable(backend):
    rows = (np.full(100_000, x) for x in range(9))
    with make(rows, lambda row: int(row.sum()), workers=2, **backend) as enqueuer:
        assert list(enqueuer) == [100_000 * x for x in range(9)]


@pytest.mark.parametrize("ordered", [True, False])
def test_an_iterable_that_fails_is_told_after_what_it_gave(backend, ordered):
    def rows():
        yield from range(5)
        raise OSError("the disk is gone")

    seen = []
    with make(rows(), double, workers=2, ordered=ordered, **backend) as enqueuer:
        with pytest.raises(OSError, match="the disk is gone") as caught:
            for x in enqueuer:
                seen.append(x)  # it raises
    assert sorted(seen) == [0, 2, 4, 6, 8]
    assert "while the elements of task 5 were read" in caught.value.__notes__[0]


def test_an_iterable_is_read_anew_in_each_epoch(backend):
    with make({"a": 1, "b": 2}.values(), double, **backend) as enqueuer:
        assert list(enqueuer) == list(enqueuer) == [2, 4]


# --- batches ---


def test_the_last_batch_may_be_left_out():
    assert [len(b) for b in make(map=double, batch_size=5)] == [5, 5, 5, 5, 3]
    assert [len(b) for b in make(map=double, batch_size=5, drop_last=True)] == [5, 5, 5, 5]
    assert len(make(batch_size=5)) == 5
    assert len(make(batch_size=5, drop_last=True)) == 4
    assert len(make()) == 23


def test_stacking_goes_into_nests():
    def item(x):
        return {"a": np.full(2, x), "p": Pair(float(x), [x, str(x)]), "t": (x > 0, None)}

    (batch,) = make(range(2), item, batch_size=2)
    assert batch["a"].tolist() == [[0, 0], [1, 1]]
    assert isinstance(batch["p"], Pair)
    assert batch["p"].x.tolist() == [0.0, 1.0]
    assert batch["p"].y[0].tolist() == [0, 1]
    assert batch["p"].y[1] == ["0", "1"]
    assert batch["t"][0].tolist() == [False, True]
    assert batch["t"][1] == [None, None]


@pytest.mark.parametrize(
    "results",
    [
        *([0, None], [np.float64(0), None], [np.zeros(2), None], [{"x": 1}, None], [(1, 2), None]),
        # No dtype holds these integers.
        *([2**63, -1], [-1, 2**64 - 1], [2**64, 1], [-(2**63) - 1, 0]),
        [0, "a"],
    ],
)
def test_results_that_no_array_holds_stay_in_a_list(results):
    """Whichever comes first."""
    assert stack(results) is results
    assert stack(results[::-1]) == results[::-1]


@pytest.mark.parametrize("results", [[2**63, 1], [1, 2**64 - 1], [True, 2**63]])
def test_integers_above_int64_become_uint64(results):
    batch = stack(results)
    assert batch.dtype == np.uint64
    assert batch.tolist() == results


def test_large_integers_beside_floats_are_floats():
    assert stack([2**63, 0.5]).dtype == np.float64
    assert stack([1, np.float32(0.5)]).dtype == np.float64


def test_a_thread_that_imports_torch_does_not_disturb_the_others(monkeypatch):
    """Until its import ends, the module is there without its names."""
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert stack([{"x": np.zeros(2)}, {"x": np.ones(2)}])["x"].tolist() == [[0, 0], [1, 1]]
    assert stack(["a", "b"]) == ["a", "b"]
    options = {"batch_size": 2, "max_queue_bytes": 1 << 20}
    with OrderedEnqueuer(range(4), lambda n: [n, str(n)], **options) as enqueuer:
        assert [batch[1] for batch in enqueuer] == [["0", "1"], ["2", "3"]]


class Sample(dict):
    pass


@pytest.mark.parametrize(
    "kind", [Sample, OrderedDict, partial(defaultdict, int), UserDict, MappingProxyType]
)
def test_stacking_keeps_the_class_of_a_mapping(kind):
    first, second = kind({"x": 1, "name": "a"}), kind({"x": 2, "name": "b"})
    batch = stack([first, second])
    assert type(batch) is type(first)
    assert (batch["x"].tolist(), batch["name"]) == ([1, 2], ["a", "b"])
    assert first["x"] == 1


def test_an_archive_of_arrays_is_stacked_as_a_dict(tmp_path):
    """No NpzFile can be made of arrays."""
    np.savez(tmp_path / "both.npz", x=np.arange(2))
    with np.load(tmp_path / "both.npz") as archive:
        batch = stack([archive, archive])
    assert type(batch) is dict
    assert batch["x"].tolist() == [[0, 1], [0, 1]]


def test_a_collate_of_ones_own(backend):
    with make(map=double, batch_size=4, collate=sum, workers=2, **backend) as enqueuer:
        assert list(enqueuer) == [12, 44, 76, 108, 140, 126]


def test_results_that_cannot_be_stacked_say_what_to_do_also_in_a_replay(backend):
    with make(map=np.zeros, batch_size=3, **backend) as enqueuer:
        with pytest.raises(
            ValueError, match=r"differ in shape \(\(0,\), \(1,\), \(2,\)\).*collate"
        ) as caught:
            list(enqueuer)
    with pytest.raises(ValueError, match="differ in shape"):
        replay(caught.value)


@pytest.mark.parametrize(
    "result",
    [
        lambda n: {"x": n, "pair": (n, np.zeros(n))},
        lambda n: {"pair": [n, np.zeros(n)]},
    ],
)
def test_results_that_cannot_be_stacked_name_their_key(result):
    with make(map=result, batch_size=3) as enqueuer:
        with pytest.raises(ValueError, match=r"^at 'pair': at 1: .* differ in shape"):
            list(enqueuer)


def test_options_cannot_be_changed_by_their_names():
    with make(batch_size=2) as enqueuer:
        for name in ("batch_size", "shuffle", "map", "collate", "workers", "max_queue_size"):
            with pytest.raises(AttributeError, match=f"{name} is an option .* make another one"):
                setattr(enqueuer, name, 5)
        enqueuer.note = "of a trainer"


def test_a_subclass_may_have_an_attribute_with_the_name_of_an_option():
    class Mine(OrderedEnqueuer):
        def __init__(self, batch_size):
            super().__init__(range(4), batch_size=batch_size)
            self.batch_size = batch_size

    assert Mine(2).batch_size == 2


# --- Keras ---


def test_the_form_of_keras(backend):
    multiprocessing = backend_of(backend) == "process"
    enqueuer = OrderedEnqueuer(Dataset(), multiprocessing, True)
    enqueuer.start(workers=2, max_queue_size=5)
    batches = enqueuer.get()
    steps = [next(batches)["y"] for _ in range(2 * len(enqueuer))]
    assert sorted(steps[:7]) == sorted(steps[7:]) == list(range(7))
    assert next(enqueuer.get())["y"] in range(7)
    enqueuer.stop()
    assert list(batches) == []


def test_get_ends_if_there_is_nothing(backend):
    with OrderedEnqueuer([], double, **backend) as enqueuer:
        with pytest.warns(EmptyEpochWarning):
            assert list(enqueuer.get()) == []
    with OrderedEnqueuer(iter([1, 2]), double, **backend) as enqueuer:
        assert list(enqueuer.get()) == [2, 4]


# --- errors ---


def broken(x):
    if x % 4 == 3:
        raise ValueError(f"a bad file: {x}")
    return x


def test_a_batch_is_smaller_by_what_was_skipped(backend):
    with make(range(9), broken, batch_size=4, on_error="skip", **backend) as enqueuer:
        assert [b.tolist() for b in enqueuer] == [[0, 1, 2], [4, 5, 6], [8]]


def test_a_replacement_takes_the_place(backend):
    with make(range(9), broken, batch_size=4, on_error=lambda error: -1, **backend) as enqueuer:
        assert [b.tolist() for b in enqueuer] == [[0, 1, 2, -1], [4, 5, 6, -1], [8]]


def test_errors_are_counted_on_after_a_resume(backend):
    def tasks():
        return make(range(20), broken, on_error="skip", max_errors=2, **backend)

    had, state = taken(tasks(), 4)
    assert had == [0, 1, 2, 4]
    assert state["error_count"] == 1
    later = tasks()
    later.load_state_dict(state)
    assert later.error_count == 1
    with later, pytest.raises(ValueError, match="a bad file: 11"):
        list(later)
    # The error that was raised was not skipped.
    assert later.error_count == 2
    later.start()
    assert later.error_count == 0
    later.stop()


# --- state ---


@pytest.mark.thorough("processes")
@pytest.mark.parametrize("count", [0, 1, 9, 18, 30])
def test_a_state_is_resumed_elsewhere(backend, whole, count):
    with make(shuffle=True, workers=2, **backend) as enqueuer:
        batches = enqueuer.get()
        first = [next(batches) for _ in range(count)]
        state = packed(enqueuer.state_dict())
    later = make(shuffle=True, workers=3, random_seed=None)
    later.load_state_dict(state)
    with later:
        batches = later.get()
        rest = [next(batches) for _ in range(50 - count)]
    everything = whole[0] + whole[1] + whole[2]
    assert first + rest == everything[:50]


@pytest.mark.parametrize(
    "change",
    [
        {"positions": [[0, 99]]},
        {"positions": [[0, 2]], "done": [99]},
        {"positions": [[0, 2]], "done": [3, 3]},
        {"positions": [[0, 2]], "done": [1]},
        {"positions": [[0, 2]], "done": [3.5]},
        {"positions": []},
    ],
)
def test_a_position_that_cannot_be_is_refused(change):
    state = make(range(8), abs).state_dict()
    with pytest.raises(StateMismatch):
        make(range(8), abs).load_state_dict(state | change)


def test_an_iterable_that_ends_before_a_task_that_was_done_is_told_of():
    state = make(iter(range(8)), abs, ordered=False).state_dict()
    enqueuer = make(iter(range(8)), abs, ordered=False)
    enqueuer.load_state_dict(state | {"positions": [[0, 2]], "done": [4, 8]})
    with enqueuer, pytest.raises(StateMismatch, match=r"ended after 8 tasks .* task 8 of"):
        list(enqueuer)


@pytest.mark.thorough("processes")
def test_an_iterable_of_its_own_state_is_resumed_by_that(backend):
    with make(Reiterable(30), augmented, workers=2, **backend) as enqueuer:
        wanted = list(enqueuer)
    had, state = taken(make(Reiterable(30), augmented, workers=2, **backend), 11)
    assert state["states"] == [[0, {"at": had[-1][0] + 1}]]
    assert had + rest_of(make(Reiterable(30), augmented, **backend), state) == wanted


def test_out_of_order_what_was_done_is_not_done_again(backend):
    had, state = taken(make(map=double, ordered=False, workers=3, **backend), 11)
    rest = rest_of(make(map=double, ordered=False, workers=2, **backend), state)
    assert sorted(had + rest) == [2 * x for x in range(23)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sequence": range(24)}, "length is 23 in the state and 24 here"),
        ({"shuffle": True}, "shuffle is False in the state and True here"),
        ({"batch_size": 2}, "batch_size is None in the state and 2 here"),
        ({"random_seed": 8}, "random_seed is 7 in the state and 8 here"),
    ],
)
def test_a_state_of_something_else_is_refused(options, says):
    with pytest.raises(StateMismatch, match=says):
        make(**options).load_state_dict(make().state_dict())


# --- ranks ---


def test_ranks_take_the_elements_of_an_iterable_in_turn():
    for rank in range(3):
        enqueuer = make(iter(range(23)), double, rank=rank, world_size=3)
        assert list(enqueuer) == [2 * x for x in range(rank, 23, 3)]


@pytest.mark.parametrize("elements", [range(23), None])
def test_equal_steps_can_be_asked_for(elements):
    counts = []
    for rank in range(3):
        items = iter(range(23)) if elements is None else elements
        options = dict(rank=rank, world_size=3, drop_last=True, batch_size=2)
        enqueuer = make(items, double, **options)
        counts.append(sum(1 for _ in enqueuer))
        if elements is not None:
            assert len(enqueuer) == counts[-1]
    assert counts == [3, 3, 3]


# --- reconfigure, and what is refused ---


@pytest.mark.thorough("processes")
@pytest.mark.parametrize("seed", range(3))
def test_reconfigure_loses_and_repeats_nothing(backend, whole, seed):
    rng, seen = random.Random(seed), []
    with make(shuffle=True, workers=2, **backend) as enqueuer:
        for item in enqueuer:
            seen.append(item)
            if rng.random() < 0.15:
                enqueuer.reconfigure(workers=rng.randint(1, 4))
        assert seen == whole[0]
        enqueuer.reconfigure(workers=1)
        assert list(enqueuer) == whole[1]


def read(enqueuer):
    return list(enqueuer)


def read_in_an_event_loop(enqueuer):
    async def loop():
        return [result async for result in enqueuer]

    return asyncio.run(loop())


@pytest.mark.thorough("processes")
@pytest.mark.parametrize("reader", [read, read_in_an_event_loop])
@pytest.mark.parametrize("change", ["stop", "reconfigure"])
def test_workers_that_go_while_an_element_is_read_end_no_loop_by_an_error(change, reader):
    def elements():
        yield from range(2)  # all that start() reads
        backend = core_of(enqueuer).run.backend
        other.start()
        wait_until(lambda: backend.is_closed)
        yield from range(2, 9)

    enqueuer = make(elements(), double, max_queue_size=1)
    calls = {"stop": enqueuer.stop, "reconfigure": lambda: enqueuer.reconfigure(2)}
    other = threading.Thread(target=calls[change])
    with enqueuer:
        results = reader(enqueuer)
        other.join(LIMIT)
    expected = [double(number) for number in range(9)]
    assert results == (expected if change == "reconfigure" else expected[: len(results)])


class LikeDict:
    """A mapping that does not say so."""

    def __init__(self):
        self.held = {0: "a", 1: "b"}

    def __len__(self):
        return len(self.held)

    def __iter__(self):
        return iter(self.held)

    def __getitem__(self, key):
        return self.held[key]

    def keys(self):
        return self.held.keys()


class RowsWithKeys(LikeDict):
    """A table with the names of its columns, which iterates over its rows."""

    def __iter__(self):
        return iter(self.held.values())

    def keys(self):
        return ["column"]


def test_a_sequence_may_have_keys():
    assert list(OrderedEnqueuer(RowsWithKeys())) == ["a", "b"]


@pytest.mark.thorough("processes")
@pytest.mark.parametrize(
    ("arguments", "options", "error", "says"),
    [
        (({1, 2}, double), {}, TypeError, "a set, which has no order; pass sorted"),
        (({0: "a", 1: "b"}, double), {}, TypeError, "a dict, of which .i. takes a key"),
        ((LikeDict(), double), {}, TypeError, "a LikeDict, of which .i. takes a key"),
        ((5, double), {}, TypeError, "a sequence or an iterable, got 5"),
        ((double, double), {}, TypeError, "got the function double; call it"),
        ((iter(["a", "b"]),), {}, ValueError, "needs map"),
        ((iter(["a", "b"]), double, True), {}, ValueError, "shuffle needs"),
        ((["a", "b"], 5), {}, TypeError, "map must be a function"),
        ((["a", "b"], lambda: 1), {}, TypeError, "map must take the element"),
        ((["a", "b"], double), {"collate": list}, ValueError, "give batch_size"),
        ((["a", "b"],), {"batch_size": 2, "collate": 3}, TypeError, "collate must be a function"),
        ((["a", "b"], double), {"batch_size": 0}, ValueError, "batch_size must be >= 1"),
    ],
)
def test_nonsense_is_refused_at_the_door(arguments, options, error, says):
    with pytest.raises(error, match=says):
        OrderedEnqueuer(*arguments, **options)


def test_a_read_iterator_cannot_be_rewound():
    enqueuer = make(iter(range(9)), double)
    with enqueuer:
        next(enqueuer.get())
    with pytest.raises(InvalidState, match="rewound"):
        enqueuer.load_state_dict(enqueuer.state_dict())


def test_an_element_that_cannot_be_sent_is_told_in_its_turn(process):
    elements = (threading.Lock() if x == 3 else x for x in range(9))
    seen = []
    with make(elements, str, workers=2, **process) as enqueuer:
        with pytest.raises(ItemNotPicklable, match="element is a lock") as caught:
            seen.extend(iter(enqueuer))
    assert seen == ["0", "1", "2"]
    assert "task 3, element 3" in caught.value.__notes__[0]


@pytest.mark.filterwarnings("ignore:all threads draw")
@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_task_is_done_again_by_replay_as_often_as_one_likes(backend, batch_size):
    def failing(x, task):
        if x == 5:
            raise KeyError(int(task.rng.integers(10**9)), random.random(), float(np.random.rand()))
        return random.random()

    for elements in (range(9), iter(range(9))):
        with make(elements, failing, batch_size=batch_size, workers=2, **backend) as enqueuer:
            with pytest.raises(KeyError) as caught:
                list(enqueuer)
        for _ in range(2):
            with pytest.raises(KeyError) as again:
                replay(caught.value)
            assert again.value.args[0] == caught.value.args[0]
            if backend_of(backend) == "process":
                assert again.value.args == caught.value.args


class SlowAtTheSecond:
    """An iterable that is quick in its first epoch, when the workers start, and slow then."""

    def __init__(self):
        self.epochs = 0
        self.read = 0

    def __iter__(self):
        self.epochs += 1
        self.read = 0
        for x in range(100 if self.epochs > 1 else 5):
            self.read += 1
            if self.epochs > 1:
                time.sleep(0.05)
            yield x


@pytest.mark.ahead
def test_a_slow_iterable_does_not_hold_back_what_is_done(backend):
    """Reading on, to fill the queue, would take it for seconds."""
    elements = SlowAtTheSecond()
    with make(elements, double, workers=2, max_queue_size=90, **backend) as enqueuer:
        assert len(list(enqueuer)) == 5
        assert next(iter(enqueuer)) == 0
        assert elements.read < 60


def test_get_ends_if_an_epoch_gives_nothing(backend):
    with make(map=broken, on_error="skip", **backend) as enqueuer:
        assert len([x for x, _ in zip(enqueuer.get(), range(40), strict=False)]) == 40
    with make(range(3, 4), broken, on_error=lambda error: None, **backend) as enqueuer:
        assert list(enqueuer.get()) == []


def test_a_poison_pill_in_a_batch_names_the_batch(process):
    def kill(x):
        if x == 5:
            kill_self()
        return x

    with make(map=kill, batch_size=3, workers=2, **process) as enqueuer:
        with pytest.raises(WorkerDied) as caught:
            list(enqueuer)
    assert "task 1, one of the elements [3, 4, 5]" in caught.value.__notes__[0]


def only_the_last(x):
    return x if x == 99 else None


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kind", [range, iter])
def test_many_tasks_in_a_row_may_have_no_result(backend, kind, ordered):
    source = range(100) if kind is range else iter(range(100))
    options = dict(max_queue_size=1, ordered=ordered, **backend)
    with OrderedEnqueuer(source, only_the_last, **options) as enqueuer:
        assert list(enqueuer) == [99]


# --- elements that the sequence fetches in one call ---


class Fetching:
    """A dataset that fetches the elements of a batch in one call, as torch's protocol has it."""

    def __init__(self, wrong=(), fails=False, short=False):
        self.wrong, self.fails, self.short = wrong, fails, short

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index in self.wrong:
            raise KeyError(index)
        return index, "alone"

    def __getitems__(self, indices):
        assert type(indices) is list
        if self.fails:
            raise OSError("all of them")
        together = [(self[index][0], "together") for index in indices]
        return together[: len(together) - self.short]


def fetched(dataset, batch_size, **options):
    with OrderedEnqueuer(dataset, batch_size=batch_size, collate=list, **options) as enqueuer:
        return [pair for batch in enqueuer for pair in batch]


def test_the_elements_of_a_batch_are_fetched_in_one_call(backend):
    together = [(index, "together") for index in range(9)]
    # The last batch has one element.
    assert fetched(Fetching(), 3, workers=2, **backend) == [*together, (9, "alone")]


def test_elements_that_come_alone_are_fetched_alone(backend):
    assert fetched(Fetching(), 1, **backend) == [(index, "alone") for index in range(10)]


def test_the_error_of_a_fetch_is_that_of_its_element(backend):
    with pytest.raises(KeyError) as caught:
        fetched(Fetching(wrong={4}), 5, **backend)
    assert (caught.value.args, caught.value.enqueuer_origin.element) == ((4,), 4)
    with pytest.raises(KeyError, match="4"):
        replay(caught.value)


def test_a_fetch_that_fails_as_a_whole_is_an_error(backend):
    with pytest.raises(OSError, match="all of them") as caught:
        fetched(Fetching(fails=True), 5, **backend)
    with pytest.raises(OSError, match="all of them"):
        replay(caught.value)


def test_only_elements_that_fail_are_skipped(backend):
    options = dict(on_error="skip", **backend)
    rest = [(index, "alone" if index < 5 else "together") for index in range(10) if index != 4]
    assert fetched(Fetching(wrong={4}), 5, **options) == rest
    assert fetched(Fetching(fails=True), 5, **options) == [(i, "alone") for i in range(10)]


class Doubling(Fetching):
    """A class that overrides `__getitem__` alone."""

    def __getitem__(self, index):
        return 2 * index, "own"


class Delegating:
    """A wrapper that hands on all that it does not know."""

    def __init__(self):
        self.dataset = Fetching()

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return 2 * index, "own"

    def __getattr__(self, name):
        if name == "dataset":  # before it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


@pytest.mark.parametrize("kind", [Doubling, Delegating])
def test_a_class_that_overrides_the_fetch_of_one_element_alone_keeps_its_work(kind, backend):
    assert fetched(kind(), 5, **backend) == [(2 * index, "own") for index in range(10)]


class Columns(Fetching):
    def __getitems__(self, indices):
        return dict.fromkeys(["id", "text", "label", "score", "split"], indices)


class ColumnsOnly(Fetching):
    __getitems__ = Columns.__getitems__

    def __getitem__(self, index):
        raise RuntimeError("read many at once")


@pytest.mark.parametrize(
    ("dataset", "error", "says"),
    [
        (Fetching(short=True), ValueError, "Fetching returned 4 elements for 5 indices"),
        (Columns(), TypeError, "Columns returned a dict; it must return a list"),
        (ColumnsOnly(), TypeError, r"returned a dict; .*map=sequence\.__getitems__"),
    ],
    ids=["too few", "columns", "columns only"],
)
def test_a_fetch_of_anything_but_a_list_of_all_elements_says_what_it_needs(
    backend, dataset, error, says
):
    with pytest.raises(error, match=says):
        fetched(dataset, 5, **backend)


class Consuming(Fetching):
    def __getitems__(self, indices):
        return [(indices.pop(0), "together") for _ in range(5)]


def test_a_fetch_may_change_its_list_of_indices(backend):
    assert fetched(Consuming(), 5, **backend) == [(index, "together") for index in range(10)]


class Interrupted(Fetching):
    fetches = 0

    def __getitems__(self, indices):
        self.fetches += 1
        if self.fetches > 1:
            raise KeyboardInterrupt
        raise OSError("all of them")


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_interrupt_ends_the_replay_of_a_fetch(on_error):
    def fail(results):
        raise ValueError("collate")

    options = dict(on_error=on_error, max_errors=0) if on_error == "skip" else {}
    dataset = Interrupted()
    with OrderedEnqueuer(dataset, batch_size=5, collate=fail, **options) as enqueuer:
        with pytest.raises(OSError, match="all of them") as caught:
            next(iter(enqueuer))
        with pytest.raises(KeyboardInterrupt):
            replay(caught.value)


class OfTable:
    """A dataset that passes on the places of its table."""

    iloc = property(lambda self: "abc")

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index, self.iloc[index]


def test_a_dataset_with_places_of_a_table_has_elements_of_its_own(backend):
    with OrderedEnqueuer(OfTable(), **backend) as enqueuer:
        assert list(enqueuer) == [(0, "a"), (1, "b"), (2, "c")]
