"""The bottleneck by numbers alone: each kind of load, and the sentences."""

import dataclasses
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enqueuer.monitoring.meters import WorkerStats
from enqueuer.monitoring.stats import Stats, find_bottleneck


def worker(making=1.0, sending=0.0, waiting=9.0, items=100, cpu=0.0, cpu_wait=0.0, **more):
    """Return what a worker did in ten seconds."""
    facts = dict(index=0, name="worker 0", shards=(0,), bytes=100 * items, started=0)
    return WorkerStats(
        **{**facts, **more},
        starting_s=0.0,
        idle_s=0.0,
        making_s=making,
        sending_s=sending,
        waiting_s=waiting,
        items=items,
        cpu_s=cpu,
        cpu_wait_s=cpu_wait,
    )


def inputs(*workers, waiting=8.0, working=2.0, items=100, in_threads=False, **more):
    """Return what was seen in ten seconds, of which the loop waited eight."""
    facts = dict(
        seconds=10.0,
        backend="thread" if in_threads else "process",
        epoch=0,
        first_batch_s=0.01,
        first_wait_s=0.01,
        reading_s=0.0,
        idle_s=0.0,
        waits={0.1: items},
        waited_for={},
        queue_size=0,
        error_count=0,
        restart_count=0,
        ordered=True,
        max_queue_size=10,
        cpus=8,
        loop_cpu_s=0.5,
    )
    return Stats(
        **{**facts, **more},
        items=items,
        waiting_s=waiting,
        working_s=working,
        workers=workers,
    )


def test_a_loop_that_hardly_waits_binds():
    bottleneck = find_bottleneck(inputs(worker(), worker(), waiting=0.1, working=9.9))
    assert bottleneck.kind == "loop"
    assert "waited 1.0 % of its time" in bottleneck.reason
    assert "takes 99 ms for each" in bottleneck.reason
    assert "1 worker would do as well as 2" in bottleneck.advice


def test_where_no_worker_can_be_spared_faster_data_would_not_help():
    bottleneck = find_bottleneck(inputs(worker(making=9.0, waiting=1.0), waiting=0.1, working=9.9))
    assert bottleneck.advice == "Faster data would not make it faster."


def test_threads_that_take_the_gil_from_the_loop_should_be_processes():
    """Measured: a loop of 10 ms of Python takes 15 ms beside two threads that compute 5 ms."""
    busy = [worker(making=3.3, waiting=6.7, cpu=1.65) for _ in range(2)]
    more = dict(in_threads=True, cpus=2, loop_cpu_s=9.8, loop_switches=800)
    found = inputs(*busy, waiting=0.0, working=10.0, **more)
    bottleneck = find_bottleneck(found)
    assert (bottleneck.kind, bottleneck.change) == ("source", "backend='process', workers=1")
    # A loop that waits for a GPU, for long at a time or not, and one that computes outside of
    # Python.
    for other in (dict(loop_switches=200), dict(loop_cpu_s=6.0), dict(loop_cpu_s=15.0)):
        assert find_bottleneck(dataclasses.replace(found, **other)).kind == "loop"


@pytest.mark.parametrize(("sending", "kind"), [(6.8, "transport"), (4.0, "queue")])
def test_workers_that_send_most_of_their_time_need_no_longer_queue(sending, kind):
    busy = worker(making=0.1, sending=sending, waiting=9.9 - sending)
    assert find_bottleneck(inputs(busy, waiting=4.0, working=6.0)).kind == kind


def test_a_source_that_waits_needs_as_many_workers_as_it_is_slower():
    bottleneck = find_bottleneck(inputs(worker(making=10.0, waiting=0.0)))
    assert bottleneck.kind == "source"
    assert "takes 100 ms to make, and 20 ms to use" in bottleneck.reason
    assert bottleneck.advice == "About 5 workers would keep up with the loop (now 1): workers=5."
    assert bottleneck.change == "workers=5"


@pytest.mark.parametrize("in_threads", [True, False])
@pytest.mark.parametrize(
    ("facts", "cpu", "change"),
    [
        # The loop needs five at once.
        ({}, 0.5, "concurrency=8"),
        ({}, 9.0, "workers=5"),
        ({"shards": (0,)}, 1.0, "workers=5"),
    ],
)
def test_elements_that_wait_are_made_at_once(facts, cpu, change, in_threads):
    slow = worker(making=10.0, waiting=0.0, cpu=cpu, **{"shards": (), **facts})
    if in_threads and cpu == 9.0:
        change = "backend='process', workers=5"
    assert find_bottleneck(inputs(slow, in_threads=in_threads)).change == change


def objects(workers, concurrency, *, items, cpu, cpu_wait=0.0, switches=0):
    """Return what was measured in ten seconds of objects over a network, 50 ms each."""
    one = worker(
        making=10.0,
        waiting=0.0,
        items=items // workers,
        cpu=cpu / workers,
        cpu_wait=cpu_wait / workers,
        switches=switches // workers,
        concurrency=concurrency,
        shards=(),
    )
    more = dict(waiting=9.9, working=0.1, in_threads=True, cpus=2, items=items)
    return find_bottleneck(inputs(*[one] * workers, **more))


def test_the_time_is_that_of_an_element_where_the_user_gives_elements():
    slow = worker(making=10.0, waiting=0.0, shards=())
    assert "an element takes 100 ms to make, 1 at once, and 20 ms to use" in str(
        find_bottleneck(inputs(slow))
    )


def test_one_cpu_is_one():
    found = inputs(worker(making=10.0, waiting=0.0, cpu=9.8), cpus=1)
    assert "of 1 CPU, and" in find_bottleneck(found).reason


def test_what_takes_no_time_to_make_takes_less_than_a_microsecond():
    cheap = worker(making=0.0, sending=4.0, waiting=6.0, items=1_000_000, cpu_wait=3.9)
    found = inputs(cheap, items=1_000_000, waiting=5.0, working=5.0)
    reason = find_bottleneck(found).reason
    assert reason.endswith("takes less than 1 us to make, and longer than that to pass.")


def test_waits_of_threads_for_a_cpu_are_divided_among_them():
    """Measured: the sum of the waits of 16 threads is more than one clock shows."""
    found = objects(1, 16, items=3000, cpu=2.0, cpu_wait=4.0, switches=6000)
    assert found.kind == "source"
    assert "an element takes 53.3 ms to make, 16 at once" in found.reason
    assert found.change == "concurrency=128"


def test_threads_that_wait_for_a_network_do_not_wait_for_the_gil():
    found = objects(2, 16, items=3200, cpu=2.0, cpu_wait=8.0, switches=6400)
    assert found.kind == "source"
    assert "process" not in found.advice
    assert found.change == "concurrency=128"


def test_more_threads_than_one_process_can_use_are_divided_among_processes():
    found = objects(1, 64, items=8000, cpu=7.5, switches=60_000)
    assert "the Python code of all threads of a process runs one at a time" in found.advice
    assert found.change.startswith("backend='process', workers=2, concurrency=")


@pytest.mark.parametrize(
    ("facts", "in_threads", "change"),
    [
        # A loop that hardly waits: no machine is at its limit.
        (dict(cpu=0.2, items=450), True, "concurrency=2"),
        # The GIL of one process is used.
        (dict(cpu=10.0, concurrency=2), False, "workers=5"),
        (dict(cpu=9.5, concurrency=64, items=5000), False, "workers=8"),
        # There may be no more threads than that.
        (dict(cpu=0.1, concurrency=512, items=5000), True, "concurrency=1024"),
    ],
)
def test_elements_at_once_have_limits(facts, in_threads, change):
    one = worker(**{"making": 10.0, "waiting": 0.0, "shards": (), **facts})
    few = dict(waiting=1.0, working=9.0) if change == "concurrency=2" else {}
    items = facts.get("items", 100)
    more = dict(waiting=9.9, working=0.1) if items == 5000 else few
    found = find_bottleneck(inputs(one, in_threads=in_threads, items=items, **more))
    assert found.change == change, found


def test_many_threads_that_wait_are_not_told_to_be_fewer():
    for count in (64, 100):
        slow = [worker(making=10.0, waiting=0.0, cpu=0.01) for _ in range(count)]
        found = find_bottleneck(inputs(*slow, waiting=9.99, working=0.01, in_threads=True))
        assert found.change == f"workers={2 * count}"


def test_many_threads_that_wait_for_the_gil_should_be_processes():
    """Measured: each of 64 threads waits for room for three quarters of its time."""
    threads = [worker(making=2.5, waiting=7.5, items=28, cpu=0.15, switches=500) for _ in range(64)]
    more = dict(waiting=9.8, working=0.2, in_threads=True, cpus=2, items=1800)
    found = find_bottleneck(inputs(*threads, **more))
    assert found.change == "backend='process', workers=2"


def test_where_the_cpu_time_is_unknown_no_change_is_made_up():
    slow = worker(making=10.0, waiting=0.0, cpu=None, cpu_wait=None, shards=())
    found = find_bottleneck(inputs(slow))
    assert found.change == ""
    assert "does not tell how much of it the workers compute" in found.advice


def test_workers_that_do_not_compute_take_no_cpu_from_the_loop():
    idle = [worker(making=3.0, waiting=7.0, cpu=0.01) for _ in range(4)]
    found = find_bottleneck(inputs(*idle, waiting=0.1, working=9.9, cpus=2, loop_lacked_s=4.0))
    assert (found.kind, found.change) == ("cpus", "")


def test_a_slow_shard_is_told_by_what_the_others_wait():
    slow = worker(index=1, name="worker 1", making=9.8, waiting=0.2, items=100)
    other = worker(index=0, making=7.3, waiting=2.7, items=100)
    found = find_bottleneck(inputs(other, slow, waited_for={1: 7.5, 0: 0.3}, in_threads=True))
    assert found.kind == "slow shard"
    assert found.change == "ordered=False"


def test_a_thread_that_has_no_cpu_does_not_wait_for_the_gil():
    found = files(1, cpu=1.7, cpu_wait=8.2, switches=400)
    assert find_bottleneck(found).kind == "cpus"


@pytest.mark.parametrize("idle_cpu_s", [0.0, 100.0])
@pytest.mark.parametrize(
    "found",
    [
        # Of the CPUs, of the GIL that the loop needs, and of the loop's own CPU.
        inputs(
            worker(making=10.0, waiting=0.0, cpu=9.5),
            waiting=2.0,
            working=8.0,
            cpus=2,
            loop_cpu_s=8.0,
        ),
        inputs(
            *[worker(making=3.3, waiting=6.7, cpu=1.65)] * 2,
            **dict(waiting=0.0, working=10.0, in_threads=True, cpus=2),
            **dict(loop_cpu_s=9.8, loop_switches=800),
        ),
        inputs(
            *[worker(making=3.0, waiting=7.0, cpu=3.0)] * 4,
            **dict(waiting=0.1, working=9.9, cpus=2, loop_cpu_s=6.0, loop_lacked_s=4.0),
        ),
    ],
)
def test_a_pause_between_epochs_changes_nothing(found, idle_cpu_s):
    """Whether the loop sleeps or computes meanwhile, as it does to test the model."""
    own_s = found.loop_cpu_s - (3.3 if found.backend == "thread" else 0.0)
    paused = dataclasses.replace(
        found,
        seconds=110.0,
        idle_s=100.0,
        idle_cpu_s=idle_cpu_s,
        loop_cpu_s=found.loop_cpu_s + idle_cpu_s,
        loop_lacked_s=found.loop_lacked_s * (1 + idle_cpu_s / own_s),
    )
    assert find_bottleneck(found).kind in ("cpus", "source")
    assert str(find_bottleneck(paused)) == str(find_bottleneck(found))


def test_the_cpus_that_threads_use_are_those_of_the_table():
    busy = [worker(making=3.0, waiting=7.0, cpu=2.0) for _ in range(2)]
    more = dict(in_threads=True, waiting=0.1, working=9.9, cpus=2, loop_cpu_s=9.0)
    reason = find_bottleneck(inputs(*busy, loop_lacked_s=3.0, **more)).reason
    assert "The workers used 0.4 of 2 CPUs." in reason


def test_a_loop_whose_workers_take_its_cpu_is_told_from_a_slow_loop():
    busy = [worker(making=3.0, waiting=7.0, cpu=3.0) for _ in range(4)]
    found = inputs(*busy, waiting=0.1, working=9.9, cpus=2, loop_lacked_s=4.0)
    bottleneck = find_bottleneck(found)
    assert bottleneck.kind == "cpus"
    assert "the loop has its batches in time; it waited 1.0 % of its time" in bottleneck.reason
    assert "it had no CPU for 40 %" in bottleneck.reason
    assert bottleneck.change == "workers=2"
    assert find_bottleneck(dataclasses.replace(found, loop_lacked_s=0.5)).kind == "loop"


def test_a_source_is_judged_by_its_batches_and_not_by_how_few_workers_there_were_before():
    late = [worker(making=1.0, waiting=0.0, items=10) for _ in range(4)]
    # One worker made 60 of the 100 batches.
    bottleneck = find_bottleneck(inputs(*late))
    assert bottleneck.change == "workers=5"


def test_a_loop_that_waits_is_never_advised_to_keep_its_number_of_workers():
    bottleneck = find_bottleneck(
        inputs(*[worker(making=1.0, waiting=0.0, items=100) for _ in range(2)])
    )
    assert bottleneck.change == "workers=3"


def test_a_source_that_computes_gets_no_more_workers_than_there_are_cpus():
    bottleneck = find_bottleneck(inputs(worker(making=10.0, waiting=0.0, cpu=9.8), cpus=4))
    assert bottleneck.kind == "source"
    assert "no more than 4 workers would help on 4 CPUs" in bottleneck.advice


def files(threads, *, cpu, cpu_wait=0.0, switches, wall_s=10.0, **more):
    """Return what threads did in ten seconds that read files, and compute a little for each."""
    one = worker(
        making=wall_s, waiting=10 - wall_s, cpu=cpu, cpu_wait=cpu_wait, switches=switches, **more
    )
    return inputs(*[one] * threads, waiting=9.9, working=0.1, in_threads=True, cpus=2)


@pytest.mark.parametrize(
    "found",
    [
        # As measured: they wait 35 ms a file and compute 3 ms.
        pytest.param(files(8, cpu=0.73, switches=590), id="idle-machine"),
        pytest.param(files(8, cpu=0.65, cpu_wait=0.98, switches=710), id="busy-machine"),
        pytest.param(files(16, cpu=0.44, cpu_wait=0.46, switches=982, wall_s=8.2), id="more"),
    ],
)
def test_more_threads_are_advised_if_they_wait_for_files(found):
    bottleneck = find_bottleneck(found)
    assert bottleneck.kind == "source"
    assert re.fullmatch(r"workers=\d+", bottleneck.change)
    assert "process" not in bottleneck.advice


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(files(32, cpu=0.27, switches=840, wall_s=7.3), id="they-wait-too"),
        pytest.param(files(4, cpu=2.4, switches=900), id="idle-machine"),
        pytest.param(files(8, cpu=0.6, cpu_wait=0.6, switches=1900), id="busy-machine"),
        pytest.param(files(2, cpu=2.4, cpu_wait=2.4, switches=None), id="switches-unknown"),
        pytest.param(files(1, cpu=9.8, switches=0), id="one"),
    ],
)
def test_processes_are_advised_if_threads_wait_for_the_gil(found):
    assert "backend='process'" in find_bottleneck(found).advice


def measured(workers, items, making, cpu, cpu_wait, *, sending=0.0, waiting=0.0, **more):
    """Return what was measured in a second, of all workers together, beside ten other programs."""
    switches = more.pop("switches", None)
    one = worker(
        making=making / workers,
        sending=sending / workers,
        waiting=waiting / workers,
        items=items // workers,
        cpu=cpu / workers,
        cpu_wait=cpu_wait / workers,
        switches=None if switches is None else switches // workers,
    )
    facts = dict(seconds=1.0, loop_cpu_s=0.02, cpus=2, first_wait_s=0.0) | more
    return inputs(*[one] * workers, items=items, waiting=0.99, working=0.01, **facts)


THREADS = dict(in_threads=True)
LOADED = {
    # As measured beside ten programs that compute on two CPUs.
    "numpy, 2 threads": (measured(2, 237, 2.0, 0.87, 1.1, switches=122, **THREADS), "cpus"),
    "numpy, 4 threads": (measured(4, 350, 3.97, 1.01, 2.51, switches=424, **THREADS), "cpus"),
    "Python, 1 thread": (measured(1, 88, 1.0, 0.89, 0.11, switches=69, **THREADS), "source"),
    "Python, 2 threads": (measured(2, 90, 1.99, 0.89, 0.29, switches=410, **THREADS), "source"),
    "Python, 4 threads": (measured(4, 94, 4.0, 0.94, 0.35, switches=731, **THREADS), "source"),
    "files, 8 threads": (measured(8, 181, 8.0, 0.57, 0.59, switches=486, **THREADS), "source"),
    "files, 32 threads": (
        measured(32, 194, 23.4, 0.64, 2.06, waiting=8.6, switches=3391, **THREADS),
        "source",
    ),
    "files, 1 process": (measured(1, 24, 1.0, 0.08, 0.08), "source"),
    "files, 8 processes": (measured(8, 92, 8.0, 0.31, 4.4), "source"),
    "files, 32 processes": (measured(32, 147, 29.3, 0.48, 25.1, waiting=2.7), "cpus"),
    "Python, 1 process": (measured(1, 33, 1.0, 0.34, 0.66), "cpus"),
    "Python, 2 processes": (measured(2, 35, 2.0, 0.36, 1.65), "cpus"),
    "quick, 1 process": (
        measured(1, 4944, 0.0, 0.21, 0.51, sending=0.49, waiting=0.51),
        "transport",
    ),
}


@pytest.mark.parametrize("name", LOADED)
def test_beside_other_programs_the_same_is_found(name):
    found, kind = LOADED[name]
    bottleneck = find_bottleneck(found)
    assert bottleneck.kind == kind, bottleneck
    waits_for_gil = ("Python, 1 thread", "Python, 2 threads", "Python, 4 threads")
    waits_for_gil += ("files, 32 threads",)
    assert ("backend='process'" in bottleneck.advice) == (name in waits_for_gil)
    assert ("other programs use the CPUs" in bottleneck.reason) == (kind == "cpus")


def test_one_thread_that_computes_may_release_the_gil():
    """Only a second thread would show it, so both cases are named."""
    advice = find_bottleneck(files(1, cpu=9.8, switches=0)).advice
    assert "computes 98 % of the time in which it has a CPU" in advice
    assert "as numpy does for large arrays, workers=2 would help as well" in advice


def test_enough_workers_are_not_told_to_be_more():
    files = [worker(making=10.0, waiting=0.0, cpu=1.4, cpu_wait=3.9) for _ in range(12)]
    bottleneck = find_bottleneck(inputs(*files, cpus=2, loop_cpu_s=0.1))
    assert "more workers than the 12 now would hardly help on 2 CPUs" in bottleneck.advice


@pytest.mark.parametrize(
    "found",
    [
        dataclasses.replace(files(2, cpu=4.9, switches=0), cpus=8),
        files(1, cpu=9.8, switches=0),
        measured(4, 94, 4.0, 0.94, 0.35, switches=731, in_threads=True),
        # Threads beside the loop, and elements that fill the GIL.
        inputs(
            *[worker(making=3.3, waiting=6.7, cpu=1.65)] * 2,
            **dict(waiting=0.0, working=10.0, in_threads=True, cpus=2),
            **dict(loop_cpu_s=9.8, loop_switches=800),
        ),
        inputs(
            worker(making=10.0, waiting=0.0, items=8000, cpu=7.5, concurrency=64, shards=()),
            **dict(waiting=9.9, working=0.1, in_threads=True, cpus=2, items=8000),
        ),
    ],
)
def test_without_a_gil_nothing_waits_for_it(found, monkeypatch):
    assert "process" in find_bottleneck(found).change
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert not re.search("process|Python|GIL", str(find_bottleneck(found)))


def test_without_a_gil_elements_that_wait_fill_all_cpus(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert objects(1, 64, items=8000, cpu=7.5, switches=60_000).change == "concurrency=256"


def test_the_loop_holds_the_gil_too():
    found = files(2, cpu=3.0, switches=1900, items=50)
    assert "process" not in find_bottleneck(found).advice
    found = dataclasses.replace(found, waiting_s=5.0, working_s=5.0, loop_cpu_s=9.5)
    assert "backend='process'" in find_bottleneck(dataclasses.replace(found, cpus=8)).advice


def test_what_waits_most_of_the_time_gets_more_workers_than_cpus():
    bottleneck = find_bottleneck(inputs(worker(making=10.0, waiting=0.0, cpu=1.0), cpus=1))
    assert bottleneck.change == "workers=5"


@pytest.mark.parametrize("cpu", [0.5, 9.8])
def test_a_function_without_a_shard_gets_no_more_workers(cpu):
    slow = worker(making=10.0, waiting=0.0, cpu=cpu, shards=(0,))
    bottleneck = find_bottleneck(inputs(slow, in_threads=True, useful_workers=1))
    assert (bottleneck.kind, bottleneck.change) == ("source", "")
    assert "let the generator function take a shard" in bottleneck.advice


def test_no_more_workers_are_advised_than_there_are_shards():
    slow = worker(making=10.0, waiting=0.0, cpu=0.1, shards=(0, 1, 2))
    found = inputs(slow, waiting=9.99, working=0.01, useful_workers=3)
    assert find_bottleneck(found).change == "workers=3"
    three = dataclasses.replace(found, workers=found.workers * 3)
    assert "give more shards and workers" in find_bottleneck(three).advice


def test_shards_that_a_worker_runs_side_by_side_should_be_more_of_them():
    """Measured: of an async generator that waits 50 ms, with 16 shards and with 64."""
    some = worker(making=9.9, waiting=0.1, items=3100, cpu=0.2, shards=tuple(range(16)))
    found = inputs(some, waiting=9.9, working=0.1, items=3100, side_by_side=True, in_threads=True)
    bottleneck = find_bottleneck(found)
    assert (bottleneck.kind, bottleneck.change) == ("source", "shards=128")
    assert "more shards help, and more workers hardly do" in bottleneck.advice
    # Each shard has a worker, and there may still be more shards.
    alone = [dataclasses.replace(some, shards=(at,), items=200, cpu_s=0.1) for at in range(16)]
    found = dataclasses.replace(found, workers=tuple(alone), useful_workers=16)
    assert find_bottleneck(found).change == "shards=128"
    # Each shard would give all again.
    one = dataclasses.replace(found, workers=(some,), useful_workers=1)
    assert find_bottleneck(one).advice.endswith(
        "divide its work by shard.split, if it does not yet; then give more shards."
    )
    # What computes gets no more of them.
    busy = dataclasses.replace(some, cpu_s=9.0)
    found = dataclasses.replace(found, workers=(busy,), useful_workers=None)
    assert "shards=" not in find_bottleneck(found).change


def test_threads_that_used_little_are_not_said_to_wait_for_the_gil_for_that():
    advice = find_bottleneck(files(8, cpu=0.6, cpu_wait=0.6, switches=1900)).advice
    assert "8 threads used 0.5 CPUs in all and had none for 50 % of the time in which" in advice
    assert "had none for" not in find_bottleneck(files(4, cpu=2.4, switches=900)).advice


def test_batches_that_cost_nothing_gain_nothing():
    for in_threads in (True, False):
        cheap = worker(making=1.5, sending=0.0, waiting=8.5, items=1_000_000, cpu=5.0)
        found = inputs(cheap, items=1_000_000, in_threads=in_threads, waiting=5.0, working=5.0)
        bottleneck = find_bottleneck(found)
        assert bottleneck.kind == "transport"
        assert "1.5 us to make, and longer than that to pass" in bottleneck.reason
        assert "gain nothing" in bottleneck.advice


@pytest.mark.thorough
@given(
    st.lists(
        st.tuples(*[st.floats(0, 100)] * 5, st.none() | st.integers(0, 10**6)),
        min_size=1,
        max_size=4,
    ),
    st.floats(0, 100),
    st.floats(0, 100),
    st.booleans(),
    st.integers(1, 16),
)
def test_no_share_is_more_than_all(measured, waiting, working, in_threads, cpus):
    """Whatever was measured: the system's clocks go by other phases than ours."""
    workers = [
        worker(making=m, sending=s, waiting=w, cpu=c, cpu_wait=x, switches=n)
        for m, s, w, c, x, n in measured
    ]
    bottleneck = find_bottleneck(
        inputs(*workers, waiting=waiting, working=working, in_threads=in_threads, cpus=cpus)
    )
    shares = [float(share) for share in re.findall(r"([-\d.]+) %", str(bottleneck))]
    assert all(0 <= share <= 100 for share in shares), bottleneck


def test_no_number_of_workers_is_advised_to_a_loop_that_does_nothing():
    bottleneck = find_bottleneck(
        inputs(worker(making=10.0, waiting=0.0), waiting=9.99, working=0.01)
    )
    assert bottleneck.kind == "source"
    assert bottleneck.change == "workers=32"


@pytest.mark.parametrize(
    ("size", "advice"), [(10_000_000, "enqueuer.empty()"), (100, "larger batches")]
)
def test_workers_that_mostly_copy_are_bound_by_the_transport(size, advice):
    bottleneck = find_bottleneck(
        inputs(worker(making=1.0, sending=9.0, waiting=0.0, bytes=100 * size))
    )
    assert bottleneck.kind == "transport"
    assert "10 ms to make and 90 ms to send" in bottleneck.reason
    assert advice in bottleneck.advice


def test_a_loop_that_only_takes_tiny_batches_is_bound_by_the_transport():
    bottleneck = find_bottleneck(inputs(worker(), items=5_000_000, waiting=0.1, working=9.9))
    assert bottleneck.kind == "transport"


def test_slow_elements_that_the_loop_reads_itself_are_reported():
    found = inputs(worker(making=0.1, waiting=9.9), reading_s=7.5, ordered=False)
    bottleneck = find_bottleneck(found)
    assert bottleneck.kind == "source"
    assert "while it read them from the iterable, 7.5 s in all" in bottleneck.reason
    assert "more workers would not help" in bottleneck.advice


def test_workers_that_came_late_are_measured_by_their_own_time():
    late = [worker(making=0.9, waiting=0.1) for _ in range(4)]
    bottleneck = find_bottleneck(inputs(*late, waiting=0.1, working=9.9))
    assert bottleneck.advice == "Faster data would not make it faster."
    busy = [dataclasses.replace(one, cpu_s=0.95) for one in late]
    assert find_bottleneck(inputs(*busy, cpus=4)).kind == "cpus"


def test_all_cpus_busy_bind():
    busy = [worker(making=10.0, waiting=0.0, cpu=9.5) for _ in range(4)]
    bottleneck = find_bottleneck(inputs(*busy, cpus=4, loop_cpu_s=1.0))
    assert bottleneck.kind == "cpus"
    assert "used 3.9 of 4 CPUs" in bottleneck.reason


def test_a_worker_that_all_wait_for_is_a_slow_shard():
    slow = worker(index=2, name="worker 2", making=10.0, waiting=0.0)
    found = inputs(worker(), worker(index=1), slow, waited_for={2: 7.5})
    bottleneck = find_bottleneck(found)
    assert bottleneck.kind == "slow shard"
    assert "worker 2 takes 100 ms for an item, the others 10 ms" in bottleneck.reason


def test_without_order_no_shard_is_waited_for():
    slow = worker(index=2, making=10.0, waiting=0.0)
    found = inputs(worker(), worker(index=1), slow, waited_for={2: 7.5}, ordered=False)
    assert find_bottleneck(found).kind == "queue"


def test_a_loop_and_workers_that_wait_for_each_other_are_bound_by_the_queue():
    bottleneck = find_bottleneck(inputs(worker(making=5.0, waiting=5.0), waiting=4.0, working=6.0))
    assert bottleneck.kind == "queue"
    assert bottleneck.change == "max_queue_size=40"


def test_a_long_wait_for_the_first_batch_binds():
    bottleneck = find_bottleneck(inputs(worker(), first_wait_s=30.0))
    assert bottleneck.kind == "start-up"
    assert "waited 30 s for the first batch, of 40 s in all" in bottleneck.reason


@pytest.mark.parametrize("making", [10.0, 1.0])
def test_few_batches_are_named_as_a_reason_for_doubt(making):
    slow = worker(making=making, waiting=10 - making, items=12)
    waiting = 8.0 if making == 10.0 else 0.1
    doubt = "This is only probable, as there were only 12 batches, in 10 s."
    found = inputs(slow, items=12, waiting=waiting, working=10 - waiting)
    assert find_bottleneck(found).reason.endswith(f" {doubt}")
    many = worker(making=making, waiting=10 - making, items=30)
    found = inputs(many, items=30, waiting=waiting, working=10 - waiting)
    assert "probable" not in find_bottleneck(found).reason


def test_cpus_that_others_took_are_named_as_a_reason_for_doubt():
    found, kind = LOADED["files, 8 processes"]
    assert kind == "source"
    doubt = "This is only probable, as the workers had no CPU for 55 % of their work."
    assert find_bottleneck(found).reason.endswith(f" {doubt}")
    # There it is the finding itself.
    assert "probable" not in find_bottleneck(LOADED["Python, 2 processes"][0]).reason


@pytest.mark.parametrize("found", [inputs(worker(), items=3), inputs(items=100)])
def test_of_little_nothing_is_said(found):
    assert find_bottleneck(found).kind == "unknown"
