"""The workload of GeneratorEnqueuer: shards of a generator function, or a running iterator."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from enqueuer.backends.engine import Backend
from enqueuer.backends.job import Job
from enqueuer.backends.shard_schedule import ShardSchedule
from enqueuer.common.text import warn
from enqueuer.enqueuers.failures import Origin, item_of
from enqueuer.enqueuers.options import Options, Seed
from enqueuer.enqueuers.run import Run
from enqueuer.enqueuers.workload import EpochWork, Workload, warn_if_shared
from enqueuer.errors import DuplicateDataWarning, InvalidState
from enqueuer.monitoring.duplicates import FirstItems
from enqueuer.monitoring.stats import Stats
from enqueuer.order import position
from enqueuer.order.messages import Epoch, Failure, Ticket
from enqueuer.order.sequence import ShardOrder
from enqueuer.workers.sources import FunctionSource, LiveSource, Source, name_of


class ShardEpoch(EpochWork):
    """See `EpochWork`."""

    def __init__(
        self, workload: ShardWorkload, run: Run, epoch: Epoch, first_items: FirstItems | None
    ) -> None:
        self._workload = workload
        self._run = run
        self._number = epoch.number
        # Whether the workers were told to run it.
        self._is_announced = False
        self.first_items = first_items
        # More items are never taken and not given to the loop.
        recent = run.options.max_queue_size + 2
        self.order = ShardOrder(epoch, workload.rank_shards(), run.options.ordered, recent)
        self.starts = self.order.position().starts if workload.resumed else None

    @property
    def may_be_followed(self) -> bool:
        return self._is_announced and self._workload.may_overlap

    def feed(self) -> None:
        if not self._is_announced:
            _shards_of(self._run.backend).announce(Epoch(self._number, self.starts))
            self._is_announced = True

    def pass_work(self, old: Backend, new: Backend) -> None:
        # Of an epoch that the loop has not reached, all is made again.
        _shards_of(new).announce(self.order.position())

    def keep(self, failure: Failure) -> None:
        """Do nothing: the worker that failed sends nothing more of the epoch."""

    def where(self, failure: Failure) -> str:
        return f"in {failure.worker}, shard {failure.shard}, item {failure.number}"

    def origin_of(self, failure: Failure) -> Origin:
        workload = self._workload
        seed, shards = workload.seed.value, workload.all_shards
        origin = Origin(seed, self._number, failure.number, failure.shard, shards, failure.worker)
        origin.rerun = workload.rerun(origin, None)
        return origin

    def end(self) -> None:
        """Do nothing: a generator sees its own end."""

    def rerun_s(self, stats: Stats) -> float | None:
        starts = self.order.position().starts or {}
        has_states = any(start.state is not None for start in starts.values())
        if has_states or self._workload.source.can_begin_anywhere:
            # Nothing is made again.
            return 0.0
        return sum(worker.making_s for worker in stats.workers)


def _shards_of(backend: Backend) -> ShardSchedule[Any]:
    shards = backend.shards
    assert shards is not None, "it was loaded for shards"
    return shards


# As many for 1, 2, 4, 8 and 16 workers each, and not too many generators open at once.
_AUTO_SHARDS = 16


class ShardWorkload(Workload):
    """See `Workload`.

    Args:
        source: Source that the user gave.
        options: Options of the enqueuer.
        seed: Seed of the enqueuer.
        shards: Number of shards over all ranks; None: as many as workers.

    Attributes:
        resumed: Shards of the epoch that was resumed from other ranks. The workers have them beside
            those of this rank, and run only the latter in later epochs.
    """

    def __init__(self, source: Source, options: Options, seed: Seed, shards: int | None) -> None:
        self.source = source
        self.options = options
        self.seed = seed
        self.start_method = options.start_method(source)
        self._shards = shards
        self._has_shards = shards is not None
        self._is_compared = False
        # Whether each shard may give other data.
        self.takes_shard = isinstance(source, FunctionSource) and source.takes_shard
        self.needs_common_seed = self.takes_shard
        self.resumed: tuple[int, ...] = ()
        self._check_live()
        # Fails at once if there are too few of them.
        self.rank_shards()

    def _check_live(self) -> None:
        if not isinstance(self.source, LiveSource):
            return
        split = ""
        if self._shards not in (None, 1):
            split = f"into {self._shards} shards"
        elif self.options.world_size > 1:
            split = f"over {self.options.world_size} ranks"
        if split:
            raise ValueError(
                f"a running iterator cannot be split {split}; pass the generator function itself"
            )

    @property
    def all_shards(self) -> int:
        """Number of shards over all ranks."""
        options = self.options
        if isinstance(self.source, LiveSource):
            return 1 if options.backend_name == "thread" else max(1, options.first_workers)
        shards = self._shards or self._shards_of_a_rank() * options.world_size
        return shards - shards % options.world_size if options.drop_last else shards

    def _shards_of_a_rank(self) -> int:
        if not self.options.is_auto:
            return max(1, self.options.first_workers)
        return _AUTO_SHARDS if self.takes_shard else 1

    def rank_shards(self) -> range:
        """Return the shards of this rank.

        Raises:
            ValueError: There are fewer shards than ranks.
        """
        shards, options = self.all_shards, self.options
        if shards < options.world_size:
            raise ValueError(
                f"shards={self._shards} cannot be divided over world_size={options.world_size} "
                "ranks; give at least as many shards as ranks"
            )
        return range(options.rank, shards, options.world_size)

    @property
    def shard_count(self) -> int:
        return len(self.rank_shards())

    # --- what runs ---

    def job(self, workers: int, first: Epoch) -> Job:
        self.resumed = first.share or ()
        return self._job(workers)

    @property
    def may_overlap(self) -> bool:
        """Whether an epoch may begin while the loop still reads the one before.

        Not if the source may see its end, or if the items of both could not be told apart.
        """
        options, is_function = self.options, isinstance(self.source, FunctionSource)
        return is_function and options.ordered and options.backend_name != "ray"

    def _job(self, workers: int) -> Job:
        shards = self.all_shards
        if isinstance(self.source, LiveSource) and shards > 1:
            _warn_of_duplicates(shards)
        own = tuple(dict.fromkeys([*self.resumed, *self.rank_shards()]))
        job = self.job_of(workers, shards, own)
        is_fixed = self._shards is not None or self.options.is_auto
        return dataclasses.replace(job, has_fixed_shards=is_fixed)

    def job_with(self, workers: int) -> Job | None:
        if isinstance(self.source, LiveSource):
            if self.options.is_inline or workers == 0:
                raise InvalidState(
                    "a running iterator cannot pass between the loop's own thread and a worker; "
                    "pass the generator function itself"
                )
            if self.options.backend_name == "thread":
                # One thread reads it, whatever `workers` is.
                return None
            raise InvalidState(
                "processes that share a running iterator cannot be reconfigured, as their copies "
                "of it have gone on; pass the generator function itself"
            )
        return self._job(workers)

    def keep_shards(self) -> None:
        if self._shards is None and not isinstance(self.source, LiveSource):
            self._shards = self.all_shards

    def begin(self, run: Run, epoch: Epoch, before: EpochWork | None) -> ShardEpoch:
        if isinstance(self.source, LiveSource):
            warn_if_shared(run, self.source.iterable)
        first_items = None
        is_comparable = isinstance(self.source, FunctionSource) and self.shard_count > 1
        if is_comparable and not self._is_compared and epoch.starts is None:
            self._is_compared = True
            first_items = FirstItems(self.shard_count, self.takes_shard)
        return ShardEpoch(self, run, epoch, first_items)

    def rewind(self) -> None:
        """Do nothing: the generator function is called anew."""

    def why_empty(self, earlier: int) -> str:
        source, stage = self.source, self.source.stage
        is_read = isinstance(source, LiveSource) and isinstance(source.iterable, Iterator)
        is_new = not (earlier and is_read)
        if is_new and stage is not None and stage.batch_size is not None and stage.drop_last:
            return (
                f"no shard had the {stage.batch_size} samples of a batch, and drop_last is True; "
                "give a smaller batch_size, fewer shards, or drop_last=False"
            )
        if is_read:
            return (
                "the iterator is at its end, and cannot begin anew; pass the generator function "
                "itself, GeneratorEnqueuer(batches) instead of GeneratorEnqueuer(batches()), "
                "which is called for each epoch"
            )
        return "the generator yielded nothing; is there any data where it looks for it?"

    def limit_of_workers(self) -> str | None:
        if self.shard_count > 1:
            return None
        if isinstance(self.source, LiveSource):
            return "an iterator cannot be split: pass the generator function itself"
        return (
            f"{name_of(self.source.function)} is one shard: let it take a shard and do its "
            "share of the work (shard.split), or give shards= if each run of it gives other data"
        )

    # --- position ---

    def identity(self) -> dict[str, Any]:
        options, stage = self.options, self.source.stage
        return {
            "kind": "GeneratorEnqueuer",
            "random_seed": self.seed.value,
            "shards": self.all_shards,
            "rank": options.rank,
            "world_size": options.world_size,
            "ordered": options.ordered,
            **({} if stage is None else stage.identity()),
        }

    def fixed(self) -> dict[str, bool]:
        is_live = isinstance(self.source, LiveSource)
        return {"random_seed": self.seed.is_explicit, "shards": is_live or self._has_shards}

    def adopt(self, state: Mapping[str, Any], epoch: Epoch, was_run: bool) -> None:
        if isinstance(self.source, LiveSource) and was_run:
            raise InvalidState(
                "a running iterator that was read cannot be rewound; make a new enqueuer with a "
                "fresh one, or pass the generator function itself"
            )
        position.check_shards(state, epoch)
        self.seed.value = state["random_seed"]
        if not isinstance(self.source, LiveSource):
            self._shards = state["shards"]

    def rerun(self, origin: Origin, ticket: Ticket | None) -> Callable[[], Any]:
        if origin.shard is None:
            raise ValueError("the error came from a task of an OrderedEnqueuer, not from a shard")
        place = origin.shard, origin.shards, origin.epoch, origin.random_seed
        seed = self.options.has_globals
        return functools.partial(item_of, self.source, place, origin.item, seed)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = {"shards": self._shards, "random_seed": self.seed.value}
        return (self.source,), self.options.explicit() | own


def _warn_of_duplicates(workers: int) -> None:
    warn(
        f"each of the {workers} processes goes on with its own copy of the same iterator, so "
        f"every batch comes {workers} times, unless it draws from `random` or `numpy.random`, "
        "which are seeded in each process; pass the generator function itself "
        "(`def batches(shard): ...`, with shard.split for its share of the work), or workers=1",
        DuplicateDataWarning,
    )
