"""Several threads read one enqueuer, and the interpreter switches threads all the time."""

import sys
import threading
from collections import deque

import pytest
from helpers import LIMIT

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer
from enqueuer.enqueuers.enqueuer import core_of

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

    threads = [threading.Thread(target=read, args=(into,), daemon=True) for into in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    return [item for into in taken for item in into]


@pytest.mark.usefixtures("_switching")
@pytest.mark.parametrize("size", [2, 64])
def test_each_result_comes_once_to_one_of_several_readers(size):
    with OrderedEnqueuer(range(COUNT), abs, workers=3, max_queue_size=size) as enqueuer:
        assert sorted(read_by_threads(enqueuer, readers=4)) == list(range(COUNT))


@pytest.mark.usefixtures("_switching")
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("size", [3, 64])
def test_each_item_comes_once_to_one_of_several_readers(size, ordered):
    with GeneratorEnqueuer(numbers, workers=3, max_queue_size=size, ordered=ordered) as enqueuer:
        assert sorted(read_by_threads(enqueuer, readers=4)) == list(range(COUNT))


class Greedy(deque):
    """What is ready, of which another thread takes all at once."""

    def __init__(self, items=()):
        super().__init__(items)
        self.taken = []

    def extend(self, items):
        self.taken += items


def test_what_another_thread_takes_at_once_is_counted():
    with GeneratorEnqueuer(numbers, shards=1) as enqueuer:
        reader = core_of(enqueuer).reader
        reader.ready = ready = Greedy()
        assert list(enqueuer) == []
        stats = enqueuer.stats()
    assert [item[2] for item in ready.taken] == list(range(COUNT))
    assert (stats.items, stats.total_items) == (COUNT, COUNT)
