"""The workers of the DataLoader: info, seeds, iterable datasets, errors, ends, and options."""

import collections
import gc
import itertools
import multiprocessing.util
import operator
import os
import signal
import threading
import typing

import numpy as np
import pytest
from helpers import LIMIT, needs, wait_until

from enqueuer import (
    ItemNotPicklable,
    OrderedEnqueuer,
    Processes,
    WorkerDied,
    WorkerError,
)
from enqueuer.transport import blocks

torch = needs("torch")
torch.set_num_threads(1)  # its thread pool does not survive a fork

from torch.utils.data._utils.collate import default_collate_fn_map  # noqa: E402

from enqueuer.adapters.torch import DataLoader  # noqa: E402  (torch may be missing)

data = torch.utils.data
get_worker_info = data.get_worker_info
# torch's own workers make it, and it stays as long as this process.
multiprocessing.util.get_temp_dir()
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Of(data.Dataset):
    """A dataset whose samples a function makes."""

    def __init__(self, function, count=8):
        self.function = function
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.function(index)


class Stream(data.IterableDataset):
    """So many samples for each worker, of which the second worker has two fewer."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        info = get_worker_info()
        worker = 0 if info is None else info.id
        return iter(range(100 * worker, 100 * worker + self.count - 2 * worker))


# The attribute of torch's iterators that libraries read.
workers_of = operator.attrgetter("_workers")


def lists(loader):
    return [batch.tolist() for batch in loader]


def are_gone(workers):
    return wait_until(lambda: not any(worker.is_alive() for worker in workers))


# --- iterable datasets ---


@pytest.mark.parametrize(("size", "drop_last"), [(3, False), (3, True), (None, False)])
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_iterable_datasets_come_in_the_order_of_torch(workers, size, drop_last):
    options = {"batch_size": size, "num_workers": workers, "drop_last": drop_last}
    seen = [list(kind(Stream(8), **options)) for kind in (data.DataLoader, DataLoader)]
    assert str(seen[1]) == str(seen[0])


@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "persistent"])
def test_after_a_break_an_iterable_dataset_begins_again(persistent):
    endless = Stream(10**9)
    loader = DataLoader(endless, 3, num_workers=2, persistent_workers=persistent)
    for _ in range(3):
        for batch in loader:
            assert batch.tolist() == [0, 1, 2]
            break


def test_more_samples_than_the_length_are_reported():
    loader = DataLoader(Stream(4), num_workers=2)
    assert len(loader) == 4
    with pytest.warns(UserWarning, match="Length of IterableDataset"):
        list(loader)


# --- what a worker knows ---


def test_workers_have_torchs_info_and_seed():
    def init(index):
        info = get_worker_info()
        assert (info.id, info.num_workers, info.seed) == (index, 2, torch.initial_seed())
        info.dataset.value = index, os.getpid()

    dataset = Of(lambda index: torch.tensor(dataset.value))
    batches = iter(DataLoader(dataset, num_workers=2, worker_init_fn=init))
    pids = {worker.index: worker.pid for worker in workers_of(batches)}
    assert all(pids[int(index)] == pid for ((index, pid),) in batches)
    assert get_worker_info() is None
    assert not hasattr(dataset, "value")


@pytest.mark.parametrize(("persistent", "seen"), [(False, [0, 1, 2]), (True, [0, 0, 0])])
def test_new_workers_have_the_dataset_as_it_is_and_persistent_ones_as_it_was(persistent, seen):
    dataset = Of(lambda index: dataset.epoch, count=1)
    loader = DataLoader(dataset, num_workers=1, persistent_workers=persistent)
    found = []
    for dataset.epoch in range(3):
        found += [int(batch) for batch in loader]
    assert found == seen


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_every_start_method_takes_closures(method):
    factor = 3
    loader = DataLoader(
        Of(lambda index: factor * index),
        2,
        num_workers=1,
        multiprocessing_context=method,
        collate_fn=lambda samples: (sum(samples), factor),
    )
    assert list(loader) == [(3, 3), (15, 3), (27, 3), (39, 3)]


# --- batches ---

Pair = collections.namedtuple("Pair", "x y")
NUMBERS = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16")
DTYPES = [getattr(torch, name) for name in (*NUMBERS, "float32", "float64", "complex64")]
SAMPLES = {
    "tuple": lambda i: (torch.full((3000,), i), i),
    "named tuple": lambda i: Pair(np.full(3000, i, "f4"), str(i)),
    "dicts": lambda i: {"a": {"x": np.full((2, 3000), i)}, "b": b"x", "f": 0.5 * i},
    "ordered dict": lambda i: collections.OrderedDict(z=np.float32(i), a=[i, [i]]),
    "default dict": lambda i: collections.defaultdict(list, x=torch.ones(())),
    "scalars": lambda i: (np.array(i), np.int16(i), True, torch.tensor(i, dtype=torch.bfloat16)),
    "empty": lambda i: (torch.ones(0, 3), np.ones((3, 0))),
    "strided": lambda i: (torch.ones(100, 90).T, np.ones((100, 90)).T),
    "half": lambda i: np.full(9000, i, "f2"),
    "read-only": lambda i: np.frombuffer(bytes(20_000), np.uint8),
    "swapped": lambda i: np.full(3000, i, ">i4"),
    "mixed": lambda i: torch.ones(3000, dtype=torch.float32 if i % 2 else torch.int64),
    "unequal": lambda i: torch.ones(i),
    "text": lambda i: np.array(["a"]),
    "none": lambda i: None,
    "dtypes": lambda i: [torch.full((5000,), i % 2, dtype=dtype) for dtype in DTYPES],
    "channels last": lambda i: torch.ones(2, 3, 40, 50).to(memory_format=torch.channels_last),
    "gradient": lambda i: torch.ones(3, requires_grad=True),
    "sparse": lambda i: torch.ones(3).to_sparse(),
    "user dict": lambda i: collections.UserDict(a=i, b="x"),
    "user list": lambda i: collections.UserList([i, 0.5]),
    "deque": lambda i: collections.deque([i, torch.ones(3)]),
    "range": lambda i: range(i, i + 2),
    "texts": lambda i: f"sample {i}",
    "set": lambda i: {i},
}


def described(batch):
    """Return a batch with each tensor as its dtype, shape and values."""
    if isinstance(batch, torch.Tensor):
        return batch.dtype, tuple(batch.shape), batch.tolist()
    if isinstance(batch, (dict, collections.UserDict)):
        return type(batch), [(key, described(value)) for key, value in batch.items()]
    if isinstance(batch, (list, tuple, collections.UserList, collections.deque)):
        return type(batch), [described(value) for value in batch]
    return type(batch), batch


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
@pytest.mark.parametrize("sample", SAMPLES)
def test_batches_have_torchs_types_and_values(sample):
    seen = []
    for kind in (data.DataLoader, DataLoader):
        try:
            loader = kind(Of(SAMPLES[sample], 5), 2, num_workers=1)
            seen.append([described(batch) for batch in loader])
        except Exception as error:
            seen.append((type(error), str(error).strip().splitlines()[-1].split(": ", 1)[-1]))
    if isinstance(seen[1], tuple):
        # torch's message ends with that of the exception.
        assert (seen[0][0], seen[0][1].split(": ")[-1]) == (seen[1][0], seen[1][1].split(": ")[-1])
    else:
        assert seen[0] == seen[1]


@pytest.mark.parametrize("size", [2, None])
def test_conjugated_and_negated_views_keep_their_values(size):
    def views(index):
        conjugated = torch.full((3000,), complex(1, index)).conj()
        return conjugated, conjugated.imag

    # Samples and their batches differ by a first axis only.
    batches = list(DataLoader(Of(views, 4), size, num_workers=1))
    conjugated, negated = (
        torch.stack([*column]).reshape(4, 3000) for column in zip(*batches, strict=True)
    )
    assert conjugated[:, 0].tolist() == [1, 1 - 1j, 1 - 2j, 1 - 3j]
    assert negated[:, -1].tolist() == [0, -1, -2, -3]


class Counting:
    """Count the copies into blocks of a worker process, from the first sample on."""

    def __init__(self, of):
        self.of = of
        self.copies = None

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if self.copies is None:
            self.copies, copy = [], blocks.copy_part
            blocks.copy_part = lambda *args: self.copies.append(0) or copy(*args)
        return self.of(index), len(self.copies)


@pytest.mark.parametrize("of", [lambda i: torch.full((9000,), i), lambda i: np.full(9000, i)])
def test_samples_are_stacked_straight_into_shared_memory(of):
    options = {"backend": Processes(start_method="fork"), "batch_size": 2}
    for loader in (
        DataLoader(Counting(of), 2, num_workers=1),
        OrderedEnqueuer(Counting(of), **options),
    ):
        batches = list(loader)
        assert [int(x[0][-1, 0]) for x in batches] == [1, 3, 5, 7]
        assert sum(int(sum(x[1])) for x in batches) == 0


def test_tensors_that_cannot_be_stacked_in_place_are_stacked_by_torch():
    def mixed(index):
        return torch.ones(9000, dtype=torch.int32 if index % 2 else torch.float32)

    enqueuer = OrderedEnqueuer(Of(mixed), batch_size=2)
    assert {batch.dtype for batch in enqueuer} == {torch.float32}


def test_none_is_a_batch():
    loader = DataLoader(Of(int, 4), 2, num_workers=1, collate_fn=lambda samples: None)
    assert list(loader) == [None, None]


def test_a_function_that_was_registered_for_default_collate_stays():
    functions = default_collate_fn_map
    before = functions[torch.Tensor]
    functions[torch.Tensor] = lambda batch, *, collate_fn_map: len(batch)
    try:
        assert list(DataLoader(Of(torch.tensor, 4), 2, num_workers=1)) == [2, 2]
    finally:
        functions[torch.Tensor] = before


class Bulk(Of):
    def __getitems__(self, indices):
        return [10 * index for index in indices]


class Columns(Of):
    def __getitems__(self, indices):
        return {"x": indices}


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_a_batch_come_by_getitems(workers):
    assert lists(DataLoader(Bulk(None, 4), 3, num_workers=workers)) == [[0, 10, 20], [30]]
    loader = DataLoader(Columns(None, 4), 3, num_workers=workers, collate_fn=lambda batch: batch)
    assert list(loader) == [{"x": [0, 1, 2]}, {"x": [3]}]


def test_a_batch_may_have_many_indices():
    many = DataLoader(Of(int), batch_sampler=[range(100_000)], num_workers=1, collate_fn=len)
    assert list(many) == [100_000]


def test_two_iterations_at_a_time_are_independent():
    loader = DataLoader(Of(int), 4, num_workers=1)
    assert [(*a, *b) for a, b in zip(loader, loader, strict=True)] == [
        (0, 1, 2, 3, 0, 1, 2, 3),
        (4, 5, 6, 7, 4, 5, 6, 7),
    ]


def test_data_pipes_are_divided_and_shuffled_as_by_torch():
    pipes = pytest.importorskip("torch.utils.data.datapipes.iter")
    seen = []
    for kind in (data.DataLoader, DataLoader):
        torch.manual_seed(3)
        pipe = pipes.IterableWrapper(list(range(10))).shuffle().sharding_filter()
        loader = kind(pipe, num_workers=2, shuffle=True, persistent_workers=True)
        seen.append([lists(loader) for _ in range(2)])
    assert seen[0] == seen[1]


# --- errors ---


def fails(index):
    raise NotImplementedError


def test_each_batch_that_fails_is_an_error_and_the_epoch_ends():
    batches, errors = iter(DataLoader(Of(fails, 7), 2, num_workers=2)), 0
    with pytest.raises(StopIteration):
        while True:
            try:
                next(batches)
            except NotImplementedError:
                errors += 1
    assert errors == 4


def stops(index):
    raise StopIteration


def test_stop_iteration_of_a_sample_does_not_end_the_loop():
    with pytest.raises(WorkerError, match="StopIteration"):
        list(DataLoader(Of(stops), num_workers=1))


def refuse(index):
    raise LookupError("no data here")


class Unreadable(data.IterableDataset):
    def __iter__(self):
        raise LookupError("no data here")


def test_an_error_at_the_start_of_a_worker_is_raised():
    for workers in (0, 1):
        with pytest.raises(LookupError, match="no data here"):
            list(DataLoader(Unreadable(), num_workers=workers))
    for dataset in (Of(int), Stream(3)):
        with pytest.raises(LookupError, match="no data here"):
            list(DataLoader(dataset, num_workers=1, worker_init_fn=refuse))


class Mute(Exception):
    """An error without a text."""

    def __repr__(self):
        raise LookupError("no text either")


@pytest.mark.parametrize("kind", [LookupError, Mute])
@pytest.mark.parametrize(
    ("bad", "size", "on_error", "seen"),
    [
        ({3}, 2, "skip", [[0, 1], [2], [4, 5]]),
        ({2, 3}, 2, "skip", [[0, 1], [4, 5]]),
        ({3}, 2, lambda error: -1, [[0, 1], [2, -1], [4, 5]]),
        ({3}, None, lambda error: -1, [0, 1, 2, -1, 4, 5]),
    ],
)
def test_an_error_costs_its_sample_alone(kind, bad, size, on_error, seen):
    def odd(index):
        if index in bad:
            raise kind("no data here")
        return index

    loader = DataLoader(Of(odd, 6), size, num_workers=1, on_error=on_error)
    assert [batch if size is None else batch.tolist() for batch in loader] == seen


@pytest.mark.parametrize(
    ("workers", "backend", "concurrency"), [(1, "process", 4), (1, "thread", 4), (2, "thread", 2)]
)
def test_each_worker_fetches_several_samples_at_once(workers, backend, concurrency):
    barrier = threading.Barrier(4)

    class Together(Of):
        def __getitem__(self, index):
            barrier.wait(LIMIT)
            return index

    options = {"num_workers": workers, "backend": backend, "concurrency": concurrency}
    batches = lists(DataLoader(Together(None), concurrency, **options))
    assert sum(batches, []) == list(range(8))  # noqa: RUF017
    with pytest.raises(ValueError, match="concurrency needs a map-style dataset"):
        DataLoader(Stream(3), num_workers=1, concurrency=2)


def test_a_batch_that_cannot_be_sent_is_an_error():
    loader = DataLoader(Of(lambda index: (i for i in ())), 2, num_workers=1, collate_fn=list)
    with pytest.raises(ItemNotPicklable):
        list(loader)


def test_a_killed_worker_is_replaced(tmp_path):
    flag = tmp_path / "killed"

    def once(index):
        if index == 3 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index

    loader = DataLoader(Of(once), 2, num_workers=2, max_restarts=1)
    assert lists(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_persistent_workers_start_again_after_a_death():
    loader = DataLoader(Of(int), 2, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    os.kill(workers_of(batches)[0].pid, signal.SIGKILL)
    workers_of(batches)[0].join(LIMIT)
    with pytest.raises(WorkerDied):
        for _ in range(9):
            next(batches)
    assert lists(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]


# --- ends ---


@pytest.mark.parametrize("iterable", [False, True], ids=["map-style", "iterable"])
def test_workers_end_with_the_epoch_and_with_the_iterator(iterable):
    dataset = Stream(8) if iterable else Of(int)
    batches = iter(DataLoader(dataset, num_workers=2))
    workers = workers_of(batches)
    assert len(workers) == 2
    assert all(worker.is_alive() for worker in workers)
    list(batches)
    are_gone(workers)
    batches = iter(DataLoader(dataset, num_workers=2))
    next(batches)
    workers = workers_of(batches)
    gc.disable()
    try:
        del batches
        are_gone(workers)
    finally:
        gc.enable()


def test_persistent_workers_end_with_the_loader():
    loader = DataLoader(Of(int), num_workers=1, persistent_workers=True)
    list(loader)
    workers = workers_of(iter(loader))
    assert workers[0].is_alive()
    del loader
    are_gone(workers)


class Endless:
    """A sampler of batches without an end, as several detection libraries have it."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from self.sampler


def test_workers_of_an_endless_loader_end_with_it():
    loader = DataLoader(Of(int), 4, num_workers=2)
    object.__setattr__(loader, "batch_sampler", Endless(loader.batch_sampler))
    loader.batches = iter(loader)
    assert lists(itertools.islice(loader.batches, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    workers = workers_of(loader.batches)
    assert all(worker.is_alive() for worker in workers)
    loader.myself = loader
    del loader
    gc.collect()
    are_gone(workers)


def test_persistent_workers_that_a_library_has_ended_start_again():
    loader = DataLoader(Of(int), 2, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    whole = lists(batches)
    operator.methodcaller("_shutdown_workers")(batches)
    assert lists(loader) == whole


# --- construction ---

REFUSED = [
    {"num_workers": -1},
    {"timeout": -1},
    {"prefetch_factor": 2},
    {"persistent_workers": True},
    {"batch_size": None, "drop_last": True},
    {"sampler": [1], "shuffle": True},
    {"batch_sampler": [[1]], "batch_size": 3},
    {"batch_sampler": [[1]], "drop_last": True},
    {"num_workers": 1, "multiprocessing_context": "none"},
    {"num_workers": 1, "multiprocessing_context": 3},
    {"multiprocessing_context": "fork"},
    {"num_workers": 1, "prefetch_factor": -1},
]


@pytest.mark.parametrize("options", REFUSED, ids=str)
def test_torchs_errors_of_arguments(options):
    with pytest.raises((ValueError, TypeError)) as theirs:
        data.DataLoader([1, 2], **options)
    with pytest.raises(type(theirs.value)) as ours:
        DataLoader([1, 2], **options)
    assert str(ours.value) == str(theirs.value)


def test_attributes_are_torchs_and_cannot_be_replaced():
    dataset = Of(int)
    loader = DataLoader(dataset, 3, num_workers=2, multiprocessing_context="fork")
    assert isinstance(loader, data.DataLoader)
    assert (loader.dataset, loader.batch_size, len(loader)) == (dataset, 3, 3)
    assert loader.multiprocessing_context.get_start_method() == "fork"
    assert (loader.num_workers, loader.prefetch_factor, loader.in_order) == (2, 2, True)
    assert isinstance(loader.sampler, data.SequentialSampler)
    for name in ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset"):
        with pytest.raises(ValueError, match="should not be set after"):
            setattr(loader, name, None)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_another_size_of_batches_is_set_at_the_batch_sampler(workers, persistent):
    loader = DataLoader(Of(int), 2, num_workers=workers, persistent_workers=persistent)
    assert [len(batch) for batch in loader] == [2] * 4
    loader.batch_sampler.batch_size = 5
    assert [len(batch) for batch in loader] == [5, 3]
    assert len(loader) == 2


def test_the_number_of_workers_may_be_chosen_while_they_run():
    loader = DataLoader(Of(int), 2, num_workers="auto", backend="thread")
    assert loader.num_workers >= 1
    assert lists(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(ValueError, match="map-style"):
        DataLoader(Stream(3), num_workers="auto")


def test_a_data_loader_can_be_subscribed_in_annotations():
    def make() -> DataLoader[list[int]]:
        return DataLoader(Of(int))

    assert isinstance(make(), typing.get_origin(DataLoader[list[int]]))


METHODS = pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())


@METHODS
def test_workers_have_the_exit_codes_of_their_processes(method):
    batches = iter(DataLoader(Of(int), num_workers=2, multiprocessing_context=method))
    workers = workers_of(batches)
    assert [(worker.is_alive(), worker.exitcode) for worker in workers] == [(True, None)] * 2
    next(batches)
    list(batches)
    for worker in workers:
        worker.join(LIMIT)
        # A worker that has ended is left alone, as its pid may be another process's.
        worker.kill()
        worker.terminate()
        wait_until(lambda worker=worker: worker.exitcode is not None)
    assert [(worker.is_alive(), worker.exitcode) for worker in workers] == [(False, 0)] * 2


@METHODS
@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_a_worker_that_is_ended_through_its_handle_is_reported(method, end):
    batches = iter(DataLoader(range(1000), num_workers=1, multiprocessing_context=method))
    (worker,) = workers_of(batches)
    next(batches)
    getattr(worker, end)()
    worker.join(LIMIT)
    wait_until(lambda: worker.exitcode is not None)
    assert (worker.is_alive(), worker.exitcode) == (False, -signal.SIGKILL)
    text = rf"DataLoader worker \(pid {worker.pid}\) is killed by signal: Killed"
    with pytest.raises(RuntimeError, match=text) as caught:
        list(batches)
    assert caught.value.exitcode == -signal.SIGKILL


def test_a_worker_that_exits_is_an_error_of_torch_and_of_ours():
    loader = DataLoader(Of(lambda index: os._exit(3)), num_workers=1)
    says = r"worker \(pid\(s\) (\d+)\) exited .*\(pid \1\) exited unexpectedly with exit code 3"
    with pytest.raises(RuntimeError, match=says) as caught:
        list(loader)
    assert isinstance(caught.value, WorkerDied)


def test_without_an_accelerator_pinning_is_a_warning():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    loader = DataLoader(Of(int), 4, num_workers=1, pin_memory=True)
    with pytest.warns(UserWarning, match="pin"):
        assert lists(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


class Pinnable:
    """A batch that notes whether it was pinned, and in which process."""

    def __init__(self, samples):
        self.samples = samples
        self.pinned_by = None

    def pin_memory(self):
        self.pinned_by = os.getpid()
        return self


def in_containers(samples):
    return {"a": Pair([Pinnable(samples)], "text")}


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_pinned_in_this_process_by_their_own_method(workers, monkeypatch):
    if not hasattr(torch, "accelerator"):
        pytest.skip("this torch asks its CUDA")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    options = {"num_workers": workers, "pin_memory": True}
    loader = DataLoader(Of(int, 4), 2, collate_fn=in_containers, **options)
    for batch in loader:
        assert batch["a"].y == "text"
        assert batch["a"].x[0].pinned_by == os.getpid()


def test_a_trace_has_the_workers(tmp_path):
    path = tmp_path / "trace.json"
    list(DataLoader(Of(int), 2, num_workers=1, trace=path))
    assert path.stat().st_size > 0


def test_in_order_is_checked():
    with pytest.raises(TypeError, match="in_order must be True or False, got 4"):
        DataLoader(Of(int), in_order=4)


@pytest.mark.parametrize("options", [{}, {"round_robin": True}, {"backend": "thread"}], ids=str)
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_sampler_is_read_as_far_ahead_as_by_torch(workers, factor, options):
    read = []
    sampler = ([read.append(index) or index] for index in range(20))
    options = {"num_workers": workers, "prefetch_factor": factor, **options}
    loader = DataLoader(range(20), batch_sampler=sampler, **options)
    for given, _ in enumerate(loader, 1):
        assert len(read) == min(20, workers * factor + given)


def test_as_many_batches_are_ahead_as_with_torch():
    seen = []
    options = {"num_workers": 2, "prefetch_factor": 3, "backend": "thread"}
    batches = iter(DataLoader(Of(lambda index: seen.append(index) or index, 100), **options))
    wait_until(lambda: len(seen) == 6)
    assert int(next(batches)) == 0
