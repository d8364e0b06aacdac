"""Ctrl-C goes to the whole group: one KeyboardInterrupt, in the training loop, and silence else."""

import os
import signal
import time

import pytest
from helpers import METHODS, Program

OPTIONS = ["backend='thread'"] + [f"backend=Processes(start_method={m!r})" for m in METHODS]


@pytest.fixture(params=OPTIONS, ids=["thread", *METHODS])
def options(request):
    return request.param


PLACES = {
    "loop": "print('here', flush=True)\n        for batch in enqueuer: time.sleep(0.001)",
    "wait": "next(enqueuer.get())\n        print('here', flush=True)\n        next(enqueuer.get())",
    "start": "enqueuer.stop()\n        print('here', flush=True)\n"
    "        while True: enqueuer.start(); enqueuer.stop()",
}

SCRIPT = """
    import time
    from enqueuer import GeneratorEnqueuer, Processes

    def counting(shard):
        yield 0
        {after}
        for number in range(10**9):
            yield number

    enqueuer = GeneratorEnqueuer(counting, workers=2, max_queue_size=2, {options})
    with enqueuer:
        {body}
"""


@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_is_one_keyboard_interrupt(options, place, tmp_path):
    after = "time.sleep(1000)" if place == "wait" and "Processes" in options else "pass"
    if place == "wait" and "thread" in options:
        after = "[time.sleep(0.01) for _ in range(100)]"
    text = SCRIPT.format(options=options, after=after, body=PLACES[place])
    with Program(tmp_path, text) as program:
        assert program.line() == "here"
        before = time.monotonic()
        os.killpg(program.process.pid, signal.SIGINT)
        code, out, err = program.wait()
        assert code == -signal.SIGINT, err
        assert out == ""
        assert _stories(err) == 1, err
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert time.monotonic() - before < 5
        program.check_nothing_left()


@pytest.mark.thorough
@pytest.mark.parametrize("moment", range(6))
@pytest.mark.parametrize("method", METHODS)
def test_ctrl_c_at_any_moment_of_a_start_leaves_nothing(method, moment, tmp_path):
    """A first start, with all that comes to life for it."""
    text = SCRIPT.format(
        options=f"backend=Processes(start_method={method!r})",
        after="pass",
        body="print(sum(zip(range(10), enqueuer), ()) and 'end', flush=True); time.sleep(1000)",
    ).replace("    enqueuer = Gen", "    print('here', flush=True)\n    enqueuer = Gen")
    with Program(tmp_path, text) as program:
        assert program.line() == "here"
        time.sleep(moment * 0.015)  # no synchronisation: the moments shall differ
        os.killpg(program.process.pid, signal.SIGINT)
        code, _, err = program.wait()
        assert code == -signal.SIGINT, err
        assert _stories(err) == 1, err
        assert err.rstrip().endswith("KeyboardInterrupt")
        program.check_nothing_left()


def _stories(err):
    """Count the tracebacks on stderr; a traceback that shows an interrupted one counts once.

    A Ctrl-C may strike anywhere, in an `except KeyError:` of the import system, too.
    """
    chained = err.count("During handling of the above exception, another exception occurred")
    return err.count("Traceback (most recent call last)") - chained
