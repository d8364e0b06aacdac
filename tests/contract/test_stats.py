"""Statistics: what is counted is what was, and the bottleneck is found on loads of each kind."""

import functools
import itertools
import operator
import os
import pickle
import re
import signal
import threading
import time
from html import unescape

import numpy as np
import pytest
from conftest import IS_RAY, without
from helpers import LIMIT, Bar, Disturbed, backend_of, retry_if_disturbed, twelve, wait_until

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes, exports
from enqueuer.common import text
from enqueuer.monitoring import progress
from enqueuer.monitoring.stats import HARDLY_WAITS, OFTEN_LACKS_CPU

OTHER_PROCESSES = without("thread", "process-spawn", "process-fork-portable")
MEGABYTE = 1_000_000


@pytest.fixture(params=without("process-spawn", "process-fork-portable"))
def options(request):
    """Options without spawn and the portable path, which make no difference here."""
    return request.param


def stats_of(source, *, batches=None, use_s=0.0, **options):
    """Run a loop that takes so long for each batch, and return the statistics at its end."""
    with GeneratorEnqueuer(source, **options) as enqueuer:
        for _ in itertools.islice(enqueuer, batches):
            if use_s:
                time.sleep(use_s)
        return enqueuer.stats()


def steady_stats_of(source, *, use_s=0.0, **options):
    """Do the same, but leave the start out if that takes longer than all the rest, as of Ray."""
    with GeneratorEnqueuer(source, **options) as enqueuer:
        began = None
        for _ in enqueuer:
            if began is None:
                began = enqueuer.stats()
            if use_s:
                time.sleep(use_s)
        stats = enqueuer.stats()
        return stats.since(began) if IS_RAY else stats


# --- counters ---


def test_items_are_counted_for_each_worker_and_in_all(options):
    stats = stats_of(twelve, workers=3, **options)
    assert stats.items == 12
    assert [worker.items for worker in stats.workers] == [4, 4, 4]
    assert [worker.shards for worker in stats.workers] == [(0,), (1,), (2,)]
    assert (stats.epoch, stats.queue_size, stats.max_queue_size) == (0, 0, 10)
    assert stats.backend == backend_of(options)


def test_tasks_are_counted_likewise(options):
    with OrderedEnqueuer(range(20), abs, workers=2, **options) as enqueuer:
        assert len(list(enqueuer)) == 20
        stats = enqueuer.stats()
    assert stats.items == 20
    assert sum(worker.items for worker in stats.workers) == 20
    assert [worker.shards for worker in stats.workers] == [(), ()]


def test_bytes_are_those_of_the_batches(options):
    def source():
        for _ in range(40):
            yield {"x": np.zeros(MEGABYTE, np.uint8)}

    stats = stats_of(source, **options)
    assert 40 * MEGABYTE <= stats.bytes <= 41 * MEGABYTE
    assert (stats.block_bytes >= MEGABYTE) == (backend_of(options) == "process")


def test_no_more_than_max_queue_size_is_said_to_wait(options):
    """A finished batch that each worker may have beyond it counts as held by the worker."""
    with OrderedEnqueuer(range(20), workers=3, max_queue_size=2, **options) as enqueuer:
        next(iter(enqueuer))
        wait_until(lambda: sum(one.items for one in enqueuer.stats().workers) >= 5)
        wait_until(lambda: enqueuer.stats().queue_size == 2)
        assert enqueuer.queue.qsize() == 2


def test_a_batch_that_waits_is_not_an_item_of_the_loop_yet(options):
    with GeneratorEnqueuer(twelve, max_queue_size=5, **options) as enqueuer:
        wait_until(lambda: enqueuer.stats().queue_size == 5)
        assert enqueuer.stats().items == 0
        next(iter(enqueuer))
        assert enqueuer.stats().items == 1


@pytest.mark.thorough("processes")
def test_the_time_of_a_worker_is_divided_without_a_rest(options):
    def source():
        for _ in range(10):
            time.sleep(0.02)
            yield np.zeros(MEGABYTE)

    with GeneratorEnqueuer(source, **options) as enqueuer:
        began = time.monotonic()
        list(enqueuer)
        wait_until(lambda: enqueuer.stats().workers[0].idle_s > 0)
        (worker,) = enqueuer.stats().workers
        took = time.monotonic() - began
    parts = (
        worker.starting_s,
        worker.making_s,
        worker.sending_s,
        worker.waiting_s,
        worker.idle_s,
    )
    assert all(part >= 0 for part in parts)
    assert worker.making_s >= 0.2
    # The enqueuer began a little before the clock.
    assert took - 0.1 < sum(parts) < took + 0.5


@pytest.mark.thorough
def test_the_time_of_the_loop_is_waiting_and_working(options):
    def source():
        for _ in range(20):
            time.sleep(0.01)
            yield 0

    stats = stats_of(source, use_s=0.03, **options)
    assert stats.working_s >= 20 * 0.03
    assert stats.first_batch_s >= 0.01
    assert stats.seconds >= stats.first_batch_s + stats.waiting_s + stats.working_s - 0.05


@pytest.mark.thorough("processes")
def test_waits_are_sorted_by_their_length(options):
    def source():
        for number in range(20):
            time.sleep(0.1 if number % 5 == 4 else 0.0)
            yield number

    stats = stats_of(source, **options)
    assert sum(stats.waits.values()) <= 20
    assert stats.wait_p50_s < 0.05
    assert stats.wait_p99_s >= 0.08
    assert stats.wait_p50_s <= stats.wait_p90_s <= stats.wait_p99_s


@pytest.mark.thorough
def test_a_wait_that_lasts_is_counted_while_it_lasts(options):
    def source():
        yield 0
        time.sleep(2.0)
        yield 1

    with GeneratorEnqueuer(source, **options) as enqueuer:
        batches = iter(enqueuer)
        next(batches)
        thread = threading.Thread(target=lambda: list(batches))
        thread.start()
        wait_until(lambda: enqueuer.stats().waiting_s > 0.2)
        assert enqueuer.stats().workers[0].making_s > 0.1
        # The wait is not over.
        assert enqueuer.stats().waits == {}
        thread.join(LIMIT)


@pytest.mark.thorough("processes")
def test_of_workers_cpu_is_known_and_of_processes_memory(options):
    def source():
        for _ in range(30):
            sum(range(200_000))
            yield 0

    stats = stats_of(source, **options)
    (worker,) = stats.workers
    assert worker.cpu_s > 0.02
    assert (worker.rss_bytes is None) == (stats.backend == "thread")
    assert worker.rss_bytes is None or worker.rss_bytes > MEGABYTE
    assert stats.loop_cpu_s >= 0


class Slow:
    """A source that takes long to be there, in the worker."""

    def __call__(self):
        yield from range(3)

    def __reduce__(self):
        return _slow, ()


def _slow():
    end = time.thread_time() + 0.5
    while time.thread_time() < end:
        pass
    return Slow()


@pytest.mark.thorough
def test_what_the_start_has_used_of_the_cpu_is_not_counted():
    stats = stats_of(Slow(), backend=Processes(start_method="forkserver"))
    (worker,) = stats.workers
    assert worker.starting_s >= 0.5
    assert worker.cpu_s < 0.4


def test_a_worker_that_takes_the_place_of_a_dead_one_goes_on_with_its_numbers():
    def source():
        for number in range(20):
            yield os.getpid() if number < 10 else number

    with GeneratorEnqueuer(source, backend="process", max_restarts=1, max_queue_size=1) as enqueuer:
        batches = iter(enqueuer)
        os.kill(next(batches), signal.SIGKILL)
        assert len(list(batches)) == 19
        stats = enqueuer.stats()
    assert stats.restart_count == 1
    assert stats.workers[0].items >= 20
    assert stats.items == 20


# --- snapshots ---


def test_before_the_start_there_is_nothing():
    stats = GeneratorEnqueuer(twelve).stats()
    assert (stats.items, stats.workers, stats.seconds) == (0, (), 0.0)
    assert stats.bottleneck().kind == "unknown"


def test_after_the_stop_they_are_those_of_the_run(options):
    with GeneratorEnqueuer(twelve, workers=2, **options) as enqueuer:
        list(enqueuer)
    stats = enqueuer.stats()
    assert stats.items == 12
    assert [worker.items for worker in stats.workers] == [6, 6]
    assert stats == enqueuer.stats()


def test_a_new_start_begins_anew(options):
    enqueuer = GeneratorEnqueuer(twelve, **options)
    with enqueuer:
        list(enqueuer)
    with enqueuer:
        assert enqueuer.stats().items == 0
        list(enqueuer)
        list(enqueuer)
        assert enqueuer.stats().items == 24


def test_the_difference_of_two_is_what_was_between_them(options):
    with GeneratorEnqueuer(twelve, workers=2, **options) as enqueuer:
        list(enqueuer)
        earlier = enqueuer.stats()
        list(enqueuer)
        stats = enqueuer.stats().since(earlier)
    assert stats.items == 12
    assert [worker.items for worker in stats.workers] == [6, 6]
    assert stats.epoch == 1


def test_the_difference_to_another_run_is_all_of_this_one(options):
    enqueuer = GeneratorEnqueuer(twelve, workers=2, **options)
    with enqueuer:
        list(enqueuer)
        list(enqueuer)
        earlier = enqueuer.stats()
    with enqueuer:
        list(enqueuer)
        stats = enqueuer.stats()
    assert stats.since(earlier) == stats
    assert stats.items == 12


def test_the_rate_between_two_counts_all_batches_in_between():
    """Of a run the first batch does not count, as the loop's time begins with it."""
    with GeneratorEnqueuer(twelve) as enqueuer:
        batches = iter(enqueuer)
        next(batches)
        earlier = enqueuer.stats()
        for _ in range(3):
            time.sleep(0.01)
            next(batches)
        stats = enqueuer.stats()
    for one in (stats, stats.since(earlier)):
        assert one.items_per_s == pytest.approx(3 / (one.waiting_s + one.working_s))


def test_new_workers_are_not_compared_with_those_before_them(options):
    with GeneratorEnqueuer(twelve, workers=2, shards=2, **options) as enqueuer:
        list(enqueuer)
        earlier = enqueuer.stats()
        enqueuer.reconfigure(1)
        list(enqueuer)
        stats = enqueuer.stats().since(earlier)
    assert stats.items == 12
    assert [worker.items for worker in stats.workers] == [12]


def test_they_can_be_pickled_and_printed():
    stats = stats_of(twelve, workers=2)
    assert pickle.loads(pickle.dumps(stats)) == stats
    text = str(stats)
    assert "12 batches" in text
    assert "worker 1 (thread)" in text
    assert str(stats.bottleneck()) in text


# --- the bottleneck of real loads ---


def sleeping(make_s, count=30):
    """Return a source that takes so long for each item, without a CPU."""

    def source(shard):
        for number in range(count):
            time.sleep(make_s)
            yield shard.index, number

    return source


def is_crowded(stats):
    """Return whether other processes kept the workers from the CPUs."""
    worked = sum(worker.making_s + worker.sending_s for worker in stats.workers)
    return sum(worker.cpu_wait_s or 0.0 for worker in stats.workers) > OFTEN_LACKS_CPU * worked


def check(kind, measure):
    """Return statistics whose bottleneck is `kind`: measured anew where other work disturbed it."""
    for _ in range(3):
        stats = measure()
        found = stats.bottleneck().kind
        if found == kind or (found == "cpus" and is_crowded(stats)):
            return stats
    raise AssertionError(str(stats))


def slow_in_one_shard(shard):
    for number in range(20):
        time.sleep(0.04 if shard.index == 1 else 0.004)
        yield shard.index, number


def uneven():
    for number in range(60):
        if number % 10 == 0:
            time.sleep(0.1)
        yield number


def slow_to_begin():
    time.sleep(1.0)
    yield from range(20)


LOADS = {
    "source": functools.partial(steady_stats_of, sleeping(0.02), use_s=0.005),
    "loop": functools.partial(steady_stats_of, sleeping(0.001), use_s=0.02),
    "slow shard": functools.partial(steady_stats_of, slow_in_one_shard, workers=3),
    "queue": functools.partial(steady_stats_of, uneven, use_s=0.01, max_queue_size=1),
    "start-up": functools.partial(stats_of, slow_to_begin),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", LOADS)
def test_the_bottleneck_of_a_load_of_each_kind_is_found(options, kind):
    stats = check(kind, functools.partial(LOADS[kind], **options))
    if kind == "source":
        assert stats.waiting_share > 0.4
    if kind == "loop":
        assert stats.waiting_share < HARDLY_WAITS or is_crowded(stats)
    if kind == "slow shard":
        assert max(stats.waited_for, key=stats.waited_for.get) == 1


# Ray takes longer to start than all the rest takes.
@pytest.mark.local
def test_elements_that_the_loop_reads_slowly_are_reported(options):
    def elements():
        for number in range(30):
            time.sleep(0.01)
            yield number

    def measure():
        with OrderedEnqueuer(elements(), abs, workers=2, **options) as enqueuer:
            assert len(list(enqueuer)) == 30
            return enqueuer.stats()

    stats = check("source", measure)
    assert "from the iterable" in stats.bottleneck().reason
    assert stats.waiting_s >= stats.reading_s > 0.1
    assert stats.wait_p50_s >= 0.01


def wait_10_ms(element):
    """Wait as for a file."""
    time.sleep(0.01)
    return element


@pytest.mark.thorough
@pytest.mark.local
def test_between_epochs_a_worker_waits_for_no_task(options):
    """A long pause hides neither the source nor that its elements wait."""

    def measure():
        with OrderedEnqueuer(range(40), map=wait_10_ms, **options) as enqueuer:
            for _ in range(2):
                list(enqueuer)
                time.sleep(1.0)
            return enqueuer.stats()

    stats = check("source", measure)
    assert stats.idle_s >= 2.0 > 1.0 > stats.working_s
    assert all(worker.idle_s > 1.0 > worker.waiting_s for worker in stats.workers)
    assert "concurrency=" in stats.bottleneck().change


@pytest.mark.parametrize("options", OTHER_PROCESSES)
def test_copying_is_reported(options):
    def source():
        array = np.zeros(20 * MEGABYTE, np.uint8)
        for _ in range(50):
            yield array

    check("transport", lambda: steady_stats_of(source, **options))


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="of Linux")
@retry_if_disturbed
def test_too_few_cpus_are_reported():
    def source(shard):
        for number in range(40):
            sum(range(300_000))
            yield shard.index, number

    allowed = os.sched_getaffinity(0)
    # Forked workers inherit it.
    os.sched_setaffinity(0, {min(allowed)})
    try:
        stats = stats_of(source, workers=2, backend=Processes(start_method="fork"))
    finally:
        os.sched_setaffinity(0, allowed)
    assert stats.cpus == 1
    if stats.bottleneck().kind != "cpus":
        raise Disturbed(str(stats))


def test_processes_are_not_advised_if_threads_wait_outside_of_python():
    """Although they compute a little, and all threads together as much as half a CPU."""

    def load(element):
        time.sleep(0.035)
        end = time.thread_time() + 0.003
        while time.thread_time() < end:
            pass
        return element

    for _ in range(3):
        with OrderedEnqueuer(range(80), load, workers=8) as enqueuer:
            assert len(list(enqueuer)) == 80
            stats = enqueuer.stats()
        assert all(worker.switches > 5 for worker in stats.workers)
        # Threads that wait for a CPU look like threads that wait for the GIL, above all if the one
        # that holds it has no CPU. They need only little of it.
        lacked = sum(worker.lacked_s for worker in stats.workers)
        is_disturbed = lacked > sum(worker.cpu_s for worker in stats.workers)
        if is_disturbed or "process" not in stats.bottleneck().advice:
            return
    raise AssertionError(str(stats))


def test_one_line_and_html_say_the_same_as_the_table():
    with GeneratorEnqueuer(lambda: iter(range(12)), workers=1) as enqueuer:
        list(enqueuer)
    stats = enqueuer.stats()
    lines = str(stats).splitlines()
    assert repr(stats).startswith(f"<Stats {lines[0].split(' a second')[0]} a second, 1 worker, ")
    assert "\n" not in repr(stats)
    html = operator.methodcaller("_repr_html_")(stats)
    assert unescape(html) == f"<pre>{stats}</pre>"


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_one_run_has_one_share_of_waiting_and_one_rate(backend):
    """In the statistics, the bottleneck, the log line and the bar."""
    Bar.made = []
    options = dict(workers=2, progress=Bar, backend=backend)
    with GeneratorEnqueuer(sleeping(0.01, 12), **options) as enqueuer:
        # A long start would be the bottleneck.
        wait_until(lambda: enqueuer.stats().queue_size > 0)
        for _ in enqueuer:
            time.sleep(0.002)
    stats = enqueuer.stats()
    said = "\n".join([str(stats), exports.line(stats), Bar.made[0].texts[-1]])
    shares = re.findall(r"(?:loop wait\w*|it waited|^waiting) ([\d.]+ %)", said, re.MULTILINE)
    # Beside those of the sentence, which not every bottleneck has.
    assert len(shares) >= 3, said
    assert set(shares) == {text.percent(stats.waiting_share)}
    rates = re.findall(r"([\d.,]+) (?:a second|batches/s)", said)
    assert set(rates) == {text.rate(stats.items_per_s)}
    # The line and the bar have the kind and the change; the table has the whole sentence.
    found = stats.bottleneck()
    for shown in (exports.line(stats), progress.postfix(stats)):
        assert f" {shares[0]} ({found.short})" in shown
    assert said.count(str(found)) == 1


def test_without_order_no_wait_is_for_one_worker():
    with GeneratorEnqueuer(sleeping(0.01), workers=1, ordered=False) as enqueuer:
        list(itertools.islice(enqueuer, 20))
        stats = enqueuer.stats()
    assert stats.waiting_s > 0
    assert stats.waited_for == {}
