"""Arrays that are made in shared memory, so that yielding them costs no copy.

    in a process worker:  empty() -> a block of shared memory -> yield -> the consumer, uncopied
    anywhere else:        empty() -> numpy.empty()

Only this file holds the function that makes arrays in this process. A worker sets it once, before
it runs any code of the user.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike

from enqueuer.common.objects import OUT_OF_BAND_BYTES

Maker = Callable[[Sequence[SupportsIndex], np.dtype[Any]], np.ndarray]

allocate: Maker | None = None


def empty(shape: SupportsIndex | Iterable[SupportsIndex], dtype: DTypeLike = float) -> np.ndarray:
    """Return an array in shared memory, which a worker process sends without a copy.

    In a worker process, an array of 16 KiB or more lies in shared memory. Fill and yield it, or a
    view of it, alone or inside a batch: it is not copied, and the loop gets an ordinary, writable
    array. In a thread or a plain loop, it is `numpy.empty`, so the same generator works there.

    The array belongs to the generator until it is yielded, and to the loop from then on, so make a
    new one for each batch. The yielded array becomes read-only in the worker: writing to it raises
    `ValueError`. If other views of it exist, to which the generator could still write, the batch
    is copied. (Memoryviews and tensors of the array are not detected: do not keep them.)

    Args:
        shape: Shape of the whole batch, such as `(64, 224, 224, 3)`, or its length.
        dtype: Argument for `numpy.dtype`; float64 by default, as in numpy.

    Returns:
        A writable, C-contiguous array; its contents are undefined.

    Raises:
        BlockMemoryError: Shared memory of that size could not be allocated; also a MemoryError.

    Example:
        >>> def batches(shard):
        ...     for number in shard.split(range(4)):
        ...         batch = empty((64, 1000), "float32")
        ...         batch[:] = number
        ...         yield batch
        >>> from enqueuer import prefetch
        >>> [float(batch.mean()) for batch in prefetch(batches, backend="process")]
        [0.0, 1.0, 2.0, 3.0]
    """
    kind = np.dtype(dtype)
    lengths = tuple(shape) if isinstance(shape, Iterable) else (operator.index(shape),)
    # Small arrays are cheaper to copy. For a negative length, numpy raises its own error.
    is_large = math.prod(map(int, lengths)) * kind.itemsize >= OUT_OF_BAND_BYTES
    if allocate is None or kind.hasobject or not is_large:
        return np.empty(lengths, kind)
    return allocate(lengths, kind)


def empty_like(prototype: Any, dtype: DTypeLike | None = None) -> np.ndarray:
    """Return `empty(prototype.shape, dtype or prototype.dtype)`.

    Args:
        prototype: Array, or an argument for `numpy.asarray`.
        dtype: Dtype of the result; None, the default, is that of the prototype.

    Raises:
        BlockMemoryError: As for `empty`.

    Example:
        >>> empty_like([[1.5, 2.5]]).shape
        (1, 2)
    """
    array = np.asarray(prototype)
    return empty(array.shape, array.dtype if dtype is None else dtype)


def set_maker(maker: Maker) -> None:
    """Make `empty` call `maker` for large arrays, in this process only."""
    global allocate
    allocate = maker


def _forget() -> None:
    global allocate
    allocate = None


# A process that the generator forks must not fill the blocks of its parent.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
