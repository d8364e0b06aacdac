"""Whether two shards make the same data: their first items, compared by a digest of their arrays.

Most often they do because the generator draws from a `numpy.random.default_rng` that was made
outside of it and was copied to each worker, or because it takes no shard and reads everything.

Decided by the first two items of each shard. They must be alike between shards and differ within
each: shards that begin with the same header are then told from copies, and a stream of one batch
that is repeated, as benchmarks use it, from data. Small items are not compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

_ITEMS = 2  # of each shard
_PATIENCE = 32  # items a shard, on average; some shards may have ended, or be very slow
_LEAST_BYTES = 64  # of arrays in an item
_MOST_BYTES = 64 * 1024  # of one array that are looked at


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


class FirstItems:
    """The first items of each shard; told of one after the other.

    Args:
        shards: How many there are.

    Attributes:
        done: Whether nothing more is to be learnt.

    Example:
        >>> first = FirstItems(shards=2)
        >>> for number in range(2):
        ...     batch = np.full(100, number)
        ...     first.saw(0, batch), first.saw(1, batch)
        (None, None)
        (None, (0, 1))
    """

    def __init__(self, shards: int) -> None:
        self.done = False
        self._left = shards  # whose first items are not all known
        self._budget = _PATIENCE * shards
        self._digests: dict[int, list[bytes | None]] = {}
        self._shards: dict[tuple[bytes, ...], int] = {}

    def saw(self, shard: int, value: object) -> tuple[int, int] | None:
        """Take an item into account; return two shards if they have turned out to be alike."""
        if self.done:
            return None
        self._budget -= 1
        digests = self._digests.setdefault(shard, [])
        twin = None
        if len(digests) < _ITEMS:
            digests.append(digest(value))
            if len(digests) == _ITEMS:
                self._left -= 1
                twin = self._twin_of(shard, digests)
        self.done = twin is not None or not self._left or not self._budget
        return None if twin is None else (twin, shard)

    def _twin_of(self, shard: int, digests: list[bytes | None]) -> int | None:
        known = tuple(one for one in digests if one is not None)
        if len(set(known)) < _ITEMS:  # nothing to compare, or one batch that is repeated
            return None
        first = self._shards.setdefault(known, shard)
        return None if first == shard else first


def digest(value: object) -> bytes | None:
    """Return a digest of an item; None if it is too small, or has something that cannot be read.

    Arrays, tensors and byte strings count, in dicts, tuples, lists and dataclasses; of a large
    array elements that are spread over all of it.
    """
    import hashlib  # only here: OpenSSL takes a while to load, and few need it

    hashed = hashlib.blake2b(digest_size=16)
    try:
        size = _feed(hashed, value)
    except Exception:  # of somebody's class; that it is not compared does no harm
        return None
    return hashed.digest() if size >= _LEAST_BYTES else None


def _feed(hashed: _Hash, value: Any) -> int:
    """Feed a value to a hash; return the bytes of its arrays.

    Raises:
        TypeError: It is of a kind whose content is not known.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        value = np.frombuffer(value, np.uint8)
    if isinstance(value, (str, int, float, complex, type(None))):
        hashed.update(f"{type(value).__name__} {value!r}".encode(errors="replace"))
        return 0
    hashed.update(type(value).__name__.encode())
    if isinstance(value, Mapping):
        return sum(_feed(hashed, key) + _feed(hashed, part) for key, part in value.items())
    if isinstance(value, (tuple, list)):
        return sum(_feed(hashed, part) for part in value)
    if dataclasses.is_dataclass(value):
        return sum(_feed(hashed, getattr(value, at.name)) for at in dataclasses.fields(value))
    if not isinstance(getattr(value, "nbytes", None), int):
        raise TypeError(f"a {type(value).__name__} is not looked into")
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise TypeError("an array of objects is not looked into")
    hashed.update(f"{array.dtype.str} {array.shape}".encode())
    most = max(1, _MOST_BYTES // max(1, array.itemsize))
    hashed.update(array.flat[:: -(-array.size // most) or 1].tobytes())
    return int(array.nbytes)
