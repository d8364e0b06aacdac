"""replay(error): the item that failed, made again here, with the same random numbers."""

import pickle
import random

import numpy as np
import pytest
from helpers import backend_of, kill_self

from enqueuer import GeneratorEnqueuer, InvalidState, WorkerDied, replay


class Drawn(Exception):
    """Tells what was drawn from the shard's generator and from the globals."""


def drawing(shard):
    for number in range(20):
        drawn = int(shard.rng.integers(10**9)), random.random(), float(np.random.rand())
        if shard.epoch == 1 and (shard.index, number) == (1, 7):
            raise Drawn(*drawn)
        yield drawn


def failed(**options):
    with GeneratorEnqueuer(drawing, workers=2, shards=3, random_seed=7, **options) as enqueuer:
        list(enqueuer)
        with pytest.raises(Drawn) as caught:
            list(enqueuer)
    return enqueuer, caught.value


@pytest.mark.ahead
@pytest.mark.filterwarnings("ignore:all threads draw")
def test_the_item_is_made_again_with_the_same_numbers(backend):
    _, error = failed(**backend)
    before = random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(Drawn) as caught:
        replay(error)
    assert caught.value.args[0] == error.args[0]
    if backend_of(backend) == "process":  # threads share their globals with everybody
        assert caught.value.args == error.args
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    origin = error.enqueuer_origin
    assert (origin.random_seed, origin.epoch, origin.shard, origin.item) == (7, 1, 1, 7)
    assert "worker 1" in origin.worker


@pytest.mark.filterwarnings("ignore:all threads draw")
def test_a_pickled_error_is_replayed_by_an_enqueuer(backend):
    enqueuer, error = failed(**backend)
    copy = pickle.loads(pickle.dumps(error))
    assert copy.enqueuer_origin.item == 7
    with pytest.raises(ValueError, match="of an enqueuer with the same source"):
        replay(copy)
    with pytest.raises(Drawn):
        enqueuer.replay(copy)


def test_an_item_that_killed_its_worker_may_come_here(process):
    with GeneratorEnqueuer(_killing, **process) as enqueuer:
        with pytest.raises(WorkerDied) as caught:
            list(enqueuer)
    _killing.harmless = True
    try:
        assert replay(caught.value) == 2
    finally:
        del _killing.harmless


def _killing(shard):
    yield 1
    if not hasattr(_killing, "harmless"):
        kill_self()
    yield 2


def test_what_did_not_come_from_an_enqueuer_cannot_be_replayed():
    with pytest.raises(ValueError, match="nothing to replay"):
        replay(KeyError("mine"))


def test_a_live_iterator_cannot_be_replayed():
    with GeneratorEnqueuer(1 / n for n in (1, 0)) as enqueuer:
        with pytest.raises(ZeroDivisionError) as caught:
            list(enqueuer)
    with pytest.raises(InvalidState, match="cannot be read again"):
        replay(caught.value)
