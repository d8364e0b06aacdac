"""`workers="auto"`: when the autoscaler is asked, and what becomes of its answer.

Workers that do tasks are added or asked to exit, and each finishes its task. Workers that get
other shards, or another `concurrency`, are replaced by new ones, which go on at the position.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from enqueuer.common.text import percent, size
from enqueuer.enqueuers.run import PassWork, Run, State
from enqueuer.enqueuers.workload import Workload
from enqueuer.errors import StartError
from enqueuer.monitoring import usage
from enqueuer.monitoring.autoscaler import Autoscaler
from enqueuer.monitoring.meters import clock
from enqueuer.monitoring.stats import HARDLY_WAITS, Stats

_log = logging.getLogger("enqueuer")


class Scaling:
    """Changes the number of workers of one run.

    Args:
        run: The run.
        workload: Workload of the run.
    """

    def __init__(self, run: Run, workload: Workload) -> None:
        self._run = run
        self._workload = workload
        shards = workload.shard_count
        limit = run.options.max_workers(run.cpus())
        limit = limit if shards is None else min(limit, shards)
        self._autoscaler = Autoscaler(
            run.workers,
            limit,
            shards,
            run.limits.first_s,
            run.elements,
            workload.source.concurrency,
            workload.max_concurrency,
        )
        self._has_named_limit = False

    def step(
        self,
        stats: Callable[[], Stats],
        rerun_s: Callable[[Stats], float | None] | None,
        pass_work: PassWork,
    ) -> None:
        """Start or end workers if that is due, and better. Lock of the run held.

        Called by a thread that may wait.

        Args:
            stats: Returns the statistics now.
            rerun_s: Returns the seconds of work that new workers would repeat, of the statistics
                now; None between epochs, when they repeat nothing.
            pass_work: Function that gives new workers the work of the old ones.
        """
        run, autoscaler = self._run, self._autoscaler
        if clock() < run.meter.began + 1e9 * autoscaler.due_s and rerun_s is not None:
            return
        # start(), stop() and reconfigure() take this lock before that of the run, and go first.
        lock = run.locks.state_lock
        if not lock.acquire(blocking=False):
            return
        try:
            # While workers that are slow to exit still run, they could become ever more.
            is_changing = run.successor is not None or run.backend.is_resizing
            # Not after `reconfigure`.
            is_auto = self._workload.options.is_auto
            if run.state is State.RUNNING and is_auto and not is_changing:
                now = stats()
                self._step(now, None if rerun_s is None else rerun_s(now), pass_work)
        finally:
            lock.release()

    def _step(self, stats: Stats, rerun_s: float | None, pass_work: PassWork) -> None:
        run, autoscaler, before = self._run, self._autoscaler, self._run.workers
        workers, each = autoscaler.next(stats, rerun_s), self._workload.source.concurrency
        self._name_limit()
        if workers > before:
            workers = self._fitting(workers, before, stats)
        if (workers, autoscaler.concurrency) == (before, each):
            return
        # The time that it takes counts as a wait.
        run.meter.pause(None)
        try:
            self._change(workers, autoscaler.concurrency, pass_work)
        except StartError as error:
            autoscaler.refused(before, each)
            # As text: a record may be kept, and should not keep descriptors.
            _log.warning("workers='auto' stays at %d: %s", before, str(error))
        else:
            after, reason = autoscaler.concurrency, autoscaler.reason
            if after != each:
                _log.info("concurrency=%d -> concurrency=%d: %s", each, after, reason)
            else:
                _log.info("%d -> %d workers: %s", before, run.workers, reason)
        finally:
            run.meter.resume()

    def _change(self, workers: int, concurrency: int, pass_work: PassWork) -> None:
        """Go on with other workers. Locks held."""
        run, source = self._run, self._workload.source
        # Those that were replaced for more elements at once may have ended by now.
        run.end_replaced()
        each = source.concurrency
        if concurrency == each and run.backend.tasks is not None:
            run.resize(workers)
            return
        if concurrency != each:
            source.concurrency = concurrency
        try:
            job = self._workload.job_with(workers)
            if job is not None:
                run.replace(job, pass_work)
        except BaseException:
            # Then it is tried again, unless they could not be started.
            if concurrency != each:
                source.concurrency = each
            raise
        # With another one, they may be in the middle of a batch that waits; new ones work already.
        if concurrency == each:
            run.end_replaced()

    def _fitting(self, workers: int, before: int, stats: Stats) -> int:
        """Return how many of `workers` fit into memory; report to the autoscaler if not all do.

        Args:
            workers: Number of workers that the autoscaler wants.
            before: Number of workers now.
            stats: Statistics now.
        """
        backend = self._run.backend
        # Beside its own memory, a worker holds the item that it makes and one that waits.
        items = 2 * stats.bytes // max(1, sum(worker.items for worker in stats.workers))
        each, free = (backend.pool.worker_bytes() or 0) + items, usage.available_bytes()
        if not each or free is None:
            return workers
        room = usage.room_for(free, each)
        # Workers with shards are replaced: all new ones are started while the old ones still run.
        limit = max(before, room if backend.tasks is None else before + room)
        if limit >= workers:
            return workers
        self._autoscaler.refused(limit, self._workload.source.concurrency)
        _log.warning(
            "workers='auto' stays at %d: a worker takes %s of memory, and %s is available",
            limit,
            size(each),
            size(free),
        )
        return limit

    def _name_limit(self) -> None:
        """Log, once, why the source does not allow what would help."""
        autoscaler = self._autoscaler
        waits = autoscaler.waiting_share >= HARDLY_WAITS and autoscaler.wanted > 1
        if self._has_named_limit or not waits:
            return
        reason = self._workload.limit_of_workers()
        if reason is None:
            return
        self._has_named_limit = True
        _log.warning(
            "workers='auto' stays at 1, though the loop waits %s of its time: %s",
            percent(autoscaler.waiting_share),
            reason,
        )
