"""The enqueuers that users make, and prefetch: what each takes, and what its data depend on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.context import BaseContext
from typing import Any

from enqueuer import arguments
from enqueuer.backends import BackendName, Job
from enqueuer.base import BaseEnqueuer, Batch, State
from enqueuer.errors import DuplicateDataWarning, InvalidState, StateMismatch
from enqueuer.merging import AsTheyCome, Order, RoundRobin
from enqueuer.messages import Epoch, Failure, Start
from enqueuer.replaying import Origin, item_of
from enqueuer.shards import Shard, fresh_seed
from enqueuer.sources import LiveSource, as_source
from enqueuer.worker import OnError


class GeneratorEnqueuer(BaseEnqueuer[Batch]):
    """Keep the batches of a generator ready, made ahead by threads or processes.

    The same generator, `random_seed` and `shards` give the same batches in the same order, bit
    for bit, for any number of workers and any backend. A finite generator ends the iteration;
    iterating again runs it anew (an epoch) on the same workers. After a `break`, iterating
    again goes on with the next batch.

    Args:
        generator: A generator function that takes no argument or one, the `Shard`, and is
            called once a shard and epoch, in the worker; or a live iterator, which one thread
            reads, or of which each forked process goes on with its own copy.
        use_multiprocessing: Keras' name for `backend="process"`.
        wait_time: Accepted for Keras' sake and needless: nothing polls.
        random_seed: A non-negative int, from which every shard's seed derives. None, the
            default, draws one, which the attribute `random_seed` then tells.
        workers: How many threads or processes; 1 by default.
        backend: `"thread"`, the default: cheap, and enough where the work waits (files,
            network) or leaves Python (numpy, PIL); or `"process"`, for work in Python.
        shards: How many logical runs the work is split into. By default as many as workers;
            give it a number of its own, and the batches do not depend on `workers`.
        max_queue_size: The most finished batches that may wait, over all workers; 10 by
            default, as in Keras. Each worker may hold one more in hand.
        max_queue_bytes: The most bytes that may wait, over all workers; None, the default, sets
            no such bound. The bound is dealt out evenly; a batch larger than a worker's share
            stays in its hand until it is wanted.
        ordered: True, the default, takes one batch of each shard in turn; False takes whichever
            is first, which is faster when shards differ in speed, and is not repeatable.
        mp_context: How processes are started: `"fork"`, `"forkserver"`, `"spawn"` or a context
            of `multiprocessing`. By default forkserver for a function (spawn where there is
            none), since it is safe beside threads and CUDA, and fork for a live iterator, which
            nothing else can hand over.
        forward_logs: True, the default: what a worker process logs comes out of this process's
            handlers. False leaves it in the worker. `"multiprocessing-logging"` uses that
            package instead, for forked workers only.
        on_error: What to do about an exception of the generator's. `"raise"`, the default:
            raise it in the loop, in its turn. `"skip"`: log it with its traceback, count it
            (`error_count`), and go on without it; a generator that raised is over, and so is
            its shard for this epoch. A callable: the same, without the log line, but it is
            called with the exception, in the worker, and what it returns comes in place of the
            item, if it is not None. An item that cannot be sent between processes is skipped
            alone.
        max_errors: How many errors may be skipped; the next one is raised. None, the default:
            any number.
        max_restarts: How many worker processes that died are replaced, in all. 0, the default:
            the first death is raised as `WorkerDied`. The new worker runs its shards again, up
            to the first item that had not come, so that nothing is lost or comes twice.
        rank: Which of `world_size` training processes this one is, from 0. It gets the shards
            `rank`, `rank + world_size` and so on; give all of them the same `random_seed`.
        world_size: How many training processes share the data; 1 by default. `shards`, which
            counts those of all ranks, is then `workers * world_size` by default.
        drop_last: Whether to leave out the last shards if they cannot be dealt out evenly, so
            that each rank has equally many; False by default.

    Attributes:
        queue: What waits, with the names of `queue.Queue`, as in Keras.

    Raises:
        TypeError: `generator` is none of these, or an argument has the wrong type.
        ValueError: An argument is out of its range.

    Example:
        >>> def squares(shard):
        ...     for number in shard.split(range(5)):
        ...         yield number**2
        >>> with GeneratorEnqueuer(squares, workers=2) as enqueuer:
        ...     list(enqueuer)
        [0, 1, 4, 9, 16]
    """

    def __init__(
        self,
        generator: Callable[[Shard], Iterable[Batch]]
        | Callable[[], Iterable[Batch]]
        | Iterable[Batch],
        use_multiprocessing: bool = False,
        wait_time: float | None = None,
        random_seed: int | None = None,
        *,
        workers: int = 1,
        backend: BackendName | None = None,
        shards: int | None = None,
        max_queue_size: int = 10,
        max_queue_bytes: int | None = None,
        ordered: bool = True,
        mp_context: str | BaseContext | None = None,
        forward_logs: bool | str = True,
        on_error: OnError = "raise",
        max_errors: int | None = None,
        max_restarts: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        self._source = as_source(generator)
        self._backend_name = arguments.backend_name(backend, use_multiprocessing)
        self._workers = arguments.positive("workers", workers)
        self._shards = None if shards is None else arguments.positive("shards", shards)
        self._max_queue_size = arguments.positive("max_queue_size", max_queue_size)
        self._max_queue_bytes = (
            None
            if max_queue_bytes is None
            else arguments.positive("max_queue_bytes", max_queue_bytes)
        )
        self._ordered = bool(ordered)
        self._start_method = arguments.start_method(mp_context, self._source, self._backend_name)
        self._forward_logs = arguments.forward_logs(forward_logs, self._start_method)
        self._on_error = arguments.on_error(on_error)
        self._max_errors = None if max_errors is None else arguments.count("max_errors", max_errors)
        self._max_restarts = arguments.count("max_restarts", max_restarts)
        self._rank, self._world_size = arguments.rank(rank, world_size)
        self._drop_last = bool(drop_last)
        self._seed_is_given = random_seed is not None
        self._random_seed = fresh_seed() if random_seed is None else arguments.seed(random_seed)
        if isinstance(self._source, LiveSource) and self._shards not in (None, 1):
            raise ValueError(
                f"a live iterator cannot be split into {self._shards} shards; "
                "pass the generator function itself"
            )
        if isinstance(self._source, LiveSource) and self._world_size > 1:
            raise ValueError(
                f"a live iterator cannot be split over {self._world_size} ranks; "
                "pass the generator function itself"
            )
        self._own_shards()  # a lack of them shows at once

    def __repr__(self) -> str:
        size = self._max_queue_size
        waiting = ""
        if self._state is State.RUNNING and self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(InvalidState):  # another process's
                    waiting = f", {self._waiting()}/{size} waiting"
            finally:
                self._lock.release()
        plural = "" if self._workers == 1 else "s"
        return f"<GeneratorEnqueuer {self._state.value} {self._workers} worker{plural}{waiting}>"

    def __reduce__(self) -> Any:
        if self._state is not State.NEW:
            raise TypeError(
                f"a {self._state.value.lower()} GeneratorEnqueuer cannot be pickled or copied, "
                "as it owns workers; pickle the generator function, or a new enqueuer"
            )
        source = self._source
        generator = source.iterable if isinstance(source, LiveSource) else source.function
        options: dict[str, Any] = dict(
            workers=self._workers,
            backend=self._backend_name,
            shards=self._shards,
            max_queue_size=self._max_queue_size,
            max_queue_bytes=self._max_queue_bytes,
            ordered=self._ordered,
            mp_context=self._start_method or None,
            forward_logs=self._forward_logs,
            on_error=self._on_error,
            max_errors=self._max_errors,
            max_restarts=self._max_restarts,
            rank=self._rank,
            world_size=self._world_size,
            drop_last=self._drop_last,
        )
        make = functools.partial(GeneratorEnqueuer, **options)
        return make, (generator, False, None, self._random_seed)

    # --- inside ---

    def _all_shards(self) -> int:
        """Return how many shards there are, over all ranks."""
        if isinstance(self._source, LiveSource):
            return 1 if self._backend_name == "thread" else self._workers
        shards = self._shards or self._workers * self._world_size
        return shards - shards % self._world_size if self._drop_last else shards

    def _own_shards(self) -> range:
        shards = self._all_shards()
        if shards < self._world_size:
            raise ValueError(
                f"shards={self._shards} cannot be dealt out over world_size={self._world_size} "
                "ranks; give at least as many shards as ranks"
            )
        return range(self._rank, shards, self._world_size)

    def _job(self) -> Job:
        if isinstance(self._source, LiveSource) and self._all_shards() > 1:
            _warn_of_duplicates(self._workers)
        return Job(
            source=self._source,
            shards=self._all_shards(),
            own=tuple(self._own_shards()),
            workers=self._workers,
            random_seed=self._random_seed,
            ordered=self._ordered,
            max_queue_size=self._max_queue_size,
            max_queue_bytes=self._max_queue_bytes,
            start_method=self._start_method,
            forward_logs=self._forward_logs,
            on_error=self._on_error,
            max_restarts=self._max_restarts,
        )

    def _job_with(self, workers: int) -> Job | None:
        if isinstance(self._source, LiveSource):
            if self._backend_name == "thread":
                return None  # it is read by one thread, whatever `workers` says
            raise InvalidState(
                "processes that share a live iterator cannot be reconfigured, as their copies "
                "of it have gone on; pass the generator function itself"
            )
        if self._shards is None:
            self._shards = self._workers * self._world_size  # what they have been so far
        return dataclasses.replace(self._job(), workers=workers, restarted=self.restart_count)

    def _order_of(self, epoch: Epoch) -> Order:
        starts = epoch.starts
        if starts is None:
            starts = dict.fromkeys(self._own_shards(), Start())
        recent = self._max_queue_size + 2  # more are never taken and not given away
        return RoundRobin(starts, recent) if self._ordered else AsTheyCome(starts, recent)

    def _origin_of(self, failure: Failure) -> Origin:
        return Origin(
            self._random_seed,
            self._epoch,
            failure.number,
            failure.shard,
            self._all_shards(),
            self._worker_of(failure),
        )

    def _again(self, origin: Origin) -> Callable[[], Any]:
        if origin.shard is None:
            raise ValueError("the error came from a task of an OrderedEnqueuer, not from a shard")
        shard = Shard(origin.shard, origin.shards, origin.epoch, origin.random_seed)
        seed_globals = self._backend_name != "thread"
        return functools.partial(item_of, self._source, shard, origin.item, seed_globals)

    def _identity(self, given_only: bool) -> dict[str, Any]:
        is_live = isinstance(self._source, LiveSource)
        seed = None if given_only and not self._seed_is_given else self._random_seed
        fixed = is_live or self._shards is not None
        return {
            "kind": "GeneratorEnqueuer",
            "random_seed": seed,
            "shards": None if given_only and not fixed else self._all_shards(),
            "rank": self._rank,
            "world_size": self._world_size,
            "ordered": self._ordered,
        }

    def _adopt(self, state_dict: Mapping[str, Any], epoch: Epoch) -> None:
        if isinstance(self._source, LiveSource) and self._state is State.STOPPED:
            raise InvalidState(
                "a live iterator that was read cannot be rewound; make a new enqueuer with a "
                "fresh one, or pass the generator function itself"
            )
        seed, shards = state_dict["random_seed"], state_dict["shards"]
        own = range(self._rank, shards, self._world_size)
        strangers = [shard for shard in epoch.starts or () if shard not in own]
        if strangers:
            raise StateMismatch(f"the state has positions of shards {strangers}, not of {own}")
        self._random_seed = seed
        if not isinstance(self._source, LiveSource):
            self._shards = shards


def prefetch(
    generator: Callable[[Shard], Iterable[Batch]] | Callable[[], Iterable[Batch]] | Iterable[Batch],
    max_queue_size: int = 2,
    **options: Any,
) -> Iterator[Batch]:
    """Iterate over one epoch of `generator`, made ahead in the background.

    The workers start with the first `next()` and are gone when the iterator ends, is closed, or
    is dropped after a `break`.

    Args:
        generator: As for `GeneratorEnqueuer`; also any iterable, such as a loader.
        max_queue_size: The most finished batches that may wait; 2 by default, which is enough
            to overlap steady work.
        **options: The other options of `GeneratorEnqueuer`.

    Raises:
        TypeError: An argument has the wrong type (at once, not at the first `next()`).
        ValueError: An argument is out of its range (likewise).

    Example:
        >>> for batch in prefetch(lambda: (n * n for n in range(3))):
        ...     print(batch)
        0
        1
        4
    """
    enqueuer = GeneratorEnqueuer(generator, max_queue_size=max_queue_size, **options)
    return _prefetched(enqueuer)


def _prefetched(enqueuer: GeneratorEnqueuer[Batch]) -> Iterator[Batch]:
    with enqueuer:
        yield from enqueuer


def _warn_of_duplicates(workers: int) -> None:
    warnings.warn(
        f"each of the {workers} processes goes on with its own copy of the same iterator, so "
        f"every batch comes {workers} times; pass the generator function itself "
        "(`def batches(shard): ...`, with shard.split for its share of the work), or workers=1",
        DuplicateDataWarning,
        stacklevel=4,
    )
