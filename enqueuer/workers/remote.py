"""The loop of a worker in another process: a worker process, or a Ray actor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from enqueuer.errors import Closed
from enqueuer.monitoring.trace_file import TraceTarget
from enqueuer.workers import logs, loop
from enqueuer.workers.concurrent_loop import serve_function
from enqueuer.workers.import_hook import after_import
from enqueuer.workers.messages import Failure, Sender
from enqueuer.workers.plan import OnError, Plan
from enqueuer.workers.seeding import FRAMEWORKS, GlobalStreams, TaskSeeds
from enqueuer.workers.shards import Task
from enqueuer.workers.sources import Source
from enqueuer.workers.tasks import TaskSource
from enqueuer.workers.worker_trace import traced


class WorkerConfig(NamedTuple):
    """Configuration of all workers of an enqueuer that run in other processes; not the source.

    Attributes:
        shard_count: Number of shards, over all ranks.
        random_seed: Seed of the enqueuer.
        levels: Levels of the loggers whose records are wanted; None if none are.
        trace: TraceTarget where workers record what they do; None if they record nothing.
    """

    shard_count: int
    random_seed: int
    levels: logs.Levels | None
    trace: TraceTarget | None

    def serve(
        self,
        index: int,
        shards: tuple[int, ...],
        source: Source | TaskSource,
        on_error: OnError,
        orders: Any,
        sender: Sender,
    ) -> None:
        """Run the loop of a worker until there are no more orders.

        Args:
            index: Index of the worker.
            shards: Indices of its shards; empty for tasks.
            source: Source that it runs.
            on_error: Handling of an exception of the source.
            orders: Orders of the worker, or Tickets if it does tasks.
            sender: Sender of the worker.
        """
        plan = Plan(source, shards, self.shard_count, self.random_seed, on_error)
        if isinstance(source, TaskSource):
            seeds = TaskSeeds()
            after_import(FRAMEWORKS, seeds.seed_imported)
            enter: Callable[[Task], None] = seeds.enter
            if source.begin_worker is not None:
                try:
                    enter = source.begin_worker(index) or enter
                except BaseException as error:
                    serve_failure(error, shards, orders, sender)
                    return
            serve = traced(serve_function(source), self.trace, index)
            serve(plan, orders, sender, enter)
        else:
            streams = GlobalStreams()
            after_import(FRAMEWORKS, streams.seed_imported)
            traced(loop.serve, self.trace, index)(plan, orders, sender, streams.enter)


def serve_failure(
    error: BaseException, shards: tuple[int, ...], orders: Any, sender: Sender
) -> None:
    """Send the error of loading the source, and stay until the loop has read it.

    Args:
        error: Exception that loading the source raised.
        shards: Indices of the worker's shards; empty for tasks.
        orders: Orders of the worker, or Tickets if it does tasks.
        sender: Sender of the worker.
    """
    with contextlib.suppress(Closed):
        if shards:
            sender.send(Failure(shards[0], 0, error))
            while orders.next_epoch() is not None:
                pass
        else:
            while (ticket := orders.next_ticket()) is not None:
                sender.send(Failure(0, ticket.number, error))
