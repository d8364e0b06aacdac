"""Collating in a worker process: samples are stacked straight into shared memory.

torch's `default_collate` looks up its functions for arrays and tensors in a table. A worker
replaces these two, so types, containers and errors stay those of torch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from enqueuer.common.extras import framework
from enqueuer.workers import arrays, collate

torch = framework("torch", "torch", "2.1")

_dtype_of, _shape_of = operator.attrgetter("dtype"), operator.attrgetter("shape")
_collate = torch.utils.data._utils.collate
_by_torch = {kind: _collate.default_collate_fn_map.get(kind) for kind in (torch.Tensor, np.ndarray)}


def collate_in_place() -> None:
    """Let `default_collate` of this process stack into shared memory.

    A function that the program itself has registered stays.
    """
    functions = _collate.default_collate_fn_map
    for kind, function in ((torch.Tensor, stack_tensors), (np.ndarray, stack_arrays)):
        if functions.get(kind) is _by_torch[kind]:
            functions[kind] = function


def stack_tensors(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    """Return tensors stacked along a new first axis, in shared memory if they are large.

    As in a worker of torch, the first one decides the dtype.
    """
    first = batch[0]
    if type(first) is not torch.Tensor or not collate.can_stack_in_place(first):
        return _by_torch_itself(torch.Tensor, batch, collate_fn_map)
    return collate.stack_tensors(batch, torch)


def stack_arrays(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    """Return arrays stacked along a new first axis, as a tensor; see `stack_tensors`."""
    first, count = batch[0], len(batch)
    dtype, shape = first.dtype, first.shape
    if (
        dtype.kind not in "biuf"
        or not dtype.isnative
        or not first.size
        # These three lines call no Python code for each array.
        or [*map(type, batch)].count(np.ndarray) < count
        or [*map(_dtype_of, batch)].count(dtype) < count
        or [*map(_shape_of, batch)].count(shape) < count
    ):
        return _by_torch_itself(np.ndarray, batch, collate_fn_map)
    stacked = arrays.empty((count, *shape), dtype)
    if shape:
        np.concatenate(batch, out=stacked.reshape(count * shape[0], *shape[1:]))
    else:
        stacked[:] = batch
    try:
        return torch.from_numpy(stacked)
    except TypeError:
        # torch lacks some dtypes, such as float128.
        return _by_torch_itself(np.ndarray, batch, collate_fn_map)


def _by_torch_itself(kind: Any, batch: Sequence[Any], collate_fn_map: Any) -> Any:
    return _by_torch[kind](batch, collate_fn_map=collate_fn_map)
