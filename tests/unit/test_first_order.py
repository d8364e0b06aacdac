"""Unit: a worker process begins its first epoch while others are being started."""

import pytest
from helpers import METHODS, wait_until

from enqueuer import GeneratorEnqueuer, Processes
from enqueuer.backends.process.pool import ProcessPool


@pytest.mark.parametrize("method", METHODS)
def test_a_process_runs_before_the_last_one_is_started(method, monkeypatch, tmp_path):
    begun = tmp_path / "begun"
    start = ProcessPool.start_worker

    def source(shard):
        begun.touch()
        yield shard.index

    def start_worker(self, index):
        if index == 1:
            wait_until(begun.exists)
        return start(self, index)

    monkeypatch.setattr(ProcessPool, "start_worker", start_worker)
    backend = Processes(start_method=method)
    with GeneratorEnqueuer(source, backend=backend, workers=2, shards=2) as enqueuer:
        assert list(enqueuer) == [0, 1]
        # The order for the next epoch reaches both.
        assert list(enqueuer) == [0, 1]
