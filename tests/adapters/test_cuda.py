"""Batches on their way to a GPU: equal, in time, and no memory used too early or too late.

Without a GPU the same code runs with device="cpu", and with a device that writes down what it is
asked for. What only a GPU can show is marked `cuda`.
"""

import contextlib
import gc
import itertools
import os
import subprocess
import sys
import weakref
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from helpers import needs

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, empty
from enqueuer.transport import blocks

torch = needs("torch")
torch.set_num_threads(1)  # its thread pool does not survive a fork
DataLoader = torch.utils.data.DataLoader

from enqueuer.adapters import cuda, pinning  # noqa: E402  (torch may be missing)
from enqueuer.adapters.cuda import CudaDataLoader  # noqa: E402
from enqueuer.adapters.torch import TorchLoader  # noqa: E402

on_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def images(shard):
    for number in shard.split(range(8)):
        image = empty((64, 1000), np.uint8)
        image[:] = number
        yield {"image": image, "label": np.full(3, number)}


def endless(shard):
    for number in itertools.count():
        yield np.full((100, 1000), number % 200, np.uint8)


Point = namedtuple("Point", "x y")


# --- what comes out ----------------------------------------------------------------------------


def test_nests_keep_their_build_and_values(device):
    batch = {
        "array": np.arange(6.0).reshape(2, 3),
        "tensors": [torch.arange(5), (torch.tensor(2.5), Point(torch.ones(2), "text"))],
        "none": None,
    }
    (moved,) = CudaDataLoader([batch], device)
    assert moved["none"] is None
    point = moved["tensors"][1][1]
    assert (type(point), point.y) == (Point, "text")
    leaves = [moved["array"], moved["tensors"][0], moved["tensors"][1][0], point.x]
    assert {leaf.device.type for leaf in leaves} == {device}
    assert [leaf.tolist() for leaf in leaves] == [
        [[0, 1, 2], [3, 4, 5]],
        [0, 1, 2, 3, 4],
        2.5,
        [1, 1],
    ]


def test_what_comes_out_shares_no_memory_with_what_went_in():
    array = np.zeros(5)
    (moved,) = CudaDataLoader([array], "cpu")
    array[:] = 1
    assert moved.tolist() == [0] * 5


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(24).reshape(4, 6)[:, ::2],
        lambda: torch.arange(24).reshape(4, 6).T,
        lambda: torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        lambda: torch.zeros(0, 3),
        lambda: torch.tensor(7),
        lambda: torch.ones(5, dtype=torch.bfloat16),
        lambda: torch.ones(3, dtype=torch.bool),
        lambda: torch.ones(3, dtype=torch.complex64),
        lambda: torch.ones(1).expand(4, 3),
        lambda: torch.eye(3).to_sparse(),
        lambda: np.arange(6)[::-1],
    ],
)
def test_every_kind_of_tensor_comes_through(make, device):
    source = make()
    (moved,) = CudaDataLoader([source], device)
    expected = torch.from_numpy(source.copy()) if isinstance(source, np.ndarray) else source
    assert (moved.dtype, moved.shape) == (expected.dtype, expected.shape)
    assert torch.equal(moved.cpu().to_dense(), expected.to_dense())
    if expected.layout is torch.strided and expected.dim() == 4:
        assert moved.stride() == expected.stride()


def test_an_enqueuer_is_a_loader(backend, device):
    own = GeneratorEnqueuer(images, workers=2, random_seed=7, **backend)
    with CudaDataLoader(own, device) as loader:
        for _ in range(2):
            labels = []
            for number, batch in enumerate(loader):
                assert (batch["image"] == number).all()
                labels.append(batch["label"].tolist())
            assert labels == [[number] * 3 for number in range(8)]


def test_a_dataloader_is_a_loader_and_is_passed_through(device):
    dataset = torch.utils.data.TensorDataset(torch.arange(10))
    inner = DataLoader(dataset, batch_size=4, shuffle=True)
    loader = CudaDataLoader(inner, device)
    assert (len(loader), loader.dataset, loader.sampler) == (3, dataset, inner.sampler)
    for _ in range(2):
        assert sorted(n for (batch,) in loader for n in batch.tolist()) == list(range(10))


def test_a_list_has_no_dataset():
    with pytest.raises(AttributeError, match="dataset"):
        _ = CudaDataLoader([1], "cpu").dataset


def test_a_dataloader_begins_a_new_epoch_after_a_break():
    loader = CudaDataLoader(DataLoader(torch.arange(10), batch_size=2), "cpu")
    assert next(iter(loader)).tolist() == [0, 1]
    assert [batch.tolist()[0] for batch in loader] == [0, 2, 4, 6, 8]


def test_an_enqueuer_goes_on_after_a_break_and_tells_its_position():
    def make():
        return CudaDataLoader(OrderedEnqueuer(range(9), np.array, random_seed=7), "cpu")

    loader = make()
    assert [int(x) for x in itertools.islice(loader, 3)] == [0, 1, 2]
    state = loader.state_dict()
    assert [int(x) for x in loader] == [3, 4, 5, 6, 7, 8]
    other = make()
    other.load_state_dict(state)
    assert [int(x) for x in other] == [3, 4, 5, 6, 7, 8]


def test_a_loader_of_tensors_is_a_loader(device):
    loader = CudaDataLoader(TorchLoader(GeneratorEnqueuer(images)), device)
    assert [int(batch["image"][0, 0]) for batch in loader] == list(range(8))


def test_dtype_is_that_of_floating_point_numbers_only(device):
    batch = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)
    ((floats, ints),) = CudaDataLoader([batch], device, dtype=torch.float16)
    assert (floats.dtype, ints.dtype) == (torch.float16, torch.int64)


def test_transform_works_on_the_device(device):
    def normalise(batch):
        assert batch.device.type == device
        return (batch.float() - 1) / 2

    (moved,) = CudaDataLoader([np.full(2, 5, np.uint8)], device, transform=normalise)
    assert moved.tolist() == [2, 2]


# --- errors ------------------------------------------------------------------------------------


def test_the_loaders_own_error_arrives(device):
    def bad():
        yield np.zeros(1)
        raise KeyError("no such file")

    batches = iter(CudaDataLoader(GeneratorEnqueuer(bad), device))
    next(batches)
    with pytest.raises(KeyError, match="no such file"):
        next(batches)


def test_an_error_of_the_transform_arrives(device):
    with pytest.raises(ZeroDivisionError):
        list(CudaDataLoader([np.zeros(1)], device, transform=lambda batch: 1 / 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"finds no GPU.*device='cpu'"):
        CudaDataLoader([1])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"queue_size": 0}, "queue_size"),
        ({"dtype": "float16"}, "dtype must be a torch.dtype"),
        ({"transform": 5}, "transform must be a function"),
    ],
)
def test_wrong_arguments_are_refused(options, says):
    with pytest.raises((TypeError, ValueError), match=says):
        CudaDataLoader([1], "cpu", **options)


def test_a_break_ends_thread_and_workers(backend, device):
    enqueuer = GeneratorEnqueuer(endless, **backend)
    for _ in CudaDataLoader(enqueuer, device):
        break
    assert enqueuer._is_idle()


# --- memory ------------------------------------------------------------------------------------


class Driver:
    """A driver that writes down what it is asked for."""

    def __init__(self, code=0):
        self.code = code
        self.registered = []
        self.pinned = set()
        self.made = []

    def register(self, address, size):
        assert address not in self.pinned
        if not self.code:
            self.pinned.add(address)
        self.registered.append(size)
        return self.code

    def unregister(self, address):
        self.pinned.remove(address)

    def is_pinned(self, tensor):
        return False

    def empty(self, size):
        self.made.append(size)
        return torch.empty(size, dtype=torch.uint8)


class Event:
    """An event that has not come until somebody waits for it."""

    def __init__(self, sources):
        self.sources = sources
        self.alive = None

    def query(self):
        return self.alive is not None

    def synchronize(self):
        self.alive = [source() is not None for source in self.sources]


class Device:
    """A device on which no copy is done before it must be."""

    def __init__(self, driver):
        self.device = torch.device("cpu")
        self.driver = driver
        self.pins = pinning.Pins(driver)
        self.sources = []
        self.events = []
        self.given = []
        self.followed = 0

    def copying(self):
        return contextlib.nullcontext()

    def follow(self):
        self.followed += 1

    def record(self):
        self.events.append(Event(self.sources))
        self.sources = []
        return self.events[-1]

    def hand_over(self, batch, event):
        self.given.append(event)


@pytest.fixture
def fake(monkeypatch):
    """Have loaders use a device that writes down what it is asked for."""
    fake = Device(Driver())
    monkeypatch.setattr(cuda, "_device", lambda device: fake)
    return fake


def test_blocks_are_registered_once_and_no_longer_than_they_are_mapped(fake, process):
    loader = CudaDataLoader(GeneratorEnqueuer(images, max_queue_size=2, **process))
    for _ in range(4):
        for number, batch in enumerate(loader):
            assert (batch["image"] == number).all()
    assert len(fake.driver.registered) < 16  # of 32 batches
    assert all(size >= 64_000 for size in fake.driver.registered)
    assert len(fake.driver.made) <= 6  # for the labels
    loader.stop()
    del batch, loader
    gc.collect()
    assert fake.driver.pinned == set()


def test_a_forked_process_unregisters_nothing(fake, monkeypatch):
    with open_block() as block:
        tensor = torch.frombuffer(block, dtype=torch.uint8)
        assert fake.pins.holds(tensor)
        monkeypatch.setattr(os, "getpid", lambda: 0)
    del tensor, block
    assert len(fake.driver.pinned) == 1


@contextlib.contextmanager
def open_block():
    fd = blocks.open_nameless(8192)
    try:
        yield blocks.Mapping(fd, 8192)
    finally:
        os.close(fd)


def test_if_a_block_cannot_be_registered_it_is_said_once_and_batches_are_staged(
    fake, process, caplog
):
    fake.driver.code = 2
    with CudaDataLoader(GeneratorEnqueuer(images, **process)) as loader:
        assert [int(batch["image"][0, 0]) for batch in loader] == list(range(8))
    assert len(fake.driver.registered) == 1
    assert [r.message for r in caplog.records if "could not be registered" in r.message]
    assert len(caplog.records) == 1
    assert fake.driver.made


def test_pinned_buffers_are_used_again(fake):
    loader = CudaDataLoader([np.full(1000, number) for number in range(50)])
    assert [int(batch[0]) for batch in loader] == list(range(50))
    assert len(fake.driver.made) <= 3


def test_a_buffer_fits_what_it_is_for(fake):
    sizes = [10, 100_000, 10, 1_000_000, 50, 100_000]
    loader = CudaDataLoader([np.full(size, size) for size in sizes])
    assert [(len(batch), int(batch.sum())) for batch in loader] == [(s, s * s) for s in sizes]
    assert len(fake.driver.made) >= 3


def test_the_hosts_memory_is_held_until_the_copy_is_done(fake, monkeypatch):
    # every tensor counts as pinned, so that it is copied from directly
    monkeypatch.setattr(fake.pins, "holds", lambda tensor: True)

    def sources():
        for number in range(6):
            array = np.full(1000, number)
            fake.sources.append(weakref.ref(array))
            yield array
            del array

    loader = CudaDataLoader(sources())
    assert [int(batch[0]) for batch in loader] == list(range(6))
    loader.stop()
    assert [event.alive for event in fake.events] == [[True]] * 6
    gc.collect()
    assert [source() for event in fake.events for source in event.sources] == [None] * 6


def test_the_loop_waits_for_the_event_of_each_batch(fake):
    list(CudaDataLoader([torch.ones(1)] * 4))
    assert fake.given == fake.events
    assert len(fake.given) == 4


def test_what_is_on_the_device_already_is_not_used_before_it_is_made(fake):
    fake.device = torch.device("meta")
    list(CudaDataLoader([torch.ones(2), torch.ones(2, device="meta"), torch.ones(2)]))
    assert fake.followed == 1


def test_the_benchmark_runs():
    program = Path(__file__).parents[2] / "benchmarks" / "to_gpu.py"
    done = subprocess.run(
        [sys.executable, program, "--device", "cpu", "--quick"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("GB/s") == 4


# --- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
class TestOnAGpu:
    def test_kernels_that_are_late_see_the_batch_that_they_were_queued_with(self, process):
        def batches(shard):
            for number in range(40):
                batch = empty((1000, 1000), np.float32)
                batch[:] = number
                yield batch

        sums = []
        for batch in CudaDataLoader(GeneratorEnqueuer(batches, **process)):
            torch.cuda._sleep(20_000_000)
            sums.append(batch.mean())
            del batch
        assert torch.stack(sums).tolist() == list(range(40))

    def test_batches_of_a_loader_that_pins_may_be_dropped_during_the_copy(self, process):
        moved = []
        for batch in TorchLoader(GeneratorEnqueuer(images, **process), pin_memory=True):
            assert batch["image"].is_pinned()
            assert batch["label"].is_pinned()
            torch.cuda._sleep(20_000_000)
            moved.append(batch["image"].to("cuda", non_blocking=True))
            del batch
        assert [sorted(set(image.flatten().tolist())) for image in moved] == [[n] for n in range(8)]

    def test_what_a_loader_makes_on_the_gpu_is_waited_for(self):
        def batches():
            for number in range(9):
                torch.cuda._sleep(20_000_000)
                yield torch.full((1000,), number, device="cuda")

        loader = CudaDataLoader(batches(), transform=lambda batch: batch + 1)
        assert [int(batch.sum()) for batch in loader] == [1000 * n for n in range(1, 10)]

    def test_another_stream_is_served(self):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for number, batch in enumerate(CudaDataLoader([torch.full((9,), n) for n in range(9)])):
                torch.cuda._sleep(5_000_000)
                assert int(batch[0]) == number

    def test_memory_on_the_gpu_does_not_grow_over_epochs(self):
        loader = CudaDataLoader([torch.ones(1000, 1000)] * 20)
        for _ in loader:
            pass
        before = torch.cuda.memory_reserved()
        for _ in range(5):
            for _ in loader:
                pass
        assert torch.cuda.memory_reserved() <= before + (32 << 20)
