"""One epoch of shards: its order, and where each shard stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from enqueuer.backends.load import Backend
from enqueuer.backends.order import AsTheyCome, RoundRobin
from enqueuer.enqueuers.replay import Origin
from enqueuer.enqueuers.run import Run
from enqueuer.enqueuers.workload import Seed
from enqueuer.monitoring.duplicates import FirstItems
from enqueuer.monitoring.stats import Stats
from enqueuer.workers.messages import Epoch, Failure, Start, Ticket


class Shards(Protocol):
    """The workload, as far as its epochs need it."""

    seed: Seed

    @property
    def takes_shard(self) -> bool:
        """Whether each shard may give other data."""

    @property
    def all_shards(self) -> int:
        """Number of shards over all ranks."""

    def own_shards(self) -> range:
        """Return the shards of this rank."""

    def rerun(self, origin: Origin, ticket: Ticket | None) -> Callable[[], Any]:
        """Return a function that makes an item again."""


class ShardEpoch:
    """See `EpochWork`."""

    def __init__(
        self, workload: Shards, run: Run, epoch: Epoch, first_items: FirstItems | None
    ) -> None:
        self._workload = workload
        self._number = epoch.number
        self.first_items = first_items
        starts = epoch.starts
        if starts is None:
            starts = dict.fromkeys(workload.own_shards(), Start())
        # More items are never taken and not given to the loop.
        recent = run.options.max_queue_size + 2
        kind = RoundRobin if run.options.ordered else AsTheyCome
        self.order: RoundRobin | AsTheyCome = kind(starts, recent)

    @property
    def may_be_followed(self) -> bool:
        return False

    @property
    def feed_runs_code(self) -> bool:
        return False

    def feed(self) -> None:
        """Do nothing: the workers have their shards."""

    def pass_work(self, old: Backend, new: Backend) -> None:
        if not self.order.done:
            new.begin(Epoch(self._number, self.order.rest()))

    def keep(self, failure: Failure) -> None:
        """Do nothing: the worker that failed sends nothing more."""

    def where(self, failure: Failure) -> str:
        return f"in {failure.worker}, shard {failure.shard}, item {failure.number}"

    def origin_of(self, failure: Failure) -> Origin:
        workload = self._workload
        origin = Origin(
            workload.seed.value,
            self._number,
            failure.number,
            failure.shard,
            workload.all_shards,
            failure.worker,
        )
        origin.rerun = workload.rerun(origin, None)
        return origin

    def ticket(self, item: int) -> Ticket | None:
        return None

    def steps_done(self, ready: int, taken: int) -> int:
        return taken - ready

    def next_epoch(self) -> Epoch:
        ends = self.order.ends
        if not ends:
            return Epoch(self._number + 1)
        # A shard that had ended when a state was saved has sent no state since.
        starts = dict.fromkeys(self._workload.own_shards(), Start())
        starts |= {shard: Start(0, state) for shard, state in ends.items()}
        return Epoch(self._number + 1, starts)

    def end(self) -> None:
        """Do nothing: a generator sees its own end."""

    def rerun_s(self, stats: Stats) -> float | None:
        if any(start.state is not None for start in self.order.rest().values()):
            # Iterators with a state are resumed.
            return 0.0
        return sum(worker.making_s for worker in stats.workers)
