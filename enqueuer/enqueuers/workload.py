"""The protocols of a workload, which knows the data: shards of a generator, or tasks of elements.

A `Workload` lives as long as its enqueuer; it never waits and has no lock. For each epoch it makes
an `EpochWork`, whose order knows how far the epoch has come.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from enqueuer.backends.engine import Backend
from enqueuer.backends.job import Job, RayOptions
from enqueuer.common.text import warn
from enqueuer.enqueuers.failures import Origin
from enqueuer.enqueuers.options import Options, Processes, Ray, Seed
from enqueuer.enqueuers.run import Run, State
from enqueuer.errors import EnqueuerWarning
from enqueuer.monitoring import usage
from enqueuer.monitoring.duplicates import FirstItems
from enqueuer.monitoring.stats import Stats
from enqueuer.order.messages import Epoch, Failure, Start, Ticket
from enqueuer.order.position import fingerprint_of
from enqueuer.order.sequence import Order


class EpochWork(Protocol):
    """One epoch of a workload: its order, and what the workers are given.

    Attributes:
        order: The order of the items, from where the epoch began.
        first_items: Comparison of the first items of all shards; None once it is done.
        starts: Shards to be run, if the workers have others, too; None: all that they have.
        feed_runs_code: Whether `feed()` runs code of the user, which may take long.
    """

    first_items: FirstItems | None
    order: Order
    starts: Mapping[int, Start] | None = None
    feed_runs_code: bool = False

    @property
    def may_be_followed(self) -> bool:
        """Whether the next epoch may begin while the loop still reads this one.

        So all work of this one was given to the workers, and the source does not see its end.
        """

    def feed(self) -> None:
        """Give the workers what they need to go on. Lock held, and nothing is ready."""

    def pass_work(self, old: Backend, new: Backend) -> None:
        """Let a new backend go on where an old one was. Lock held."""

    def keep(self, failure: Failure) -> None:
        """Let the backend return this failure, without its error, from now on; it was raised."""

    def with_error(self, failure: Failure) -> Failure:
        """Return a failure of the backend with its error."""
        return failure

    def where(self, failure: Failure) -> str:
        """Return where a failure happened, for messages."""

    def origin_of(self, failure: Failure) -> Origin:
        """Return where a failure came from, with a function that runs its item again."""

    def ticket(self, item: int) -> Ticket | None:
        """Return the ticket of a task of this epoch that the workers have not finished."""
        return None

    def end(self) -> None:
        """Do what the source wants done at the end of an epoch. Lock held."""

    def rerun_s(self, stats: Stats) -> float | None:
        """Return the seconds of work that other workers would repeat; None if they repeat none.

        Args:
            stats: Statistics of this epoch.
        """
        return None


class Workload(Protocol):
    """A source, and what its batches depend on.

    Attributes:
        source: Source that the user gave.
        options: Options of the enqueuer.
        seed: Seed of the enqueuer.
        start_method: How processes are started; "" for threads and Ray.
        needs_common_seed: Whether the share of each rank may depend on the seed.
        may_be_empty: Whether an epoch without batches is no reason for a warning; False by default.
        max_concurrency: Largest number of elements that each worker may run at once with
            `workers="auto"`; 1 for shards.
    """

    source: Any
    options: Options
    seed: Seed
    start_method: str
    needs_common_seed: bool
    may_be_empty: bool = False
    max_concurrency: int = 1

    @property
    def shard_count(self) -> int | None:
        """Number of shards of this rank; None for tasks."""
        return None

    def steps(self, division: Sequence[int] | None = None) -> int | None:
        """Return the number of batches of an epoch; None if that is not known.

        Args:
            division: See `Epoch.division`; None, the default: a whole epoch.
        """
        return None

    def check_seed(self) -> None:
        """Raise ValueError if ranks may have different seeds, and their shares depend on these."""
        if not self.seed.is_shared and self.needs_common_seed:
            raise ValueError(
                f"world_size={self.options.world_size} needs random_seed: each rank would draw "
                "another one and shuffle differently, so that some data would come twice "
                "and others never; give all ranks the same"
            )

    # --- what runs ---

    def job(self, workers: int, first: Epoch) -> Job:
        """Return what a backend is to do with so many workers, from an epoch on."""
        return self.job_of(workers)

    def job_with(self, workers: int) -> Job | None:
        """Return the same data as a job for another number of workers.

        Returns:
            None if another number makes no difference.

        Raises:
            InvalidState: The source cannot go on in other workers.
        """
        return self.job_of(workers)

    def job_of(self, workers: int, shards: int = 0, rank_shards: tuple[int, ...] = ()) -> Job:
        """Return what a backend is to do; `rank_shards` is empty for tasks."""
        options, backend = self.options, self.options.backend
        limits = [s for s in (options.stall_timeout, options.timeout) if s is not None]
        return Job(
            source=self.source,
            shards=shards,
            rank_shards=rank_shards,
            workers=workers,
            random_seed=self.seed.value,
            ordered=options.ordered,
            max_queue_size=options.max_queue_size,
            max_queue_bytes=options.max_queue_bytes,
            start_method=self.start_method,
            max_workers=options.max_workers(usage.cpus()) if options.is_auto else 0,
            threads_per_worker=backend.threads if isinstance(backend, Processes) else None,
            forward_logs=options.forward_logs,
            keep_freed_memory=not isinstance(backend, (Processes, Ray))
            or backend.keep_freed_memory,
            initializer=options.initializer,
            on_error=options.on_error,
            max_restarts=options.max_restarts,
            may_grow=options.is_auto,
            element_timeout=options.element_timeout,
            longest_wait_s=min(limits, default=None),
            has_globals=options.has_globals,
            ray=backend.for_job() if isinstance(backend, Ray) else RayOptions(),
        )

    def keep_shards(self) -> None:
        """Keep the number of shards from now on, whatever the number of workers will be."""

    def begin(self, run: Run, epoch: Epoch, before: EpochWork | None) -> EpochWork:
        """Return the work of an epoch.

        Args:
            run: The run that the epoch belongs to.
            epoch: Epoch to be run, or the rest of one.
            before: The epoch before, of the same run, up to whose end the source was just read;
                None for the first one.
        """

    def rewind(self) -> None:
        """Forget how far the source was read, as far as that is possible."""

    def why_empty(self, earlier: int) -> str:
        """Return the cause of an epoch without items, and what to do.

        Args:
            earlier: Number of items that the run gave before this epoch.
        """

    def limit_of_workers(self) -> str | None:
        """Return why `workers="auto"` cannot have more than one worker; None if it can."""
        return None

    # --- position ---

    def identity(self) -> dict[str, Any]:
        """Return what the batches depend on."""

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What a state says of the source; see `fingerprint_of`."""
        return fingerprint_of(self.source)

    def fixed(self) -> dict[str, bool]:
        """Return which values of `identity()` that may be adopted were fixed by the user."""

    def adopt(self, state: Mapping[str, Any], epoch: Epoch, was_run: bool) -> None:
        """Take from a state what the user did not fix.

        Args:
            state: A state whose identity fits.
            epoch: The position that it holds.
            was_run: Whether the source was read already.

        Raises:
            InvalidState: The source cannot be read again.
            StateMismatch: The position does not fit.
        """

    def rerun(self, origin: Origin, ticket: Ticket | None) -> Callable[[], Any]:
        """Return a function that makes an item again, in the process that calls it."""

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that make an enqueuer like this one."""


# The run that reads an iterator, by the iterator's id: a run keeps its iterator alive.
_READERS: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()


def warn_if_shared(run: Run, items: object) -> None:
    """Warn if these are an iterator that another run reads as well, and keep who reads it."""
    if not isinstance(items, Iterator):
        return
    other = _READERS.get(id(items))
    if other is not None and other is not run and other.state is State.RUNNING:
        warn(
            "another enqueuer, which still runs, reads the same iterator, so each gets only a part "
            "of the batches (or a copy, in processes); stop() that one first, or give each an "
            "iterator of its own or the generator function",
            EnqueuerWarning,
        )
    _READERS[id(items)] = run


def warn_of_change() -> None:
    """Warn that a list was changed while workers fetched elements from it."""
    warn(
        "the list was changed during an epoch, which fetches its elements by their places: some "
        "may have come twice, and others not at all. Give shuffle=True for another order in each "
        "epoch, or change it before start() or between epochs; get() and epochs= begin these early",
        EnqueuerWarning,
    )
