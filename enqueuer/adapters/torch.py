"""PyTorch: a loader of tensors without a DataLoader, and datasets whose items an enqueuer makes.

    TorchLoader:              enqueuer -> tensors -> the loop
    EnqueuerIterableDataset:  enqueuer -> tensors -> DataLoader(dataset, batch_size=None)
    EnqueuerMapDataset:       the same for what wants __getitem__ and __len__

In the workers of a DataLoader each has an enqueuer of its own, for its part of the batches.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np

from enqueuer import arguments
from enqueuer.adapters import pinning
from enqueuer.adapters.loading import Epochs, Loader, mapped
from enqueuer.adapters.ranks import Ranks
from enqueuer.base import BaseEnqueuer
from enqueuer.errors import EnqueuerWarning, InvalidState, StateMismatch
from enqueuer.frameworks import framework
from enqueuer.transport.blocks import mapping_at

torch = framework("torch", "torch", "2.1")

__all__ = ["EnqueuerIterableDataset", "EnqueuerMapDataset", "TorchLoader", "as_tensors"]

_Dataset: Any = torch.utils.data.Dataset
_IterableDataset: Any = torch.utils.data.IterableDataset

_MOST_WORKERS = 1024  # of one DataLoader

# Of the 63 bits of an `_Entry`; the other 23 count epochs.
_SEED_BITS = 24
_ITERATION_BITS = 16


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
    enqueuer gives, and nothing twice. An `OrderedEnqueuer` keeps its order, too. So does a
    `GeneratorEnqueuer` whose `shards` are given, equally long and divided by `num_workers`; for
    others a warning says that the order is another one.

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
        self._here = _Here(enqueuer, steps_per_epoch, Ranks(rank, world_size))

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

        It may be called before each epoch, as is usual with torch; it reaches the workers of a
        DataLoader, too. After an epoch that was read to its end the next one costs nothing. Any
        other one, and a new beginning after a `break`, restart the enqueuer. A position within
        that epoch that was loaded is kept.

        Raises:
            InvalidState: The caller has started the enqueuer, and it is at another epoch.
        """
        self._here.set_epoch(arguments.count("epoch", epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the position in this process: of all batches, or of a DataLoader worker's part.

        A DataLoader with workers has no position; torchdata's StatefulDataLoader asks them.
        """
        return self._here.state_dict()

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
    """A map-style dataset whose items come from an enqueuer.

    For what wants `__len__` and `__getitem__`. The items may be samples, which a DataLoader then
    batches, or batches, for `batch_size=None`. The enqueuer decides on their order:
    `OrderedEnqueuer(shuffle=True)` shuffles, the DataLoader cannot.

    Without DataLoader workers each call takes the enqueuer's next item, epoch after epoch without
    an end, whatever the index. It is the pattern in which reader threads fill a buffer and
    `__getitem__` takes from it.

    With `num_workers` each DataLoader worker has an enqueuer of its own, and `dataset[i]` is item
    `i` of the epoch, so that each item comes once, for any `batch_size` and `num_workers`. The
    indices must come in order: `shuffle=True` and samplers are refused. For an `OrderedEnqueuer`
    of a sequence without `length`, each worker makes only the items that it is asked for. Any
    other enqueuer makes all items in each worker, with a warning; `EnqueuerIterableDataset`
    shares that work, and so does `num_workers=0`.

    Args:
        enqueuer: Which makes the items; for DataLoader workers one that does not run.
        length: How many items an epoch of the DataLoader takes. By default as many as the
            enqueuer has, if it has a length. In DataLoader workers an epoch of the enqueuer
            begins with each one of the DataLoader; if it has fewer items, those of the next
            epoch fill up.
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
        self._here = _Here(enqueuer, None, Ranks(rank, world_size))
        self._length = len(self._here) if length is None else length
        arguments.positive("length", self._length)

    def __getitem__(self, index: int) -> Any:
        """Return the enqueuer's next item, as tensors; in a DataLoader worker item `index`.

        Raises:
            IndexError: `index` is out of range.
            ValueError: In a DataLoader worker, the indices do not come in order.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the items of a batch, as torch asks for them."""
        for index in indices:
            if not -self._length <= index < self._length:
                raise IndexError(f"index {index} is out of range: the length is {self._length}")
        info = torch.utils.data.get_worker_info()
        if info is None:
            items = self._here.endless()
            return [next(items) for _ in indices]
        asked = self._here.asked(self._length, info.id, info.num_workers)
        return asked.items([index % self._length for index in indices])

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
        ranks: What decides which part of the batches is this process's.
    """

    def __init__(self, enqueuer: BaseEnqueuer[Any], steps: int | None, ranks: Ranks) -> None:
        self._ranks = ranks
        self._enqueuer = enqueuer = ranks.part_of(enqueuer)
        self._whole = Epochs(enqueuer, steps)
        self._steps = steps
        # How many epochs each worker of a DataLoader has begun (`_Entry`): shared, as most
        # DataLoaders make new workers, of new copies of the dataset, for each epoch.
        begun = torch.zeros(_MOST_WORKERS, dtype=torch.int64, device="cpu")
        self._begun = begun.share_memory_()
        self._counted_in, self._iterations = 0, 0  # a process, and what has begun there
        self._count_from_loaded()
        self._pid = os.getpid()
        self._loader: TorchLoader | None = None
        self._endless: Iterator[Any] | None = None
        self._asked: _Asked | None = None
        # Whether a warning was given, by any worker of a DataLoader.
        self._is_warned = torch.zeros(1, dtype=torch.int64, device="cpu").share_memory_()
        # In a DataLoader worker that has given its whole part: number of the next epoch; else -1.
        self._next_epoch = -1
        self._is_loaded = False

    def __len__(self) -> int:
        return len(self._whole)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process that is not forked does not know of torch.distributed.
        self._ranks.check(self._enqueuer)
        return {**self.__dict__, "_loader": None, "_endless": None, "_asked": None}

    def loader(self) -> TorchLoader:
        """Return the loader of this process."""
        if self._pid != os.getpid():  # what a process inherits is another one's
            self._pid, self._loader, self._endless, self._asked = os.getpid(), None, None, None
        if self._loader is None:
            self._loader = self._new_loader()
        return self._loader

    def epoch(self) -> Iterator[Any]:
        """Return an iterator over an epoch; in the main process, perhaps over the rest of one."""
        info = torch.utils.data.get_worker_info()
        return iter(self.loader()) if info is None else self._epoch_of_worker(info.id)

    def endless(self) -> Iterator[Any]:
        """Return the one iterator of this process over all epochs."""
        loader = self.loader()
        if self._endless is None:
            self._endless = _endless(loader)
        return self._endless

    def asked(self, length: int, worker: int, workers: int) -> _Asked:
        """Return what gives the items of a map-style dataset in a DataLoader worker."""
        if self._asked is None or self._pid != os.getpid():
            self._pid, self._loader, self._endless = os.getpid(), None, None
            self._asked = _Asked(self, length, worker, workers)
        return self._asked

    def items_of_epoch(self, epoch: int, worker: int, workers: int, block: int) -> Iterator[Any]:
        """Return an iterator, without an end, over the items of an epoch and those after it.

        Args:
            epoch: Number of the epoch, from 0.
            worker: Index of this DataLoader worker.
            workers: Number of DataLoader workers.
            block: Number of consecutive items that each worker makes in turn; 0: this one makes
                all items.
        """
        if self._loader is not None:
            self._loader.stop()
        own = self._enqueuer
        self._ranks.check(own)
        _check_idle(own)
        rank = own._rank, own._world_size
        if block:
            twin = own._portion(*rank, worker, workers, block)
        else:
            twin = own._portion(*rank)
            twin._record_as(own._rank + own._world_size * worker, own._world_size * workers)
        twin._begin_at(epoch)
        self._loader = _loader_of(twin, None)
        return _endless(self._loader)

    def deals_out(self, length: int) -> bool:
        """Return whether each worker of a DataLoader can make its own items alone."""
        return self._enqueuer._deals_out(length)

    def check_repeats(self, workers: int) -> None:
        """Raise ValueError if the workers of a DataLoader cannot make all items each; warn."""
        if workers == 1:
            return
        try:
            self._enqueuer._check_repeats()
        except ValueError as error:
            raise ValueError(
                f"each of num_workers={workers} workers of a DataLoader has to make all items of "
                f"this enqueuer, and gives those that it is asked for: {error}"
            ) from error
        self.warn(
            f"each of the {workers} workers of the DataLoader makes all items of the enqueuer, "
            "and gives those that it is asked for; use num_workers=0, as the enqueuer has "
            "workers, or EnqueuerIterableDataset, which shares the work"
        )

    def warn(self, text: str) -> None:
        """Give a warning, unless a worker of the DataLoader has given one before."""
        if not self._is_warned[0]:
            self._is_warned[0] = 1
            warnings.warn(text, EnqueuerWarning, stacklevel=2)

    def set_epoch(self, epoch: int) -> None:
        """Have the next epoch be this one, here and in all DataLoader workers."""
        own = self._enqueuer
        if not own._comes_next(epoch):
            self.stop()
            if not own._is_idle():
                raise InvalidState(
                    f"set_epoch({epoch}) was called, but the enqueuer was started by its owner "
                    "and is at another epoch; call its stop() first, or let the dataset start it"
                )
            own._begin_at(epoch)
        self._begun.fill_(_Entry(epoch).number())

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader of this process."""
        state = self.loader().state_dict()
        # The other workers are still in the epoch whose part this worker has given.
        return {**state, "part_is_over": True} if self._next_epoch >= 0 else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Have the loader of this process go on at a position."""
        state = dict(state_dict)
        is_over = bool(state.pop("part_is_over", False))
        info = torch.utils.data.get_worker_info()
        if is_over and info is None:
            raise StateMismatch("the state is of a worker of a DataLoader, not of the whole")
        self.loader().load_state_dict(state)
        if info is None:
            self._count_from_loaded()
        else:
            epoch = int(state["epoch"])
            self._begun[info.id] = _Entry(epoch - is_over).number()
            self._next_epoch = epoch if is_over else -1
            self._is_loaded = True

    def stop(self) -> None:
        """Stop the loader of this process."""
        if self._pid == os.getpid() and self._loader is not None:
            self._loader.stop()
        self._endless = self._asked = None

    def _count_from_loaded(self) -> None:
        if self._enqueuer._resumed:  # if that is within an epoch, DataLoader workers refuse it
            self._begun.fill_(_Entry(self._enqueuer._at_rest.number).number())

    def begin(self, worker: int) -> int:
        """Count an epoch of a DataLoader worker; return its number, from 0.

        All workers agree on it. One may have missed an epoch, because there were fewer workers or
        the loop left before it began; it would deal out another order than the others.
        """
        info = torch.utils.data.get_worker_info()
        if self._counted_in != os.getpid():
            self._counted_in, self._iterations = os.getpid(), 0
        # The seed is that of the DataLoader, and the same in all of its iterations if its
        # workers are persistent. A worker that is late begins the first one after another
        # worker has begun the second, so each entry tells which one it is of.
        seed = (info.seed - worker) % (1 << _SEED_BITS) or 1  # 0 is that of no DataLoader
        iteration, self._iterations = self._iterations, self._iterations + 1
        entries = [_Entry.of(number) for number in self._begun[: info.num_workers].tolist()]
        own = entries[worker]
        epoch = own.begun
        if not self._is_loaded:
            told = [entry.epoch_at(iteration) for entry in entries if entry.seed == seed]
            # An epoch that this worker has begun before was of an earlier DataLoader, whose seed
            # the caller had made the same.
            told = [number for number in told if number >= own.begun or not own.seed]
            epoch = max(told or [entry.begun for entry in entries])
        self._begun[worker] = _Entry(epoch + 1, seed, iteration).number()
        return epoch

    def _epoch_of_worker(self, worker: int) -> Iterator[Any]:
        """Begin an epoch of a DataLoader worker, or go on where it was loaded; iterate over it.

        It begins at once, as torchdata asks for the position before the first batch.
        """
        epoch = self.begin(worker)
        loader, is_loaded, self._is_loaded = self.loader(), self._is_loaded, False
        if is_loaded and self._next_epoch == epoch + 1:
            return iter(())
        if not is_loaded and self._next_epoch != epoch:
            loader.stop()
            loader = self._loader = self._new_loader(epoch)
        self._next_epoch = -1
        return self._rest(loader, epoch)

    def _rest(self, loader: TorchLoader, epoch: int) -> Iterator[Any]:
        yield from loader
        self._next_epoch = epoch + 1
        info = torch.utils.data.get_worker_info()
        own = cast("BaseEnqueuer[Any]", loader._loader)
        if info.num_workers > 1 and not own._has_kept_order():
            self.warn(
                f"the shards of the enqueuer differ in length, and each of the {info.num_workers} "
                "workers of the DataLoader has several, so the order of the batches is another "
                "one than with num_workers=0; take num_workers=0, one shard for each worker, or "
                "shards of equal length"
            )

    def _new_loader(self, epoch: int = 0) -> TorchLoader:
        """Return a loader for this process; `epoch` is where that of a DataLoader worker begins."""
        self._ranks.check(self._enqueuer)
        info = torch.utils.data.get_worker_info()
        if info is None:
            return _loader_of(self._enqueuer, self._steps)
        own, part, parts = self._enqueuer, info.id, info.num_workers
        if parts > _MOST_WORKERS:
            raise ValueError(f"num_workers must be at most {_MOST_WORKERS}, got {parts}")
        _check_idle(own)
        try:
            twin = own._portion(own._rank, own._world_size, part, parts)
        except ValueError as error:
            raise ValueError(
                f"the batches cannot be dealt out over num_workers={parts} workers of a "
                f"DataLoader and {own._world_size} ranks: {error}"
            ) from error
        reason = own._out_of_order(parts)
        if reason:
            self.warn(
                f"{reason} workers of the DataLoader, so the order of the batches is another one "
                "than with num_workers=0; give shards= a multiple of num_workers"
            )
        twin._begin_at(epoch)
        steps = None if self._steps is None else len(range(part, self._steps, parts))
        return _loader_of(twin, steps)


class _Asked:
    """The items of a map-style dataset in one worker of a DataLoader, by their indices.

    torch deals out batches of indices in turn: with batches of b, worker w of n is asked for
    those of batch w, w + n and so on. A part of an enqueuer that deals out its elements in such
    blocks makes just these. Where the block is not known, or the enqueuer cannot be dealt out, a
    copy of the whole makes all items, and those of the other workers are dropped.

    Args:
        here: The enqueuer, and the loaders of this process.
        length: Number of items of an epoch.
        worker: Index of this worker, from 0.
        workers: Number of workers.
    """

    def __init__(self, here: _Here, length: int, worker: int, workers: int) -> None:
        self._here = here
        self._length = length
        self._worker, self._workers = worker, workers
        self._first = self._last = -1  # index of this epoch, as asked for
        self._epoch = 0
        self._block = 0  # 0: this worker makes all items
        self._items: Iterator[Any] = iter(())

    def items(self, indices: Sequence[int]) -> list[Any]:
        """Return the items of a batch.

        Raises:
            ValueError: The indices do not come in order.
        """
        for index, following in itertools.pairwise(indices):
            if following != index + 1:
                self._refuse(index, following)
        return [self._item(index, len(indices)) for index in indices]

    def _item(self, index: int, size: int) -> Any:
        is_first = self._last < 0
        # torch begins each epoch of a worker with the same index.
        if is_first or index == self._first:
            self._begin(index, size)
        elif index <= self._last:
            self._refuse(self._last, index)
        elif self._block and index != self._following():
            self._make_all(index)
        elif not self._block:
            _drop(self._items, index - self._last - 1)
        self._last = index
        return next(self._items)

    def _begin(self, index: int, size: int) -> None:
        """Begin an epoch with the item of an index."""
        self._first, self._epoch = index, self._here.begin(self._worker)
        # The first batch of a later worker may be the last one of the epoch, and a short one.
        block = index // self._worker if self._worker else size
        if not self._here.deals_out(self._length) or index != self._worker * block or not block:
            self._make_all(index)
            return
        self._block = block
        self._items = self._here.items_of_epoch(self._epoch, self._worker, self._workers, block)

    def _make_all(self, index: int) -> None:
        """Have this worker make all items of the epoch, and go on with one of them."""
        self._here.check_repeats(self._workers)
        self._block = 0
        self._items = self._here.items_of_epoch(self._epoch, self._worker, self._workers, 0)
        _drop(self._items, index)

    def _following(self) -> int:
        """Return the next index of this worker's blocks."""
        following = self._last + 1
        return (
            following if following % self._block else following + self._block * (self._workers - 1)
        )

    def _refuse(self, index: int, following: int) -> NoReturn:
        raise ValueError(
            f"index {following} was asked for after {index} in worker {self._worker} of a "
            "DataLoader, but the enqueuer makes its items in its own order: leave out "
            "shuffle=True and sampler= of the DataLoader, and let the enqueuer shuffle "
            "(OrderedEnqueuer(shuffle=True)), or take num_workers=0, where any index gives the "
            "next item"
        )


class _Entry(NamedTuple):
    """What a DataLoader worker tells the others: one number, to be written in one step.

    Args:
        begun: Number of epochs that it has begun.
        seed: Of the DataLoader, `_SEED_BITS` of it; 0: no worker has written this.
        iteration: Number of iterations of the DataLoader before this one.
    """

    begun: int
    seed: int = 0
    iteration: int = 0

    @classmethod
    def of(cls, number: int) -> _Entry:
        """Return what a number stands for."""
        rest, iteration = divmod(number, (1 << _ITERATION_BITS))
        begun, seed = divmod(rest, (1 << _SEED_BITS))
        return cls(begun, seed, iteration)

    def number(self) -> int:
        """Return the number that stands for this."""
        iteration = self.iteration % (1 << _ITERATION_BITS)
        return (self.begun << _SEED_BITS | self.seed) << _ITERATION_BITS | iteration

    def epoch_at(self, iteration: int) -> int:
        """Return the number of the epoch that an iteration of the same DataLoader begins."""
        half = 1 << (_ITERATION_BITS - 1)
        later = (iteration - self.iteration + half) % (2 * half) - half
        return self.begun - 1 + later


def _drop(items: Iterator[Any], count: int) -> None:
    for _ in itertools.islice(items, count):
        pass


def _check_idle(enqueuer: BaseEnqueuer[Any]) -> None:
    if not enqueuer._is_idle():
        raise InvalidState(
            "the enqueuer was started in the process that has the DataLoader, and its "
            "workers cannot share it: hand over one that was not started, or num_workers=0"
        )


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
