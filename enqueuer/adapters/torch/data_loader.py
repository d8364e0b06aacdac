"""A DataLoader of torch, whose workers are those of an enqueuer."""

from __future__ import annotations

import multiprocessing
import os
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

from enqueuer.adapters.torch import index_order
from enqueuer.adapters.torch.fetching import CaughtError
from enqueuer.adapters.torch.iterating import LocalIterator, WorkerIterator
from enqueuer.adapters.torch.position import Position
from enqueuer.adapters.torch.samples import Samples
from enqueuer.common import checks
from enqueuer.common.extras import framework
from enqueuer.enqueuers.configs import Auto, Processes
from enqueuer.enqueuers.options import Backends, Options
from enqueuer.errors import InvalidState
from enqueuer.monitoring import usage
from enqueuer.monitoring.stats import Stats
from enqueuer.workers.plan import OnError

torch = framework("torch", "torch", "2.1")

_DataLoader: Any = torch.utils.data.DataLoader


# Arguments that torch's class does not have. Each is an attribute of the same name, as trainers
# build a loader again from the attributes that its arguments name.
_OWN = ("backend", "max_restarts", "on_error", "concurrency", "stall_timeout", "trace")


class DataLoader(_DataLoader):
    """A `torch.utils.data.DataLoader` whose workers are those of an enqueuer.

    It is a subclass of torch's class and takes all of its arguments, with their meaning. For the
    same generators it gives the same indices in the same order. Large batches come in memory that
    the worker shares with this process, and the default `collate_fn` stacks samples there.

    Args:
        dataset: Map-style or iterable dataset, as for torch.
        batch_size: Number of samples in a batch; 1 by default. None: samples are batches.
        shuffle: Whether each epoch has a new order.
        sampler: Indices of an epoch, in their order.
        batch_sampler: Batches of indices of an epoch.
        num_workers: Number of workers; 0, the default: this process loads the data. `"auto"`
            begins with one worker and adds others while the loop waits, for map-style datasets.
        collate_fn: Function that makes a batch of a list of samples; it runs in the worker.
        pin_memory: Whether tensors are copied into pinned memory, if there is an accelerator.
        drop_last: Whether an incomplete last batch is left out.
        timeout: Seconds without a batch after which the loop raises an error; 0, the default:
            no limit. The error is a `BatchTimeout` and a `RuntimeError`.
        worker_init_fn: Function that each worker process calls with its index when it starts. If
            it seeds torch's generator, workers do not seed that before each batch.
        multiprocessing_context: Start method of the processes, or a context; by default that of
            `multiprocessing`.
        generator: Generator of torch that decides the order and the seeds; by default the global
            one.
        prefetch_factor: Number of batches ahead for each worker; 2 by default.
        persistent_workers: Whether workers stay after an epoch. False, the default: each epoch
            starts new ones, with new copies of the dataset.
        pin_memory_device: As for torch, which ignores it.
        in_order: Whether batches come in the order of their indices; True by default.
        backend: Kind of the workers. `"process"` by default, or `Processes(...)`. With `"thread"`
            the workers share the dataset, and `get_worker_info()` returns None there.
        max_restarts: Number of dead worker processes that are replaced, in total; 0 by default.
        on_error: Reaction to an exception in a worker. `"raise"`, the default: the loop raises it
            at the place of the batch, and may go on. `"skip"`: it is logged, and the batch comes
            without the sample. A function: its result, unless None, replaces the sample. A batch
            without any sample, or whose `collate_fn` fails, is treated in the same way. Both need
            `num_workers >= 1`. An iterable dataset goes on only if its iterator does; a generator
            ends with its error.
        concurrency: Number of samples of a batch that each worker fetches at once, in threads; 1
            by default. For samples that wait, for a network or a disk. The dataset must be
            thread-safe, and `__getitems__` is not called.
        stall_timeout: Seconds without a batch after which a warning shows where each worker is;
            60 by default. None: no warning.
        trace: Path of a file for the timeline of the latest epoch, or with `persistent_workers`
            of all epochs. It needs `num_workers >= 1`.

    Raises:
        ValueError: An argument is out of its range, or two contradict each other.
        TypeError: An argument has the wrong type.

    Example:
        >>> import torch
        >>> dataset = torch.utils.data.TensorDataset(torch.arange(5))
        >>> list(DataLoader(dataset, batch_size=2, num_workers=1, backend="thread"))
        [[tensor([0, 1])], [tensor([2, 3])], [tensor([4])]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        backend: Backends = "process",
        max_restarts: int = 0,
        on_error: OnError = "raise",
        concurrency: int = 1,
        stall_timeout: float | None = 60.0,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        self._is_auto = num_workers == "auto"
        # Others divide by it. There may be more workers than CPUs, if they wait for a network.
        count = max(1, int(usage.cpus())) if num_workers == "auto" else num_workers
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            count,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )
        # Versions of torch before 2.6 do not take it.
        self.in_order = in_order
        self.backend, self.max_restarts, self.on_error = backend, max_restarts, on_error
        self.concurrency, self.stall_timeout, self.trace = concurrency, stall_timeout, trace
        _check(self)
        self._position = Position(self)
        self._latest: weakref.ref[WorkerIterator] | None = None

    # `DataLoader[tuple[Tensor, Tensor]]` in annotations, as with torch.
    __class_getitem__: Any = classmethod(types.GenericAlias)

    def _get_iterator(self) -> Any:
        if self.num_workers == 0:
            return LocalIterator(self, self._samples(), self._position)
        self.check_worker_number_rationality()
        options = self._enqueuer_options()
        iterator = WorkerIterator(self, options, self._samples(), self._position)
        self._latest = weakref.ref(iterator)
        return iterator

    def _enqueuer_options(self) -> dict[str, Any]:
        """Return the options of an iteration's enqueuer."""
        options = self._own_options()
        del options["concurrency"]
        if options["backend"] == "process":
            options["backend"] = Processes(start_method=self._start_method())
        if options["on_error"] == "raise":
            options["on_error"] = CaughtError
        # Each worker has one batch beside those in the queue.
        ahead = (self.prefetch_factor - 1) * self.num_workers
        return options | {
            "workers": Auto() if self._is_auto else self.num_workers,
            "max_queue_size": max(1, ahead),
            "ordered": self.in_order,
            "timeout": self.timeout or None,
        }

    def _samples(self) -> Samples | None:
        """Return how samples are fetched; None if torch's own fetcher can do it."""
        if (self.on_error, self.concurrency) == ("raise", 1):
            return None
        return Samples(self.on_error, self.concurrency)

    def _own_options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OWN}

    def _start_method(self) -> str:
        context = self.multiprocessing_context or multiprocessing
        method = context.get_start_method(allow_none=True)
        return method or multiprocessing.get_all_start_methods()[0]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the samplers and the dataset, if they have a `set_epoch` as well.

        A sampler inside another one, such as that of a batch sampler, is set, too.
        """
        for owner in (*index_order.samplers_of(self), self.dataset):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    def rebuilt(self, dataset: Any, **order: Any) -> DataLoader:
        """Return a new loader with the same options, and another dataset or order.

        A trainer that divides the data among processes needs it: it wraps the sampler.

        Args:
            dataset: Dataset of the new loader.
            order: Its `batch_size`, `sampler`, `batch_sampler` and `drop_last`.
        """
        return type(self)(
            dataset,
            num_workers="auto" if self._is_auto else self.num_workers,
            collate_fn=self.collate_fn,
            pin_memory=self.pin_memory,
            timeout=self.timeout,
            worker_init_fn=self.worker_init_fn,
            multiprocessing_context=self.multiprocessing_context,
            generator=self.generator,
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
            pin_memory_device=self.pin_memory_device,
            in_order=self.in_order,
            **order,
            **self._own_options(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that the loop was given.

        It holds the random numbers from which the order of the epoch was drawn, so another
        process continues with the very next batch, with any number of workers. Samplers are
        iterated again up to that batch; the dataset is not asked for samples again, unless it is
        iterable.

        Raises:
            InvalidState: The iterator of an iterable dataset, or with `in_order=False` or
                `on_error`, was dropped in the middle of an epoch; or two iterators are in use.
        """
        return self._position.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the position of `state_dict` at the next iteration.

        If the sampler then gives other indices than before, that iteration raises StateMismatch.

        Raises:
            StateMismatch: The state is of another loader, or damaged.
        """
        self._position.load_state_dict(state_dict)
        # Persistent workers have begun another epoch.
        self._iterator = None

    def stats(self) -> Stats:
        """Return the statistics of the workers: of this iteration, or of the last whole epoch.

        Raises:
            InvalidState: There is none, or it has no workers.
        """
        iterator = None if self._latest is None else self._latest()
        if iterator is not None:
            return iterator.stats()
        if self.num_workers == 0:
            raise InvalidState("with num_workers=0 there are no workers, and so no statistics")
        if self._position.ended is None:
            raise InvalidState("no iteration had workers that could have statistics")
        return self._position.ended.stats()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle or copy a loader without its iterator and its position."""
        left_out = ("_position", "_latest", "_iterator")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch forbids to set some of these.
        self.__dict__.update(state, _iterator=None, _latest=None)
        self._position = Position(self)


def _check(loader: DataLoader) -> None:
    """Check the options that are not torch's."""
    checks.positive("concurrency", loader.concurrency)
    given: Any = {name: getattr(loader, name) for name in _OWN if name != "concurrency"}
    is_thread = Options(**given).backend_name == "thread"
    if loader.num_workers == 0 and loader.on_error != "raise":
        raise ValueError("on_error needs num_workers >= 1: without workers, errors are raised")
    if loader.num_workers == 0 and loader.trace is not None:
        raise ValueError("trace needs num_workers >= 1: it is a timeline of the workers")
    has_context = loader.multiprocessing_context is not None
    if has_context and loader.backend != "process":
        raise ValueError(
            "multiprocessing_context is the start method of backend='process'; give one of them"
        )
    if loader._dataset_kind == torch.utils.data._DatasetKind.Iterable:
        if loader.concurrency > 1:
            raise ValueError("concurrency needs a map-style dataset: a stream has one next sample")
        if loader._is_auto:
            raise ValueError(
                "num_workers='auto' needs a map-style dataset: an iterable dataset divides its "
                "samples by the number of workers"
            )
        if is_thread and loader.num_workers > 1:
            raise ValueError(
                "threads share an iterable dataset, and get_worker_info() is None there, so each "
                "would give all samples; give num_workers=1, or backend='process'"
            )
