"""A loader of tensors, in the place of a DataLoader; the loop's thread makes the tensors."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from enqueuer.adapters import pinning
from enqueuer.adapters.loading import Loader, tree_map
from enqueuer.adapters.ranks import Ranks
from enqueuer.base import BaseEnqueuer
from enqueuer.errors import EnqueuerWarning
from enqueuer.frameworks import framework
from enqueuer.transport.blocks import mapping_at

torch = framework("torch", "torch", "2.1")


def as_tensors(batch: Any) -> Any:
    """Return a batch with tensors in the place of numpy arrays and numpy numbers.

    A tensor shares the memory of its array. Only what torch cannot show is copied: an array
    that is read-only, runs backwards, or has the bytes of its numbers swapped. Arrays of
    strings, objects and times stay arrays, and everything else stays what it is.

    Args:
        batch: Arrays in mappings, tuples, lists and dataclasses, nested as you like.

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
    except TypeError:  # a dtype that torch has not, float128 for example
        return leaf


class TorchLoader(Loader[Any]):
    """A loader of tensors, in the place of a DataLoader.

    One iteration is one epoch. Tensors share the memory of the arrays that the enqueuer gives,
    which for large ones from worker processes is the block of shared memory that the worker
    wrote to: there is no copy in between.

    Args:
        enqueuer: Which makes the batches. One that does not run is started by the first
            iteration, and stopped when this is dropped, or by `stop()` or a `with` block.
        pin_memory: Whether tensors are copied into pinned memory of torch's, for
            `tensor.to("cuda", non_blocking=True)`; `CudaDataLoader` does without that copy.
            Without a GPU there is a warning and nothing is done.
        steps_per_epoch: How many batches an epoch has; by default as many as the generator
            makes, be that without an end.
        rank: Of this process among those that train together. By default that of
            `torch.distributed`, if it is initialised by now and the enqueuer has none of its own.
        world_size: How many these are; goes with `rank`.

    Raises:
        ValueError: `torch.distributed` has several ranks, and the enqueuer no `random_seed`
            that they could share.
        InvalidState: Another rank is to be taken, and the enqueuer was started. The first
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

    def __init__(
        self,
        enqueuer: BaseEnqueuer[Any],
        pin_memory: bool = False,
        steps_per_epoch: int | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._ranks = Ranks(rank, world_size)
        super().__init__(self._ranks.part_of(enqueuer), steps_per_epoch)
        self._pin_memory = bool(pin_memory)
        if self._pin_memory and not torch.cuda.is_available():
            self._pin_memory = False
            warnings.warn(
                "pin_memory=True does nothing here, as torch finds no GPU",
                EnqueuerWarning,
                stacklevel=2,
            )

    def _start(self) -> None:
        self._ranks.check(self._loader)
        super()._start()

    def _convert(self, batch: Any) -> Any:
        tensors = as_tensors(batch)
        return tree_map(_pinned, tensors) if self._pin_memory else tensors


def _pinned(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu":
        return leaf
    # A block is not pinned where it is. Whoever copies from torch's own pinned memory need not
    # keep the tensor until the copy is done; of a block torch knows nothing, and the worker would
    # write to it as soon as the last tensor is dropped.
    if leaf.layout is torch.strided and mapping_at(leaf.data_ptr()) is not None:
        return pinning.pinned_like(leaf).copy_(leaf)
    return leaf.pin_memory()
