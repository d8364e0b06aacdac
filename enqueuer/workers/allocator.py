"""Keeping freed memory in a worker process, instead of returning it to the system.

By default glibc returns a large block of memory to the system as soon as it is freed. A worker
frees arrays of the same sizes for each batch, so the system maps the same pages, and fills them
with zeros, again and again. Other processes return less, as a small block usually lies above the
freed ones on their heap.
"""

from __future__ import annotations

import ctypes
import os
import sys

KEPT_BYTES = 256 << 20

# Numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")

# Found at import, since in a forked child another thread may have left the dynamic loader locked.
# musl and macOS have no such function.
mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None


def keep_freed_memory() -> None:
    """Make the C library keep up to `KEPT_BYTES` of freed memory in this process.

    It serves allocations of up to this size from its heap, and returns memory to the system when
    more than this is free at the heap's end. Several threads that allocate have several heaps
    (arenas), each with this limit. An environment that sets one of these limits is left alone.

    Source: mallopt(3), `M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD`.
    """
    is_set = any(name in os.environ for name in VARIABLES)
    if mallopt is None or is_set or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return
    if mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES):
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
