"""The adapter for JAX: batches on its devices, ahead of the loop."""

import collections
import dataclasses
import inspect
import itertools
import socket
import subprocess
import sys

import numpy as np
import pytest
from helpers import LIMIT, needs, run_program, wait_until

jax = needs("jax")

from enqueuer import GeneratorEnqueuer  # noqa: E402
from enqueuer.adapters.jax import JaxLoader  # noqa: E402
from enqueuer.enqueuers.enqueuer import core_of  # noqa: E402

DEVICE = jax.devices("cpu")[0]
Pair = collections.namedtuple("Pair", "x y")


# JAX warns of every fork once it has started its threads; forkserver is what processes have here
@pytest.fixture(params=["thread", "process"])
def backend(request):
    return request.param


@dataclasses.dataclass
class Point:
    x: object
    name: str


def numbered(shard):
    """Yield large arrays without an end, each full of its number."""
    for number in itertools.count():
        yield np.full((256, 1024), number, "float32")


def linear(shard):
    """Yield (x, y) of a line with some noise."""
    for _ in shard.split(range(60)):
        x = shard.rng.random((32, 3))
        yield {"x": x, "y": x @ [1.0, -2.0, 3.0] + 0.01 * shard.rng.normal(size=32)}


def is_on_device(array):
    return isinstance(array, jax.Array) and array.devices() == {DEVICE}


# --- what becomes of a batch -------------------------------------------------------------------


def test_arrays_go_to_the_device(backend):
    def batches(shard):
        yield {"x": np.ones((2, 3), "float32"), "y": [np.arange(3), np.float32(5)]}

    (batch,) = JaxLoader(GeneratorEnqueuer(batches, backend=backend))
    assert all(map(is_on_device, jax.tree_util.tree_leaves(batch)))
    assert batch["x"].shape == (2, 3)
    assert batch["y"][0].tolist() == [0, 1, 2]
    assert batch["y"][1] == 5


def test_a_nest_keeps_its_build():
    batch = Pair(Point(np.ones(2), "one"), (None, collections.OrderedDict(k=np.zeros(1))))
    (got,) = JaxLoader([batch])
    assert type(got) is Pair
    assert type(got.x) is Point
    assert is_on_device(got.x.x)
    assert got.y[0] is None
    assert type(got.y[1]) is collections.OrderedDict
    assert is_on_device(got.y[1]["k"])


def test_what_is_no_array_to_jax_is_left_as_it_is():
    batch = {
        "words": np.array(["a", "b"]),
        "objects": np.array([None, {}], object),
        "days": np.array(["2024-02-29"], "datetime64[D]"),
        "long": np.zeros(2, np.longdouble),
        "name": "a",
        "epoch": 3,
        "rate": 0.5,
    }
    (got,) = JaxLoader([batch])
    assert all(got[key] is value for key, value in batch.items())


def test_64_bits_become_32_unless_jax_is_set_to_64():
    batch = [np.arange(3), np.ones(3), np.ones(3, "uint8")]
    (got,) = JaxLoader([batch])
    assert [str(array.dtype) for array in got] == ["int32", "float32", "uint8"]
    jax.config.update("jax_enable_x64", True)
    try:
        (got,) = JaxLoader([batch])
    finally:
        jax.config.update("jax_enable_x64", False)
    assert [str(array.dtype) for array in got] == ["int64", "float64", "uint8"]


def test_arrays_that_are_jax_arrays_already_stay():
    batch = jax.numpy.arange(5)
    (got,) = JaxLoader([batch])
    assert got.tolist() == [0, 1, 2, 3, 4]


ONE = jax.sharding.SingleDeviceSharding(DEVICE)


@pytest.mark.parametrize(
    "sharding",
    [
        DEVICE,
        ONE,
        {"x": ONE, "name": None, "y": DEVICE},
        {"x": [ONE, DEVICE], "name": ONE, "y": ONE},
    ],
)
def test_the_sharding_may_be_a_device_or_a_prefix_of_the_batch(sharding):
    batch = {"x": [np.ones(3), np.ones(4)], "name": "a", "y": np.ones(2)}
    (got,) = JaxLoader([batch], sharding)
    assert all(array.committed and is_on_device(array) for array in (*got["x"], got["y"]))
    assert got["name"] == "a"


def test_a_sharding_that_is_no_prefix_is_an_error():
    loader = JaxLoader([{"x": np.ones(3)}], {"y": DEVICE})
    with pytest.raises(ValueError, match="prefix"):
        list(loader)


# --- ahead -------------------------------------------------------------------------------------


def test_queue_size_batches_are_on_the_device_ahead():
    made = []

    def noted():
        for number in range(20):
            made.append(number)
            yield np.full(3, number)

    loader = JaxLoader(noted(), queue_size=4)
    batches = iter(loader)
    assert next(batches)[0] == 0
    # The loop's, those that wait and the thread's; two at once leave the queue with the loop.
    wait_until(lambda: len(made) >= 1 + 4)
    assert len(made) <= 1 + 4 + 1
    assert [int(batch[0]) for batch in batches] == list(range(1, 20))


# --- shared memory -----------------------------------------------------------------------------


def test_an_array_that_is_kept_never_changes():
    loader = JaxLoader(GeneratorEnqueuer(numbered, backend="process", max_queue_size=2))
    batches = iter(loader)
    kept = [next(batches) for _ in range(20)]
    for _ in range(60):  # the worker fills its blocks again and again
        next(batches)
    assert [set(np.unique(array)) for array in kept] == [{number} for number in range(20)]
    loader.stop()
    assert [float(array.mean()) for array in kept] == list(range(20))


def test_work_that_is_dispatched_sees_the_batch_it_was_given():
    @jax.jit
    def slow_sum(array):
        return jax.lax.fori_loop(0, 50, lambda _, value: value * 0.5 + array * 0.5, array).sum()

    loader = JaxLoader(GeneratorEnqueuer(numbered, backend="process", max_queue_size=1))
    sums = [slow_sum(batch) for batch in itertools.islice(loader, 40)]  # not waited for
    assert [float(total) for total in sums] == [256 * 1024 * number for number in range(40)]
    loader.stop()


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_donated_array_does_not_write_into_the_source():
    double = jax.jit(lambda array: array * 2, donate_argnums=0)
    source = [np.full((256, 1024), number, "float32") for number in range(3)]
    sums = [float(double(batch).mean()) for batch in JaxLoader(source)]
    assert sums == [0, 2, 4]
    assert [array.mean() for array in source] == [0, 1, 2]

    enqueuer = GeneratorEnqueuer(numbered, backend="process", max_queue_size=2)
    loader = JaxLoader(enqueuer)
    assert [float(double(batch).mean()) for batch in itertools.islice(loader, 30)] == [
        2 * number for number in range(30)
    ]
    loader.stop()


def test_memory_of_arrays_that_are_gone_is_used_again():
    def blocks():
        with open("/proc/self/maps") as maps:
            return sum("enqueuer" in line or "memfd" in line for line in maps)

    loader = JaxLoader(GeneratorEnqueuer(numbered, backend="process", max_queue_size=2))
    for _ in itertools.islice(loader, 100):
        pass
    assert blocks() < 30  # one a batch would be a hundred
    loader.stop()


# --- several devices, several processes --------------------------------------------------------


FOUR_DEVICES = """
    import os
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from enqueuer import GeneratorEnqueuer
    from enqueuer.adapters.jax import JaxLoader

    def batches(shard):
        for i in shard.split(range(5)):
            yield {"x": np.arange(24.0).reshape(8, 3) + i, "scale": np.float32(i)}

    mesh = Mesh(np.array(jax.devices()), ("batch",))
    rows, everywhere = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())
    sharding = {"x": rows, "scale": everywhere}
    for i, batch in enumerate(JaxLoader(GeneratorEnqueuer(batches, backend="process"), sharding)):
        assert batch["x"].sharding == rows and batch["scale"].sharding == everywhere
        whole = np.arange(24.0).reshape(8, 3) + i
        shards = batch["x"].addressable_shards
        assert len({shard.device for shard in shards}) == 4
        for shard in shards:
            assert shard.data.shape == (2, 3)
            assert (np.asarray(shard.data) == whole[shard.index]).all()
        assert float(jax.jit(lambda b: (b["x"] * b["scale"]).sum())(batch)) == whole.sum() * i
    print(i)
"""


def test_each_of_four_devices_has_its_rows(tmp_path):
    assert run_program(tmp_path, FOUR_DEVICES) == (0, "4\n", "")


TWO_PROCESSES = """
    import sys
    import jax, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    port, process = map(int, sys.argv[1:])
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    from enqueuer import GeneratorEnqueuer
    from enqueuer.adapters.jax import JaxLoader

    def batches(shard):
        for i in shard.split(range(8)):
            yield np.full((4, 3), i)

    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("batch",)), P("batch"))
    enqueuer = GeneratorEnqueuer(
        batches, random_seed=7, rank=jax.process_index(), world_size=jax.process_count()
    )
    for batch in JaxLoader(enqueuer, sharding):
        assert batch.shape == (8, 3)
        print(*{int(shard.data[0, 0]) for shard in batch.addressable_shards})
    jax.distributed.shutdown()
"""


def test_each_of_two_processes_gives_the_rows_of_its_devices(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(inspect.cleandoc(TWO_PROCESSES))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = [
        subprocess.Popen([sys.executable, script, str(port), str(process)], stdout=-1, text=True)
        for process in range(2)
    ]
    try:
        said = [program.communicate(timeout=2 * LIMIT)[0].split() for program in both]
    finally:
        for program in both:
            program.kill()
            program.wait()
    assert said == [["0", "2", "4", "6"], ["1", "3", "5", "7"]]


# --- training ----------------------------------------------------------------------------------


def train(loader, epochs=4):
    """Return the weights of a linear model and the loss of each step."""

    @jax.jit
    def step(weights, batch):
        def loss_of(weights):
            return ((batch["x"] @ weights - batch["y"]) ** 2).mean()

        loss, gradient = jax.value_and_grad(loss_of)(weights)
        return weights - 0.3 * gradient, loss

    weights, losses = jax.numpy.zeros(3), []
    for _ in range(epochs):
        for batch in loader:
            weights, loss = step(weights, batch)
            losses.append(loss)
    return weights, [float(loss) for loss in losses]


def test_a_model_learns_and_the_backend_makes_no_difference():
    runs = {}
    for options in ({}, {"workers": 2}, {"backend": "process", "workers": 2}):
        enqueuer = GeneratorEnqueuer(linear, shards=4, random_seed=7, **options)
        weights, losses = train(JaxLoader(enqueuer))
        assert core_of(enqueuer).is_idle
        runs[str(options)] = weights.tolist()
        assert len(losses) == 4 * 60
        assert losses[-1] < 0.01 * losses[0]
    first, *others = runs.values()
    assert first == pytest.approx([1, -2, 3], abs=0.1)
    assert others == [first, first]


# --- how it ends -------------------------------------------------------------------------------


def test_a_program_may_end_in_the_middle_of_its_loop(tmp_path):
    program = """
        import jax, numpy as np
        from enqueuer import GeneratorEnqueuer
        from enqueuer.adapters.jax import JaxLoader

        def batches(shard):
            while True:
                yield np.ones((512, 512))

        loader = JaxLoader(GeneratorEnqueuer(batches, backend="process", workers=2))
        batches = iter(loader)
        print(next(batches).mean())
    """
    assert run_program(tmp_path, program) == (0, "1.0\n", "")
