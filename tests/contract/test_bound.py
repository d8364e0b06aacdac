"""Bound: at most max_queue_size items wait, and each worker holds one more in hand."""

import dataclasses
import functools
import itertools
import os
import queue
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import without
from helpers import Gated, backend_of, wait_until

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, StopWarning
from enqueuer.common import interrupts
from enqueuer.enqueuers.enqueuer import core_of


class Counter:
    """Count what sources have begun to make, wherever they run: in the bytes of a file."""

    def __init__(self, folder):
        self.path = str(folder / "made")
        Path(self.path).touch()

    @property
    def made(self):
        return os.path.getsize(self.path)

    def source(self, shard):
        while True:
            with open(self.path, "ab", buffering=0) as file:
                file.write(b".")
            yield np.zeros(100_000, np.uint8)


@pytest.fixture(params=without("process-spawn", "process-forkserver", "process-fork-portable"))
def options(request):
    """Options for threads and forked processes."""
    return request.param


@pytest.mark.thorough("processes")
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(("workers", "size"), [(1, 1), (1, 10), (3, 10), (3, 2), (4, 1)])
def test_no_more_wait_than_the_bound_allows(options, workers, size, ordered, tmp_path):
    counter = Counter(tmp_path)
    with GeneratorEnqueuer(
        counter.source, workers=workers, max_queue_size=size, ordered=ordered, **options
    ) as enqueuer:
        batches = iter(enqueuer)
        for taken in range(30):
            wait_until(lambda: enqueuer.queue.qsize() >= min(1, size // workers))
            # one in each hand, and one more that a hand lets go of while it is counted
            assert counter.made - taken <= size + workers + 1
            next(batches)


def test_the_queue_fills_up_to_the_bound(options, tmp_path):
    counter = Counter(tmp_path)
    with GeneratorEnqueuer(counter.source, workers=2, max_queue_size=6, **options) as enqueuer:
        wait_until(lambda: enqueuer.queue.qsize() == 6)
        wait_until(lambda: counter.made == 8)


@pytest.mark.parametrize("ordered", [True, False])
def test_bytes_are_bounded_too(options, ordered, tmp_path):
    counter = Counter(tmp_path)
    with GeneratorEnqueuer(
        counter.source, workers=2, max_queue_bytes=450_000, ordered=ordered, **options
    ) as enqueuer:
        for taken in range(20):
            next(iter(enqueuer))
            assert counter.made - taken - 1 <= 4 + 2
        # a loop that has just been fast leaves half of each actor's credit to be renewed
        at_least = 2 if backend_of(options) == "ray" else 4
        wait_until(lambda: at_least <= enqueuer.queue.qsize() <= 4)


@dataclasses.dataclass
class Example:
    """A batch whose arrays are attributes."""

    image: np.ndarray
    label: int


def example(number):
    return Example(np.zeros(100_000, np.uint8), number)


def test_bytes_in_attributes_are_bounded_too(options):
    source = functools.partial(map, example, range(20))
    with GeneratorEnqueuer(lambda: source(), max_queue_bytes=450_000, **options) as enqueuer:
        wait_until(lambda: enqueuer.queue.qsize() == 4)
        assert [batch.label for batch in enqueuer] == list(range(20))
        assert enqueuer.stats().bytes >= 20 * 100_000


def test_tasks_are_handed_out_by_the_bytes_in_attributes(options):
    with OrderedEnqueuer(range(20), example, max_queue_bytes=450_000, **options) as enqueuer:
        # The first one tells how large they are. If that comes too late for the next one, one
        # more waits: each worker may have one beside the bound.
        assert [batch.label for batch in itertools.islice(enqueuer, 2)] == [0, 1]
        wait_until(lambda: 4 <= enqueuer.queue.qsize() <= 5)
        assert [batch.label for batch in enqueuer] == list(range(2, 20))


def test_results_without_a_size_are_handed_out_up_to_the_number():
    with OrderedEnqueuer(
        range(20), lambda number: object(), max_queue_bytes=1000, max_queue_size=5
    ) as enqueuer:
        assert len(list(itertools.islice(enqueuer, 2))) == 2
        wait_until(lambda: enqueuer.queue.qsize() == 5)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_batch_larger_than_the_bound_comes_when_it_is_wanted(backend, ordered):
    def source(shard):
        for number in range(3):
            yield np.full(50_000, 10 * number + shard.index)

    with GeneratorEnqueuer(
        source, workers=2, max_queue_bytes=1000, ordered=ordered, **backend
    ) as enqueuer:
        firsts = [int(batch[0]) for batch in enqueuer]
    assert sorted(firsts) == [0, 1, 10, 11, 20, 21]
    assert not ordered or firsts == [0, 1, 10, 11, 20, 21]


def test_bad_numbers_are_refused_by_start():
    enqueuer = GeneratorEnqueuer(iter("ab"))
    with pytest.raises(ValueError, match="workers must be >= 0, got -1"):
        enqueuer.start(workers=-1)
    with pytest.raises(ValueError, match="max_queue_size must be >= 1, got -1"):
        enqueuer.start(max_queue_size=-1)


@pytest.mark.thorough
@pytest.mark.parametrize("ordered", [True, False])
def test_nobody_polls_while_nothing_happens(backend, ordered, tmp_path):
    """An enqueuer whose queue is full, and a consumer that waits for it, cost no CPU time."""

    def workers():
        children = psutil.Process().children(recursive=True)
        if backend_of(backend) == "ray":  # whose servers are children, too, and always do something
            return [child for child in children if name_of(child).startswith("ray::RayWorker")]
        return children

    def name_of(process):
        try:
            return process.name()
        except psutil.NoSuchProcess:  # a server may end a helper at any time
            return ""

    def used():
        return sum(sum(process.cpu_times()[:2]) for process in (psutil.Process(), *workers()))

    source = Gated(tmp_path, stops=[(0, 5), (1, 5)], count=6)
    options = {"workers": 2, "max_queue_size": 4, "ordered": ordered, **backend}
    with GeneratorEnqueuer(source, **options) as enqueuer:
        wait_until(lambda: enqueuer.queue.qsize() == 4)
        assert workers() or backend_of(backend) == "thread"
        before = used()
        threading.Event().wait(0.5)  # nobody takes anything
        for _ in range(10):
            enqueuer.queue.get()
        with pytest.raises(queue.Empty):
            enqueuer.queue.get(timeout=0.5)  # the consumer waits
        assert used() - before < 0.2  # polling every millisecond would take longer
        if backend_of(backend) == "thread":
            with pytest.warns(StopWarning):
                enqueuer.stop(timeout=0)
            for _ in range(2):
                source.let_on()
            wait_until(lambda: "enqueuer-worker" not in str(threading.enumerate()))
        else:
            enqueuer.stop(timeout=0)


def six_hundred_and_gap():
    yield from range(600)
    time.sleep(1)
    yield 600


@pytest.mark.thorough
@pytest.mark.local
def test_nobody_polls_while_a_worker_reads_nothing(process, monkeypatch):
    """With a bound on bytes each item that is taken is a packet, and fewer fit into the socket."""
    polls, wait = [], interrupts.interruptible
    options = dict(max_queue_size=1000, max_queue_bytes=10**6, **process)
    with GeneratorEnqueuer(six_hundred_and_gap, **options) as enqueuer:
        (worker,) = core_of(enqueuer).run.backend.pool.workers

        def all_have_come():
            worker.inbox.read()
            return worker.inbox.control.items == 600

        wait_until(all_have_come)
        batches = iter(enqueuer)
        assert [next(batches) for _ in range(600)] == list(range(600))
        assert worker.inbox.is_owing
        monkeypatch.setattr(
            interrupts, "interruptible", lambda *args: (polls.append(args), wait(*args))[1]
        )
        assert list(batches) == [600]
    # That it goes on, the item, and the end.
    assert len(polls) < 10
