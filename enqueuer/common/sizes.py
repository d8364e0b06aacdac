"""What is an array in memory, and the size of a batch in bytes.

    is_in_memory(array), is_plain_tensor(tensor): whether its bytes can be read where they are
    check_graph(tensor): whether they are all that the tensor is
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
# These refer to code, which is no part of a batch.
_CODE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)
# Bytes of a pixel in each band of PIL's modes; 1 in all others.
_WIDE_MODES = {"I": 4, "F": 4, "I;16": 2, "I;16L": 2, "I;16B": 2}

# Libraries whose arrays are in memory.
_IN_MEMORY = {"numpy", "torch", "pandas", "pyarrow"}


def is_in_memory(array: object) -> bool:
    """Return whether numpy can show an array without reading a file or copying it from a GPU."""
    libraries = {kind.__module__.partition(".")[0] for kind in type(array).__mro__}
    return not libraries.isdisjoint(_IN_MEMORY)


def is_plain_tensor(tensor: Any) -> bool:
    """Return whether a tensor of torch is plain memory of the CPU."""
    return (
        tensor.layout is sys.modules["torch"].strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
    )


def tensor_class() -> Any:
    """Return the class of torch's tensors; an empty tuple if the program has not imported it."""
    # Another thread may be importing torch, which then has no tensors yet.
    return getattr(sys.modules.get("torch"), "Tensor", ())


def check_graph(value: object) -> None:
    """Refuse a tensor that autograd has computed; as a pickle it would silently be a leaf.

    Raises:
        RuntimeError: It requires grad and is no leaf; torch's own pickler raises so, too.
    """
    if isinstance(value, tensor_class()) and value.requires_grad and not value.is_leaf:
        raise RuntimeError(
            "a non-leaf tensor that requires_grad has a graph, which cannot leave its process: "
            "give tensor.detach(), or compute it under torch.no_grad()"
        )


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
        part = left.pop()
        if id(part) in seen:
            continue
        seen[id(part)] = part
        # The most common types come first, and exact types, since this may run for each batch.
        kind = type(part)
        if kind is dict:
            left += part.values()
        elif kind in _NUMBERS:
            total += _NUMBER_BYTES
        elif kind in _TEXTS:
            total += len(part)
        elif kind in _SERIES:
            nbytes = _plain_bytes(part) if len(part) > _FEW else None
            if nbytes is None:
                left += part
            else:
                total += nbytes
        else:
            nbytes = _whole_bytes(part)
            if nbytes is None:
                left += _parts_of(part)
            else:
                total += nbytes
    return total


def _plain_bytes(series: Collection[Any]) -> int | None:
    """Return the bytes of a series of numbers or texts, which may be long; else None."""
    kinds = set(map(type, series))
    if kinds <= _NUMBERS:
        return _NUMBER_BYTES * len(series)
    return sum(map(len, series)) if kinds <= _TEXTS else None


def _whole_bytes(part: Any) -> int | None:
    """Return the bytes of an array or an image; None for an object with parts."""
    try:
        nbytes = part.nbytes
    except Exception:
        # A sparse tensor has none, and raises an error of its own.
        return _pixels(part)
    return nbytes if isinstance(nbytes, int) and not _holds_objects(part) else None


def _holds_objects(part: Any) -> bool:
    """Return whether this is an array of references, as collating unequal batches makes them."""
    return getattr(getattr(part, "dtype", None), "hasobject", False) and hasattr(part, "ravel")


def _pixels(part: Any) -> int | None:
    """Return the bytes of a PIL image, to whose pixels no attribute leads; else None."""
    image = getattr(sys.modules.get("PIL.Image"), "Image", None)
    if image is None or not isinstance(part, image):
        return None
    width, height = part.size
    return int(width * height * len(part.getbands()) * _WIDE_MODES.get(part.mode, 1))


def _parts_of(part: Any) -> Iterable[Any]:
    if isinstance(part, _CODE):
        return ()
    parts: list[Any] = []
    if isinstance(part, dict):
        parts += dict.values(part)
    elif isinstance(part, types.MappingProxyType):
        parts += part.values()
    elif isinstance(part, (tuple, list, set, frozenset, deque)):
        parts += part
    elif _holds_objects(part):
        parts += part.ravel().tolist()
    elif isinstance(part, tensor_class()) and part.layout is sys.modules["torch"].sparse_coo:
        parts += (part._indices(), part._values())
    parts += attributes_of(part).values()
    return parts
