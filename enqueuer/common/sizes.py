"""Measuring the size of a batch in bytes, for all limits and statistics in this process.

    size_of(batch): arrays, tensors, texts and numbers, in containers and in objects' attributes

Batches of worker processes are measured by their packets. This file is for batches that are
passed as objects.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

from enqueuer.common.trees import attributes_of

# Smaller buffers are cheaper inside the pickle of an item than beside it.
OUT_OF_BAND_BYTES = 16 * 1024

# Objects that are counted for an estimate.
SAMPLED = 256

# Objects that are counted: more would take longer than most batches.
_MOST = 100_000
_NUMBER_BYTES = 8
_NUMBERS = frozenset({int, float, bool})
_TEXTS = frozenset({str, bytes, bytearray})
_SERIES = frozenset({tuple, list, set, frozenset, deque})
# Members of a container; so few take no longer one by one.
_FEW = 32
# What these refer to is code, and no part of a batch.
_CODE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)
# Bytes of a pixel in each band of PIL's modes; 1 in all others.
_WIDE_MODES = {"I": 4, "F": 4, "I;16": 2, "I;16L": 2, "I;16B": 2}


def size_of(value: object, most: int = _MOST) -> int:
    """Return the approximate size of a batch in bytes, with all that it contains.

    Objects with `nbytes` (arrays, tensors), byte strings, texts, numbers and PIL images count: in
    dicts, tuples, lists and sets, and in the attributes of other objects, such as dataclasses.
    An object that is referred to twice counts once. Nothing is copied, and only built-in
    containers are iterated over.

    Args:
        value: Batch of any structure.
        most: Largest number of objects that are counted; the rest of a larger nest is left out.

    Example:
        >>> import numpy as np
        >>> size_of({"x": np.zeros((4, 8)), "label": [1, 2, 3, 4], "name": "abc"})
        291
    """
    total = 0
    left: list[Any] = [value]
    # The objects are kept with their ids, since a new object could get the id of a freed one.
    seen: dict[int, object] = {}
    while left and most > 0:
        most -= 1
        one = left.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        # The most common types come first, and exact types, since this may run for each batch.
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
    """Return the bytes of a series of numbers or texts, which may be long; else None."""
    kinds = set(map(type, series))
    if kinds <= _NUMBERS:
        return _NUMBER_BYTES * len(series)
    return sum(map(len, series)) if kinds <= _TEXTS else None


def _own_bytes(one: Any) -> int | None:
    """Return the bytes of an array or an image; None for an object with parts."""
    try:
        nbytes = one.nbytes
    except Exception:
        # A sparse tensor has none, and raises an error of its own.
        return _pixels(one)
    return nbytes if isinstance(nbytes, int) and not _holds_objects(one) else None


def _holds_objects(one: Any) -> bool:
    """Return whether this is an array of references, as collating unequal batches makes them."""
    return getattr(getattr(one, "dtype", None), "hasobject", False) and hasattr(one, "ravel")


def _pixels(one: Any) -> int | None:
    """Return the bytes of a PIL image, to whose pixels no attribute leads; else None."""
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
    parts += attributes_of(one).values()
    return parts


def _is_sparse(one: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(one, torch.Tensor) and one.layout is torch.sparse_coo
