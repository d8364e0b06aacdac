"""Replacement: a worker that died is replaced, and what arrives is the same as without."""

import os
import signal

import helpers
import pytest
from helpers import pid_of, random_batches

from enqueuer import EnqueuerWarning, GeneratorEnqueuer, StartError, WorkerDied
from enqueuer.enqueuers.enqueuer import core_of


def pid_first(shard):
    """Yield the worker's pid, then numbers: a test needs to know whom to kill."""
    yield os.getpid()
    yield from (f"{shard.index}: {shard.rng.integers(1000)}" for _ in range(30))


def test_a_death_between_epochs_is_mended_in_the_next(process):
    with GeneratorEnqueuer(pid_first, max_restarts=1, random_seed=7, **process) as enqueuer:
        pid, *first = enqueuer
        os.kill(pid, signal.SIGKILL)
        other, *second = enqueuer
        assert other != pid
        assert len(first) == len(second)


class Poisoned:
    """Dies at an item, in the first `times` processes that come to it."""

    def __init__(self, path, times):
        self.path = path
        self.times = times

    def __call__(self, shard):
        for batch in random_batches(shard):
            if batch["where"] == (1, 0, 2) and len(os.listdir(self.path)) < self.times:
                (self.path / str(os.getpid())).touch()
                helpers.kill_self()
            yield batch


def test_an_item_that_kills_every_time_is_named(process, tmp_path):
    with GeneratorEnqueuer(
        Poisoned(tmp_path, 99), shards=2, workers=2, max_restarts=2, **process
    ) as enqueuer:
        seen = []
        with pytest.raises(WorkerDied, match="3 workers died at this very item") as caught:
            seen.extend(enqueuer.get())
    assert "shard 1, item 2" in caught.value.__notes__[0]
    assert "max_restarts=2 is used up" in str(caught.value)
    assert enqueuer.restart_count == 2


def test_other_workers_do_not_bring_more_restarts(process):
    def kill():
        os.kill(pid_of(enqueuer), signal.SIGKILL)

    with GeneratorEnqueuer(pid_first, shards=2, max_restarts=1, **process) as enqueuer:
        kill()
        list(enqueuer)
        assert enqueuer.restart_count == 1
        enqueuer.reconfigure(workers=2)
        kill()
        with pytest.raises(WorkerDied, match="max_restarts=1 is used up"):
            list(enqueuer)
        assert enqueuer.restart_count == 1


def test_a_restart_while_other_workers_start_counts(process, monkeypatch):
    def open_after_a_restart(new):
        os.kill(pid, signal.SIGKILL)
        while not enqueuer.restart_count:
            next(batches)
        open_pool(new)

    with GeneratorEnqueuer(pid_first, shards=2, max_restarts=1, **process) as enqueuer:
        pool = type(core_of(enqueuer).run.backend.pool)
        batches, open_pool = iter(enqueuer), pool.open
        pid = next(batches)
        monkeypatch.setattr(pool, "open", open_after_a_restart)
        enqueuer.reconfigure(workers=2)
        assert enqueuer.restart_count == enqueuer.stats().restart_count == 1
        os.kill(pid_of(enqueuer), signal.SIGKILL)
        with pytest.raises(WorkerDied, match="max_restarts=1 is used up"):
            list(batches)


def test_threads_take_the_option_and_need_nothing_of_it():
    with pytest.warns(EnqueuerWarning, match="max_restarts has no effect with threads"):
        enqueuer = GeneratorEnqueuer(random_batches, max_restarts=3)
    with enqueuer:
        assert len(list(enqueuer)) == 4
        assert enqueuer.restart_count == 0


def test_a_replacement_that_cannot_be_started_is_named_as_the_reason(process, monkeypatch):
    with GeneratorEnqueuer(pid_first, max_restarts=3, **process) as enqueuer:
        pool = core_of(enqueuer).run.backend.pool

        def refuse(index):
            raise StartError("no more of them")

        monkeypatch.setattr(pool, "start_worker", refuse)
        os.kill(pid_of(enqueuer), signal.SIGKILL)
        with pytest.raises(WorkerDied) as caught:
            list(enqueuer)
    assert "A replacement could not be started: no more of them" in str(caught.value)
    assert "used up" not in str(caught.value)
    assert isinstance(caught.value.__cause__, StartError)
