"""Batches on their way to a GPU: equal, in time, and no memory used too early or too late.

Without a GPU the same code runs with device="cpu", and with a device that writes down what it is
asked for. What only a GPU can show is marked `cuda`.
"""

import contextlib
import itertools
import os
import re
import runpy
import subprocess
import sys
import threading
import types
import weakref
from collections import OrderedDict, UserDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
from helpers import collect_until, needs

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, empty
from enqueuer.transport.blocks import Mapping
from enqueuer.transport.memory import open_nameless

torch = needs("torch")
torch.set_num_threads(1)  # its thread pool does not survive a fork
DataLoader = torch.utils.data.DataLoader

from enqueuer.adapters import pinning  # noqa: E402  (torch may be missing)
from enqueuer.adapters.cuda import (  # noqa: E402
    CudaDataLoader,
    CudaDevice,
    PlainDevice,
    Transfer,
    is_plain,
    plain_parts,
)
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


class Encoding(UserDict):
    """As that of Hugging Face's tokenizers."""


class Graph:
    """What moves itself."""

    def __init__(self, x, moved_to=None):
        self.x = x
        self.moved_to = moved_to

    def to(self, device):
        return Graph(self.x, device)


class StreamedGraph(Graph):
    """What moves itself and knows of streams, as a graph of PyTorch Geometric does."""

    def to(self, device):
        return StreamedGraph(self.x, device)

    def record_stream(self, stream):
        raise NotImplementedError


class Image(torch.Tensor):
    """As those of torchvision."""


@pytest.mark.parametrize("kind", [dict, OrderedDict, Encoding])
def test_every_mapping_is_moved(kind, device):
    (moved,) = CudaDataLoader([kind(x=torch.ones(2), name="a")], device)
    assert type(moved) is kind
    assert (moved["x"].device.type, moved["name"]) == (device, "a")


@pytest.mark.parametrize("kind", [Graph, StreamedGraph])
def test_an_object_that_moves_itself_is_moved(kind, fake):
    """Ahead of the loop only if it can say which memory on the GPU it has."""
    graph = kind(torch.ones(2))
    threads = []
    graph.to = lambda device: (threads.append(threading.get_ident()), kind(graph.x, device))[1]
    ((moved, number),) = CudaDataLoader([(graph, 5)])
    assert (type(moved), moved.moved_to, number) == (kind, fake.device, 5)
    is_ahead = kind is StreamedGraph
    assert threads == (fake.threads if is_ahead else [threading.get_ident()])


def test_a_transform_waits_for_what_the_loop_has_moved(fake):
    batches = [Graph(torch.ones(2)), torch.ones(2)]
    list(CudaDataLoader(batches, transform=lambda batch: batch))
    assert fake.followed == 1


def test_an_object_that_moves_itself_in_place_is_handed_on():
    class InPlace:
        def to(self, device):
            self.device = device

    (moved,) = CudaDataLoader([InPlace()], "cpu")
    assert moved.device == torch.device("cpu")


def test_a_tensor_of_another_class_keeps_it(device):
    (moved,) = CudaDataLoader([torch.ones(3).as_subclass(Image)], device)
    assert (type(moved), moved.device.type) == (Image, device)


def test_a_packed_sequence_is_moved_as_a_whole():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    (moved,) = CudaDataLoader([packed], "meta")
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


def nested(layout):
    return torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=layout)


@pytest.mark.filterwarnings("ignore")  # torch calls them a prototype
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_moved(layout, device):
    (moved,) = CudaDataLoader([nested(layout)], device)
    assert moved.is_nested
    assert moved.device.type == device
    assert [part.tolist() for part in moved.unbind()] == [[1, 1], [0, 0, 0]]


@pytest.mark.filterwarnings("ignore")  # torch calls some of these a prototype
@pytest.mark.parametrize(
    ("make", "of_it"),
    [
        (lambda: torch.eye(3), lambda t: [t]),
        (lambda: torch.eye(3).to_sparse(), lambda t: [t._indices(), t._values()]),
        (
            lambda: torch.eye(3).to_sparse_csr(),
            lambda t: [t.crow_indices(), t.col_indices(), t.values()],
        ),
        (
            lambda: torch.eye(3).to_sparse_csc(),
            lambda t: [t.ccol_indices(), t.row_indices(), t.values()],
        ),
        (lambda: nested(torch.strided), lambda t: [t]),
        (lambda: nested(torch.jagged), lambda t: [t.values(), t.offsets()]),
        (
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
            lambda t: [t],
        ),
    ],
)
def test_the_memory_of_every_tensor_is_found(make, of_it):
    """CUDA can record the stream only of strided tensors."""
    tensor = make()
    parts = list(plain_parts(tensor))
    assert all(type(part) is torch.Tensor and is_plain(part) for part in parts)
    assert {part.data_ptr() for part in of_it(tensor)} <= {part.data_ptr() for part in parts}


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


def test_rank_and_world_size_are_for_an_enqueuer():
    own = OrderedEnqueuer(range(5), np.array)
    assert [int(x) for x in CudaDataLoader(own, "cpu", rank=1, world_size=2)] == [1, 3]
    with pytest.raises(TypeError, match=r"for an enqueuer, and the loader is \[1\]"):
        CudaDataLoader([1], "cpu", rank=1, world_size=2)


def test_a_list_has_no_dataset():
    with pytest.raises(AttributeError, match="dataset"):
        _ = CudaDataLoader([1], "cpu").dataset


def test_a_default_device_of_torch_does_not_change_where_batches_are_staged():
    with torch.device("meta"):
        (moved,) = CudaDataLoader([np.arange(3)], "cpu")
    assert moved.tolist() == [0, 1, 2]


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


# --- memory ------------------------------------------------------------------------------------


class Driver:
    """A driver that writes down what it is asked for."""

    def __init__(self, code=0):
        self.code = code
        self.registered = []
        self.pinned = set()
        self.refused = set()
        self.made = []

    def register(self, address, size):
        assert address not in self.pinned
        (self.refused if self.code else self.pinned).add(address)
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

    def __init__(self, device, sources=()):
        self.device = device
        self.sources = sources
        self.alive = None
        self.thread = threading.get_ident()

    def query(self):
        return self.alive is not None

    def synchronize(self):
        self.alive = [source() is not None for source in self.sources]
        self.device.log.append(("synchronize", self))


class Device:
    """A device on which no copy, and no work of the loop, is done before it must be.

    Attributes:
        log: What it was asked for, in order, as (what, with what).
        threads: The threads that copy.
    """

    overlaps = True

    def __init__(self, driver):
        self.device = torch.device("cpu")
        self.driver = driver
        self.pins = pinning.Pins(driver)
        self.sources = []
        self.events = []
        self.given = []
        self.followed = 0
        self.log = []
        self.threads = []
        self.stream = threading.local()

    @contextlib.contextmanager
    def running(self):
        self.threads.append(threading.get_ident())
        self.log.append(("running", threading.get_ident()))
        try:
            yield
        finally:
            self.log.append(("ended", threading.get_ident()))

    @contextlib.contextmanager
    def copying(self):
        self.stream.name = "copying"
        try:
            yield "before"
        finally:
            self.stream.name = "own"

    def follow(self, stream):
        assert stream == "before"
        self.followed += 1

    def record(self):
        assert self.stream.name == "copying"
        self.events.append(Event(self, self.sources))
        self.sources = []
        return self.events[-1]

    def reached(self):
        event = Event(self)
        self.log.append(("reached", event))
        return event

    def receive(self, batch, event):
        self.given.append(event)


@pytest.fixture
def fake(monkeypatch):
    """Have loaders use a device that writes down what it is asked for."""
    fake = Device(Driver())
    monkeypatch.setattr("enqueuer.adapters.cuda.device_of", lambda device: fake)
    return fake


def test_blocks_are_registered_once_and_no_longer_than_they_are_mapped(fake, process):
    loader = CudaDataLoader(GeneratorEnqueuer(images, max_queue_size=2, **process))
    for _ in range(4):
        for number, batch in enumerate(loader):
            assert (batch["image"] == number).all()
    assert len(fake.driver.registered) < 32  # batches; what is idle for long is given up
    assert all(size >= 64_000 for size in fake.driver.registered)
    assert len(fake.driver.made) <= 6  # for the labels
    loader.stop()
    del batch, loader
    collect_until(lambda: fake.driver.pinned == set())


def test_a_forked_process_unregisters_nothing(fake, monkeypatch):
    with open_block() as block:
        tensor = torch.frombuffer(block, dtype=torch.uint8)
        assert fake.pins.holds(tensor)
        monkeypatch.setattr(os, "getpid", lambda: 0)
    del tensor, block
    assert len(fake.driver.pinned) == 1


@contextlib.contextmanager
def open_block():
    fd = open_nameless(8192)
    try:
        yield Mapping(fd, 8192)
    finally:
        os.close(fd)


def test_if_a_block_cannot_be_registered_it_is_said_once_and_batches_are_staged(
    fake, process, caplog
):
    fake.driver.code = 2
    with CudaDataLoader(GeneratorEnqueuer(images, **process)) as loader:
        assert [int(batch["image"][0, 0]) for batch in loader] == list(range(8))
    assert 0 < len(fake.driver.registered) == len(fake.driver.refused)  # each block once
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
    kept = [source for event in fake.events for source in event.sources]
    collect_until(lambda: [source() for source in kept] == [None] * 6)


def test_the_loop_waits_for_the_event_of_each_batch(fake):
    list(CudaDataLoader([torch.ones(1)] * 4))
    assert fake.given == fake.events
    assert len(fake.given) == 4


def test_what_is_on_the_device_already_is_not_used_before_it_is_made(fake):
    fake.device = torch.device("meta")
    list(CudaDataLoader([torch.ones(2), torch.ones(2, device="meta"), torch.ones(2)]))
    assert fake.followed == 1


def test_the_thread_is_prepared_before_the_loader_is_asked(fake):
    """Else what the loader calls may make itself known to the first GPU."""

    def batches():
        fake.log.append(("item", threading.get_ident()))
        yield torch.ones(1)

    list(CudaDataLoader(batches()))
    thread = fake.threads[0]
    assert thread != threading.get_ident()
    assert [entry for entry in fake.log if entry[0] in ("running", "item", "ended")] == [
        ("running", thread),
        ("item", thread),
        ("ended", thread),
    ]


def test_a_copy_waits_for_the_loop_to_be_done_with_the_batch_before_the_queue(fake):
    """A loop that only queues kernels would fill the GPU."""
    loader = CudaDataLoader([torch.ones(1)] * 10, queue_size=2)
    assert len(list(loader)) == 10
    reached = [event for what, event in fake.log if what == "reached"]
    waited = [event for what, event in fake.log if what == "synchronize" and event in reached]
    # Event n is that of batch n - 1; batch 9 waits for batch 5, if the loop's thread has said so.
    assert waited == reached[: len(waited)]
    assert len(waited) in (6, 7)
    assert [event.alive is not None for event in reached] == [True] * len(waited) + [False] * (
        10 - len(waited)
    )


def test_batches_that_were_left_out_count_in_no_later_epoch(fake):
    loader = CudaDataLoader([torch.ones(1)] * 10, queue_size=2)
    for _ in range(3):
        next(iter(loader))
    log = len(fake.log)
    assert len(list(loader)) == 10
    reached = [event for what, event in fake.log[log:] if what == "reached"]
    assert sum(event.alive is not None for event in reached) in (6, 7)


def test_the_loop_calls_transform_on_the_copying_stream(fake):
    """So random numbers are drawn in the order of the loop, and are the same each time."""
    loop, called = threading.get_ident(), []

    def of_loop():
        # The thread records those of the next batches meanwhile.
        return [event for event in fake.events if event.thread == loop]

    def transform(batch):
        called.append((threading.get_ident(), fake.stream.name, int(batch), len(of_loop())))
        return batch

    for number, batch in enumerate(CudaDataLoader(torch.arange(5), transform=transform)):
        assert int(batch) == number
        # what the loop waits for was recorded after the transform
        assert called == [(loop, "copying", number, number)]
        called.clear()
        assert fake.given[-1] is of_loop()[number]
        assert fake.stream.name == "own"


def test_a_transform_that_fails_costs_its_batch_alone():
    def transform(batch):
        if batch == 1:
            raise ZeroDivisionError
        return batch

    loader = CudaDataLoader(OrderedEnqueuer(range(6), np.array), "cpu", transform=transform)
    batches = iter(loader)
    assert next(batches) == 0
    with pytest.raises(ZeroDivisionError):
        next(batches)
    assert [int(batch) for batch in loader] == [2, 3, 4, 5]


def test_one_block_that_is_refused_costs_the_others_nothing(fake):
    with open_block() as first, open_block() as second:
        one, two = (torch.frombuffer(block, dtype=torch.uint8) for block in (first, second))
        fake.driver.code = 2
        assert not fake.pins.holds(one)
        fake.driver.code = 0
        assert not fake.pins.holds(one)
        assert fake.pins.holds(two)
        assert fake.pins.count == 1


def test_a_block_that_met_a_capture_is_registered_later(fake, caplog):
    with open_block() as block:
        tensor = torch.frombuffer(block, dtype=torch.uint8)
        fake.driver.code = 900  # cudaErrorStreamCaptureUnsupported
        assert not fake.pins.holds(tensor)
        fake.driver.code = 0
        assert fake.pins.holds(tensor)
    assert caplog.records == []


def test_what_is_called_beside_captures_is_not_of_them(monkeypatch):
    modes = [0]  # what the driver has for this thread, which begins as "global"

    def exchange(pointer):
        modes.append(pointer._obj.value)
        pointer._obj.value = modes[-2]

    monkeypatch.setattr(pinning, "capture_mode_exchanger", lambda: exchange)
    with pinning.beside_captures():
        assert modes == [0, 2]  # relaxed
    assert modes == [0, 2, 0]


def test_without_a_gpu_no_capture_mode_is_set():
    with pinning.beside_captures():
        pass


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_staging_takes_no_other_cpus():
    """The workers need them."""
    tensor, started, copies = torch.arange(1 << 20), [], []

    def stage():
        pool = pinning.StagingPool(Driver())
        before = set(os.listdir("/proc/self/task"))
        copy, _ = pool.copy_of(tensor)
        started.append(set(os.listdir("/proc/self/task")) - before)
        copies.append(copy)

    torch.set_num_threads(2)
    try:
        thread = threading.Thread(target=stage)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(1)
    assert started == [set()]
    assert torch.equal(copies[0], tensor)


class Copies(torch.utils._python_dispatch.TorchDispatchMode):
    """Writes down whether copies were asked not to wait; there is a GPU, in its stead "meta"."""

    def __init__(self):
        self.not_waited_for = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            self.not_waited_for.append(kwargs.get("non_blocking", False))
            return torch.empty(args[0].shape)
        if func is torch.ops.aten.copy_.default:
            self.not_waited_for.append(len(args) > 2 and args[2])
        return func(*args, **kwargs)


@pytest.mark.parametrize("source", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_without_streams_each_copy_is_waited_for(source, kind):
    """MPS and XPU, or a GPU's batches that go to the CPU: there is no event that says when."""
    transfer = Transfer(PlainDevice(torch.device(kind)), None, None, 4)
    with Copies() as copies:
        transfer(torch.ones(3, device=source))
    assert copies.not_waited_for == ([] if source == kind == "meta" else [False])


class Stream:
    """A stream that writes down what it is asked for."""

    def __init__(self, log, name):
        self.log = log
        self.name = name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for an event of {event.stream}")

    def record_event(self, event):
        event.stream = self.name
        return event


class BlockingEvent:
    def __init__(self, blocking=False):
        assert blocking, "a thread that waits for it would keep a CPU busy"


@pytest.fixture
def log(monkeypatch):
    """Have torch.cuda, and the driver, write down what they are asked for."""
    log = []

    @contextlib.contextmanager
    def entered(what):
        log.append(f"enter {what}")
        yield
        log.append(f"leave {what}")

    def exchange(pointer):
        log.append(f"capture mode {pointer._obj.value}")
        pointer._obj.value = 0

    of_torch = {
        "Stream": lambda device: Stream(log, "copying"),
        "Event": BlockingEvent,
        "current_stream": lambda device: Stream(log, "loop"),
        "set_device": lambda device: log.append(f"set {device}"),
        "device": entered,
        "stream": lambda stream: entered(stream.name),
    }
    for name, replacement in of_torch.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(pinning, "capture_mode_exchanger", lambda: exchange)
    return log


def test_a_thread_is_on_its_own_gpu_and_does_not_spoil_captures(log):
    with CudaDevice(torch.device("cuda", 1)).running():
        log.append("copies")
    assert log == ["set cuda:1", "capture mode 2", "copies", "capture mode 0"]


def test_a_stream_is_left_before_its_gpu_is(log):
    """Leaving a stream makes the GPU of the one before current, and so takes memory there."""
    device = CudaDevice(torch.device("cuda", 1))
    with device.copying() as before:
        device.follow(before)
    assert log == [
        "enter cuda:1",
        "enter copying",
        "copying waits for loop",
        "leave copying",
        "leave cuda:1",
    ]


def test_the_loops_stream_waits_for_a_batch_and_is_recorded_for_all_of_it(log):
    class Recorded(StreamedGraph):
        def record_stream(self, stream):
            log.append(f"{self.x} is used by {stream.name}")

    device = CudaDevice(torch.device("cuda", 1))
    assert (device.record().stream, device.reached().stream) == ("copying", "loop")
    batch = [Recorded("a"), {"b": Encoding(c=Recorded("c"))}, torch.eye(2).to_sparse(), "text"]
    device.receive(batch, device.record())
    assert log == [
        "loop waits for an event of copying",
        "a is used by loop",
        "c is used by loop",
    ]


def test_a_block_is_unregistered_on_its_gpu_and_beside_captures(log, monkeypatch):
    class Runtime:
        def cudaHostRegister(self, address, size, flags):
            log.append("register")
            return 0

        def cudaHostUnregister(self, address):
            log.append("unregister")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    driver = pinning.Cuda()
    driver.register(4096, 10)
    driver.unregister(4096)
    assert log == [
        "register",
        "enter 1",
        "capture mode 2",
        "unregister",
        "capture mode 0",
        "leave 1",
    ]


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
    assert done.stdout.count("GB/s") == 5
    assert re.search(r"bare +[\d.]+ GB/s +100 %", done.stdout)


def test_the_clock_of_the_benchmark_starts_when_all_blocks_are_registered(monkeypatch):
    """Before that it measures how long registering takes, and no 95 % of a bare copy are seen."""
    to_gpu = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "to_gpu.py"))
    taken = itertools.count()
    pins = types.SimpleNamespace(count=0)
    monkeypatch.setitem(to_gpu["warm_up"].__globals__, "PINS", pins)

    def batches():
        for number in taken:
            pins.count = min(number, 40)
            yield torch.ones(1)

    to_gpu["warm_up"](batches())
    assert next(taken) == 41 + to_gpu["QUIET"]


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
