"""Too little of something: descriptors, memory, /dev/shm. A clear error, or no difference."""

import os
import shutil
import subprocess

import pytest
from helpers import METHODS, run_program, twelve

from enqueuer import GeneratorEnqueuer
from enqueuer.transport.channel import Kind
from enqueuer.transport.receiver import ReceiverControl

BEGIN = """
    import gc, os, resource, sys, threading
    import numpy as np
    from helpers import counting, twelve
    from enqueuer import BlockMemoryError, EnqueuerError, GeneratorEnqueuer, Processes, StartError

    def limit(what, soft):
        resource.setrlimit(what, (soft, resource.getrlimit(what)[1]))

    def large(shard):
        for number in range(40):
            yield np.full(10_000_000, number % 256, np.uint8)

    def refused_starts(make, more):
        # Start with so many descriptors more than are open; return how many starts failed.
        # Whatever the limit: an error with advice, no worker, no descriptor.
        full = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        refused = 0
        for count in more:
            gc.collect()
            before = set(os.listdir("/proc/self/fd"))
            enqueuer = make()
            limit(resource.RLIMIT_NOFILE, len(before) + count)
            try:
                enqueuer.start()
            except StartError as error:
                refused += 1
                assert "ulimit -n" in str(error), error
            finally:
                limit(resource.RLIMIT_NOFILE, full)
            enqueuer.stop()
            gc.collect()
            after = set(os.listdir("/proc/self/fd"))
            lost = 2 if METHOD == "fork" else 0  # by multiprocessing, if its second pipe fails
            assert len(after) <= len(before) + lost, (count, before, after)
            assert threading.active_count() == 1
        return refused

    def check(source, count, method):
        with GeneratorEnqueuer(source, backend=Processes(start_method=method)) as enqueuer:
            for number, batch in enumerate(enqueuer):
                assert (batch == number % 256).all()
            assert number == count - 1

"""


@pytest.fixture(
    params=[
        pytest.param(method, marks=() if method == "fork" else pytest.mark.thorough)
        for method in METHODS
    ]
)
def run(request, tmp_path):
    """Run a program that begins with the lines above, by each start method."""

    def run(text, **options):
        return run_program(tmp_path, program(text, request.param), **options)

    return run


def program(text, method):
    """Return a program of the lines above and others, with a start method."""
    lines = [f"    {line}" for line in text.splitlines() if line.strip()]
    return (BEGIN + "\n".join(lines)).replace("METHOD", repr(method))


@pytest.mark.thorough
def test_a_start_without_enough_descriptors_leaves_nothing(run):
    text = """
with GeneratorEnqueuer(twelve, backend=Processes(start_method=METHOD)) as enqueuer:
    assert list(enqueuer) == list(range(12))
def make():
    return GeneratorEnqueuer(counting, backend=Processes(start_method=METHOD), workers=8)
assert refused_starts(make, range(0, 40, 3)) > 5
with GeneratorEnqueuer(twelve, backend=Processes(start_method=METHOD)) as enqueuer:
    assert list(enqueuer) == list(range(12))
"""
    assert run(text) == (0, "", "")


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_shared_objects_without_enough_descriptors_leave_nothing(tmp_path, method):
    """A start needs a descriptor for each of them, beside those of the workers."""
    text = """
import socket
pairs = [socket.socketpair() for _ in range(20)]
def source(shard):
    yield len(pairs)
def make():
    return GeneratorEnqueuer(source, backend=Processes(start_method=METHOD))
with make() as enqueuer:
    assert list(enqueuer) == [20]
assert 5 < refused_starts(make, range(0, 70, 7)) < 10
"""
    assert run_program(tmp_path, program(text, method)) == (0, "", "")


def test_a_source_that_finds_no_descriptor_when_it_is_pickled_is_no_culprit(run):
    text = """
class Source:
    def __call__(self, shard):
        yield 0
    def __reduce__(self):
        os.close(os.dup(2))
        return Source, ()
enqueuer = GeneratorEnqueuer(Source(), backend=Processes(start_method=METHOD))
with enqueuer:
    assert list(enqueuer) == [0]
full = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
enqueuer = GeneratorEnqueuer(Source(), backend=Processes(start_method=METHOD))
limit(resource.RLIMIT_NOFILE, 3)
try:
    enqueuer.start()
except StartError as error:
    message = str(error)
finally:
    limit(resource.RLIMIT_NOFILE, full)
assert "Too many open files" in message and "ulimit -n" in message, message
with enqueuer:
    assert list(enqueuer) == [0]
"""
    assert run(text) == (0, "", "")


def test_a_consumer_that_runs_out_of_descriptors_gets_a_clear_error(run):
    text = """
import contextlib
with GeneratorEnqueuer(large, backend=Processes(start_method=METHOD), max_queue_size=4) as enqueuer:
    batches = iter(enqueuer)
    kept = [next(batches)]
    limit(resource.RLIMIT_NOFILE, 64)
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(2))
    try:
        for batch in batches:
            kept.append(batch)
    except EnqueuerError as error:
        assert "descriptor" in str(error), repr(error)
    else:
        raise AssertionError("no error")
    for fd in taken:
        os.close(fd)
    assert all((batch == number).all() for number, batch in enumerate(kept))
"""
    assert run(text) == (0, "", "")


def test_a_consumer_that_runs_out_of_address_space_gets_a_clear_error(run):
    text = """
with GeneratorEnqueuer(large, backend=Processes(start_method=METHOD), max_queue_size=4) as enqueuer:
    batches = iter(enqueuer)
    kept = [next(batches)]
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    limit(resource.RLIMIT_AS, now + 40_000_000)
    for _ in range(2):
        try:
            for batch in batches:
                kept.append(batch)
        except MemoryError as error:
            assert isinstance(error, BlockMemoryError), repr(error)
            assert "try smaller batches" in str(error), repr(error)
        else:
            raise AssertionError("no error")
    limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
    assert all((batch == number).all() for number, batch in enumerate(kept))
"""
    assert run(text) == (0, "", "")


@pytest.mark.parametrize("what", ["RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NOFILE"])
def test_a_worker_that_runs_out_gets_a_clear_error(run, what):
    text = """
def source(shard):
    yield np.full(10_000_000, 0, np.uint8)
    held = np.full(30_000_000, 1, np.uint8)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    enough = {
        resource.RLIMIT_AS: now + 15_000_000,
        resource.RLIMIT_FSIZE: 20_000_000,
        resource.RLIMIT_NOFILE: 3,
    }
    limit(resource.WHAT, enough[resource.WHAT])
    yield held
with GeneratorEnqueuer(source, backend=Processes(start_method=METHOD)) as enqueuer:
    batches = iter(enqueuer)
    assert (next(batches) == 0).all()
    try:
        next(batches)
    except BlockMemoryError as error:
        assert "30.0 MB" in str(error)
    else:
        raise AssertionError("no error")
"""
    assert run(text.replace("WHAT", what)) == (0, "", "")


def has_namespaces():
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.thorough
@pytest.mark.skipif(not has_namespaces(), reason="needs the right to mount")
@pytest.mark.parametrize("how", ["-o size=1m", "-o size=1m,ro"])
def test_a_tiny_or_read_only_dev_shm_makes_no_difference(run, how):
    script = f'mount -t tmpfs {how} tmpfs /dev/shm && exec "$@"'
    text = """
assert os.statvfs("/dev/shm").f_blocks * 4096 <= 1 << 20
check(large, 40, METHOD)
assert os.listdir("/dev/shm") == []
"""
    assert run(text, wrapper=["unshare", "-m", "sh", "-c", script, "sh"]) == (0, "", "")


@pytest.mark.skipif(not has_namespaces(), reason="needs the right to mount")
def test_a_full_temporary_directory_makes_no_difference(run):
    script = 'mount -t tmpfs -o size=4k,nr_inodes=2 tmpfs "$TMPDIR" && exec "$@"'
    text = "check(large, 40, METHOD)"
    assert run(text, wrapper=["unshare", "-m", "sh", "-c", script, "sh"]) == (0, "", "")


@pytest.mark.skipif(os.getuid() == 0, reason="root has no limit of processes")
def test_a_start_without_enough_processes_leaves_nothing(run):
    text = """
limit(resource.RLIMIT_NPROC, 1)
try:
    GeneratorEnqueuer(counting, backend=Processes(start_method=METHOD), workers=4).start()
except StartError as error:
    assert "ulimit -u" in str(error)
else:
    raise AssertionError("no error")
"""
    assert run(text) == (0, "", "")


def test_a_local_error_of_a_worker_without_descriptors_arrives_as_itself(run):
    text = """
class LocalError(Exception):
    pass
def source(shard):
    yield 0
    limit(resource.RLIMIT_NOFILE, 3)
    raise LocalError("no room")
with GeneratorEnqueuer(source, backend=Processes(start_method=METHOD)) as enqueuer:
    try:
        list(enqueuer)
    except Exception as error:
        assert (type(error).__name__, str(error)) == ("LocalError", "no room"), repr(error)
    else:
        raise AssertionError("no error")
"""
    assert run(text) == (0, "", "")


@pytest.mark.thorough
def test_sixteen_workers_send_many_small_arrays_with_few_descriptors(run):
    """A batch of them needs no descriptor of its own, also if the loop keeps all batches."""
    text = """
def source(shard):
    for number in shard.split(range(320)):
        yield [np.full(256, number, np.float32) for _ in range(114)]
limit(resource.RLIMIT_NOFILE, 256)
options = dict(backend=Processes(start_method=METHOD), workers=16, max_queue_size=32)
for _ in range(2):
    with GeneratorEnqueuer(source, **options) as enqueuer:
        kept = list(enqueuer)
    assert len(kept) == 320
    assert all((array == number).all() for number, batch in enumerate(kept) for array in batch)
    del kept
"""
    assert run(text) == (0, "", "")


@pytest.mark.thorough
def test_a_consumer_may_keep_more_batches_than_it_has_descriptors(run):
    text = """
def source(shard):
    for number in shard.split(range(400)):
        yield np.full(100_000, number % 256, np.uint8)
limit(resource.RLIMIT_NOFILE, 256)
options = dict(backend=Processes(start_method=METHOD), workers=2, max_queue_size=4)
for _ in range(2):
    with GeneratorEnqueuer(source, **options) as enqueuer:
        kept = list(enqueuer)
    assert len(kept) == 400
    assert all((batch == number % 256).all() for number, batch in enumerate(kept))
    del kept
"""
    assert run(text) == (0, "", "")


@pytest.mark.timeout(60)
def test_credit_for_a_worker_whose_socket_is_full_is_sent_when_there_is_room(monkeypatch):
    """The consumer sleeps until then; the worker, which waits for the credit, cannot wake it."""
    refused = []

    def send(control, kind, *args, **options):
        if kind is Kind.CREDIT and len(refused) % 2 == 0:
            refused.append(kind)
            return False
        refused.append(None)
        return sent(control, kind, *args, **options)

    sent = ReceiverControl.send
    monkeypatch.setattr(ReceiverControl, "send", send)
    options = {"workers": 2, "max_queue_size": 1, "backend": "process"}
    with GeneratorEnqueuer(twelve, **options) as enqueuer:
        assert list(enqueuer) == list(range(12))
    assert Kind.CREDIT in refused
