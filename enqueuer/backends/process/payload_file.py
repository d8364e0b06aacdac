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
from collections.abc import Sequence

from enqueuer.transport.memory import MAP_OPTIONS, open_nameless

_NUMBER_BYTES = 8
# Bytes to which each part is aligned: arrays of any type, and a cache line.
_ALIGNMENT = 64


def write_payload(pickled: bytes, buffers: Sequence[pickle.PickleBuffer]) -> int:
    """Write a pickle and its buffers to a nameless file; return its descriptor.

    Raises:
        OSError: There is no room, or no descriptor left.
    """
    parts = [memoryview(pickled), *(buffer.raw() for buffer in buffers)]
    sizes = [part.nbytes for part in parts]
    places = _places(sizes)
    fd = open_nameless(places[-1] + sizes[-1])
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(struct.pack(f"<{1 + len(sizes)}q", len(sizes), *sizes))
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
    (count,) = struct.unpack_from("<q", memory)
    sizes = struct.unpack_from(f"<{count}q", memory, _NUMBER_BYTES)
    parts = [
        memory[place : place + size] for place, size in zip(_places(sizes), sizes, strict=True)
    ]
    return parts[0], parts[1:]


def _places(sizes: Sequence[int]) -> list[int]:
    """Return where each part begins."""
    places, end = [], _NUMBER_BYTES * (1 + len(sizes))
    for size in sizes:
        places.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = places[-1] + size
    return places
