"""The garbage collector may strike anywhere, also inside our own locks."""

import gc
import threading
from collections import deque

import pytest
from helpers import LIMIT, METHODS, counting, start_method_of, wait_until

from enqueuer import GeneratorEnqueuer, Processes
from enqueuer.backends.process import fork_server
from enqueuer.enqueuers.enqueuer import core_of


def forgotten(**options):
    """Make an enqueuer that runs and that only the garbage collector can find."""
    enqueuer = GeneratorEnqueuer(counting, workers=2, **options)
    enqueuer.myself = enqueuer
    next(iter(enqueuer))


@pytest.mark.skipif("forkserver" not in METHODS, reason="there is no fork server")
def test_an_enqueuer_is_collected_while_another_is_being_started(monkeypatch):
    options = {"backend": Processes(start_method="forkserver")}
    gc.disable()
    try:
        forgotten(**options)
        packets = fork_server._server._packets
        send = packets.send
        monkeypatch.setattr(packets, "send", lambda *args: (send(*args), gc.collect()))
        started = []

        def start():
            with GeneratorEnqueuer(counting, **options) as enqueuer:
                started.append(next(iter(enqueuer)))

        starter = threading.Thread(target=start, daemon=True)
        starter.start()
        starter.join(LIMIT)
        assert started == [(0, 0)]
    finally:
        gc.enable()


def test_an_enqueuer_is_collected_by_its_own_worker_thread_inside_put():
    class Collecting(deque):
        armed = False

        def append(self, item):
            if self.armed:
                gc.collect()
            super().append(item)

    gc.disable()
    try:
        enqueuer = GeneratorEnqueuer(counting, max_queue_size=2)
        enqueuer.myself = enqueuer
        batches = iter(enqueuer)
        next(batches)
        (worker,) = core_of(enqueuer).run.backend._pool.workers
        buffer, thread = worker.inbox, worker.thread
        wait_until(lambda: len(buffer) == 2)
        with buffer._not_full:
            items = buffer._items = Collecting(buffer._items)
        del enqueuer, batches
        items.armed = True
        buffer.get(0)  # now the worker puts
        thread.join(LIMIT)
        assert not thread.is_alive()
    finally:
        gc.enable()


def test_enqueuers_are_collected_wherever_the_collector_strikes(backend):
    """A small threshold makes it strike all the time, in every thread."""
    before = gc.get_threshold()
    gc.set_threshold(5)
    try:
        for _ in range(5 if start_method_of(backend) == "spawn" else 30):
            forgotten(**backend)
    finally:
        gc.set_threshold(*before)


def test_an_enqueuer_is_collected_between_seeing_that_a_buffer_is_full_and_waiting():
    """Closing it right there would wake nobody, and the thread would wait for ever."""
    gc.disable()
    try:
        enqueuer = GeneratorEnqueuer(counting, max_queue_size=2)
        enqueuer.myself = enqueuer
        batches = iter(enqueuer)
        next(batches)
        (worker,) = core_of(enqueuer).run.backend._pool.workers
        buffer, thread = worker.inbox, worker.thread
        may_put, armed = buffer._may_put_locked, threading.Event()

        def seeing(size_bytes):
            answer = may_put(size_bytes)
            if armed.is_set():
                gc.collect()
            return answer

        buffer._may_put_locked = seeing
        wait_until(lambda: buffer._putters and len(buffer) == 2)
        del enqueuer, batches
        armed.set()
        with buffer._not_full:
            buffer._not_full.notify_all()  # spuriously: it looks again, and is about to wait
        thread.join(LIMIT)
        assert not thread.is_alive()
    finally:
        gc.enable()
