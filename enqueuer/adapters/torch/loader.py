"""Tensors of an enqueuer: a loader that replaces a DataLoader, and datasets for torch's own.

The loop's thread makes the tensors. The enqueuer has workers of its own. DataLoader workers would
each have a copy of a dataset, and so of the enqueuer, and are refused.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, overload

import numpy as np

from enqueuer.adapters import pinning
from enqueuer.adapters.loading import Loader
from enqueuer.adapters.ranks import Ranks, TrainerNames
from enqueuer.common import checks
from enqueuer.common.extras import framework
from enqueuer.common.objects import tree_map
from enqueuer.common.text import an
from enqueuer.enqueuers.enqueuer import BaseEnqueuer
from enqueuer.enqueuers.options import Unpack
from enqueuer.errors import EnqueuerWarning, InvalidState
from enqueuer.transport.blocks import mapping_at

if TYPE_CHECKING:
    from torch import Tensor

torch = framework("torch", "torch", "2.1")

_Dataset: Any = torch.utils.data.Dataset
_IterableDataset: Any = torch.utils.data.IterableDataset
# Attributes that are of no use in a copy, and cannot be sent; each dataset has one of them.
_OF_LOADERS = ("_reader", "state_dict", "load_state_dict", "_loader", "_items")

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


@checks.suggests_options
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
        part = ranks.part_of(enqueuer)
        if pin_memory and not torch.cuda.is_available():
            pin_memory = False
            warnings.warn(
                "pin_memory=True does nothing here, as torch finds no GPU",
                EnqueuerWarning,
                stacklevel=2,
            )
        super().__init__(
            part,
            steps_per_epoch,
            convert=_as_pinned_tensors if pin_memory else as_tensors,
            check=functools.partial(ranks.check, part),
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


@checks.suggests_options
class EnqueuerIterableDataset(TorchLoader[Any], _IterableDataset):
    """An iterable dataset whose items are the batches of an enqueuer.

    Use it as `DataLoader(dataset, batch_size=None)`, where code needs a DataLoader of torch. The
    enqueuer's own workers make the batches, so `num_workers` of the DataLoader must be 0.

    Args:
        enqueuer: Enqueuer that makes the batches.
        steps_per_epoch: As for `TorchLoader`.
        rank: As for `TorchLoader`.
        world_size: As for `TorchLoader`.

    Raises:
        ValueError: As for `TorchLoader`.
        InvalidState: As for `TorchLoader`.

    Example:
        >>> import numpy as np
        >>> from torch.utils.data import DataLoader
        >>> from enqueuer import GeneratorEnqueuer
        >>> def batches(shard):
        ...     for number in shard.split(range(2)):
        ...         yield np.full(2, number)
        >>> dataset = EnqueuerIterableDataset(GeneratorEnqueuer(batches))
        >>> list(DataLoader(dataset, batch_size=None))
        [tensor([0, 0]), tensor([1, 1])]
    """

    def __init__(
        self,
        enqueuer: BaseEnqueuer[Any],
        steps_per_epoch: int | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__(
            enqueuer, steps_per_epoch=steps_per_epoch, rank=rank, world_size=world_size
        )

    def __iter__(self) -> Iterator[Any]:
        """Iterate over an epoch, or over the rest of one.

        Raises:
            InvalidState: It is called in a worker of a DataLoader.
        """
        _check_not_copied(self)
        return super().__iter__()

    def __getstate__(self) -> dict[str, Any]:
        # torch sends a copy to each worker; the copy refuses to be read.
        return {name: value for name, value in vars(self).items() if name not in _OF_LOADERS}


@checks.suggests_options
class EnqueuerMapDataset(_Dataset):
    """A map-style dataset whose items come from an enqueuer.

    It is for code that needs `__len__` and `__getitem__`. The items can be samples, from which a
    DataLoader makes batches, or batches, for `batch_size=None`. The enqueuer decides their order:
    `OrderedEnqueuer(shuffle=True)` shuffles, the DataLoader cannot.

    Each call takes the enqueuer's next item, for any index, and one epoch follows another without
    an end. It is the pattern in which reader threads fill a buffer and `__getitem__` takes from
    it. The enqueuer's own workers make the items, so `num_workers` of the DataLoader must be 0.

    Args:
        enqueuer: Enqueuer that makes the items.
        length: Number of items in an epoch of the DataLoader. By default that of the enqueuer,
            if it has a length. If an epoch of the enqueuer has fewer items, items of its next one
            follow.
        rank: As for `TorchLoader`.
        world_size: As for `TorchLoader`.

    Raises:
        TypeError: There is no `length`, and the enqueuer has none either.
        ValueError: As for `TorchLoader`.
        InvalidState: As for `TorchLoader`.

    Example:
        >>> import numpy as np
        >>> from torch.utils.data import DataLoader
        >>> from enqueuer import GeneratorEnqueuer
        >>> def samples(shard):
        ...     for number in shard.split(range(3)):
        ...         yield np.array(number)
        >>> dataset = EnqueuerMapDataset(GeneratorEnqueuer(samples), length=4)
        >>> list(DataLoader(dataset, batch_size=2))
        [tensor([0, 1]), tensor([2, 0])]
    """

    def __init__(
        self,
        enqueuer: BaseEnqueuer[Any],
        length: int | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._loader: TorchLoader[Any] = TorchLoader(enqueuer, rank=rank, world_size=world_size)
        self._length = len(self._loader) if length is None else checks.positive("length", length)
        self._items: Iterator[Any] | None = None

    def __getitem__(self, index: int) -> Any:
        """Return the enqueuer's next item, as tensors.

        Raises:
            IndexError: `index` is out of range.
            InvalidState: It is called in a worker of a DataLoader.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the items of a batch; torch calls this."""
        _check_not_copied(self)
        for index in indices:
            if not -self._length <= index < self._length:
                raise IndexError(f"index {index} is out of range: the length is {self._length}")
        if self._items is None:
            self._items = _endless(self._loader)
        return [next(self._items) for _ in indices]

    def __len__(self) -> int:
        return self._length

    def stop(self) -> None:
        """Stop the enqueuer, if this has started it."""
        self._loader.stop()
        self._items = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _OF_LOADERS}


def _check_not_copied(dataset: EnqueuerIterableDataset | EnqueuerMapDataset) -> None:
    is_copy = vars(dataset).keys().isdisjoint(_OF_LOADERS)
    if is_copy or torch.utils.data.get_worker_info() is not None:
        raise InvalidState(
            f"{an(type(dataset).__name__)} was copied, as for a worker of a DataLoader, but its "
            "enqueuer has workers of its own, which copies cannot share: give the DataLoader "
            "num_workers=0, or take TorchLoader(enqueuer) in its place; for a dataset of torch, "
            "take enqueuer.adapters.torch.DataLoader(dataset, num_workers=...)"
        )


def _endless(loader: TorchLoader[Any]) -> Iterator[Any]:
    while True:
        is_empty = True
        for item in loader:
            is_empty = False
            yield item
        if is_empty:
            raise ValueError("the enqueuer has nothing: an epoch without a single item")
