"""Native threads: each worker process runs as many as its share of the CPUs, or as `threads`."""

import os

import pytest
from helpers import needs_installed, start_method_of, wait_until, with_backend
from threadpoolctl import ThreadpoolController

from enqueuer import Auto, GeneratorEnqueuer, OrderedEnqueuer, Processes
from enqueuer.backends.job import default_method
from enqueuer.monitoring import usage

VARIABLES = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"]
IDLE = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "1000",
    "OPENBLAS_THREAD_TIMEOUT": "4",
}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in (*VARIABLES, *IDLE, "OPENCV_FOR_THREADS_NUM"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["fork", default_method()])
def process(request):
    """Options for inherited libraries and for fresh ones; spawn is slow, and has a test below."""
    return {"backend": Processes(start_method=request.param)}


def threads_here(*_):
    """Return what this worker's environment says, and how many threads its BLAS may run."""
    from threadpoolctl import threadpool_info

    blas = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    return {name: os.environ.get(name) for name in (*VARIABLES, *IDLE)} | {"blas": set(blas)}


def of_each_shard(shard):
    yield threads_here()


def expected(count, start_method):
    # a fork does not raise what its parent has
    most = max(threads_here()["blas"]) if start_method == "fork" else count
    return dict.fromkeys(VARIABLES, str(count)) | IDLE | {"blas": {min(count, most)}}


@pytest.mark.parametrize("workers", [1, 2])
def test_each_worker_has_its_share_of_the_cpus(process, workers):
    before = threads_here()
    with GeneratorEnqueuer(of_each_shard, workers=workers, **process) as enqueuer:
        found = list(enqueuer)
    share = max(1, int(usage.cpus()) // workers)
    assert found == [expected(share, start_method_of(process))] * workers
    # The limits of this process stay the same.
    assert threads_here() == before


def test_fewer_workers_than_asked_for_share_the_cpus(process):
    with GeneratorEnqueuer(of_each_shard, workers=64, shards=1, **process) as enqueuer:
        assert list(enqueuer) == [expected(max(1, int(usage.cpus())), start_method_of(process))]


def test_the_option_threads_is_the_limit(process):
    options = dict(workers=2, **with_backend(process, threads=3))
    with GeneratorEnqueuer(of_each_shard, **options) as enqueuer:
        assert list(enqueuer) == [expected(3, start_method_of(process))] * 2
    with OrderedEnqueuer(range(2), threads_here, **options) as enqueuer:
        assert list(enqueuer) == [expected(3, start_method_of(process))] * 2


def test_the_environment_comes_before_the_share(process, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("MKL_NUM_THREADS", "5,2")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    with GeneratorEnqueuer(of_each_shard, workers=2, **process) as enqueuer:
        found = list(enqueuer)
    given = {"MKL_NUM_THREADS": "5,2", "OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": None}
    assert found == [expected(2, start_method_of(process)) | given] * 2


def test_the_option_threads_comes_before_the_environment(process, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("MKL_NUM_THREADS", "5")
    with GeneratorEnqueuer(of_each_shard, **with_backend(process, threads=1)) as enqueuer:
        assert list(enqueuer) == [expected(1, start_method_of(process))]


def test_the_share_follows_the_number_of_workers():
    with OrderedEnqueuer(range(8), threads_here, backend="process", max_queue_size=1) as enqueuer:
        assert next(iter(enqueuer)) == expected(max(1, int(usage.cpus())), "")
        enqueuer.reconfigure(4)
        *_, last = enqueuer
        assert last == expected(max(1, int(usage.cpus()) // 4), "")


def test_workers_that_may_become_more_share_as_if_they_were():
    options = dict(workers=Auto(most=1000), backend="process")
    with OrderedEnqueuer(range(1), threads_here, **options) as enqueuer:
        assert list(enqueuer) == [expected(1, "")]


def of_frameworks(shard):
    """Yield what torch and OpenCV say, which are imported here."""
    import cv2
    import torch

    yield torch.get_num_threads(), cv2.getNumThreads(), threads_here()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_frameworks_that_the_generator_imports_have_their_share(method):
    needs_installed("torch", "cv2")
    options = dict(backend=Processes(start_method=method, threads=1))
    with GeneratorEnqueuer(of_frameworks, **options) as enqueuer:
        assert list(enqueuer) == [(1, 1, expected(1, method))]


def native_threads(shard):
    """Yield how many threads stay; one that was asked to end needs a moment."""
    wait_until(lambda: len(os.listdir("/proc/self/task")) == 1)
    yield len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux")
def test_a_limit_leaves_no_idle_threads_in_a_forked_worker():
    libraries = ThreadpoolController().select(internal_api="openblas").lib_controllers
    if not all(hasattr(library.dynlib, "blas_thread_shutdown_") for library in libraries):
        pytest.skip("this OpenBLAS does not let its threads be ended")
    options = dict(backend=Processes(start_method="fork", threads=1))
    with GeneratorEnqueuer(native_threads, **options) as enqueuer:
        assert list(enqueuer) == [1]
