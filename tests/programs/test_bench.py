"""`enqueuer bench`: real runs of sources of which the answer is known."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from helpers import LIMIT, Disturbed, Program, retry_if_disturbed

from enqueuer.cli import main
from enqueuer.tools.bench import Loop, Unmeasurable, bench

SOURCE = """
import os, threading, time

def sleeping(shard):
    while True:
        time.sleep(0.02)
        yield bytes(1000)

def computing(shard):
    for _ in shard.split(range(200)):
        yield sum(n * n for n in range(20_000))

def unsplit():
    yield from range(100)

def unsplit_arrays():
    for number in range(100):
        time.sleep(0.001)
        yield bytes([number]) * 1000

def locks(shard):
    while True:
        time.sleep(0.001)
        yield threading.Lock()

def breaks(shard):
    yield 1
    yield 2
    raise KeyError("no such file")

def breaks_if_split(shard):
    while True:
        yield shard.count
        if shard.count > 1:
            raise KeyError("the second of them")

def hangs_if_split(shard):
    while True:
        if shard.count > 1:
            time.sleep(1000)
        yield 1

def empty():
    return iter(())

def hanging():
    yield from hang_here()

def hang_here():
    time.sleep(1000)
    yield

running = iter("abc")
listed = [1, 2]
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Return what has a name in the module of sources, which workers can import, too."""
    (tmp_path / "benched.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "benched", raising=False)
    return lambda name: getattr(__import__("benched"), name)


def last(*arguments, **options):
    options = dict(loop=Loop(0.3), wait_limit_s=LIMIT, max_workers=4) | options
    *_, report = bench(*arguments, **options)
    return report


@pytest.fixture
def run(tmp_path):
    """Run the command where the sources lie."""
    (tmp_path / "benched.py").write_text(SOURCE)
    return lambda *arguments: subprocess.run(
        [sys.executable, "-m", "enqueuer", "bench", *arguments],
        cwd=tmp_path,
        timeout=2 * LIMIT,
        capture_output=True,
        text=True,
        **surroundings(),
    )


def surroundings():
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return dict(env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL)


# --- the numbers ---


def check(is_right, report):
    """Raise Disturbed if the numbers of a report are not right, as on a busy machine."""
    if not is_right:
        raise Disturbed(str(report))


@retry_if_disturbed
def test_a_source_that_waits_is_made_faster_by_threads(source):
    found = last(source("sleeping"), backends=["thread"])
    rates = {one.workers: one.batches_per_s for one in found.measured}
    check(rates[4] > 1.5 * rates[1], found)
    check(found.best.workers == 4 and found.gain > 1.5, found)
    check(found.gil_share < 0.3, found)
    assert all(one.batch_bytes == 1000 for one in found.measured)


@retry_if_disturbed
def test_a_source_in_python_holds_the_gil_and_runs_on_processes(source):
    found = last(source("computing"), backends=["process"], max_workers=2)
    check(found.gil_share > 0.6, found)
    assert [one.workers for one in found.measured] == [0, 1, 2]
    assert all(one.batches_per_s > 0 and one.rss_bytes > 0 for one in found.measured[1:])


@retry_if_disturbed
def test_a_step_that_takes_longer_than_the_data_ends_the_search(source):
    found = last(source("sleeping"), backends=["thread"], loop=Loop(0.3, wait_s=0.1))
    check([one.workers for one in found.measured] == [0, 1], found)
    assert found.measured[0].waiting_share > 0.1
    check(found.best.waiting_share < 0.05, found)


@retry_if_disturbed
def test_a_step_may_compute(source):
    found = last(
        source("sleeping"), backends=["thread"], loop=Loop(0.3, compute_s=0.02), max_workers=1
    )
    # A step that sleeps uses less than 0.01.
    check(found.measured[1].cpus_used > 0.05, found)


def test_more_workers_that_do_not_help_end_the_search(source, monkeypatch):
    """With rates that are given: how fast a busy machine is, no test can say."""

    def measured(source, one, loop, wait_limit_s):
        return dataclasses.replace(one, batches=min(one.workers, 4) * 100, seconds=1.0)

    monkeypatch.setattr("enqueuer.tools.bench.measure_enqueued", measured)
    found = last(source("computing"), backends=["thread"], max_workers=64)
    assert [one.workers for one in found.measured] == [0, 1, 2, 4, 8]


def test_a_source_that_takes_no_shard_is_reported(source):
    assert not last(source("unsplit"), backends=["thread"], max_workers=1).takes_shard


def test_what_cannot_be_sent_leaves_the_threads(source):
    found = last(source("locks"), max_workers=1)
    assert found.measured[2].failed.startswith("ItemNotPicklable")
    assert found.best.backend == "thread"


def test_an_error_in_one_setting_is_shown_beside_it(source):
    found = last(source("breaks_if_split"), backends=["thread"])
    assert [one.failed for one in found.measured] == [None, None, "KeyError: 'the second of them'"]


def test_each_report_has_one_more(source):
    printed = []
    reports = list(
        bench(
            source("unsplit"),
            Loop(0.05),
            max_workers=1,
            backends=["thread"],
            announce=printed.append,
        )
    )
    assert [len(one.measured) for one in reports] == [0, 1, 2]
    assert [one.gil_share is None for one in reports] == [False, False, False]
    assert printed == ["the GIL", "the plain loop", "1 thread"]


# --- what cannot be measured ---


def test_an_error_of_the_source_is_raised_as_itself(source):
    with pytest.raises(KeyError, match="no such file"):
        last(source("breaks"))


def test_a_source_without_batches_is_reported(source):
    with pytest.raises(Unmeasurable, match="yields no batch"):
        last(source("empty"))


def test_a_live_iterator_cannot_be_run_again(source):
    with pytest.raises(Unmeasurable, match="def batches"):
        last(source("running"))


def test_a_source_that_never_yields_is_reported_with_its_place():
    gate = threading.Event()

    def stuck():
        gate.wait(LIMIT)
        yield from ()

    try:
        with pytest.raises(Unmeasurable, match=r"no batch came(.|\n)*in stuck"):
            last(stuck, wait_limit_s=0.2)
    finally:
        gate.set()


def test_a_source_that_yields_nothing_but_none_is_left():
    with pytest.raises(Unmeasurable, match="no batch came"):
        last(lambda: iter(lambda: None, 1), wait_limit_s=0.2)


@pytest.mark.thorough
def test_a_setting_whose_workers_hang_is_reported_and_ended(source):
    found = last(source("hangs_if_split"), backends=["process"], wait_limit_s=5.0, max_workers=2)
    assert "no batch came" in found.measured[-1].failed


# --- the command ---


def test_the_command_prints_a_table_and_the_line(run):
    options = ["--seconds=200ms", "--backend=thread", "--max-workers=2"]
    done = run("benched:sleeping", *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert "plain loop" in done.stdout
    assert '    GeneratorEnqueuer(sleeping, workers=2, backend="thread")\n' in done.stdout


def test_that_all_workers_make_the_same_is_said_by_the_report_alone(run):
    options = ["--seconds=0.1", "--max-workers=2", "--backend=thread"]
    done = run("benched:unsplit_arrays", *options)
    assert (done.returncode, done.stderr) == (0, "")
    if "Best: 2 threads" in done.stdout:
        assert "unsplit_arrays takes no shard" in done.stdout


def test_the_command_prints_json_and_nothing_else(run):
    options = ["--seconds=0.1", "--max-workers=1", "--consume=1ms", "--consume-cpu=1ms", "--json"]
    done = run("benched:computing", *options)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert [one["backend"] for one in found["measured"]] == ["none", "thread", "process"]
    assert found["step_s"] == 0.002


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["benched:nothing"], 1, "module 'benched' has no 'nothing'"),
        (["benched:running"], 1, "benched:running: running can be run through only once"),
        (["benched:listed"], 1, "benched:listed: GeneratorEnqueuer needs a generator function"),
        (["benched:sleeping", "--consume", "20 miles"], 2, "must be a time such as 20ms"),
        *(
            ([name], 2, f"a name that Python imports, got '{name}'")
            for name in ("../there/benched:f", "benched.py:f", ".:f")
        ),
    ],
)
def test_the_command_says_what_is_wrong(source, arguments, code, says, capsys):
    """In this process, as each interpreter takes a while to start."""
    try:
        ended = main.main(["bench", *arguments])
    except SystemExit as error:
        ended = error.code
    output, errors = capsys.readouterr()
    assert (ended, output) == (code, "")
    assert says in errors


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["benched:hanging", "--wait-limit", "0.2"], "in hang_here"),
        (["benched:breaks"], "KeyError: 'no such file'"),
    ],
)
def test_the_command_ends_with_the_error_of_a_source(run, arguments, says):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr


def test_on_a_terminal_it_says_what_it_is_at(tmp_path):
    (tmp_path / "benched.py").write_text(SOURCE)
    ours, theirs = os.openpty()
    options = ["benched:unsplit", "--seconds=0.1", "--max-workers=1", "--backend=thread"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "enqueuer", "bench", *options],
            cwd=tmp_path,
            timeout=2 * LIMIT,
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            **surroundings(),
        )
        said = os.read(ours, 10_000).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0, said
    for what in ("the GIL", "the plain loop", "1 thread"):
        assert f"measuring {what} ..." in said
    assert "measuring" not in done.stdout


def test_after_ctrl_c_what_is_known_is_printed(tmp_path):
    program = """
        import os, sys, time
        from enqueuer.cli import main

        def hangs_if_split(shard):
            while True:
                if shard.count > 1:
                    os.write(1, b"here\\n" if shard.index == 0 else b"")
                    time.sleep(1000)
                yield 1

        sys.exit(main.main("bench __main__:hangs_if_split --backend process --seconds 0.1".split()))
    """
    with Program(tmp_path, program) as running:
        assert running.line() == "here"
        os.kill(running.process.pid, signal.SIGINT)
        code, out, err = running.wait()
        assert code == 130, err
        assert err.strip() == "enqueuer: interrupted"
        rows = [line.split()[:2] for line in out.splitlines()[1:3]]
        assert rows == [["plain", "loop"], ["1", "process"]]
        running.check_nothing_left()
