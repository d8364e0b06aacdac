"""The results of a batch's tasks -> one batch.

    [result, result, ..] --stack()--> arrays with a new first axis, in containers as they were

Any worker may call it; it keeps nothing.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np

from enqueuer.common.objects import (
    OUT_OF_BAND_BYTES,
    columns_of,
    is_plain_tensor,
    tensor_class,
    with_members,
)
from enqueuer.workers.arrays import empty

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
