"""A signal handler that calls the enqueuer, at every place of the loop where it can run.

Each run strikes the loop at one place of a wait or of the end of an epoch (see `strikes`). The
handler returns, and the loop goes on: nothing is lost, repeated or reordered, and nothing is left.

The default is a sample of the places; `ENQUEUER_INTERRUPTS` is as for `test_interrupts`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import threading
import time
import weakref
from queue import Empty

import helpers
import pytest
from helpers import handling
from strikes import Strike
from struck import (
    BACKENDS,
    EPOCHS,
    EVERY,
    SOURCES,
    Loop,
    census,
    expected_of,
    go_on,
    kill_a_worker,
    limited,
    resume,
    started,
    strike_places,
    wait_until_gone,
)

from enqueuer import Closed, GeneratorEnqueuer, InvalidState, OrderedEnqueuer
from enqueuer.backends.process.pool import ProcessPool
from enqueuer.enqueuers import tasks
from enqueuer.enqueuers.enqueuer import core_of
from enqueuer.enqueuers.run import State

SAMPLE = {"thread": 4, "fork": 2, "forkserver": 1, "spawn": 0}  # places of a case


def reconfigure(enqueuer, workers):
    """Change the workers, unless the loop waits: then that would wait for itself."""
    with contextlib.suppress(InvalidState):
        enqueuer.reconfigure(workers)


def fewer(enqueuer, loop):
    reconfigure(enqueuer, 1)


def twice(enqueuer, loop):
    """Change the workers, and within that once more."""
    # `interrupts` keeps each handler that it has replaced, and after a stop in the middle of an
    # epoch an enqueuer has batches.
    within = weakref.proxy(enqueuer)
    with handling(signal.SIGUSR2, lambda *_: reconfigure(within, 1)):
        reconfigure(enqueuer, 3)
        signal.raise_signal(signal.SIGUSR2)
        reconfigure(enqueuer, 4)


def stop(enqueuer, loop):
    enqueuer.stop()


def change_and_stop(enqueuer, loop):
    reconfigure(enqueuer, 1)
    enqueuer.stop()


def ask(enqueuer, loop):
    """Ask for all that may be asked for."""
    enqueuer.stats()
    enqueuer.state_dict()
    enqueuer.queue.qsize()
    enqueuer.queue.empty()
    repr(enqueuer)


def take(enqueuer, loop):
    """Take a batch, if one is ready."""
    with contextlib.suppress(Empty, Closed):
        loop.taken.append(helpers.number_of(enqueuer.queue.get_nowait()))


ACTIONS = {
    "take": take,
    "fewer": fewer,
    "twice": twice,
    "stop": stop,
    "change-and-stop": change_and_stop,
    "ask": ask,
}


def read_epoch(loop, source):
    """Read the rest of an epoch and begin the next one."""
    loop.read(len(expected_of(source)) // EPOCHS + 1)


def run(action, source, backend, dies, strike):
    before = census()
    with limited():
        one_run(action, source, backend, dies, strike)
    wait_until_gone(before)


def one_run(action, source, backend, dies, strike):
    options = {"max_restarts": 2} if dies else {}
    enqueuer = SOURCES[source](
        workers=2, max_queue_size=2, random_seed=1, **options, **BACKENDS[backend]
    )
    try:
        loop = started(enqueuer, 3)
        loop.taken = []
        if dies:
            # The loop is struck while it reaps and replaces the worker, too.
            kill_a_worker(enqueuer)
        strike.action = lambda: ACTIONS[action](enqueuer, loop)
        with contextlib.suppress(InvalidState):
            strike(lambda: read_epoch(loop, source))
        # The loop may have had the batch before it, and not noted that.
        if loop.taken:
            loop.seen = sorted(loop.seen + loop.taken, key=expected_of(source).index)
        if "stop" in action and strike.where is not None:
            assert core_of(enqueuer).state is State.STOPPED
            assert not core_of(enqueuer).owned.are_running
            resume(loop, source)
            # From the beginning.
            enqueuer.start()
            loop = Loop(enqueuer)
        go_on(loop, source)
    except BaseException:
        _failed.append(enqueuer)
        raise
    finally:
        # It has the batches that the loop holds.
        strike.action = None


_failed = []  # enqueuers whose end would disturb the following runs


CASES = [
    (action, source, backend, dies)
    for action, source, backend, dies in itertools.product(
        ACTIONS, SOURCES, BACKENDS, (False, True)
    )
    # A thread cannot be killed.
    if (EVERY or SAMPLE[backend]) and not (dies and backend == "thread")
]


@pytest.mark.thorough
@pytest.mark.local
@pytest.mark.timeout(0 if EVERY else 120)
@pytest.mark.parametrize(("action", "source", "backend", "dies"), CASES)
def test_a_handler_may_call_the_enqueuer(action, source, backend, dies, record_property):
    case = action, source, backend, dies
    new_strike = functools.partial(Strike, action=print)
    one = functools.partial(run, *case)
    strike_places(str(case), SAMPLE[backend], one, new_strike, record_property)


class Entry(Strike):
    """Strikes on entry to a function only."""

    def place(self, frame, what):
        if what == "on entry":
            super().place(frame, what)


@pytest.mark.thorough
@pytest.mark.local
@pytest.mark.parametrize("ordered", [True, False])
def test_a_batch_that_a_handler_takes_ends_no_epoch(ordered):
    for nth in itertools.count():
        # One batch is made, and it is the only one that is ready.
        may_make, taken = threading.Semaphore(1), []

        def make(n, may_make=may_make):
            may_make.acquire()
            return n

        with limited(), OrderedEnqueuer(range(7), make, ordered=ordered) as enqueuer:

            def take_it(queue=enqueuer.queue, may_make=may_make, taken=taken):
                with contextlib.suppress(Empty):
                    taken.append(queue.get_nowait())
                may_make.release(6)

            strike, batches = Entry(nth, action=take_it), iter(enqueuer)
            first = strike(functools.partial(next, batches))
            if strike.where is None:
                may_make.release(6)
                break
            assert sorted([first, *taken, *batches]) == [*range(7)], strike.where
    assert nth > 5


def start_and_act(action, backend, strike):
    enqueuer = SOURCES["shards"](workers=2, max_queue_size=2, random_seed=1, **BACKENDS[backend])
    try:
        strike.action = lambda: action(enqueuer, None)
        strike(enqueuer.start)
        is_stopped = core_of(enqueuer).state is State.STOPPED
        assert core_of(enqueuer).owned.are_running is not is_stopped
        if is_stopped:
            enqueuer.start()
        go_on(Loop(enqueuer), "shards")
        return is_stopped
    finally:
        strike.action = None
        enqueuer.stop()


@pytest.mark.thorough
@pytest.mark.local
@pytest.mark.parametrize("backend", [name for name, count in SAMPLE.items() if EVERY or count])
@pytest.mark.parametrize("action", [fewer, stop, change_and_stop, ask])
def test_a_handler_may_call_an_enqueuer_that_starts(action, backend):
    before, is_stopped = census(), False
    counted = Strike(None, action=print)
    start_and_act(ask, backend, counted)
    few = counted.places // 6
    for nth in range(0, counted.places, min(EVERY or few, few)):
        strike = Strike(nth, action=print)
        with limited():
            is_stopped |= start_and_act(action, backend, strike)
    # Before start() has begun, there is nothing to stop.
    assert is_stopped is (action in (stop, change_and_stop))
    wait_until_gone(before)


@pytest.mark.thorough
@pytest.mark.local
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_handler_cannot_start_what_starts(method):
    called, pool_start = [], ProcessPool.start_worker
    enqueuer = SOURCES["shards"](workers=2, random_seed=1, **BACKENDS[method])

    def start_again(*_):
        """Do what is not possible here."""
        called.append(True)
        with pytest.raises(InvalidState, match=r"start\(\) was called"):
            enqueuer.start()
        with pytest.raises(InvalidState, match=r"load_state_dict\(\) was called"):
            enqueuer.load_state_dict(enqueuer.state_dict())

    def start_worker(pool, index):
        signal.raise_signal(signal.SIGUSR1)
        return pool_start(pool, index)

    with handling(signal.SIGUSR1, start_again), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessPool, "start_worker", start_worker)
        enqueuer.start()
    assert called
    go_on(Loop(enqueuer), "shards")


@pytest.mark.thorough
def test_an_exception_of_a_handler_while_elements_are_read_is_no_error_of_theirs(monkeypatch):
    order_of, calls = tasks.order_of, itertools.count()

    def interrupted(*args):
        if next(calls) < 1:
            signal.raise_signal(signal.SIGUSR1)
        return order_of(*args)

    def handle(number, frame):
        raise TimeoutError("of the handler")

    monkeypatch.setattr(tasks, "order_of", interrupted)
    enqueuer = OrderedEnqueuer(range(5), abs, workers=1)
    with handling(signal.SIGUSR1, handle):
        with pytest.raises(TimeoutError, match="of the handler"):
            enqueuer.start()
        with enqueuer:
            assert list(enqueuer) == [0, 1, 2, 3, 4]


@pytest.mark.thorough
@pytest.mark.local
@pytest.mark.parametrize("name", ["reconfigure", "stop", "start", "load_state_dict", "iter"])
@pytest.mark.parametrize("backend", [BACKENDS["thread"], BACKENDS["fork"]], ids=["thread", "fork"])
def test_a_handler_does_not_wait_for_a_thread_that_waits_for_its_loop(backend, name):
    """Another thread changes the workers, and the handler comes while the loop still waits."""
    is_called = threading.Event()

    def change(*_):
        is_called.set()
        match name:
            case "stop":
                enqueuer.stop()
            case "reconfigure":
                reconfigure(enqueuer, 1)
            case "iter":
                iter(enqueuer)
            case _:
                with pytest.raises(InvalidState, match="is running already"):
                    enqueuer.start() if name == "start" else enqueuer.load_state_dict(state)

    def change_in_thread():
        old = core_of(enqueuer).run.backend
        close = old.close

        def closing():
            # Once the other thread has the lock of all changes.
            if not is_called.is_set():
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
                assert is_called.wait(helpers.LIMIT)
            close()

        old.close = closing
        enqueuer.reconfigure(3)

    enqueuer = GeneratorEnqueuer(gated, shards=2, workers=2, **backend)
    with handling(signal.SIGUSR1, change), limited(), enqueuer:
        batches = iter(enqueuer)
        seen, state = [next(batches), next(batches)], enqueuer.state_dict()
        thread = threading.Thread(target=change_in_thread)
        thread.start()
        seen += batches
        thread.join(helpers.LIMIT)
        assert seen == [(n, i) for n in range(3) for i in range(2)][: len(seen)]
        assert name == "stop" or len(seen) == 6


def gated(shard):
    for number in range(3):
        if number == 2:
            # The loop waits meanwhile.
            time.sleep(0.5)
        yield number, shard.index


def with_gaps(shard):
    for number in range(12):
        yield None if (number + shard.index) % 3 == 0 else number


@pytest.mark.thorough
def test_what_shards_left_out_is_known_after_an_exception_at_any_place():
    def left_out(strike):
        with GeneratorEnqueuer(with_gaps, shards=2, workers=0) as enqueuer:
            batches = iter(enqueuer)
            seen = [next(batches)]
            if strike is not None and (item := strike(batches.__next__)) is not None:
                seen.append(item)
            seen += itertools.islice(batches, 6 - len(seen))
            return seen, enqueuer.state_dict()["left_out"]

    whole, expected = left_out(None)
    places = itertools.count(step=5)
    strike = Strike(None)
    while strike.nth is None or strike.where:
        strike = Strike(next(places))
        seen, found = left_out(strike)
        # The batch that was about to be returned may be lost, and counts as given.
        is_lost = seen != whole
        assert not is_lost or strike.raised, strike.where
        assert is_lost or found == expected, strike.where
    assert strike.places >= 50


class Alarmed:
    """A sequence of numbers in whose `len()` a signal comes.

    Attributes:
        calls: Number of calls until then; None: no signal comes.
    """

    calls = None

    def __len__(self):
        if self.calls is not None:
            self.calls -= 1
            if self.calls < 0:
                self.calls = None
                signal.raise_signal(signal.SIGUSR1)
        return 12

    def __getitem__(self, index):
        return index


@pytest.mark.thorough
@pytest.mark.local
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "spawn"])
def test_the_error_of_a_handler_comes_out_of_a_length_that_the_loop_asks_for(backend):
    """A worker's copy is compared with the program's own; errors of that do not matter there."""

    def handle(number, frame):
        raise TimeoutError("of an alarm")

    for calls in itertools.count():
        elements = Alarmed()
        with (
            handling(signal.SIGUSR1, handle),
            OrderedEnqueuer(elements, **BACKENDS[backend]) as enqueuer,
        ):
            assert list(enqueuer) == list(range(12))
            elements.calls = calls
            try:
                list(enqueuer)
            except TimeoutError:
                continue
            is_reached, elements.calls = elements.calls is None, None
        assert not is_reached, f"the exception was swallowed at call {calls}"
        break
    assert calls > 0
