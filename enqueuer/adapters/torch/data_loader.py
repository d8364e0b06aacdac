"""A DataLoader of torch, whose workers are those of an enqueuer."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import operator
import os
import re
import threading
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

from enqueuer.adapters.torch.fetching import NoBatch
from enqueuer.adapters.torch.iterating import LocalIterator, WorkerIterator
from enqueuer.adapters.torch.position import Position, asks_for_worker, holds_generator, samplers_of
from enqueuer.backends.job import METHODS
from enqueuer.common import checks
from enqueuer.common.extras import framework
from enqueuer.enqueuers.options import (
    MAX_WORKERS,
    Auto,
    Backends,
    Options,
    Processes,
    Ray,
    checked_order,
)
from enqueuer.errors import InvalidState
from enqueuer.monitoring import usage
from enqueuer.monitoring.stats import Bottleneck, Stats
from enqueuer.workers.plan import OnError

torch = framework("torch", "torch", "2.1")

Self = TypeVar("Self", bound="DataLoader")

_DataLoader: Any = torch.utils.data.DataLoader

# Options of an iteration's enqueuer, whose names are those of the arguments. Each argument is an
# attribute of its name, as trainers build a loader again from these attributes.
_OPTIONS = ("backend", "max_restarts", "on_error", "stall_timeout", "element_timeout", "trace")
# Attributes that torch does not set; before 2.6 `in_order` is one of them.
_OF_ENQUEUER = (*_OPTIONS, "concurrency", "round_robin", "in_order")
# Arguments that decide the samples and their order, which a rebuilt loader is given.
_ORDER = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
# Other arguments of torch's class.
_OF_TORCH = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator"),
    *("multiprocessing_context", "prefetch_factor", "persistent_workers", "pin_memory_device"),
)

# What an advice for an enqueuer names, and its name for a DataLoader.
_ARGUMENTS = (
    (r"\bworkers=", "num_workers="),
    (r"\bordered=", "in_order="),
    (
        r"More workers would have no shard.*",
        "More num_workers help, with backend='process', if the dataset divides its samples among "
        "them by torch.utils.data.get_worker_info(); else each of them gives all.",
    ),
)


@dataclasses.dataclass(frozen=True, repr=False)
class LoaderStats(Stats):
    """Statistics of the workers of a DataLoader, whose bottleneck names the loader's arguments."""

    def bottleneck(self) -> Bottleneck:
        """Find the cause for which the loop waits, and a change that would help."""
        found = self._within_a_batch(super().bottleneck())
        advice, change = self._in_arguments(found.advice), self._in_arguments(found.change)
        return dataclasses.replace(found, advice=advice, change=change)

    def _within_a_batch(self, found: Bottleneck) -> Bottleneck:
        """Advise no more samples at once than a batch has, as a worker fetches one batch at once.

        With a batch sampler, that is not known, and taken for 1.
        """
        count = len(self.workers)
        if found.change.startswith("concurrency=") and self.workers[0].concurrency >= self.elements:
            change = f"workers={2 * count}"
            advice = f"The samples mostly wait: {change} (now {count}), or larger batches."
            return dataclasses.replace(found, advice=advice, change=change)
        return found

    def _in_arguments(self, text: str) -> str:
        for option, argument in _ARGUMENTS:
            text = re.sub(option, argument, text)
        most = self.elements
        text = re.sub(r"\bconcurrency=(\d+)", lambda n: f"concurrency={min(int(n[1]), most)}", text)
        # Each worker has one batch beside those in the queue.
        ahead = math.ceil(4 * self.max_queue_size / len(self.workers)) + 1 if self.workers else 0
        return re.sub(r"max_queue_size=\d+(?: instead of \d+)?", f"prefetch_factor={ahead}", text)


@checks.suggests_options
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
        num_workers: Number of workers; 0, the default: this process loads the data, and the
            dataset draws from its random generators, not from those of workers. `"auto"` begins
            with one worker and adds others while the loop waits, for map-style datasets.
        collate_fn: Function that makes a batch of a list of samples; it runs in the worker.
        pin_memory: Whether tensors are copied into pinned memory, if there is an accelerator.
        drop_last: Whether an incomplete last batch is left out.
        timeout: Seconds without a batch after which the loop raises an error; 0, the default:
            no limit. The error is a `BatchTimeout` and a `RuntimeError`.
        worker_init_fn: Function that each worker process calls with its index when it starts. If
            it seeds torch's generator, workers do not seed that before each batch. If it seeds
            `random` or `numpy.random`, the seeds of batches come from what it has left.
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
        element_timeout: Seconds that a worker process may take for a batch, with all its samples.
            Then it is killed and replaced, and `on_error` decides about an `ElementTimeout`, as
            if the `collate_fn` had raised it. None, the default: no limit.
        round_robin: Whether worker `i` of `n` makes batches `i`, `i + n` and so on, as with torch.
            None, the default: only where the result may depend on what a worker did before: with
            a `worker_init_fn`, a random generator in the dataset, or code of its class that calls
            `get_worker_info()` or `torch.initial_seed()`. Otherwise a free worker takes
            the next batch, so that no batch waits behind a slow one. Threads share the dataset,
            and take any batch.
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
        element_timeout: float | None = None,
        trace: str | os.PathLike[str] | None = None,
        round_robin: bool | None = None,
    ) -> None:
        self._is_auto = num_workers == "auto"
        # Others divide by it. There may be more workers than CPUs, if they wait for a network.
        count = max(1, int(usage.cpus())) if num_workers == "auto" else num_workers
        arguments = locals() | {"num_workers": count}
        super().__init__(**{name: arguments[name] for name in (*_ORDER, *_OF_TORCH)})
        for name in _OF_ENQUEUER:
            setattr(self, name, arguments[name])
        _check(self)
        self._position = Position(self)

    # `DataLoader[tuple[Tensor, Tensor]]` in annotations, as with torch.
    __class_getitem__: Any = classmethod(types.GenericAlias)

    def _get_iterator(self) -> Any:
        if self.num_workers == 0:
            return LocalIterator(self, self._position)
        self.check_worker_number_rationality()
        return WorkerIterator(self, self._enqueuer_options(), self._position)

    def _enqueuer_options(self) -> dict[str, Any]:
        """Return the options of an iteration's enqueuer."""
        options = self._attributes(_OPTIONS)
        if options["backend"] == "process" and self._has_threads:
            options["backend"] = "thread"
        elif options["backend"] == "process":
            options["backend"] = Processes(start_method=self._start_method())
        if options["on_error"] == "raise":
            options["on_error"] = NoBatch
        # Each worker has one batch beside those in the queue.
        ahead = (self.prefetch_factor - 1) * self.num_workers
        return options | {
            "workers": self._auto() if self._is_auto else self.num_workers,
            "max_queue_size": max(1, ahead),
            "ordered": self.in_order,
            "timeout": self.timeout or None,
        }

    def _auto(self) -> Auto:
        """Return the options of `num_workers="auto"`: go on with the workers of the last epoch."""
        latest = self._position.ended
        first = 1 if latest is None else max(1, len(latest.stats().workers))
        # More of them would have nothing to do. A sampler without a length has the hint 0.
        limit = min(MAX_WORKERS, operator.length_hint(self._index_sampler))
        if not limit or isinstance(self.backend, Ray) or self.backend == "ray":
            return Auto(first=first)
        return Auto(limit, min(first, limit))

    @property
    def is_round_robin(self) -> bool:
        """Whether each worker has its own batches, in turn."""
        if self.round_robin is not None or self._is_auto:
            return bool(self.round_robin)
        may_seed = self.worker_init_fn is not None or asks_for_worker(self.dataset)
        return may_seed or holds_generator(self.dataset)

    def _attributes(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    @property
    def _has_threads(self) -> bool:
        """Whether the workers are threads, by `multiprocessing_context` if not by `backend`."""
        process: Any = getattr(self.multiprocessing_context, "Process", None)
        return isinstance(process, type) and issubclass(process, threading.Thread)

    def _start_method(self) -> str:
        context = self.multiprocessing_context or multiprocessing
        method = context.get_start_method(allow_none=True)
        return str(method or multiprocessing.get_all_start_methods()[0])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the samplers and the dataset, if they have a `set_epoch` as well.

        A sampler inside another one, such as that of a batch sampler, is set, too. The copies of
        the dataset in persistent workers follow, as the next iteration begins. If the epoch is not
        the one after the last, that iteration starts new workers.

        Args:
            epoch: Number of the epoch that the next iteration begins.
        """
        for owner in (*samplers_of(self), self.dataset):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self._position.epoch_set = epoch

    def rebuilt(self, dataset: Any, **order: Any) -> DataLoader:
        """Return a new loader with the same options, and another dataset or order.

        A trainer that divides the data among processes needs it: it wraps the sampler.

        Args:
            dataset: Dataset of the new loader.
            order: Its `batch_size`, `sampler`, `batch_sampler` and `drop_last`.
        """
        attributes = self._attributes((*_OF_TORCH, *_OF_ENQUEUER))
        if self._is_auto:
            attributes["num_workers"] = "auto"
        return type(self)(dataset, **order, **attributes)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that the loop was given.

        It holds the random numbers from which the order of the epoch was drawn, so another
        process continues with the very next batch, with any number of workers. Samplers are
        iterated again up to that batch; the dataset is not asked for samples again, unless it is
        iterable.

        A warning, `EnqueuerWarning`, says if there is no such position: the iterator of an iterable
        dataset, or with `in_order=False` or `on_error`, was dropped in the middle of an epoch; or
        two iterators are in use. The state can then be saved, but not be loaded.
        """
        return self._position.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the position of `state_dict` at the next iteration.

        If the sampler then gives other indices than before, that iteration raises StateMismatch.

        Raises:
            StateMismatch: The state is of another loader, or damaged.
            InvalidState: The state has no position; see `state_dict`.
        """
        self._position.load_state_dict(state_dict)
        # Persistent workers have begun another epoch.
        self._iterator = None

    def close(self) -> None:
        """End all workers now, persistent ones too, also in the middle of an epoch.

        Without it, workers end with their epoch, persistent ones with the loader and its iterator.
        `with DataLoader(...) as loader:` calls it at its end. Iterators that are in use then raise
        InvalidState. The loader stays usable: the next iteration begins a new epoch, with new
        workers. Calling it again has no effect.
        """
        for iterator in list(self._position.iterators):
            iterator.close()
        self._iterator = None

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> Stats:
        """Return the statistics of the workers: of this iteration, or of the last whole epoch.

        Raises:
            InvalidState: There is none, or it has no workers.
        """
        if self.num_workers == 0:
            raise InvalidState("with num_workers=0 there are no workers, and so no statistics")
        iterator = self._position.iterator()
        enqueuer = self._position.ended if iterator is None else iterator.enqueuer
        if enqueuer is None:
            raise InvalidState("no iteration had workers that could have statistics")
        stats = enqueuer.stats()
        # The enqueuer does not know of the samples.
        at_once = min(self.concurrency, self.batch_size or self.concurrency)
        workers = [dataclasses.replace(w, concurrency=at_once) for w in stats.workers]
        facts = vars(stats) | {"workers": tuple(workers), "elements": self.batch_size or 1}
        return LoaderStats(**facts)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle or copy a loader without its iterator and its position.

        Not by `__setstate__`: pickle would find that of this class through an object that passes
        on attributes to a loader.
        """
        left_out = ("_position", "_iterator")
        state = {name: value for name, value in vars(self).items() if name not in left_out}
        return _restored, (type(self), state)


def _restored(kind: type[DataLoader], state: dict[str, Any]) -> DataLoader:
    """Return a loader that was pickled or copied."""
    loader = kind.__new__(kind)
    # torch forbids to set some of these.
    loader.__dict__.update(state, _iterator=None)
    loader._position = Position(loader)
    return loader


def _check(loader: DataLoader) -> None:
    """Check the options that are not torch's."""
    checks.positive("concurrency", loader.concurrency)
    loader.in_order = checked_order("in_order", loader.in_order)
    arguments: Any = loader._attributes(_OPTIONS)
    if loader.num_workers == 0 or loader._has_threads:
        # Options do not know of these.
        arguments["backend"] = "thread"
    is_thread = Options(**arguments).backend_name == "thread"
    if loader.round_robin and (loader._is_auto or is_thread):
        raise ValueError("round_robin=True needs a fixed number of worker processes")
    if loader.num_workers == 0 and loader.on_error != "raise":
        raise ValueError("on_error needs num_workers >= 1: without workers, errors are raised")
    if loader.num_workers == 0 and loader.trace is not None:
        raise ValueError("trace needs num_workers >= 1: it is a timeline of the workers")
    has_context = loader.multiprocessing_context is not None
    if has_context and loader.backend != "process":
        raise ValueError(
            "multiprocessing_context is the start method of backend='process'; give one of them"
        )
    if has_context and not loader._has_threads:
        _check_context(loader.multiprocessing_context)
    _check_stream(loader, is_thread)


def _check_context(context: Any) -> None:
    """Check that a context says no more than a start method: the enqueuer starts the processes."""
    method = context.get_start_method(allow_none=True)
    if method is not None and method not in METHODS:
        raise ValueError(
            f"multiprocessing_context has the start method {method!r}, not one of "
            f"{', '.join(map(repr, METHODS))}"
        )
    process: Any = getattr(context, "Process", None)
    module = str(getattr(process, "__module__", ""))
    if isinstance(process, type) and not module.startswith(("multiprocessing.", "multiprocess.")):
        raise ValueError(
            f"multiprocessing_context has a Process class of its own, {module}."
            f"{process.__qualname__}, which would not be used: the workers are those of an "
            "enqueuer. Give a context of multiprocessing, or backend='thread' for threads"
        )


def _check_stream(loader: DataLoader, is_thread: bool) -> None:
    """Check the options of an iterable dataset."""
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
