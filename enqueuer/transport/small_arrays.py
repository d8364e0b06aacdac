"""Small arrays in a dict, a list or a tuple <-> their bytes, behind a layout.

    Layouts().encode({"x": ..., "y": ...}) -> layout, bytes        decode(layout, bytes) -> the same

The layout names the container, and the shape, dtype and place of each array. It is pickled once
for all items that have it; its bytes stand before those of each item. Pickle writes and looks up
the same names for each item, which takes several times as long.
"""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from enqueuer.transport.item_codec import portable_dtypes
from enqueuer.transport.protocol import INLINE_BYTES

# A larger item goes into a block, as a pickle, which takes three times as long for many arrays.
_MOST_BYTES = INLINE_BYTES
# Arrays of an item share memory up to so many bytes. One that is kept alone wastes no more.
_SHARED_BYTES = 512
# A source of more layouts, such as one of texts of any length, gains nothing.
_MOST_LAYOUTS = 256
# Bytes: enough for every dtype.
_ALIGNMENT = 16

_ndarray = np.ndarray
_Pack = Callable[..., bytes]


class Layouts:
    """Encode items by the layouts that were seen before; for one thread."""

    def __init__(self) -> None:
        # None for items that are left to pickle.
        self._known: dict[tuple[Any, ...], tuple[bytes, _Pack, bool] | None] = {}

    def encode(self, value: Any) -> tuple[bytes, bytes] | None:
        """Return the layout and the bytes of an item; None if pickle is to encode it."""
        container = type(value)
        key: list[Any]
        if container is dict:
            arrays, key = value.values(), [*value]
            for name in key:
                if type(name) is not str:
                    return None
        elif container is tuple or container is list:
            arrays, key = value, [container]
        else:
            return None
        for array in arrays:
            # Pickle keeps a read-only array read-only, and the metadata of a dtype. One that is
            # contiguous needs no strides in the key.
            if type(array) is not _ndarray or not array.flags.carray:
                return None
            dtype = array.dtype
            if dtype.metadata is not None:
                return None
            key += dtype, array.shape
        build = tuple(key)
        try:
            known = self._known[build]
        except KeyError:
            known = self._add(build, value)
        if known is None:
            return None
        layout, pack, are_alike = known
        # Pickle keeps an array that an item holds twice one array.
        if are_alike and len({*map(id, arrays)}) < len(arrays):
            return None
        return layout, pack(*[array.tobytes() for array in arrays])

    def _add(self, build: tuple[Any, ...], value: Any) -> tuple[bytes, _Pack, bool] | None:
        if len(self._known) == _MOST_LAYOUTS:
            return None
        arrays = [*(value.values() if type(value) is dict else value)]
        known = None
        if arrays and all(map(_is_plain, arrays)):
            sizes = [_aligned(array.nbytes) for array in arrays]
            forms = [(array.shape, portable_dtypes[array.dtype]) for array in arrays]
            layout = pickle.dumps((type(value), [*value] if type(value) is dict else None, forms))
            if len(layout) + sum(sizes) <= _MOST_BYTES:
                pack = struct.Struct("".join(f"{size}s" for size in sizes)).pack
                known = layout, pack, len(forms) > len({*forms})
        self._known[build] = known
        return known


def decode(layout: bytes, data: memoryview) -> Any:
    """Return the item that was encoded; its arrays have memory of their own."""
    return _builder(layout)(data)


@functools.lru_cache(_MOST_LAYOUTS)
def _builder(layout: bytes) -> Callable[[memoryview], Any]:
    """Return a function that makes an item of its bytes."""
    container, names, forms = pickle.loads(layout)
    sizes = [math.prod(shape) * np.dtype(form).itemsize for shape, form in forms]
    ends = list(itertools.accumulate(_aligned(size) for size in sizes))
    fields = [f"f{number}" for number in range(len(forms))]
    # A view of a field takes less time than an array that is made of a dtype and a shape.
    record = np.dtype(
        {
            "names": fields,
            "formats": [(form, shape) for shape, form in forms],
            "offsets": [0, *ends[:-1]],
            "itemsize": ends[-1],
        }
    )
    is_shared = ends[-1] <= _SHARED_BYTES

    def arrays(data: memoryview) -> list[np.ndarray]:
        whole = np.ndarray((), record, bytearray(data))
        return [whole[field] if is_shared else whole[field].copy() for field in fields]

    if names is None:
        return arrays if container is list else lambda data: tuple(arrays(data))
    if not is_shared:
        return lambda data: dict(zip(names, arrays(data), strict=True))
    places = list(zip(names, fields, strict=True))

    def mapping(data: memoryview) -> dict[str, np.ndarray]:
        whole = np.ndarray((), record, bytearray(data))
        return {name: whole[field] for name, field in places}

    return mapping


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _is_plain(array: np.ndarray) -> bool:
    """Return whether a contiguous array is known by its bytes, its shape and its dtype's name."""
    return bool(portable_dtypes[array.dtype]) and array.nbytes > 0
