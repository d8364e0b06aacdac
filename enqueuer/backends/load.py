"""Loading a backend by its name: an engine with the pool that runs its workers.

A backend is a pool (`pool.py`); its name is in the table below.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection
from typing import Any, TypeAlias

from enqueuer.backends.engine import Engine
from enqueuer.backends.job import Job
from enqueuer.backends.lifecycle import Restarts
from enqueuer.backends.pool import WorkerPool
from enqueuer.backends.shard_schedule import ShardSchedule
from enqueuer.backends.task_schedule import TaskSchedule
from enqueuer.errors import StartError
from enqueuer.monitoring.meters import LoopMeter
from enqueuer.workers.remote import check_not_importing
from enqueuer.workers.tasks import TaskSource

Backend: TypeAlias = Engine[Any]

# Items that are taken together from a short queue, if they are at most half of it.
_BUNCH = 8

_POOLS = {
    "thread": ("enqueuer.backends.thread.pool", "ThreadPool"),
    "process": ("enqueuer.backends.process.pool", "ProcessPool"),
    "ray": ("enqueuer.backends.ray.pool", "RayPool"),
}
# The pool of `workers=0`, whatever the backend is.
_INLINE = ("enqueuer.backends.inline", "InlinePool")

if hasattr(os, "fork"):
    # Processes are the default. Imported here, they are part of the import of the enqueuers, and
    # the first start does not wait for it.
    from enqueuer.backends.process import fork_server

    importlib.import_module(_POOLS["process"][0])


def load(
    name: str,
    job: Job,
    restarts: Restarts,
    loop_meter: LoopMeter,
    deferred: Collection[object],
) -> Backend:
    """Return a backend that is ready to be started.

    Args:
        name: Name of the backend.
        job: Description of what the workers run.
        restarts: Restarts of the run.
        loop_meter: Account of the waits.
        deferred: Calls that the loop makes after a wait, which ends for them.

    Raises:
        StartError: This system cannot run it, or this is a worker that imports a module.
    """
    if name == "process" and job.workers and not hasattr(os, "fork"):
        raise StartError("backend='process' needs a POSIX system; use backend='thread' here")
    if name != "thread" and job.workers and job.start_method != "fork":
        check_not_importing()
    if name == "process" and job.workers and job.start_method == "forkserver":
        # The server imports numpy while this process pickles the source.
        fork_server.server.begin()
    module, kind = _POOLS[name] if job.workers else _INLINE
    pool: WorkerPool[Any] = getattr(importlib.import_module(module), kind)(job)
    # Items that are taken together keep their places until the loop has used them. With a bound in
    # bytes there may be few places, and taking large items together gains nothing.
    size, is_measured = job.max_queue_size, job.max_queue_bytes is not None
    # A trace records when each item was asked for.
    one_by_one = is_measured or job.trace is not None
    if isinstance(job.source, TaskSource):
        bunch = 1 if one_by_one else max(1, size // 2)
        in_turn = job.workers if job.source.is_round_robin and not pool.shares_gil else 0
        tasks = TaskSchedule(pool.workers, pool.dispatch, bunch, is_measured, in_turn)
        return Engine(job, pool, tasks, restarts, loop_meter, deferred)
    bunch = 1 if one_by_one else max(1, size // 4, min(size // 2, _BUNCH))
    # Beside a quick loop a thread makes nothing meanwhile, as it has no GIL; and to switch between
    # the two takes as long as many items. There is one more item, for which a worker has no place.
    quick = size + 1 if pool.shares_gil and not one_by_one else bunch
    owners = {shard: worker for worker, plan in enumerate(job.plans()) for shard in plan.shards}
    shards = ShardSchedule(pool.workers, owners, bunch, quick, loop_meter)
    return Engine(job, pool, shards, restarts, loop_meter, deferred)
