"""The queue from which worker threads take their orders."""

import threading

import pytest
from helpers import LIMIT, wait_until

from enqueuer.backends.thread_channel import WorkQueue
from enqueuer.monitoring.meters import IDLE, PHASE, Meter

THREADS = 4


class Taker:
    """A thread that takes items until the end."""

    def __init__(self, queue):
        self.queue, self.meter, self.items = queue, Meter(), []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while (item := self.queue.get(self.meter, IDLE)) is not None:
            self.items.append(item)
            if callable(item):
                item()

    @property
    def waits(self):
        return self.meter.words[PHASE] == IDLE

    def join(self):
        self.thread.join(LIMIT)
        assert not self.thread.is_alive()


@pytest.fixture
def queue():
    queue = WorkQueue()
    yield queue
    queue.close()


def test_several_items_wake_as_many_threads(queue):
    takers = [Taker(queue) for _ in range(THREADS)]
    wait_until(lambda: all(taker.waits for taker in takers))
    barrier = threading.Barrier(THREADS + 1)
    queue.put_all([barrier.wait] * THREADS)
    # It opens when each thread has an item.
    barrier.wait(LIMIT)
    queue.close()
    for taker in takers:
        taker.join()
        assert len(taker.items) == 1


def test_each_item_is_taken_once_whoever_puts_and_takes(queue):
    takers, counts = [Taker(queue) for _ in range(THREADS)], range(1, 200)

    def put():
        for count in counts:
            queue.put_all(range(count))
            queue.put(count)

    putters = [threading.Thread(target=put) for _ in range(2)]
    for putter in putters:
        putter.start()
    for putter in putters:
        putter.join()
    total = 2 * (sum(counts) + len(counts))
    wait_until(lambda: sum(len(taker.items) for taker in takers) == total)
    queue.close()
    for taker in takers:
        taker.join()
