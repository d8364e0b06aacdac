"""reconfigure(workers=...): nothing lost, nothing twice, nothing in another order."""

import random
import threading

import pytest
from helpers import LIMIT, bytes_of, random_batches

from enqueuer import GeneratorEnqueuer, InvalidState
from enqueuer.enqueuers.enqueuer import core_of


def make(workers=1, **options):
    return GeneratorEnqueuer(random_batches, workers=workers, shards=5, random_seed=7, **options)


@pytest.fixture(scope="module")
def whole():
    with make() as enqueuer:
        return [[bytes_of(batch) for batch in enqueuer] for _ in range(2)]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_the_batches_are_the_same(backend, whole, seed):
    rng, seen = random.Random(seed), []
    with make(workers=2, **backend) as enqueuer:
        for batch in enqueuer:
            seen.append(bytes_of(batch))
            if rng.random() < 0.15:
                enqueuer.reconfigure(workers=rng.randint(1, 4))
        assert seen == whole[0]
        enqueuer.reconfigure(workers=3)
        assert [bytes_of(batch) for batch in enqueuer] == whole[1]


@pytest.mark.thorough
def test_a_consumer_that_waits_goes_on(backend):
    """In another thread, and its batch comes from the new workers."""
    with GeneratorEnqueuer(_slow_until_told, workers=1, shards=2, **backend) as enqueuer:
        batches = iter(enqueuer)
        assert next(batches) == (0, 0)
        seen = []
        thread = threading.Thread(target=lambda: seen.extend(batches))
        thread.start()
        enqueuer.reconfigure(workers=2)
        thread.join(LIMIT)
        assert seen == [(1, 0), (0, 1), (1, 1)]


def _slow_until_told(shard):
    yield shard.index, 0
    threading.Event().wait(0.2)  # the consumer waits meanwhile
    yield shard.index, 1


def test_before_the_start_and_after_an_error():
    def source():
        raise ValueError("bad")
        yield

    enqueuer = GeneratorEnqueuer(source)
    enqueuer.reconfigure(workers=2)
    assert "2 workers" in repr(enqueuer)
    with enqueuer:
        with pytest.raises(ValueError, match="bad"):
            list(enqueuer)
        with pytest.raises(InvalidState, match="after an error"):
            enqueuer.reconfigure(workers=3)


def test_a_live_iterator_stays_where_it_is():
    with GeneratorEnqueuer(iter(range(9))) as enqueuer:
        first = next(enqueuer.get())
        enqueuer.reconfigure(workers=3)
        assert [first, *enqueuer] == list(range(9))


def test_a_change_by_code_that_runs_in_the_wait_is_refused(backend, whole, monkeypatch):
    """It would wait for itself; the loop goes on afterwards."""
    with make(workers=2, **backend) as enqueuer:
        backend = core_of(enqueuer).run.backend
        # As if a handler ran in the thread that waits.
        monkeypatch.setattr(backend, "wait", lambda *_: enqueuer.reconfigure(workers=3))
        with pytest.raises(InvalidState, match="between two batches"):
            next(iter(enqueuer))
        monkeypatch.undo()
        assert [bytes_of(batch) for batch in enqueuer] == whole[0]


@pytest.mark.local
def test_the_number_that_auto_has_found_keeps_the_shards():
    """They are as many as with "auto", in this epoch and in the next one."""
    with GeneratorEnqueuer(_thirty_two, workers="auto") as enqueuer:
        first, shards = list(enqueuer), enqueuer.state_dict()["shards"]
        enqueuer.reconfigure(workers=1)
        assert list(enqueuer) == first
        assert enqueuer.state_dict()["shards"] == shards


def _thirty_two(shard):
    yield from shard.split(range(32))


@pytest.mark.local
def test_after_a_stop_the_shards_stay():
    enqueuer = GeneratorEnqueuer(_thirty_two, workers=2, random_seed=7)
    with enqueuer:
        first = list(enqueuer)
    enqueuer.reconfigure(workers=5)
    assert "5 workers" in repr(enqueuer)
    with enqueuer:
        assert list(enqueuer) == first
        assert enqueuer.state_dict()["shards"] == 2


@pytest.mark.local
def test_before_the_first_start_the_shards_follow_the_workers():
    enqueuer = GeneratorEnqueuer(_thirty_two, workers=2)
    enqueuer.reconfigure(workers=5)
    with enqueuer:
        assert enqueuer.state_dict()["shards"] == 5
