"""The loader of a dataset's enqueuer in one process: the main process, or a DataLoader worker.

Each DataLoader worker has a copy of the dataset, and makes its part of each epoch. The workers
agree on the number of the epoch through shared memory (`Entry`). All runs in the thread that
iterates over the dataset.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from enqueuer.adapters.loading import LoaderEpochs
from enqueuer.adapters.ranks import Ranks
from enqueuer.adapters.torch.epoch_entries import SEED_BITS, Entry, agreed_epoch
from enqueuer.adapters.torch.indexed import IndexedItems
from enqueuer.adapters.torch.loader import TorchLoader
from enqueuer.common.extras import framework
from enqueuer.enqueuers.enqueuer import BaseEnqueuer, core_of, part_of
from enqueuer.enqueuers.parts import begin_at, comes_next, has_kept_order
from enqueuer.enqueuers.workload import Portion
from enqueuer.errors import EnqueuerWarning, InvalidState, StateMismatch

torch = framework("torch", "torch", "2.1")

# Most workers of a DataLoader; the memory that they share has a word for each.
_MOST_WORKERS = 1024


class LocalLoader:
    """An enqueuer, and the loader that this process has of it: of all of it, or of a part.

    Args:
        enqueuer: Enqueuer of the process that makes the dataset.
        steps: Number of batches in an epoch, over all DataLoader workers.
        ranks: Rank of this process, which decides its part of the batches.
    """

    def __init__(self, enqueuer: BaseEnqueuer[Any], steps: int | None, ranks: Ranks) -> None:
        self._ranks = ranks
        self._enqueuer = enqueuer = ranks.part_of(enqueuer)
        self._whole = LoaderEpochs(enqueuer, steps)
        self._steps = steps
        # The latest epoch of each worker of a DataLoader (`Entry`). It is shared, since most
        # DataLoaders make new workers, with new copies of the dataset, for each epoch.
        begun = torch.zeros(_MOST_WORKERS, dtype=torch.int64, device="cpu")
        self._begun = begun.share_memory_()
        # A process, and the number of iterations that have begun there.
        self._counted_in, self._iterations = 0, 0
        self._count_from_loaded()
        self.pid = os.getpid()
        # The loader of this process, and its enqueuer: the whole, or a part.
        self._loader: TorchLoader[Any] | None = None
        self._part: BaseEnqueuer[Any] | None = None
        self._endless: Iterator[Any] | None = None
        self._asked: IndexedItems | None = None
        # Whether a warning was given, by any worker of a DataLoader.
        self._is_warned = torch.zeros(1, dtype=torch.int64, device="cpu").share_memory_()
        # Number of the next epoch in a DataLoader worker that has given its whole part; else -1.
        self._next_epoch = -1
        self._is_loaded = False

    def __len__(self) -> int:
        return len(self._whole)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process that is not forked does not know of torch.distributed.
        self._ranks.check(self._enqueuer)
        return {**self.__dict__, "_loader": None, "_part": None, "_endless": None, "_asked": None}

    def loader(self) -> TorchLoader[Any]:
        """Return the loader of this process."""
        # A loader that a process has inherited belongs to another process.
        if self.pid != os.getpid():
            self.pid, self._loader, self._endless, self._asked = os.getpid(), None, None, None
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

    def asked(self, length: int, worker: int, workers: int) -> IndexedItems:
        """Return the source of items of a map-style dataset in a DataLoader worker."""
        if self._asked is None or self.pid != os.getpid():
            self.pid, self._loader, self._endless = os.getpid(), None, None
            self._asked = IndexedItems(self, length, worker, workers)
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
        options = core_of(own).options
        rank = options.rank, options.world_size
        if block:
            twin = part_of(own, Portion(*rank, worker, workers, block))
        else:
            twin = part_of(own, Portion(*rank))
            index, ranks = rank
            core_of(twin).record_as(index + ranks * worker, ranks * workers)
        begin_at(core_of(twin), epoch)
        self._loader = _loader_of(twin, None)
        return _endless(self._loader)

    def has_blocks(self, length: int) -> bool:
        """Return whether each worker of a DataLoader can make its own items alone."""
        return core_of(self._enqueuer).workload.has_blocks(length)

    def check_repeats(self, workers: int) -> None:
        """Raise ValueError if the workers of a DataLoader cannot make all items each; warn."""
        if workers == 1:
            return
        try:
            core_of(self._enqueuer).workload.check_repeats()
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
        """Set the next epoch, here and in all DataLoader workers."""
        own = self._enqueuer
        if not comes_next(core_of(own), epoch):
            self.stop()
            if not core_of(own).is_idle:
                raise InvalidState(
                    f"set_epoch({epoch}) was called, but the enqueuer was started by its owner "
                    "and is at another epoch; call its stop() first, or let the dataset start it"
                )
            begin_at(core_of(own), epoch)
        self._begun.fill_(Entry(epoch).number())

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader of this process."""
        state = self.loader().state_dict()
        # The other workers are still in the epoch whose part this worker has given.
        return {**state, "part_is_over": True} if self._next_epoch >= 0 else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the loader of this process continue at a position."""
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
            self._begun[info.id] = Entry(epoch - is_over).number()
            self._next_epoch = epoch if is_over else -1
            self._is_loaded = True

    def stop(self) -> None:
        """Stop the loader of this process."""
        if self.pid == os.getpid() and self._loader is not None:
            self._loader.stop()
        self._endless = self._asked = None

    def _count_from_loaded(self) -> None:
        saved = core_of(self._enqueuer).saved
        # DataLoader workers refuse a position within an epoch.
        if saved.is_loaded:
            self._begun.fill_(Entry(saved.epoch.number).number())

    def begin(self, worker: int) -> int:
        """Count an epoch of a DataLoader worker; return its number, from 0.

        All workers agree on it. A worker that counted by itself could differ: it may have missed
        an epoch, because there were fewer workers, or the loop left before it began.
        """
        info = torch.utils.data.get_worker_info()
        if self._counted_in != os.getpid():
            self._counted_in, self._iterations = os.getpid(), 0
        # The seed is that of the DataLoader, and the same in all of its iterations if its
        # workers are persistent. A slow worker may begin the first iteration after another
        # worker has begun the second, so each entry has the number of its iteration. An entry
        # that no worker has written has the seed 0.
        seed = (info.seed - worker) % (1 << SEED_BITS) or 1
        iteration, self._iterations = self._iterations, self._iterations + 1
        entries = [Entry.of(number) for number in self._begun[: info.num_workers].tolist()]
        epoch = entries[worker].begun
        if not self._is_loaded:
            epoch = agreed_epoch(entries, worker, seed, iteration)
        self._begun[worker] = Entry(epoch + 1, seed, iteration).number()
        return epoch

    def _epoch_of_worker(self, worker: int) -> Iterator[Any]:
        """Begin an epoch of a DataLoader worker, or continue at a loaded position; iterate over it.

        It begins at once, since torchdata asks for the position before the first batch.
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

    def _rest(self, loader: TorchLoader[Any], epoch: int) -> Iterator[Any]:
        yield from loader
        self._next_epoch = epoch + 1
        info = torch.utils.data.get_worker_info()
        own = self._part
        if info.num_workers > 1 and own is not None and not has_kept_order(core_of(own)):
            self.warn(
                f"the shards of the enqueuer differ in length, and each of the {info.num_workers} "
                "workers of the DataLoader has several, so the order of the batches is another "
                "one than with num_workers=0; take num_workers=0, one shard for each worker, or "
                "shards of equal length"
            )

    def _new_loader(self, epoch: int = 0) -> TorchLoader[Any]:
        """Return a loader for this process; that of a DataLoader worker begins with `epoch`."""
        self._ranks.check(self._enqueuer)
        info = torch.utils.data.get_worker_info()
        if info is None:
            self._part = self._enqueuer
            return _loader_of(self._enqueuer, self._steps)
        own, part, parts = self._enqueuer, info.id, info.num_workers
        if parts > _MOST_WORKERS:
            raise ValueError(f"num_workers must be at most {_MOST_WORKERS}, got {parts}")
        _check_idle(own)
        options = core_of(own).options
        try:
            twin = part_of(own, Portion(options.rank, options.world_size, part, parts))
        except ValueError as error:
            raise ValueError(
                f"the batches cannot be divided over num_workers={parts} workers of a "
                f"DataLoader and {options.world_size} ranks: {error}"
            ) from error
        reason = core_of(own).workload.out_of_order(parts)
        if reason:
            self.warn(
                f"{reason} workers of the DataLoader, so the order of the batches is another one "
                "than with num_workers=0; give shards= a multiple of num_workers"
            )
        begin_at(core_of(twin), epoch)
        steps = None if self._steps is None else len(range(part, self._steps, parts))
        self._part = twin
        return _loader_of(twin, steps)


def _check_idle(enqueuer: BaseEnqueuer[Any]) -> None:
    if not core_of(enqueuer).is_idle:
        raise InvalidState(
            "the enqueuer was started in the process that has the DataLoader, and its "
            "workers cannot share it; pass one that was not started, or num_workers=0"
        )


def _loader_of(enqueuer: BaseEnqueuer[Any], steps: int | None) -> TorchLoader[Any]:
    # With rank 0 of 1 the enqueuer is left as it is.
    return TorchLoader(enqueuer, steps_per_epoch=steps, rank=0, world_size=1)


def _endless(loader: TorchLoader[Any]) -> Iterator[Any]:
    while True:
        is_empty = True
        for item in loader:
            is_empty = False
            yield item
        if is_empty:
            raise ValueError("the enqueuer has nothing: an epoch without a single item")
