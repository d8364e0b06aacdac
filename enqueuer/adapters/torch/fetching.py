"""What a worker of a DataLoader does: it fetches and collates batches of a dataset.

    map-style dataset: a batch of indices -> FetchIndices -> a batch
    iterable dataset:  a shard            -> FetchShard   -> batches, until the dataset ends

torch's own fetcher does the work, so a dataset is treated as torch treats it.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from enqueuer.adapters.torch import collating
from enqueuer.adapters.torch.samples import Samples
from enqueuer.common.extras import framework
from enqueuer.transport.error_codec import decode_error, encode_error
from enqueuer.workers.seeding import seed_python_and_numpy
from enqueuer.workers.shards import Shard, Task

torch = framework("torch", "torch", "2.1")

_of_torch = torch.utils.data._utils.worker


@dataclass(frozen=True)
class Dataset:
    """A dataset, and how batches are made of it.

    Attributes:
        kind: torch's kind of the dataset: map-style or iterable.
        dataset: The dataset.
        is_batched: Whether several samples make a batch.
        collate: Function that makes a batch of samples.
        drop_last: Whether an incomplete batch of an iterable dataset is left out.
    """

    kind: Any
    dataset: Any
    is_batched: bool
    collate: Callable[[Any], Any]
    drop_last: bool

    def fetcher(self) -> Any:
        """Return torch's fetcher; for an iterable dataset this begins an iteration."""
        kinds = torch.utils.data._DatasetKind
        return kinds.create_fetcher(
            self.kind, self.dataset, self.is_batched, self.collate, self.drop_last
        )


@dataclass(frozen=True)
class Worker:
    """What a worker process does before its first batch.

    Attributes:
        dataset: The dataset of the process.
        workers: Number of workers.
        base_seed: Seed of the iteration, which torch has drawn.
        init: `worker_init_fn`, or None.
        shared_seed: Seed that the data pipes of all workers share; None without them.
    """

    dataset: Any
    workers: int
    base_seed: int
    init: Callable[[int], object] | None
    shared_seed: int | None

    def begin(self, index: int) -> bool:
        """Seed the process as torch does, set its worker info, and call `worker_init_fn`.

        Returns:
            Whether `worker_init_fn` has left torch's generator as it was.
        """
        collating.collate_in_place()
        seed = self.base_seed + index
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(_of_torch._generate_state(self.base_seed, index))
        if self.shared_seed is not None:
            shared = torch.Generator()
            shared.manual_seed(self.shared_seed)
            torch.utils.data.graph_settings.apply_random_seed(self.dataset, shared)
        _of_torch._worker_info = _of_torch.WorkerInfo(
            id=index, num_workers=self.workers, seed=seed, dataset=self.dataset
        )
        if self.init is None:
            return True
        before = torch.get_rng_state()
        self.init(index)
        return bool(torch.equal(before, torch.get_rng_state()))


class FetchIndices:
    """Fetch the batch of some indices of a map-style dataset.

    Args:
        dataset: The dataset.
        worker: Preparation of a worker process.
        samples: How the samples of a batch are fetched one by one; None: torch's fetcher does it.
    """

    def __init__(self, dataset: Dataset, worker: Worker, samples: Samples | None) -> None:
        self._dataset = dataset
        self._worker = worker
        self._samples = samples
        self._fetcher: Any = None

    def begin(self, index: int) -> Callable[[Task], None] | None:
        """Prepare a worker process; return how it is seeded before each batch.

        A `worker_init_fn` that seeds torch's generator decides alone about that. What it seeds
        besides, as the recipe of torch's documentation does, is seeded before each batch.
        Otherwise the numbers would depend on the worker that is free first.
        """
        return None if self._worker.begin(index) else _seed_others

    def __call__(self, indices: Any) -> Any:
        """Return a batch."""
        if self._fetcher is None:
            samples, dataset = self._samples, self._dataset
            self._fetcher = SampleFetcher(dataset, samples) if samples else dataset.fetcher()
        batch = self._fetcher.fetch(indices)
        return NOTHING if batch is None else batch

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fetcher": None}


class SampleFetcher:
    """A fetcher like torch's, which fetches the samples of a map-style dataset one by one."""

    def __init__(self, dataset: Dataset, samples: Samples) -> None:
        self._dataset = dataset
        self._samples = samples

    def fetch(self, indices: Any) -> Any:
        """Return the batch of some indices."""
        return self._dataset.collate(self._samples.fetch(self._dataset.dataset, indices))


class StreamFetcher:
    """A fetcher like torch's, which draws the samples of an iterable dataset one by one."""

    def __init__(self, dataset: Dataset, samples: Samples) -> None:
        self._dataset = dataset
        self._samples = samples
        self._iterator = iter(dataset.dataset)
        self._is_over = False

    def fetch(self, indices: Any) -> Any:
        """Return a batch of as many samples as there are indices; raise StopIteration at the end.

        A sample that fails takes a place as well, so a batch ends if all samples fail.
        """
        if self._is_over:
            raise StopIteration
        samples, self._is_over = self._samples.draw(self._iterator, len(indices))
        if self._is_over and (not samples or self._dataset.drop_last):
            raise StopIteration
        return self._dataset.collate(samples)


def _seed_others(task: Task) -> None:
    seed_python_and_numpy(task)


class FetchShard:
    """Fetch batches of an iterable dataset, which each worker iterates by itself.

    Args:
        dataset: The dataset.
        worker: Preparation of a worker process; None for threads.
        size: Number of samples in a batch; None: the samples are batches.
        goes_on: Whether an error takes the place of its batch, and the next batch follows.
        samples: How the samples of a batch are drawn one by one; None: torch's fetcher does it.
    """

    def __init__(
        self,
        dataset: Dataset,
        worker: Worker | None,
        size: int | None,
        goes_on: bool,
        samples: Samples | None,
    ) -> None:
        self._dataset = dataset
        self._samples = None if size is None else samples
        self._goes_on = goes_on
        self._worker = worker
        self._indices = None if size is None else [None] * size

    def __call__(self, shard: Shard) -> Iterator[Any]:
        """Yield the batches of a worker."""
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.begin(shard.index)
        dataset, samples = self._dataset, self._samples
        fetcher = StreamFetcher(dataset, samples) if samples else dataset.fetcher()
        fetch = functools.partial(fetcher.fetch, self._indices)
        while True:
            try:
                batch = fetch()
            except StopIteration:
                return
            except Exception as error:
                if not self._goes_on:
                    raise
                batch = CaughtError(error)
            yield NOTHING if batch is None else batch


class Nothing:
    """Stands for a batch that is None, as an enqueuer leaves None out."""

    def __reduce__(self) -> str:
        return "NOTHING"


NOTHING = Nothing()


class CaughtError:
    """An exception of a worker, in the place of its batch: the loop raises it and may go on.

    Args:
        error: The exception.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return _caught, (encode_error(self.error),)


def _caught(data: bytes) -> CaughtError:
    return CaughtError(decode_error(data))
