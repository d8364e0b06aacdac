"""The parent is killed: no worker outlives it, whatever it does, and nothing is left."""

import os
import signal

import pytest
from helpers import METHODS, Program

# what each of two workers does once both have told their pids
STATES = {
    "idle": "return",
    "full queue": "yield from itertools.count()",
    "asleep": "time.sleep(1000)",
    "deaf": "helpers.hang_deaf()",
    "in C": "helpers.hang_in_c()",
}

SCRIPT = """
    import itertools, os, sys, threading, time
    import helpers
    from enqueuer import GeneratorEnqueuer, Processes

    def source(shard):
        yield os.getpid()
        {state}
        yield

    enqueuer = GeneratorEnqueuer(
        source, backend=Processes(start_method={method!r}), workers=2, max_queue_size=2
    )
    starter = threading.Thread(target=enqueuer.start)
    starter.start()
    starter.join()  # the thread that started them is gone
    batches = enqueuer.get()
    print(next(batches), next(batches), flush=True)
    time.sleep(1000)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    # what the workers do makes no difference if they are killed, too
    ("victim", "state"),
    [*(("parent", state) for state in STATES), ("session", "full queue")],
)
@pytest.mark.parametrize("method", METHODS)
def test_no_worker_outlives_a_killed_parent(method, state, victim, tmp_path):
    text = SCRIPT.format(method=method, state=STATES[state])
    with Program(tmp_path, text) as program:
        pids = set(map(int, program.line().split()))
        assert pids < program.members()
        if victim == "parent":
            program.process.kill()
        else:
            os.killpg(program.process.pid, signal.SIGKILL)
        program.check_nothing_left()  # 0.1 s, with nothing else to do
        code, _, err = program.wait()
        assert (code, err) == (-signal.SIGKILL, "")


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_no_worker_outlives_a_parent_that_is_killed_while_it_starts_them(method, tmp_path):
    text = f"""
        import helpers, os, threading, time
        from enqueuer import GeneratorEnqueuer, Processes

        print("now", flush=True)
        enqueuer = GeneratorEnqueuer(
            helpers.counting, backend=Processes(start_method={method!r}), workers=40
        )
        enqueuer.start()
        time.sleep(1000)
    """
    with Program(tmp_path, text) as program:
        program.line()
        while len(program.members()) < 4:  # some are there, some are not
            assert program.process.poll() is None
        program.process.kill()
        program.check_nothing_left()  # a spawned one must have come to its first line


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_a_thread_that_started_workers_may_end(method, tmp_path):
    """As it may not with PR_SET_PDEATHSIG, which this package therefore does not use."""
    text = SCRIPT.format(method=method, state="yield from itertools.count()")
    rest = "print(*itertools.islice(batches, 40)); enqueuer.stop()"
    text = text.replace("time.sleep(1000)", rest)
    with Program(tmp_path, text) as program:
        program.line()
        assert program.line() == " ".join(f"{n // 2}" for n in range(40))
        assert program.wait() == (0, "", "")
        program.check_nothing_left()
