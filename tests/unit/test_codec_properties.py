"""Arbitrary nests through the codec and through a whole channel: what comes out is what went in."""

import contextlib
import dataclasses
import math
from collections import namedtuple

import numpy as np
import pytest
from helpers import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from enqueuer.common.descriptors import Descriptor
from enqueuer.transport.channel import Credit, Packets, Status, open_status, pair
from enqueuer.transport.receiver import ItemReceiver
from enqueuer.transport.sender import ItemSender, send_ready

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Batch:
    """As people write it."""

    x: object
    y: object


DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(endianness="?"),
    hnp.datetime64_dtypes(endianness="?"),
    hnp.timedelta64_dtypes(endianness="?"),
    hnp.byte_string_dtypes(min_len=1),
    hnp.unicode_string_dtypes(min_len=1),
    hnp.array_dtypes(allow_subarrays=True, max_size=3),
    st.sampled_from([np.dtype("g"), np.dtype("G"), np.dtype("S0"), np.dtype("O")]),
)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=5)


@st.composite
def arrays(draw):
    """Draw an array of any dtype, shape and layout; some are large enough for a block."""
    dtype, shape = draw(DTYPES), draw(SHAPES)
    if shape:
        shape = (shape[0] * draw(st.sampled_from([0, 1, 2, 1000, 5000])), *shape[1:])
    count = math.prod(shape)
    if dtype.hasobject or dtype.kind == "U":  # not every number is a character
        few = draw(st.lists(st.text(max_size=3), min_size=1, max_size=5))
        array = np.resize(np.array(few, dtype), count)
    else:
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        array = np.frombuffer(bytearray(rng.bytes(count * dtype.itemsize)), np.uint8)
        array = array.view(dtype) if array.size else np.zeros(count, dtype)
    array = array.reshape(shape)
    return draw(layouts(array))


@st.composite
def layouts(draw, array):
    """Draw another layout in memory for an array."""
    kind = draw(st.sampled_from("cftssnnbrm"))
    if kind == "f":
        array = np.asfortranarray(array)
    elif kind == "t":
        array = array.T
    elif kind == "s" and array.ndim:
        array = array[:: draw(st.sampled_from([2, 3, -1, -2]))]
    elif kind == "n" and array.ndim > 1:
        array = array[..., draw(st.integers(0, 2)) :: 2]
    elif kind == "b":
        array = np.broadcast_to(array, (3, *array.shape))
    elif kind == "r":
        array = array.view()
        array.flags.writeable = False
    elif kind == "m" and array.dtype.names is None and not array.dtype.hasobject:
        mask = np.zeros(array.shape, bool)
        mask.flat[: mask.size // 2] = True
        array = np.ma.array(array, mask=mask)
    return array


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.binary(min_size=10, max_size=20).map(lambda raw: bytearray(raw * 2000))
    | hnp.arrays(hnp.scalar_dtypes(), ()).map(lambda array: array[()])
    | arrays()
)
NESTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.builds(Pair, inner, inner)
        | st.builds(Batch, inner, inner)
    ),
    max_leaves=8,
)


def same(got, sent):
    """Tell whether two nests are the same, NaNs and the bytes of arrays included."""
    if type(got) is not type(sent):
        return False
    if isinstance(sent, np.ndarray):
        return same_arrays(got, sent)
    if isinstance(sent, np.generic):
        return got.dtype == sent.dtype and got.tobytes() == sent.tobytes()
    if isinstance(sent, dict):
        return list(got) == list(sent) and all(same(got[key], sent[key]) for key in sent)
    if isinstance(sent, (list, tuple)):
        return len(got) == len(sent) and all(map(same, got, sent))
    if isinstance(sent, Batch):
        return same(got.x, sent.x) and same(got.y, sent.y)
    if isinstance(sent, (float, complex)):
        return repr(got) == repr(sent)
    return got == sent


def same_arrays(got, sent):
    if (got.dtype, got.shape) != (sent.dtype, sent.shape):
        return False
    if isinstance(sent, np.ma.MaskedArray) and not (got.mask == sent.mask).all():
        return False
    if sent.flags.f_contiguous and not got.flags.f_contiguous:
        return False
    got, sent = np.ma.getdata(got), np.ma.getdata(sent)
    if sent.dtype.hasobject or not sent.dtype.itemsize:  # numpy's own way: always writable
        return got.tolist() == sent.tolist()
    if sent.flags.forc and got.flags.writeable != sent.flags.writeable:
        return False
    return got.tobytes() == sent.tobytes()


class Channel:
    """Both ends of a channel in one thread: it may hold what fits its credit."""

    def __init__(self):
        ours, its = pair()
        memory, packets = Descriptor(open_status()), Packets(its)
        send_ready(packets)
        credit = Credit(100, None, False)
        self.worker = ItemSender(packets, Status.of(memory.fileno()), credit)
        self.consumer = ItemReceiver(
            Packets(ours),
            Status.of(memory.fileno()),
            credit,
            "worker 0",
            lambda: 0,
        )
        memory.close()

    def through(self, value):
        self.worker.send_item(0, 0, value)
        wait_until(lambda: self.consumer.head() is True)
        (item,) = self.consumer.take(1)
        self.consumer.acknowledge()
        self.consumer.grant(100)
        return item[2]

    def close(self):
        self.consumer.close()
        self.worker.close()


@pytest.mark.thorough
def test_what_is_kept_of_a_sequence_of_nests_stays_the_same():
    with contextlib.closing(Channel()) as channel:  # one for all examples: blocks are used again

        @given(st.lists(NESTS, min_size=1, max_size=6), st.integers(0, 63))
        @settings(max_examples=300)
        def check(values, keep):
            kept = []
            for number, value in enumerate(values):
                got = channel.through(value)
                assert same(got, value)
                if keep >> number & 1:
                    kept.append((got, value))
            assert all(same(got, value) for got, value in kept)

        check()


@pytest.mark.thorough
def test_an_array_that_is_there_twice_arrives_as_one():
    with contextlib.closing(Channel()) as channel:

        @given(arrays())
        @settings(max_examples=100)
        def check(array):
            first, second = channel.through([array, {"again": array}])
            assert same(first, array)
            assert second["again"] is first

        check()
