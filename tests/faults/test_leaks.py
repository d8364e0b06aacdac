"""Many starts leave no thread, process, descriptor or file; see the census in conftest.py."""

import gc

import helpers
import pytest
from helpers import Failing, counting, twelve

from enqueuer import GeneratorEnqueuer, WorkerDied, prefetch


@pytest.fixture
def count(backend):
    """How often: a spawned worker takes half a second."""
    return 10 if backend.get("mp_context") == "spawn" else 200


def test_starts_and_early_breaks(backend, count):
    for _ in range(count):
        with GeneratorEnqueuer(counting, workers=2, **backend) as enqueuer:
            for _ in enqueuer:
                break


def test_one_enqueuer_started_again_and_again(backend, count):
    enqueuer = GeneratorEnqueuer(twelve, workers=2, **backend)
    for _ in range(count // 2):
        enqueuer.start()
        assert list(enqueuer.get()) == list(range(12))
        enqueuer.stop()


def test_errors(backend, count):
    for _ in range(count // 2):
        with GeneratorEnqueuer(Failing(1, helpers.raise_value_error), **backend) as enqueuer:
            with pytest.raises(ValueError, match="bad value"):
                list(enqueuer)


def test_deaths(process, count):
    count = 10 if process["mp_context"] == "spawn" else 100
    for _ in range(count):
        with GeneratorEnqueuer(Failing(1, helpers.kill_self), workers=2, **process) as enqueuer:
            with pytest.raises(WorkerDied):
                list(enqueuer)


def test_forgotten_enqueuers(backend, count):
    for _ in range(count // 2):
        for _ in GeneratorEnqueuer(counting, workers=2, **backend):
            break
        for _ in prefetch(twelve, **backend):
            break


def test_forgotten_enqueuers_in_a_circle_of_references(backend, count):
    for _ in range(count // 4):
        enqueuer = GeneratorEnqueuer(counting, workers=2, **backend)
        enqueuer.myself = enqueuer
        next(iter(enqueuer))
    del enqueuer
    gc.collect()
