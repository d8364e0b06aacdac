"""One epoch of shards: its order, and the comparison of their first items."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from enqueuer.backends.job import Job
from enqueuer.backends.load import Backend
from enqueuer.backends.order import AsTheyCome, RoundRobin
from enqueuer.backends.stall import level_of_user
from enqueuer.enqueuers.owned_backends import STOP_S
from enqueuer.enqueuers.replay import Origin
from enqueuer.enqueuers.run import Run
from enqueuer.enqueuers.workload import Seed
from enqueuer.errors import DuplicateDataWarning
from enqueuer.monitoring.duplicates import FirstItems
from enqueuer.monitoring.stats import Stats
from enqueuer.workers.messages import Epoch, Failure, Item, Start, Ticket


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

    def job_with(self, workers: int) -> Job | None:
        """Return the same data as a job for another number of workers."""

    def rerun(self, origin: Origin, ticket: Ticket | None) -> Callable[[], Any]:
        """Return a function that makes an item again."""


class ShardEpoch:
    """See `EpochWork`."""

    def __init__(
        self, workload: Shards, run: Run, epoch: Epoch, first_items: FirstItems | None
    ) -> None:
        self._workload = workload
        self._run = run
        self._number = epoch.number
        self.first_items = first_items
        starts = epoch.starts
        if starts is None:
            starts = dict.fromkeys(workload.own_shards(), Start())
        recent = run.options.max_queue_size + 2  # more are never taken and not given away
        kind = RoundRobin if run.options.ordered else AsTheyCome
        self.order: RoundRobin | AsTheyCome = kind(starts, recent)

    @property
    def feed_runs_code(self) -> bool:
        return False

    def feed(self) -> None:
        """Do nothing: the workers have their shards."""

    def hand_over(self, old: Backend, new: Backend) -> None:
        if not self.order.done:
            new.begin(Epoch(self._number, self.order.rest()))

    def compare(self, items: Sequence[Item]) -> None:
        first = self.first_items
        assert first is not None
        for item in items:
            twins = first.saw(item.shard, item.value)
            if first.done:
                self.first_items = None
            if twins is not None:
                _warn_of_twins(*twins, self._workload.takes_shard)

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

    def waiting(self, count: int) -> int:
        return count

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

    @property
    def is_empty(self) -> bool:
        # No iterator over shards goes on by itself.
        return True

    @property
    def can_resize(self) -> bool:
        return True

    @property
    def resizes_in_place(self) -> bool:
        return False

    def resize(self, workers: int) -> None:
        job, run = self._workload.job_with(workers), self._run
        if job is not None:
            run.replace(job, self.hand_over)
        run.owned.stop(STOP_S, but=run.backend)

    def rerun_s(self, stats: Stats) -> float | None:
        if any(start.state is not None for start in self.order.rest().values()):
            return 0.0  # they are resumed, and not run again
        return sum(worker.making_s for worker in stats.workers)


def _warn_of_twins(one: int, other: int, takes_shard: bool) -> None:
    if takes_shard:
        cause = (
            "Are random numbers drawn from a generator that was made outside (a captured "
            "numpy.random.default_rng, say)? Draw them from shard.rng. Does each shard read the "
            "same? Use shard.split for its share of the work"
        )
    else:
        cause = (
            "The generator function takes no shard, so that each shard runs all of it: let it "
            "take the shard (`def batches(shard): ...`), use shard.split for its share of the "
            "work, and draw random numbers from shard.rng"
        )
    warnings.warn(
        f"shards {one} and {other} began with the same batches, so the data seem to come "
        f"several times. {cause}",
        DuplicateDataWarning,
        stacklevel=level_of_user(),
    )
