"""Finding shards that make the same data, and items that were changed after they were yielded.

Shards often make the same data if the generator draws from a `numpy.random.default_rng` that was
made outside of it and copied to each worker, or if it takes no shard and reads everything.

The first items of each shard decide: at least two, with 128 bytes together. If the function takes
the shard, they must have 1 KiB, as its shards may begin with the same lines or with an idle
sensor. The items must be alike between shards and differ within each shard. So a common header
does not count as a copy, nor does a stream that repeats one batch, as in a benchmark. Shorter
beginnings are not compared, as they may be alike by chance, but for integers and texts, such as
indices and paths, of which the first 16 all differ from each other, and for shards that end after
at least four items, which all differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Set
from typing import Any

import numpy as np

from enqueuer.common.objects import attributes_of, is_in_memory

# Items of each shard that are compared.
_LEAST_ITEMS = 2
_MAX_ITEMS = 16
# Items of a shard that had no more; all of them differ.
_LEAST_OF_ENDED = 4
# Bytes of the items of a shard together, if the function takes no shard; and if it takes one.
_LEAST_BYTES = 128
_LEAST_BYTES_OF_SHARDS = 1024
# Items a shard, on average, until comparing ends; some shards may have ended, or be very slow.
_ITEM_BUDGET = 32
# Bytes of one array, or text, that are read.
_MAX_BYTES = 64 * 1024
# Values of one item, in all its containers, that are read.
_MAX_VALUES = 4096
# Batches of a worker whose first sample is looked at again when they are complete.
_WATCHED_BATCHES = 16
# Levels of containers; an item with more may contain itself.
_MAX_DEEP = 16

Digest = tuple[int, int]
"""A number that differs between items that differ, and the size of the item in bytes."""


class FirstItems:
    """The first items of each shard, which are added one after the other.

    Args:
        shards: Number of shards.
        takes_shard: Whether the function takes the shard, so that more bytes must be alike.

    Attributes:
        takes_shard: Whether the function takes the shard.
        done: Whether no further item is needed.

    Example:
        >>> first = FirstItems(shards=2)
        >>> for number in range(2):
        ...     batch = np.full(100, number)
        ...     first.saw(0, batch), first.saw(1, batch)
        (None, None)
        (None, (0, 1))
    """

    def __init__(self, shards: int, takes_shard: bool = False) -> None:
        self.done = False
        self.takes_shard = takes_shard
        self._least_bytes = _LEAST_BYTES_OF_SHARDS if takes_shard else _LEAST_BYTES
        # Number of shards whose first items have not all come.
        self._remaining = shards
        self._budget = _ITEM_BUDGET * shards
        self._beginnings: dict[int, _Beginning] = {}
        self._shards: dict[tuple[int, ...], int] = {}

    def saw(self, shard: int, value: object) -> tuple[int, int] | None:
        """Add an item; return two shards if these have turned out to be alike."""
        if self.done:
            return None
        self._budget -= 1
        beginning = self._beginnings.setdefault(shard, _Beginning(self._least_bytes))
        twin = shard
        if not beginning.is_known:
            beginning.add(value)
            self._remaining -= beginning.is_known
            if beginning.is_comparable:
                twin = self._shards.setdefault(tuple(beginning.digests), shard)
        self.done = twin != shard or not self._remaining or not self._budget
        return None if twin == shard else (twin, shard)

    def ended(self) -> tuple[int, int] | None:
        """Return two shards that have ended and were alike, though short; None if none were."""
        shards: dict[tuple[int, ...], int] = {}
        for shard, beginning in self._beginnings.items():
            items = tuple(beginning.digests)
            is_sure = not beginning.is_known and len(items) == len(set(items)) >= _LEAST_OF_ENDED
            if is_sure and (twin := shards.setdefault(items, shard)) != shard:
                return twin, shard
        return None


class _Beginning:
    """The digests of a shard's first items, until these distinguish it from others.

    Attributes:
        digests: The digests.
        is_known: Whether no further item is needed.
        is_comparable: Whether the items hold enough, and are not one batch that is repeated.
    """

    def __init__(self, least_bytes: int) -> None:
        self.digests: list[int] = []
        self._least_bytes = least_bytes
        self.is_known = self.is_comparable = False
        self._size = 0
        # Whether all are integers or texts.
        self._are_plain = True

    def add(self, value: object) -> None:
        self._are_plain = self._are_plain and isinstance(value, (int, str))
        found = None if isinstance(value, (float, complex)) else digest(value)
        if found is None:
            # Such a shard is not compared.
            self.is_known = True
            return
        self.digests.append(found[0])
        self._size += found[1]
        count, different = len(self.digests), len(set(self.digests))
        is_long = count >= _LEAST_ITEMS and self._size >= self._least_bytes
        self.is_known = is_long or count == _MAX_ITEMS
        are_different = self._are_plain and different == _MAX_ITEMS
        self.is_comparable = are_different or (is_long and different > 1)


class SampleWatch:
    """Look whether the first sample of a batch changes while the others are made.

    A generator with one buffer, or a few, has then written to it again. Samples that are the same
    object, as a mask that all have, do not change. Only the first batches are looked at.

    Example:
        >>> watch, buffer = SampleWatch(), np.zeros(4)
        >>> seen = watch.look(buffer)
        >>> buffer[0] = 7
        >>> watch.has_changed(seen, buffer)
        True
    """

    def __init__(self) -> None:
        self._remaining = _WATCHED_BATCHES

    def look(self, sample: object) -> Digest | None:
        """Return what is to be given to `has_changed`; None: the batch is not looked at."""
        if not self._remaining:
            return None
        self._remaining -= 1
        return digest(sample)

    def has_changed(self, seen: Digest | None, sample: object) -> bool:
        """Return whether a sample is not what it was; True at most once."""
        has_changed = seen is not None and digest(sample) not in (seen, None)
        if has_changed:
            self._remaining = 0
        return has_changed


def digest(value: object) -> Digest | None:
    """Return a digest of an item; None if it cannot be read.

    Numbers, texts, arrays, tensors and byte strings count, in dicts, tuples, lists, sets and
    objects with attributes. Of a large value, only samples from all over it are read. Digests of
    other processes are not comparable.
    """
    found = size = 0
    try:
        for content, nbytes in itertools.islice(_contents(value), _MAX_VALUES):
            found, size = hash((found, content)), size + nbytes
    except Exception:
        # A class of the user may raise anything. Such items are not compared.
        return None
    return found, size


def _contents(value: Any, depth: int = 0) -> Iterator[tuple[Hashable, int]]:
    """Yield what is read of each value in a nest, and its size in bytes.

    Raises:
        TypeError: A value is of a kind whose content is not known.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        value = np.frombuffer(value, np.uint8)
    kind = type(value).__name__
    if isinstance(value, str):
        yield (len(value), value[:: -(-len(value) // _MAX_BYTES) or 1]), len(value)
    elif isinstance(value, (int, float, complex, type(None))):
        yield f"{kind} {value!r}", 0 if value is None else 8
    elif isinstance(getattr(value, "nbytes", None), int):
        yield (kind, *_array_content(value)), int(value.nbytes)
    elif depth == _MAX_DEEP:
        raise TypeError("this is nested too deeply")
    else:
        parts = _parts_of(value)
        yield (kind, len(parts)), 0
        # Samples from all over a large one.
        for part in parts[:: -(-len(parts) // _MAX_VALUES) or 1]:
            yield from _contents(part, depth + 1)


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, Set):
        return sorted(value)
    if isinstance(value, (tuple, list)):
        return list(value)
    parts = value if isinstance(value, Mapping) else attributes_of(value)
    if not parts and not isinstance(value, Mapping):
        raise TypeError("the content of this object is not known")
    return list(itertools.chain.from_iterable(parts.items()))


def _array_content(value: Any) -> tuple[Hashable, ...]:
    if value.nbytes > _MAX_BYTES and not is_in_memory(value):
        raise TypeError("an array of another library may lie in a file, or on a GPU")
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise TypeError("the objects of an array are not read")
    most = max(1, _MAX_BYTES // max(1, array.itemsize))
    return array.dtype.str, array.shape, array.flat[:: -(-array.size // most) or 1].tobytes()
