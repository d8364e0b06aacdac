"""Programs that never call stop(), and Ctrl-C: the exit is theirs, bounded, silent, complete."""

import os
import signal
import time

import pytest
from helpers import METHODS, Program, check_prompt, retry_if_disturbed, run_program

OPTIONS = ["backend='thread'"] + [f"backend=Processes(start_method={m!r})" for m in METHODS]

SCRIPT = """
    import os, signal, sys, time
    import helpers
    from enqueuer import GeneratorEnqueuer, Processes, prefetch

    def counting(shard):
        number = 0
        while True:
            yield number
            number += 1

    def hanging(shard):
        yield os.getpid()
        helpers.hang()

    def deaf(shard):
        yield os.getpid()
        helpers.hang_deaf()

"""


@pytest.fixture(params=OPTIONS, ids=["thread", *METHODS])
def options(request):
    return request.param


def program(text, options):
    lines = [line for line in text.splitlines() if line.strip()]
    return SCRIPT + "\n".join("    " + line for line in lines).replace("OPTIONS", options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('bye')", 1, "bye\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("os._exit(5)", 5, ""),
    ],
)
def test_the_exit_is_the_programs_own(options, end, code, says, tmp_path):
    text = f"""
enqueuer = GeneratorEnqueuer(counting, workers=2, OPTIONS)
for batch in enqueuer:
    if batch == 3:
        break
print(batch, flush=True)
{end}
"""
    got, out, err = run_program(tmp_path, program(text, options))
    assert (got, out) == (code, "3\n"), err
    assert err == says if "Error" not in says else err.endswith(says)
    assert err.count("Traceback") == ("Error" in says)


@pytest.mark.thorough
def test_an_error_of_the_generator_is_the_only_traceback(options, tmp_path):
    text = """
for batch in GeneratorEnqueuer(helpers.Failing(3, helpers.raise_value_error), OPTIONS):
    pass
"""
    code, _, err = run_program(tmp_path, program(text, options))
    assert code == 1
    assert err.count("Traceback (most recent call last)") == 1, err
    assert "raise_value_error" in err and "ValueError: ('bad value', 7)" in err


@pytest.mark.thorough
@pytest.mark.parametrize("source", ["hanging", "deaf"])
@retry_if_disturbed
def test_a_worker_that_hangs_does_not_hold_up_the_exit_for_long(options, source, tmp_path):
    if "thread" in options and source == "deaf":
        pytest.skip("a thread ignores every signal anyway")
    text = f"""
enqueuer = GeneratorEnqueuer({source}, workers=2, OPTIONS)
for _, batch in zip(range(2), enqueuer):
    pass
del _, batch
print("end", flush=True)
sys.exit(3)
"""
    with Program(tmp_path, program(text, options)) as running:
        assert running.line() == "end"
        before = time.monotonic()
        code, _, err = running.wait()
        took = time.monotonic() - before
        print(f"exit with a worker that is {source}: {took:.2f} s")
        assert code == 3
        if "Processes" in options:
            assert err == ""
        else:
            assert "StopWarning: enqueuer-worker-0 did not end within" in err
            assert "Traceback" not in err
        check_prompt(took, 2.6 + 1.4)
        running.check_nothing_left()


@pytest.mark.thorough
def test_the_fork_servers_end_leaves_no_word(tmp_path):
    """Also if its parent is a process that has workers by every method, and two enqueuers."""
    text = """
several = []
for method in METHODS:
    for _ in range(2):
        enqueuer = GeneratorEnqueuer(counting, backend=Processes(start_method=method))
        several.append(iter(enqueuer))
        assert next(several[-1]) == 0
""".replace("METHODS", repr(METHODS))
    assert run_program(tmp_path, program(text, "")) == (0, "", "")


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_a_child_of_multiprocessing_may_forget_to_stop(method, tmp_path):
    """Its exit is multiprocessing's own, which joins its children without a limit."""
    text = f"""
import multiprocessing

def child():
    enqueuer = GeneratorEnqueuer(counting, backend=Processes(start_method={method!r}))
    keep.append(enqueuer)  # so that it is not collected
    assert next(iter(enqueuer)) == 0

keep = []
for batch in GeneratorEnqueuer(counting, backend=Processes(start_method={method!r})):
    break  # the parent has one, too
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(20)
print(process.exitcode)
"""
    with_warnings = program(text, "").replace("import os,", "import os, warnings,", 1)
    text = with_warnings.replace("keep = []", "keep = []; warnings.simplefilter('ignore')")
    assert run_program(tmp_path, text) == (0, "0\n", "")


# --- Ctrl-C goes to the whole group: one KeyboardInterrupt, in the training loop -----------------

PLACES = {
    "loop": "print('here', flush=True)\n        for batch in enqueuer: time.sleep(0.001)",
    "wait": "next(enqueuer.get())\n        print('here', flush=True)\n        next(enqueuer.get())",
    "start": "enqueuer.stop()\n        print('here', flush=True)\n"
    "        while True: enqueuer.start(); enqueuer.stop()",
}

COUNTING = """
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
    text = COUNTING.format(options=options, after=after, body=PLACES[place])
    with Program(tmp_path, text) as program:
        assert program.line() == "here"
        before = time.monotonic()
        os.killpg(program.process.pid, signal.SIGINT)
        code, out, err = program.wait()
        assert code == -signal.SIGINT, err
        assert out == ""
        assert stories(err) == 1, err
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert time.monotonic() - before < 5
        program.check_nothing_left()


@pytest.mark.thorough
@pytest.mark.parametrize("moment", range(6))
@pytest.mark.parametrize("method", METHODS)
def test_ctrl_c_at_any_moment_of_a_start_leaves_nothing(method, moment, tmp_path):
    """A first start, with all that comes to life for it."""
    text = COUNTING.format(
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
        assert stories(err) == 1, err
        assert err.rstrip().endswith("KeyboardInterrupt")
        program.check_nothing_left()


def stories(err):
    """Count the tracebacks on stderr; a traceback that shows an interrupted one counts once.

    A Ctrl-C may strike anywhere, in an `except KeyError:` of the import system, too.
    """
    chained = err.count("During handling of the above exception, another exception occurred")
    return err.count("Traceback (most recent call last)") - chained
