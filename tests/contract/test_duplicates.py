"""One warning for shards that make the same data, and none for others."""

import collections
import contextlib
import itertools

import numpy as np
import pytest

from enqueuer import DuplicateDataWarning, EnqueuerWarning, GeneratorEnqueuer
from enqueuer.enqueuers.enqueuer import core_of


def same(count, seed=3):
    """Return a source that draws from a generator which was made outside."""
    rng = np.random.default_rng(seed)

    def captured(shard):
        for _ in range(count):
            yield {"x": rng.random((4, 8)), "y": [1, 2, 3, 4]}

    return captured


def numbered(count=4):
    """Yield batches that are full of their number; the same in each shard."""
    for number in range(count):
        yield np.full((4, 8), number)


def test_a_captured_generator_is_reported_with_its_cure(process):
    with contextlib.ExitStack() as stack:
        with pytest.warns(EnqueuerWarning, match="a copy of .* the variable 'rng'"):
            enqueuer = stack.enter_context(GeneratorEnqueuer(same(4), workers=2, **process))
        with pytest.warns(DuplicateDataWarning) as caught:
            batches = list(enqueuer)
    (warning,) = caught
    assert "shards 0 and 1 began with the same batches" in str(warning.message)
    assert "Draw them from shard.rng" in str(warning.message)
    assert warning.filename == __file__
    assert len(batches) == 8
    assert np.array_equal(batches[0]["x"], batches[1]["x"])


def test_a_function_that_takes_no_shard_is_reported(backend):
    with GeneratorEnqueuer(numbered, workers=2, **backend) as enqueuer:
        with pytest.warns(DuplicateDataWarning, match="takes no shard"):
            batches = [int(batch[0, 0]) for batch in enqueuer]
    assert batches == [0, 0, 1, 1, 2, 2, 3, 3]


def test_it_is_said_once_and_costs_later_epochs_nothing(backend, no_warnings):
    with GeneratorEnqueuer(numbered, workers=2, **backend) as enqueuer:
        with pytest.warns(DuplicateDataWarning):
            assert len(list(enqueuer)) == 8
        assert core_of(enqueuer).reader.work.first_items is None
        assert len(list(enqueuer)) == 8
        enqueuer.stop()
        enqueuer.start()
        assert len(list(enqueuer)) == 8


@pytest.mark.parametrize("ordered", [True, False])
def test_two_shards_of_several_are_named(backend, ordered):
    def source(shard):
        for number in range(3):
            yield np.full(64, (shard.index == 1, number), dtype=(int, 2))

    with GeneratorEnqueuer(source, workers=3, ordered=ordered, **backend) as enqueuer:
        with pytest.warns(DuplicateDataWarning, match="shards (0 and 2|2 and 0) began"):
            assert len(list(enqueuer)) == 9


def own_numbers(shard):
    for _ in range(3):
        yield shard.rng.random((4, 8))


def one_batch_again_and_again(shard):
    for _ in range(5):
        yield np.zeros((4, 8))


def a_header(shard):
    yield np.arange(64)
    yield shard.rng.random(64)


def small(shard):
    for number in range(3):
        yield {"x": np.array([number]), "name": f"row {number}"}


def with_its_shard(shard):
    for number in range(3):
        yield shard.index, np.full(64, number)


def only_one(shard):
    yield np.arange(64)


def of_unknown_content(shard):
    for number in range(3):
        yield collections.deque([np.full(64, number)])


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Known:
    def __init__(self, value):
        self.value = value


def short_labels(shard):
    yield from [[0], [1], [1], [0], [1]]


def lone_numbers(shard):
    yield from (number / 10 for number in range(50))


def one_number_again_and_again(shard):
    yield from itertools.repeat({"label": 3, "name": "x" * 100}, 50)


def lines_below_the_same_header(shard):
    yield from ("% a comment that each of the files has", "% and another one")
    yield from (f"{column}, from the table of all columns" for column in ("x", "y", "label"))
    for number in range(20):
        yield f"{shard.index}, {number}"


def sensors_at_rest(shard):
    for number in range(40):
        yield {"seconds": number / 10, "x": 0.0 if number < 20 else shard.rng.random()}


QUIET = [
    lines_below_the_same_header,
    sensors_at_rest,
    lone_numbers,
    own_numbers,
    one_batch_again_and_again,
    a_header,
    small,
    with_its_shard,
    only_one,
    of_unknown_content,
    short_labels,
    one_number_again_and_again,
]

ALIKE = {
    "tokens": lambda: ([number, 7, number + 1] for number in range(20)),
    "scalars": lambda: ({"x": number / 3, "label": number % 2} for number in range(20)),
    "texts": lambda: (
        f"line {number} of a file that is read by each worker" for number in range(9)
    ),
    "small arrays": lambda: (np.array([number, 0]) for number in range(20)),
    "long lists": lambda: (list(range(number, 100_000)) for number in range(3)),
    "sets": lambda: ({f"word {number}", "and a long one beside it" * 3} for number in range(3)),
    "objects": lambda: (Known(np.full(64, number)) for number in range(3)),
    "slots": lambda: (Slotted(np.full(64, number)) for number in range(3)),
}


@pytest.mark.parametrize("source", ALIKE.values(), ids=ALIKE)
def test_small_items_of_any_kind_are_compared(source):
    with GeneratorEnqueuer(source, workers=2) as enqueuer:
        with pytest.warns(DuplicateDataWarning, match="shards 0 and 1 .* takes no shard"):
            assert list(enqueuer)


@pytest.mark.thorough("processes")
@pytest.mark.parametrize("source", QUIET)
def test_no_warning_for_items_that_may_be_alike(backend, source, no_warnings):
    with GeneratorEnqueuer(source, workers=2, **backend) as enqueuer:
        for _ in range(2):
            assert list(enqueuer)
        assert core_of(enqueuer).reader.work.first_items is None


def test_a_shard_that_gives_little_does_not_have_the_others_compared_for_ever(backend):
    def source(shard):
        yield from range(1 if shard.index else 1000)

    with GeneratorEnqueuer(source, workers=2, **backend) as enqueuer:
        batches = iter(enqueuer)
        assert len(list(itertools.islice(batches, 500))) == 500
        assert core_of(enqueuer).reader.work.first_items is None
        assert len(list(batches)) == 501


def test_a_warning_that_is_made_an_error_loses_nothing(backend, no_warnings):
    with GeneratorEnqueuer(numbered, workers=2, **backend) as enqueuer:
        batches = []
        with pytest.raises(DuplicateDataWarning):
            for batch in enqueuer:
                # The loop goes on until the warning is raised.
                batches.append(batch)
        batches += enqueuer
    assert [int(batch[0, 0]) for batch in batches] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_one_shard_alone_is_compared_with_nothing(backend, no_warnings):
    with GeneratorEnqueuer(numbered, rank=0, workers=1, world_size=2, **backend) as enqueuer:
        assert len(list(enqueuer)) == 4
