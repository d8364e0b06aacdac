"""PyTorch: a loader of tensors without a DataLoader, and datasets whose items an enqueuer makes.

    TorchLoader:              enqueuer -> tensors -> the loop
    EnqueuerIterableDataset:  enqueuer -> tensors -> DataLoader(dataset, batch_size=None)
    EnqueuerMapDataset:       the same for what wants __getitem__ and __len__

In the workers of a DataLoader each has an enqueuer of its own, for its part of the batches.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from enqueuer import arguments
from enqueuer.adapters import pinning
from enqueuer.adapters.loading import Epochs, Loader, mapped
from enqueuer.base import BaseEnqueuer
from enqueuer.errors import EnqueuerWarning, InvalidState
from enqueuer.frameworks import framework
from enqueuer.transport.blocks import mapping_at

torch = framework("torch", "torch", "2.1")

__all__ = ["EnqueuerIterableDataset", "EnqueuerMapDataset", "TorchLoader", "as_tensors"]

_Dataset: Any = torch.utils.data.Dataset
_IterableDataset: Any = torch.utils.data.IterableDataset

_MOST_WORKERS = 1024  # of one DataLoader


def as_tensors(batch: Any) -> Any:
    """Return a batch with tensors in the place of numpy arrays and numpy numbers.

    A tensor shares the memory of its array. Only what torch cannot show is copied: an array
    that is read-only, runs backwards, or has the bytes of its numbers swapped. Arrays of
    strings, objects and times stay arrays, and everything else stays what it is.

    Args:
        batch: Arrays in dicts, tuples, lists and dataclasses, nested as you like.

    Example:
        >>> import numpy as np
        >>> as_tensors({"x": np.arange(3), "name": "a"})
        {'x': tensor([0, 1, 2]), 'name': 'a'}
    """
    return mapped(_as_tensor, batch)


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
            `torch.distributed`, if it is initialised and the enqueuer has none of its own.
        world_size: How many these are; goes with `rank`.

    Raises:
        ValueError: `torch.distributed` has several ranks, and the enqueuer no `random_seed`
            that they could share.
        InvalidState: Another rank is to be taken, and the enqueuer was started.

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
        super().__init__(_of_rank(enqueuer, rank, world_size), steps_per_epoch)
        self._pin_memory = bool(pin_memory)
        if self._pin_memory and not torch.cuda.is_available():
            self._pin_memory = False
            warnings.warn(
                "pin_memory=True does nothing here, as torch finds no GPU",
                EnqueuerWarning,
                stacklevel=2,
            )

    def _convert(self, batch: Any) -> Any:
        tensors = as_tensors(batch)
        return mapped(_pinned, tensors) if self._pin_memory else tensors


def _pinned(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu":
        return leaf
    # A block is not pinned where it is. Whoever copies from torch's own pinned memory need not
    # keep the tensor until the copy is done; of a block torch knows nothing, and the worker would
    # write to it as soon as the last tensor is dropped.
    if leaf.layout is torch.strided and mapping_at(leaf.data_ptr()) is not None:
        return pinning.pinned_like(leaf).copy_(leaf)
    return leaf.pin_memory()


class EnqueuerIterableDataset(_IterableDataset):
    """An iterable dataset whose items are the batches of an enqueuer.

    For `DataLoader(dataset, batch_size=None)`, where torch wants a DataLoader. Without DataLoader
    workers the enqueuer's own make the batches, which is the faster way. With `num_workers` each
    DataLoader worker has an enqueuer of its own and makes its part: together they give what one
    enqueuer gives, in the same order if `shards` is given, and nothing twice.

    Each DataLoader worker begins a new epoch whenever the DataLoader is iterated; epochs are
    counted, so that each has random numbers of its own, with persistent workers and without.

    Args:
        enqueuer: Which makes the batches; for DataLoader workers one that does not run.
        steps_per_epoch: As for `TorchLoader`.
        rank: As for `TorchLoader`; taken from `torch.distributed` now, in this process.
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
        super().__init__()
        self._here = _Here(_of_rank(enqueuer, rank, world_size), steps_per_epoch)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over an epoch: all of it, or the part of this DataLoader worker."""
        return self._here.epoch()

    def __len__(self) -> int:
        """Return how many batches an epoch has, over all DataLoader workers.

        Raises:
            TypeError: Nobody knows: give `steps_per_epoch`.
        """
        return len(self._here)

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration be that epoch, counted from 0.

        For what counts epochs itself; it reaches the workers of a DataLoader, too.

        Raises:
            InvalidState: The enqueuer runs in this process, and counts them.
        """
        self._here.set_epoch(arguments.count("epoch", epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the position in this process: of all batches, or of a DataLoader worker's part.

        A DataLoader with workers has no position; torchdata's StatefulDataLoader asks them.
        """
        return self._here.loader().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, at the next iteration in this process.

        Raises:
            InvalidState: It runs in this process.
            StateMismatch: The state is of another source, or of another part.
        """
        self._here.load_state_dict(state_dict)

    def stop(self) -> None:
        """Stop the enqueuer of this process, if this has started it."""
        self._here.stop()


class EnqueuerMapDataset(_Dataset):
    """A map-style dataset whose items come from an enqueuer, whatever the index.

    For what wants `__len__` and `__getitem__`: each call takes the next item of the enqueuer,
    epoch after epoch without an end, so the order of the indices means nothing. It is the
    pattern in which reader threads fill a buffer and `__getitem__` takes from it. The items may
    be samples, which a DataLoader then batches, or batches, for `batch_size=None`.

    With `num_workers` each DataLoader worker has an enqueuer of its own and makes its part.

    Args:
        enqueuer: Which makes the items; for DataLoader workers one that does not run.
        length: How many items an epoch of the DataLoader takes. By default as many as the
            enqueuer has, if it has a length.
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
        own = _of_rank(enqueuer, rank, world_size)
        self._length = len(Epochs(own, None)) if length is None else length
        arguments.positive("length", self._length)
        self._here = _Here(own, None)

    def __getitem__(self, index: int) -> Any:
        """Return the enqueuer's next item, as tensors.

        Raises:
            IndexError: `index` is out of range.
        """
        if not -self._length <= index < self._length:
            raise IndexError(f"index {index} is out of range: the length is {self._length}")
        return next(self._here.endless())

    def __len__(self) -> int:
        return self._length

    def stop(self) -> None:
        """Stop the enqueuer of this process, if this has started it."""
        self._here.stop()


class _Here:
    """An enqueuer, and the loader that this process has of it: of all of it, or of a part.

    Args:
        enqueuer: Of the process that makes the dataset.
        steps: Of an epoch, over all DataLoader workers.
    """

    def __init__(self, enqueuer: BaseEnqueuer[Any], steps: int | None) -> None:
        self._enqueuer = enqueuer
        self._whole = Epochs(enqueuer, steps)
        self._steps = steps
        # How many epochs each worker of a DataLoader has begun: shared, as most DataLoaders make
        # new workers, of new copies of the dataset, for each epoch.
        self._begun = torch.zeros(_MOST_WORKERS, dtype=torch.int64).share_memory_()
        self._count_from_loaded()
        self._pid = os.getpid()
        self._loader: TorchLoader | None = None
        self._endless: Iterator[Any] | None = None
        self._next_epoch = -1  # of a DataLoader worker whose last epoch came to its end
        self._is_loaded = False

    def __len__(self) -> int:
        return len(self._whole)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loader": None, "_endless": None}

    def loader(self) -> TorchLoader:
        """Return the loader of this process."""
        if self._pid != os.getpid():  # what a process inherits is another one's
            self._pid, self._loader, self._endless = os.getpid(), None, None
        if self._loader is None:
            self._loader = self._new_loader()
        return self._loader

    def epoch(self) -> Iterator[Any]:
        """Return an iterator over an epoch; in the main process, perhaps over the rest of one."""
        info = torch.utils.data.get_worker_info()
        return iter(self.loader()) if info is None else self._epoch_of_worker(self._begin(info.id))

    def endless(self) -> Iterator[Any]:
        """Return the one iterator of this process over all epochs."""
        loader, info = self.loader(), torch.utils.data.get_worker_info()
        if self._endless is None:
            if info is not None:
                loader = self._loader = self._new_loader(self._begin(info.id))
            self._endless = _endless(loader)
        return self._endless

    def set_epoch(self, epoch: int) -> None:
        """Have the next epoch be this one, here and in all DataLoader workers."""
        if not self._enqueuer._is_idle():
            raise InvalidState("set_epoch() was called, but the enqueuer runs, and counts epochs")
        self._enqueuer._begin_at(epoch)
        self._begun.fill_(epoch)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Have the loader of this process go on at a position."""
        self.loader().load_state_dict(state_dict)
        info = torch.utils.data.get_worker_info()
        if info is None:
            self._count_from_loaded()
        else:
            self._begun[info.id] = int(state_dict["epoch"])
            self._is_loaded = True

    def stop(self) -> None:
        """Stop the loader of this process."""
        if self._pid == os.getpid() and self._loader is not None:
            self._loader.stop()
        self._endless = None

    def _count_from_loaded(self) -> None:
        if self._enqueuer._resumed:  # if that is within an epoch, DataLoader workers refuse it
            self._begun.fill_(self._enqueuer._at_rest.number)

    def _begin(self, worker: int) -> int:
        """Count an epoch of a DataLoader worker; return its number, from 0."""
        epoch = int(self._begun[worker])
        self._begun[worker] += 1
        return epoch

    def _epoch_of_worker(self, epoch: int) -> Iterator[Any]:
        loader = self.loader()
        if not self._is_loaded and epoch != self._next_epoch:
            loader.stop()
            loader = self._loader = self._new_loader(epoch)
        self._is_loaded, self._next_epoch = False, -1
        yield from loader
        self._next_epoch = epoch + 1

    def _new_loader(self, epoch: int = 0) -> TorchLoader:
        """Return a loader for this process; `epoch` is where that of a DataLoader worker begins."""
        info = torch.utils.data.get_worker_info()
        if info is None:
            return _loader_of(self._enqueuer, self._steps)
        own, part, parts = self._enqueuer, info.id, info.num_workers
        if parts > _MOST_WORKERS:
            raise ValueError(f"num_workers must be at most {_MOST_WORKERS}, got {parts}")
        if not own._is_idle():
            raise InvalidState(
                "the enqueuer was started in the process that has the DataLoader, and its "
                "workers cannot share it: hand over one that was not started, or num_workers=0"
            )
        try:
            twin = own._portion(own._rank, own._world_size, part, parts)
        except ValueError as error:
            raise ValueError(
                f"the batches cannot be dealt out over num_workers={parts} workers of a "
                f"DataLoader and {own._world_size} ranks: {error}"
            ) from error
        twin._begin_at(epoch)
        steps = None if self._steps is None else len(range(part, self._steps, parts))
        return _loader_of(twin, steps)


def _loader_of(enqueuer: BaseEnqueuer[Any], steps: int | None) -> TorchLoader:
    return TorchLoader(enqueuer, steps_per_epoch=steps, rank=0, world_size=1)  # as it is


def _endless(loader: TorchLoader) -> Iterator[Any]:
    while True:
        is_empty = True
        for item in loader:
            is_empty = False
            yield item
        if is_empty:
            raise ValueError("the enqueuer has nothing: an epoch without a single item")


def _of_rank(
    enqueuer: BaseEnqueuer[Any], rank: int | None, world_size: int | None
) -> BaseEnqueuer[Any]:
    """Return the enqueuer for a rank: this one, or a new one like it."""
    if not isinstance(enqueuer, BaseEnqueuer):
        raise TypeError(
            f"expected a GeneratorEnqueuer or an OrderedEnqueuer, got {enqueuer!r}; "
            "wrap a generator in GeneratorEnqueuer(...)"
        )
    if (rank is None) != (world_size is None):
        raise ValueError("rank and world_size go together; give both, or neither")
    if rank is not None:
        own = arguments.rank(rank, world_size)
    elif enqueuer._world_size > 1 or not _is_distributed():
        return enqueuer
    else:
        own = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if own[1] > 1 and not enqueuer._seed_is_given:
            raise ValueError(
                f"torch.distributed has {own[1]} ranks, which must draw from the same seed: give "
                "the enqueuer random_seed="
            )
    if own in ((0, 1), (enqueuer._rank, enqueuer._world_size)):
        return enqueuer
    if not enqueuer._is_idle():
        raise InvalidState(
            f"the enqueuer was started and cannot be made that of rank {own[0]} of {own[1]}; "
            "hand over one that was not, or give it rank and world_size yourself"
        )
    return enqueuer._portion(*own)


def _is_distributed() -> bool:
    distributed = torch.distributed
    return bool(distributed.is_available() and distributed.is_initialized())
