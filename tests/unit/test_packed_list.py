"""A packed list has the elements of the list, and its buffers can be shared."""

import copy
import pathlib
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enqueuer.workers.tasks import FEWEST_PACKED, PACKED_CHUNK, PackedList, packed

CONSTANTS = st.one_of(
    st.text(), st.binary(), st.integers(), st.floats(allow_nan=False), st.none(), st.booleans()
)


@pytest.mark.thorough
@given(st.lists(CONSTANTS | st.tuples(CONSTANTS, CONSTANTS), max_size=3 * PACKED_CHUNK), st.data())
def test_it_is_read_like_the_list(items, data):
    kept = PackedList.of(items)
    assert len(kept) == len(items)
    assert list(kept) == items
    number = st.integers(-len(items) - 2, len(items) + 2)
    part = slice(data.draw(number | st.none()), data.draw(number | st.none()))
    assert kept[part] == items[part]
    at = data.draw(number)
    if -len(items) <= at < len(items):
        assert kept[at] == items[at]
    else:
        with pytest.raises(IndexError):
            kept[at]


def test_neighbours_are_unpickled_together():
    kept = PackedList.of([f"element {number}" for number in range(3 * PACKED_CHUNK)])
    first = kept[PACKED_CHUNK]
    assert kept[2 * PACKED_CHUNK - 1] == f"element {2 * PACKED_CHUNK - 1}"
    # Unpickled again, it would be another object.
    assert kept[PACKED_CHUNK] is first
    assert kept[0] == "element 0"
    assert kept[PACKED_CHUNK] == first


def test_its_memory_is_beside_its_pickle():
    kept = PackedList.of([str(number) for number in range(FEWEST_PACKED)])
    buffers = []
    data = pickle.dumps(kept, protocol=5, buffer_callback=buffers.append)
    assert len(data) < 200
    assert list(pickle.loads(data, buffers=buffers)) == list(kept)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_it_can_be_pickled_in_one_piece_and_copied(protocol):
    kept = PackedList.of([str(number) for number in range(100)])
    assert list(pickle.loads(pickle.dumps(kept, protocol))) == list(kept)
    assert list(copy.deepcopy(kept)) == list(kept)


@pytest.mark.parametrize(
    "element",
    ["text", b"bytes", 1, 1.5, None, True, 1j, pathlib.Path("a"), ("a", 1), ()],
    ids=repr,
)
def test_a_long_list_of_constants_is_packed(element):
    kept = packed([element] * FEWEST_PACKED)
    assert isinstance(kept, PackedList)
    assert kept[FEWEST_PACKED - 1] == element
    assert isinstance(packed((element,) * FEWEST_PACKED), PackedList)


class Text(str):
    """A string with attributes of its own."""


@pytest.mark.parametrize(
    "element",
    [[1], {"a": 1}, Text("a"), np.int64(1), np.zeros(2), (("a",), 1), ([],), object()],
    ids=lambda element: type(element).__name__,
)
def test_what_can_change_or_is_of_another_class_stays_as_it_is(element):
    """Elements that share an object would each get a copy of it."""
    items = ["a"] * FEWEST_PACKED + [element]
    assert packed(items) is items


def test_a_short_list_stays_as_it_is():
    items = ["a"] * (FEWEST_PACKED - 1)
    assert packed(items) is items
