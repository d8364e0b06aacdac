"""A torch tensor <-> a numpy array of the same memory, so that it crosses without a copy.

torch is not imported unless there are tensors: the worker that yields one has imported it
already, and the consumer imports it when the first one comes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

# numpy has no bfloat16 and no float8, so a tensor travels as numbers of the same size.
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


def reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor for pickle: to an array, or in torch's own way if it is not a plain one.

    Plain is what lies in the memory of the CPU and needs no gradient. The order of the
    dimensions in memory is kept (channels last, for example); gaps are not.
    """
    array = _array_of(tensor)
    if array is not None:
        return from_array, (array,)
    if not _is_plain(tensor):
        return tensor.__reduce_ex__(5)
    torch = sys.modules["torch"]
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    carrier = getattr(torch, _CARRIERS[tensor.element_size()])
    array = tensor.permute(order).view(carrier).numpy()
    return as_tensor, (array, str(tensor.dtype).removeprefix("torch."), order)


def copy_in_thread(target: Any, source: Any) -> None:
    """Copy a tensor of the CPU to another one, on this thread alone.

    torch would take all CPUs, which the workers need. Its own limit, when set in one thread,
    holds for the threads that are started later, too.
    """
    np.copyto(_carrier_of(target), _carrier_of(source.resolve_conj().resolve_neg()))


def as_tensor(array: np.ndarray, dtype: str, order: Sequence[int]) -> Any:
    """Return the tensor that `reduce_tensor` was given; it shares the array's memory.

    A read-only array, such as Ray's object store has them, is copied: torch knows no tensor that
    cannot be written to.
    """
    torch = importlib.import_module("torch")
    if not array.flags.writeable:
        array = array.copy()
    tensor = torch.from_numpy(array).view(getattr(torch, dtype))
    return tensor.permute([order.index(dim) for dim in range(len(order))])


def from_array(array: np.ndarray) -> Any:
    """Return the tensor of an array, as `as_tensor` does for one of numpy's dtypes in C order."""
    torch = sys.modules.get("torch") or importlib.import_module("torch")
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _array_of(tensor: Any) -> np.ndarray | None:
    """Return a tensor as an array of its memory; None if numpy lacks its dtype or its order.

    Most tensors are of this kind. The checks of `_is_plain` and the calls after them take several
    times as long.
    """
    if type(tensor) is not sys.modules["torch"].Tensor or tensor.__dict__:
        return None
    try:
        array: np.ndarray = tensor.numpy()
    except (RuntimeError, TypeError):
        return None
    return array if array.flags.c_contiguous else None


def _is_plain(tensor: Any) -> bool:
    torch = sys.modules["torch"]
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized)
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.element_size() in _CARRIERS
        and not tensor.__dict__
    )


def _carrier_of(tensor: Any) -> np.ndarray:
    """Return an array of the same memory, of numbers of the same size as those of a tensor."""
    carrier = getattr(sys.modules["torch"], _CARRIERS[tensor.element_size()])
    array: np.ndarray = tensor.view(carrier).numpy()
    return array
