"""A long list of constants in two buffers, which many processes can share.

    a list of paths -> packed() -> PackedList -> pickle protocol 5, buffers out of band -> workers

A list of a million strings is a million objects. Each process that unpickles it has its own copy,
and a forked process copies a page as soon as it counts a reference there. Buffers hold no objects,
so that one copy of them serves all processes.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

# Elements; a shorter list costs each worker less than a tenth of a percent of its memory.
FEWEST = 10_000
# Elements that are pickled together. More take longer to unpickle for one of them, fewer take
# longer to pack.
CHUNK = 16


class PackedList(Sequence[Any]):
    """A list that cannot change, of which single elements are unpickled when they are asked for.

    Elements are unpickled in chunks, and the chunk that was read last is kept for its neighbours.

    Args:
        data: The pickles of all chunks, one after the other.
        ends: End of each chunk in `data`, in bytes: 64-bit integers in a buffer.
        length: Number of elements.

    Example:
        >>> paths = PackedList.of([f"{number:06}.jpg" for number in range(20)])
        >>> len(paths), paths[3], paths[-1], paths[17:]
        (20, '000003.jpg', '000019.jpg', ['000017.jpg', '000018.jpg', '000019.jpg'])
    """

    def __init__(self, data: Any, ends: Any, length: int) -> None:
        self._data = memoryview(data)
        self._ends = memoryview(ends).cast("B").cast("q")
        self._length = length
        # A chunk that was read and its number, in one tuple: other threads may read as well.
        self._last: tuple[int, list[Any]] = (-1, [])

    @classmethod
    def of(cls, items: Sequence[Any]) -> PackedList:
        """Pack the elements of a list or a tuple."""
        starts = range(0, len(items), CHUNK)
        chunks = [pickle.dumps(items[at : at + CHUNK], protocol=5) for at in starts]
        return cls(b"".join(chunks), array("q", accumulate(map(len, chunks))), len(items))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(self._length)[index]]
        # A range knows what is no index, and what a negative one means.
        chunk, at = divmod(range(self._length)[index], CHUNK)
        last = self._last
        if last[0] != chunk:
            self._last = last = chunk, self._chunk(chunk)
        return last[1][at]

    def __iter__(self) -> Any:
        return chain.from_iterable(map(self._chunk, range(len(self._ends))))

    def __repr__(self) -> str:
        return f"<PackedList of {self._length} elements>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        buffers = (self._data, self._ends)
        kind: Any = pickle.PickleBuffer if protocol >= 5 else bytes
        return PackedList, (*map(kind, buffers), self._length)

    def _chunk(self, number: int) -> Any:
        start = self._ends[number - 1] if number else 0
        return pickle.loads(self._data[start : self._ends[number]])


def packed(items: Any) -> Any:
    """Return a long list or tuple of constants packed, and everything else as it is.

    Constants are strings, bytes, numbers, None, paths, and tuples of these.

    Example:
        >>> packed(["a", "b"]), packed([("a.jpg", 1)] * 10_000)
        (['a', 'b'], <PackedList of 10000 elements>)
    """
    if type(items) not in (list, tuple) or len(items) < FEWEST:
        return items
    types = set(map(type, items))
    if tuple in types:
        within = chain.from_iterable(item for item in items if type(item) is tuple)
        types = types - {tuple} | set(map(type, within))
    return PackedList.of(items) if types <= _constants() else items


def _constants() -> set[type]:
    """Return types whose values are alike in each process, and refer to nothing else.

    Not other classes: a class of the main module can only be pickled by value, which is slow.
    """
    # Its import takes milliseconds, also in a fork server, which never needs it.
    import pathlib

    paths = {pathlib.PosixPath, pathlib.PurePosixPath}
    return {str, bytes, int, float, complex, bool, type(None), *paths}
