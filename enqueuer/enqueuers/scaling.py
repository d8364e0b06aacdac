"""`workers="auto"`: when the autoscaler is asked, and what becomes of its answer."""

from __future__ import annotations

import logging
import weakref

from enqueuer.common.text import percent, size
from enqueuer.enqueuers.epoch_reader import EpochReader
from enqueuer.enqueuers.run import Run, State
from enqueuer.enqueuers.workload import Workload, most_workers
from enqueuer.errors import StartError
from enqueuer.monitoring import gil, usage
from enqueuer.monitoring.autoscaler import Autoscaler, computing_share
from enqueuer.monitoring.bottleneck import HARDLY_WAITS, MOSTLY
from enqueuer.monitoring.bottleneck_inputs import loop_gil_share, most_on
from enqueuer.monitoring.meters import clock
from enqueuer.monitoring.stats import Stats

_log = logging.getLogger("enqueuer")

# Seconds for which the GIL is probed; some hundred times, so that chance changes little.
_PROBE_S = 0.2
# Share of the time for which the loop may hold the GIL; the rest would show little.
_MOST_BY_LOOP = 0.9


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
        most = most_workers(run.options, run.cpus())
        most = most if shards is None else min(most, shards)
        self._autoscaler = Autoscaler(
            run.workers, most, shards, run.limits.first_s, workload.elements_per_item
        )
        self._epoch_began: Stats | None = None
        self._has_named_limit = False
        # Growth that waits for its probe.
        self._growth: _Growth | None = None

    def begin_epoch(self, stats: Stats) -> None:
        """Note the statistics at the beginning of an epoch."""
        self._epoch_began = stats

    def step(self, reader: EpochReader, between_epochs: bool = False) -> None:
        """Start or end workers if that is due, and better. Lock of the run held.

        Called by a thread that may wait.

        Args:
            reader: The epoch that is read.
            between_epochs: Whether the epoch is over, so that a change repeats nothing.
        """
        run, autoscaler = self._run, self._autoscaler
        if clock() < run.meter.began + 1e9 * autoscaler.due_s and not between_epochs:
            return
        # start(), stop() and reconfigure() take this lock before that of the run, and go first.
        if not run.state_lock.acquire(blocking=False):
            return
        try:
            # While workers that are slow to exit still run, they could become ever more.
            is_changing = run.is_changing or run.backend.is_resizing
            if run.state is State.RUNNING and not is_changing:
                self._step(reader, between_epochs)
        finally:
            run.state_lock.release()

    def _step(self, reader: EpochReader, between_epochs: bool) -> None:
        run, autoscaler, growth = self._run, self._autoscaler, self._growth
        if growth is not None:
            if between_epochs or clock() >= growth.until:
                self._growth = None
                self._grow(growth, reader)
            return
        stats, before = reader.stats(), run.workers
        rerun_s = None
        if not between_epochs:
            began = self._epoch_began
            rerun_s = reader.work.rerun_s(stats if began is None else stats.since(began))
        workers = autoscaler.next(stats, rerun_s)
        self._name_limit()
        if workers > before and self._must_probe(stats):
            growth = _Growth(workers, stats, run)
            if growth.start():
                self._growth = growth
                return
        self._go_to(workers, stats, reader)

    def _grow(self, growth: _Growth, reader: EpochReader) -> None:
        """Add the workers that help, now that the GIL was probed."""
        run, stats, workers = self._run, reader.stats(), growth.workers
        held = growth.held_share(stats)
        if held is not None:
            run.gil_share = held
            workers = self._within_gil(workers, run.workers, stats, held)
        self._go_to(workers, stats, reader)

    def _go_to(self, workers: int, stats: Stats, reader: EpochReader) -> None:
        """Start or end workers."""
        run, autoscaler, before = self._run, self._autoscaler, self._run.workers
        if workers > before:
            workers = self._fitting(workers, before, stats)
        if workers == before:
            return
        # The time that it takes counts as a wait.
        run.meter.pause(None)
        try:
            self._change(workers, reader)
        except StartError as error:
            autoscaler.refused(before)
            # As text: a record may be kept, and should not keep descriptors.
            _log.warning("workers='auto' stays at %d: %s", before, str(error))
        else:
            _log.info("%d -> %d workers: %s", before, run.workers, autoscaler.reason)
        finally:
            run.meter.resume()

    def _change(self, workers: int, reader: EpochReader) -> None:
        """Go on with another number of workers. Locks held."""
        run = self._run
        if run.backend.tasks is not None:
            run.resize(workers)
            return
        job = self._workload.job_with(workers)
        if job is not None:
            run.replace(job, reader.work.pass_work)
        run.end_replaced()

    def _within_gil(self, workers: int, before: int, stats: Stats, held: float) -> int:
        """Return how many of `workers` threads help; report to the autoscaler if not all do.

        Args:
            workers: Number of workers that the autoscaler wants.
            before: Number of workers now.
            stats: Statistics now.
            held: Share of the time in which threads held the GIL.
        """
        # The probe may have met a phase of computing in a work that also waits.
        most = max(before, most_on(1, min(held, computing_share(stats))))
        if most >= workers:
            return workers
        self._autoscaler.limited(most)
        _log.warning(
            "workers='auto' stays at %d: the workers hold the GIL for %s of the time, so they run "
            "Python code, which runs in one thread at a time; use backend='process'",
            most,
            percent(held),
        )
        return most

    def _must_probe(self, stats: Stats) -> bool:
        """Return whether it matters for more workers how long the GIL is held."""
        is_thread = self._run.options.backend_name == "thread"
        return is_thread and computing_share(stats) >= MOSTLY and gil.switch_s() is not None

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
        each, free = (backend.worker_bytes() or 0) + items, usage.available_bytes()
        if not each or free is None:
            return workers
        room = usage.room_for(free, each)
        # Workers with shards are replaced: all new ones are started while the old ones still run.
        most = max(before, room if backend.tasks is None else before + room)
        if most >= workers:
            return workers
        self._autoscaler.refused(most)
        _log.warning(
            "workers='auto' stays at %d: a worker takes %s of memory, and %s is available",
            most,
            size(each),
            size(free),
        )
        return most

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


class _Growth:
    """A decision for more threads, and the probe of the GIL for which it waits.

    The loop goes on meanwhile, so that the threads have room and tasks.

    Args:
        workers: Number of workers that the autoscaler wants.
        stats: Statistics when it decided.
        run: The run, which this does not keep, as a thread has it.
    """

    def __init__(self, workers: int, stats: Stats, run: Run) -> None:
        self.workers = workers
        self._before = stats
        found = weakref.ref(run)

        def has_ended() -> bool:
            run = found()
            return run is None or run.state is not State.RUNNING

        self._probe = gil.Probe(_PROBE_S, has_ended)
        self.until = clock() + int(1e9 * _PROBE_S)

    def start(self) -> bool:
        """Start the probe; return whether the system had room for a thread."""
        try:
            self._probe.start()
        except RuntimeError:
            return False
        return True

    def held_share(self, stats: Stats) -> float | None:
        """Return the share of the time, without the loop's, in which threads held the GIL.

        Args:
            stats: Statistics now.

        Returns:
            None if it is not known.
        """
        self._probe.stop()
        held, seen = self._probe.share, stats.since(self._before)
        workers_cpu_s = sum(worker.cpu_s or 0.0 for worker in seen.workers)
        by_loop = loop_gil_share(seen.loop_cpu_s, workers_cpu_s, seen.working_s, seen.seconds)
        if held is None or by_loop > _MOST_BY_LOOP:
            return None
        return max(0.0, (held - by_loop) / (1 - by_loop))
