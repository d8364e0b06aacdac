"""The payload of worker processes in a nameless file: a pickle, and large buffers beside it.

    number of parts | size of each | the pickle | a buffer | a buffer | ...

All workers map the same memory. A buffer is private to a worker once the worker writes to it: the
kernel then copies that page. So each worker reads a dataset in arrays without a copy of its own.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate

from enqueuer.transport.memory import MAP_OPTIONS, open_nameless

_NUMBER = struct.Struct("<q")
# Bytes to which each part is aligned: arrays of any type, and a cache line.
_ALIGNMENT = 64


def write_payload(pickled: bytes, buffers: Sequence[pickle.PickleBuffer]) -> int:
    """Write a pickle and its buffers to a nameless file; return its descriptor.

    Raises:
        OSError: There is no room, or no descriptor left.
    """
    parts = [memoryview(pickled), *(buffer.raw() for buffer in buffers)]
    sizes = [part.nbytes for part in parts]
    places = list(_places(sizes))
    fd = open_nameless(places[-1] + sizes[-1])
    try:
        with open(fd, "wb", closefd=False) as file:
            for number in (len(sizes), *sizes):
                file.write(_NUMBER.pack(number))
            for place, part in zip(places, parts, strict=True):
                file.seek(place)
                file.write(part)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_payload(fd: int) -> tuple[memoryview, list[memoryview]]:
    """Map a payload; return its pickle and its buffers, and close the descriptor."""
    try:
        # Not ACCESS_READ: pickle would make arrays of it that cannot be written to.
        memory = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY, **MAP_OPTIONS))
    finally:
        os.close(fd)
    (count,) = _NUMBER.unpack_from(memory)
    sizes = [_NUMBER.unpack_from(memory, _NUMBER.size * at)[0] for at in range(1, count + 1)]
    parts = [
        memory[place : place + size] for place, size in zip(_places(sizes), sizes, strict=True)
    ]
    return parts[0], parts[1:]


def _places(sizes: Sequence[int]) -> Iterator[int]:
    """Yield where each part begins."""
    head = _NUMBER.size * (1 + len(sizes))
    ends = accumulate(map(_aligned, sizes), initial=_aligned(head))
    return (end for end, _ in zip(ends, sizes, strict=False))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
