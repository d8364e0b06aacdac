"""An exception out of a signal handler at every place where one can strike.

Each run strikes one operation at one place (see `strikes`), goes on as a program would that has
caught the exception, and looks at what is promised: batches that the loop holds do not change,
nothing is lost, repeated or reordered, the loop goes on or is stopped in time, and nothing is left.

The default is a sample of the places. `ENQUEUER_INTERRUPTS=1` strikes all places of all operations,
and `ENQUEUER_INTERRUPTS=10` every tenth.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import threading
import time
import zlib
from collections import deque

import helpers
import psutil
import pytest
from conftest import METHODS
from strikes import Alarm, Strike

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes
from enqueuer.adapters.loading import Loader
from enqueuer.enqueuers.enqueuer import core_of
from enqueuer.enqueuers.run import State

EVERY = int(os.environ.get("ENQUEUER_INTERRUPTS", "0"))  # 0: a sample
SAMPLE = {"thread": 6, "fork": 2, "forkserver": 1, "spawn": 0}  # places of an operation
BACKENDS = {"thread": {"backend": "thread"}} | {
    method: {"backend": Processes(start_method=method)} for method in METHODS
}

LIFE = ("start", "stop", "exit", "reconfigure", "collection")
MOST_FAILURES = 10  # after which a test gives up; each may take its time
LIMIT_S = 10.0  # a run after its strike; only a hang reaches it
STOP_S = 5.0  # of stop(), which promises 2.6; the machine may be busy
GONE_S = 3.0  # what is dying may need a moment to be gone
EPOCHS = 2

SOURCES = {
    "shards": lambda **options: GeneratorEnqueuer(helpers.numbered, shards=2, **options),
    "shards-as-they-come": lambda **options: GeneratorEnqueuer(
        helpers.numbered, shards=2, ordered=False, **options
    ),
    "tasks": lambda **options: OrderedEnqueuer(range(7), helpers.numbered_task, **options),
    "tasks-as-they-come": lambda **options: OrderedEnqueuer(
        range(7), helpers.numbered_task, ordered=False, **options
    ),
    "read": lambda **options: OrderedEnqueuer(Elements(), helpers.numbered_task, **options),
}


class Elements:
    """An iterable of elements, which the loop's own thread reads."""

    def __iter__(self):
        return iter(range(7))


class Hangs(BaseException):
    """A run did not end."""


class Loop:
    """A training loop: what it has had, and the last batches, which it holds."""

    def __init__(self, enqueuer):
        self.enqueuer = enqueuer
        self.seen = []
        self.held = deque(maxlen=5)

    def read(self, count):
        """Read with `for` until it has had so many batches in all."""
        while len(self.seen) < count:
            for batch in self.enqueuer:
                self.seen.append(helpers.number_of(batch))
                self.held.append((self.seen[-1], batch))
                if len(self.seen) >= count:
                    break

    def first(self):
        """Read one batch."""
        self.read(1)
        return self.seen[0]

    def check_held(self):
        """Fail if a batch that it holds has changed."""
        for number, batch in self.held:
            assert helpers.number_of(batch) == number, "a batch that the loop holds has changed"


def expected_of(source):
    """Return what two epochs give, in order."""
    if source.startswith("shards"):
        return [(e, i, n) for e in range(EPOCHS) for n in range(3) for i in range(2)]
    return [(e, 0, n) for e in range(EPOCHS) for n in range(7)]


def check_order(source, seen):
    """Fail if something is missing, comes twice, or comes out of order."""
    expected = expected_of(source)
    if source.endswith("as-they-come"):
        for epoch in range(EPOCHS):
            of_epoch = [where for where in seen if where[0] == epoch]
            assert seen.index(of_epoch[0]) == epoch * len(expected) // 2, seen
            if source.startswith("shards"):
                of_shard = [[w for w in of_epoch if w[1] == shard] for shard in range(2)]
                assert of_shard == [sorted(one) for one in of_shard], seen
        seen = sorted(seen, key=lambda w: (w[0], w[2], w[1]))
    missing = [where for where in expected if where not in seen]
    assert not missing, f"{missing} did not come"
    assert seen == expected, seen


# --- what is done to them ---


def do_next(enqueuer, strike, source):
    """Three batches are had; then the loop is struck in one of the following ones."""
    loop = started(enqueuer, 3)
    strike(lambda: loop.read(6))
    go_on(loop, source)


def do_epoch(enqueuer, strike, source):
    """The loop is struck at the end of an epoch, or at the begin of the next one."""
    half = len(expected_of(source)) // 2
    loop = started(enqueuer, half - 1)
    strike(lambda: loop.read(half + 1))
    go_on(loop, source)


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
    "start": do_start,
    "stop": do_stop,
    "exit": do_exit,
    "reconfigure": do_reconfigure,
    "state_dict": do_state_dict,
    "collection": do_collection,
}


def started(enqueuer, count):
    """Start it and read so many batches."""
    enqueuer.start()
    loop = Loop(enqueuer)
    loop.read(count)
    return loop


def go_on(loop, source):
    """Read to the end of the last epoch; save and load on the way."""
    enqueuer, expected = loop.enqueuer, expected_of(source)
    if loop.seen:
        saved = enqueuer.state_dict()
        twin = SOURCES[source](backend="thread", workers=2, random_seed=1)
        twin.load_state_dict(saved)
        resumed = Loop(twin)
        resumed.seen = loop.seen.copy()
        resumed.read(len(expected))
        twin.stop()
        check_order(source, resumed.seen)
    loop.read(len(expected))
    loop.check_held()
    check_order(source, loop.seen)
    began = time.monotonic()
    enqueuer.stop()
    assert time.monotonic() - began < STOP_S
    loop.check_held()


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


def one_run(operation, source, backend, strike):
    enqueuer = SOURCES[source](workers=2, max_queue_size=2, random_seed=1, **BACKENDS[backend])
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


def census():
    me = psutil.Process()
    return {
        "threads": {thread.name for thread in threading.enumerate()},
        "children": {child.pid for child in me.children(recursive=True)},
        "descriptors": set(os.listdir("/proc/self/fd")),
    }


def wait_until_gone(before):
    end = time.monotonic() + GONE_S
    while True:
        after = census()
        left = {kind: after[kind] - before[kind] for kind in before if after[kind] - before[kind]}
        if not left or time.monotonic() > end:
            break
        gc.collect()
        time.sleep(0.005)
    assert not left, f"left behind: {left}"


@contextlib.contextmanager
def limited():
    """Raise `Hangs` where a run is after LIMIT_S."""

    def hangs(*_):
        raise Hangs(f"after {LIMIT_S:g} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def places(operation, source, backend):
    """Yield the numbers of the places to be struck."""
    if EVERY:
        # Cases share much code, of which each strikes other places.
        first = zlib.crc32(f"{operation} {source} {backend}".encode()) % EVERY
        yield from itertools.count(first, EVERY)
        return
    strike = Strike(None)
    run(operation, source, backend, strike)
    sample = SAMPLE[backend]
    for nth in range(sample):
        yield nth * strike.places // sample


def says_it_again(operation, source):
    """Return whether another source tells the same of an operation, in the quick suite."""
    return operation in LIFE and source not in ("shards", "tasks")


CASES = [
    pytest.param(
        *(operation, source, backend),
        marks=[pytest.mark.thorough] if says_it_again(operation, source) else [],
    )
    for operation, source, backend in itertools.product(OPERATIONS, SOURCES, BACKENDS)
    if EVERY or SAMPLE[backend]
]


@pytest.fixture(autouse=True)
def ctrl_c():
    """Let SIGINT raise; a shell has it ignored in what it starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.local
@pytest.mark.timeout(0 if EVERY else 120)
@pytest.mark.parametrize(("operation", "source", "backend"), CASES)
def test_after_an_interrupt_all_goes_on(operation, source, backend, record_property):
    failures, struck, missed = [], 0, 0
    for nth in places(operation, source, backend):
        strike = Strike(nth, (KeyboardInterrupt, Alarm)[nth // max(EVERY, 1) % 2])
        try:
            run(operation, source, backend, strike)
        except (Exception, Hangs) as error:
            failures.append(f"{strike.where}: {strike.error.__name__}: {error!r}"[:300])
        # how many places there are varies a little, as the workers have their own pace
        missed = 0 if strike.where else missed + max(EVERY, 1)
        struck += not missed
        if missed > 5 or len(failures) == MOST_FAILURES:
            break
    record_property("struck", struck)
    assert not failures, f"{len(failures)} of {struck} places:\n" + "\n".join(failures)


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
