"""Kinds of tensors, and of objects that can be moved to a device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from enqueuer.common.extras import framework

torch = framework("torch", "torch", "2.1")

# Classes whose instances can be copied as plain memory.
PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)


def is_plain(tensor: Any) -> bool:
    """Return whether a tensor is strided memory and nothing more, whatever its class."""
    return (
        tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested)
        and not hasattr(type(tensor), "__tensor_flatten__")
    )


def plain_parts(tensor: Any) -> Iterable[Any]:
    """Return plain tensors with the memory of a tensor; a stream can be recorded for them."""
    if is_plain(tensor):
        return (tensor,)
    # Such a tensor is made of other tensors.
    if hasattr(type(tensor), "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        plain = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return (plain.set_(tensor.untyped_storage()),)
    return itertools.chain.from_iterable(map(plain_parts, parts))


def moves_late(leaf: Any) -> bool:
    """Return whether an object has a method `to`, and none that records a stream."""
    kind = type(leaf)
    return (
        hasattr(kind, "to")
        and not isinstance(leaf, torch.Tensor)
        and not hasattr(kind, "record_stream")
    )


def moved_to(leaf: Any, device: Any) -> Any:
    """Return an object moved to a device by its method `to`."""
    moved = leaf.to(device)
    # Some objects move themselves, and return nothing.
    return leaf if moved is None else moved


def is_dense(tensor: Any) -> bool:
    """Return whether a tensor's elements lie side by side, in any order of dimensions."""
    return bool(torch.empty_like(tensor, device="meta").stride() == tensor.stride())
