"""The job of a backend: the source, the number of workers, and the options that concern them.

A backend has at most as many workers as there are shards; of n workers, worker w runs every n-th
shard from the w-th on, and sends their items in the order in which an ordered consumer reads them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from enqueuer.monitoring.trace import TraceTarget
from enqueuer.workers.plan import OnError, Plan
from enqueuer.workers.settings import Initializer
from enqueuer.workers.sources import FunctionSource, Source
from enqueuer.workers.tasks import TaskSource

T = TypeVar("T")

BackendName = Literal["thread", "process", "ray"]

METHODS = ("fork", "forkserver", "spawn")
HAS_FORKSERVER = hasattr(os, "fork") and hasattr(os, "pidfd_open")


@dataclass(frozen=True)
class RayOptions:
    """Options of `backend="ray"`.

    Attributes:
        address: Address of the cluster; None for the one that is there, or a new one here.
        options: Options of the actors.
        writable: Whether large arrays are copied on arrival.
    """

    address: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    writable: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class Job:
    """All that a backend must know to run a source.

    Attributes:
        source: Source that the user gave; if it is a TaskSource, there are no shards.
        shards: Number of shards, over all ranks.
        rank_shards: Indices of the shards that are run here.
        workers: Number of workers that run them; at most one a shard is started. 0: one runs in
            the loop's own thread.
        random_seed: Seed of the enqueuer.
        ordered: Whether the consumer reads the shards in turn.
        max_queue_size: Largest number of finished items that wait, over all workers.
        max_queue_bytes: The same in bytes, or None.
        start_method: "fork", "forkserver" or "spawn"; processes only.
        has_fixed_shards: Whether there are as many shards with another number of workers.
        max_workers: Number of workers that there may be later, if that is more than `workers`.
        threads_per_worker: Number of threads that native libraries may run in each worker process;
            None: its share of the CPUs, or what the environment says.
        has_globals: Whether the workers have global random states of their own, as processes do.
        forward_logs: True, False or "multiprocessing-logging"; not of threads.
        keep_freed_memory: Whether workers keep the memory that they free; not of threads.
        initializer: Function that each worker calls before it loads the source; not of threads.
        on_error: Reaction to an exception of the source.
        max_restarts: Number of dead workers that are replaced; not of threads.
        may_grow: Whether there may be more workers later.
        element_timeout: Longest time of an element in a worker process, in seconds; None: any.
        longest_wait_s: Longest time of a wait without a deadline, in seconds; None: forever.
        trace: File in which workers record what they do; None: nothing is recorded.
        ray: Options of Ray; used by Ray only.
    """

    source: Source | TaskSource
    shards: int
    rank_shards: tuple[int, ...]
    workers: int
    random_seed: int
    ordered: bool
    max_queue_size: int
    max_queue_bytes: int | None
    start_method: str
    forward_logs: bool | str
    on_error: OnError
    max_restarts: int
    has_fixed_shards: bool = False
    max_workers: int = 0
    threads_per_worker: int | None = None
    keep_freed_memory: bool = True
    initializer: Initializer | None = None
    may_grow: bool = False
    element_timeout: float | None = None
    longest_wait_s: float | None = None
    has_globals: bool = True
    trace: TraceTarget | None = None
    ray: RayOptions = RayOptions()

    @property
    def may_replace(self) -> bool:
        """Whether a worker process may be started in the place of another one."""
        return bool(self.max_restarts) or self.element_timeout is not None

    @property
    def asks_stacks(self) -> bool:
        """Whether a worker process may be asked for its stack."""
        return self.longest_wait_s is not None or self.element_timeout is not None

    @property
    def elements(self) -> int:
        """Number of elements in each item; 1 for shards."""
        return (self.source.batch_size or 1) if isinstance(self.source, TaskSource) else 1

    @property
    def useful_workers(self) -> int | None:
        """Number of workers beyond which none would make items of its own; None: any number."""
        source = self.source
        if isinstance(source, TaskSource):
            return None
        if isinstance(source, FunctionSource) and source.takes_shard:
            return len(self.rank_shards) if self.has_fixed_shards else None
        return 1

    @property
    def side_by_side(self) -> bool:
        """Whether a worker runs its shards side by side."""
        return not isinstance(self.source, TaskSource) and self.source.is_async

    def share_of(self, cpus: float) -> int:
        """Return the number of CPUs of each worker if they are divided evenly; at least 1."""
        workers = max(self.workers, self.max_workers)
        if not isinstance(self.source, TaskSource):
            workers = min(workers, len(self.rank_shards))
        return max(1, int(cpus) // workers)

    def plans(self) -> list[Plan]:
        """Divide the shards: of n workers, worker w gets every n-th from the w-th on."""
        workers = max(1, self.workers)
        if not isinstance(self.source, TaskSource):
            workers = min(workers, len(self.rank_shards))
        return [
            Plan(
                self.source,
                self.rank_shards[w::workers],
                self.shards,
                self.random_seed,
                self.on_error,
            )
            for w in range(workers)
        ]

    def quota_of(self, worker: int) -> tuple[int, int | None]:
        """Return the share of a worker of shards in the queue: items, and bytes if these count."""
        count, size = min(self.workers, len(self.rank_shards)), self.max_queue_bytes
        share = None if size is None else size // count
        return split_bound(self.max_queue_size, count)[worker], share


def default_method() -> str:
    """Return the start method for what can be pickled: safe with threads in the parent."""
    return "forkserver" if HAS_FORKSERVER else "spawn"


def split_bound(total: int, workers: int) -> list[int]:
    """Divide a limit among workers, as evenly as possible, and never more than `total`.

    Example:
        >>> split_bound(10, 4), split_bound(1, 3)
        ([3, 3, 2, 2], [1, 0, 0])
    """
    return [total // workers + (w < total % workers) for w in range(workers)]
