"""The garbage collector may strike anywhere, also inside our own locks."""

import gc
import threading
from collections import deque

import pytest
from helpers import LIMIT, METHODS, counting, start_method_of, wait_until

from enqueuer import GeneratorEnqueuer, Processes
from enqueuer.backends.thread import buffer as buffers
from enqueuer.enqueuers.enqueuer import core_of
from enqueuer.transport.packets import Packets


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
        send = Packets.send

        def send_and_collect(*args, **kwargs):
            try:
                return send(*args, **kwargs)
            finally:
                gc.collect()

        monkeypatch.setattr(Packets, "send", send_and_collect)
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


def test_an_enqueuer_is_collected_by_its_own_worker_thread_inside_put(monkeypatch):
    armed = threading.Event()

    class Collecting(deque):
        def append(self, item):
            if armed.is_set():
                gc.collect()
            super().append(item)

    monkeypatch.setattr(buffers, "deque", Collecting)
    gc.disable()
    try:
        enqueuer = GeneratorEnqueuer(counting, max_queue_size=2)
        enqueuer.myself = enqueuer
        batches = iter(enqueuer)
        next(batches)
        (worker,) = core_of(enqueuer).run.backend.pool.workers
        buffer, thread = worker.inbox, worker.thread
        wait_until(lambda: len(buffer) == 2)
        del enqueuer, batches
        armed.set()
        # It makes room, so the worker puts.
        buffer.get(0)
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


def test_an_enqueuer_is_collected_between_seeing_that_a_buffer_is_full_and_waiting(monkeypatch):
    """Closing it right there would wake no thread, and the worker would wait forever."""
    armed, waiting = threading.Event(), []

    class Collecting(threading.Condition):
        def wait_for(self, is_room, timeout=None):
            def sees():
                answer = is_room()
                if armed.is_set():
                    gc.collect()
                return answer

            waiting.append(self)
            return super().wait_for(sees, timeout)

    gc.disable()
    try:
        enqueuer = GeneratorEnqueuer(counting, max_queue_size=2)
        enqueuer.myself = enqueuer
        with monkeypatch.context() as patch:
            patch.setattr(threading, "Condition", Collecting)
            batches = iter(enqueuer)
        next(batches)
        (worker,) = core_of(enqueuer).run.backend.pool.workers
        buffer, thread = worker.inbox, worker.thread
        wait_until(lambda: "<Buffer 2/2 open, 1 in put()>" in repr(buffer))
        del enqueuer, batches
        armed.set()
        # A spurious wake-up: the worker sees that the buffer is full, and is about to wait.
        with waiting[-1]:
            waiting[-1].notify_all()
        thread.join(LIMIT)
        assert not thread.is_alive()
    finally:
        gc.enable()
