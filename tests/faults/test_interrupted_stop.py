"""Whatever ends a start(), reconfigure() or stop(), the next stop() leaves nothing behind."""

import os
import signal
import threading
import time

import pytest
from helpers import LIMIT, alive, counting, run_program, wait_until

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer
from enqueuer.adapters.loading import Loader
from enqueuer.backends.process.pool import ProcessPool
from enqueuer.backends.thread_pool import ThreadPool
from enqueuer.enqueuers.enqueuer import core_of


class Interrupt(Exception):
    """What the signal handler of these tests raises, as that of SIGINT does."""


@pytest.fixture(autouse=True)
def handler():
    def interrupt(number, frame):
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    assert signal.getsignal(signal.SIGUSR1) is interrupt
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def interrupted_after(monkeypatch):
    """Have starts interrupted after so many workers have come to life."""

    def patch(count):
        for kind in (ThreadPool, ProcessPool):
            monkeypatch.setattr(kind, "start_worker", interrupting(kind.start_worker, count))

    def interrupting(start_one, count):
        def start(*args):
            nonlocal count
            worker = start_one(*args)
            count -= 1
            if count == 0:
                signal.raise_signal(signal.SIGUSR1)
            return worker

        return start

    return patch


@pytest.mark.parametrize("count", [1, 3])
def test_an_interrupted_start_leaves_nothing(backend, count, interrupted_after):
    interrupted_after(count)
    enqueuer = GeneratorEnqueuer(counting, workers=3, **backend)
    with pytest.raises(Interrupt):
        enqueuer.start()
    assert "NEW" in repr(enqueuer)
    with enqueuer:
        assert next(iter(enqueuer)) == (0, 0)


def test_an_iterable_that_keeps_a_start_waiting_can_be_interrupted(backend):
    goes_on = []

    def elements():
        signal.raise_signal(signal.SIGINT)
        goes_on.append(True)
        yield 1

    enqueuer = OrderedEnqueuer(elements(), str, **backend)
    with pytest.raises(KeyboardInterrupt):
        enqueuer.start()
    assert not goes_on
    assert "NEW" in repr(enqueuer)
    assert enqueuer.stats().workers == ()


def test_an_interrupted_reconfigure_leaves_the_old_workers_at_work(backend, interrupted_after):
    with GeneratorEnqueuer(counting, shards=4, workers=2, **backend) as enqueuer:
        batches = iter(enqueuer)
        assert [next(batches) for _ in range(4)] == [(shard, 0) for shard in range(4)]
        interrupted_after(2)
        with pytest.raises(Interrupt):
            enqueuer.reconfigure(4)
        assert "2 workers" in repr(enqueuer)
        assert [next(batches) for _ in range(4)] == [(shard, 1) for shard in range(4)]
        enqueuer.reconfigure(3)
        assert [next(batches) for _ in range(4)] == [(shard, 2) for shard in range(4)]


class Gated:
    """Read the numbers below 8; wait at one of them until `gate` is set."""

    def __init__(self):
        self.reached, self.gate = threading.Event(), threading.Event()

    def __iter__(self):
        for number in range(8):
            if number == 5:
                self.reached.set()
                self.gate.wait(LIMIT)
            yield number


@pytest.fixture
def consumed_elsewhere(backend):
    """Yield an enqueuer whose iterable keeps another thread waiting, and what that has read."""
    elements, read = Gated(), []
    with OrderedEnqueuer(elements, str, max_queue_size=1, **backend) as enqueuer:
        thread = threading.Thread(target=lambda: read.extend(enqueuer))
        thread.start()
        assert elements.reached.wait(LIMIT)

        def let_go():
            elements.gate.set()
            thread.join(LIMIT)
            return read

        yield enqueuer, let_go
        let_go()


def interrupting(function):
    """Return a function that calls another one and then interrupts."""

    def interrupts(*args):
        result = function(*args)
        signal.raise_signal(signal.SIGUSR1)
        return result

    return interrupts


@pytest.mark.thorough
def test_a_stop_ends_a_loop_whose_iterable_keeps_it_waiting(consumed_elsewhere):
    enqueuer, let_go = consumed_elsewhere
    enqueuer.stop(timeout=1)
    assert not core_of(enqueuer).owned.are_running
    read = let_go()
    assert read == [str(number) for number in range(len(read))]


@pytest.mark.thorough("processes")
def test_a_start_that_waits_for_an_iterable_of_the_last_run_can_be_interrupted(
    consumed_elsewhere,
):
    enqueuer, _ = consumed_elsewhere
    enqueuer.stop(timeout=0.2)
    kill = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    with pytest.raises(Interrupt):
        kill.start()
        enqueuer.start()
    assert not core_of(enqueuer).locks.lock.acquire(blocking=False), "the iterable was waited for"
    assert "STOPPED" in repr(enqueuer)
    assert not core_of(enqueuer).owned.are_running


def interrupt_reconfigure(enqueuer, monkeypatch):
    """Have an exception strike while `reconfigure(3)` waits for the iterable."""
    with monkeypatch.context() as patch:
        old = core_of(enqueuer).run.backend
        patch.setattr(old, "close", interrupting(old.close))
        with pytest.raises(Interrupt):
            enqueuer.reconfigure(3)


def test_a_reconfigure_that_waits_for_an_iterable_can_be_interrupted(
    consumed_elsewhere, monkeypatch
):
    enqueuer, let_go = consumed_elsewhere
    old = core_of(enqueuer).run.backend
    assert old.pool.workers
    interrupt_reconfigure(enqueuer, monkeypatch)
    assert core_of(enqueuer).run.backend is old, "the iterable was not waited for"
    assert let_go() == [str(number) for number in range(8)]
    assert "3 workers" in repr(enqueuer)
    wait_until(lambda: not old.pool.workers)


@pytest.mark.thorough
@pytest.mark.parametrize("then", ["stop", "reconfigure"])
def test_after_an_interrupted_reconfigure(consumed_elsewhere, monkeypatch, then):
    enqueuer, let_go = consumed_elsewhere
    interrupt_reconfigure(enqueuer, monkeypatch)
    if then == "stop":
        enqueuer.stop(timeout=0.2)
        assert not core_of(enqueuer).owned.are_running
        # The change goes on when the iterable does, and leaves the next run alone.
        starter = threading.Thread(target=enqueuer.start)
        starter.start()
        read = let_go()
        assert read == [str(number) for number in range(len(read))]
        starter.join(LIMIT)
        assert list(enqueuer) == [str(number) for number in range(8)]
    else:
        timer = threading.Thread(target=let_go)
        timer.start()
        enqueuer.reconfigure(2)
        assert "2 workers" in repr(enqueuer)
        timer.join(LIMIT)
        assert let_go() == [str(number) for number in range(8)]


class Stubborn:
    """Yield its process; when closed first, interrupt the parent, and stay until let go."""

    def __init__(self, folder):
        self.parent = os.getpid()
        self.gate = str(folder / "gate")
        os.mkfifo(self.gate)

    def __call__(self, shard):
        try:
            while True:
                yield os.getpid()
        finally:
            if shard.index == 0 and os.path.exists(self.gate):
                # A signal just before a wait of the system does not end it, but the time limit.
                time.sleep(0.1)
                os.kill(self.parent, signal.SIGUSR1)
                with open(self.gate):
                    pass

    def let_go(self):
        with open(self.gate, "w"):
            os.unlink(self.gate)


@pytest.mark.parametrize("then", ["stop", "start"])
def test_an_interrupted_stop_can_be_completed(backend, then, tmp_path):
    source = Stubborn(tmp_path)
    enqueuer = GeneratorEnqueuer(source, **backend)
    with enqueuer:
        pid = next(iter(enqueuer))
        with pytest.raises(Interrupt):
            enqueuer.stop(timeout=30)
        assert "STOPPED" in repr(enqueuer)
        source.let_go()
        if then == "start":
            enqueuer.start()
            assert pid == os.getpid() or not alive(pid)
            assert next(iter(enqueuer))
    assert pid == os.getpid() or not alive(pid)


def test_an_interrupted_stop_of_a_loader_can_be_completed(backend, tmp_path):
    source = Stubborn(tmp_path)
    loader = Loader(GeneratorEnqueuer(source, **backend))
    pid = next(iter(loader))
    with pytest.raises(Interrupt):
        loader.stop(timeout=30)
    source.let_go()
    loader.stop()
    assert pid == os.getpid() or not alive(pid)
    assert next(iter(loader))
    loader.stop()


def test_an_interrupted_end_of_replaced_workers_is_completed_by_stop(backend, tmp_path):
    source = Stubborn(tmp_path)
    with GeneratorEnqueuer(source, shards=2, **backend) as enqueuer:
        batches = iter(enqueuer)
        pid = next(batches)
        with pytest.raises(Interrupt):
            enqueuer.reconfigure(2)
        assert "2 workers" in repr(enqueuer)
        assert next(batches)
        source.let_go()
    assert pid == os.getpid() or not alive(pid)


@pytest.mark.parametrize("name", ["stats", "position"])
def test_an_error_in_what_stop_reports_does_not_keep_the_workers(backend, name, monkeypatch):
    with GeneratorEnqueuer(counting, workers=2, **backend) as enqueuer:
        next(iter(enqueuer))

        def fails(*_):
            raise OSError("no such measure")

        with monkeypatch.context() as patch, pytest.raises(OSError, match="no such measure"):
            core = core_of(enqueuer)
            patch.setattr(core if name == "stats" else core.reader, name, fails)
            enqueuer.stop()
        assert "STOPPED" in repr(enqueuer)
        assert not core_of(enqueuer).owned.are_running


@pytest.mark.thorough
@pytest.mark.parametrize("options", ["", ", backend='process'", ", workers=2, backend='process'"])
def test_an_endless_prefetch_kept_to_the_end_of_the_program_is_silent(options, tmp_path):
    """Its stop() runs when the interpreter has taken down most of itself."""
    text = f"""
        from enqueuer import prefetch

        def endless(shard):
            while True:
                yield shard.index

        class Keeps:
            def __init__(self):
                self.batches = prefetch(endless{options})

            def next(self):
                return next(self.batches)

        keeps = Keeps()
        print(keeps.next(), next(prefetch(endless{options})))
    """
    assert run_program(tmp_path, text) == (0, "0 0\n", "")
