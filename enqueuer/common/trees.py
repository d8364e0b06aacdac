"""Walking a nested batch: its containers, their members, and rebuilding them.

    members_of(nest)          -> members by key, index or name; None of a leaf
    with_members(nest, ...)   -> a nest of the same class with other members
    tree_map(function, nest)  -> function of each leaf
    attributes_of(value)      -> values in the `__dict__` and the slots of an object

Containers are mappings, tuples, named tuples, lists and dataclasses. Sets are leaves here, as
their members have no places.

Two callers walk in other ways. The size of a batch (`sizes.py`) is taken for every item and must
run no code of a container's class, so it knows only built-in containers and attributes. The
TensorFlow adapter follows `tf.nest`, for which a list is a tensor.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def members_of(nest: object) -> Mapping[Any, Any] | None:
    """Return the members of a container by key, index or field name; None of a leaf.

    Fields of a dataclass that its `__init__` does not take are left out.

    Example:
        >>> members_of(["a", "b"]), members_of("ab")
        ({0: 'a', 1: 'b'}, None)
    """
    if isinstance(nest, Mapping):
        return nest
    if isinstance(nest, (tuple, list)):
        return dict(enumerate(nest))
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        fields = dataclasses.fields(nest)
        return {field.name: getattr(nest, field.name) for field in fields if field.init}
    return None


def with_members(nest: Any, members: Mapping[Any, Any]) -> Any:
    """Return a container of the same class as `nest` with other members.

    Args:
        nest: Container to be imitated; it is not changed.
        members: New members, by the same keys, indices or names as `members_of(nest)`.

    Example:
        >>> with_members((1, 2), {0: "a", 1: "b"})
        ('a', 'b')
    """
    if isinstance(nest, Mapping):
        return _with_items(nest, dict(members))
    if isinstance(nest, (tuple, list)):
        kind: Any = type(nest)
        return kind(*members.values()) if hasattr(nest, "_fields") else kind(members.values())
    return dataclasses.replace(nest, **members)


def columns_of(nests: Sequence[Any]) -> dict[Any, list[Any]] | None:
    """Return, for each member of the first container, a list of that member of all containers.

    Args:
        nests: Containers of the same structure, at least one; or leaves.

    Returns:
        The members by key, index or name; None if the first one is a leaf.

    Raises:
        ValueError: Tuples or lists differ in length.
        KeyError: A mapping lacks a key of the first one.

    Example:
        >>> columns_of([{"x": 1}, {"x": 2}])
        {'x': [1, 2]}
    """
    first = nests[0]
    if isinstance(first, Mapping):
        return {key: [nest[key] for nest in nests] for key in first}
    if isinstance(first, (tuple, list)):
        return dict(enumerate(map(list, zip(*nests, strict=True))))
    names = members_of(first)
    if names is None:
        return None
    return {name: [getattr(nest, name) for nest in nests] for name in names}


def tree_map(function: Callable[[Any], Any], nest: Any) -> Any:
    """Return a nest of the same structure with `function` of each leaf.

    An object that moves itself to a GPU is a leaf.

    Example:
        >>> tree_map(str, {"x": (1, 2), "y": [3]})
        {'x': ('1', '2'), 'y': ['3']}
    """
    members = None if _moves_itself(nest) else members_of(nest)
    if members is None:
        return function(nest)
    mapped = {key: tree_map(function, member) for key, member in members.items()}
    return with_members(nest, mapped)


def _moves_itself(nest: Any) -> bool:
    """Return whether a nest must not be taken apart.

    A TensorDict or a graph of PyTorch Geometric knows of streams. A PackedSequence is a tuple of
    which one part must stay on the CPU.
    """
    kind = type(nest)
    return hasattr(kind, "record_stream") or (
        isinstance(nest, (tuple, list)) and hasattr(kind, "to")
    )


def _with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return `items` in a mapping of the same class; in a dict if that is impossible."""
    if type(mapping) is dict:
        return items
    if isinstance(mapping, (dict, UserDict)):
        # A copy keeps the factory of a defaultdict, for example. Some classes forbid update().
        twin = copy.copy(mapping)
        for key, value in items.items():
            twin[key] = value
        return twin
    # A copy of another class may share its values with the original.
    kind: Any = type(mapping)
    try:
        rebuilt = kind(items)
    except Exception:
        # An archive that numpy has opened, for example, cannot be made from a dict.
        return items
    return rebuilt if isinstance(rebuilt, Mapping) else items


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the values in the `__dict__` and the slots of an object, by name.

    Properties are not read, so no code of the object's class runs.

    Example:
        >>> attributes_of(types.SimpleNamespace(x=1))
        {'x': 1}
    """
    attributes = getattr(value, "__dict__", None)
    found = dict(attributes) if isinstance(attributes, dict) else {}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            # Python mangles a name that begins with two underscores.
            is_private = name.startswith("__") and not name.endswith("__")
            key = f"_{kind.__name__.lstrip('_')}{name}" if is_private else name
            slot = vars(kind).get(key)
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    found[key] = slot.__get__(value)
                except AttributeError:
                    # The slot was not set.
                    continue
    return found
