"""Loading a backend by its name: an engine with the pool that runs its workers.

A backend is a pool (`pool.py`); its name is in the table below.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from enqueuer.backends.engine import Engine
from enqueuer.backends.job import Job, owners_of
from enqueuer.backends.pool import W, WorkerPool
from enqueuer.backends.shard_schedule import ShardSchedule
from enqueuer.backends.task_engine import TaskEngine
from enqueuer.backends.task_schedule import TaskSchedule
from enqueuer.errors import StartError
from enqueuer.monitoring.loop_meter import LoopMeter
from enqueuer.workers.tasks import TaskSource

Backend = Engine[Any]
"""What an enqueuer sees of a backend, for workers that run shards or do tasks."""

TaskBackend = TaskEngine[Any]
"""What an enqueuer sees of a backend for tasks."""

_POOLS = {
    "thread": ("enqueuer.backends.thread.pool", "ThreadPool"),
    "process": ("enqueuer.backends.process.pool", "ProcessPool"),
    "ray": ("enqueuer.backends.ray.pool", "RayPool"),
}


def load(name: str, job: Job, loop_meter: LoopMeter | None = None) -> Backend:
    """Return the backend called `name`, ready to start `job`; it records its waits.

    Raises:
        StartError: This system cannot run it.
    """
    if name == "process" and not hasattr(os, "fork"):
        raise StartError("backend='process' needs a POSIX system; use backend='thread' here")
    module, kind = _POOLS[name]
    pool = getattr(importlib.import_module(module), kind)(job)
    return _engine(job, pool, loop_meter or LoopMeter())


def _engine(job: Job, pool: WorkerPool[W], meter: LoopMeter) -> Backend:
    # Items that are taken together keep their places until the loop has used them. With a bound in
    # bytes there may be few places, and taking large items together gains nothing.
    bunch = 1 if job.max_queue_bytes is not None else max(1, job.max_queue_size // 4)
    if isinstance(job.source, TaskSource):
        measure = job.max_queue_bytes is not None
        tasks = TaskSchedule(pool.workers, pool.dispatch, bunch, measure)
        return TaskEngine(job, pool, tasks, meter)
    shards = ShardSchedule(pool.workers, owners_of(job.plans()), bunch)
    return Engine(job, pool, shards, meter)
