"""Death: noticed at once; what had been sent arrives first; the error names who, how and where."""

import logging
import os
import signal
import time

import helpers
import numpy as np
import pytest
from helpers import Failing

from enqueuer import GeneratorEnqueuer, OrderedEnqueuer, WorkerDied


@pytest.mark.local
@pytest.mark.parametrize(
    ("act", "exitcode", "says"),
    [
        (helpers.kill_self, -signal.SIGKILL, "was killed by SIGKILL"),
        (helpers.abort, -signal.SIGABRT, "was killed by SIGABRT"),
        (helpers.exit_hard, 0, "ended with exit code 0"),
        (helpers.exit_hard_three, 3, "ended with exit code 3"),
    ],
)
def test_a_death_is_told_after_all_that_was_sent(process, act, exitcode, says):
    source = Failing(4, act, shard=1)
    batches = []
    with GeneratorEnqueuer(source, workers=2, **process) as enqueuer:
        with pytest.raises(WorkerDied, match=says) as caught:
            batches.extend(enqueuer.get())  # extend keeps what came before the error
    del batches
    assert caught.value.worker == 1
    assert caught.value.exitcode == exitcode
    assert "shard 1, item 4" in caught.value.__notes__[0]


def test_all_that_a_killed_worker_had_sent_is_delivered(process):
    def source():
        for number in range(8):
            yield os.getpid(), np.full(100_000, number)
        helpers.kill_self()

    batches = []
    with GeneratorEnqueuer(source, max_queue_size=20, **process) as enqueuer:
        with pytest.raises(WorkerDied):
            for batch in enqueuer:
                batches.append(batch)  # it raises
    sent = [int(batch[0]) for _, batch in batches]
    # Ray may lose the last items of an actor that died.
    assert sent == list(range(len(sent) if helpers.backend_of(process) == "ray" else 8))
    assert all((batch == batch[0]).all() for _, batch in batches)


@helpers.retry_if_disturbed
def test_a_killed_worker_is_noticed_while_the_consumer_waits(process):
    def source(shard):
        yield os.getpid()
        time.sleep(1000)

    with GeneratorEnqueuer(source, workers=2, **process) as enqueuer:
        batches = iter(enqueuer)
        pids = [next(batches), next(batches)]
        os.kill(pids[1], signal.SIGKILL)
        before = time.monotonic()
        with pytest.raises(WorkerDied, match=r"worker 1 .* (was killed by SIGKILL|died)"):
            next(batches)
        # It is Ray that notices the death of an actor, which took 1.03 s on a busy machine.
        limit = 5 if helpers.backend_of(process) == "ray" else 1
        helpers.check_prompt(time.monotonic() - before, limit)


def test_a_worker_that_dies_between_epochs_is_told_in_the_next(process):
    def source():
        yield os.getpid()

    with GeneratorEnqueuer(source, **process) as enqueuer:
        (pid,) = enqueuer
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            list(enqueuer)


@pytest.mark.local
def test_a_worker_that_logs_and_dies_while_the_loop_is_busy_is_noticed(process, tmp_path):
    """The loop finds the log record and the end of the worker by the same look."""
    gate, mark = tmp_path / "gate", tmp_path / "mark"
    os.mkfifo(gate)

    def work(element):
        if element == 1 and not mark.exists():
            mark.touch()
            with open(gate):
                pass
            logging.getLogger("tests.worker").warning("this one is large")
            helpers.kill_self()
        return os.getpid()

    options = dict(workers=1, max_restarts=1, timeout=helpers.LIMIT) | process
    with OrderedEnqueuer(range(3), work, **options) as enqueuer:
        pids = iter(enqueuer)
        first = next(pids)
        with open(gate, "w"):
            pass
        helpers.wait_until(lambda: not helpers.alive(first))
        second, third = pids
        assert second == third != first
        assert enqueuer.restart_count == 1


@pytest.mark.writes
def test_batches_outlive_the_worker_and_the_enqueuer(process):
    def source():
        yield np.arange(100_000)
        helpers.kill_self()

    with GeneratorEnqueuer(source, **process) as enqueuer:
        batch = next(iter(enqueuer))
        with pytest.raises(WorkerDied):
            next(iter(enqueuer))
    del enqueuer
    batch += 1
    assert (batch == np.arange(1, 100_001)).all()
