"""An exception out of a signal handler at every place where one can strike.

Each run strikes one operation at one place (see `strikes`), goes on as a program would that has
caught the exception, and looks at what is promised: batches that the loop holds do not change,
nothing is repeated or reordered, the loop goes on or is stopped in time, nothing is left, and at
most the one batch that the loop was about to get is lost, and counted as given.

The default is a sample of the places. `ENQUEUER_INTERRUPTS=1` strikes all places of all operations,
and `ENQUEUER_INTERRUPTS=10` every tenth.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import time

import pytest
from strikes import Alarm, Strike
from struck import (
    BACKENDS,
    EVERY,
    SOURCES,
    STOP_S,
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

from enqueuer import WorkerDied
from enqueuer.adapters.loading import Loader
from enqueuer.enqueuers.enqueuer import core_of
from enqueuer.enqueuers.run import State

SAMPLE = {"thread": 6, "fork": 2, "forkserver": 1, "spawn": 0}  # places of an operation

# What handlers raise; some are what the system raises as well.
ERRORS = (KeyboardInterrupt, Alarm, TimeoutError, OSError)


# --- what is done to them ---


def do_next(enqueuer, strike, source):
    """Three batches are had; then the loop is struck in one of the following ones."""
    loop = started(enqueuer, 3)
    strike(lambda: loop.read(6))
    loop.note_lost()
    go_on(loop, source)


def do_epoch(enqueuer, strike, source):
    """The loop is struck at the end of an epoch, or at the begin of the next one."""
    half = len(expected_of(source)) // 2
    loop = started(enqueuer, half - 1)
    strike(lambda: loop.read(half + 1))
    loop.note_lost()
    go_on(loop, source)


def do_death(enqueuer, strike, source):
    """A worker has died; the loop is struck while it reaps and replaces it."""
    loop = started(enqueuer, 3)
    kill_a_worker(enqueuer)
    half = len(expected_of(source)) // 2
    strike(lambda: loop.read(half + 1))
    loop.note_lost()
    go_on(loop, source)


def do_last_death(enqueuer, strike, source):
    """The same without restarts: the loop is told of the death, whenever it is struck."""
    loop = started(enqueuer, 3)
    kill_a_worker(enqueuer)

    def read():
        with contextlib.suppress(WorkerDied):
            loop.read(len(expected_of(source)))

    strike(read)
    loop.note_lost()
    expected = expected_of(source)
    try:
        # While batches are ready, the loop does not look at the workers.
        loop.read(10 * len(expected))
    except WorkerDied:
        pass
    else:
        raise AssertionError("the death was not told")
    loop.check_held()
    enqueuer.stop()
    if len(loop.seen) + loop.lost < len(expected):
        resume(loop, source)


def do_start(enqueuer, strike, source):
    strike(enqueuer.start)
    with contextlib.suppress(Exception):
        if core_of(enqueuer).state is not State.RUNNING:
            enqueuer.stop()
    go_on(Loop(enqueuer), source)


def do_stop(enqueuer, strike, source):
    loop = started(enqueuer, 3)
    strike(enqueuer.stop)
    began = time.monotonic()
    enqueuer.stop()
    assert time.monotonic() - began < STOP_S
    assert core_of(enqueuer).state is State.STOPPED
    loop.check_held()
    enqueuer.start()  # anew
    go_on(Loop(enqueuer), source)


def do_exit(enqueuer, strike, source):
    """The program leaves its `with` block and the function that has the enqueuer."""
    loop = started(enqueuer, 3)
    strike(lambda: enqueuer.__exit__(None, None, None))
    loop.check_held()


def do_reconfigure(enqueuer, strike, source):
    loop = started(enqueuer, 3)
    strike(lambda: enqueuer.reconfigure(1))
    go_on(loop, source)


def do_state_dict(enqueuer, strike, source):
    loop = started(enqueuer, 3)
    strike(enqueuer.state_dict)
    go_on(loop, source)


def do_collection(enqueuer, strike, source):
    enqueuer.start()
    holder = [enqueuer]
    del enqueuer
    yield  # the caller forgets it, too
    strike(holder.clear)


OPERATIONS = {
    "next": do_next,
    "epoch": do_epoch,
    "death": do_death,
    "last-death": do_last_death,
    "start": do_start,
    "stop": do_stop,
    "exit": do_exit,
    "reconfigure": do_reconfigure,
    "state_dict": do_state_dict,
    "collection": do_collection,
}


# --- the runs ---


def run(operation, source, backend, strike):
    """Do it once, with a strike; fail if anything that is promised does not hold."""
    before = census()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    handler = signal.getsignal(signal.SIGINT)
    with limited():
        one_run(operation, source, backend, strike)
    wait_until_gone(before)
    assert signal.getsignal(signal.SIGINT) is handler
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask, "signals stay blocked"
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert strike.raised or strike.is_swallowed or not strike.where, "the exception was swallowed"


def one_run(operation, source, backend, strike):
    options = {"max_restarts": 2} if operation == "death" else {}
    enqueuer = SOURCES[source](
        workers=2, max_queue_size=2, random_seed=1, **options, **BACKENDS[backend]
    )
    try:
        running = OPERATIONS[operation](enqueuer, strike, source)
        if running is not None:
            next(running)
            del enqueuer
            next(running, None)
    except BaseException:
        with contextlib.suppress(NameError):
            _failed.append(enqueuer)
        raise


_failed = []  # enqueuers whose end would disturb the following runs


CASES = [
    (operation, source, backend)
    for operation, source, backend in itertools.product(OPERATIONS, SOURCES, BACKENDS)
    # A thread cannot be killed. While batches are ready, the loop does not look at the workers, and
    # an endless one may never wait.
    if (EVERY or SAMPLE[backend])
    and (backend != "thread" or "death" not in operation)
    and (operation, source) != ("last-death", "tasks-endless")
]


@pytest.fixture(autouse=True)
def ctrl_c():
    """Let SIGINT raise; a shell has it ignored in what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def new_strike(nth):
    """Return a strike with one of the errors, in turn."""
    return Strike(nth, ERRORS[(nth or 0) // max(EVERY, 1) % len(ERRORS)])


@pytest.mark.thorough
@pytest.mark.local
@pytest.mark.timeout(0 if EVERY else 120)
@pytest.mark.parametrize(("operation", "source", "backend"), CASES)
def test_after_an_interrupt_all_goes_on(operation, source, backend, record_property):
    case = operation, source, backend
    one = functools.partial(run, *case)
    strike_places(str(case), SAMPLE[backend], one, new_strike, record_property)


@pytest.mark.thorough
@pytest.mark.local
def test_a_loader_stops_the_enqueuer_that_it_was_starting_at_an_interrupt():
    def start(strike):
        enqueuer = SOURCES["shards"](workers=2, backend="thread", random_seed=1)
        loader = Loader(enqueuer)
        strike(lambda: iter(loader))
        return enqueuer, loader

    counted = Strike(None)
    start(counted)[1].stop()
    step = max(1, counted.places // 20)
    # The loader takes note of a start after it, so all of the last places are struck.
    chosen = {*range(0, counted.places, step), *range(counted.places - 20, counted.places)}
    for nth in sorted(chosen):
        strike = Strike(nth)
        enqueuer, loader = start(strike)
        loader.stop()
        assert core_of(enqueuer).state in (State.NEW, State.STOPPED), strike.where
        assert Loop(loader).first() == expected_of("shards")[0], strike.where
        loader.stop()
