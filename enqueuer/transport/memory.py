"""Shared memory without a name, and files of it that carry data to another process.

A memfd where the system has one, elsewhere an unlinked temporary file. So nothing appears in
/dev/shm, and a process that is killed leaves nothing behind.

A file with a payload, which is what all worker processes load, has a pickle and large buffers
beside it:

    number of parts | size of each | the pickle | a buffer | a buffer | ...

All workers map the same memory. A buffer is private to a worker once the worker writes to it: the
kernel then copies that page. So each worker reads a dataset in arrays without a copy of its own.

Any thread may call anything.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Sequence
from typing import Any

from enqueuer.common.descriptors import is_portable
from enqueuer.errors import BlockMemoryError

# Before Python 3.13 each mapping keeps a descriptor, of which a process may have 1024.
MAP_OPTIONS: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}

# Whether the system has refused a memfd, as it will again.
_is_refused = False
# Errors for a lack of what a temporary file would need as well.
_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}

# Bytes of each number at the head of a payload.
_NUMBER_BYTES = 8
# Bytes to which each part of a payload is aligned: arrays of any type, and a cache line.
_ALIGNMENT = 64


def open_nameless(size: int) -> int:
    """Return a descriptor of `size` bytes of memory that has no name.

    The memory is reserved now, so that a lack of it is an error here and no bus error later.

    Raises:
        OSError: There is no room, or no descriptor left.
    """
    fd = _new_memfd()
    if fd is None:
        # Most systems do not need it, and its import takes some milliseconds of a first start.
        import tempfile

        fd, path = tempfile.mkstemp(prefix=f"enqueuer-{os.getpid()}-")
        os.unlink(path)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
        else:
            _write_zeros(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def _new_memfd() -> int | None:
    """Return a new memfd; None where there are none: elsewhere than on Linux, or in a sandbox.

    Raises:
        OSError: There is no room, or no descriptor left.
    """
    global _is_refused
    if not _has_memfd():
        return None
    try:
        return os.memfd_create("enqueuer", os.MFD_CLOEXEC)
    except OSError as error:
        if error.errno in _SHORTAGES:
            raise
        _is_refused = True
        return None


def _has_memfd() -> bool:
    return hasattr(os, "memfd_create") and not _is_refused and not is_portable()


def _write_zeros(fd: int, size: int) -> None:
    zeros = bytes(1 << 20)
    for offset in range(0, size, len(zeros)):
        os.pwrite(fd, zeros[: size - offset], offset)


def remove_names_of(pid: int) -> None:
    """Remove the files of a process that was killed before it could unlink them."""
    if not _has_memfd():
        import tempfile

        folder = tempfile.gettempdir()
        for name in os.listdir(folder):
            if name.startswith(f"enqueuer-{pid}-"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, name))


def map_shared(fd: int, size: int) -> mmap.mmap:
    """Map the memory behind a descriptor, which stays the caller's.

    Raises:
        OSError: There is no address space or no descriptor left.
    """
    return mmap.mmap(fd, size, **MAP_OPTIONS)


def nameless_file(data: bytes) -> int:
    """Return a descriptor of nameless memory that holds `data`.

    Raises:
        BlockMemoryError: There is no room, or no descriptor left.
    """
    try:
        fd = open_nameless(len(data))
    except OSError as error:
        raise allocation_error(len(data), error) from error
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    return fd


def read_whole(data: bytes, fds: list[int]) -> bytes:
    """Return what came in a packet, or beside it in a nameless file; close the descriptors."""
    try:
        for fd in fds:
            # Mapped, since reading would move the offset that all copies of a descriptor share.
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
                data = memory[:]
        return data
    finally:
        close_all(fds)


def close_all(fds: list[int]) -> None:
    """Close descriptors and remove them from the list. Idempotent."""
    while fds:
        os.close(fds.pop())


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


def allocation_error(size: int, error: OSError) -> BlockMemoryError:
    """Return the error for memory of `size` bytes that the system refused."""
    # Not "0.0 MB".
    what = f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size:,} bytes"
    return BlockMemoryError(
        f"could not allocate {what} of shared memory ({error}); the system is out of "
        "memory or descriptors: try smaller batches, a smaller max_queue_size or fewer workers"
    )
