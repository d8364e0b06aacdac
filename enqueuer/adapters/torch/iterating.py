"""One iteration over a DataLoader with workers.

    torch's samplers -> IndexSource -> an OrderedEnqueuer -> batches in order   (map-style)
    shards           -> a GeneratorEnqueuer               -> batches in turn    (iterable)

It draws from torch's generators exactly as torch's own iterator does, which is its base class.

Its workers and their failures are as torch's users expect them. A worker process has the members of
multiprocessing's processes. A failure is a RuntimeError with torch's first words, and also the
error that an enqueuer raises, so either kind of `except` catches it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from enqueuer.adapters.torch.fetching import LoaderWorker, NoBatch, fetchers_of
from enqueuer.adapters.torch.position import DrawnIndices, Position
from enqueuer.backends.pool import WorkerState
from enqueuer.backends.process.handle import ProcessWorker
from enqueuer.common.extras import framework
from enqueuer.enqueuers.enqueuer import BaseEnqueuer, begin_at, core_of
from enqueuer.enqueuers.generator import GeneratorEnqueuer
from enqueuer.enqueuers.ordered import OrderedEnqueuer
from enqueuer.errors import BatchTimeout, InvalidState, WorkerDied, WorkerError
from enqueuer.order.messages import Epoch, Start

torch = framework("torch", "torch", "2.1")

_BaseIterator: Any = torch.utils.data.dataloader._BaseDataLoaderIter
_LocalIterator: Any = torch.utils.data.dataloader._SingleProcessDataLoaderIter

_pinning: Any = torch.utils.data._utils.pin_memory


class WorkerHandle:
    """One worker process.

    Args:
        worker: The worker.

    Attributes:
        index: Index of the worker.
        pid: Its process.
    """

    def __init__(self, worker: ProcessWorker) -> None:
        self.index = worker.index
        self.pid = worker.process.pid
        self._worker = worker

    @property
    def exitcode(self) -> int | None:
        """Exit code of the process, negative for a signal; None: it runs, or that is not known."""
        self._has_ended(0)
        return self._worker.exitcode

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return not self._has_ended(0)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the process to end, at most so many seconds."""
        # Eleven days, which every wait accepts.
        self._has_ended(1e6 if timeout is None else timeout)

    def kill(self) -> None:
        """Send SIGKILL to the process, if it runs."""
        if self.is_alive():
            self._worker.send_signal(signal.SIGKILL)

    # A worker passes SIGTERM over.
    terminate = kill

    def _has_ended(self, timeout: float) -> bool:
        worker = self._worker
        # Once it was reaped, another process may have its pid.
        if worker.exitcode is None and worker.state is not WorkerState.ENDED:
            worker.wait_for_exitcode(timeout)
            return worker.exitcode is not None or worker.has_ended() or not worker.process.has_pid()
        return True


class LoaderTimeout(BatchTimeout, RuntimeError):
    """No batch came within the `timeout` of a DataLoader."""


class LoaderWorkerDied(WorkerDied, RuntimeError):
    """A worker process of a DataLoader has died."""


def died(error: WorkerDied) -> LoaderWorkerDied:
    """Return the error of a worker that has died."""
    found = re.search(r"\(process (\d+), ", str(error))
    pid = None if found is None else int(found[1])
    code = error.exitcode
    how = "ended"
    if code is not None and code < 0:
        how = f"is killed by signal: {signal.strsignal(-code) or -code}"
    elif code is not None:
        how = f"exited unexpectedly with exit code {code}"
    # torch says both, in two exceptions.
    message = (
        f"DataLoader worker (pid(s) {pid}) exited unexpectedly: "
        f"DataLoader worker (pid {pid}) {how}. {error}"
    )
    return LoaderWorkerDied(message, error.worker, error.exitcode)


class WorkerIterator(_BaseIterator):
    """An iterator whose batches come from workers of an enqueuer.

    Args:
        loader: The DataLoader.
        options: Options of the enqueuer.
        position: Position of the loader, which this iterator moves on.

    Attributes:
        enqueuer: Enqueuer of the workers.
        is_closed: Whether `close()` was called.
    """

    is_closed = False
    _base_seed: int

    def __init__(self, loader: Any, options: Mapping[str, Any], position: Position) -> None:
        with position.making():
            super().__init__(loader)
        self._base_seed = position.seed(self._base_seed)
        self._position = position
        # Asked for once, as it searches the dataset.
        self._is_round_robin = loader.is_round_robin
        self._ahead = loader.prefetch_factor * self._num_workers
        self._indices = IndexSource()
        self._options = options
        self.enqueuer = self._new_enqueuer(loader)
        self._batches: Iterator[Any] = iter(())
        self._handles: list[WorkerHandle] | None = None
        self._is_over = False
        self._reset(loader, first_iter=True)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin an epoch: the first one, or with persistent workers another one."""
        self._leave_epoch()
        with self._position.begin(self, first_iter) as resumed:
            super()._reset(loader, first_iter)
            drawn = self._position.draw(self._sampler_iter, loader)
            drawn.draw(self._position.step + self._ahead)
            self._indices.drawn = drawn
            self._send_news(first_iter)
            if core_of(self.enqueuer).is_idle:
                self._start(resumed)
            self._batches = iter(self.enqueuer)
        self._is_over = False
        self._handles = None
        # Batches that were left out count as well.
        may_skip = self._options["on_error"] is not NoBatch
        is_counted = not (self._is_iterable or may_skip) and self._options["ordered"]
        self._position.needs_workers = not is_counted

    def _send_news(self, first_iter: bool) -> None:
        """Let new workers begin the epoch, if those that run lack what it needs."""
        worker, epoch = self._worker, self._position.epoch_set
        self._position.epoch_set = None
        offset = None
        # Persistent workers count on from the epoch that was set.
        if epoch is not None and self._persistent_workers and not worker.is_thread:
            offset = epoch - self._position.epoch
        # The first workers have the seed that torch drew before it drew the one of this epoch.
        shared_seed = worker.shared_seed if first_iter else self._shared_seed
        if (shared_seed, offset) != (worker.shared_seed, worker.epoch_offset):
            if not core_of(self.enqueuer).is_idle:
                self.enqueuer.stop()
            worker.shared_seed, worker.epoch_offset = shared_seed, offset

    def _start(self, resumed: Mapping[str, Any] | None) -> None:
        enqueuer, position = self.enqueuer, self._position
        if resumed is not None and "workers" in resumed:
            enqueuer.load_state_dict(resumed["workers"])
        elif position.step or position.epoch:
            start = {0: Start(position.step)} if position.step else None
            begin_at(core_of(enqueuer), Epoch(position.epoch, start))
        enqueuer.start()

    @property
    def _workers(self) -> list[WorkerHandle]:
        """The worker processes; other code reads them by torch's name for them."""
        if self._handles is None:
            run = core_of(self.enqueuer).run
            workers = [] if run is None else run.backend.workers()
            # Threads and actors have none.
            processes = (worker for worker in workers if isinstance(worker, ProcessWorker))
            self._handles = [WorkerHandle(worker) for worker in processes]
        return self._handles

    @property
    def _is_iterable(self) -> bool:
        return bool(self._dataset_kind == torch.utils.data._DatasetKind.Iterable)

    def _leave_epoch(self) -> None:
        """Drop what is left of the epoch before, after a `break` or an error."""
        if self._is_over or core_of(self.enqueuer).is_idle:
            return
        if not self._is_iterable:
            # As with torch, workers of their own batches make what was drawn: what they draw later
            # may depend on it.
            self._indices.drawn.cut(keeps_drawn=self._is_round_robin)
            # If a worker has died, or hangs, new workers are needed; so are they if the sampler
            # has raised, as its error would come again.
            with contextlib.suppress(Exception):
                for _ in self._batches:
                    pass
                return
        # What is left of an iterable dataset may have no end.
        self.enqueuer.stop()

    def _new_enqueuer(self, loader: Any) -> BaseEnqueuer[Any]:
        worker = self._worker = LoaderWorker(
            loader.dataset,
            fetchers_of(loader),
            self._num_workers,
            self._base_seed,
            self._init_of(loader),
            self._shared_seed,
            size=loader.batch_size if self._auto_collation else None,
            is_thread=self._options["backend"] == "thread",
            goes_on=self._options["on_error"] is NoBatch,
        )
        options = {**self._options, "random_seed": self._base_seed}
        enqueuer: BaseEnqueuer[Any]
        if self._is_iterable:
            enqueuer = GeneratorEnqueuer(worker.batches, shards=self._num_workers, **options)
        else:
            enqueuer = OrderedEnqueuer(self._indices, worker.fetch, **options)
        workload = core_of(enqueuer).workload
        # torch says nothing of it.
        workload.may_be_empty = True
        if self._is_iterable:
            return enqueuer
        source: Any = workload.source
        source.begin_worker, source.is_round_robin = worker.begin, self._is_round_robin
        # So the samplers are read when torch reads them.
        source.max_pending = self._ahead if isinstance(options["workers"], int) else None
        return enqueuer

    def _init_of(self, loader: Any) -> Callable[[int], object] | None:
        """Return the function that each worker calls when it starts."""
        init: Callable[[int], object] | None = loader.worker_init_fn
        if not _is_pipe(loader.dataset):
            return init
        divide = torch.utils.data.dataloader._sharding_worker_init_fn
        return functools.partial(divide, init, self._world_size, self._rank)

    def _next_data(self) -> Any:
        _check_open(self)
        try:
            batch = next(self._batches)
        except StopIteration:
            self._is_over = True
            self._position.end(self)
            if not self._persistent_workers:
                self._shutdown_workers()
                self._position.ended = self.enqueuer
            raise
        except BatchTimeout as error:
            message = f"DataLoader timed out after {self._timeout} seconds: {error}"
            raise LoaderTimeout(message) from error
        except WorkerDied as error:
            raise died(error) from error
        self._position.advance(self)
        self._indices.drawn.draw(1)
        if isinstance(batch, NoBatch):
            # The loop would end as if all were well.
            if isinstance(batch.error, (StopIteration, StopAsyncIteration)):
                message = f"a worker of the DataLoader raised {batch.error!r}"
                raise WorkerError(message) from batch.error
            if batch.error is not None:
                batch.reraise()
            return None
        if self._pin_memory:
            return _pinning.pin_memory(batch, self._pin_memory_device)
        return batch

    def close(self) -> None:
        """End the workers, and give no more batches."""
        self.is_closed = True
        self.enqueuer.stop()

    def _shutdown_workers(self) -> None:
        """End the workers; libraries call this by torch's name for it."""
        self.enqueuer.stop()


class LocalIterator(_LocalIterator):
    """torch's iterator without workers, with a position.

    Args:
        loader: The DataLoader.
        position: Position of the loader, which this iterator moves on.

    Attributes:
        is_closed: Whether `close()` was called.
    """

    is_closed = False
    _base_seed: int
    _sampler_iter: Iterator[Any]

    def __init__(self, loader: Any, position: Position) -> None:
        with position.making():
            super().__init__(loader)
        self._base_seed = position.seed(self._base_seed)
        if loader.concurrency > 1:
            self._dataset_fetcher = fetchers_of(loader)()
        self._position = position
        is_map = self._dataset_kind == torch.utils.data._DatasetKind.Map
        with position.begin(self, is_first=True, draws_seed=True) as resumed:
            if is_map or resumed is not None:
                self._sampler_iter = drawn = position.draw(self._sampler_iter, loader)
            if is_map:
                for _ in itertools.islice(drawn, position.step):
                    pass
                # A sampler draws its seed with its first indices, here from the state's streams.
                drawn.draw(int(resumed is not None))
            elif resumed is not None:
                # An iterable dataset is iterated again.
                self._dataset_fetcher = fetchers_of(loader)()
                for _ in range(position.step):
                    self._dataset_fetcher.fetch(next(drawn))

    def close(self) -> None:
        """Give no more batches."""
        self.is_closed = True

    def _next_data(self) -> Any:
        _check_open(self)
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


def _check_open(iterator: WorkerIterator | LocalIterator) -> None:
    if iterator.is_closed:
        raise InvalidState(
            "this iterator ended when its DataLoader was closed, by close() or the end of a `with` "
            "block; iterate over the DataLoader again to begin a new epoch"
        )


def _is_pipe(dataset: Any) -> bool:
    """Return whether torch divides a dataset among the workers, as it does with data pipes."""
    kinds = (getattr(torch.utils.data, name, None) for name in ("IterDataPipe", "MapDataPipe"))
    return isinstance(dataset, tuple(kind for kind in kinds if kind is not None))


class IndexSource:
    """The batches of indices of one epoch after the other, which the loop's thread reads.

    They are drawn when torch draws them: some at the start of an epoch, and one after each batch.
    So a sampler that shares a generator with the loop draws the same numbers in each run.

    Attributes:
        drawn: Those of the epoch.
    """

    def __init__(self) -> None:
        self.drawn = DrawnIndices(iter(()), "")

    def __iter__(self) -> Iterator[Any]:
        return self.drawn
