"""The fork server outlives interrupted starts, full systems and raised limits."""

import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest
from helpers import METHODS, alive, handling, pid_of, run_program, wait_until

from enqueuer import GeneratorEnqueuer, Processes
from enqueuer.backends.process import fork_server

if "forkserver" not in METHODS:
    pytest.skip("needs a fork server", allow_module_level=True)


def pids(shard):
    while True:
        yield os.getpid()


def interrupted(sock, timeout):
    raise KeyboardInterrupt


def serve():
    return GeneratorEnqueuer(pids, backend=Processes(start_method="forkserver"))


def test_an_interrupted_start_does_not_shift_the_answers_to_later_ones(monkeypatch):
    """Each start would get the process of the one before it, and end another one's worker."""

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        # The answer is never read.
        patch.setattr(fork_server, "readable", interrupted)
        serve().start()
    with serve() as first, serve() as second:
        own = [next(iter(enqueuer)) for enqueuer in (first, second)]
        assert [pid_of(enqueuer) for enqueuer in (first, second)] == own
        first.stop()
        assert not alive(own[0]) and alive(own[1])


def test_the_child_that_an_interrupted_start_asked_for_ends(monkeypatch):
    forked, readable = [], fork_server.readable

    def interrupted_at_the_answer(sock, timeout):
        assert readable(sock, timeout)
        server = psutil.Process(fork_server.server.popen.pid)
        forked.extend(child.pid for child in server.children())
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fork_server, "readable", interrupted_at_the_answer)
        serve().start()
    (pid,) = forked
    wait_until(lambda: not alive(pid))


@pytest.mark.thorough
def test_a_worker_is_replaced_under_alarms_that_come_more_often_than_forks():
    """The server goes on at the tenth alarm; until then, no start is tried again with each."""

    class Alarm(Exception):
        pass

    def handler(number, frame):
        alarms.append(number)
        if len(alarms) == 10:
            os.kill(fork_server.server.popen.pid, signal.SIGCONT)
        raise Alarm

    alarms, found = [], set()
    served = Processes(start_method="forkserver")
    enqueuer = GeneratorEnqueuer(pids, max_queue_size=1, max_restarts=1, backend=served)
    with handling(signal.SIGALRM, handler), enqueuer:
        batches = iter(enqueuer)
        first = next(batches)
        os.kill(fork_server.server.popen.pid, signal.SIGSTOP)
        os.kill(first, signal.SIGKILL)
        while not found - {first}:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005)
                found.add(next(batches))
            except Alarm:
                continue
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        assert enqueuer.restart_count == 1


STOPPED = """
    import os, signal
    import helpers
    from enqueuer import GeneratorEnqueuer, Processes, StartError
    from enqueuer.backends.process import fork_server

    def serve():
        return GeneratorEnqueuer(helpers.twelve, backend=Processes(start_method="forkserver"))

    def interrupted(sock, timeout):
        raise KeyboardInterrupt

    assert list(serve()) == list(range(12))
    os.kill(fork_server.server.popen.pid, signal.SIGSTOP)
    readable, fork_server.readable = fork_server.readable, interrupted
    for _ in range(10_000):
        try:
            serve().start()
        except KeyboardInterrupt:
            continue
        except StartError as error:
            print(error)
            break
    fork_server.readable = readable
    assert list(serve()) == list(range(12))
"""


@pytest.mark.thorough
def test_a_server_that_reads_no_requests_is_killed(tmp_path):
    """A socket that is full of requests would let the next start wait for ever."""
    code, told, errors = run_program(tmp_path, STOPPED)
    assert (code, errors) == (0, "")
    assert told.startswith(f"{fork_server._NO_ANSWER}; a likely cause is a busy machine")


PRELOADING = """
    import multiprocessing, os, sys
    from enqueuer import GeneratorEnqueuer

    def imported(shard):
        import counted
        yield os.getpid(), counted.pid, "broken" in sys.modules

    multiprocessing.set_forkserver_preload(["__main__", "missing", "broken", "counted"])
    with GeneratorEnqueuer(imported, shards=2, workers=2, backend="process") as enqueuer:
        workers = list(enqueuer)
    assert len({worker for worker, _, _ in workers}) == 2, workers
    ((server,),) = [{server for _, server, _ in workers}]
    assert server not in {os.getpid(), *(worker for worker, _, _ in workers)}, workers
    assert "counted" not in sys.modules
"""


def test_modules_are_imported_once_for_all_workers(tmp_path):
    (tmp_path / "counted.py").write_text("import os\npid = os.getpid()\n")
    (tmp_path / "broken.py").write_text("raise RuntimeError\n")
    assert run_program(tmp_path, PRELOADING) == (0, "", "")


# The cause of an error that names what the program has given.
PRELOADED = (
    "; a likely cause is a module that was given to "
    "multiprocessing.set_forkserver_preload(): preloaded"
)


def start_with_preloaded(path, code, then=""):
    (path / "preloaded.py").write_text(textwrap.dedent(code))
    text = f"""
        import multiprocessing, os
        import helpers
        from enqueuer import GeneratorEnqueuer, StartError
        from enqueuer.backends.process import fork_server

        {then}
        multiprocessing.set_forkserver_preload(["preloaded"])
        try:
            for _ in range(2):
                with GeneratorEnqueuer(helpers.twelve, backend="process", workers=2) as enqueuer:
                    assert list(enqueuer) == list(range(12))
                    server = fork_server.server.popen.pid
            print(server == fork_server.server.popen.pid)
        except StartError as error:
            print(error)
            # only multiprocessing's resource tracker runs on; no server is left to be reaped
            pid, _ = os.waitpid(-1, os.WNOHANG)
            assert pid == 0, pid
    """
    return run_program(path, text)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import sys; sys.exit('no')", id="exits"),
        pytest.param("import os; os.fork() or os._exit(0)", id="starts-a-process"),
    ],
)
def test_the_server_outlives_a_module_that(code, tmp_path):
    assert start_with_preloaded(tmp_path, code) == (0, "True\n", "")


def test_a_module_that_ends_the_server_is_a_start_error(tmp_path):
    message = fork_server._NO_SERVER + PRELOADED + "\n"
    assert start_with_preloaded(tmp_path, "import os; os._exit(1)") == (0, message, "")


@pytest.mark.thorough
def test_a_server_that_hangs_is_killed(tmp_path):
    soon = "fork_server._SERVER_START_S = 0.1"
    found = start_with_preloaded(tmp_path, "import signal; signal.pause()", soon)
    assert found == (0, fork_server._NO_ANSWER + PRELOADED + "\n", "")


FULL = """
    import errno, os, sys
    import helpers
    from enqueuer import GeneratorEnqueuer, Processes, StartError
    from enqueuer.backends.process import fork_server

    def enqueuer():
        return GeneratorEnqueuer(helpers.twelve, backend=Processes(start_method="forkserver"))

    with enqueuer() as first:
        batches = iter(first)
        next(batches)
        server = fork_server.server.popen.pid
        open("full", "w").close()
        try:
            enqueuer().start()
        except StartError as error:
            assert os.strerror(errno.EAGAIN) in str(error), error
        else:
            raise AssertionError("no error")
        os.unlink("full")
        assert list(enqueuer()) == list(range(12))
        assert list(batches) == list(range(1, 12))
        assert fork_server.server.popen.pid == server
"""


@pytest.mark.thorough
def test_a_fork_that_fails_is_a_start_error_and_not_the_servers_end(tmp_path, monkeypatch):
    site = tmp_path / "site"
    site.mkdir()
    text = """
        import errno, os
        really = os.fork
        def fork():
            if os.path.exists("full"):
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return really()
        os.fork = fork
    """
    (site / "sitecustomize.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(site)
    assert run_program(tmp_path, FULL) == (0, "", "")


@pytest.mark.thorough
def test_a_limit_that_was_raised_since_holds_for_the_server_as_well(tmp_path):
    text = """
        import resource
        import helpers
        from enqueuer import GeneratorEnqueuer, Processes

        def enqueuer(workers):
            options = dict(backend=Processes(start_method="forkserver"), workers=workers)
            return GeneratorEnqueuer(helpers.twelve, **options)

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, hard))
        assert list(enqueuer(1)) == list(range(12))
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
        assert list(enqueuer(16)) == [*range(12)]
    """
    assert run_program(tmp_path, text) == (0, "", "")


def test_a_start_goes_on_whose_answer_another_wait_has_read(monkeypatch):
    """A signal handler, or the garbage collector, may stop another enqueuer at any moment."""
    readable, woken = fork_server.readable, []
    with serve() as other:
        next(iter(other))

        def interrupted(sock, timeout):
            monkeypatch.setattr(fork_server, "readable", readable)
            assert readable(sock, timeout)
            other.stop()  # reads what has come
            woken.append(readable(sock, 5.0))
            return True

        with serve() as enqueuer:
            for _ in range(50):
                monkeypatch.setattr(fork_server, "readable", interrupted)
                with serve() as second:
                    monkeypatch.setattr(fork_server, "readable", readable)
                    assert next(iter(second)) != next(iter(enqueuer))
                if woken:
                    break  # else the answer was there before it was waited for
    assert woken == [True]


TRACKED = """
import os, signal, warnings
from multiprocessing import resource_tracker
from enqueuer import OrderedEnqueuer
warnings.simplefilter("error")
os.setpgrp()
signal.signal(signal.SIGUSR1, lambda number, frame: None)
def same(element):
    return element
with OrderedEnqueuer(range(4), same, workers=2, backend="process") as enqueuer:
    list(enqueuer)
    os.killpg(0, signal.SIGUSR1)
before = resource_tracker._resource_tracker._pid
resource_tracker.ensure_running()
print(before == resource_tracker._resource_tracker._pid)
"""


@pytest.mark.thorough
def test_the_resource_tracker_outlives_the_signals_of_a_job_scheduler():
    done = subprocess.run([sys.executable, "-c", TRACKED], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
