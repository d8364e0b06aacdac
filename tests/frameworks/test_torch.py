"""torch tensors: equal, out of band, without a copy, and without torch where none is installed."""

import multiprocessing
import sys

import numpy as np
import pytest
from helpers import needs, run_program

from enqueuer import (
    GeneratorEnqueuer,
    ItemNotPicklable,
    OrderedEnqueuer,
    Processes,
    SourceNotPicklable,
    empty,
)
from enqueuer.transport import item_codec

torch = needs("torch")
torch.set_num_threads(1)  # its thread pool does not survive a fork

SIZE = 40_000
DTYPES = "uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 bool"
DTYPES = [*DTYPES.split(), "float8_e4m3fn", "float8_e5m2"]


def filled(dtype, size=SIZE):
    return (torch.arange(size) % 2).to(getattr(torch, dtype))


def tensors():
    for dtype in DTYPES:
        yield filled(dtype, 3)
        yield filled(dtype)
    base = filled("float32").reshape(2, 4, 50, 100)
    yield base.permute(3, 1, 0, 2)
    yield base.contiguous(memory_format=torch.channels_last)
    yield base[:, ::2, 10:, ::3]
    yield filled("bfloat16").reshape(200, 200).T
    yield torch.tensor(5.0).expand(300, 200)
    yield torch.tensor(5)
    yield torch.zeros(0, 3)
    yield torch.zeros(3, requires_grad=True)
    yield torch.nn.Parameter(torch.ones(SIZE))
    yield torch.eye(5).to_sparse()
    yield torch.ones(3, dtype=torch.complex64).conj()
    tensor = torch.ones(3)
    tensor.note = "with an attribute"
    yield tensor


def source(shard):
    for tensor in tensors():
        yield {"x": tensor, "nest": [tensor, 1]}


def assert_same(got, sent):
    assert type(got) is type(sent)
    assert (got.dtype, got.shape, got.layout) == (sent.dtype, sent.shape, sent.layout)
    assert got.requires_grad == sent.requires_grad
    assert vars(got) == vars(sent)
    if sent.layout is torch.strided and sent.is_contiguous():
        assert got.stride() == sent.stride()
    if sent.dtype.itemsize == 1 and sent.dtype.is_floating_point:
        got, sent = got.float(), sent.float()
    assert (got.to_dense() == sent.to_dense()).all()


def test_every_tensor_comes_through_equal(backend):
    with GeneratorEnqueuer(source, max_queue_size=3, **backend) as enqueuer:
        kept = list(zip(enqueuer, source(None), strict=True))
    for got, sent in kept:
        assert_same(got["x"], sent["x"])
        assert got["nest"][0] is got["x"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: filled("bfloat16"),
        lambda: filled("float32").reshape(200, 200).T,
        lambda: filled("float32").reshape(2, 200, 100)[:, ::2],
        lambda: filled("float32").reshape(2, 4, 50, 100).to(memory_format=torch.channels_last),
    ],
)
def test_large_tensors_are_beside_the_pickle_and_not_copied_again(make):
    tensor = make()
    data, (buffer,) = item_codec.Encoder().encode(tensor)
    assert len(data) < 1000
    place = np.empty(buffer.nbytes, np.uint8)
    if isinstance(buffer, np.ndarray):
        place.view(buffer.dtype).reshape(buffer.shape)[...] = buffer
    else:
        place[:] = np.frombuffer(buffer, np.uint8)
    got = item_codec.decode(data, [place.data])
    assert_same(got, tensor)
    assert got.data_ptr() == place.ctypes.data


def test_a_tensor_of_read_only_memory_is_a_copy_that_can_be_written_to(no_warnings):
    data, (buffer,) = item_codec.Encoder().encode(filled("bfloat16").reshape(200, 200).T)
    memory = bytes(memoryview(buffer).cast("B"))
    got = item_codec.decode(data, [memoryview(memory)])
    got += 1
    assert memory == bytes(memoryview(buffer).cast("B"))
    assert_same(got, filled("bfloat16").reshape(200, 200).T + 1)


def in_place(shard):
    for number in range(10):
        array = empty((100, 1000), "float32")
        tensor = torch.from_numpy(array)
        tensor.fill_(number)
        yield tensor


def test_a_tensor_of_an_array_in_place_is_sent_as_it_is(process, monkeypatch):
    with GeneratorEnqueuer(in_place, **process) as enqueuer:
        kept = list(enqueuer)
    for number, tensor in enumerate(kept):
        assert (tensor == number).all()
        tensor += 1


def test_a_tensor_is_writable_and_lives_as_long_as_anybody_refers_to_it(process):
    with GeneratorEnqueuer(source, max_queue_size=1, **process) as enqueuer:
        kept = []
        for batch in enqueuer:
            if batch["x"].numel() == SIZE and batch["x"].dtype == torch.float32:
                kept.append(batch["x"].detach().reshape(-1)[SIZE // 2 :])
    copies = [tensor.clone() for tensor in kept]
    for tensor in kept:
        tensor += 1
    assert all((a == b + 1).all() for a, b in zip(kept, copies, strict=True))


def test_batches_without_tensors_need_no_torch(tmp_path):
    text = """
    import sys
    import numpy as np
    from enqueuer import GeneratorEnqueuer, Processes

    def source(shard):
        yield np.zeros(100_000)
        yield "torch" in sys.modules

    for method in ("fork", "spawn"):
        with GeneratorEnqueuer(source, backend=Processes(start_method=method)) as enqueuer:
            assert list(enqueuer)[1] is False
    assert "torch" not in sys.modules
    """
    assert run_program(tmp_path, text) == (0, "", "")


def test_torch_that_the_generator_imports_is_seeded_by_shard():
    def draws(shard):  # in here, as a worker that imports this file has torch
        yield "torch" in sys.modules
        import torch

        for _ in range(2):
            yield float(torch.rand(()))

    found = []
    for workers in (1, 2):
        options = dict(backend="process", workers=workers, shards=4, random_seed=7)
        with GeneratorEnqueuer(draws, **options) as enqueuer:
            found.append([batch for _ in range(2) for batch in enqueuer])
    assert found[0] == found[1]
    assert [there for there in found[0] if isinstance(there, bool)] == [False] * 4 + [True] * 4
    numbers = [number for number in found[0] if isinstance(number, float)]
    assert len(set(numbers)) == len(numbers) == 16


def test_torch_that_a_task_imports_is_seeded_by_element():
    def drawn(element):
        import torch

        return float(torch.rand(()))

    options = dict(backend="process", random_seed=7)
    first = [list(OrderedEnqueuer(range(4), drawn, workers=n, **options)) for n in (1, 2)]
    assert first[0] == first[1]
    assert len(set(first[0])) == 4


# --- tensors of a source ---


SHARES = pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())


def held(method, tensors, work):
    """Return what a worker makes of tensors that its source holds."""

    def source(shard):
        yield work(tensors)

    with GeneratorEnqueuer(source, backend=Processes(start_method=method)) as enqueuer:
        return next(iter(enqueuer))


@SHARES
def test_a_shared_tensor_of_a_source_is_shared_with_workers(method):
    whole = torch.zeros(100).share_memory_()
    frozen = torch.nn.Parameter(torch.zeros(3)).share_memory_()

    def write(tensors):
        whole, part, frozen = tensors
        part += 1
        frozen.data += 1
        return whole.sum().item(), type(frozen) is torch.nn.Parameter

    assert held(method, [whole, whole[90:], frozen], write) == (10, True)
    assert whole.tolist() == [0] * 90 + [1] * 10
    assert frozen.tolist() == [1] * 3


def unusual():
    yield torch.eye(3).to_sparse()
    yield torch.eye(3).to_sparse_csr()
    yield torch.ones(3, dtype=torch.complex64).share_memory_().conj()
    yield torch.ones(3, requires_grad=True)
    yield torch.ones(0)
    yield torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    yield torch.ones(40_000, dtype=torch.bfloat16)


@SHARES
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_any_tensor_of_a_source_reaches_the_workers(method):
    def write(tensors):
        with torch.no_grad():
            for tensor in tensors:
                tensor *= 2
        return tensors

    for got, tensor in zip(held(method, list(unusual()), write), unusual(), strict=True):
        assert (got.dtype, got.shape, got.layout) == (tensor.dtype, tensor.shape, tensor.layout)
        assert (got.to_dense() == 2 * tensor.to_dense()).all()


@SHARES
def test_a_large_tensor_of_a_source_lies_in_memory_that_the_workers_share(method):
    if method == "fork":
        pytest.skip("forked workers inherit it")

    def is_mapped(tensors):
        address = tensors[0].data_ptr()
        with open("/proc/self/maps") as file:
            for line in file:
                first, last = (int(number, 16) for number in line.split()[0].split("-"))
                if first <= address < last:
                    return "memfd" in line
        return None

    assert held(method, [torch.ones(1_000_000)], is_mapped) is True


class Marked(torch.Tensor):
    """A tensor of another class."""


def computed():
    return torch.ones(3, requires_grad=True) * 2


class Local:
    def __init__(self):
        self.tensor = computed()


COMPUTED = {
    "alone": computed,
    "nested": lambda: {"x": [1, (computed(),)]},
    "of a subclass": lambda: computed().as_subclass(Marked),
    "in an object": Local,
    "beside a lambda": lambda: (lambda: 0, computed()),
}


@pytest.mark.parametrize("make", COMPUTED.values(), ids=COMPUTED)
def test_a_tensor_that_autograd_has_computed_is_refused(make, process):
    def items(shard):
        yield make()

    with GeneratorEnqueuer(items, **process) as enqueuer:
        with pytest.raises(ItemNotPicklable, match=r"non-leaf tensor.* \w+\.detach\(\)"):
            next(iter(enqueuer))
    with OrderedEnqueuer(range(1), lambda _: make(), **process) as enqueuer:
        with pytest.raises(ItemNotPicklable, match=r"\.detach\(\)"):
            next(iter(enqueuer))


@pytest.mark.parametrize("make", COMPUTED.values(), ids=COMPUTED)
def test_an_element_that_autograd_has_computed_is_refused(make, process):
    with OrderedEnqueuer(iter([make()]), type, **process) as enqueuer:
        with pytest.raises(ItemNotPicklable, match=r"^element.*\.detach\(\)"):
            next(iter(enqueuer))


@pytest.mark.parametrize("make", COMPUTED.values(), ids=COMPUTED)
def test_a_source_with_a_tensor_that_autograd_has_computed_is_refused(make, process):
    if process["backend"] == Processes(start_method="fork"):
        pytest.skip("forked workers inherit it")
    with pytest.raises(SourceNotPicklable, match=r"\.detach\(\)"):
        OrderedEnqueuer([make()], **process).start()


def test_threads_pass_on_a_tensor_with_its_graph():
    with OrderedEnqueuer(range(1), lambda _: computed(), backend="thread") as enqueuer:
        (tensor,) = enqueuer
    assert tensor.grad_fn is not None


def deterministic():
    yield torch.get_deterministic_debug_mode()


@pytest.mark.parametrize("mode", [1, 2])
def test_workers_only_warn_of_what_is_not_deterministic_if_the_program_does(mode):
    torch.use_deterministic_algorithms(True, warn_only=mode == 1)
    try:
        with GeneratorEnqueuer(deterministic, backend=Processes("forkserver")) as enqueuer:
            assert list(enqueuer) == [mode]
    finally:
        torch.use_deterministic_algorithms(False)
