"""Digests: what is the same has the same, what differs has another, what is small has none."""

import dataclasses

import numpy as np
import pytest

from enqueuer.monitoring.duplicates import FirstItems, digest

LARGE = np.random.default_rng(7).integers(0, 255, (64, 64, 64, 3), np.uint8)


@dataclasses.dataclass
class Batch:
    x: object
    y: object


def changed(array, index):
    copy = array.copy()
    copy[index] += 1
    return copy


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: {"x": x, "n": 3},
        lambda x: (x, ["name", None]),
        lambda x: Batch(x, 1.5),
        lambda x: x.tobytes(),
        lambda x: x[::2, ::-1],
        lambda x: np.ma.masked_array(x),
    ],
)
def test_what_is_the_same_has_the_same_digest(make):
    assert digest(make(LARGE)) == digest(make(LARGE.copy())) is not None
    assert digest(make(LARGE)) != digest(make(LARGE + 1))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros(64), np.zeros(65)),
        (np.zeros(64), np.zeros((8, 8))),
        (np.zeros(64), np.zeros(64, np.int64)),
        ((1, np.zeros(64)), (2, np.zeros(64))),
        ({"x": np.zeros(64)}, {"y": np.zeros(64)}),
        ([np.zeros(64)], (np.zeros(64),)),
    ],
)
def test_what_differs_has_another_one(one, other):
    assert digest(one) != digest(other)


class Stored:
    """A large array of another library, which lies in a file."""

    nbytes = 1 << 30
    is_read = False

    def __array__(self, *args, **options):
        self.is_read = True
        return np.zeros(100)


def test_a_large_array_in_a_file_is_not_read():
    array = Stored()
    assert digest({"x": array}) is None
    assert not array.is_read


def test_a_large_array_is_looked_at_in_all_its_parts():
    """Images often have the same border."""
    for part in (slice(0, 1), slice(31, 33), slice(63, 64)):
        assert digest(LARGE) != digest(changed(LARGE, part))


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (0, 8),
        ("text" * 1000, 4000),
        (np.zeros(3), 24),
        ({"x": np.zeros(2), "y": "name"}, 22),
        ([True, None, 2.5], 16),
        (np.zeros((0, 100)), 0),
        (None, 0),
    ],
)
def test_the_size_of_small_items_is_known(value, size):
    assert digest(value)[1] == size


def circle():
    found = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    "value",
    [np.array([object()] * 100), [np.zeros(100), object()], circle(), {1, "a"}],
    ids=["objects", "an object", "a circle", "a set without an order"],
)
def test_what_is_unknown_has_none(value):
    assert digest(value) is None


def test_of_what_is_huge_some_is_looked_at():
    one = [[[number] * 1000] for number in range(1000)]
    other = [[[number] * 1000] for number in range(1000)]
    assert digest(one) == digest(other)
    other[0] = 0
    assert digest(one) != digest(other)
    assert digest("a" * 10**6) != digest("b" * 10**6)
    assert digest("a" * 10**6) != digest("a" * (10**6 + 1))


def test_tensors_have_one():
    torch = pytest.importorskip("torch")
    assert digest(torch.arange(100)) == digest(torch.arange(100)) is not None
    assert digest(torch.arange(100)) != digest(torch.arange(1, 101))


def test_nothing_more_is_looked_at_once_all_is_known():
    first = FirstItems(shards=2)
    for number in range(2):
        for shard in range(2):
            assert not first.done
            assert first.saw(shard, np.full(64, 10 * shard + number)) is None
    assert first.done
    assert first.saw(1, np.full(64, 1)) is None
