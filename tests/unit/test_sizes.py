"""The size of a batch is that of its data, wherever in the batch they are."""

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import numpy as np
import pytest

from enqueuer.common.objects import SAMPLED, size_of

KILO = np.zeros(1000, np.uint8)


@dataclasses.dataclass
class Plain:
    x: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: int = 0


class Named(NamedTuple):
    x: Any
    y: str = "ab"


class Child(Slotted):
    """Has both: slots from its base, and a `__dict__`."""


class Mangled:
    __slots__ = ("__hidden", "unset")

    def __init__(self, x):
        self.__hidden = x


class Dict(dict):
    """As frameworks have them, with attributes of their own."""


def with_attribute(x):
    made = Dict(x=x)
    made.y = np.zeros(24, np.uint8)
    return made


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (KILO, 1000),
        (b"abc", 3),
        (memoryview(b"abcd"), 4),
        ("text", 4),
        (7, 8),
        ([1.5] * 100, 800),
        (["ab", "cde"], 5),
        (None, 0),
        ((), 0),
        (object(), 0),
        (print, 0),
        (Plain, 0),
        (np, 0),
        (Plain(KILO), 1000),
        (Plain(Plain([KILO])), 1000),
        (Slotted(KILO), 1008),
        (Child(KILO), 1008),
        (Mangled(KILO), 1000),
        (Named(KILO), 1002),
        (with_attribute(KILO), 1024),
        (collections.OrderedDict(a=KILO, b=1), 1008),
        (collections.UserDict(a=KILO), 1000),
        (types.SimpleNamespace(a=KILO), 1000),
        (types.MappingProxyType({"a": KILO}), 1000),
        (collections.deque([KILO, "x"]), 1001),
        ([KILO, KILO], 1000),
        (np.array([KILO, "ab", None], dtype=object), 1002),
        ({"x": [{"y": (KILO, {b"z"})}]}, 1001),
    ],
)
def test_everything_in_a_batch_counts_once(value, size):
    assert size_of(value) == size


def test_a_nest_that_contains_itself_has_a_size():
    nest = Plain([KILO])
    nest.x.append(nest)
    assert size_of(nest) == 1000


def test_a_glance_looks_at_so_many_objects():
    # The last ones come first.
    assert size_of([bytearray(1), *[{"x": bytes([n])} for n in range(4)]], limit=3) == 1
    assert size_of([object()] * 10**6, limit=SAMPLED) == 0


def test_objects_that_come_and_go_while_it_looks_are_not_taken_for_each_other():
    records = np.array([(n, f"{n:04}") for n in range(500)], dtype=[("n", "i8"), ("t", object)])
    assert size_of(records) == 500 * (8 + 4)


def test_an_attribute_that_fails_is_no_reason_to_fail():
    class Sparse:
        def __init__(self):
            self.data = KILO

        @property
        def nbytes(self):
            raise RuntimeError("nbytes is not defined for sparse tensors")

    assert size_of(Sparse()) == 1000


def test_tensors_have_their_bytes_also_sparse_ones():
    torch = pytest.importorskip("torch")
    assert size_of({"x": torch.zeros(10, 10)}) == 400
    assert size_of(torch.eye(10).to_sparse()) == 2 * 10 * 8 + 10 * 4


def test_images_have_those_of_their_pixels():
    image = pytest.importorskip("PIL.Image")
    assert size_of([image.new("RGB", (10, 20)), image.new("F", (3, 3))]) == 600 + 36
