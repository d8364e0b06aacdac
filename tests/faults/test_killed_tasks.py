"""Workers of an OrderedEnqueuer that die: each result still comes once, in its place."""

import contextlib
import gc
import logging
import os
import random
import signal
import time
import zlib

import helpers
import numpy as np
import pytest
from helpers import start_method_of

from enqueuer import BatchTimeout, OrderedEnqueuer, Processes, WorkerDied
from enqueuer.enqueuers.enqueuer import core_of

KILLS = int(os.environ.get("ENQUEUER_KILLS", "8"))  # of each test and start method


def pid_of(x):
    return os.getpid(), x


def heavy(x, task):
    """Return something small or large, by the task's own numbers and the globals."""
    size = 300_000 if x % 3 == 0 else 5
    large = task.rng.integers(0, 255, size, np.uint8)
    return x, zlib.crc32(large), large, random.random()


def check(result):
    x, checksum, large, drawn = result
    assert zlib.crc32(large) == checksum
    return x, checksum, drawn


class Deadly:
    """A task that kills its worker, the first `times` times that it is done."""

    def __init__(self, path, times, at=5):
        self.path, self.times, self.at = path, times, at

    def __call__(self, x):
        if x == self.at and len(os.listdir(self.path)) < self.times:
            (self.path / str(os.getpid())).touch()
            helpers.kill_self()
        return x


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("max_restarts", "says"),
    [(0, "was killed by SIGKILL"), (2, "3 workers died at this very item")],
)
def test_a_death_is_told_in_its_turn_and_names_the_task(
    process, tmp_path, workers, max_restarts, says
):
    seen, options = [], dict(workers=workers, max_restarts=max_restarts, **process)
    with OrderedEnqueuer(range(20), Deadly(tmp_path, 99), **options) as enqueuer:
        with pytest.raises(WorkerDied, match=says) as caught:
            seen.extend(iter(enqueuer))
    assert seen == [0, 1, 2, 3, 4]
    assert "task 5, element 5" in caught.value.__notes__[0]


@pytest.mark.parametrize("workers", [1, 3])
def test_a_task_that_kills_a_few_times_is_done_in_the_end(process, tmp_path, workers, caplog):
    killing = Deadly(tmp_path, 2)
    with OrderedEnqueuer(
        range(20), killing, workers=workers, max_restarts=2, **process
    ) as enqueuer:
        with caplog.at_level(logging.WARNING):
            assert list(enqueuer) == list(range(20))
        assert enqueuer.restart_count == 2
        assert list(enqueuer) == list(range(20))
    assert "goes on with task 5 (restart 2, of max_restarts=2)" in caplog.text


class LargeTasks:
    """Tasks that begin, and go on once they may; a worker that replaces another one is slow."""

    def __init__(self, path):
        self.path = path

    def start(self):
        if list(self.path.glob("begun-*")):
            helpers.wait_until((self.path / "may-start").exists)

    def __call__(self, pair):
        (self.path / f"begun-{pair[0]}").touch()
        helpers.wait_until((self.path / "may-go-on").exists)
        return pair[0]


@pytest.mark.thorough
def test_a_loop_is_not_held_up_by_a_worker_that_reads_none_of_its_tasks(process, tmp_path):
    tasks, count = LargeTasks(tmp_path), 32
    slow = helpers.with_backend(process, initializer=tasks.start)
    options = dict(concurrency=count, max_queue_size=count, max_restarts=1, timeout=0.5, **slow)
    elements = [(x, bytes(15_000)) for x in range(count)]
    with OrderedEnqueuer(iter(elements), tasks, **options) as enqueuer:
        with pytest.raises(BatchTimeout):
            next(enqueuer.get())
        helpers.wait_until(lambda: waits_with(enqueuer, tmp_path, count))
        (worker,) = core_of(enqueuer).run.backend.pool.workers
        os.kill(worker.process.pid, signal.SIGKILL)
        # All that it had are for its successor alone, and do not fit into its socket.
        with pytest.raises(BatchTimeout):
            next(enqueuer.get())
        assert enqueuer.restart_count == 1
        (tmp_path / "may-start").touch()
        (tmp_path / "may-go-on").touch()
        batches = enqueuer.get()
        assert [taken(batches) for _ in range(count)] == list(range(count))


def waits_with(enqueuer, path, count):
    """Return whether so many tasks have begun, while the loop asks for a batch."""
    with contextlib.suppress(BatchTimeout):
        next(enqueuer.get())
    return len(list(path.glob("begun-*"))) == count


def taken(batches):
    """Return the next batch, for which a worker that starts may need longer than the timeout."""
    end = time.monotonic() + helpers.LIMIT
    while time.monotonic() < end:
        with contextlib.suppress(BatchTimeout):
            return next(batches)
    raise AssertionError("no batch")


def test_a_worker_that_dies_idle_is_replaced(process):
    """Also both at once, and a new one that finds tasks waiting before it is known."""
    times = 3 if start_method_of(process) == "spawn" else 15
    with OrderedEnqueuer(range(6), pid_of, workers=2, max_restarts=99, **process) as enqueuer:
        for _ in range(times):
            pids = {pid for pid, _ in enqueuer}
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        assert [x for _, x in enqueuer] == list(range(6))


def test_a_worker_that_dies_idle_is_told(process):
    with OrderedEnqueuer(range(6), pid_of, **process) as enqueuer:
        ((pid, _), *_) = enqueuer
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            list(enqueuer)


@pytest.mark.thorough
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.repeats
def test_kills_at_random_moments_change_nothing(process, ordered):
    """Whatever is killed, whenever: the results are those of an undisturbed run, each once."""
    length, kills, run = 60, 0, 0
    with OrderedEnqueuer(
        range(length), heavy, random_seed=7, backend=Processes(start_method="fork")
    ) as enqueuer:
        wanted = [check(result) for result in enqueuer]
    limit = KILLS if start_method_of(process) != "spawn" else max(2, KILLS // 4)
    while kills < limit:
        run += 1
        rng = random.Random(run)
        workers, size = rng.choice([1, 2, 3]), rng.choice([1, 3, 10])
        print(f"run {run}: {workers} workers, max_queue_size {size}, {kills} kills so far")
        seen = []
        with OrderedEnqueuer(
            range(length), heavy, random_seed=7, workers=workers, max_queue_size=size,
            ordered=ordered, max_restarts=1000, **process,
        ) as enqueuer:  # fmt: skip
            at = time.monotonic() + rng.random() * 0.03
            for result in enqueuer:
                seen.append(check(result))
                del result
                if time.monotonic() >= at:
                    at = time.monotonic() + rng.random() * 0.05
                    kills += helpers.kill_one(enqueuer, rng)
        assert (seen if ordered else sorted(seen)) == wanted, run
    gc.collect()
