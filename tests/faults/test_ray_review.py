"""What can go wrong with Ray itself, and in its driver."""

import asyncio
import errno
import logging
import os
import subprocess
import sys
import threading
import time

import pytest
from helpers import LIMIT, counting

from enqueuer import GeneratorEnqueuer, ItemNotLoadable, Ray, WorkerDied
from enqueuer.backends.ray.pool import RayPool
from enqueuer.enqueuers.enqueuer import core_of

pytestmark = pytest.mark.skipif(
    not os.environ.get("ENQUEUER_RAY"), reason="Ray's tests run by themselves"
)


def breaking_the_loop():
    yield 1
    import enqueuer.workers.loop

    enqueuer.workers.loop.End = None


def test_a_loop_that_breaks_in_an_actor_is_a_death():
    with GeneratorEnqueuer(breaking_the_loop, backend="ray", timeout=LIMIT) as enqueuer:
        batches = iter(enqueuer)
        assert next(batches) == 1
        with pytest.raises(WorkerDied, match="Its loop ended by TypeError"):
            next(batches)


def test_an_actor_that_cannot_start_is_said_not_to_have_started():
    options = {"runtime_env": {"working_dir": "gcs://is_not_there.zip"}}
    with GeneratorEnqueuer(counting, backend=Ray(actor_options=options)) as enqueuer:
        with pytest.raises(WorkerDied, match=r"could not be started.*runtime env.*actor_options"):
            next(iter(enqueuer))


class NotLoadable:
    def __reduce__(self):
        return int, ("x",)


def test_what_cannot_be_loaded_names_its_actor():
    with GeneratorEnqueuer(lambda: iter([NotLoadable()]), backend="ray") as enqueuer:
        with pytest.raises(ItemNotLoadable) as caught:
            next(iter(enqueuer))
    if sys.version_info >= (3, 11):
        assert "in worker 0 (Ray actor, process" in caught.value.__notes__[0]


def dying():
    yield 1
    # By then this item is on its way.
    time.sleep(0.1)
    os._exit(1)


def test_a_replacement_that_cannot_be_started_is_reported_as_the_cause(monkeypatch):
    def fails(self, index):
        raise RuntimeError("no more of them")

    with GeneratorEnqueuer(dying, backend="ray", max_restarts=3) as enqueuer:
        batches = iter(enqueuer)
        assert next(batches) == 1
        monkeypatch.setattr(RayPool, "start_worker", fails)
        with pytest.raises(WorkerDied) as caught:
            next(batches)
    assert str(caught.value.__cause__) == "no more of them"


def talking():
    def talk():
        while True:
            logging.getLogger("talk").warning("still here")
            time.sleep(0.001)

    threading.Thread(target=talk, daemon=True).start()
    while True:
        yield 1


def test_a_thread_of_the_users_that_logs_does_not_hold_up_the_end(caplog):
    with GeneratorEnqueuer(talking, backend="ray") as enqueuer:
        next(iter(enqueuer))
        backend = core_of(enqueuer).run.backend
        (actor,) = backend.pool.workers
        backend.close()
        actor.thread.join(LIMIT)
        # The thread ends, although the actor was not killed.
        assert not actor.thread.is_alive()


IN_A_FORK = """
import os, signal
from enqueuer import GeneratorEnqueuer, StartError

signal.alarm({limit})
try:
    GeneratorEnqueuer(lambda: iter("abc"), backend="ray").start()
except StartError as error:
    assert "forked" in str(error)
    os._exit(0)
os._exit(1)
"""


def test_a_child_that_was_forked_from_a_driver_gets_an_error():
    pid = os.fork()
    if not pid:
        exec(IN_A_FORK.format(limit=int(LIMIT)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


SHUT_DOWN = """
import threading, time
import ray
from enqueuer import GeneratorEnqueuer, WorkerDied

def endless(shard):
    yield 1
    time.sleep(1000)
    yield 2

ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
with GeneratorEnqueuer(endless, workers=2, shards=2, backend="ray", timeout={limit}) as enqueuer:
    batches = iter(enqueuer)
    print(next(batches), next(batches))
    threading.Timer(0.5, ray.shutdown).start()
    try:
        next(batches)
    except WorkerDied as error:
        print("was shut down" in str(error))
    print(len(enqueuer.stats().workers))
print(ray.is_initialized(), [t.name for t in threading.enumerate() if "enqueuer" in t.name])
"""


def test_a_ray_that_the_user_shuts_down_is_a_death_and_is_not_started_again(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SHUT_DOWN.format(limit=LIMIT))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=4 * LIMIT
    )
    assert done.stdout.split("\n") == ["1 1", "True", "2", "False []", ""], done.stderr
    assert "StopWarning" not in done.stderr


ANOTHER = """
import threading
import ray
from enqueuer import GeneratorEnqueuer, WorkerDied

def endless(shard):
    while True:
        yield bytes(300_000)

def init():
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)

init()
enqueuer = GeneratorEnqueuer(endless, workers=2, shards=2, backend="ray", timeout={limit})
enqueuer.start()
batches = iter(enqueuer)
next(batches)
ray.shutdown()
init()
try:
    while True:
        next(batches)
except WorkerDied as error:
    print("was shut down" in str(error))
enqueuer.stop()
with GeneratorEnqueuer(endless, workers=2, shards=2, backend="ray", timeout={limit}) as enqueuer:
    print(len(next(iter(enqueuer))))
print([t.name for t in threading.enumerate() if "enqueuer" in t.name])
"""


def test_a_notebook_that_shuts_its_ray_down_and_starts_another_one_goes_on(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(ANOTHER.format(limit=LIMIT))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=4 * LIMIT
    )
    assert done.stdout.split("\n") == ["True", "300000", "[]", ""], done.stderr
    assert "StopWarning" not in done.stderr


def test_a_lack_of_descriptors_for_receiving_is_reported(monkeypatch):
    def none_left():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio, "SelectorEventLoop", none_left)
    with GeneratorEnqueuer(counting, backend="ray", timeout=LIMIT) as enqueuer:
        with pytest.raises(WorkerDied, match="Too many open files"):
            next(iter(enqueuer))
