"""Items and errors <-> pickles and the buffers beside them."""

import builtins
import copyreg
import dataclasses
import gc
import mmap
import os
import pickle
import threading
import traceback

import helpers
import numpy as np
import pytest

from enqueuer import ItemNotPicklable, WorkerError
from enqueuer.common.objects import OUT_OF_BAND_BYTES
from enqueuer.transport import errors, item_codec


@dataclasses.dataclass
class Batch:
    x: object


def there_and_back(value):
    data, buffers = item_codec.Encoder().encode(value)
    return item_codec.decode(
        bytes(data), [memoryview(bytearray(np.asarray(view).tobytes())) for view in buffers]
    )


LARGE = 5000


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_long_byte_strings_are_copied_once(kind):
    """The pickle is in pieces until it is written to its place: the strings are among them."""
    strings = [kind(os.urandom(70_000)) for _ in range(4)]
    batch = {"strings": strings, "labels": [0, 1, 2, 3]}
    pickled, buffers = item_codec.Encoder().encode(batch)
    assert isinstance(pickled, item_codec.Pieces)
    assert not buffers
    reached, level = [], [pickled]
    # In Python 3.10 the attributes of an object are one step further away.
    for _ in range(3):
        level = gc.get_referents(*level)
        reached += level
    assert all(any(string is piece for piece in reached) for string in strings)
    with mmap.mmap(-1, len(pickled) + 10) as memory:
        pickled.copy_to(memory, 10)
        assert memory[10:] == bytes(pickled)
        assert pickle.loads(memory[10:]) == batch


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "1", "F", "I;16"])
@pytest.mark.parametrize("side", [8, 300])
def test_images_of_pil_come_back_equal(mode, side):
    pil = helpers.needs("PIL.Image")
    image = pil.new(mode, (side, side + 1), 1)
    image.info["dpi"] = (72, 72)
    if mode == "P":
        image.putpalette(bytes(range(256)) * 3)
    copy = there_and_back({"image": image})["image"]
    assert copy == image
    assert type(copy) is type(image)
    assert copy.info == image.info
    copy.putpixel((0, 0), 0)


def test_the_pixels_of_a_large_image_are_no_part_of_the_pickle():
    pil = helpers.needs("PIL.Image")
    pickled, buffers = item_codec.Encoder().encode([pil.new("RGB", (300, 300))] * 2)
    assert [buffer.nbytes for buffer in buffers] == [270_000]
    assert len(pickled) < 1000


LABELLED = np.dtype("f4", metadata={"unit": "m"})


@pytest.mark.parametrize(
    ("labelled", "plain"),
    [
        (LABELLED, np.dtype("f4")),
        (np.dtype([("a", LABELLED)]), np.dtype([("a", "f4")])),
        (np.dtype([("a", "f4")], metadata={"unit": "m"}), np.dtype([("a", "f4")])),
    ],
    ids=["a number", "a field", "fields"],
)
@pytest.mark.parametrize("count", [3, LARGE])
@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
def test_the_metadata_of_a_dtype_comes_back_and_no_other(labelled, plain, count, order):
    """Dtypes with and without metadata are equal, and may be mistaken for each other."""
    item_codec.portable_dtypes.clear()
    for dtype in [labelled, plain][::order]:
        copy = there_and_back(np.zeros(count, dtype)).dtype
        assert copy.metadata == dtype.metadata
        if dtype.names:
            assert copy["a"].metadata == dtype["a"].metadata


def test_large_buffers_are_beside_the_pickle_and_not_copied():
    array = np.arange(100_000)
    data, buffers = item_codec.Encoder().encode({"x": array, "y": 1})
    assert len(data) < 1000
    (view,) = buffers
    assert np.shares_memory(np.frombuffer(view, array.dtype), array)
    copy = item_codec.decode(data, [view])
    assert np.shares_memory(copy["x"], array)


def test_buffers_beyond_a_number_go_into_the_pickle():
    arrays = [np.full(OUT_OF_BAND_BYTES, n % 256, np.uint8) for n in range(1030)]
    _, buffers = item_codec.Encoder().encode(arrays)
    assert len(buffers) == item_codec._MAX_BUFFERS
    assert all((a == b).all() for a, b in zip(there_and_back(arrays), arrays, strict=True))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (threading.Lock(), "item is a _thread.lock"),
        ({"x": [1, threading.Lock()]}, r"item\['x'\]\[1\] is a _thread.lock"),
        (Batch(x for x in "a"), "item.x is a generator"),
    ],
)
def test_the_part_that_cannot_be_pickled_is_named(value, says):
    with pytest.raises(ItemNotPicklable, match=says):
        item_codec.Encoder().encode(value)


def test_the_culprit_is_found_in_a_nest_that_contains_itself():
    nest = []
    nest += [nest, threading.Lock()]
    with pytest.raises(ItemNotPicklable, match=r"item\[1\] is a _thread.lock"):
        item_codec.Encoder().encode(nest)


def test_a_nest_that_is_too_deep_is_refused_as_an_item():
    nest = []
    for _ in range(100_000):
        nest = [nest]
    with pytest.raises(ItemNotPicklable, match="recursion"):
        item_codec.Encoder().encode(nest)
    while nest:  # at once it would be too deep for Python 3.10, too
        nest = nest.pop()


# --- errors ---


def caught(act):
    try:
        act()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def sent(act):
    """Return what `act` raises, and what arrives of it."""
    error = caught(act)
    return error, errors.decode_error(errors.encode_error(error))


def raises(error):
    def act():
        raise error

    return act


def plain_errors():
    """Yield an instance of each built-in exception class that takes one text."""
    for kind in vars(builtins).values():
        if isinstance(kind, type) and issubclass(kind, BaseException):
            try:
                yield kind("text")
            except TypeError:
                pass


OTHERS = [
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    FileNotFoundError(2, "No such file", "image.png"),
    OSError(5, "one", "a", None, "b"),
    SystemExit(3),
    StopIteration(5),
    KeyError("key", 2),
    SyntaxError("bad", ("file.py", 3, 4, "x = = 1")),
]


@pytest.mark.thorough
@pytest.mark.parametrize("error", [*plain_errors(), *OTHERS], ids=repr)
def test_built_in_errors_arrive_as_they_were(error):
    _, copy = sent(raises(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.args == error.args
    for name in ("errno", "filename", "filename2", "code", "value", "lineno", "text", "reason"):
        assert getattr(copy, name, None) == getattr(error, name, None)


class KeywordOnly(Exception):
    def __init__(self, *, path):
        super().__init__(f"cannot read {path}")
        self.path = path


class OwnReduce(Exception):
    def __init__(self, a, b):
        super().__init__(a)
        self.b = b

    def __reduce__(self):
        return OwnReduce, (self.args[0], self.b)


class OwnText(Exception):
    def __str__(self):
        return "own text"


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize(
    "error",
    [helpers.TwoArguments(1, 2), KeywordOnly(path="p"), OwnReduce(1, 2), OwnText(3)],
    ids=repr,
)
def test_errors_of_ones_own_keep_their_attributes(error):
    if type(error) is not OwnReduce:  # which says itself what is to travel
        error.added = [1]
    _, copy = sent(raises(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_a_long_traceback_loses_its_middle():
    _, copy = sent(helpers.recurse)
    assert type(copy) is RecursionError
    assert len(traceback.extract_tb(copy.__traceback__)) <= errors.MAX_FRAMES


def test_cause_context_and_notes_survive():
    error, copy = sent(helpers.raise_chained)
    assert type(copy.__cause__) is KeyError
    assert copy.__cause__ is copy.__context__ or copy.__suppress_context__
    error.__notes__ = ["a note"]
    assert errors.decode_error(errors.encode_error(error)).__notes__ == ["a note"]


@pytest.mark.skipif(not hasattr(builtins, "ExceptionGroup"), reason="Python 3.10 has no groups")
def test_groups_survive():
    for kind, inner in [("ExceptionGroup", KeyError(1)), ("BaseExceptionGroup", SystemExit(1))]:
        _, copy = sent(raises(getattr(builtins, kind)("group", [inner, ValueError("b")])))
        assert type(copy).__name__ == kind
        assert [type(part) for part in copy.exceptions] == [type(inner), ValueError]
        assert copy.message == "group"


@pytest.mark.skipif(not hasattr(builtins, "ExceptionGroup"), reason="Python 3.10 has no groups")
def test_a_group_survives_a_change_of_the_list_that_it_was_made_of():
    parts = [KeyError(1)]
    group = raises(builtins.ExceptionGroup("group", parts))
    parts.clear()
    _, copy = sent(group)
    assert [str(part) for part in copy.exceptions] == ["1"]


def test_a_local_class_of_error_comes_back_as_itself():
    class Local(Exception):
        pass

    _, copy = sent(raises(Local("x")))
    assert type(copy) is Local


def test_what_does_not_survive_arrives_as_text():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    for error, says in [(helpers.HoldsLock(), "holds a lock"), (Mute(), "Mute"), (first, "a")]:
        _, copy = sent(raises(error))
        if type(copy) is not type(error):
            assert type(copy) is WorkerError
        assert says in str(copy)


def raise_from_what_holds_a_lock():
    try:
        raise helpers.HoldsLock
    except helpers.HoldsLock as error:
        raise KeyError("bad image") from error


def raise_during_what_holds_a_lock():
    try:
        raise helpers.HoldsLock
    except helpers.HoldsLock:
        raise KeyError("bad image")  # noqa: B904


def raise_in_a_circle():
    first, second = KeyError("bad image"), helpers.HoldsLock()
    first.__cause__, second.__cause__ = second, first
    raise first


@pytest.mark.parametrize(
    "act",
    [raise_from_what_holds_a_lock, raise_during_what_holds_a_lock, raise_in_a_circle],
    ids=lambda act: act.__name__,
)
def test_an_error_survives_a_cause_that_does_not(act):
    _, copy = sent(act)
    assert type(copy) is KeyError
    assert copy.args == ("bad image",)
    assert traceback.extract_tb(copy.__traceback__)[-1].name == act.__name__
    cause = copy.__cause__ or copy.__context__
    assert type(cause) is WorkerError
    assert "holds a lock" in str(cause)


def test_an_error_survives_a_long_chain_of_causes():
    error = None
    for number in range(3000):
        following = ValueError(number)
        following.__context__ = error
        error = following
    copy = errors.decode_error(errors.encode_error(error))
    assert (type(copy), copy.args) == (ValueError, (2999,))
    # as itself or, where the recursion limit is too low for that, as text
    assert type(copy.__context__) in (ValueError, WorkerError)
    assert "2998" in str(copy.__context__)


def test_nothing_is_registered_for_all_exceptions():
    before = dict(copyreg.dispatch_table)
    sent(helpers.raise_chained)
    assert copyreg.dispatch_table == before


def test_an_error_that_cannot_be_rebuilt_here_arrives_as_text():
    data = pickle.dumps((b"not a pickle", "ValueError: x", "Traceback ..."))
    copy = errors.decode_error(data)
    assert type(copy) is WorkerError
    assert "ValueError: x" in str(copy)
    assert "Traceback ..." in str(copy)
