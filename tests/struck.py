"""A loop over a small enqueuer that a signal strikes: what it reads, and what must hold then."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import select
import signal
import threading
import time
import zlib
from collections import deque

import helpers
import psutil
from conftest import METHODS

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes
from enqueuer.enqueuers.enqueuer import core_of

LIMIT_S = 10.0  # a run after its strike; only a hang reaches it
STOP_S = 5.0  # of stop(), which promises 2.6; the machine may be busy
GONE_S = 10.0  # what is dying may need a moment to be gone
EPOCHS = 2
EVERY = int(os.environ.get("ENQUEUER_INTERRUPTS", "0"))  # 0: a sample
MOST_FAILURES = 10  # after which a case gives up; each may take its time

BACKENDS = {"thread": {"backend": "thread"}} | {
    method: {"backend": Processes(start_method=method)} for method in METHODS
}

SOURCES = {
    "shards": lambda **options: GeneratorEnqueuer(helpers.numbered, shards=2, **options),
    "shards-as-they-come": lambda **options: GeneratorEnqueuer(
        helpers.numbered, shards=2, ordered=False, **options
    ),
    # Workers begin the next epoch before the loop has read this one to its end.
    "shards-ahead": lambda **options: GeneratorEnqueuer(
        helpers.numbered, shards=2, epochs=EPOCHS, **options
    ),
    "tasks": lambda **options: OrderedEnqueuer(range(7), helpers.numbered_task, **options),
    "tasks-as-they-come": lambda **options: OrderedEnqueuer(
        range(7), helpers.numbered_task, ordered=False, **options
    ),
    "tasks-endless": lambda **options: Endless(range(7), helpers.numbered_task, **options),
    # The loop's own thread reads the elements.
    "read": lambda **options: OrderedEnqueuer(
        helpers.Elements(7), helpers.numbered_task, **options
    ),
}


class Endless(OrderedEnqueuer):
    """An enqueuer whose loop reads all epochs, so that each begins before the last one is over."""

    def __iter__(self):
        super().__iter__()  # starts it
        return self.get()


class Hangs(BaseException):
    """A run did not end."""


class Loop:
    """A training loop: what it has had, and the last batches, which it holds.

    Attributes:
        lost: Number of batches that were counted as given, and that a strike kept from the loop.
    """

    def __init__(self, enqueuer):
        self.enqueuer = enqueuer
        self.seen = []
        self.lost = 0
        self.held = deque(maxlen=5)

    def read(self, count):
        """Read with `for` until it was given so many batches in all."""
        while len(self.seen) + self.lost < count:
            for batch in self.enqueuer:
                self.seen.append(helpers.number_of(batch))
                self.held.append((self.seen[-1], batch))
                if len(self.seen) + self.lost >= count:
                    break

    def note_lost(self):
        """Note, after a strike, whether the batch in flight was lost; fail if more were."""
        self.lost = self.enqueuer.stats().total_items - len(self.seen)
        assert self.lost in (0, 1), f"{self.lost} batches were lost"

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


def check_order(source, seen, lost=0):
    """Fail if more than `lost` are missing, or something comes twice or out of order."""
    expected = expected_of(source)
    if source.endswith("as-they-come"):
        for epoch in range(EPOCHS):
            of_epoch = [where for where in seen if where[0] == epoch]
            assert abs(seen.index(of_epoch[0]) - epoch * len(expected) // 2) <= lost, seen
            if source.startswith("shards"):
                of_shard = [[w for w in of_epoch if w[1] == shard] for shard in range(2)]
                assert of_shard == [sorted(one) for one in of_shard], seen
        seen = sorted(seen, key=lambda w: (w[0], w[2], w[1]))
    missing = [where for where in expected if where not in seen]
    assert len(missing) <= lost, f"{missing} did not come"
    assert seen == [where for where in expected if where not in missing], seen


def started(enqueuer, count):
    """Start it and read so many batches."""
    enqueuer.start()
    loop = Loop(enqueuer)
    loop.read(count)
    return loop


def kill_a_worker(enqueuer):
    """Kill a worker, and wait until it is dead."""
    worker = core_of(enqueuer).run.backend.pool.workers[0]
    os.kill(worker.process.pid, signal.SIGKILL)
    assert select.select([worker.pidfd.fileno()], [], [], helpers.LIMIT)[0]


def resume(loop, source):
    """Read the rest with another enqueuer, from the saved position."""
    twin = SOURCES[source](backend="thread", workers=2, random_seed=1)
    twin.load_state_dict(loop.enqueuer.state_dict())
    resumed = Loop(twin)
    resumed.seen, resumed.lost = loop.seen.copy(), loop.lost
    resumed.read(len(expected_of(source)))
    twin.stop()
    check_order(source, resumed.seen, loop.lost)


def go_on(loop, source):
    """Read to the end of the last epoch; save and load on the way."""
    enqueuer, expected = loop.enqueuer, expected_of(source)
    if loop.seen:
        resume(loop, source)
    loop.read(len(expected))
    loop.check_held()
    check_order(source, loop.seen, loop.lost)
    began = time.monotonic()
    enqueuer.stop()
    assert time.monotonic() - began < STOP_S
    loop.check_held()


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


def strike_places(case, sample, run, new_strike, record_property):
    """Run a case once for each place that is to be struck; fail if one of these runs fails.

    Args:
        case: The case in words. Cases share much code, of which each strikes other places.
        sample: Number of places, unless all are struck, or every so many.
        run: Function that runs it with a strike.
        new_strike: Function that returns the strike of a place, or of none.
        record_property: The fixture.
    """
    failures, struck, missed = [], 0, 0
    if EVERY:
        places = itertools.count(zlib.crc32(case.encode()) % EVERY, EVERY)
    else:
        counted = new_strike(None)
        run(counted)
        places = [nth * counted.places // sample for nth in range(sample)]
    for nth in places:
        strike = new_strike(nth)
        try:
            run(strike)
        except (Exception, Hangs) as error:
            text = f"{nth} {strike.where}: {strike.error.__name__}: {error!r}"
            failures.append(text[:300])
        # How many places there are varies a little, as the workers have their own pace.
        missed = 0 if strike.where else missed + max(EVERY, 1)
        struck += not missed
        if missed > 5 or len(failures) == MOST_FAILURES:
            break
    record_property("struck", struck)
    assert not failures, f"{len(failures)} of {struck} places:\n" + "\n".join(failures)
