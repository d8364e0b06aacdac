"""Samples: the workers batch and shuffle them, by shards, and a position is resumed exactly."""

import contextlib
import itertools
import threading

import numpy as np
import pytest
from helpers import Resumable, rest_of, taken

from enqueuer import (
    DuplicateDataWarning,
    GeneratorEnqueuer,
    OrderedEnqueuer,
    OverwrittenDataWarning,
    StateMismatch,
    prefetch,
)
from enqueuer.transport import blocks


def numbers(shard):
    yield from shard.split(range(23))


def random_samples(shard):
    for number in shard.split(range(60)):
        yield {"x": shard.rng.random(3), "name": f"n{number}"}


def some_nones(shard):
    for number in shard.split(range(12)):
        yield None if number % 3 == 0 else number


def large_samples(shard):
    for number in shard.split(range(12)):
        yield {"image": np.full((60, 100), number, "f4"), "parts": (np.full(6000, number), number)}


def resumable(shard):
    return Resumable(shard.split(range(40)))


def plain(batch):
    """Return a batch as plain data that can be compared."""
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [plain(value) for value in batch]
    return (batch.dtype.str, batch.tolist()) if isinstance(batch, np.ndarray) else batch


def lists(batches):
    return [batch.tolist() for batch in batches]


def epoch(source, **options):
    with GeneratorEnqueuer(source, **{"random_seed": 7, **options}) as enqueuer:
        return [plain(batch) for batch in enqueuer]


def test_each_shard_batches_its_own_samples(backend):
    with GeneratorEnqueuer(numbers, shards=2, batch_size=5, **backend) as enqueuer:
        assert lists(enqueuer) == [
            [0, 2, 4, 6, 8],
            [1, 3, 5, 7, 9],
            [10, 12, 14, 16, 18],
            [11, 13, 15, 17, 19],
            [20, 22],
            [21],
        ]


def test_drop_last_leaves_out_the_incomplete_batch_of_each_shard(backend):
    with GeneratorEnqueuer(numbers, shards=2, batch_size=5, drop_last=True, **backend) as enqueuer:
        assert [len(batch) for batch in enqueuer] == [5] * 4


def test_drop_last_without_batch_size_leaves_the_items_alone():
    assert list(prefetch(numbers, shards=2, drop_last=True)) == list(range(23))


def test_the_batches_do_not_depend_on_the_workers(backend):
    options = {"shards": 3, "batch_size": 4, "shuffle_buffer": 8}
    whole = epoch(random_samples, **options)
    assert epoch(random_samples, workers=2, **options, **backend) == whole
    assert epoch(random_samples, **{**options, "random_seed": 8}) != whole


@pytest.mark.local
def test_large_arrays_are_stacked_in_shared_memory(process):
    """Then sending a batch copies nothing: the block that was filled is sent."""
    expected = [plain(batch) for batch in prefetch(large_samples, batch_size=4)]
    with GeneratorEnqueuer(counts_copies, batch_size=4, **process) as enqueuer:
        batches = list(enqueuer)
    assert [int(batch.pop("copies").max()) for batch in batches] == [0, 0, 0]
    assert [plain(batch) for batch in batches] == expected


def counts_copies(shard):
    copies = count_copies()
    for sample in large_samples(shard):
        yield {**sample, "copies": len(copies)}


def count_copies():
    """Return a list to which each copy into shared memory is appended."""
    copies = []
    copy = blocks.copy_part
    blocks.copy_part = lambda *given: (copies.append(given), copy(*given))[1]
    return copies


def test_collate_makes_the_batch(backend):
    with GeneratorEnqueuer(numbers, batch_size=10, collate=tuple, **backend) as enqueuer:
        assert [sum(batch) for batch in enqueuer] == [45, 145, 63]


def test_samples_that_are_none_belong_to_no_batch(backend):
    for more in ({}, {"shuffle_buffer": 3}):
        with GeneratorEnqueuer(some_nones, batch_size=4, **more, **backend) as enqueuer:
            batches = lists(enqueuer)
        assert [len(batch) for batch in batches] == [4, 4]
        assert sorted(itertools.chain(*batches)) == [1, 2, 4, 5, 7, 8, 10, 11]


def test_batches_of_a_generator_may_be_batched_again():
    def batches():
        for number in range(4):
            yield np.full((3, 2), number)

    assert [batch.shape for batch in prefetch(batches, batch_size=2)] == [(2, 3, 2)] * 2


def test_a_running_iterator_is_batched_and_shuffled():
    assert lists(prefetch(iter(range(5)), batch_size=2)) == [[0, 1], [2, 3], [4]]
    shuffled = list(prefetch(iter(range(50)), shuffle_buffer=10, random_seed=7))
    assert sorted(shuffled) == list(range(50)) != shuffled


def test_the_buffer_mixes_what_is_in_it_and_loses_nothing():
    for _ in range(2):
        order = list(prefetch(numbers, shards=1, shuffle_buffer=5, random_seed=7))
        assert sorted(order) == list(range(23))
        # A sample cannot come before those that must have left the buffer for it.
        assert all(sample <= at + 5 for at, sample in enumerate(order))
    assert sum(abs(sample - at) for at, sample in enumerate(order)) > 23


def test_each_epoch_and_shard_has_an_order_of_its_own():
    def same(shard):
        yield from range(30)

    with GeneratorEnqueuer(same, shards=2, shuffle_buffer=10, random_seed=7) as enqueuer:
        epochs = [list(enqueuer) for _ in range(2)]
    orders = {tuple(epoch[index::2]) for epoch in epochs for index in range(2)}
    assert len(orders) == 4


def test_the_random_numbers_of_the_shard_stay_the_same():
    def draws(shard):
        yield from shard.rng.random(20)

    plain = list(prefetch(draws, random_seed=7))
    assert sorted(prefetch(draws, random_seed=7, shuffle_buffer=5)) == sorted(plain)


def test_shards_with_the_same_data_are_still_noticed():
    """They keep the same order, although each has a buffer."""

    def the_same():
        for number in range(20):
            yield np.full(100, number)

    with (
        pytest.warns(DuplicateDataWarning),
        GeneratorEnqueuer(the_same, workers=2, shuffle_buffer=8, random_seed=7) as enqueuer,
    ):
        list(enqueuer)


def test_samples_with_a_state_are_not_made_again(backend):
    options = {"shards": 2, "batch_size": 3}
    with GeneratorEnqueuer(resumable, random_seed=7, **options, **backend) as enqueuer:
        whole = lists(enqueuer)
    had, state = taken(GeneratorEnqueuer(resumable, random_seed=7, **options, **backend), 5)
    assert dict(state["states"]) == {
        0: {"samples": {"at": 9}, "is_last": False},
        1: {"samples": {"at": 6}, "is_last": False},
    }
    later = GeneratorEnqueuer(resumable, workers=2, **options, **backend)
    assert lists(had + rest_of(later, state)) == whole


@pytest.mark.parametrize("batches", [{}, {"batch_size": 3, "collate": list}])
def test_samples_in_a_buffer_are_not_lost_although_they_have_a_state(backend, batches):
    options = {"shards": 2, "shuffle_buffer": 5, "random_seed": 7, **batches}
    whole = list(prefetch(resumable, **options))
    had, state = taken(GeneratorEnqueuer(resumable, **options, **backend), 11)
    assert "states" not in state
    assert had + rest_of(GeneratorEnqueuer(resumable, **options, **backend), state) == whole


@pytest.mark.parametrize(
    ("saved", "loaded", "says"),
    [
        ({"batch_size": 4}, {"batch_size": 5}, "batch_size is 4 in the state and 5 here"),
        ({"batch_size": 4}, {}, "batch_size is 4 in the state and None here"),
        ({}, {"shuffle_buffer": 5}, "shuffle_buffer is None in the state and 5 here"),
    ],
)
def test_a_state_of_other_batches_is_refused(saved, loaded, says):
    with GeneratorEnqueuer(numbers, **saved) as enqueuer:
        state = enqueuer.state_dict()
    with pytest.raises(StateMismatch, match=says):
        GeneratorEnqueuer(numbers, **loaded).load_state_dict(state)


def test_an_error_comes_after_the_batches_before_it(backend):
    with GeneratorEnqueuer(fails_at_seven, batch_size=3, **backend) as enqueuer:
        batches = iter(enqueuer)
        assert lists([next(batches), next(batches)]) == [[0, 1, 2], [3, 4, 5]]
        with pytest.raises(ZeroDivisionError):
            next(batches)


def fails_at_seven():
    for number in range(10):
        yield number + 0 // (number - 7)


def test_the_generator_is_closed_in_the_worker(tmp_path, backend):
    mark = tmp_path / "closed"

    def endless():
        try:
            while True:
                yield 1
        finally:
            mark.write_text("yes")

    with GeneratorEnqueuer(endless, batch_size=2, shuffle_buffer=2, **backend) as enqueuer:
        next(iter(enqueuer))
    assert mark.read_text() == "yes"


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"shards": 0}, ValueError, "shards must be >= 1, got 0"),
        ({"shards": 1.5}, TypeError, "shards must be an int"),
        ({"random_seed": -1}, ValueError, "random_seed must be >= 0"),
        ({"random_seed": "a"}, TypeError, "random_seed must be an int"),
        ({"batch_size": 0}, ValueError, "batch_size must be >= 1, got 0"),
        ({"batch_size": "4"}, TypeError, "batch_size must be an int, got '4'"),
        ({"collate": tuple}, ValueError, "give batch_size with it"),
        ({"collate": 4, "batch_size": 2}, TypeError, "collate must be a function of a list"),
        ({"shuffle_buffer": 1}, ValueError, "shuffle_buffer must be >= 2, got 1"),
        ({"shuffle_buffer": True}, TypeError, "shuffle_buffer must be an int, got True"),
    ],
)
def test_options_that_cannot_work_are_refused(options, error, says):
    for make in (GeneratorEnqueuer, prefetch):
        with pytest.raises(error, match=says):
            make(numbers, **options)


@pytest.mark.local
def test_tasks_are_stacked_in_shared_memory(process):
    """The same function makes the batches of tasks."""
    with OrderedEnqueuer(LargeResults(), batch_size=4, **process) as enqueuer:
        assert [int(copies.max()) for _, copies in enqueuer] == [0, 0]


class LargeResults:
    copies = None

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if self.copies is None:
            self.copies = count_copies()
        return np.full((60, 100), index), len(self.copies)


class BeginsAnew:
    """Samples that begin anew when they are iterated, or resumed, after their end."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        self.at %= 5
        while self.at < 5:
            self.at += 1
            yield self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_nothing_follows_an_incomplete_last_batch_after_it_was_resumed(backend, count):
    whole = [[0, 1], [2, 3], [4]]
    had, state = taken(GeneratorEnqueuer(BeginsAnew, batch_size=2, **backend), count)
    assert lists(had) == whole[:count]
    resumed = GeneratorEnqueuer(BeginsAnew, batch_size=2, **backend)
    resumed.load_state_dict(state)
    with resumed:
        assert lists(resumed) == whole[count:]
        assert lists(resumed) == whole


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_failing_collate_closes_the_generator(policy, caplog):
    closed = []

    def samples():
        try:
            yield from range(9)
        finally:
            closed.append(threading.current_thread().name)

    def fail(batch):
        raise LookupError("no batch")

    with GeneratorEnqueuer(samples, batch_size=3, collate=fail, on_error=policy) as enqueuer:
        with pytest.raises(LookupError) if policy == "raise" else contextlib.nullcontext():
            assert list(enqueuer) == []
        assert closed == ["enqueuer-worker-0"]


def test_samples_of_a_buffer_come_before_an_error(backend):
    def samples():
        yield from range(5)
        raise LookupError("no more")

    with GeneratorEnqueuer(samples, shuffle_buffer=10, random_seed=7, **backend) as enqueuer:
        items = iter(enqueuer)
        assert sorted(itertools.islice(items, 5)) == list(range(5))
        with pytest.raises(LookupError, match="no more"):
            next(items)


def reused(count):
    """Return a source of samples that lie in so many buffers in turn."""

    def samples():
        buffers = [np.zeros(100) for _ in range(count)]
        for number in range(24):
            buffers[number % count][:] = number
            yield {"x": (buffers[number % count], MASK)}

    return samples


# Each sample has it, which is no mistake.
MASK = np.ones(100)


def list_of(samples):
    return [sample["x"][0][0] for sample in samples]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 6},
        {"batch_size": 6, "collate": list_of},
        {"batch_size": 6, "shuffle_buffer": 6},
        {"shuffle_buffer": 50},
    ],
    ids=["stack", "collate", "shuffle", "shuffle alone"],
)
def test_a_buffer_that_waiting_samples_share_is_told_of(backend, count, options):
    says = r"a sample of the generator was changed .* yield or return"
    with pytest.warns(OverwrittenDataWarning, match=says):
        list(GeneratorEnqueuer(reused(count), **options, **backend))


def test_samples_that_do_not_change_while_they_wait_are_not_told_of(backend, no_warnings):
    assert len(list(GeneratorEnqueuer(reused(24), batch_size=6, **backend))) == 4
    # A buffer is written to again when its batch has been made.
    batches = list(GeneratorEnqueuer(reused(6), batch_size=6, **backend))
    assert [batch["x"][0][0, 0] for batch in batches] == [0, 6, 12, 18]
    rows = np.arange(24).reshape(24, 1)
    assert len(list(GeneratorEnqueuer(lambda: iter(rows), shuffle_buffer=4, **backend))) == 24


class Refilled:
    """A sequence, and a `map`, that returns one buffer for all elements."""

    def __init__(self):
        self.buffer = np.zeros(100)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.buffer[:] = index
        return self.buffer

    __call__ = __getitem__


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_buffer_that_results_of_a_batch_share_is_told_of(backend, concurrency):
    for arguments in [(Refilled(),), (range(24), Refilled())]:
        with pytest.warns(OverwrittenDataWarning, match="a result of map or __getitem__ was"):
            list(OrderedEnqueuer(*arguments, batch_size=6, concurrency=concurrency, **backend))


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_constant_result_is_not_told_of(backend, concurrency, no_warnings):
    options = {"batch_size": 6, "concurrency": concurrency, **backend}
    assert len(list(OrderedEnqueuer(range(24), lambda _: MASK, **options))) == 4
