"""One iteration over a DataLoader with workers.

    torch's samplers -> IndexSource -> an OrderedEnqueuer -> batches in order   (map-style)
    shards           -> a GeneratorEnqueuer               -> batches in turn    (iterable)

It draws from torch's generators exactly as torch's own iterator does, which is its base class.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from enqueuer.adapters.torch import failures
from enqueuer.adapters.torch.drawn_indices import DrawnIndices
from enqueuer.adapters.torch.fetching import (
    NOTHING,
    CaughtError,
    Dataset,
    FetchIndices,
    FetchShard,
    SampleFetcher,
    Worker,
)
from enqueuer.adapters.torch.position import Position, advanced
from enqueuer.adapters.torch.samples import Samples
from enqueuer.adapters.torch.worker_handles import WorkerHandle, handles_of
from enqueuer.common.extras import framework
from enqueuer.enqueuers.enqueuer import BaseEnqueuer, core_of
from enqueuer.enqueuers.generator import GeneratorEnqueuer
from enqueuer.enqueuers.ordered import OrderedEnqueuer
from enqueuer.enqueuers.parts import begin_at
from enqueuer.errors import BatchTimeout, EnqueuerError, WorkerDied
from enqueuer.monitoring.stats import Stats
from enqueuer.workers.messages import Epoch, Start

torch = framework("torch", "torch", "2.1")

_BaseIterator: Any = torch.utils.data.dataloader._BaseDataLoaderIter
_LocalIterator: Any = torch.utils.data.dataloader._SingleProcessDataLoaderIter

_pinning: Any = torch.utils.data._utils.pin_memory


class WorkerIterator(_BaseIterator):
    """An iterator whose batches come from workers of an enqueuer.

    Args:
        loader: The DataLoader.
        options: Options of the enqueuer.
        samples: How samples of a map-style dataset are fetched; None: as torch does it.
        position: Position of the loader, which this iterator moves on.
    """

    _base_seed: int

    def __init__(
        self,
        loader: Any,
        options: Mapping[str, Any],
        samples: Samples | None,
        position: Position,
    ) -> None:
        with position.resuming():
            super().__init__(loader)
        self._base_seed = position.seed(self._base_seed)
        self._position = position
        self._indices = IndexSource()
        self._options = options
        self._samples = samples
        self._enqueuer = self._new_enqueuer(loader)
        self._batches: Iterator[Any] = iter(())
        self._handles: list[WorkerHandle] | None = None
        self._is_started = self._is_over = False
        self._reset(loader, first_iter=True)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin an epoch: the first one, or with persistent workers another one."""
        self._leave_epoch()
        with self._position.begin(self, first_iter) as resumed:
            super()._reset(loader, first_iter)
            if resumed is not None:
                self._sampler_iter = self._position.reopened(loader)
            self._indices.iterator = self._position.draw(self._sampler_iter)
            if not first_iter and self._shared_seed is not None:
                # The data pipes get another seed, which only a new worker takes.
                self._enqueuer.stop()
                self._enqueuer, self._is_started = self._new_enqueuer(loader), False
            if not self._is_started:
                self._start(resumed)
            self._batches = iter(self._enqueuer)
        self._is_over = False
        self._handles = None
        # Batches that were left out count as well.
        may_skip = self._options["on_error"] is not CaughtError
        if self._is_iterable or may_skip or not self._options["ordered"]:
            self._position.ask(self._enqueuer)

    def _start(self, resumed: Mapping[str, Any] | None) -> None:
        enqueuer, position = self._enqueuer, self._position
        if resumed is not None and "workers" in resumed:
            enqueuer.load_state_dict(resumed["workers"])
        elif position.step or position.epoch:
            start = {0: Start(position.step)} if position.step else None
            begin_at(core_of(enqueuer), Epoch(position.epoch, start))
        enqueuer.start()
        self._is_started = True

    @property
    def _workers(self) -> list[WorkerHandle]:
        """The worker processes; other code reads them by torch's name for them."""
        if self._handles is None:
            self._handles = handles_of(self._enqueuer)
        return self._handles

    @property
    def _is_iterable(self) -> bool:
        return bool(self._dataset_kind == torch.utils.data._DatasetKind.Iterable)

    def _leave_epoch(self) -> None:
        """Drop what is left of the epoch before, after a `break` or an error."""
        if not self._is_started or self._is_over:
            return
        if not self._is_iterable:
            self._indices.cut()
            # If a worker has died, or hangs, new workers are needed.
            with contextlib.suppress(EnqueuerError):
                deque(self._batches, maxlen=0)
                return
        # What is left of an iterable dataset may have no end.
        self._enqueuer.stop()
        self._is_started = False

    def _new_enqueuer(self, loader: Any) -> BaseEnqueuer[Any]:
        worker = Worker(
            loader.dataset,
            self._num_workers,
            self._base_seed,
            self._init_of(loader),
            self._shared_seed,
        )
        dataset = dataset_of(loader)
        is_apart = self._options["backend"] != "thread"
        options = {**self._options, "random_seed": self._base_seed}
        if self._is_iterable:
            size = loader.batch_size if self._auto_collation else None
            goes_on = self._options["on_error"] is CaughtError
            shards = FetchShard(dataset, worker if is_apart else None, size, goes_on, self._samples)
            return GeneratorEnqueuer(shards, shards=self._num_workers, **options)
        fetch = FetchIndices(dataset, worker, self._samples if self._auto_collation else None)
        enqueuer = OrderedEnqueuer(self._indices, fetch, **options)
        source: Any = core_of(enqueuer).workload.source
        source.begin_worker = fetch.begin
        return enqueuer

    def _init_of(self, loader: Any) -> Callable[[int], object] | None:
        """Return the function that each worker calls when it starts."""
        init: Callable[[int], object] | None = loader.worker_init_fn
        if not _is_pipe(loader.dataset):
            return init
        divide = torch.utils.data.dataloader._sharding_worker_init_fn
        return functools.partial(divide, init, self._world_size, self._rank)

    def _next_data(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._is_over = True
            self._position.end(self)
            if not self._persistent_workers:
                self._shutdown_workers()
                self._position.ended = self._enqueuer
            raise
        except BatchTimeout as error:
            raise failures.timed_out(error, self._timeout) from error
        except WorkerDied as error:
            raise failures.died(error) from error
        self._position.advance(self)
        if isinstance(batch, CaughtError):
            failures.reraise(batch.error)
        if batch is NOTHING:
            return None
        if self._pin_memory:
            return _pinning.pin_memory(batch, self._pin_memory_device)
        return batch

    def stats(self) -> Stats:
        """Return the statistics of the workers."""
        return self._enqueuer.stats()

    def _shutdown_workers(self) -> None:
        """End the workers; libraries call this by torch's name for it."""
        self._enqueuer.stop()


class LocalIterator(_LocalIterator):
    """torch's iterator without workers, with a position.

    Args:
        loader: The DataLoader.
        samples: How samples of a map-style dataset are fetched; None: as torch does it.
        position: Position of the loader, which this iterator moves on.
    """

    _base_seed: int
    _sampler_iter: Iterator[Any]

    def __init__(self, loader: Any, samples: Samples | None, position: Position) -> None:
        before = position.streams()
        with position.resuming():
            super().__init__(loader)
        if samples is not None and self._auto_collation:
            self._dataset_fetcher = SampleFetcher(dataset_of(loader), samples)
        self._base_seed = position.seed(self._base_seed)
        self._position = position
        with position.begin(self, is_first=True) as resumed:
            if resumed is None:
                position.note(before)
                if self._dataset_kind == torch.utils.data._DatasetKind.Map:
                    self._sampler_iter = position.draw(self._sampler_iter)
            else:
                self._resume(loader)

    def _resume(self, loader: Any) -> None:
        indices = self._position.reopened(loader)
        kinds = torch.utils.data._DatasetKind
        if self._dataset_kind == kinds.Map:
            self._sampler_iter = advanced(self._position.draw(indices), self._position.step)
            return
        # An iterable dataset is iterated again.
        self._sampler_iter = indices
        self._dataset_fetcher = dataset_of(loader).fetcher()
        for _ in range(self._position.step):
            self._dataset_fetcher.fetch(next(indices))

    def _next_data(self) -> Any:
        try:
            batch = super()._next_data()
        except StopIteration:
            self._position.end(self)
            raise
        except Exception:
            # The loop may go on behind the batch.
            self._position.advance(self)
            raise
        self._position.advance(self)
        return batch


def _is_pipe(dataset: Any) -> bool:
    """Return whether torch divides a dataset among the workers, as it does with data pipes."""
    kinds = (getattr(torch.utils.data, name, None) for name in ("IterDataPipe", "MapDataPipe"))
    return isinstance(dataset, tuple(kind for kind in kinds if kind is not None))


def dataset_of(loader: Any) -> Dataset:
    """Return the dataset of a DataLoader, and how batches are made of it."""
    return Dataset(
        loader._dataset_kind,
        loader.dataset,
        loader._auto_collation,
        loader.collate_fn,
        loader.drop_last,
    )


class IndexSource:
    """The batches of indices of one epoch after the other, which the loop's thread reads.

    Attributes:
        iterator: Batches of indices of the next epoch.
    """

    def __init__(self) -> None:
        self.iterator = DrawnIndices(iter(()), "")
        self._current = self.iterator

    def __iter__(self) -> Iterator[Any]:
        self._current = self.iterator
        return self._current

    def cut(self) -> None:
        """End the epoch that is being read."""
        self._current.cut()
