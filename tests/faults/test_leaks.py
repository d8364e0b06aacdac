"""Many starts leave no thread, process, descriptor or file; see the census in conftest.py.

What each start leaves shows after a few. `ENQUEUER_ROUNDS=20` looks for what is left rarely.
"""

import os

import helpers
import pytest
from helpers import Failing, counting, start_method_of, twelve

from enqueuer import GeneratorEnqueuer, WorkerDied, prefetch

ROUNDS = int(os.environ.get("ENQUEUER_ROUNDS", "1"))

pytestmark = [pytest.mark.thorough, pytest.mark.repeats, pytest.mark.timeout(120 * ROUNDS)]


def times(options):
    """Return how often; a spawned worker takes a fifth of a second, others a hundredth."""
    return (10 if start_method_of(options) == "spawn" else 100) * ROUNDS


def test_starts_and_early_breaks(backend):
    for _ in range(times(backend)):
        with GeneratorEnqueuer(counting, workers=2, **backend) as enqueuer:
            for _ in enqueuer:
                break


def test_one_enqueuer_started_again_and_again(backend):
    enqueuer = GeneratorEnqueuer(twelve, workers=2, **backend)
    for _ in range(times(backend) // 2):
        enqueuer.start()
        assert list(enqueuer.get()) == list(range(12))
        enqueuer.stop()


def test_errors(backend):
    for _ in range(times(backend) // 2):
        with GeneratorEnqueuer(Failing(1, helpers.raise_value_error), **backend) as enqueuer:
            with pytest.raises(ValueError, match="bad value"):
                list(enqueuer)


def test_deaths(process):
    for _ in range(times(process)):
        with GeneratorEnqueuer(Failing(1, helpers.kill_self), workers=2, **process) as enqueuer:
            with pytest.raises(WorkerDied):
                list(enqueuer)


def test_forgotten_enqueuers(backend):
    for _ in range(times(backend) // 2):
        for _ in GeneratorEnqueuer(counting, workers=2, **backend):
            break
        for _ in prefetch(twelve, **backend):
            break
