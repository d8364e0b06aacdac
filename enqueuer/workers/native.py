"""Setting up native code in a worker process: the allocator of the C library, and threads.

By default glibc returns a large block of memory to the system as soon as it is freed. A worker
frees arrays of the same sizes for each batch, so the system maps the same pages, and fills them
with zeros, again and again. So a worker keeps freed memory. Other processes return less, as a
small block usually lies above the freed ones on their heap.

The threads of OpenMP, BLAS, torch and OpenCV are limited:

    spawn         environment variables, which a library reads when it is loaded
    forkserver    the same; the BLAS of numpy, which the server has loaded, by a call in the child
    fork          the same; each library that the parent has loaded, by a call in the child

Without a limit each worker runs as many threads as there are CPUs, and the workers compete for
the CPUs. The same variables let idle threads sleep instead of spinning. The process of the
training loop stays as it is.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

RETAINED_BYTES = 256 << 20

# Numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")

# Found at import, since in a forked child another thread may have left the dynamic loader locked.
# musl and macOS have no such function.
mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None

# The variable of each library, by the name that threadpoolctl has for it.
_VARIABLE_OF = {
    "openmp": "OMP_NUM_THREADS",
    "openblas": "OPENBLAS_NUM_THREADS",
    "mkl": "MKL_NUM_THREADS",
    "blis": "BLIS_NUM_THREADS",
}
THREAD_VARIABLES = (
    *_VARIABLE_OF.values(),
    "NUMEXPR_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
    # For Accelerate, on macOS.
    "VECLIB_MAXIMUM_THREADS",
)
# By default idle threads spin: OpenMP's for milliseconds, OpenBLAS's for about 25 ms. Where other
# processes want the same CPU, a spinning thread can delay the very thread that it waits for.
_SHORT_SPINNING = {
    "OMP_WAIT_POLICY": "PASSIVE",
    # For GNU's OpenMP, which torch uses: about 10 us, as if there were more threads than CPUs.
    # PASSIVE means 0. With 0, resizing images with torch by two threads took 1.5 times as long,
    # since each image had to wake them.
    "GOMP_SPINCOUNT": "1000",
    # Logarithm to the base 2 of CPU cycles; OpenBLAS accepts no lower value.
    "OPENBLAS_THREAD_TIMEOUT": "4",
}


def keep_freed_memory() -> None:
    """Make the C library keep up to `RETAINED_BYTES` of freed memory in this process.

    It serves allocations of up to this size from its heap, and returns memory to the system when
    more than this is free at the heap's end. Several threads that allocate have several heaps
    (arenas), each with this limit. An environment that sets one of these limits is left alone.

    Source: mallopt(3), `M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD`.
    """
    is_set = any(name in os.environ for name in MALLOC_VARIABLES)
    if mallopt is None or is_set or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return
    if mallopt(_M_MMAP_THRESHOLD, RETAINED_BYTES):
        mallopt(_M_TRIM_THRESHOLD, RETAINED_BYTES)


def short_spinning(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that let idle native threads sleep soon.

    Args:
        environ: Environment of the process of the training loop. Its values are kept. If it has
            `OMP_WAIT_POLICY` alone, `GOMP_SPINCOUNT` is left out: GNU's OpenMP would prefer it.
    """
    idle = {name: environ.get(name, value) for name, value in _SHORT_SPINNING.items()}
    if "OMP_WAIT_POLICY" in environ and "GOMP_SPINCOUNT" not in environ:
        del idle["GOMP_SPINCOUNT"]
    return idle


def limits(threads: int, is_explicit: bool, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that limit the native threads of a worker process.

    Args:
        threads: Number of threads that each library may run.
        is_explicit: Whether the user gave this number. If not, the values of `environ` are kept.
            Its `OMP_NUM_THREADS`, which most libraries read, then counts for all variables that
            it does not have.
        environ: Environment of the process of the training loop.

    Example:
        >>> some = limits(4, False, {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "3"})
        >>> some["OMP_NUM_THREADS"], some["MKL_NUM_THREADS"], some["OPENBLAS_NUM_THREADS"]
        ('2', '3', '2')
    """
    idle = short_spinning(environ)
    if is_explicit:
        return dict.fromkeys(THREAD_VARIABLES, str(threads)) | idle
    fallback = _number(environ.get("OMP_NUM_THREADS"), threads)
    return {name: environ.get(name, str(fallback)) for name in THREAD_VARIABLES} | idle


def limit_loaded() -> None:
    """Limit the libraries that this process has loaded, by its environment.

    Called in a fresh interpreter and in a child of the fork server. Their libraries have never
    run a thread.
    """
    # Then the libraries were loaded with this limit.
    if all(os.environ.get(name) == "1" for name in THREAD_VARIABLES):
        return
    for library in _libraries():
        library.set_num_threads(_limit_of(library, os.environ))


class Loaded:
    """The libraries that this process has loaded, to be limited in a child that it forks.

    The parent finds them. The child must not search: it would wait for the lock of the dynamic
    loader, which another thread may hold when the process is forked.

    Args:
        environ: Variables that limit the child.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        # For each library: the library, its limit, and its own variable for that.
        self._limits: list[tuple[Any, int, ctypes.c_int | None]] = []
        for library in _libraries():
            survives = getattr(library, "threading_layer", "") == "pthreads"
            limit = _limit_of(library, environ) if survives else 1
            self._limits.append((library, limit, _variable_in(library) if survives else None))

    def limit(self) -> None:
        """Limit them in this process, which was forked.

        The child has none of its parent's threads. OpenBLAS starts its own anew. OpenMP and
        OpenCV wait forever for the threads of their pools, unless they run on one thread.
        """
        for library, limit, variable in self._limits:
            if variable is not None:
                variable.value = min(limit, variable.value)
            elif library.num_threads > limit:
                library.set_num_threads(limit)
                # OpenBLAS has started its threads for this call, and they spin for 25 ms or more.
                # It calls this function itself before a fork, and starts threads again when it
                # needs them.
                end_threads = getattr(library.dynlib, "blas_thread_shutdown_", None)
                if end_threads is not None:
                    end_threads()
        torch, cv2 = sys.modules.get("torch"), sys.modules.get("cv2")
        if torch is not None and hasattr(torch, "set_num_threads"):
            torch.set_num_threads(1)
        if cv2 is not None and hasattr(cv2, "setNumThreads"):
            # With 1, OpenCV would wait for the threads of its pool to end.
            cv2.setNumThreads(0)


def _variable_in(library: Any) -> ctypes.c_int | None:
    """Return the variable of OpenBLAS with its number of threads; None if there is none.

    To store the number suffices while no thread of OpenBLAS runs, as in a forked child. The
    function for it starts all threads first. On a busy machine this takes milliseconds, as does
    the wait for their end.
    """
    try:
        variable = ctypes.c_int.in_dll(library.dynlib, "blas_cpu_number")
    except (ValueError, AttributeError):
        return None
    # With another number, the name is that of another library.
    return variable if variable.value == library.num_threads else None


def _libraries() -> list[Any]:
    """Return the native libraries with threads that this process has loaded."""
    # Where each library has one thread, as in most workers, the import is not needed.
    from threadpoolctl import ThreadpoolController

    found: list[Any] = ThreadpoolController().lib_controllers
    return found


def _limit_of(library: Any, environ: Mapping[str, str]) -> int:
    variable = _VARIABLE_OF.get(library.internal_api, "OMP_NUM_THREADS")
    return _number(environ.get(variable), 1)


def _number(value: str | None, default: int) -> int:
    """Return the first number of a value such as "4" or "4,2"; the default if it has none."""
    found = re.match(r"\s*([1-9]\d*)", value or "")
    return int(found[1]) if found else default
