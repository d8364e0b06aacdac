"""Backends and start methods as parameters, and a census around every test."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import hypothesis
import psutil
import pytest
import selection
from _pytest.config import create_terminal_writer
from helpers import LIMIT, twelve

from enqueuer import GeneratorEnqueuer, Processes, Ray
from enqueuer.backends.engine import load
from enqueuer.backends.job import HAS_FORKSERVER
from enqueuer.common import interrupts
from enqueuer.common.descriptors import PORTABLE

# On a busy machine, an example may take longer than hypothesis allows by default.
hypothesis.settings.register_profile("enqueuer", deadline=None)
hypothesis.settings.load_profile("enqueuer")

METHODS = [
    m for m in multiprocessing.get_all_start_methods() if m != "forkserver" or HAS_FORKSERVER
]
BACKENDS = [pytest.param({"backend": "thread"}, id="thread")] + [
    pytest.param({"backend": Processes(start_method=m)}, id=f"process-{m}") for m in METHODS
]
# The same without what only Linux has: this is how other systems run it.
BACKENDS.append(
    pytest.param(
        {"backend": Processes(start_method="fork"), PORTABLE: "1"}, id="process-fork-portable"
    )
)
PROCESSES = BACKENDS[1:]
# The pool of `workers=0`, which runs as many shards as there would be workers.
INLINE = "inline"
WITH_INLINE = [*BACKENDS, pytest.param({"backend": "thread", INLINE: True}, id=INLINE)]
# With Ray in one's process nothing else can be counted: its tests run by themselves.
IS_RAY = bool(os.environ.get("ENQUEUER_RAY"))
RAY = [pytest.param({"backend": Ray()}, id="ray")] if IS_RAY else []
if IS_RAY:
    BACKENDS = WITH_INLINE = PROCESSES = RAY


def without(*names):
    """Return the backends without some, for tests to which these make no difference."""
    return [backend for backend in BACKENDS if backend.id not in names]


def pytest_configure(config):
    """Give each of several processes that share the tests (`-n 4`) what is otherwise theirs all.

    A temporary directory: the census counts what is there, and what a test that runs beside has
    there is not to be counted. And a place where pytest-timeout's stacks are seen, since the
    standard output of these processes is not.
    """
    gc.disable()  # until the tests are collected: thousands of objects, of which all stay
    os.environ.setdefault("RAY_TMPDIR", "/tmp")  # the paths of its sockets must be short
    # Each interpreter that imports numpy starts threads, which otherwise spin for 25 ms.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    if hasattr(config, "workerinput"):  # only pytest-xdist sets it
        # not a TemporaryDirectory: what a test forks might remove it at its exit
        folder = tempfile.mkdtemp(prefix=f"{config.workerinput['workerid']}-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        writer = create_terminal_writer(config, sys.__stderr__)
        config.get_terminal_writer = lambda: writer


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Let one of several processes rewrite the assertions of a test file in a fresh clone.

    It takes as long as the rest of the collection; the others find the result in the cache.
    """
    if not isinstance(collector, pytest.Module):
        return (yield)
    with open(collector.path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        return (yield)


@pytest.fixture(params=WITH_INLINE)
def backend(request, monkeypatch):
    """Options for each backend and start method."""
    return chosen(request.param, monkeypatch, request.node)


@pytest.fixture(params=BACKENDS)
def options(request, monkeypatch):
    """The same without the loop's own thread, which makes nothing ahead."""
    return chosen(request.param, monkeypatch, request.node)


@pytest.fixture(params=PROCESSES)
def process(request, monkeypatch):
    """Options for each start method of processes."""
    return chosen(request.param, monkeypatch, request.node)


def load_inline(name, job, *others):
    """Return the backend of `workers=0` for a job with workers."""
    return load(name, dataclasses.replace(job, workers=0), *others)


def chosen(options, monkeypatch, test=None):
    """Return options for an enqueuer, after setting what belongs into the environment."""
    options = dict(options)
    if IS_RAY and test is not None and test.get_closest_marker("writes"):
        options["backend"] = Ray(copy_arrays=True)
    if PORTABLE in options:
        monkeypatch.setenv(PORTABLE, options.pop(PORTABLE))
    if options.pop(INLINE, False):
        monkeypatch.setattr("enqueuer.enqueuers.run.load", load_inline)
    return options


@pytest.fixture(scope="session", autouse=True)
def fork_server():
    """Start the fork server, which stays as long as this process, before the first census."""
    if HAS_FORKSERVER and not IS_RAY:
        multiprocessing.set_forkserver_preload(["preloaded"])
        with GeneratorEnqueuer(twelve, backend=Processes(start_method="forkserver")) as enqueuer:
            list(enqueuer)


@pytest.fixture(scope="session", autouse=IS_RAY)
def cluster():
    """Start a Ray of two nodes for all tests, that knows of no other on this machine."""
    import ray
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the paths of its sockets must be short
    os.environ["RAY_TMPDIR"] = folder
    os.mkdir(os.path.join(folder, "ray"))
    of_node = {"num_cpus": 8, "object_store_memory": 200 << 20}
    sooner = {"health_check_period_ms": 1000}  # a node that is killed is noticed in 5 s, not 15
    head = {**of_node, "include_dashboard": False, "_system_config": sooner}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**of_node)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def census():
    """Return all that a test could leave behind."""
    gc.collect()
    temporary = {n for n in os.listdir(tempfile.gettempdir()) if _OURS.match(n)}
    if IS_RAY:
        return {"threads": _threads(), "actors": actors(), "temporary": temporary}
    return {
        "threads": {thread.name for thread in threading.enumerate()},
        "children": _all_descendants(),
        "descriptors": {(fd, to) for fd in os.listdir("/proc/self/fd") if (to := _target(fd))},
        "shm": set(os.listdir("/dev/shm")),
        "temporary": temporary,
    }


# Not every kernel lists a thread's children. psutil reads all of /proc, which takes ten times as
# long.
_HAS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()


def _all_descendants():
    """Return the pids of all processes below this one.

    The kernel's list may lack some children while others exit, so it is read until it is twice
    the same.
    """
    children, before = _descendants(os.getpid()), None
    while children != before:
        children, before = _descendants(os.getpid()), children
    return children


def _descendants(pid):
    """Return the pids of all processes below one."""
    if not _HAS_CHILDREN:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    children = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        # The thread may have ended meanwhile; its children belong to another one then.
        with contextlib.suppress(OSError):
            children.update(map(int, path.read_text().split()))
    return children.union(*map(_descendants, children))


def _started_after(began, pid):
    """Return whether a process started after a time of CLOCK_BOOTTIME, which the kernel notes."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended meanwhile
        return False
    return int(fields[19]) / os.sysconf("SC_CLK_TCK") > began - 0.02


def _threads():
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("enqueuer")}


def actors():
    """Return the pids of our actors, which Ray names so."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "RayWorker" in "".join(child.cmdline()):
                found.add(child.pid)
    return found


_OURS = re.compile("(?!enqueuer-demo)enqueuer|pymp-")
_SHARED = re.compile(r" (\d+) +/dev/shm/")


def _target(fd):
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # the descriptor of the listing itself
        return None
    return None if target.startswith("/proc/") else target


def left(before, began):
    """Return what is there now and was not there before, at that time of CLOCK_BOOTTIME."""
    after = census()
    # The list of children before may have lacked some.
    if "children" in after:
        after["children"] = {pid for pid in after["children"] if _started_after(began, pid)}
    new = {kind: after[kind] - before[kind] for kind in before if after[kind] - before[kind]}
    if "shm" in new and not (new["shm"] & _used_by_no_other_process()):
        del new["shm"]
    return new


def _used_by_no_other_process():
    """Return the names in /dev/shm, which is everybody's, that only our processes have mapped."""
    me = psutil.Process()
    ours = {me.pid, *(child.pid for child in me.children(recursive=True))}
    others = set()  # by number: a semaphore is mapped by another name, which it has only at first
    for pid in psutil.pids():
        if pid not in ours:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as file:
                others.update(map(int, _SHARED.findall(file.read())))
    with os.scandir("/dev/shm") as entries:
        return {entry.name for entry in entries if entry.inode() not in others}


@pytest.fixture(autouse=True)
def nothing_left():
    """Fail a test that leaves a thread, a process, a descriptor, a file or a handler of Ctrl-C."""
    handler = signal.getsignal(signal.SIGINT)
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    before = census()
    # What is alive now outlives the test; the next collections need not look at it. Modules that
    # earlier tests have imported made each of them five times as long.
    gc.freeze()
    yield
    end = time.monotonic() + LIMIT / 2  # what is dying may need a moment to be gone
    while (remains := left(before, began)) and time.monotonic() < end:
        time.sleep(0.01)
    assert remains == {}
    assert signal.getsignal(signal.SIGINT) == handler
    assert not interrupts.is_held


@pytest.fixture
def no_warnings():
    """Turn warnings into errors for sure, whatever the configuration says."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # That of JAX, as in setup.cfg: another test may have used it in this process.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        yield


def pytest_collection_modifyitems(config, items):
    """Run the quick suite, or what `ENQUEUER_TESTS` says."""
    run = selection.chosen(items)
    left_out = set(items) - set(run)
    items[:] = run
    config.hook.pytest_deselected(items=sorted(left_out, key=lambda item: item.nodeid))


def pytest_sessionfinish(session, exitstatus):
    """Let a run be a success whose files have no test in the part of `ENQUEUER_PART`."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and selection.IS_PART:
        session.exitstatus = pytest.ExitCode.OK


def pytest_report_teststatus(report):
    """Name a test when it fails, not only at the end of the run."""
    if report.failed:
        outcome = "failed" if report.when == "call" else "error"
        return outcome, f"\n{outcome.upper()} {report.nodeid}\n", outcome.upper()
    return None


def pytest_collection_finish(session):
    """Spare the census, which collects garbage, what was imported: frameworks are large."""
    gc.enable()
    gc.collect()
    gc.freeze()
