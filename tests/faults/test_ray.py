"""Ray: nodes that are killed, what goes through to it, and whose Ray it is."""

import contextlib
import json
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
import warnings

import numpy as np
import psutil
import pytest
from conftest import IS_RAY
from helpers import LIMIT, Program, pid_of, wait_until

from enqueuer import (
    BatchTimeout,
    EnqueuerWarning,
    GeneratorEnqueuer,
    OrderedEnqueuer,
    Ray,
    StallWarning,
    StartError,
    WorkerDied,
)

pytestmark = pytest.mark.skipif(not IS_RAY, reason="ENQUEUER_RAY=1 runs it")

RAY = {"backend": "ray"}


def set_rate(value):
    if value is None:
        raise ValueError("no rate")
    os.environ["RATE_OF_A_TEST"] = value


def rates():
    yield os.environ.get("RATE_OF_A_TEST")


def test_an_initializer_runs_in_each_actor_before_the_source():
    backend = Ray(initializer=set_rate, initargs=("5",))
    with GeneratorEnqueuer(rates, workers=2, shards=2, backend=backend) as enqueuer:
        assert list(enqueuer) == ["5", "5"]


def test_an_error_of_an_initializer_is_one_of_the_start():
    backend = Ray(initializer=set_rate, initargs=(None,))
    with pytest.raises(StartError, match="set_rate failed in the worker with ValueError: no rate"):
        list(GeneratorEnqueuer(rates, workers=1, backend=backend))


# --- deaths ---


@pytest.fixture
def doomed(cluster):
    """A node that the test kills, and the options that place an actor there as long as it lives."""
    node = cluster.add_node(num_cpus=4, resources={"doomed": 1}, object_store_memory=200 << 20)
    cluster.wait_for_nodes()
    yield node
    if node in cluster.worker_nodes:
        cluster.remove_node(node, allow_graceful=False)


def on(resource):
    """Return options for actors that would rather be where there is a resource."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(_node_with(resource), soft=True)}


def _node_with(resource):
    import ray

    (node,) = [n for n in ray.nodes() if n["Alive"] and resource in n["Resources"]]
    return node["NodeID"]


def where(shard):
    """Yield the node, then numbers."""
    import ray

    yield ray.get_runtime_context().get_node_id()
    for number in range(40):
        # So the epoch lasts longer than the kill.
        time.sleep(0.01)
        yield number, shard.rng.random(20_000).tobytes()


@pytest.mark.timeout(120)
def test_nothing_is_lost_nor_comes_twice_if_a_node_is_killed(cluster, doomed):
    with GeneratorEnqueuer(where, shards=2, random_seed=7, backend="ray") as enqueuer:
        _, _, *wanted = enqueuer
    with GeneratorEnqueuer(
        where, workers=2, random_seed=7, max_restarts=2, backend=Ray(actor_options=on("doomed"))
    ) as enqueuer:
        batches = iter(enqueuer)
        node = _node_with("doomed")
        assert (next(batches), next(batches)) == (node, node)
        seen = [next(batches) for _ in range(6)]
        cluster.remove_node(doomed, allow_graceful=False)
        seen += batches
        assert enqueuer.restart_count == 2
        assert [batch for batch in seen if not isinstance(batch, str)] == wanted


@pytest.mark.timeout(120)
def test_tasks_of_a_killed_node_are_done_elsewhere(cluster, doomed):
    def slow(number):
        time.sleep(0.05)
        return number

    with OrderedEnqueuer(
        range(60), slow, workers=2, max_restarts=2, backend=Ray(actor_options=on("doomed"))
    ) as enqueuer:
        batches = iter(enqueuer)
        seen = [next(batches) for _ in range(5)]
        cluster.remove_node(doomed, allow_graceful=False)
        assert [*seen, *batches] == list(range(60))
        assert enqueuer.restart_count == 2


@pytest.mark.timeout(120)
def test_a_killed_node_is_reported(cluster, doomed):
    with GeneratorEnqueuer(where, backend=Ray(actor_options=on("doomed"))) as enqueuer:
        batches = iter(enqueuer)
        next(batches)
        cluster.remove_node(doomed, allow_graceful=False)
        with pytest.raises(WorkerDied, match=r"worker 0 \(Ray actor, process \d+ on .*\) died"):
            for _ in batches:
                pass


def test_a_worker_that_holds_the_gil_is_ended_all_the_same():
    def hangs():
        import re

        yield os.getpid()
        re.match("(a+)+$", 60 * "a" + "b")

    with GeneratorEnqueuer(hangs, **RAY) as enqueuer:
        pid = next(iter(enqueuer))
        before = time.monotonic()
        enqueuer.stop(timeout=1.0)
        assert time.monotonic() - before < LIMIT
    wait_until(lambda: not psutil.pid_exists(pid))


def test_a_handler_ends_a_wait_for_an_actor_and_the_loop_goes_on(tmp_path):
    class Alarm(Exception):
        pass

    def alarm(number, frame):
        raise Alarm

    def source():
        yield 0
        wait_until(gate.exists)
        yield 1

    gate, main = tmp_path / "gate", threading.main_thread().ident
    before = signal.signal(signal.SIGUSR1, alarm)
    try:
        with GeneratorEnqueuer(source, **RAY) as enqueuer:
            batches = iter(enqueuer)
            assert next(batches) == 0
            threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGUSR1)).start()
            with pytest.raises(Alarm):
                next(batches)
            gate.touch()
            assert list(batches) == [1]
    finally:
        signal.signal(signal.SIGUSR1, before)


# --- what goes through ---


def test_options_go_through_to_the_actors():
    def source():
        import ray

        context = ray.get_runtime_context()
        yield context.get_assigned_resources()["CPU"], os.environ["OF_THE_TEST"]

    options = {"num_cpus": 2, "runtime_env": {"env_vars": {"OF_THE_TEST": "yes"}}}
    with GeneratorEnqueuer(source, backend=Ray(actor_options=options)) as enqueuer:
        assert list(enqueuer) == [(2.0, "yes")]


def native_threads(shard):
    """Yield the limits that native libraries read when an actor loads them."""
    names = ("OMP_NUM_THREADS", "OPENCV_FOR_THREADS_NUM", "GOMP_SPINCOUNT")
    yield [os.environ.get(name) for name in names]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_cpus": 2}, ["2", "2", "1000"]),
        (
            {"runtime_env": {"env_vars": {"OMP_NUM_THREADS": "3", "OPENCV_FOR_THREADS_NUM": "4"}}},
            ["3", "4", "1000"],
        ),
    ],
)
def test_native_threads_of_an_actor_are_limited(options, expected):
    with GeneratorEnqueuer(native_threads, backend=Ray(actor_options=options)) as enqueuer:
        assert list(enqueuer) == [expected]


@pytest.mark.parametrize("kind", [GeneratorEnqueuer, OrderedEnqueuer])
def test_options_that_no_node_can_satisfy_are_named(kind):
    """An autoscaler may bring such a node, so they are no error."""
    source = where if kind is GeneratorEnqueuer else range(3)
    options = {"resources": {"tape": 2}}
    enqueuer = kind(source, backend=Ray(actor_options=options), timeout=0.1)
    with pytest.warns(EnqueuerWarning, match=r"actor_options ask for tape 2, which no node"):
        enqueuer.start()
    with pytest.raises(BatchTimeout, match=r"has not started: no node has tape 2"):
        next(iter(enqueuer))
    enqueuer.stop()


def test_actors_without_room_are_reported():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with GeneratorEnqueuer(
            where, workers=3, backend=Ray(actor_options={"num_cpus": 8}), stall_timeout=0.2
        ) as enqueuer:
            thread = threading.Thread(target=lambda: list(enqueuer))
            thread.start()
            wait_until(lambda: any(w.category is StallWarning for w in caught))
    thread.join(LIMIT)
    said = [str(w.message) for w in caught if w.category is StallWarning][-1]
    assert "(Ray actor)" in said
    assert "has not started yet: Ray searches for a node" in said


def large(shard):
    for number in range(3):
        yield {"x": np.full((100, 1000), number), "n": number}


def test_large_arrays_are_read_only_unless_asked_for():
    with GeneratorEnqueuer(large, **RAY) as enqueuer:
        for batch in enqueuer:
            assert not batch["x"].flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                batch["x"] += 1
    with GeneratorEnqueuer(large, backend=Ray(copy_arrays=True)) as enqueuer:
        for batch in enqueuer:
            batch["x"] += 1
            assert (batch["x"] == batch["n"] + 1).all()


def test_batches_that_are_dropped_make_room_in_the_object_store():
    def source():
        # These are 800 MB, and the store of a node has 200 MB.
        for number in range(100):
            yield np.full(1_000_000, number)

    with GeneratorEnqueuer(source, max_queue_size=4, **RAY) as enqueuer:
        assert [int(batch[-1]) for batch in enqueuer] == list(range(100))


def test_a_module_of_the_drivers_path_is_found(tmp_path, monkeypatch):
    (tmp_path / "of_the_test.py").write_text("def numbers():\n    yield from range(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__("of_the_test")
    try:
        with GeneratorEnqueuer(module.numbers, **RAY) as enqueuer:
            assert list(enqueuer) == [0, 1, 2]
    finally:
        del sys.modules["of_the_test"]


def test_a_live_generator_cannot_be_sent():
    from enqueuer import SourceNotPicklable

    enqueuer = GeneratorEnqueuer((n for n in range(3)), **RAY)
    with pytest.raises(
        SourceNotPicklable, match="a running generator cannot be sent to a Ray actor"
    ):
        enqueuer.start()


def test_the_log_says_who_died_and_who_goes_on(caplog):
    def source():
        for number in range(50):
            time.sleep(0.005)
            yield number

    with GeneratorEnqueuer(source, max_restarts=1, **RAY) as enqueuer:
        batches = iter(enqueuer)
        next(batches)
        pid = pid_of(enqueuer)
        with caplog.at_level(logging.WARNING, "enqueuer"):
            os.kill(pid, signal.SIGKILL)
            assert list(batches) == list(range(1, 50))
    assert f"process {pid}" in caplog.text
    assert re.search(
        r"died \(.*goes on with shard 0, item \d+ \(restart 1, of max_rest", caplog.text
    )


# --- whose Ray it is ---


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for programs, whose Rays have one whose name is short enough for their sockets."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short:
        monkeypatch.setenv("RAY_TMPDIR", short)
        yield tmp_path


def run(folder, text):
    """Run a program that starts Rays of its own; return what it printed, as JSON."""
    with Program(folder, OWN + text) as program:
        code, out, err = program.wait(90)
        assert code == 0, err
        wait_until(lambda: not program.members())
    return [json.loads(line) for line in out.splitlines() if line.startswith("[")]


OWN = """
    import json, os
    from enqueuer import GeneratorEnqueuer, Ray
    import ray

    def numbers(shard):
        yield from shard.split(range(6))

    def report(*values):
        print(json.dumps(values), flush=True)

    options = dict(backend=Ray(address="local"), workers=2)
"""


@pytest.mark.timeout(120)
def test_a_ray_that_was_started_for_it_ends_with_the_last_enqueuer(folder):
    reported = run(
        folder,
        """
    one, two = GeneratorEnqueuer(numbers, **options), GeneratorEnqueuer(numbers, **options)
    one.start()
    two.start()
    report(list(one), list(two))
    one.stop()
    report(ray.is_initialized())
    two.stop()
    report(ray.is_initialized())
    """,
    )
    assert reported == [[list(range(6)), list(range(6))], [True], [False]]


@pytest.mark.timeout(120)
def test_whoever_forgets_to_stop_leaves_nothing(folder):
    reported = run(
        folder,
        """
    enqueuer = GeneratorEnqueuer(numbers, **options)
    report(next(iter(enqueuer)))
    """,
    )
    assert reported == [[0]]


@pytest.mark.timeout(120)
def test_a_cluster_that_is_not_there_is_reported(folder):
    reported = run(
        folder,
        """
    from enqueuer import Ray, StartError

    options["backend"] = Ray(address="127.0.0.1:1")
    try:
        GeneratorEnqueuer(numbers, **options).start()
    except StartError as error:
        report(str(error))
    """,
    )
    assert reported[0][0].startswith("Ray at '127.0.0.1:1' cannot be reached: ")


def _command(pid):
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


@pytest.mark.timeout(120)
def test_a_driver_that_is_killed_leaves_nothing(folder):
    text = """
    enqueuer = GeneratorEnqueuer(numbers, **options)
    report(next(iter(enqueuer)))
    import time
    time.sleep(1000)
    """
    with Program(folder, OWN + text) as program:
        while "[0]" not in program.process.stdout.readline():
            pass
        program.process.kill()
        # two agents of Ray stay behind, whichever process is killed
        wait_until(lambda: not {p for p in program.members() if "RayWorker" in _command(p)})
