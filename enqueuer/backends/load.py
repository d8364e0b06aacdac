"""Loading a backend by its name: an engine with the pool that runs its workers.

A backend is a pool (`pool.py`); its name is in the table below.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, TypeAlias

from enqueuer.backends.engine import Engine
from enqueuer.backends.job import Job
from enqueuer.backends.pool import Restarts, WorkerPool
from enqueuer.backends.shard_schedule import ShardSchedule
from enqueuer.backends.task_schedule import TaskSchedule
from enqueuer.errors import StartError
from enqueuer.monitoring.meters import LoopMeter
from enqueuer.workers.settings import check_not_importing
from enqueuer.workers.tasks import TaskSource

Backend: TypeAlias = Engine[Any]

_POOLS = {
    "thread": ("enqueuer.backends.thread_pool", "ThreadPool"),
    "process": ("enqueuer.backends.process.pool", "ProcessPool"),
    "ray": ("enqueuer.backends.ray.pool", "RayPool"),
}
# The pool of `workers=0`, whatever the backend is.
_INLINE = ("enqueuer.backends.inline", "InlinePool")


def load(name: str, job: Job, restarts: Restarts, loop_meter: LoopMeter) -> Backend:
    """Return a backend that is ready to be started.

    Args:
        name: Name of the backend.
        job: Description of what the workers run.
        restarts: Restarts of the run.
        loop_meter: Account of the waits.

    Raises:
        StartError: This system cannot run it, or this is a worker that imports a module.
    """
    if name == "process" and job.workers and not hasattr(os, "fork"):
        raise StartError("backend='process' needs a POSIX system; use backend='thread' here")
    if name != "thread" and job.workers and job.start_method != "fork":
        check_not_importing()
    if name == "process" and job.workers and job.start_method == "forkserver":
        # The server imports numpy while this process imports the pool and pickles the source.
        importlib.import_module("enqueuer.backends.process.fork_server").server.begin()
    module, kind = _POOLS[name] if job.workers else _INLINE
    pool: WorkerPool[Any] = getattr(importlib.import_module(module), kind)(job)
    # Items keep their places until the loop has used them, so it takes at most half of them. With a
    # bound in bytes there may be few places, and a trace records when each item was asked for.
    is_measured = job.max_queue_bytes is not None
    most = 1 if is_measured or job.trace is not None else max(1, job.max_queue_size // 2)
    if isinstance(job.source, TaskSource):
        in_turn = job.workers if job.source.is_round_robin and name != "thread" else 0
        tasks = TaskSchedule(pool.workers, pool.dispatch, most, is_measured, in_turn)
        return Engine(job, pool, tasks, restarts, loop_meter)
    owners = {shard: worker for worker, plan in enumerate(job.plans()) for shard in plan.shards}
    return Engine(job, pool, ShardSchedule(pool.workers, owners, most), restarts, loop_meter)
