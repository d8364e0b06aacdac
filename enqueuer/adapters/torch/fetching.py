"""What a worker of a DataLoader does: it fetches and collates batches of a dataset.

    map-style dataset: a batch of indices -> LoaderWorker.fetch()   -> a batch
    iterable dataset:  a shard            -> LoaderWorker.batches() -> batches, until it ends

torch's own fetcher does the work, so a dataset is treated as torch treats it. If samples may be
skipped, or are fetched several at once, it sees a `FallibleDataset` in the place of the dataset.

torch's `default_collate` looks up its functions for arrays and tensors in a table. A worker process
replaces these two, so types, containers and errors stay those of torch, and samples are stacked
straight into shared memory.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import random
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from enqueuer.adapters.torch.position import GLOBAL, holds_generator
from enqueuer.common.extras import framework
from enqueuer.common.objects import is_plain_tensor
from enqueuer.common.text import str_of
from enqueuer.errors import StateMismatch
from enqueuer.transport.errors import decode_error, encode_error
from enqueuer.workers import arrays
from enqueuer.workers.logs import log_error
from enqueuer.workers.plan import OnError, Raised, may_skip
from enqueuer.workers.shards import Shard, Task, seeds_of
from enqueuer.workers.threads import ThreadSnapshot, element_snapshots, set_snapshots

torch = framework("torch", "torch", "2.1")

_dtype_of = operator.attrgetter("dtype")
_collate = torch.utils.data._utils.collate
_of_torch = torch.utils.data._utils.worker
_END = object()
# How torch seeds a worker, by the seed of the iteration and its index.
_SEEDERS: dict[str, Callable[[int, int], object]] = {
    "random": lambda base_seed, index: random.seed(base_seed + index),
    "torch": lambda base_seed, index: torch.manual_seed(base_seed + index),
    "numpy": lambda base_seed, index: np.random.seed(_of_torch._generate_state(base_seed, index)),
}


def _marks() -> dict[str, int]:
    """Return numbers that stay the same until a global generator is drawn from, or seeded."""
    return {name: zlib.crc32(repr(stream.get()).encode()) for name, stream in GLOBAL.items()}


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
    if type(first) is not torch.Tensor or not is_plain_tensor(first):
        return _by_torch[torch.Tensor](batch, collate_fn_map=collate_fn_map)
    return arrays.stack_tensors(batch, torch)


def stack_arrays(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    """Return arrays stacked along a new first axis, as a tensor; see `stack_tensors`."""
    first, count = batch[0], len(batch)
    dtype = first.dtype
    is_known = dtype.kind in "biuf" and dtype.isnative and first.size
    # These two lines call no Python code for each array.
    is_known = is_known and [*map(type, batch)].count(np.ndarray) == count
    if is_known and [*map(_dtype_of, batch)].count(dtype) == count:
        # torch lacks some dtypes, such as float128, and has its own error of shapes that differ.
        with contextlib.suppress(TypeError, ValueError):
            return torch.from_numpy(arrays.stack_arrays(batch))
    return _by_torch[np.ndarray](batch, collate_fn_map=collate_fn_map)


class _Threads(threading.local):
    """The threads that fetch samples; each worker that is a thread has its own."""

    def __init__(self, count: int) -> None:
        self.map = ThreadPoolExecutor(count, "enqueuer-sample").map


class FallibleDataset:
    """A dataset for torch's fetcher, whose samples may fail, or are fetched several at once.

    Args:
        dataset: The dataset.
        on_error: Handling of a sample that fails.
        concurrency: Number of samples that are fetched at once, each in a thread.
    """

    def __init__(self, dataset: Any, on_error: OnError, concurrency: int) -> None:
        self._dataset = dataset
        self._on_error = on_error
        self._concurrency = concurrency

    @functools.cached_property
    def _threads(self) -> _Threads:
        # Made by the worker, as threads cannot be sent to it.
        return _Threads(self._concurrency)

    def __getitems__(self, indices: Iterable[Any]) -> list[Any]:
        """Return the samples of a batch, with `Raised` for those that are left out."""
        if self._concurrency == 1:
            return list(map(self._sample, indices))
        current: dict[int, Any] = {}

        def snapshots() -> list[ThreadSnapshot]:
            found = element_snapshots(current)
            return [at._replace(indices=tuple(map(str_of, at.indices))) for at in found]

        set_snapshots(snapshots)
        try:
            return list(self._threads.map(functools.partial(self._in_thread, current), indices))
        finally:
            set_snapshots(None)

    def _in_thread(self, current: dict[int, Any], index: Any) -> Any:
        ident = threading.get_ident()
        current[ident] = ((index,),)
        try:
            return self._sample(index)
        finally:
            del current[ident]

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of a stream in the same way."""
        iterator = iter(self._dataset)
        while True:
            try:
                sample = next(iterator, _END)
            except Exception as error:
                sample = self._instead(error, "the next sample")
            if sample is _END:
                return
            yield sample

    def _sample(self, index: Any) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            return self._instead(error, f"sample {index!r}")

    def _instead(self, error: Exception, name: str) -> Any:
        """Return the replacement of a sample, or `Raised`; raise its error if `on_error` says."""
        if not may_skip(error, self._on_error):
            raise error
        if callable(self._on_error):
            value = self._on_error(error)
            return Raised(error) if value is None else value
        log_error(error, f"skipped {name}: {str_of(error, repr)}")
        return Raised(error)


def _collate_usable(collate: Callable[[Any], Any], samples: list[Any]) -> Any:
    """Make a batch of the samples that were not skipped; raise the last error if all were."""
    usable = [sample for sample in samples if type(sample) is not Raised]
    if not usable and samples:
        raise samples[-1].error
    return collate(usable)


def fetchers_of(loader: Any) -> Callable[[], Any]:
    """Return the function that makes torch's fetcher of the dataset of a DataLoader.

    For an iterable dataset each call begins an iteration.
    """
    dataset, collate = loader.dataset, loader.collate_fn
    if loader._auto_collation and (loader.on_error, loader.concurrency) != ("raise", 1):
        dataset = FallibleDataset(dataset, loader.on_error, loader.concurrency)
        collate = functools.partial(_collate_usable, collate)
    make = torch.utils.data._DatasetKind.create_fetcher
    kind, is_batched = loader._dataset_kind, loader._auto_collation
    return functools.partial(make, kind, dataset, is_batched, collate, loader.drop_last)


@dataclass(eq=False)
class LoaderWorker:
    """A worker of a DataLoader; each process has a copy.

    Attributes:
        dataset: The dataset.
        make_fetcher: Makes torch's fetcher of the dataset.
        workers: Number of workers.
        base_seed: Seed of the iteration, which torch has drawn.
        init: `worker_init_fn`, or None.
        shared_seed: Seed that the data pipes of all workers share; None without them.
        size: Number of samples in a batch of an iterable dataset; None: its samples are batches.
        is_thread: Whether it is a thread, which changes nothing that is its process's.
        goes_on: Whether an error of an iterable dataset takes the place of its batch, and the next
            batch follows.
        epoch_offset: Difference of the dataset's epoch from the number of an epoch; None: its epoch
            is not set.
    """

    dataset: Any
    make_fetcher: Callable[[], Any]
    workers: int
    base_seed: int
    init: Callable[[int], object] | None
    shared_seed: int | None
    size: int | None
    is_thread: bool
    goes_on: bool
    epoch_offset: int | None = None
    # Number of the epoch for which that of the dataset was set.
    _epoch: int | None = field(init=False, default=None)
    _has_begun: bool = field(init=False, default=False)
    # Numbers of what `init` has seeded, by the name of the global generator.
    _seeded: dict[str, int] = field(init=False, default_factory=dict)

    @functools.cached_property
    def _fetcher(self) -> Any:
        return self.make_fetcher()

    def begin(self, index: int) -> Callable[[Task], Any] | None:
        """Seed the process as torch does, set its worker info, and call `worker_init_fn`.

        Returns:
            How it is seeded before each batch of a map-style dataset; None: as by any enqueuer.
        """
        collate_in_place()
        self._seed(index)
        if self.shared_seed is not None:
            shared = torch.Generator()
            shared.manual_seed(self.shared_seed)
            torch.utils.data.graph_settings.apply_random_seed(self.dataset, shared)
        _of_torch._worker_info = _of_torch.WorkerInfo(
            id=index, num_workers=self.workers, seed=self.base_seed + index, dataset=self.dataset
        )
        if self.init is None:
            return None
        self._seeded = self._seeded_by(self.init, index)
        return self._seed_batch if self._seeded else None

    def _seeded_by(self, init: Callable[[int], object], index: int) -> dict[str, int]:
        """Call `worker_init_fn`; return a number for each global generator that it has seeded.

        A program that seeds by hand wants the same numbers in each run, whatever torch has drawn
        for the iteration. So the seeds of batches and epochs come from these numbers.

        The recipe of torch's documentation does not count. Its seed has the index of the worker,
        and numbers must not depend on the worker that is free first.
        """
        recipe = torch.initial_seed() % 2**32
        random.seed(recipe), np.random.seed(recipe)
        by_recipe = _marks()
        self._seed(index)
        before = _marks()
        init(index)
        after = _marks()
        return {n: mark for n, mark in after.items() if mark not in (before[n], by_recipe[n])}

    def _seed_batch(self, task: Task) -> None:
        """Seed before a batch; if `worker_init_fn` seeds torch, it decides alone about that."""
        names = ("random", "numpy", "torch")
        bases = [self._seeded.get(name, task.random_seed) for name in names]
        python, legacy, of_torch = (seeds_of(Task(task.index, task.epoch, base)) for base in bases)
        random.seed(python.python), np.random.seed(legacy.legacy)
        if "torch" not in self._seeded:
            torch.default_generator.manual_seed(of_torch.torch)

    def _set_epoch(self, epoch: int) -> None:
        """Set the epoch of the dataset, if that is to be done, once for each."""
        if self.epoch_offset is not None and self._epoch != epoch:
            self.dataset.set_epoch(epoch + self.epoch_offset)
            self._epoch = epoch

    def fetch(self, indices: Any, task: Task) -> Any:
        """Return the batch of some indices of a map-style dataset."""
        self._set_epoch(task.epoch)
        batch = self._fetcher.fetch(indices)
        return NoBatch() if batch is None else batch

    def batches(self, shard: Shard) -> Iterator[Any]:
        """Yield the batches of an iterable dataset, which each worker iterates by itself."""
        if not self.is_thread:
            self._begin_epoch(shard)
            self._set_epoch(shard.epoch)
        fetcher = self.make_fetcher()
        indices = None if self.size is None else [None] * self.size
        while True:
            try:
                batch = fetcher.fetch(indices)
            except StopIteration:
                return
            except Exception as error:
                if not self.goes_on:
                    raise
                batch = NoBatch(error)
            yield NoBatch() if batch is None else batch

    def _begin_epoch(self, shard: Shard) -> None:
        """Prepare the process, once, and seed it for each epoch but the first.

        So a new process, after a death or a resume, draws the same numbers in that epoch.
        """
        if not self._has_begun:
            self._has_begun = True
            self.begin(shard.index)
            # Data pipes are seeded by what they share.
            is_seeded = self.shared_seed is not None
            if shard.epoch and not is_seeded and holds_generator(self.dataset):
                raise StateMismatch(
                    f"{type(self.dataset).__name__} keeps a random generator from epoch to epoch, "
                    f"and a new worker cannot know its state in epoch {shard.epoch}; make the "
                    "generator in __iter__, seeded by torch.initial_seed(), or give "
                    "persistent_workers=False"
                )
        if shard.epoch:
            self._seed(shard.index, shard.epoch)

    def _seed(self, index: int, epoch: int = 0) -> None:
        for name, seed in _SEEDERS.items():
            base = self._seeded.get(name, self.base_seed)
            if epoch:
                place = np.random.SeedSequence((base, epoch))
                # As large as the seeds that torch draws.
                base = int(place.generate_state(1, np.uint64)[0] >> np.uint64(2))
            seed(base, index)


class NoBatch(Raised):
    """Comes in the place of a batch: the loop raises the error of a worker, and may go on.

    Args:
        error: The exception. None: the batch is None, which an enqueuer would leave out.
    """

    def __init__(self, error: Any = None) -> None:
        super().__init__(error)

    def __reduce__(self) -> Any:
        return _no_batch, (None if self.error is None else encode_error(self.error),)


def _no_batch(data: bytes | None) -> NoBatch:
    return NoBatch(None if data is None else decode_error(data))
