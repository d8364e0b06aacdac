"""The inbox of threads, where a signal handler runs within its methods."""

import functools
import linecache
import sys
import threading
from queue import SimpleQueue

import pytest
from helpers import LIMIT, wait_until

from enqueuer.backends import thread_channel
from enqueuer.backends.thread_channel import ThreadInbox, get_until, wait_for_any
from enqueuer.errors import Closed
from enqueuer.monitoring.meters import Meter
from enqueuer.order.messages import End


class ClosingGate(SimpleQueue):
    """What a worker waits for; the inbox is closed behind the first `put`."""

    close = None

    def put(self, item):
        super().put(item)
        close, ClosingGate.close = ClosingGate.close, None
        if close is not None:
            close()


def is_below_put(thread):
    """Return whether a thread is in a function that `put()` has called."""
    frame = sys._current_frames()[thread.ident]
    return frame.f_back is not None and frame.f_back.f_code is ThreadInbox.put.__code__


def test_a_handler_may_close_an_inbox_that_wakes_a_worker(monkeypatch):
    ends = []
    inbox = ThreadInbox(max_size=1)
    inbox.put((0, 0, "a", None), 0, Meter())

    def put():
        monkeypatch.setattr(thread_channel, "SimpleQueue", ClosingGate)
        with pytest.raises(Closed):
            inbox.put((0, 1, "b", None), 0, Meter())
        ends.append("closed")

    putter = threading.Thread(target=put)
    putter.start()
    wait_until(lambda: is_below_put(putter))
    monkeypatch.undo()
    assert [item[2] for item in inbox.take(1)] == ["a"]
    ClosingGate.close = inbox.close
    inbox.acknowledge()
    putter.join(LIMIT)
    assert ClosingGate.close is None
    assert ends == ["closed"]


@pytest.mark.parametrize("size", [0, 1, 3])
def test_the_loop_can_take_an_item_whose_worker_waits_for_room(size):
    inbox, ends = ThreadInbox(max_size=size), []
    for number in range(size):
        inbox.put((0, number, number, None), 0, Meter())

    def put():
        inbox.put((0, size, size, None), 0, Meter())
        ends.append(size)

    putter = threading.Thread(target=put)
    putter.start()
    wait_until(lambda: is_below_put(putter))
    assert (inbox.waiting, inbox.head(), len(inbox)) == (size, True, size + 1)
    assert [item[2] for item in inbox.take(size + 1)] == list(range(size + 1))
    # What was taken keeps its place.
    assert (inbox.waiting, inbox.head(), ends) == (0, False, [])
    inbox.acknowledge()
    putter.join(LIMIT)
    assert ends == [size]


def test_workers_that_wait_for_room_get_it_in_their_order():
    inbox, ends = ThreadInbox(max_size=1), []
    inbox.put((0, 0, 0, None), 0, Meter())

    def put(number):
        inbox.put((0, number, number, None), 0, Meter())
        ends.append(number)

    putters = [threading.Thread(target=put, args=(number,)) for number in (1, 2)]
    for putter in putters:
        putter.start()
        wait_until(functools.partial(is_below_put, putter))
    for number, putter in enumerate(putters):
        assert [item[2] for item in inbox.take(1)] == [number]
        inbox.acknowledge()
        putter.join(LIMIT)
        assert ends == [1, 2][: number + 1]


def test_a_message_waits_for_room_and_removing_one_makes_it():
    inbox, ends = ThreadInbox(max_size=1), []

    def send():
        for shard in range(3):
            inbox.send(End(shard), Meter())
            ends.append(shard)

    sender = threading.Thread(target=send)
    sender.start()
    for shard in range(3):
        wait_until(lambda: inbox.head() is not False)
        assert inbox.head() == End(shard)
        if shard < 2:
            wait_until(lambda: len(inbox) == 2)
            assert ends == list(range(shard + 1))
        inbox.remove(inbox.head())
    sender.join(LIMIT)
    assert ends == [0, 1, 2]


class CountedQueue:
    """A queue that counts what was put in it."""

    def __init__(self):
        self.queue, self.count = SimpleQueue(), 0
        self.get = self.queue.get

    def put(self, item):
        self.count += 1
        self.queue.put(item)


def test_a_loop_that_waits_for_one_item_is_woken_by_that_one_only(monkeypatch):
    queues = []

    def make():
        queues.append(CountedQueue())
        return queues[-1]

    def is_asleep():
        frame = sys._current_frames()[loop.ident]
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        return frame.f_code is get_until.__code__ and "source.get(" in line

    monkeypatch.setattr(thread_channel, "SimpleQueue", make)
    inbox, meter = ThreadInbox(max_size=10), Meter()
    loop = threading.Thread(target=wait_for_any, args=((inbox,), None, 1))
    loop.start()
    wait_until(is_asleep)
    inbox.put((0, 2, "b", None), 0, meter)
    assert queues[0].count == 0
    inbox.put((0, 1, "a", None), 0, meter)
    loop.join(LIMIT)
    assert (queues[0].count, loop.is_alive()) == (1, False)
