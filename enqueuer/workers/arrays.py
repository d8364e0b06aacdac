"""Arrays that are made in shared memory, so that yielding them costs no copy.

    in a process worker:  empty() -> a block of shared memory -> yield -> the consumer, uncopied
    anywhere else:        empty() -> numpy.empty()
    [result, result, ..]  --stack()--> such arrays with a new first axis, in containers as they were

Only this file holds the function that makes arrays in this process. A worker sets it once, before
it runs any code of the user.
"""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike

from enqueuer.common.objects import (
    OUT_OF_BAND_BYTES,
    columns_of,
    is_plain_tensor,
    tensor_class,
    with_members,
)

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


# --- stacking -------------------------------------------------------------------------------------

_layout_of = operator.attrgetter("__class__", "dtype", "requires_grad")
_dtype_of = operator.attrgetter("dtype")
_shape_of = operator.attrgetter("shape")
_ARRAYS = {np.ndarray}


def stack(results: list[Any]) -> Any:
    """Make one batch of results: arrays and numbers are stacked along a new first axis.

    The members of mappings, tuples, lists and dataclasses are stacked one by one, and the
    containers keep their class. Objects other than arrays, tensors and numbers stay in a list. So
    do all results if one of them is None. Python integers become int64, or uint64 if they need
    it; those that neither holds stay in a list.

    Args:
        results: Results of one batch, all of the same structure.

    Raises:
        ValueError: Arrays differ in shape; the message names their key.
        RuntimeError: Tensors do.

    Example:
        >>> stack([{"x": 1.0, "name": "a"}, {"x": 2.0, "name": "b"}])
        {'x': array([1., 2.]), 'name': ['a', 'b']}
    """
    first = results[0]
    kinds = set(map(type, results))
    if kinds == _ARRAYS:
        return stack_arrays(results)
    if type(None) in kinds:
        return results
    if isinstance(first, (np.ndarray, np.generic)):
        _check_shapes(results)
        return np.stack(results)
    if isinstance(first, (bool, int, float, complex)):
        array = np.array(results)
        if array.dtype.kind == "f" and all(isinstance(one, int) for one in results):
            # As int64 does not hold all of them, numpy has rounded them.
            return np.array(results, np.uint64) if min(results) >= 0 else results
        # With a text among the numbers, numpy would make texts of all of them.
        return array if array.dtype.kind in "biufc" else results
    if isinstance(first, tensor_class()):
        torch = sys.modules["torch"]
        is_alike = len(set(map(_layout_of, results))) == 1
        if is_alike and is_plain_tensor(first):
            return stack_tensors(results, torch)
        return torch.stack(results)
    columns = columns_of(results)
    if columns is None:
        return results
    return with_members(first, {key: _stack_at(key, column) for key, column in columns.items()})


def _stack_at(key: object, column: list[Any]) -> Any:
    try:
        return stack(column)
    except (ValueError, RuntimeError) as error:
        # Those of numpy and torch do not say where.
        raise type(error)(f"at {key!r}: {error}") from error


def _check_shapes(arrays: Sequence[Any]) -> None:
    shapes = set(map(getattr, arrays, repeat("shape"), repeat(())))
    if len(shapes) > 1:
        raise ValueError(
            f"the samples of a batch differ in shape ({', '.join(map(str, sorted(shapes)))}); "
            "let the generator, or map, make them equal, or give collate= a function that can join "
            "them"
        )


def stack_arrays(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Stack arrays; large ones into memory that processes share, so that they are not copied."""
    first, count = arrays[0], len(arrays)
    shape, dtype = first.shape, first.dtype
    # Faster than to make a set, which takes the hash of each shape.
    if list(map(_shape_of, arrays)).count(shape) != count:
        _check_shapes(arrays)
    if not shape:
        return np.stack(arrays)
    # As `np.stack` does, which changes a dtype that is not the native one.
    is_alike = list(map(_dtype_of, arrays)).count(dtype) == count
    dtype = np.result_type(dtype) if is_alike else np.result_type(*map(_dtype_of, arrays))
    make = np.empty if count * first.nbytes < OUT_OF_BAND_BYTES else empty
    joined = make((count, *shape), dtype)
    # `np.stack` first makes another view of each array, which takes longer than to copy a small
    # one.
    np.concatenate(arrays, out=joined.reshape(count * shape[0], *shape[1:]))
    return joined


def stack_tensors(tensors: Sequence[Any], torch: Any) -> Any:
    """Stack plain tensors, whose first one decides the dtype; large ones into shared memory."""
    first = tensors[0]
    size = len(tensors) * first.nbytes
    if size < OUT_OF_BAND_BYTES:
        return torch.stack(tensors)
    memory = torch.from_numpy(empty(size, np.uint8))
    return torch.stack(tensors, 0, out=memory.view(first.dtype).view(len(tensors), *first.shape))
