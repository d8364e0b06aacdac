"""Processes forked from the parent, from a worker, or around both of them."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
from helpers import (
    LIMIT,
    METHODS,
    Gated,
    Program,
    alive,
    counting,
    run_in_threads,
    run_program,
    twelve,
    wait_until,
)

from enqueuer import GeneratorEnqueuer, Processes
from enqueuer.enqueuers.enqueuer import core_of


def in_a_child(function):
    """Fork, call `function` there; return what it returned as a string, or its error."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            answer = str(function())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        answer = file.read().decode()
    os.waitpid(pid, 0)
    return answer


@pytest.mark.thorough
def test_a_forked_child_cannot_use_its_parents_enqueuer(backend):
    with GeneratorEnqueuer(counting, workers=2, **backend) as enqueuer:
        batches = iter(enqueuer)
        assert next(batches) == (0, 0)
        says = f"InvalidState: this enqueuer belongs to process {os.getpid()}"
        for use in (
            lambda: next(batches),  # what was ready is the parent's, too, and would come twice
            lambda: next(enqueuer.get()),
            lambda: enqueuer.queue.get(timeout=1),
            lambda: enqueuer.queue.empty(),
            lambda: enqueuer.queue.qsize(),
            lambda: enqueuer.stats(),
        ):
            assert in_a_child(use).startswith(says)
        assert "RUNNING" in in_a_child(lambda: repr(enqueuer))
        assert in_a_child(enqueuer.stop) == "None"
        assert [next(batches) for _ in range(3)] == [(1, 0), (0, 1), (1, 1)]


ONE_OF_EACH = [{"backend": "thread"}, {"backend": Processes(start_method="fork")}]


@pytest.mark.parametrize("options", ONE_OF_EACH)
def test_a_forked_child_is_told_even_if_a_thread_of_the_parent_waits(options, tmp_path):
    """That thread holds the lock of the enqueuer, and does not exist in the child."""
    source = Gated(tmp_path, stops=((0, 1),))
    with GeneratorEnqueuer(source, **options) as enqueuer:
        batches = iter(enqueuer)
        assert next(batches) == (0, 0)
        waiting = threading.Thread(target=next, args=(batches,))
        waiting.start()
        wait_until(lambda: core_of(enqueuer).run.meter.since)
        assert in_a_child(lambda: next(batches)).startswith("InvalidState")
        assert in_a_child(enqueuer.stop) == "None"
        source.let_on()
        waiting.join(LIMIT)
        assert next(batches) == (0, 2)


@pytest.mark.parametrize("options", ONE_OF_EACH)
def test_in_a_forked_child_that_has_stopped_it_the_epoch_is_over(options):
    with GeneratorEnqueuer(counting, **options) as enqueuer:
        batches = iter(enqueuer)
        assert next(batches) == (0, 0)

        def go_on():
            enqueuer.stop()
            return list(batches)

        assert in_a_child(go_on) == "[]"
        assert next(batches) == (0, 1)


async def ticks(shard):
    while True:
        await asyncio.sleep(0.01)
        yield shard.index


def test_threads_of_a_forked_child_have_nothing_to_do_with_its_parents_event_loops():
    """They may have the identifiers of its threads."""

    def own():
        with GeneratorEnqueuer(twelve, workers=3, shards=3, timeout=LIMIT) as enqueuer:
            return [len(list(enqueuer)) for _ in range(2)]

    with GeneratorEnqueuer(ticks, workers=3) as enqueuer:
        next(iter(enqueuer))
        assert in_a_child(own) == "[12, 12]"


@pytest.mark.thorough("processes")
def test_a_forked_child_may_have_its_own(backend):
    def own():
        with GeneratorEnqueuer(twelve, workers=2, **backend) as enqueuer:
            result = list(enqueuer)
        return result

    with GeneratorEnqueuer(counting, workers=2, **backend) as enqueuer:
        batches = iter(enqueuer)
        next(batches)
        assert in_a_child(own) == str(list(range(12)))
        assert next(batches) == (1, 0)


BEGIN = """
import os, sys, time, warnings
import helpers
from helpers import counting, twelve
from enqueuer import GeneratorEnqueuer, Processes

warnings.simplefilter("ignore", DeprecationWarning)
options = dict(backend=Processes(start_method={method!r}), workers=2)
"""


def program(text, method):
    """Return a program that begins with the lines above."""
    return BEGIN.format(method=method) + textwrap.dedent(text)


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "end",
    [
        "sys.exit(0)",
        "os._exit(0)",
        "del enqueuer, batches",
        "assert len(list(GeneratorEnqueuer(twelve, **options))) == 12",
    ],
)
def test_the_exit_of_a_forked_child_does_no_harm(method, end, tmp_path):
    text = f"""
        enqueuer = GeneratorEnqueuer(counting, **options)
        batches = iter(enqueuer)
        next(batches)
        if os.fork() == 0:
            {end}
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        assert [next(batches) for _ in range(30)][-1] == (0, 15)
    """
    assert run_program(tmp_path, program(text, method)) == (0, "", "")


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_a_child_that_is_forked_inside_start_leaves_the_workers_alone(method, tmp_path):
    text = """
        from enqueuer.backends.process.handle import Starter

        start = Starter.start

        def start_and_fork(starter, index, *arguments):
            worker = start(starter, index, *arguments)
            if index == 1 and os.fork() == 0:
                sys.exit(0)  # as a signal handler might
            return worker

        Starter.start = start_and_fork
        with GeneratorEnqueuer(twelve, **options) as enqueuer:
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
            assert len(list(enqueuer)) == 12
    """
    assert run_program(tmp_path, program(text, method)) == (0, "", "")


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_a_forked_child_that_lives_on_does_not_keep_the_workers_alive(method, tmp_path):
    text = """
        def source(shard):
            yield os.getpid()
            helpers.hang_in_c()
            yield 1

        enqueuer = GeneratorEnqueuer(source, **options)
        batches = iter(enqueuer)
        pids = [next(batches), next(batches)]
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        print(child, *pids, flush=True)
        time.sleep(1000)
    """
    with Program(tmp_path, program(text, method)) as parent:
        child, *pids = map(int, parent.line().split())
        parent.process.kill()
        wait_until(lambda: not any(map(alive, pids)), 2)
        assert alive(child)
        # No fork server, either. Python's resource tracker lives as long as the child.
        wait_until(lambda: {pid for pid in parent.members() if not is_tracker(pid)} == {child}, 2)


def is_tracker(pid):
    """Return whether a process is the resource tracker of multiprocessing."""
    with contextlib.suppress(OSError):  # it has ended
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()


# --- a copy of the worker ---


@pytest.mark.parametrize("how", ["yields", "ends", "raises"])
def test_a_copy_that_a_generator_forks_and_lets_run_on_says_nothing(process, how):
    """Its batches would come twice, its end too early; it exits as soon as it comes to us."""

    def source(shard):
        yield os.getpid()
        child = os.fork()
        if child == 0 and how == "ends":
            return
        if child == 0 and how == "raises":
            raise ValueError("of the copy")
        yield child, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else None
        yield "last"

    with GeneratorEnqueuer(source, **process) as enqueuer:
        _, (child, code), last = enqueuer
    assert (code, last) == (70, "last")
    assert not alive(child)


def test_generators_may_use_multiprocessing(process):
    def source(shard):
        context = multiprocessing.get_context("fork")
        with context.Pool(2) as pool:
            yield pool.map(abs, [-1, -2])
        child = context.Process(target=os._exit, args=(5,))
        child.start()
        child.join()
        yield child.exitcode

    with GeneratorEnqueuer(source, **process) as enqueuer:
        assert list(enqueuer) == [[1, 2], 5]


# --- one in the other, and side by side ---


@pytest.mark.thorough
def test_the_workers_of_a_killed_worker_die_with_it(process):
    def inner(shard):
        yield os.getpid()
        signal.pause()

    def outer(shard):
        enqueuer = GeneratorEnqueuer(inner, workers=2, **process)
        batches = iter(enqueuer)
        yield os.getpid(), next(batches), next(batches)
        signal.pause()

    with GeneratorEnqueuer(outer, **process) as enqueuer:
        worker, *inner_workers = next(iter(enqueuer))
        assert all(map(alive, inner_workers))
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not any(map(alive, inner_workers)), 2)


def test_stopping_one_leaves_the_others_alone(backend):
    several = [GeneratorEnqueuer(counting, workers=2, **backend) for _ in range(3)]
    batches = [iter(enqueuer) for enqueuer in several]
    for one in batches:
        next(one)
    for enqueuer, rest in zip(several, (batches[1:], batches[2:], []), strict=True):
        enqueuer.stop()
        for one in rest:
            for _ in range(20):
                next(one)


def test_starts_in_many_threads_at_once(backend):
    seen = []

    def run():
        with GeneratorEnqueuer(twelve, workers=2, **backend) as enqueuer:
            seen.append(list(enqueuer))

    run_in_threads([run] * 4)
    assert seen == [list(range(12))] * 4


# --- in a daemonic child of multiprocessing, such as a worker of a DataLoader ---

DAEMONIC = """
    import multiprocessing, warnings
    from helpers import twelve
    from enqueuer import GeneratorEnqueuer, Processes

    warnings.simplefilter("ignore", DeprecationWarning)

    def child():
        {body}

    process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
    process.start()
    process.join(30)
    assert process.exitcode == 0, process.exitcode
"""


@pytest.mark.thorough
@pytest.mark.parametrize("method", [None, *METHODS])
def test_a_daemonic_host(method, tmp_path):
    """All but fork work there, and fork says what to do instead."""
    options = "" if method is None else f", backend=Processes(start_method={method!r})"
    body = textwrap.indent(
        textwrap.dedent(f"""
            try:
                with GeneratorEnqueuer(twelve, workers=2{options}) as enqueuer:
                    print(list(enqueuer), flush=True)
            except RuntimeError as error:
                print(type(error).__name__, error, flush=True)
        """),
        " " * 8,
    )
    code, out, err = run_program(tmp_path, DAEMONIC.format(body=body.strip()))
    assert (code, err) == (0, "")
    if method == "fork":
        assert "StartError this process is a daemonic child" in out
        assert "use backend=Processes(start_method='forkserver')" in out
    else:
        assert out == f"{list(range(12))}\n"


@pytest.mark.thorough("processes")
def test_enqueuers_may_be_nested(backend):
    def inner(shard):
        yield from shard.split(range(6))

    def middle(shard):
        for _ in range(2):
            with GeneratorEnqueuer(inner, workers=2, **backend) as enqueuer:
                yield list(enqueuer)

    def outer(shard):
        with GeneratorEnqueuer(middle, **backend) as enqueuer:
            yield from enqueuer

    with GeneratorEnqueuer(outer, **backend) as enqueuer:
        assert list(enqueuer) == [list(range(6))] * 2
