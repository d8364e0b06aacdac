"""PyTorch: tensors that share the worker's memory, and datasets that give everything once."""

import copy
import itertools
import types
from multiprocessing import resource_tracker

import numpy as np
import pytest
from helpers import collect_until, needs, run_program

from enqueuer import (
    EnqueuerWarning,
    GeneratorEnqueuer,
    InvalidState,
    OrderedEnqueuer,
    empty,
    prefetch,
)
from enqueuer.enqueuers.enqueuer import core_of
from enqueuer.transport.blocks import mapping_at

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


def image(number):
    return np.full((64, 1000), number)


def noisy(number, task):
    return np.array([number, task.epoch, task.rng.integers(1000)])


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


# --- the iterable dataset ----------------------------------------------------------------------


def test_a_dataset_in_a_dataloader_gives_what_the_enqueuer_gives(backend):
    dataset = EnqueuerIterableDataset(GeneratorEnqueuer(numbers, workers=2, **backend))
    loader = DataLoader(dataset, batch_size=None)
    for epoch in range(2):
        assert seen(loader) == [[number, epoch] for number in range(12)]
    dataset.stop()


def test_a_dataset_of_an_ordered_enqueuer_gives_its_batches(no_warnings):
    own = OrderedEnqueuer(range(10), noisy, shuffle=True, batch_size=3, random_seed=7)
    dataset = EnqueuerIterableDataset(own)
    loader = DataLoader(dataset, batch_size=None)
    alone = OrderedEnqueuer(range(10), noisy, shuffle=True, batch_size=3, random_seed=7)
    for _ in range(2):
        assert len(loader) == 4
        assert seen(loader) == seen(alone)
    dataset.stop()


def test_a_copy_of_a_dataset_keeps_what_the_program_has_added():
    class Named(EnqueuerIterableDataset):
        name = ""

    dataset = Named(GeneratorEnqueuer(numbers))
    dataset.name = "train"
    copied = copy.copy(dataset)
    assert copied.name == "train"
    with pytest.raises(InvalidState):
        iter(copied)


def test_a_default_device_of_torch_is_left_alone():
    with torch.device("meta"):
        dataset = EnqueuerIterableDataset(GeneratorEnqueuer(numbers))
        assert seen(dataset) == [[number, 0] for number in range(12)]
        dataset.stop()
        by_index = EnqueuerMapDataset(GeneratorEnqueuer(numbers), length=2)
        assert by_index[0].tolist() == [0, 0]
        by_index.stop()


def test_a_dropped_dataset_stops_its_enqueuer(backend):
    enqueuer = GeneratorEnqueuer(endless, **backend)
    for _ in DataLoader(EnqueuerIterableDataset(enqueuer), batch_size=None):
        break
    collect_until(lambda: core_of(enqueuer).is_idle)  # the DataLoader's own circles


# --- the map-style dataset ---------------------------------------------------------------------


def test_a_map_dataset_takes_the_next_item_whatever_the_index(backend):
    dataset = EnqueuerMapDataset(GeneratorEnqueuer(numbers, **backend), length=6)
    loader = DataLoader(dataset, batch_size=3, shuffle=True)
    items = [row for _ in range(4) for batch in loader for row in batch.tolist()]
    assert items == [[number, epoch] for epoch in range(2) for number in range(12)]
    dataset.stop()


def test_a_map_dataset_has_a_length():
    assert len(EnqueuerMapDataset(OrderedEnqueuer(range(7)))) == 7
    with pytest.raises(TypeError, match=r"number of batches .* unknown"):
        EnqueuerMapDataset(GeneratorEnqueuer(numbers))
    dataset = EnqueuerMapDataset(OrderedEnqueuer(range(7)), length=3)
    with pytest.raises(IndexError):
        dataset[3]


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize(
    "dataset",
    [
        lambda: EnqueuerIterableDataset(GeneratorEnqueuer(numbers)),
        lambda: EnqueuerMapDataset(GeneratorEnqueuer(numbers), length=6),
    ],
    ids=["iterable", "map"],
)
def test_dataloader_workers_are_refused_by_an_error_that_names_what_works(dataset, method):
    loader = DataLoader(dataset(), batch_size=None, num_workers=1, multiprocessing_context=method)
    says = r"num_workers=0, or take TorchLoader\(enqueuer\).*enqueuer\.adapters\.torch\.DataLoader"
    with pytest.raises(InvalidState, match=says):
        list(loader)


def test_a_position_within_an_epoch_is_not_divided_among_ranks():
    def make():
        return GeneratorEnqueuer(numbers, shards=2, random_seed=7)

    with make() as one:
        next(one.get())
        state = one.state_dict()
    two = make()
    two.load_state_dict(state)
    with pytest.raises(InvalidState, match="position within epoch 0"):
        TorchLoader(two, rank=1, world_size=2)


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
    loader = DataLoader(dataset, batch_size=None)
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


# --- torch as the source -----------------------------------------------------------------------


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
