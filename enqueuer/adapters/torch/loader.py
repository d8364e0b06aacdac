"""A loader of tensors that replaces a DataLoader; the loop's thread makes the tensors."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, overload

import numpy as np

from enqueuer.adapters import pinning
from enqueuer.adapters.loading import Loader
from enqueuer.adapters.ranks import Ranks, TrainerNames
from enqueuer.common.extras import framework
from enqueuer.common.trees import tree_map
from enqueuer.enqueuers.enqueuer import BaseEnqueuer
from enqueuer.enqueuers.options import Unpack
from enqueuer.errors import EnqueuerWarning
from enqueuer.transport.block_map import mapping_at

if TYPE_CHECKING:
    from torch import Tensor

torch = framework("torch", "torch", "2.1")

Batch = TypeVar("Batch")
Array = np.ndarray[Any, Any]


def as_tensors(batch: Any) -> Any:
    """Return a batch with its numpy arrays and numpy numbers converted to tensors.

    A tensor shares the memory of its array. Only arrays that torch cannot share are copied:
    read-only arrays, and those with negative strides or swapped bytes. Arrays of strings, objects
    and times stay arrays, and all other objects are left as they are.

    Args:
        batch: Arrays in nested mappings, tuples, lists and dataclasses.

    Example:
        >>> import numpy as np
        >>> as_tensors({"x": np.arange(3), "name": "a"})
        {'x': tensor([0, 1, 2]), 'name': 'a'}
    """
    return tree_map(_as_tensor, batch)


def _as_tensor(leaf: Any) -> Any:
    if not isinstance(leaf, (np.ndarray, np.generic)) or isinstance(leaf, np.ma.MaskedArray):
        return leaf
    if leaf.dtype.kind not in "biufc":
        return leaf
    if isinstance(leaf, np.generic):
        leaf = np.array(leaf)
    if not leaf.flags.writeable or not leaf.dtype.isnative or min(leaf.strides, default=0) < 0:
        leaf = leaf.astype(leaf.dtype.newbyteorder("="), order="C", copy=True)
    try:
        return torch.from_numpy(leaf)
    # torch lacks some dtypes, such as float128.
    except TypeError:
        return leaf


class TensorOptions(TypedDict, total=False):
    """Types of the options of a `TorchLoader`, of which none changes the type of a batch."""

    pin_memory: bool
    steps_per_epoch: int | None
    rank: int | None
    world_size: int | None


class TorchLoader(TrainerNames, Loader[Batch]):
    """A loader of tensors that replaces a DataLoader.

    One iteration is one epoch. Tensors share the memory of the enqueuer's arrays. For large arrays
    from worker processes this is the block of shared memory that the worker wrote to, without a
    copy.

    Args:
        enqueuer: Enqueuer that makes the batches. One that does not run is started by the first
            iteration, and stopped when this is dropped, or by `stop()` or a `with` block.
        pin_memory: Whether tensors are copied into pinned memory of torch, for
            `tensor.to("cuda", non_blocking=True)`; `CudaDataLoader` needs no such copy. Without
            a GPU it has no effect but a warning.
        steps_per_epoch: Number of batches in an epoch. By default as many as the generator
            makes, which may be endless.
        rank: Rank of this process among those that train together. By default that of
            `torch.distributed`, if it is initialised by now and the enqueuer has no rank.
        world_size: Number of ranks; goes with `rank`.

    Raises:
        ValueError: `torch.distributed` has several ranks, and the enqueuer has no `random_seed`
            that they could share.
        InvalidState: The enqueuer was started, so it cannot get another rank. The first
            iteration raises it, too, if `torch.distributed` was initialised only after this was
            made.

    Example:
        >>> import numpy as np
        >>> from enqueuer import GeneratorEnqueuer
        >>> def batches(shard):
        ...     for number in shard.split(range(2)):
        ...         yield np.full(2, number), number
        >>> list(TorchLoader(GeneratorEnqueuer(batches)))
        [(tensor([0, 0]), 0), (tensor([1, 1]), 1)]
    """

    # A type checker cannot convert the types within a batch, but in the usual containers.
    @overload
    def __init__(
        self: TorchLoader[Tensor],
        enqueuer: BaseEnqueuer[Array] | BaseEnqueuer[Tensor],
        **options: Unpack[TensorOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: TorchLoader[tuple[Tensor, Tensor]],
        enqueuer: BaseEnqueuer[tuple[Array, Array]],
        **options: Unpack[TensorOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: TorchLoader[dict[str, Tensor]],
        enqueuer: BaseEnqueuer[dict[str, Array]],
        **options: Unpack[TensorOptions],
    ) -> None: ...
    @overload
    def __init__(
        self: TorchLoader[Any],
        enqueuer: BaseEnqueuer[Any],
        **options: Unpack[TensorOptions],
    ) -> None: ...
    def __init__(
        self,
        enqueuer: BaseEnqueuer[Any],
        pin_memory: bool = False,
        steps_per_epoch: int | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        ranks = Ranks(rank, world_size)
        own = ranks.part_of(enqueuer)
        if pin_memory and not torch.cuda.is_available():
            pin_memory = False
            warnings.warn(
                "pin_memory=True does nothing here, as torch finds no GPU",
                EnqueuerWarning,
                stacklevel=2,
            )
        super().__init__(
            own,
            steps_per_epoch,
            convert=_as_pinned_tensors if pin_memory else as_tensors,
            check=functools.partial(ranks.check, own),
        )


def _as_pinned_tensors(batch: Any) -> Any:
    return tree_map(_pinned, as_tensors(batch))


def _pinned(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu":
        return leaf
    # A block is not pinned in place. A loop need not keep a tensor in torch's own pinned memory
    # until its copy is done. torch does not know of blocks, and the worker would write to one as
    # soon as the last tensor is dropped.
    if leaf.layout is torch.strided and mapping_at(leaf.data_ptr()) is not None:
        return pinning.pinned_like(leaf).copy_(leaf)
    return leaf.pin_memory()
