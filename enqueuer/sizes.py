"""How many bytes a batch has: one answer for every bound and every statistic in this process.

    size_of(batch): arrays, tensors, texts and numbers, in containers and in objects' attributes

Of a process worker's batch the packets themselves tell; this is for what crosses as an object.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

SAMPLED = 256  # objects that are looked at where an estimate will do

_MOST = 100_000  # objects that are looked at: more would take longer than most batches
_NUMBER_BYTES = 8
_NUMBERS = frozenset({int, float, bool})
_TEXTS = frozenset({str, bytes, bytearray})
_SERIES = frozenset({tuple, list, set, frozenset, deque})
_FEW = 32  # members; one by one these are as fast
# What these refer to is code, and no part of a batch.
_CODE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)
# How many bytes a pixel of PIL's modes has, in each of its bands; 1 in all others.
_WIDE_MODES = {"I": 4, "F": 4, "I;16": 2, "I;16L": 2, "I;16B": 2}


def size_of(value: object, most: int = _MOST) -> int:
    """Return about how many bytes a batch has, wherever in it they are.

    Counted are what tells its `nbytes` (arrays, tensors), byte strings, texts, numbers and PIL
    images: in dicts, tuples, lists and sets, and in the attributes of other objects, such as
    dataclasses. What is referred to twice counts once. Nothing is copied or iterated over that
    is not a container of Python's.

    Args:
        value: The batch.
        most: How many objects are looked at; of a larger nest the size is that of a part.

    Example:
        >>> import numpy as np
        >>> size_of({"x": np.zeros((4, 8)), "label": [1, 2, 3, 4], "name": "abc"})
        291
    """
    total = 0
    left: list[Any] = [value]
    # By their ids, with the objects: an object that ends here could hand its id to another one.
    seen: dict[int, object] = {}
    while left and most > 0:
        most -= 1
        one = left.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        # By what is most common, and by types as such, since this may run for each batch.
        kind = type(one)
        if kind is dict:
            left += one.values()
        elif kind in _NUMBERS:
            total += _NUMBER_BYTES
        elif kind in _TEXTS:
            total += len(one)
        elif kind in _SERIES:
            own = _plain_bytes(one) if len(one) > _FEW else None
            if own is None:
                left += one
            else:
                total += own
        else:
            own = _own_bytes(one)
            if own is None:
                left += _parts_of(one)
            else:
                total += own
    return total


def _plain_bytes(series: Collection[Any]) -> int | None:
    """Return the bytes of nothing but numbers or texts, of which there may be very many."""
    kinds = set(map(type, series))
    if kinds <= _NUMBERS:
        return _NUMBER_BYTES * len(series)
    return sum(map(len, series)) if kinds <= _TEXTS else None


def _own_bytes(one: Any) -> int | None:
    """Return the bytes of what is looked at as a whole; None of what has parts."""
    try:
        nbytes = one.nbytes
    except Exception:  # a sparse tensor has none, and says so by an error of its own
        return _pixels(one)
    return nbytes if isinstance(nbytes, int) and not _holds_objects(one) else None


def _holds_objects(one: Any) -> bool:
    """Return whether it is an array of references, as collating unequal batches makes them."""
    return getattr(getattr(one, "dtype", None), "hasobject", False) and hasattr(one, "ravel")


def _pixels(one: Any) -> int | None:
    """Return the bytes of an image of PIL's, whose pixels no attribute leads to."""
    image = getattr(sys.modules.get("PIL.Image"), "Image", None)
    if image is None or not isinstance(one, image):
        return None
    width, height = one.size
    return int(width * height * len(one.getbands()) * _WIDE_MODES.get(one.mode, 1))


def _parts_of(one: Any) -> Iterable[Any]:
    if isinstance(one, _CODE):
        return ()
    parts: list[Any] = []
    if isinstance(one, dict):
        parts += dict.values(one)
    elif isinstance(one, types.MappingProxyType):
        parts += one.values()
    elif isinstance(one, (tuple, list, set, frozenset, deque)):
        parts += one
    elif _holds_objects(one):
        parts += one.ravel().tolist()
    elif _is_sparse(one):
        parts += (one._indices(), one._values())
    parts += _attributes_of(one)
    return parts


def _is_sparse(one: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(one, torch.Tensor) and one.layout is torch.sparse_coo


def _attributes_of(one: Any) -> list[Any]:
    """Return what an object keeps, in its `__dict__` and its slots; properties are not asked."""
    found = list(getattr(one, "__dict__", {}).values())
    for kind in type(one).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            # A name with two underscores is kept under another one.
            is_private = name.startswith("__") and not name.endswith("__")
            slot = vars(kind).get(f"_{kind.__name__.lstrip('_')}{name}" if is_private else name)
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    found.append(slot.__get__(one))
                except AttributeError:  # it was not set
                    continue
    return found
