"""The outbox of a Ray actor, without Ray: a thread takes its packets as the stream does."""

import sys
import threading

import numpy as np
import pytest
from helpers import LIMIT

from enqueuer.backends.ray.actor import Ended, ItemFrame, Outbox, TotalCredit
from enqueuer.errors import Closed
from enqueuer.transport.item_codec import decode


class Stream:
    """Takes all packets, and copies each before the next one, as Ray does."""

    def __init__(self, outbox):
        self.outbox = outbox
        self.packets = []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        is_over = False
        while not is_over:
            frames = self.outbox.take()
            sent = [frame for frame in frames if isinstance(frame, ItemFrame)]
            self.packets.append([(frame.data, [*map(bytearray, frame.buffers)]) for frame in sent])
            is_over = isinstance(frames[-1], Ended)

    def values(self):
        self.outbox.send_frame(Ended())
        self.thread.join(LIMIT)
        assert not self.thread.is_alive()
        return [decode(*packed) for packet in self.packets for packed in packet]


@pytest.mark.parametrize("is_strided", [False, True])
@pytest.mark.parametrize("size", [100, 500_000, 3_000_000])
def test_what_was_sent_stays_as_it_was(size, is_strided):
    outbox = Outbox(TotalCredit(100, None, 0), asks=False)
    stream = Stream(outbox)
    array = np.empty((size, 2), np.uint8)[:, 0] if is_strided else np.empty(size, np.uint8)
    for number in range(30):
        array[:] = number
        outbox.send_item(0, number, array)
    values = stream.values()
    assert len(values) == 30
    assert all((value == number).all() for number, value in enumerate(values))


def test_credit_lets_a_waiting_worker_go_on():
    outbox = Outbox(TotalCredit(1, None, 0), asks=False)
    stream = Stream(outbox)
    worker = threading.Thread(target=lambda: [outbox.send_item(0, n, n) for n in range(3)])
    worker.start()
    outbox.grant(TotalCredit(3, None, 0))
    worker.join(LIMIT)
    assert not worker.is_alive()
    assert stream.values() == [0, 1, 2]


def test_closing_frees_a_worker_that_waits_for_a_copy():
    outbox = Outbox(TotalCredit(9, None, 0), asks=False)
    worker = threading.Thread(target=outbox.send_item, args=(0, 0, np.zeros(3_000_000)))
    worker.start()
    # The packet counts as copied only when the next one is taken.
    outbox.take()
    outbox.close()
    worker.join(LIMIT)
    assert not worker.is_alive()


def test_a_worker_without_further_tickets_sees_that_the_consumer_left():
    """Otherwise it would wait for the coroutines that run, instead of cancelling them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            assert sees_that_the_consumer_left(Outbox(TotalCredit(1, None, 0), asks=False))
    finally:
        sys.setswitchinterval(interval)


def sees_that_the_consumer_left(outbox):
    seen, ended = [], threading.Event()

    def work():
        assert outbox.next_ticket() is None
        try:
            outbox.check()
        except Closed as error:
            seen.append(error)
        ended.set()

    def log():
        # So `close()` has to wait for the lock.
        while not ended.is_set():
            outbox.send_frame(Ended())

    threads = [threading.Thread(target=target) for target in (log, work)]
    for thread in threads:
        thread.start()
    outbox.close()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    return bool(seen)
