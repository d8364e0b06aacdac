"""PyTorch: tensors that share the worker's memory, and datasets that give everything once."""

import copy
import functools
import itertools
import pickle
import types
from multiprocessing import resource_tracker

import numpy as np
import pytest
from helpers import Reiterable, collect_until, needs, run_program

from enqueuer import (
    EnqueuerWarning,
    GeneratorEnqueuer,
    InvalidState,
    OrderedEnqueuer,
    Processes,
    StateMismatch,
    empty,
    prefetch,
)
from enqueuer.enqueuers.enqueuer import core_of, part_of
from enqueuer.enqueuers.workload import Portion
from enqueuer.transport.mapping import mapping_at

torch = needs("torch")
torch.set_num_threads(1)  # its thread pool does not survive a fork
DataLoader = torch.utils.data.DataLoader

from enqueuer.adapters import pinning  # noqa: E402  (torch may be missing)
from enqueuer.adapters.torch import (  # noqa: E402
    EnqueuerIterableDataset,
    EnqueuerMapDataset,
    TorchLoader,
    as_tensors,
)
from enqueuer.adapters.torch.local import LocalLoader  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def tracker():
    """Start what multiprocessing leaves running after a first spawn, before the first census."""
    resource_tracker.ensure_running()


def large(shard):
    for number in shard.split(range(6)):
        image = empty((64, 1000), np.uint8)
        image[:] = number
        yield {"image": image, "label": np.full(3, number)}


def numbers(shard):
    for number in shard.split(range(12)):
        yield np.array([number, shard.epoch])


def endless(shard):
    for number in itertools.count():
        yield np.array([shard.index, shard.epoch, number])


def add_ten(number):
    return np.array(number + 10)


def image(number):
    return np.full((64, 1000), number)


def noisy(number, task):
    return np.array([number, task.epoch, task.rng.integers(1000)])


def worker_info(id, num_workers, seed=0):
    """Return the information of torch for a worker: the seed of the iteration plus its index."""
    return types.SimpleNamespace(id=id, num_workers=num_workers, seed=seed + id)


def in_its_own_process(dataset):
    """Return a copy of a dataset, as a DataLoader worker has one."""
    own = copy.copy(dataset)
    for name, value in vars(dataset).items():
        if isinstance(value, LocalLoader):
            setattr(own, name, copy.copy(value))
    return own


def local_of(dataset):
    """Return the loader that this process has of a dataset."""
    (local,) = (value for value in vars(dataset).values() if isinstance(value, LocalLoader))
    return local


def seen(loader):
    return [batch.tolist() for batch in loader]


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index, index**2])


# --- tensors -----------------------------------------------------------------------------------


def test_arrays_become_tensors_of_the_same_memory():
    array = np.arange(6.0).reshape(2, 3)
    tensor = as_tensors([{"x": array}])[0]["x"]
    assert tensor.data_ptr() == array.__array_interface__["data"][0]
    array[0, 0] = 7
    assert tensor[0, 0] == 7


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6)[::-1],
        np.arange(6, dtype=">i4"),
        np.arange(6).reshape(2, 3).T,
        np.frombuffer(bytes(8), np.uint8),
        np.zeros((0, 3)),
        np.array(5.0),
        np.float32(2.5),
        np.array([True, False]),
        np.array([1 + 2j]),
    ],
    ids=lambda array: f"{array.dtype.str}{array.shape}",
)
def test_every_numeric_array_becomes_an_equal_tensor(array, no_warnings):
    tensor = as_tensors(array)
    assert isinstance(tensor, torch.Tensor)
    assert np.array_equal(tensor.numpy(), array)


@pytest.mark.parametrize(
    "leaf",
    [
        "text",
        None,
        5,
        np.str_("text"),
        np.datetime64("2020-01-01"),
        np.array(["a"]),
        np.array([None]),
        np.ma.masked_array([1], [True]),
    ],
    ids=repr,
)
def test_what_is_no_number_stays_what_it_is(leaf):
    assert as_tensors(leaf) is leaf


def test_tensors_lie_in_the_block_that_the_worker_wrote(process):
    loader = TorchLoader(GeneratorEnqueuer(large, workers=2, **process))
    for number, batch in enumerate(loader):
        block = mapping_at(batch["image"].data_ptr())
        assert block is not None
        assert len(block) >= 64_000
        assert (batch["image"] == number).all()
        assert batch["label"].tolist() == [number] * 3
    loader.stop()


# --- the loader --------------------------------------------------------------------------------


def test_a_loader_has_epochs_a_length_and_a_position(backend):
    def loader():
        own = OrderedEnqueuer(range(5), noisy, batch_size=2, workers=2, random_seed=7, **backend)
        return TorchLoader(own)

    one = loader()
    assert len(one) == 3
    first = seen(itertools.islice(one, 2))
    state = one.state_dict()
    rest = seen(one), seen(one)
    assert len(first) + len(rest[0]) == len(rest[1]) == 3
    one.stop()
    other = loader()
    other.load_state_dict(state)
    assert (seen(other), seen(other)) == rest


def test_pin_memory_without_a_gpu_says_that_it_does_nothing():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.warns(EnqueuerWarning, match="no GPU"):
        loader = TorchLoader(GeneratorEnqueuer(numbers), pin_memory=True)
    assert len(seen(loader)) == 12


def test_pinned_tensors_do_not_lie_in_a_block(process, monkeypatch):
    """A copy to the GPU that goes on by itself would not keep the worker from writing there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    driver = types.SimpleNamespace(register=lambda *_: 0, unregister=lambda _: None)
    monkeypatch.setattr(pinning.PINS, "driver", driver)
    monkeypatch.setattr(pinning, "pinned_like", torch.empty_like, raising=False)
    with TorchLoader(OrderedEnqueuer(range(4), image, **process), pin_memory=True) as loader:
        for number, batch in enumerate(loader):
            assert mapping_at(batch.data_ptr()) is None
            assert torch.equal(batch, torch.full((64, 1000), number))


def test_what_is_no_enqueuer_is_refused():
    with pytest.raises(TypeError, match="wrap a generator in GeneratorEnqueuer"):
        TorchLoader([1, 2])


def test_a_small_network_learns(backend):
    def samples(shard):
        for _ in shard.split(range(30)):
            x = shard.rng.standard_normal((32, 3), np.float32)
            yield x, x @ np.float32([1, -2, 3])

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loader = TorchLoader(GeneratorEnqueuer(samples, workers=2, random_seed=7, **backend))
    losses = []
    for _ in range(4):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x)[:, 0], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 100


# --- the iterable dataset ----------------------------------------------------------------------


def test_a_dataset_in_a_dataloader_gives_what_the_enqueuer_gives(backend):
    dataset = EnqueuerIterableDataset(GeneratorEnqueuer(numbers, workers=2, **backend))
    loader = DataLoader(dataset, batch_size=None)
    for epoch in range(2):
        assert seen(loader) == [[number, epoch] for number in range(12)]
    dataset.stop()


@pytest.mark.parametrize(
    ("method", "persistent", "backend"),
    [
        ("fork", False, {}),
        ("fork", True, {}),
        ("fork", False, {"backend": Processes(start_method="forkserver")}),
        ("spawn", False, {}),
    ],
    ids=["fork", "persistent", "processes", "spawn"],
)
def test_dataloader_workers_make_each_a_part_and_epochs_go_on(method, persistent, backend):
    dataset = EnqueuerIterableDataset(GeneratorEnqueuer(numbers, shards=4, **backend))
    loader = DataLoader(
        dataset,
        batch_size=None,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=persistent,
    )
    for epoch in range(2 if method == "spawn" else 3):
        assert seen(loader) == [[number, epoch] for number in range(12)]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_of_an_ordered_enqueuer_do_not_depend_on_dataloader_workers(workers, no_warnings):
    own = OrderedEnqueuer(range(10), noisy, shuffle=True, batch_size=3, random_seed=7)
    dataset = EnqueuerIterableDataset(own)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    alone = OrderedEnqueuer(range(10), noisy, shuffle=True, batch_size=3, random_seed=7)
    for _ in range(2):
        assert len(loader) == 4
        assert seen(loader) == seen(alone)
    dataset.stop()


@pytest.mark.parametrize("workers", [1, 2])
def test_elements_of_an_iterable_are_divided_among_dataloader_workers(workers):
    own = OrderedEnqueuer(Reiterable(10), add_ten, batch_size=2)
    loader = DataLoader(EnqueuerIterableDataset(own), batch_size=None, num_workers=workers)
    assert seen(loader) == [[10, 11], [12, 13], [14, 15], [16, 17], [18, 19]]


@pytest.mark.parametrize("persistent", [False, True])
def test_after_a_break_dataloader_workers_begin_the_next_epoch(persistent):
    dataset = EnqueuerIterableDataset(GeneratorEnqueuer(numbers, shards=4))
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=persistent)
    for batch in loader:
        assert batch.tolist() == [0, 0]
        break
    assert seen(loader) == [[number, 1] for number in range(12)]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("began", [[(0, 1)], [(1, 2)]], ids=["fewer workers", "one was late"])
def test_dataloader_workers_agree_on_the_epoch(began, first, monkeypatch):
    """One may have missed an epoch: it was not there, or the loop left before it began."""
    dataset = EnqueuerIterableDataset(GeneratorEnqueuer(numbers, shards=4))

    def epoch_of(worker, workers, seed):
        info = worker_info(worker, workers, seed)
        monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: info)
        own = in_its_own_process(dataset)
        (epoch,) = {epoch for _, epoch in seen(own)}
        own.stop()
        return epoch

    for worker, workers in began:
        assert epoch_of(worker, workers, seed=10) == 0
    for epoch, seed in ((1, 20), (2, 30)):
        assert [epoch_of(worker, 2, seed) for worker in (first, 1 - first)] == [epoch] * 2


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("after_set_epoch", [False, True])
def test_a_persistent_worker_that_is_late_agrees_on_the_epoch(late, after_set_epoch, monkeypatch):
    """The loop left before it had begun, and another worker has begun the next epoch already."""
    dataset = EnqueuerIterableDataset(GeneratorEnqueuer(numbers, shards=4))
    own = [in_its_own_process(dataset) for _ in range(2)]

    def epoch_of(worker):
        info = worker_info(worker, 2, seed=10)  # torch gives the same one for each epoch
        monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: info)
        (epoch,) = {epoch for _, epoch in seen(own[worker])}
        return epoch

    assert epoch_of(1 - late) == 0
    if after_set_epoch:
        dataset.set_epoch(1)
    assert epoch_of(1 - late) == 1
    epoch_of(late)  # what torch throws away
    assert epoch_of(late) == 1
    assert [epoch_of(late), epoch_of(1 - late)] == [2, 2]
    for dataset in own:
        dataset.stop()


def test_set_epoch_reaches_dataloader_workers():
    dataset = EnqueuerIterableDataset(GeneratorEnqueuer(numbers, shards=4))
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    for epoch in (5, 2, 2):
        dataset.set_epoch(epoch)
        assert seen(loader) == [[number, epoch] for number in range(12)]


@pytest.mark.parametrize(("ranks", "parts"), [(1, 4), (2, 2)])
def test_which_shards_drop_last_leaves_out_does_not_depend_on_dataloader_workers(ranks, parts):
    def shard_itself(shard):
        yield np.array([shard.index, shard.count])

    own = GeneratorEnqueuer(shard_itself, shards=7, drop_last=True, random_seed=7)
    for rank in range(ranks):
        whole = part_of(own, Portion(rank, ranks))
        shares = [part_of(own, Portion(rank, ranks, part, parts)) for part in range(parts)]
        assert sorted(had for share in shares for had in seen(share)) == seen(whole)
        for enqueuer in (whole, *shares):
            enqueuer.stop()


def in_another_process(monkeypatch, dataset):
    """Have a dataset be in the second of two workers of a DataLoader from now on."""
    info = worker_info(id=1, num_workers=2)
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: info)
    monkeypatch.setattr(local_of(dataset), "pid", 0)


@pytest.mark.parametrize("into", ["enqueuer", "dataset"])
def test_dataloader_workers_begin_with_the_epoch_that_was_loaded(into, monkeypatch):
    def make():
        return GeneratorEnqueuer(numbers, shards=2, random_seed=7)

    with make() as one:
        list(one)
        state = one.state_dict()
    two = make()
    if into == "enqueuer":
        two.load_state_dict(state)
    dataset = EnqueuerIterableDataset(two)
    if into == "dataset":
        dataset.load_state_dict(state)
    in_another_process(monkeypatch, dataset)
    assert [epoch for _, epoch in seen(dataset)] == [1] * 6
    dataset.stop()


def test_dataloader_workers_refuse_a_position_that_was_loaded_for_the_whole(in_a_worker):
    def make():
        return GeneratorEnqueuer(numbers, shards=2, random_seed=7)

    with make() as one:
        next(one.get())
        state = one.state_dict()
    two = make()
    two.load_state_dict(state)
    with pytest.raises(InvalidState, match=r"position within epoch 0 .*StatefulDataLoader"):
        seen(EnqueuerIterableDataset(two))
    with pytest.raises(InvalidState, match="position within epoch 0"):
        TorchLoader(two, rank=1, world_size=2)


def test_a_dataset_that_was_stopped_can_be_shared_with_dataloader_workers(monkeypatch):
    dataset = EnqueuerIterableDataset(GeneratorEnqueuer(numbers, shards=2))
    assert len(seen(dataset)) == 12
    dataset.stop()
    in_another_process(monkeypatch, dataset)
    assert [number for number, _ in seen(dataset)] == [1, 3, 5, 7, 9, 11]
    dataset.stop()


def test_set_epoch_without_dataloader_workers():
    dataset = EnqueuerIterableDataset(GeneratorEnqueuer(numbers))
    loader = DataLoader(dataset, batch_size=None)
    for epoch in (0, 1, 2, 5, 3, 3):
        dataset.set_epoch(epoch)
        assert seen(loader) == [[number, epoch] for number in range(12)]
    dataset.stop()


def test_set_epoch_to_the_next_one_keeps_the_workers_running():
    enqueuer = GeneratorEnqueuer(numbers)
    dataset = EnqueuerIterableDataset(enqueuer)
    assert len(seen(dataset)) == 12
    dataset.set_epoch(1)
    assert not core_of(enqueuer).is_idle
    assert seen(dataset)[0] == [0, 1]
    dataset.stop()


def test_set_epoch_after_a_break_begins_that_epoch():
    dataset = EnqueuerIterableDataset(GeneratorEnqueuer(numbers), steps_per_epoch=20)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        assert seen(itertools.islice(iter(dataset), 3)) == [[n, epoch] for n in range(3)]
    dataset.stop()


def test_set_epoch_to_the_one_that_was_resumed_keeps_its_position():
    def make():
        return EnqueuerIterableDataset(GeneratorEnqueuer(numbers, random_seed=7))

    one = make()
    one.set_epoch(4)
    seen(itertools.islice(iter(one), 5))
    state = one.state_dict()
    one.stop()
    other = make()
    other.load_state_dict(state)
    for epoch, first in ((4, 5), (5, 0)):
        other.set_epoch(epoch)
        assert seen(other) == [[number, epoch] for number in range(first, 12)]
    other.stop()


def test_set_epoch_does_not_stop_what_the_caller_has_started():
    with GeneratorEnqueuer(numbers) as enqueuer:
        dataset = EnqueuerIterableDataset(enqueuer)
        assert len(seen(dataset)) == 12
        dataset.set_epoch(1)
        assert seen(dataset)[0] == [0, 1]
        with pytest.raises(InvalidState, match=r"set_epoch\(5\).*stop\(\)"):
            dataset.set_epoch(5)


def test_a_default_device_of_torch_is_left_alone():
    with torch.device("meta"):
        dataset = EnqueuerIterableDataset(GeneratorEnqueuer(numbers))
        assert seen(dataset) == [[number, 0] for number in range(12)]
        dataset.stop()
        by_index = EnqueuerMapDataset(GeneratorEnqueuer(numbers), length=2)
        assert by_index[0].tolist() == [0, 0]
        by_index.stop()


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_per_epoch_of_what_has_no_end(workers):
    dataset = EnqueuerIterableDataset(GeneratorEnqueuer(endless, shards=2), steps_per_epoch=5)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    assert len(loader) == 5
    assert seen(loader) == [[0, 0, 0], [1, 0, 0], [0, 0, 1], [1, 0, 1], [0, 0, 2]]
    assert len(seen(loader)) == 5
    dataset.stop()


@pytest.fixture
def in_a_worker(monkeypatch):
    """What torch says in the second of two workers of a DataLoader.

    A DataLoader waits for ten seconds for workers of which one has raised.
    """
    info = worker_info(id=1, num_workers=2)
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: info)


def test_a_worker_whose_part_is_over_is_resumed_at_its_end(in_a_worker):
    """Another worker may have more: it would get items of the next epoch between its own."""
    one = EnqueuerIterableDataset(GeneratorEnqueuer(numbers, shards=4, random_seed=7))
    part = seen(one)
    state = one.state_dict()
    one.stop()
    for _ in range(2):
        other = EnqueuerIterableDataset(GeneratorEnqueuer(numbers, shards=4, random_seed=7))
        other.load_state_dict(state)
        assert seen(other) == []
        state = other.state_dict()
        assert seen(other) == [[number, 1] for number, _ in part]
        other.stop()


def test_the_position_of_a_worker_before_its_first_batch_is_in_its_epoch(in_a_worker):
    dataset = EnqueuerIterableDataset(GeneratorEnqueuer(numbers, shards=4, random_seed=7))
    dataset.set_epoch(3)
    iter(dataset)
    assert dataset.state_dict()["epoch"] == 3
    dataset.stop()


def test_a_state_of_a_worker_is_not_that_of_the_whole(in_a_worker, monkeypatch):
    dataset = EnqueuerIterableDataset(GeneratorEnqueuer(numbers, shards=4, random_seed=7))
    seen(dataset)
    state = dataset.state_dict()
    dataset.stop()
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: None)
    whole = EnqueuerIterableDataset(GeneratorEnqueuer(numbers, shards=4, random_seed=7))
    with pytest.raises(StateMismatch, match="of a worker of a DataLoader"):
        whole.load_state_dict(state)


def of_lengths(lengths, shard):
    for number in range(lengths[shard.index]):
        yield np.array([shard.index, number])


@pytest.mark.parametrize(
    ("lengths", "workers", "says"),
    [
        ((2, 2, 2, 2), 3, r"4 shards .* cannot be divided evenly over 3 workers"),
        ((1, 2, 2, 2), 2, "differ in length"),
        ((3, 3, 3, 1), 2, "differ in length"),
    ],
)
def test_dataloader_workers_warn_once_if_the_order_is_not_that_of_the_enqueuer(
    lengths, workers, says, monkeypatch
):
    own = GeneratorEnqueuer(functools.partial(of_lengths, lengths), shards=4)
    dataset = EnqueuerIterableDataset(own)

    def two_epochs():
        for worker in range(workers):
            info = worker_info(id=worker, num_workers=workers)
            monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda info=info: info)
            own = in_its_own_process(dataset)
            for _ in range(2):
                seen(own)
            own.stop()

    with pytest.warns(EnqueuerWarning, match=says) as warned:
        two_epochs()
    assert len(warned) == 1


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((3, 2, 2, 2), {"shards": 4}),
        ((3, 3, 3, 3), {"shards": 4}),
        ((5, 1), {"shards": 2}),
        ((1, 2, 2, 2), {"shards": 4, "ordered": False}),
        ((1, 2, 2, 2), {"workers": 2}),
    ],
)
def test_dataloader_workers_do_not_warn_without_a_cause(lengths, options, in_a_worker, no_warnings):
    own = GeneratorEnqueuer(functools.partial(of_lengths, lengths), **options)
    dataset = EnqueuerIterableDataset(own)
    assert seen(dataset)
    dataset.stop()


def test_too_few_shards_for_dataloader_workers_is_an_error_that_says_so(in_a_worker):
    dataset = EnqueuerIterableDataset(GeneratorEnqueuer(numbers, shards=1))
    with pytest.raises(ValueError, match=r"num_workers=2 workers of a DataLoader.*give at least"):
        seen(dataset)


def test_a_live_iterator_is_not_copied_into_dataloader_workers(in_a_worker):
    dataset = EnqueuerIterableDataset(GeneratorEnqueuer(iter("abc")))
    with pytest.raises(ValueError, match="running iterator cannot be split"):
        list(dataset)


def test_an_enqueuer_that_runs_cannot_be_shared_with_dataloader_workers(in_a_worker):
    with GeneratorEnqueuer(numbers, shards=4) as enqueuer:
        dataset = EnqueuerIterableDataset(enqueuer)
        with pytest.raises(InvalidState, match="started in the process that has the DataLoader"):
            seen(dataset)


def test_an_error_in_a_dataloader_worker_is_itself(in_a_worker):
    def bad(shard):
        yield np.zeros(1)
        raise KeyError("no such file")

    dataset = EnqueuerIterableDataset(GeneratorEnqueuer(bad, shards=2))
    batches = iter(dataset)
    next(batches)
    with pytest.raises(KeyError, match="no such file"):
        next(batches)
    dataset.stop()


def test_a_dropped_dataset_stops_its_enqueuer(backend):
    enqueuer = GeneratorEnqueuer(endless, **backend)
    for _ in DataLoader(EnqueuerIterableDataset(enqueuer), batch_size=None):
        break
    collect_until(lambda: core_of(enqueuer).is_idle)  # the DataLoader's own circles


def test_a_position_of_a_part_is_that_of_the_part():
    own = OrderedEnqueuer(range(10), noisy, shuffle=True, batch_size=2, random_seed=7)
    parts = [part_of(own, Portion(0, 1, part, 2)) for part in range(2)]
    with parts[1] as part:
        had = seen(itertools.islice(part, 1))
        state = part.state_dict()
        rest = seen(part)
    assert (len(had), len(rest)) == (1, 1)
    other = part_of(own, Portion(0, 1, 1, 2))
    other.load_state_dict(state)
    assert seen(other) == rest
    for wrong in (own, part_of(own, Portion(0, 1, 1, 3))):
        with pytest.raises(StateMismatch):
            wrong.load_state_dict(state)
    other.stop()


def test_a_dataloader_worker_is_resumed_and_counts_on(in_a_worker):
    def make():
        own = OrderedEnqueuer(range(10), noisy, shuffle=True, batch_size=2, random_seed=7)
        return EnqueuerIterableDataset(own)

    one = make()
    assert len(seen(one)) == 2
    batches = iter(one)
    next(batches)
    state = one.state_dict()
    rest = seen(batches), seen(one)
    one.stop()
    other = make()
    other.load_state_dict(state)
    assert (seen(other), seen(other)) == rest
    other.stop()


@pytest.mark.parametrize("had", [0, 1, 2])
@pytest.mark.parametrize("part", [0, 1])
def test_an_iterable_with_a_state_is_resumed_in_a_part(part, had):
    def make():
        return part_of(
            OrderedEnqueuer(Reiterable(10), add_ten, batch_size=2), Portion(0, 1, part, 2)
        )

    alone = make()
    everything = seen(alone)
    alone.stop()
    with make() as one:
        assert seen(itertools.islice(one, had)) == everything[:had]
        state = one.state_dict()
    other = make()
    other.load_state_dict(state)
    assert seen(other) == everything[had:]
    other.stop()


# --- the map-style dataset ---------------------------------------------------------------------


def test_a_map_dataset_takes_the_next_item_whatever_the_index(backend):
    dataset = EnqueuerMapDataset(GeneratorEnqueuer(numbers, **backend), length=6)
    loader = DataLoader(dataset, batch_size=3, shuffle=True)
    items = [row for _ in range(4) for batch in loader for row in batch.tolist()]
    assert items == [[number, epoch] for epoch in range(2) for number in range(12)]
    dataset.stop()


@pytest.mark.filterwarnings("ignore:.*makes all items")  # in the workers, which are forked
@pytest.mark.parametrize("persistent", [False, True])
def test_a_map_dataset_in_dataloader_workers_repeats_nothing(persistent):
    dataset = EnqueuerMapDataset(GeneratorEnqueuer(numbers, shards=4), length=12)
    loader = DataLoader(dataset, batch_size=3, num_workers=2, persistent_workers=persistent)
    for epoch in range(2):
        items = [tuple(row) for batch in loader for row in batch.tolist()]
        assert sorted(items) == [(number, epoch) for number in range(12)]


def divided(monkeypatch, dataset, sampler, batch_size, workers, epochs=1, one_by_one=False):
    """Yield what the workers of a DataLoader are asked for, as (index, item, epoch of the loader).

    torch deals out batches of indices in turn: worker w gets those of batch w, w + workers, ...
    """
    batches = [sampler[at : at + batch_size] for at in range(0, len(sampler), batch_size)]
    for worker in range(workers):
        info = worker_info(id=worker, num_workers=workers)
        monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda info=info: info)
        own = pickle.loads(pickle.dumps(dataset))
        for epoch, indices in itertools.product(range(epochs), batches[worker::workers]):
            ask = (
                own.__getitems__
                if not one_by_one
                else lambda some, own=own: map(own.__getitem__, some)
            )
            items = ask(indices)
            yield from zip(indices, items, itertools.repeat(epoch))
        own.stop()
    monkeypatch.undo()


@pytest.mark.parametrize("one_by_one", [False, True], ids=["lists", "one by one"])
@pytest.mark.parametrize(
    ("length", "batch_size", "workers"),
    [(25, 4, 2), (25, 4, 3), (10, 8, 2), (10, 3, 4), (7, 1, 3), (5, 10, 2), (9, 3, 1)],
)
def test_a_map_dataset_gives_every_element_once_and_by_its_index(
    length, batch_size, workers, one_by_one, monkeypatch
):
    own = OrderedEnqueuer(range(length), noisy, shuffle=True, random_seed=7)
    dataset = EnqueuerMapDataset(own)
    with OrderedEnqueuer(range(length), noisy, shuffle=True, random_seed=7) as alone:
        expected = [seen(alone) for _ in range(2)]
    how = (list(range(length)), batch_size, workers, 2, one_by_one)
    if workers > 1 and one_by_one and batch_size > 1:  # the first worker does not know the batches
        with pytest.warns(EnqueuerWarning, match="makes all items"):
            found = list(divided(monkeypatch, dataset, *how))
    else:
        found = list(divided(monkeypatch, dataset, *how))
    assert len(found) == 2 * length
    for index, item, epoch in found:
        assert item.tolist() == expected[epoch][index]


def test_a_map_dataset_whose_last_batch_is_dropped_begins_each_epoch_at_its_first(monkeypatch):
    dataset = EnqueuerMapDataset(OrderedEnqueuer(range(11), noisy, random_seed=7))
    for index, item, epoch in divided(monkeypatch, dataset, list(range(8)), 4, 2, epochs=3):
        assert item.tolist()[:2] == [index, epoch]


@pytest.mark.parametrize("length", [12, 7])
def test_a_map_dataset_of_a_generator_gives_every_item_once(length, monkeypatch):
    dataset = EnqueuerMapDataset(GeneratorEnqueuer(numbers, shards=4), length=length)
    with pytest.warns(EnqueuerWarning, match=r"each of the 2 workers .* makes all items"):
        found = list(divided(monkeypatch, dataset, list(range(length)), 4, 2, epochs=2))
    assert len(found) == 2 * length
    for index, item, epoch in found:
        assert item.tolist() == [index, epoch]


@pytest.mark.parametrize("sampler", [[3, 0, 2, 1], [2, 3, 0, 1], [0, 2, 1, 3]])
@pytest.mark.parametrize("make", [lambda: OrderedEnqueuer(range(4)), None])
@pytest.mark.filterwarnings("ignore:.*makes all items")
def test_a_map_dataset_in_dataloader_workers_refuses_torchs_shuffle(sampler, make, monkeypatch):
    own = make() if make else GeneratorEnqueuer(numbers, shards=2)
    dataset = EnqueuerMapDataset(own, length=4)
    with pytest.raises(ValueError, match=r"leave out shuffle=True and sampler="):
        list(divided(monkeypatch, dataset, sampler, 4, 2))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GeneratorEnqueuer(numbers, shards=2, ordered=False), "ordered=False"),
        (lambda: GeneratorEnqueuer(iter(range(9))), "running iterator"),
    ],
)
def test_a_map_dataset_refuses_workers_that_would_disagree(make, says, monkeypatch):
    dataset = EnqueuerMapDataset(make(), length=4)
    info = worker_info(id=1, num_workers=2)
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: info)
    with pytest.raises(ValueError, match=says):
        dataset.__getitems__([2, 3])


@pytest.mark.parametrize("persistent", [False, True])
def test_a_dataloader_asks_a_map_dataset_for_batches_in_turn(persistent):
    dataset = EnqueuerMapDataset(OrderedEnqueuer(range(25), noisy, random_seed=7))
    loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=persistent)
    for epoch in range(2):
        rows = [row[:2] for batch in loader for row in batch.tolist()]
        assert rows == [[number, epoch] for number in range(25)]


def test_a_map_dataset_has_a_length():
    assert len(EnqueuerMapDataset(OrderedEnqueuer(range(7)))) == 7
    with pytest.raises(TypeError, match=r"number of batches .* unknown"):
        EnqueuerMapDataset(GeneratorEnqueuer(numbers))
    dataset = EnqueuerMapDataset(OrderedEnqueuer(range(7)), length=3)
    with pytest.raises(IndexError):
        dataset[3]


# --- ranks -------------------------------------------------------------------------------------


@pytest.fixture
def second_of_two(monkeypatch):
    """What torch.distributed says in the second of two processes."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)


def test_the_rank_is_that_of_torch_distributed(second_of_two):
    own = OrderedEnqueuer(range(5), random_seed=7)
    assert [int(item) for item in TorchLoader(own)] == [1, 3]
    own = GeneratorEnqueuer(numbers, shards=4, random_seed=7)
    dataset = EnqueuerIterableDataset(own)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    assert [row[0] for row in seen(loader)] == [1, 3, 5, 7, 9, 11]


def test_a_rank_of_its_own_is_kept(second_of_two):
    own = OrderedEnqueuer(range(6), rank=2, world_size=3)
    assert [int(item) for item in TorchLoader(own)] == [2, 5]
    own = OrderedEnqueuer(range(4))
    assert [int(item) for item in TorchLoader(own, rank=0, world_size=1)] == [0, 1, 2, 3]


def test_ranks_without_a_common_seed_are_refused(second_of_two):
    with pytest.raises(ValueError, match="random_seed="):
        TorchLoader(OrderedEnqueuer(range(5)))


def test_a_started_enqueuer_cannot_take_another_rank(second_of_two):
    with (
        OrderedEnqueuer(range(5), random_seed=7) as enqueuer,
        pytest.raises(InvalidState, match="rank 1 of 2"),
    ):
        TorchLoader(enqueuer)


def test_a_dataset_older_than_the_ranks_is_not_sent_to_spawned_workers(request):
    """They do not know of torch.distributed and would not notice."""
    dataset = EnqueuerIterableDataset(OrderedEnqueuer(range(5), random_seed=7))
    request.getfixturevalue("second_of_two")
    with pytest.raises(InvalidState, match="after this loader was made"):
        pickle.dumps(dataset)


def test_rank_without_world_size_is_refused():
    with pytest.raises(ValueError, match="go together"):
        TorchLoader(OrderedEnqueuer(range(5)), rank=1)


DISTRIBUTED = """
    import sys, torch, numpy as np
    import torch.multiprocessing as mp
    from torch.utils.data import DataLoader
    from enqueuer import OrderedEnqueuer
    from enqueuer.adapters.cuda import CudaDataLoader
    from enqueuer.adapters.torch import EnqueuerIterableDataset, EnqueuerMapDataset, TorchLoader

    LOADERS = {
        "TorchLoader": TorchLoader,
        "CudaDataLoader": lambda own: CudaDataLoader(own, "cpu"),
        "EnqueuerIterableDataset": lambda own: DataLoader(
            EnqueuerIterableDataset(own), batch_size=None
        ),
        "EnqueuerMapDataset": lambda own: DataLoader(EnqueuerMapDataset(own), batch_size=None),
    }

    def main(rank, store):
        early = {name: make(numbers()) for name, make in LOADERS.items()}
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.FileStore(store, 2), rank=rank, world_size=2
        )
        for name, make in LOADERS.items():
            mine = [int(item) for item in make(numbers())]
            everyone = [None, None]
            torch.distributed.all_gather_object(everyone, mine)
            if rank == 0:
                print(name, sorted(everyone[0] + everyone[1]), len(everyone[0]))
                try:
                    print(list(early[name]))
                except RuntimeError as error:
                    print(str(error).split(",")[0])
        torch.distributed.destroy_process_group()

    def numbers():
        return OrderedEnqueuer(range(7), np.array, shuffle=True, random_seed=7)

    if __name__ == "__main__":
        mp.spawn(main, (sys.argv[0] + ".store",), nprocs=2)
"""


def test_two_processes_of_torch_distributed_share_the_data(tmp_path):
    code, out, err = run_program(tmp_path, DISTRIBUTED)
    lines = out.splitlines()
    loaders = ["TorchLoader", "CudaDataLoader", "EnqueuerIterableDataset", "EnqueuerMapDataset"]
    assert lines[::2] == [f"{name} [0, 1, 2, 3, 4, 5, 6] 4" for name in loaders], err
    assert lines[1::2] == ["torch.distributed was initialised after this loader was made"] * 4
    assert code == 0


# --- what is different ------------------------------------------------------------------------


class Broken(Squares):
    def __getitem__(self, index):
        if index == 1:
            raise KeyError("no such file")
        return index


def outcomes(batches):
    """Return what five calls of next() give or raise."""
    found = []
    for _ in range(5):
        try:
            found.append(next(batches))
        except KeyError as error:
            found.append(type(error))
    return found


def test_after_an_error_a_dataloader_goes_on_and_an_enqueuer_raises_it_again():
    assert outcomes(iter(DataLoader(Broken(), batch_size=None))) == [0, KeyError, 2, 3, 4]
    with OrderedEnqueuer(Broken()) as enqueuer:
        assert outcomes(iter(enqueuer)) == [0, *[KeyError] * 4]
    with OrderedEnqueuer(Broken(), on_error="skip") as enqueuer:
        assert outcomes(iter(enqueuer)) == [0, 2, 3, 4, 5]


# --- torch as the source -----------------------------------------------------------------------


def test_a_dataset_is_a_sequence_for_an_ordered_enqueuer(backend):
    own = OrderedEnqueuer(
        Squares(), shuffle=True, batch_size=4, workers=2, random_seed=7, **backend
    )
    loader = TorchLoader(own)
    for _ in range(2):
        rows = [tuple(row) for batch in loader for row in batch.tolist()]
        assert sorted(rows) == [(n, n**2) for n in range(10)]
    loader.stop()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_is_a_source_of_epochs(workers):
    torch.manual_seed(0)
    source = DataLoader(Squares(), batch_size=5, shuffle=True, num_workers=workers)
    loader = TorchLoader(GeneratorEnqueuer(source))
    epochs = [seen(loader) for _ in range(2)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(row[0] for batch in epoch for row in batch) == list(range(10))
    loader.stop()
    assert len(list(prefetch(source))) == 2


KILLED = """
    import os, itertools
    from torch.utils.data import DataLoader
    from enqueuer import GeneratorEnqueuer
    from enqueuer.adapters.torch import EnqueuerIterableDataset

    def numbers(shard):
        yield from itertools.count()

    own = GeneratorEnqueuer(numbers, shards=4, backend="process")
    loader = DataLoader(EnqueuerIterableDataset(own), batch_size=None, num_workers=2)
    try:  # torch's handler of signals raises wherever this process is
        batches = iter(loader)
        next(batches)
        os.kill(batches._workers[0].pid, 9)
        for _ in batches:
            pass
    except RuntimeError as error:
        print(str(error).split("(")[0])
"""


def test_a_dataloader_worker_that_is_killed_leaves_none_of_its_own(tmp_path):
    code, out, err = run_program(tmp_path, KILLED)
    assert (code, out) == (0, "DataLoader worker \n"), err
