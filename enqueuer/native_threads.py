"""How many threads native libraries run in a worker process: OpenMP, BLAS, torch, OpenCV.

    spawn         environment variables, which a library reads when it is loaded
    forkserver    the same; the BLAS of numpy, which the server has loaded, by a call in the child
    fork          the same; each library that the parent has loaded, by a call in the child

Without a limit each of n workers runs as many threads as there are CPUs, so that they take the
CPUs from each other. Idle threads sleep instead of spinning. Nothing here is changed in the
process of the training loop.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from threadpoolctl import ThreadpoolController

# By the name that threadpoolctl has for a library.
_VARIABLE_OF = {
    "openmp": "OMP_NUM_THREADS",
    "openblas": "OPENBLAS_NUM_THREADS",
    "mkl": "MKL_NUM_THREADS",
    "blis": "BLIS_NUM_THREADS",
}
VARIABLES = (
    *_VARIABLE_OF.values(),
    "NUMEXPR_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
    "VECLIB_MAXIMUM_THREADS",  # of Accelerate, on macOS
)
# Idle threads spin by default: OpenMP's for milliseconds, OpenBLAS's for about 25 ms. On a CPU that
# other processes want, that keeps the very thread waiting that the others wait for.
_SHORT_SPINNING = {
    "OMP_WAIT_POLICY": "PASSIVE",
    # GNU's OpenMP, which torch uses: about 10 us, as if there were more threads than CPUs. With 0,
    # which PASSIVE means, resizing images with torch by two threads took 1.5 times as long, as
    # each image wakes them.
    "GOMP_SPINCOUNT": "1000",
    "OPENBLAS_THREAD_TIMEOUT": "4",  # log2 of CPU cycles, the least that it takes
}


def short_spinning(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that have idle native threads sleep soon.

    Args:
        environ: Environment of the process of the training loop. What it says is kept; GNU's
            OpenMP would take `GOMP_SPINCOUNT` rather than an `OMP_WAIT_POLICY` that it has.
    """
    idle = {name: environ.get(name, value) for name, value in _SHORT_SPINNING.items()}
    if "OMP_WAIT_POLICY" in environ and "GOMP_SPINCOUNT" not in environ:
        del idle["GOMP_SPINCOUNT"]
    return idle


def limits(threads: int, is_given: bool, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that limit the native threads of a worker process.

    Args:
        threads: Number of threads that each library may run.
        is_given: Whether the user gave this number. If not, what `environ` says is kept, and its
            `OMP_NUM_THREADS`, which most libraries read, counts for all that it does not name.
        environ: Environment of the process of the training loop.

    Example:
        >>> some = limits(4, False, {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "3"})
        >>> some["OMP_NUM_THREADS"], some["MKL_NUM_THREADS"], some["OPENBLAS_NUM_THREADS"]
        ('2', '3', '2')
    """
    idle = short_spinning(environ)
    if is_given:
        return dict.fromkeys(VARIABLES, str(threads)) | idle
    others = _number(environ.get("OMP_NUM_THREADS"), threads)
    return {name: environ.get(name, str(others)) for name in VARIABLES} | idle


def limit_loaded() -> None:
    """Have the libraries that this process has loaded obey its environment.

    Called in a fresh interpreter, and in a child of the fork server, whose libraries have never
    run a thread.
    """
    if all(os.environ.get(name) == "1" for name in VARIABLES):
        return  # as they were loaded
    for library in ThreadpoolController().lib_controllers:
        library.set_num_threads(_limit_of(library))


class Loaded:
    """The libraries that this process has loaded, to be limited in a child that it forks.

    They are looked for here because the child must not wait for the lock of the dynamic loader,
    which another thread may hold when the process is forked.
    """

    def __init__(self) -> None:
        self._libraries = ThreadpoolController().lib_controllers

    def limit(self) -> None:
        """Have them obey the environment of this process, which was forked.

        The child has none of its parent's threads. OpenBLAS starts its own anew. OpenMP and
        OpenCV wait for ever for those that their pools had, unless they run on one thread.
        """
        for library in self._libraries:
            survives = getattr(library, "threading_layer", "") == "pthreads"
            limit = _limit_of(library) if survives else 1
            if library.num_threads > limit:
                library.set_num_threads(limit)
                # OpenBLAS has started its threads for this call, and they spin for 25 ms or more.
                # This is what it calls itself before a fork; it starts threads again when it needs
                # them.
                end_threads = getattr(library.dynlib, "blas_thread_shutdown_", None)
                if end_threads is not None:
                    end_threads()
        torch, cv2 = sys.modules.get("torch"), sys.modules.get("cv2")
        if torch is not None and hasattr(torch, "set_num_threads"):
            torch.set_num_threads(1)
        if cv2 is not None and hasattr(cv2, "setNumThreads"):
            cv2.setNumThreads(0)  # not 1, which would wait for the pool's threads to end


def _limit_of(library: Any) -> int:
    variable = _VARIABLE_OF.get(library.internal_api, "OMP_NUM_THREADS")
    return _number(os.environ.get(variable), 1)


def _number(value: str | None, default: int) -> int:
    """Return the first number of "4" or "4,2"; the default if there is none."""
    found = re.match(r"\s*([1-9]\d*)", value or "")
    return int(found[1]) if found else default
