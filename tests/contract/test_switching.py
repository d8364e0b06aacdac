"""Several threads read one enqueuer, and the interpreter switches threads all the time."""

import functools
import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import LIMIT, run_in_threads

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer

COUNT = 3000


@pytest.fixture
def _switching():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def numbers(shard):
    yield from shard.split(range(COUNT))


def read_by_threads(enqueuer, readers):
    """Return what several threads have read of an epoch."""
    taken, begin = [[] for _ in range(readers)], threading.Barrier(readers)

    def read(into):
        begin.wait(LIMIT)
        into.extend(iter(enqueuer))

    run_in_threads([functools.partial(read, into) for into in taken])
    return [item for into in taken for item in into]


def tasks(**options):
    return OrderedEnqueuer(range(COUNT), abs, **options)


def shards(**options):
    return GeneratorEnqueuer(numbers, **options)


PROCESSES = {"workers": 2, "backend": "process", "max_queue_size": 16}


@pytest.mark.usefixtures("_switching")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (tasks, dict(max_queue_size=2)),
        (tasks, dict(max_queue_size=64)),
        (shards, dict(max_queue_size=3)),
        (shards, dict(max_queue_size=64, ordered=False)),
        pytest.param(tasks, PROCESSES, marks=pytest.mark.thorough),
        pytest.param(tasks, PROCESSES | {"concurrency": 3}, marks=pytest.mark.thorough),
        pytest.param(tasks, dict(workers=2, concurrency=3), marks=pytest.mark.thorough),
    ],
)
def test_each_batch_comes_once_to_one_of_several_readers(make, options):
    with make(**{"workers": 3, **options}) as enqueuer:
        assert sorted(read_by_threads(enqueuer, readers=4)) == list(range(COUNT))
        stats = enqueuer.stats()
    # Also what another thread takes at once.
    assert (stats.items, stats.total_items) == (COUNT, COUNT)


@pytest.mark.thorough
@pytest.mark.usefixtures("_switching")
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_other_threads_may_look_and_change_the_workers_while_some_read(backend):
    done = threading.Event()

    def look():
        while not done.is_set():
            stats, state = enqueuer.stats(), enqueuer.state_dict()
            assert 0 <= stats.items <= COUNT
            assert state["epoch"] in (0, 1)

    def change():
        for workers in itertools.cycle([1, 3, 2]):
            if done.is_set():
                return
            enqueuer.reconfigure(workers=workers)

    options = dict(workers=2, backend=backend, max_queue_size=16)
    with OrderedEnqueuer(range(COUNT), abs, **options) as enqueuer:
        with ThreadPoolExecutor() as pool:
            others = [pool.submit(look), pool.submit(change)]
            try:
                taken = read_by_threads(enqueuer, readers=3)
            finally:
                done.set()
            for other in others:
                other.result(LIMIT)
        assert sorted(taken) == list(range(COUNT))


@pytest.mark.usefixtures("_switching")
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_a_stop_ends_all_readers_and_its_state_has_what_they_got(backend):
    taken, begin = [[] for _ in range(3)], threading.Barrier(3)

    def read(into):
        batches = iter(enqueuer)
        begin.wait(LIMIT)
        for item in batches:
            into.append(item)
            if item == COUNT // 2:
                enqueuer.stop()

    enqueuer = OrderedEnqueuer(range(COUNT), abs, workers=2, backend=backend, max_queue_size=16)
    with enqueuer, ThreadPoolExecutor() as pool:
        for reader in [pool.submit(read, into) for into in taken]:
            reader.result(LIMIT)
        state = enqueuer.state_dict()
    got = sorted(item for into in taken for item in into)
    rest = OrderedEnqueuer(range(COUNT), abs)
    rest.load_state_dict(state)
    with rest:
        assert [*got, *rest] == list(range(COUNT))
