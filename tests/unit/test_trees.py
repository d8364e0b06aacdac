"""Walking a nested batch: containers keep their class, and all walkers know the same ones."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType

import numpy as np
import pytest

from enqueuer.common.objects import attributes_of, columns_of, size_of, tree_map
from enqueuer.monitoring.duplicates import digest
from enqueuer.transport.errors import find_culprit
from enqueuer.workers.arrays import stack

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Pair:
    a: int
    b: list


def test_a_nest_keeps_its_build():
    nest = {"p": Point(1, (2, [3])), "d": Pair(4, [5]), "e": defaultdict(list, k=6), "n": ()}
    twin = tree_map(lambda leaf: -leaf, nest)
    assert twin == {
        "p": Point(-1, (-2, [-3])),
        "d": Pair(-4, [-5]),
        "e": {"k": -6},
        "n": (),
    }
    assert type(twin["e"]) is defaultdict
    assert nest["d"] == Pair(4, [5])


class Labels(dict):
    pass


class Movable(tuple):
    def to(self, device):
        raise NotImplementedError


@pytest.mark.parametrize("kind", [Labels, OrderedDict, UserDict, MappingProxyType])
def test_every_mapping_is_gone_into_and_keeps_its_class(kind):
    nest = kind({"x": 1, "y": [2]})
    twin = tree_map(lambda leaf: -leaf, nest)
    assert type(twin) is kind
    assert dict(twin) == {"x": -1, "y": [-2]}
    assert dict(nest) == {"x": 1, "y": [2]}


def test_a_tuple_that_moves_itself_is_a_leaf():
    """A PackedSequence, for example, cannot be made anew of its parts."""
    movable = Movable([1, 2])
    assert tree_map(lambda leaf: leaf, [movable])[0] is movable


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    image: object
    label: int = 0


CONTAINERS = {
    "dict": lambda leaf: {"image": leaf, "label": 0},
    "mapping": lambda leaf: OrderedDict(image=leaf, label=0),
    "tuple": lambda leaf: (leaf, 0),
    "named tuple": lambda leaf: Point(leaf, 0),
    "list": lambda leaf: [leaf, 0],
    "dataclass": Sample,
}


@pytest.fixture(params=CONTAINERS.values(), ids=CONTAINERS)
def container(request):
    return request.param


def test_every_walker_goes_into_every_container(container):
    ones, twos = np.ones(100, np.uint8), np.full(100, 2, np.uint8)
    nest = container(ones)
    assert type(tree_map(lambda leaf: leaf, nest)) is type(nest)
    assert size_of(nest) == 108
    assert digest(nest) != digest(container(twos))
    assert size_of(stack([nest, container(twos)])) == 200 + 2 * 8
    assert type(stack([nest, nest])) is type(nest)
    unsendable = (number for number in ())
    assert find_culprit("item", container(unsendable))[1] is unsendable


def test_containers_of_different_length_have_no_columns():
    with pytest.raises(ValueError, match="shorter"):
        columns_of([(1, 2), (1,)])


def test_attributes_are_found_without_running_code_of_the_class():
    class Loud:
        __slots__ = ("__hidden", "unset", "x")

        def __init__(self):
            self.x, self.__hidden = 1, 2

        @property
        def value(self):
            raise AssertionError("it was asked")

    assert attributes_of(Loud()) == {"x": 1, "_Loud__hidden": 2}
