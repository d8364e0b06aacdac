"""Small arrays in a dict, a list or a tuple <-> their bytes, behind a layout."""

import numpy as np
import pytest

from enqueuer.transport import item_codec
from enqueuer.transport.channel import INLINE_BYTES
from enqueuer.transport.item_codec import Layouts, decode_arrays

SHORT = np.arange(8, dtype=np.float32)
LABEL = np.array([7])
DTYPES = ["?", "i1", ">i8", "f2", "c16", "g", "U4", "S3", "M8[s]", "m8[D]"]
LEFT_TO_PICKLE = {
    "a number": 5,
    "no arrays": {},
    "a number among arrays": {"x": SHORT, "y": 5},
    "a name that is no text": {1: SHORT},
    "a name of a class of its own": {np.str_("x"): SHORT},
    "a nest": {"x": {"y": SHORT}},
    "a masked array": [np.ma.masked_array(SHORT)],
    "objects": [np.array([{}, None])],
    "fields": [np.zeros(3, "i4,f4")],
    "strides": [SHORT[::2]],
    "Fortran's order": [np.zeros((2, 3)).T],
    "nothing in it": [np.zeros(0)],
    "read-only": {"x": SHORT, "y": np.broadcast_to(LABEL, (1,))},
    "too large": [np.zeros(INLINE_BYTES, np.uint8)],
}


def there_and_back(value):
    layout, data = Layouts().encode(value)
    return decode_arrays(layout, memoryview(data))


@pytest.mark.parametrize("count", [8, 700], ids=["shared", "apart"])
@pytest.mark.parametrize("container", [dict, list, tuple])
def test_a_container_of_arrays_comes_back(container, count):
    arrays = [np.arange(count, dtype=np.float32).reshape(2, -1), np.array(3.5), LABEL]
    value = dict(zip("xyz", arrays, strict=True)) if container is dict else container(arrays)
    copy = there_and_back(value)
    assert type(copy) is container
    if container is dict:
        assert list(copy) == list(value)
    copies = list(copy.values()) if container is dict else list(copy)
    for array, original in zip(copies, arrays, strict=True):
        assert type(array) is np.ndarray
        assert (array.dtype, array.shape) == (original.dtype, original.shape)
        assert array.flags.c_contiguous
        assert array.flags.aligned
        array += 1
        assert (array == original + 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_each_dtype_come_back(dtype):
    original = np.arange(6).astype(dtype).reshape(3, 2)
    copy, _ = there_and_back((original, LABEL))
    assert copy.dtype == original.dtype
    assert (copy == original).all()
    assert copy.flags.writeable


@pytest.mark.parametrize("value", LEFT_TO_PICKLE.values(), ids=LEFT_TO_PICKLE)
def test_other_items_are_left_to_pickle(value):
    layouts = Layouts()
    assert layouts.encode(value) is None
    assert layouts.encode(value) is None


def test_a_read_only_array_is_left_to_pickle_which_keeps_it_so():
    layouts = Layouts()
    fixed = SHORT.copy()
    assert layouts.encode([fixed]) is not None
    fixed.flags.writeable = False
    assert layouts.encode([fixed]) is None


def test_a_dtype_with_metadata_is_left_to_pickle_which_keeps_it():
    """It is equal to the one without, and may be mistaken for it."""
    layouts = Layouts()
    labelled = np.zeros(8, np.dtype("f4", metadata={"unit": "m"}))
    for _ in range(2):
        assert layouts.encode({"x": labelled}) is None
        assert layouts.encode({"x": SHORT}) is not None


def test_an_array_that_is_there_twice_is_left_to_pickle_which_keeps_it_one():
    layouts = Layouts()
    assert layouts.encode([SHORT, SHORT.copy()]) is not None
    assert layouts.encode([SHORT, SHORT]) is None


def test_the_same_names_with_other_shapes_are_another_layout():
    layouts = Layouts()
    for shape in [(8,), (2, 4), (4, 2), (8, 1)]:
        layout, data = layouts.encode({"x": SHORT.reshape(shape)})
        assert decode_arrays(layout, memoryview(data))["x"].shape == shape


def test_items_of_any_length_are_left_to_pickle_after_some(monkeypatch):
    monkeypatch.setattr(item_codec, "_MAX_LAYOUTS", 3)
    layouts = Layouts()
    lengths = [n for n in range(1, 9) if layouts.encode([np.zeros(n)]) is not None]
    assert lengths == [1, 2, 3]
    assert layouts.encode([np.zeros(2)]) is not None
