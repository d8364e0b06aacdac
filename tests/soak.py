"""Kill, interrupt, change and resume runs on all local backends, for so many minutes.

    python tests/soak.py 30          until then
    python tests/soak.py 0 17        the run of seed 17, which has failed

Each run reads some epochs, from one enqueuer to the next, and must get what a plain loop gets, item
by item. Meanwhile workers are killed, and a signal handler raises in the middle of the package's
own code, or calls it. After each run no process, thread or descriptor of it may be left.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
import zlib
from multiprocessing import active_children

from helpers import kill_one

import enqueuer
from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, Processes

EPOCHS = 3
SEED = 7
HANGS_S = 60
# Seconds without an item, between exceptions of the handler.
STUCK_S = 40
PACKAGE = os.path.dirname(enqueuer.__file__)
METHODS = ["fork"] * 4 + ["forkserver"] * 4 + ["spawn"]
# Seconds between two kills, and between two signals, in the mean: a start is to come to its end,
# and a new worker to its items.
KILLS_S = {"fork": 0.1, "forkserver": 0.3, "spawn": 5}
SIGNALS_S = {"fork": 0.01, "forkserver": 0.01, "spawn": 1}


class Alarm(Exception):
    pass


ERRORS = [Alarm, TimeoutError, OSError, KeyboardInterrupt]


def uneven(shard):
    """Yield items of all sizes, a number of them that changes with the epoch."""
    for number in range(4 + (shard.index * 7 + shard.epoch * 3) % 9):
        size = int(shard.rng.choice([3, 400, 70_000]))
        yield shard.epoch, shard.index, number, shard.rng.integers(0, 99, size)


def mapped(element, task):
    size = int(task.rng.choice([3, 400, 70_000]))
    return task.epoch, element, 0, task.rng.integers(0, 99, size)


def listed(results):
    return results[0][0], [result[1] for result in results], 0, results[0][3]


def generator(**options):
    return GeneratorEnqueuer(uneven, shards=3, random_seed=SEED, **options)


def elements(**options):
    return OrderedEnqueuer(range(23), mapped, random_seed=SEED, shuffle=True, **options)


def batches(**options):
    return elements(batch_size=4, collate=listed, **options)


def plain(item):
    *where, array = item
    return *where, zlib.crc32(array)


def serial(make):
    with make(workers=0) as enqueuer:
        return [plain(item) for _ in range(EPOCHS) for item in enqueuer]


def drawn_options(rng):
    options = {"workers": rng.randint(1, 4), "max_queue_size": rng.randint(1, 9)}
    kind = rng.choice(["thread", "process", "process", "inline"])
    if kind == "process":
        options["backend"] = Processes(start_method=rng.choice(METHODS))
        options["max_restarts"] = 10**6
    elif kind == "inline":
        options["workers"] = 0
    else:
        options["backend"] = "thread"
    return options


def is_in_package(frame):
    """Return whether the package runs in a frame, called by the loop below and by no source."""
    is_in = False
    while frame is not None and frame.f_code.co_filename != __file__:
        is_in = is_in or frame.f_code.co_filename.startswith(PACKAGE)
        frame = frame.f_back
    return is_in and frame is not None and frame.f_code.co_name in ("read", "segment")


class Troubles:
    """A timer whose handler raises or calls the enqueuer, and a thread that kills its workers."""

    def __init__(self, rng):
        self.rng = rng
        self.enqueuer = None
        self.kills_s, self.signals_s, self.errors = 0.1, 0.01, ERRORS
        self.counts = {"raised": 0, "called": 0, "killed": 0, "segments": 0}
        self.is_over = threading.Event()
        self.killer = threading.Thread(target=self.kill)
        signal.signal(signal.SIGALRM, self.handle)

    def arm(self):
        signal.setitimer(signal.ITIMER_REAL, self.rng.expovariate(1 / self.signals_s) + 1e-4)

    def disarm(self):
        signal.setitimer(signal.ITIMER_REAL, 0)

    def handle(self, number, frame):
        self.arm()
        # The code of this file is the user's: it would lose an item, or its generator would end.
        if self.enqueuer is None or not is_in_package(frame):
            return
        if self.rng.random() < 0.6:
            self.counts["raised"] += 1
            raise self.rng.choice(self.errors)("of the handler")
        self.counts["called"] += 1
        self.rng.choice([self.enqueuer.stats, self.enqueuer.state_dict])()

    def kill(self):
        rng = random.Random(self.rng.random())
        while not self.is_over.wait(rng.expovariate(1 / self.kills_s)):
            if (enqueuer := self.enqueuer) is not None:
                self.counts["killed"] += kill_one(enqueuer, rng)

    def __enter__(self):
        self.killer.start()
        self.arm()
        return self

    def __exit__(self, *_):
        self.disarm()
        self.is_over.set()
        self.killer.join()


class Run:
    """One run: what it has got, and where it goes on."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.make = self.rng.choice([generator, elements, batches])
        self.wanted = serial(self.make)
        self.got = []
        # Exceptions of the handler since the last item: each may have lost one, which counts as
        # given.
        self.raised = 0
        self.state = None
        self.history = []

    def run(self):
        with Troubles(self.rng) as troubles:
            while len(self.got) < len(self.wanted):
                troubles.counts["segments"] += 1
                self.segment(troubles)
        return troubles.counts

    def segment(self, troubles):
        """Read a part with one enqueuer, up to a saved state or the end."""
        options = drawn_options(self.rng)
        self.history.append(f"{len(self.got)}: {options}")
        enqueuer = self.make(**options)
        if self.state is not None:
            enqueuer.load_state_dict(self.state)
        troubles.enqueuer = enqueuer
        # Without workers, any other exception counts as one of the source.
        troubles.errors = ERRORS if options["workers"] else [KeyboardInterrupt]
        method = getattr(options.get("backend"), "start_method", "fork")
        troubles.kills_s, troubles.signals_s = KILLS_S[method], SIGNALS_S[method]
        until = len(self.got) + self.rng.randint(1, 40)
        since, before = time.monotonic(), -1
        while len(self.got) < min(until, len(self.wanted)):
            try:
                self.read(enqueuer, until)
            except tuple(ERRORS) as error:
                if len(self.got) > before:
                    since, before = time.monotonic(), len(self.got)
                if "of the handler" not in str(error) or time.monotonic() > since + STUCK_S:
                    raise
                self.raised += 1
        troubles.enqueuer = None
        self.state = enqueuer.state_dict()
        enqueuer.stop()

    def read(self, enqueuer, until):
        for item in enqueuer:
            found = plain(item)
            del item
            at = len(self.got)
            possible = self.wanted[at : at + self.raised + 1]
            if len(possible) <= self.raised:
                # The last one was lost: another epoch has begun.
                possible.append(found)
            assert found in possible, f"{found} for {self.wanted[at]} at {at}"
            self.got += self.wanted[at : at + possible.index(found) + 1]
            self.raised = 0
            if len(self.got) >= min(until, len(self.wanted)):
                return
            if self.rng.random() < 0.05 and enqueuer.stats().workers:
                enqueuer.reconfigure(workers=self.rng.randint(1, 4))


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def check_nothing_left(before):
    end = time.monotonic() + 20
    while True:
        gc.collect()
        left = threading.active_count(), active_children(), descriptors()
        if left[:2] == (1, []) and left[2] <= before:
            return
        assert time.monotonic() < end, f"left: {left}, {before} descriptors before"
        time.sleep(0.01)


def main():
    minutes, seed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with generator(workers=1, backend=Processes(start_method="forkserver")) as enqueuer:
        next(iter(enqueuer))
    end, runs, totals, before = time.monotonic() + 60 * minutes, 0, {}, descriptors()
    while True:
        # A run that hangs ends without another word.
        print(f"seed {seed}", end="\r", flush=True)
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        run = Run(seed)
        try:
            counts = run.run()
            check_nothing_left(before)
        except BaseException:
            print(f"seed {seed} of {run.make.__name__} failed", *run.history, sep="\n    ")
            raise
        faulthandler.cancel_dump_traceback_later()
        runs, seed = runs + 1, seed + 1
        totals = {name: totals.get(name, 0) + count for name, count in counts.items()}
        if time.monotonic() >= end:
            print(f"{runs} runs without a failure: {totals}")
            return


if __name__ == "__main__":
    main()
