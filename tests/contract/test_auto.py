"""workers="auto": the right number is found, it stays, and the batches are what they always are."""

import functools
import itertools
import json
import logging
import math
import re
import threading
import time

import numpy as np
import psutil
import pytest
from conftest import IS_RAY, actors, without
from helpers import (
    LIMIT,
    Disturbed,
    bytes_of,
    kill_once,
    random_batches,
    retry_if_disturbed,
    twelve,
)

from enqueuer import Auto, GeneratorEnqueuer, OrderedEnqueuer, Processes, StartError, imap, prefetch
from enqueuer.enqueuers.enqueuer import core_of
from enqueuer.monitoring import autoscaler

BACKENDS = without("process-spawn", "process-fork-portable")
MAKE_S = 0.02
# Until the number is right, on a machine with nothing else to do it takes about two seconds.
SOON_S = 12.0


@pytest.fixture(params=BACKENDS)
def options(request):
    """Options without spawn and the portable path, which make no difference here."""
    return request.param


@pytest.fixture(autouse=True)
def short_windows(monkeypatch):
    """Decide sooner than anybody would want to, but after windows that last."""
    monkeypatch.setattr(autoscaler, "WINDOW_S", 0.3)
    monkeypatch.setattr(autoscaler, "LONGEST_WINDOW_S", 0.6)


def sleepy(shard):
    """Yield (shard, number), each after some time, for ever."""
    for number in itertools.count():
        time.sleep(MAKE_S)
        yield shard.index, number


def quick(shard):
    """Yield (shard, number) for ever, as fast as can be."""
    for number in itertools.count():
        yield shard.index, number


def computing(shard):
    """Yield (shard, number), each after some computing, for ever."""
    for number in itertools.count():
        end = time.thread_time() + MAKE_S
        while time.thread_time() < end:
            math.factorial(300)
        yield shard.index, number


def sleepy_task(element):
    time.sleep(MAKE_S)
    return element


KINDS = ["tasks", "shards"]


def endless(kind, **options):
    """Return an enqueuer of tasks or shards without an end, each of which takes some time."""
    if kind == "shards":
        return GeneratorEnqueuer(sleepy, **options)
    return OrderedEnqueuer(range(100_000), sleepy_task, **options)


def in_turn(count, shards):
    return [(number % shards, number // shards) for number in range(count)]


class Loop:
    """A loop over an enqueuer, which takes its time and notes how many workers there were."""

    def __init__(self, enqueuer, use_s):
        self.enqueuer, self.use_s = enqueuer, use_s
        self.seen, self.workers = [], []
        self.batches = iter(enqueuer)

    def run(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.seen.append(next(self.batches))
            self.workers.append(core_of(self.enqueuer).run.workers)
            if self.use_s:
                time.sleep(self.use_s)

    def run_until(self, condition, limit=LIMIT):
        end = time.monotonic() + limit
        while not condition() and time.monotonic() < end:
            self.run(0.2)
        self.check(condition())

    def check(self, is_right):
        """Raise Disturbed, with the numbers of workers that there were, if they are not right."""
        if not is_right:
            raise Disturbed([n for n, _ in itertools.groupby(self.workers)])


# --- the right number ---


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@retry_if_disturbed
def test_a_producer_four_times_slower_than_the_loop_gets_about_four(options, kind):
    """And the batches come in order. Ranges are wide, as other programs may run beside."""
    with endless(kind, workers=Auto(most=8), **options) as enqueuer:
        loop = Loop(enqueuer, MAKE_S / 4)
        loop.run_until(lambda: core_of(enqueuer).run.workers >= 3, SOON_S)
        loop.run(2)
        count = len(loop.seen)
        assert loop.seen == (in_turn(count, 16) if kind == "shards" else list(range(count)))
        assert loop.workers[0] == 1
        assert len(enqueuer.stats().workers) == core_of(enqueuer).run.workers


@pytest.mark.thorough
@retry_if_disturbed
def test_a_loop_that_does_not_wait_stays_at_one(options):
    with GeneratorEnqueuer(quick, workers=Auto(most=8), **options) as enqueuer:
        loop = Loop(enqueuer, 0.005)
        loop.run(3)
        loop.check(set(loop.workers) == {1})
        assert loop.seen == in_turn(len(loop.seen), 16)


@pytest.mark.thorough
@retry_if_disturbed
def test_what_computes_has_no_more_processes_than_cpus(monkeypatch):
    monkeypatch.setattr("enqueuer.monitoring.usage.cpus", lambda: 2.0)
    with GeneratorEnqueuer(
        computing, workers=Auto(most=8), shards=8, backend="process"
    ) as enqueuer:
        loop = Loop(enqueuer, 0)
        loop.run(4)
        loop.check(max(loop.workers) <= 2)


def remote_file(element):
    time.sleep(0.035)
    end = time.thread_time() + 0.001
    while time.thread_time() < end:
        sum(range(100))
    return element


@pytest.mark.thorough
@pytest.mark.local
@pytest.mark.parametrize("batch_size", [None, 8])
@retry_if_disturbed
def test_what_waits_gets_many_more_workers_than_cpus_in_one_step(monkeypatch, batch_size):
    monkeypatch.setattr("enqueuer.monitoring.usage.cpus", lambda: 2.0)
    enqueuer = OrderedEnqueuer(
        range(100_000),
        remote_file,
        workers=Auto(most=24),
        batch_size=batch_size,
        concurrency=1,
    )
    with enqueuer:
        loop = Loop(enqueuer, 0)
        loop.run_until(lambda: core_of(enqueuer).run.workers > 1, SOON_S)
        loop.check(core_of(enqueuer).run.workers >= 12)


# For actors the limit is the CPUs of the cluster, as their memory is not known.
@pytest.mark.local
@pytest.mark.parametrize(("kind", "most"), [("tasks", 128), ("shards", 16)])
def test_the_cpus_alone_are_no_limit(options, monkeypatch, kind, most):
    """How many there are CPUs for follows from what the workers do, so the autoscaler says it."""
    given = []

    class Recording(Given):
        def __init__(self, workers, most, *_):
            given.append(most)

    monkeypatch.setattr("enqueuer.monitoring.usage.cpus", lambda: 2.0)
    monkeypatch.setattr("enqueuer.enqueuers.scaling.Autoscaler", Recording)
    with endless(kind, workers="auto", **options):
        assert given == [most]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_a_limit(monkeypatch, caplog, kind):
    """A worker takes 1 kB, with its items a little more, and there is room for 2.

    Shards need it while the old ones live.
    """
    monkeypatch.setattr("enqueuer.monitoring.usage.unshared_bytes", lambda pid: 1000)
    monkeypatch.setattr(
        "enqueuer.monitoring.usage.available_bytes", lambda: 3000 if workers() < 3 else 600
    )
    made = endless(kind, workers="auto", backend=Processes(start_method="fork"))

    def workers():
        return core_of(made).run.workers

    with made as enqueuer:
        loop = Loop(enqueuer, 0)
        loop.run_until(lambda: caplog.records)
        loop.run(1)
        assert core_of(enqueuer).run.workers == (3 if kind == "tasks" else 2)
    [record] = caplog.records
    assert re.search(r"a worker takes 1\.[012] kB of memory, and 3\.0 kB ", record.message)


def large_task(element):
    time.sleep(MAKE_S)
    return np.zeros(1_000_000, np.uint8)


def test_the_memory_of_items_is_a_limit_for_threads(monkeypatch, caplog):
    """Each thread takes the item that it makes and one that waits, of 1 MB."""
    monkeypatch.setattr("enqueuer.monitoring.usage.available_bytes", lambda: 5_200_000)
    with OrderedEnqueuer(range(100_000), large_task, workers="auto") as enqueuer:
        loop = Loop(enqueuer, 0)
        loop.run_until(lambda: caplog.records)
        assert core_of(enqueuer).run.workers <= 3
    assert "a worker takes 2.0 MB of memory" in caplog.records[0].message


class Given:
    """Stands for the autoscaler: the number that it is given."""

    reason, wanted, waiting_share, due_s = "as the test says", 1, 0.0, 0.0
    workers = concurrency = 1

    def __init__(self, *_):
        pass

    def next(self, stats, replay_s=None):
        return Given.workers


@pytest.mark.parametrize("count", [1, 50])
def test_it_decides_from_the_first_batch_on(options, monkeypatch, count):
    """Also while the first batches of the shards are compared, or if these have no second one."""
    asked = []

    class Asked(Given):
        def next(self, stats, replay_s=None):
            asked.append(stats.items)
            return 1

    monkeypatch.setattr("enqueuer.enqueuers.scaling.Autoscaler", Asked)
    source = functools.partial(numbered, count)
    with GeneratorEnqueuer(source, workers="auto", shards=16, **options) as enqueuer:
        next(iter(enqueuer))
        assert asked


def numbered(count, shard):
    """Yield batches that are large enough to be compared."""
    for number in range(count):
        yield np.full((4, 8), 1000 * shard.index + number)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_those_who_are_retired_go_home_and_the_trace_tells_of_it(
    options, kind, monkeypatch, tmp_path
):
    monkeypatch.setattr("enqueuer.enqueuers.scaling.Autoscaler", Given)
    path = tmp_path / "trace.json"
    with endless(kind, workers="auto", trace=path, **options) as enqueuer:
        loop = Loop(enqueuer, 0)
        alone = running_count()
        for Given.workers in (4, 1, 3, 1):
            loop.run_until(lambda: len(enqueuer.stats().workers) == Given.workers)
        loop.run_until(lambda: running_count() <= alone)
    events = json.loads(path.read_text())
    changes = [e["args"]["workers"] for e in events if e["name"] == "reconfigured"]
    assert changes == [4, 1, 3, 1]


def test_a_restart_begins_with_the_workers_that_the_last_run_had(options, monkeypatch):
    monkeypatch.setattr("enqueuer.enqueuers.scaling.Autoscaler", Given)
    enqueuer = endless("tasks", workers="auto", **options)
    Given.workers = 4
    with enqueuer:
        Loop(enqueuer, 0).run_until(lambda: len(enqueuer.stats().workers) == 4)
    assert "4 workers" in repr(enqueuer)
    enqueuer.start()
    assert len(enqueuer.stats().workers) == 4
    enqueuer.stop()
    enqueuer.start(workers="auto")
    assert len(enqueuer.stats().workers) == 1
    enqueuer.stop()


def test_a_stall_report_names_the_workers_in_the_statistics(monkeypatch):
    monkeypatch.setattr("enqueuer.enqueuers.scaling.Autoscaler", Given)
    with endless("tasks", workers="auto") as enqueuer:
        loop = Loop(enqueuer, 0)
        # Any of the workers may exit.
        for Given.workers in (3, 2, 4, 1):
            loop.run_until(lambda: len(enqueuer.stats().workers) == Given.workers)
            seen = (
                core_of(enqueuer).run.backend.inspect(core_of(enqueuer).reader.work.order).workers
            )
            names = {worker.name for worker in enqueuer.stats().workers}
            assert {worker.name for worker in seen} == names


def running_count():
    # Ray starts processes ahead, and ends them at any time.
    if IS_RAY:
        return max(1, len(actors()))
    return threading.active_count() + len(psutil.Process().children(recursive=True))


# --- the data ---


class Erratic:
    """Stands for the autoscaler: another number every few times that it is asked."""

    reason, wanted, waiting_share, due_s = "as it likes", 2, 0.5, 0.0
    concurrency = 1

    def __init__(self, *given):
        self.numbers = itertools.cycle(number for number in (2, 4, 1, 3) for _ in range(6))
        is_chosen = given[-1] > 1
        self.at_once = itertools.cycle([1] * 10 + [3] * 10 if is_chosen else [1])

    def next(self, stats, replay_s=None):
        self.concurrency = next(self.at_once)
        return next(self.numbers)

    def limited(self, workers):
        """Take no notice, whatever the GIL allows."""

    def refused(self, *_):
        raise AssertionError


@pytest.fixture
def erratic(monkeypatch):
    monkeypatch.setattr("enqueuer.enqueuers.scaling.Autoscaler", Erratic)


@pytest.mark.thorough
def test_the_batches_are_those_of_any_number_of_workers(backend, erratic):
    with GeneratorEnqueuer(random_batches, shards=5, random_seed=7) as enqueuer:
        whole = [[bytes_of(batch) for batch in enqueuer] for _ in range(3)]
    with GeneratorEnqueuer(
        random_batches, workers="auto", shards=5, random_seed=7, **backend
    ) as enqueuer:
        assert [[bytes_of(batch) for batch in enqueuer] for _ in range(3)] == whole


def drawn(element, task):
    time.sleep(0.002)
    return element, task.epoch, task.rng.integers(1000)


@pytest.mark.thorough
@pytest.mark.parametrize("concurrency", [1, "auto"])
@pytest.mark.parametrize("kind", [range, iter])
def test_each_task_is_done_once_and_in_order(backend, erratic, kind, concurrency):
    whole = list(OrderedEnqueuer(range(150), drawn, random_seed=7))
    source = range(150) if kind is range else iter(range(150))
    options = dict(random_seed=7, workers="auto", concurrency=concurrency, **backend)
    assert list(OrderedEnqueuer(source, drawn, **options)) == whole


def waits(element):
    time.sleep(0.02)
    return element


@pytest.mark.thorough
@pytest.mark.parametrize(
    "given", [dict(batch_size=8), dict(concurrency="auto")], ids=["batches", "given"]
)
def test_elements_that_wait_run_at_once_before_there_are_more_workers(caplog, given):
    caplog.set_level(logging.INFO, "enqueuer")
    with OrderedEnqueuer(range(10**6), waits, workers="auto", **given) as enqueuer:
        loop = Loop(enqueuer, 0)
        loop.run_until(lambda: enqueuer.stats().workers[0].concurrency > 1)
        assert len(enqueuer.stats().workers) == 1
        assert any("concurrency=1 -> concurrency=" in text for text in caplog.messages)
    # The next run begins with what this one came to.
    with enqueuer:
        assert enqueuer.stats().workers[0].concurrency > 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    "given",
    [dict(), dict(batch_size=8, concurrency=1), dict(batch_size=8, backend="process")],
    ids=["single", "fixed", "process"],
)
def test_concurrency_is_not_chosen_where_it_was_given_or_would_change_what_is_seeded(given):
    # What waits would get many workers at once, which take long to start.
    with OrderedEnqueuer(range(10**6), waits, workers=Auto(most=2), **given) as enqueuer:
        loop = Loop(enqueuer, 0)
        loop.run_until(lambda: len(enqueuer.stats().workers) > 1)
        assert enqueuer.stats().workers[0].concurrency == 1


def test_automatic_concurrency_needs_automatic_workers():
    with pytest.raises(ValueError, match="concurrency='auto' needs workers='auto'"):
        OrderedEnqueuer(range(3), abs, concurrency="auto")
    with pytest.raises(ValueError, match="concurrency must be an int, 'auto' or None"):
        OrderedEnqueuer(range(3), abs, workers="auto", concurrency="many")


@pytest.mark.thorough("processes")
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_order_nothing_is_lost_nor_comes_twice(backend, erratic):
    options = dict(workers="auto", ordered=False, random_seed=7, **backend)
    assert sorted(OrderedEnqueuer(range(200), abs, **options)) == list(range(200))
    assert sorted(GeneratorEnqueuer(twelve, shards=4, **options)) == list(range(12))


def dies_at_50(mark, element):
    if element == 50:
        kill_once(mark)
    time.sleep(0.002)
    return element


@pytest.mark.thorough
def test_a_worker_that_dies_meanwhile_is_replaced(erratic, tmp_path):
    with OrderedEnqueuer(
        range(200),
        functools.partial(dies_at_50, tmp_path / "died"),
        workers="auto",
        backend=Processes(start_method="fork"),
        max_restarts=1,
    ) as enqueuer:
        assert list(enqueuer) == list(range(200))
        # It is 0 if the worker was about to exit.
        assert enqueuer.restart_count <= 1


def test_an_error_comes_in_its_turn(options, erratic):
    options = dict(workers="auto", concurrency="auto", **options)
    with OrderedEnqueuer(range(100, -1, -1), fails_at_zero, **options) as enqueuer:
        seen = []
        with pytest.raises(ZeroDivisionError):
            for batch in enqueuer:
                seen.append(batch)
        assert seen == [1 / n for n in range(100, 0, -1)]


def fails_at_zero(element):
    time.sleep(0.001)
    return 1 / element


# --- shards ---


def test_without_shards_there_are_sixteen_on_any_machine(options):
    with GeneratorEnqueuer(lambda shard: [shard.count], workers="auto", **options) as enqueuer:
        assert list(enqueuer) == [16] * 16
    enqueuer = GeneratorEnqueuer(twelve, workers=Auto(most=3), rank=1, world_size=2)
    assert enqueuer.state_dict()["shards"] == 32


def forever():
    while True:
        time.sleep(0.01)
        yield 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("source", "cure"),
    [(forever, "forever is one shard"), (iter(forever()), "the generator function itself")],
    ids=["function", "iterator"],
)
def test_what_cannot_be_split_stays_at_one_and_says_so_if_the_loop_waits(caplog, source, cure):
    with GeneratorEnqueuer(source, workers="auto") as enqueuer:
        loop = Loop(enqueuer, 0)
        loop.run_until(lambda: caplog.records)
        loop.run(1)
        assert set(loop.workers) == {1}
    [record] = caplog.records
    assert "workers='auto' stays at 1, though the loop waits" in record.message
    assert cure in record.message


def test_a_number_at_the_start_or_later_takes_its_place(options):
    enqueuer = GeneratorEnqueuer(twelve, workers="auto", **options)
    enqueuer.start(workers=2)
    assert (len(enqueuer.stats().workers), core_of(enqueuer).options.is_auto) == (2, False)
    enqueuer.stop()
    enqueuer.start(workers="auto")
    assert len(enqueuer.stats().workers) == 1
    enqueuer.reconfigure(workers=3)
    assert (len(enqueuer.stats().workers), core_of(enqueuer).options.is_auto) == (3, False)
    assert sorted(enqueuer) == list(range(12))
    enqueuer.stop()


def test_the_short_forms_take_it_too():
    assert sorted(prefetch(twelve, workers="auto")) == list(range(12))
    assert list(imap(abs, range(5), workers=Auto(most=2))) == list(range(5))


# --- arguments and what is said ---


def test_each_change_is_logged_with_its_numbers(caplog):
    caplog.set_level(logging.INFO, "enqueuer")
    with GeneratorEnqueuer(sleepy, workers=Auto(most=2)) as enqueuer:
        loop = Loop(enqueuer, 0)
        loop.run_until(lambda: core_of(enqueuer).run.workers == 2)
    [record] = caplog.records
    assert record.message.startswith("1 -> 2 workers: the loop waited ")
    assert record.message.endswith("% of its time")


@pytest.mark.thorough
def test_workers_that_cannot_be_started_are_done_without(caplog, monkeypatch, options):
    """The loop goes on with those that there are."""
    with endless("tasks", workers="auto", **options) as enqueuer:
        loop = Loop(enqueuer, 0)
        loop.run(0.1)

        def refuse(*_):
            raise StartError("no more processes")

        monkeypatch.setattr(core_of(enqueuer).run.backend.pool, "start_worker", refuse)
        # On a busy machine, the limit by memory may come before it.
        loop.run_until(lambda: "no more processes" in caplog.text)
        loop.run(1)
        assert loop.seen == list(range(len(loop.seen)))
        assert core_of(enqueuer).run.workers == 1
    assert caplog.text.count("workers='auto' stays at 1: ") == 1
