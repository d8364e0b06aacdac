"""The workload of OrderedEnqueuer: one task for each element, or for each batch of elements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from enqueuer.enqueuers.configs import Auto
from enqueuer.enqueuers.failures import Origin, refuse, rerun_task
from enqueuer.enqueuers.options import Concurrency, Options
from enqueuer.enqueuers.run import Run
from enqueuer.enqueuers.task_epoch import TaskEpoch
from enqueuer.enqueuers.workload import EpochWork, Seed, Workload
from enqueuer.errors import InvalidState, StateMismatch
from enqueuer.workers.collate import stack
from enqueuer.workers.messages import Epoch, Ticket
from enqueuer.workers.task_loop import MOST_THREADS
from enqueuer.workers.tasks import Reading, Share, TaskSource, order_of, places_of, steps_in


class TaskWorkload(Workload):
    """See `Workload`.

    Args:
        source: Source that the user gave.
        options: Options of the enqueuer.
        seed: Seed of the enqueuer.
        shuffle: Whether each epoch has an order of its own.
        concurrency: Number of elements at once in each worker that the user gave; `"auto"`: the
            autoscaler chooses. None: it does if that changes nothing but the speed.
    """

    def __init__(
        self,
        source: TaskSource,
        options: Options,
        seed: Seed,
        shuffle: bool,
        concurrency: Concurrency = None,
    ) -> None:
        self.source = source
        self.options = options
        self.seed = seed
        self.start_method = options.start_method(source)
        source.random_seed = seed.value
        self.reading = Reading(shuffle, options.drop_last, options.rank, options.world_size)
        self._concurrency = concurrency
        # Length of the sequence in the epoch in which a loaded state was saved, if it may change.
        self._saved_length: int | None = None
        # The epoch that was resumed from other ranks, and what this rank has of it.
        self._resumed: tuple[int, Share] | None = None

    def steps(self) -> int | None:
        """Return the number of batches of an epoch; None if only the source knows its end."""
        if not self.source.is_finite:
            return None
        count = len(places_of(self.source, self.reading))
        return steps_in(count, self.source.batch_size or 1, self.options.drop_last)

    @property
    def concurrency(self) -> int:
        return self.source.concurrency

    @concurrency.setter
    def concurrency(self, number: int) -> None:
        self.source.concurrency = number

    @property
    def most_at_once(self) -> int:  # type: ignore[override]  # no caller sets it
        workers = self.options.workers
        if not isinstance(workers, Auto) or isinstance(self._concurrency, int):
            return self.source.concurrency
        if self._concurrency == "auto":
            return MOST_THREADS
        # Coroutines run at once anyway. Threads seed no global generators for an element; without
        # batches, each element at once may as well be a worker.
        source, is_thread = self.source, self.options.backend_name == "thread"
        is_free = source.is_async or (is_thread and source.batch_size is not None)
        return (workers.most or MOST_THREADS) if is_free else 1

    @property
    def needs_common_seed(self) -> bool:
        return self.reading.shuffle

    # --- what runs ---

    def keep_shards(self) -> None:
        """Do nothing: tasks have no shards."""

    def begin(self, run: Run, epoch: Epoch, before: EpochWork | None) -> TaskEpoch:
        assert before is None or isinstance(before, TaskEpoch)
        length = self._saved_length if before is None and epoch.starts is not None else None
        if epoch.share is not None:
            self._resumed = epoch.number, epoch.share
        elif self._resumed is not None and self._resumed[0] == epoch.number:
            self._resumed = None
        return TaskEpoch(self, self.reading, run, epoch, before, length)

    def rewind(self) -> None:
        self.source.rewind()

    # --- position ---

    def identity(self) -> dict[str, Any]:
        reading, options, source = self.reading, self.options, self.source
        return {
            "kind": "OrderedEnqueuer",
            "random_seed": self.seed.value,
            "length": source.length if source.is_finite else None,
            "shuffle": reading.shuffle,
            "batch_size": source.batch_size,
            "drop_last": options.drop_last,
            "rank": options.rank,
            "world_size": options.world_size,
            "ordered": options.ordered,
        }

    def given(self) -> dict[str, bool]:
        # The methods of a sequence for epochs may change its length, so that is checked later.
        return {"random_seed": self.seed.is_given, "length": not self.source.follows_epochs}

    def adopt(self, state: Mapping[str, Any], epoch: Epoch, was_run: bool) -> None:
        source = self.source
        if isinstance(source.items, Iterator) and was_run:
            raise InvalidState(
                "an iterator that was read cannot be rewound; make a new enqueuer with a fresh one"
            )
        if state.get("parts", 1) != 1:
            raise StateMismatch("the state is of one of several workers of a DataLoader")
        if epoch.starts is not None and list(epoch.starts) != [0]:
            raise StateMismatch("this is not the position of an OrderedEnqueuer")
        self._saved_length = None
        if epoch.starts is not None and source.follows_epochs:
            self._saved_length = state["length"]
        steps = self.steps()
        if epoch.starts is not None and steps is not None and not source.follows_epochs:
            last = max((epoch.starts[0].number - 1, *epoch.done))
            if last >= steps:
                raise StateMismatch(f"the state has task {last}, but an epoch has {steps} tasks")
        if source.follows_epochs and source.ended > epoch.number:
            raise InvalidState(
                f"on_epoch_end of the sequence was called for {source.ended} epochs, and it "
                f"cannot go back to epoch {epoch.number}; make a new enqueuer with a new sequence"
            )
        self._check_share(epoch)
        self._resumed = None if epoch.share is None else (epoch.number, epoch.share)
        self.seed.value = source.random_seed = state["random_seed"]

    def _check_share(self, epoch: Epoch) -> None:
        share = epoch.share
        if share is None:
            return
        source, is_ascending = self.source, list(share) == sorted({*share})
        # The first one may be that behind the last element.
        is_short = not source.is_finite or source.follows_epochs or share[-1:] <= (source.length,)
        if not (share and is_ascending and is_short):
            raise StateMismatch(f"the state has the share {[*share]}, which is none of these tasks")

    def rerun(self, origin: Origin, ticket: Ticket | None) -> Callable[[], Any]:
        if origin.element is None:
            raise ValueError("the error came from a shard of a GeneratorEnqueuer, not from a task")
        if origin.element < 0:
            return functools.partial(refuse, "the error came from reading the elements")
        ticket = ticket or self._new_ticket(origin)
        if ticket is None:
            return functools.partial(
                refuse,
                "the element came from an iterable, and is gone: replay(error) takes it along "
                "only in the process of the loop",
            )
        # Workers with several threads do not seed the global generators.
        seed = self.options.has_globals and not self.source.has_threads
        skip = self.options.on_error != "raise"
        return functools.partial(
            rerun_task, self.source, origin.random_seed, ticket, origin.element, seed, skip
        )

    def _new_ticket(self, origin: Origin) -> Ticket | None:
        """Return a ticket of a task of a sequence; None for an iterable."""
        if not self.source.is_sequence:
            return None
        size = self.source.batch_size or 1
        places = slice(origin.item * size, (origin.item + 1) * size)
        epoch, share = self._resumed or (origin.epoch, (0,))
        share = share if epoch == origin.epoch else (0,)
        indices = order_of(self.source, self.reading, origin.epoch, share)[places]
        if origin.element not in indices:
            raise ValueError(
                f"task {origin.item} of epoch {origin.epoch} has no element {origin.element} here: "
                "give the same arguments, and load the state with which the run that failed began"
            )
        return Ticket(origin.item, origin.epoch, tuple(int(index) for index in indices))

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        source = self.source
        options = self.options.given() | {
            "batch_size": source.batch_size,
            "collate": None if source.collate is stack else source.collate,
            "concurrency": self._concurrency,
            "random_seed": self.seed.value,
        }
        return (source.items, source.map, self.reading.shuffle), options
