"""Workers killed from outside, and what could hide their death."""

import multiprocessing
import os
import signal
import subprocess
import tempfile
import time

import helpers
import numpy as np
import pytest
from helpers import (
    LIMIT,
    METHODS,
    Crashing,
    alive,
    counting,
    run_program,
    start_method_of,
)

from enqueuer import GeneratorEnqueuer, Processes, WorkerDied
from enqueuer.backends.process import fork_server
from enqueuer.backends.process.fork_server import JOB_SIGNALS
from enqueuer.common.descriptors import PORTABLE
from enqueuer.enqueuers.enqueuer import core_of


def tells_pid(shard):
    """Yield the pid, then go on."""
    yield os.getpid()
    yield from range(10**9)


def sleeps(shard):
    yield os.getpid()
    time.sleep(1000)


def expect_death(batches, says="was killed by SIGKILL"):
    """Read on to the death; return the seconds that it took."""
    before = time.monotonic()
    with pytest.raises(WorkerDied, match=says):
        while time.monotonic() < before + LIMIT:
            next(batches)
    return time.monotonic() - before


@pytest.mark.parametrize("source", [tells_pid, sleeps])
@pytest.mark.parametrize("stopped", [False, True])
@helpers.retry_if_disturbed
def test_a_kill_from_outside_is_told_at_once(process, source, stopped):
    with GeneratorEnqueuer(source, workers=2, max_queue_size=4, **process) as enqueuer:
        batches = iter(enqueuer)
        pids = [next(batches), next(batches)]
        if stopped:
            os.kill(pids[1], signal.SIGSTOP)
        os.kill(pids[1], signal.SIGKILL)
        took = expect_death(batches, r"worker 1 \(process \d+, \w+\) was killed by SIGKILL")
        print(f"death -> error, {start_method_of(process)}: {took * 1000:.0f} ms")
        helpers.check_prompt(took, 1)
        assert alive(pids[0])


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGALRM, "was killed by SIGALRM"),
        (signal.SIGBUS, "was killed by SIGBUS"),
        (signal.SIGRTMIN + 3, "was killed by (SIGRTMIN|signal)"),
    ],
)
def test_any_deadly_signal_is_named(process, number, says):
    with GeneratorEnqueuer(sleeps, **process) as enqueuer:
        batches = iter(enqueuer)
        os.kill(next(batches), number)
        expect_death(batches, says)


@pytest.mark.parametrize("number", [signal.SIGINT, *JOB_SIGNALS])
def test_a_signal_of_a_scheduler_to_all_processes_ends_no_worker(process, number):
    with GeneratorEnqueuer(tells_pid, **process) as enqueuer:
        batches, server = iter(enqueuer), fork_server.server.popen
        pids = [next(batches)]
        if start_method_of(process) == "forkserver":
            pids.append(server.pid)
        for at in range(20):
            for pid in pids:
                os.kill(pid, number)
            assert next(batches) == at
    # The server still forks.
    with GeneratorEnqueuer(tells_pid, **process) as enqueuer:
        assert next(iter(enqueuer)) not in pids
    assert fork_server.server.popen is server


def test_what_a_worker_starts_can_be_terminated(process):
    """A program inherits what is ignored, and a forked child handlers as well."""

    def source():
        program = subprocess.Popen(["sleep", "1000"])
        program.terminate()
        yield program.wait(LIMIT)
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=time.sleep, args=(1000,), daemon=True)
        child.start()
        child.terminate()
        child.join(LIMIT)
        yield child.exitcode

    with GeneratorEnqueuer(source, **process) as enqueuer:
        assert list(enqueuer) == [-signal.SIGTERM] * 2


def test_a_worker_keeps_the_handlers_of_its_generator(process):
    def source():
        heard = []
        signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
        signal.raise_signal(signal.SIGUSR1)
        yield heard
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)

    with GeneratorEnqueuer(source, **process) as enqueuer:
        batches = iter(enqueuer)
        assert next(batches) == [1]
        expect_death(batches, r"killed by SIGTERM; .* perhaps a job scheduler")


def test_a_worker_that_is_killed_before_its_first_word(process):
    with GeneratorEnqueuer(counting, workers=2, **process) as enqueuer:
        os.kill(core_of(enqueuer).run.backend.pool.workers[0].process.pid, signal.SIGKILL)
        expect_death(iter(enqueuer), r"worker 0 .* was killed by SIGKILL")


# --- what could hide a death ---


def forks_a_child(shard):
    child = os.fork()
    if child == 0:
        while True:
            time.sleep(1000)
    yield os.getpid(), child
    yield from range(10**9)


def leaks_to_a_program(shard):
    child = subprocess.Popen(["sleep", "1000"], close_fds=False)
    for fd in os.listdir("/proc/self/fd"):
        if int(fd) > 2:
            try:
                os.set_inheritable(int(fd), True)
            except OSError:  # that of the listing
                pass
    leaky = subprocess.Popen(["sleep", "1000"], close_fds=False)
    child.kill()
    child.wait()
    yield os.getpid(), leaky.pid
    yield from range(10**9)


def skip_without_pidfd(source):
    if source is leaks_to_a_program and PORTABLE in os.environ:
        pytest.skip("without a pidfd the end of the channel is all that tells of a death")


@pytest.mark.parametrize("source", [forks_a_child, leaks_to_a_program])
@helpers.retry_if_disturbed
def test_a_grandchild_that_holds_everything_open_hides_nothing(process, source):
    skip_without_pidfd(source)
    with GeneratorEnqueuer(source, max_queue_size=1, **process) as enqueuer:
        batches = iter(enqueuer)
        pid, grandchild = next(batches)
        try:
            os.kill(pid, signal.SIGKILL)
            helpers.check_prompt(expect_death(batches), 1)
            assert alive(grandchild)
            before = time.monotonic()
            enqueuer.stop()
            helpers.check_prompt(time.monotonic() - before, 1)
        finally:
            os.kill(grandchild, signal.SIGKILL)


@pytest.mark.parametrize("source", [forks_a_child, leaks_to_a_program])
@helpers.retry_if_disturbed
def test_stop_does_not_wait_for_a_grandchild(process, source):
    skip_without_pidfd(source)
    with GeneratorEnqueuer(source, max_queue_size=1, **process) as enqueuer:
        _, grandchild = next(iter(enqueuer))
        try:
            before = time.monotonic()
            enqueuer.stop()
            helpers.check_prompt(time.monotonic() - before, 1)
        finally:
            os.kill(grandchild, signal.SIGKILL)


def closes_everything(shard):
    yield 0
    os.closerange(3, 1000)
    time.sleep(1000)


@pytest.mark.thorough
@helpers.retry_if_disturbed
def test_a_worker_that_closes_all_its_descriptors_is_dead(process):
    with GeneratorEnqueuer(closes_everything, **process) as enqueuer:
        batches = iter(enqueuer)
        assert next(batches) == 0
        helpers.check_prompt(expect_death(batches, "worker 0"), 2)


def stays_behind_its_channel(shard):
    try:
        while True:
            yield os.getpid()
    finally:
        os.closerange(3, 1000)
        time.sleep(1000)


@pytest.mark.thorough
def test_stop_ends_a_worker_that_stays_behind_its_channel(process):
    """The end of the channel is not that of the process, which the fixture would find."""
    with GeneratorEnqueuer(stays_behind_its_channel, **process) as enqueuer:
        pid = next(iter(enqueuer))
    assert not helpers.alive(pid)


def dies_before_its_memory_is_nameless(shard):
    yield tempfile.gettempdir()  # looking for it unlinks a file, too
    os.unlink = lambda path: helpers.kill_self()
    yield np.zeros(10_000_000, np.uint8)


@pytest.mark.parametrize("method", METHODS)
def test_where_memory_has_a_name_at_first_it_does_not_stay(method, monkeypatch):
    monkeypatch.setenv(PORTABLE, "1")
    with GeneratorEnqueuer(
        dies_before_its_memory_is_nameless, backend=Processes(start_method=method)
    ) as enqueuer:
        expect_death(iter(enqueuer))


# --- what changes the whole process; so in a program of its own ---

BEGIN = """
    import os, signal, time
    import helpers
    from enqueuer import GeneratorEnqueuer, Processes, WorkerDied
    from enqueuer.backends.process import fork_server

    def source(shard):
        yield os.getpid()
        yield from range(10**9)

    def until_death(batches):
        before = time.monotonic()
        try:
            for _ in batches:
                assert time.monotonic() < before + 30
        except WorkerDied as error:
            helpers.check_prompt(time.monotonic() - before, 1)
            return str(error)

"""


def program(text, method):
    lines = [line for line in text.splitlines() if line.strip()]
    options = f"backend=Processes(start_method={method!r})"
    return BEGIN + "\n".join("    " + line for line in lines).replace("OPTIONS", options)


def check_program(folder, text):
    """Run a program that must end well and say nothing; raise Disturbed if it was late."""
    code, out, err = run_program(folder, text)
    if "helpers.Disturbed" in err:
        raise helpers.Disturbed(err)
    assert (code, out, err) == (0, "", "")


@helpers.retry_if_disturbed
def test_a_stranger_who_reaps_the_worker_hides_only_its_exit_code(tmp_path):
    text = """
with GeneratorEnqueuer(source, OPTIONS) as enqueuer:
    batches = iter(enqueuer)
    pid = next(batches)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert "unknown exit code" in until_death(batches)
"""
    check_program(tmp_path, program(text, "fork"))


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
@helpers.retry_if_disturbed
def test_sigchld_may_be_ignored(method, tmp_path):
    text = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(2):
    with GeneratorEnqueuer(source, workers=2, OPTIONS) as enqueuer:
        batches = iter(enqueuer)
        pids = [next(batches), next(batches)]
        os.kill(pids[0], signal.SIGKILL)
        assert "worker 0" in until_death(batches)
with GeneratorEnqueuer(helpers.twelve, workers=2, OPTIONS) as enqueuer:
    assert list(enqueuer) == list(range(12))
"""
    check_program(tmp_path, program(text, method))


needs_server = pytest.mark.skipif("forkserver" not in METHODS, reason="there is no fork server")


@pytest.mark.thorough
@needs_server
@pytest.mark.parametrize("replaced", [False, True])
@helpers.retry_if_disturbed
def test_workers_go_on_without_their_fork_server(replaced, tmp_path):
    text = """
with GeneratorEnqueuer(source, OPTIONS) as enqueuer:
    batches = iter(enqueuer)
    pid = next(batches)
    os.kill(fork_server.server.popen.pid, signal.SIGKILL)
    assert [next(batches) for _ in range(100)] == list(range(100))
    if REPLACED:
        with GeneratorEnqueuer(helpers.counting, OPTIONS) as second:
            assert next(iter(second)) == (0, 0)  # by a new server
    os.kill(pid, signal.SIGKILL)
    assert "unknown exit code" in until_death(batches)
with GeneratorEnqueuer(source, OPTIONS) as enqueuer:
    pid = next(iter(enqueuer))
    os.kill(fork_server.server.popen.pid, signal.SIGKILL)
assert not helpers.alive(pid)
""".replace("REPLACED", str(replaced))
    check_program(tmp_path, program(text, "forkserver"))


# --- beside other things ---


@helpers.retry_if_disturbed
def test_a_kill_while_the_worker_logs_without_end(process, caplog):
    def source(shard):
        import logging

        yield os.getpid()
        while True:
            logging.getLogger("flood").warning("many")

    with caplog.at_level("WARNING"), GeneratorEnqueuer(source, **process) as enqueuer:
        batches = iter(enqueuer)
        pid = next(batches)
        os.kill(pid, signal.SIGKILL)
        helpers.check_prompt(expect_death(batches), 2)


def test_the_crash_of_one_enqueuer_leaves_another_alone(process, tmp_path):
    crashing = Crashing("third", helpers.kill_self, tmp_path / "mark")
    with (
        GeneratorEnqueuer(tells_pid, **process) as healthy,
        GeneratorEnqueuer(crashing, **process) as sick,
    ):
        batches = iter(healthy)
        next(batches)
        with pytest.raises(WorkerDied):
            list(sick)
        sick.stop()
        assert [next(batches) for _ in range(30)] == list(range(30))
