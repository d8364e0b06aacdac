"""The whole machine in three stories: start, wait, death, restart, state and resume.

Each goes through the life of an enqueuer from top to bottom, for whoever reads the tests first.
The other files show each promise by itself.
"""

import logging
import re

import pytest
from helpers import kill_once, packed, rest_of

from enqueuer import GeneratorEnqueuer, InvalidState, OrderedEnqueuer, WorkerDied, replay


def batches(shard):
    """Yield where a batch is made, and what is drawn there."""
    for number in range(3):
        yield shard.epoch, shard.index, number, int(shard.rng.integers(1000))


def places(batches):
    return [batch[:3] for batch in batches]


def test_a_run_stops_in_the_middle_and_goes_on_elsewhere(backend):
    enqueuer = GeneratorEnqueuer(batches, workers=2, **backend)
    assert repr(enqueuer) == "<GeneratorEnqueuer NEW 2 workers>"
    assert not enqueuer.is_running()

    # Two workers run two shards, of which the loop gets one batch each in turn.
    enqueuer.start()
    assert enqueuer.is_running()
    with pytest.raises(InvalidState, match="is running already"):
        enqueuer.start()
    iterator = iter(enqueuer)
    first = list(iterator)
    assert places(first) == [(0, shard, number) for number in range(3) for shard in range(2)]
    assert not enqueuer.is_running()

    # Iterating again is the next epoch, and a loop that was left goes on with the next batch.
    for batch in enqueuer:
        if places([batch]) == [(1, 1, 0)]:
            break
    assert places([next(iter(enqueuer))]) == [(1, 0, 1)]
    assert list(iterator) == []

    # The state is that of the batches which the loop has had, not of those that wait.
    state = packed(enqueuer.state_dict())
    rest = list(enqueuer)
    assert places(rest) == [(1, 1, 1), (1, 0, 2), (1, 1, 2)]
    enqueuer.stop()
    assert repr(enqueuer) == "<GeneratorEnqueuer STOPPED 2 workers>"
    with pytest.raises(InvalidState, match=r"after stop\(\)"):
        iter(enqueuer)

    # Another enqueuer goes on from it, with the same seed and shards, whatever its workers.
    later = GeneratorEnqueuer(batches, workers=3, backend="thread")
    later.load_state_dict(state)
    assert later.random_seed == enqueuer.random_seed
    with later:
        again = [next(iter(later))]
        later.reconfigure(workers=1)
        assert [*again, *later] == rest

    # The one that was stopped begins anew, or goes on from it, too.
    with enqueuer:
        assert list(enqueuer) == first
    enqueuer.load_state_dict(state)
    assert packed(enqueuer.state_dict()) == state
    with enqueuer:
        assert list(enqueuer) == rest


class Fragile:
    """A source like `batches`, of which one worker dies in the middle of shard 1."""

    def __init__(self, folder):
        folder.mkdir()
        self.mark = folder / "died"

    def __call__(self, shard):
        for batch in batches(shard):
            if batch[:3] == (0, 1, 1):
                kill_once(self.mark)
            yield batch


def test_a_worker_dies_and_another_one_takes_its_place(process, tmp_path, caplog):
    options = dict(workers=2, shards=3, random_seed=7, **process)
    with GeneratorEnqueuer(batches, shards=3, random_seed=7) as plain:
        epochs = [list(plain) for _ in range(2)]

    # The loop sees nothing of the death, and the next epoch runs on the new worker.
    source = Fragile(tmp_path / "restarted")
    with GeneratorEnqueuer(source, max_restarts=5, **options) as enqueuer:
        with caplog.at_level(logging.WARNING):
            assert [list(enqueuer) for _ in range(2)] == epochs
        assert enqueuer.restart_count == 1
    (record,) = [record for record in caplog.records if "goes on with" in record.message]
    assert re.search("was killed by SIGKILL|died", record.message)  # Ray does not tell how
    assert "restart 1, of max_restarts=5" in record.message

    # Without a restart it is an error, behind what was made before it.
    source, seen = Fragile(tmp_path / "raised"), []
    with GeneratorEnqueuer(source, **options) as enqueuer:
        with pytest.raises(WorkerDied) as caught:
            seen.extend(enqueuer)
        assert seen == epochs[0][: len(seen)]
        assert "shard 1, item 1" in caught.value.__notes__[0]

    # Its state is that of the batch that did not come, from which another run goes on.
    state = packed(enqueuer.state_dict())
    assert seen + rest_of(GeneratorEnqueuer(source, **options), state) == epochs[0]


def divided(element):
    return 12 // (3 - element)


def test_an_error_comes_in_its_place_and_a_later_run_skips_it(backend, caplog):
    seen = []
    with OrderedEnqueuer(range(6), divided, workers=2, random_seed=7, **backend) as enqueuer:
        # What was done before comes first, and then the error, as if the loop had called `map`.
        with pytest.raises(ZeroDivisionError) as caught:
            seen.extend(enqueuer)
        assert seen == [4, 6, 12]
        assert caught.traceback[-1].name == "divided"
        assert "task 3, element 3" in caught.value.__notes__[0]
        origin = caught.value.enqueuer_origin
        assert (origin.item, origin.element, origin.shard) == (3, 3, None)

        # It stays, and can be made again in this process.
        with pytest.raises(ZeroDivisionError):
            next(iter(enqueuer))
        with pytest.raises(ZeroDivisionError):
            replay(caught.value)

    # The state is that of the task that failed.
    state = packed(enqueuer.state_dict())
    later = OrderedEnqueuer(range(6), divided, workers=2, on_error="skip", **backend)
    assert rest_of(later, state) == [-12, -6]
    assert later.error_count == 1
    assert "ZeroDivisionError" in caplog.text
    assert "in divided" in caplog.text
