"""The garbage collector may strike anywhere, also inside our own locks."""

import contextlib
import gc
import os
import resource
import threading
import weakref
from collections import deque
from queue import SimpleQueue

import numpy as np
import pytest
from helpers import LIMIT, METHODS, collect_until, counting, start_method_of, wait_until

from enqueuer import BlockMemoryError, GeneratorEnqueuer, OrderedEnqueuer, Processes
from enqueuer.backends import thread_channel
from enqueuer.common.interrupts import WorkerThread
from enqueuer.enqueuers.enqueuer import core_of
from enqueuer.monitoring.meters import PHASE, WAITING
from enqueuer.transport.channel import Packets


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


@contextlib.contextmanager
def forgotten_with_a_full_inbox():
    """Forget an enqueuer whose worker waits for room, which it gets at the end of the block.

    Its worker must end then; no collection happens but those of the test.
    """
    gc.disable()
    try:
        enqueuer = GeneratorEnqueuer(counting, max_queue_size=2)
        enqueuer.myself = enqueuer
        next(iter(enqueuer))
        (worker,) = core_of(enqueuer).run.backend.pool.workers
        inbox, thread = worker.inbox, worker.thread
        # How many items the loop has taken is chance.
        wait_until(lambda: worker.meter.words[PHASE] == WAITING)
        del enqueuer
        yield
        deque(inbox.take(1), maxlen=0)
        inbox.acknowledge()
        thread.join(LIMIT)
        assert not thread.is_alive()
    finally:
        gc.enable()


def test_an_enqueuer_is_collected_by_its_own_worker_thread_inside_put(monkeypatch):
    armed = threading.Event()

    class Collecting(deque):
        def append(self, item):
            if armed.is_set():
                gc.collect()
            super().append(item)

    monkeypatch.setattr(thread_channel, "deque", Collecting)
    with forgotten_with_a_full_inbox():
        armed.set()


@pytest.mark.thorough("processes")
def test_enqueuers_are_collected_wherever_the_collector_strikes(backend):
    """A small threshold makes it strike all the time, in every thread."""
    before = gc.get_threshold()
    gc.set_threshold(5)
    try:
        for _ in range(5 if start_method_of(backend) == "spawn" else 30):
            forgotten(**backend)
    finally:
        gc.set_threshold(*before)


def test_an_enqueuer_is_collected_between_seeing_that_an_inbox_is_full_and_waiting(monkeypatch):
    """Closing it right there would wake no thread, and the worker would wait forever."""
    armed, struck = threading.Event(), threading.Event()

    def collecting():
        if armed.is_set() and isinstance(threading.current_thread(), WorkerThread):
            armed.clear()
            gc.collect()
            struck.set()
        return SimpleQueue()

    with forgotten_with_a_full_inbox():
        monkeypatch.setattr("enqueuer.backends.thread_channel.SimpleQueue", collecting)
        armed.set()
    assert struck.is_set()


class Chained:
    """An iterable of two elements whose error has another one as its context."""

    def __iter__(self):
        self.count = 0
        return self

    def __next__(self):
        self.count += 1
        if self.count <= 2:
            return self.count
        try:
            raise KeyError("why")
        except KeyError:
            raise self.error()  # noqa: B904

    def error(self):
        return ValueError("it failed")


class Uncopyable(Exception):
    """An exception that an enqueuer cannot copy to raise it again."""

    def __copy__(self):
        raise TypeError


class RaisesUncopyable(Chained):
    def error(self):
        return Uncopyable()


class GivesALock(Chained):
    def __next__(self):
        return self.count if super().__next__() == 1 else threading.Lock()


def size_of(number):
    return number


@pytest.mark.parametrize("reads", [1, 9])
@pytest.mark.parametrize("items", [Chained, RaisesUncopyable, GivesALock])
def test_an_enqueuer_is_collected_whose_iterable_has_failed(backend, items, reads):
    """The error was raised, and caught; or it is still to come."""

    def run():
        enqueuer = OrderedEnqueuer(items(), size_of, **backend)
        enqueuer.start()
        batches = iter(enqueuer)
        with contextlib.suppress(Exception):
            for _ in range(reads):
                next(batches)
        return weakref.ref(core_of(enqueuer))

    core = run()
    collect_until(lambda: core() is None)


def test_an_enqueuer_is_collected_that_had_no_descriptors_left(process):
    def source():
        for number in range(10):
            yield np.zeros(100_000 * (1 + number))

    def run():
        enqueuer = GeneratorEnqueuer(source, max_queue_size=1, stall_timeout=None, **process)
        enqueuer.start()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The limit is for numbers of descriptors: none below this one is free, whatever is open.
        os.close(lowest := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            with pytest.raises(BlockMemoryError):
                list(enqueuer)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return weakref.ref(core_of(enqueuer))

    core = run()
    collect_until(lambda: core() is None)
