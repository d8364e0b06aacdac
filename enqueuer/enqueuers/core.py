"""The inside of an enqueuer: its life cycle, its position, its iterators and its callbacks.

    Core --> EpochReader: the epoch that the loop reads      (a new one for each epoch)
             --> Run: the workers, from start() to stop()    (a new one for each start)
         --> Workload: shards or tasks, on which the batches depend
         --> SavedPosition: where it stands while no run goes on
         --> Locks: one consumer at a time waits, and one start, stop or change goes on

Any number of threads may ask for a batch, and each batch goes to one of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from enqueuer import exports
from enqueuer.backends.copies import warn_of_sharing
from enqueuer.backends.engine import Backend
from enqueuer.backends.stall import DeadlineExpired
from enqueuer.common import interrupts
from enqueuer.common.text import warn
from enqueuer.enqueuers.epoch_reader import EpochReader
from enqueuer.enqueuers.options import Options
from enqueuer.enqueuers.run import STOP_S, Locks, OwnedBackends, Run, State, next_workers
from enqueuer.enqueuers.scaling import Scaling
from enqueuer.enqueuers.workload import Workload
from enqueuer.errors import Closed, EnqueuerWarning, InvalidState
from enqueuer.monitoring.meters import clock
from enqueuer.monitoring.stats import Stats
from enqueuer.monitoring.trace import Trace, path_of_part
from enqueuer.order.messages import Epoch, ItemTuple
from enqueuer.order.position import SavedPosition

_log = logging.getLogger("enqueuer")


class StatsCallback:
    """A callback of `on_stats`, and when it is due.

    Args:
        function: Called with the statistics since its last call.
        every_ns: Time between two calls.
    """

    def __init__(self, function: Callable[[Stats], object], every_ns: int) -> None:
        self.function = function
        self.every_ns = every_ns
        self.begin_run()

    def begin_run(self) -> None:
        """Count the time from now, and the statistics from the start."""
        self.due_ns = clock() + self.every_ns
        self._earlier: Stats | None = None

    def news(self, total: Stats) -> Stats:
        """Return the statistics since the previous call, and count the time from now."""
        earlier, self._earlier = self._earlier, total
        self.due_ns = clock() + self.every_ns
        return total if earlier is None else total.since(earlier)


def log_line(stats: Stats) -> None:
    """Log the most important numbers."""
    _log.info("%s", exports.line(stats))


class Core:
    """The life cycle, the position and the epochs of an enqueuer.

    Args:
        workload: Workload of the enqueuer: shards or tasks.

    Attributes:
        reader: The epoch that the loop reads, or read last; None before the first start.
        saved: Position while no run goes on.
        callbacks: Callbacks of `on_stats`.
        locks: Locks of the consumer and of the life cycle.
        owned: Backends whose workers have not all ended.
        trace: Recorder of events; None: nothing is recorded.
        was_run: Whether a run has ended.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.reader: EpochReader | None = None
        self.saved = SavedPosition(Epoch(0))
        self.callbacks: list[StatsCallback] = []
        self.locks = Locks()
        self.owned = OwnedBackends(self)
        self.trace: Trace | None = None
        if self.options.trace is not None:
            # Each rank to its own file: they may be on machines that do not know of each other.
            path, ranks = os.fspath(self.options.trace), self.options.world_size
            self.trace = Trace(path_of_part(path, self.options.rank, ranks) if ranks > 1 else path)
        self.was_run = False
        self._is_starting = False

    # --- what it is ---

    @property
    def options(self) -> Options:
        """The options as they are now."""
        return self.workload.options

    @property
    def run(self) -> Run | None:
        """The run that goes on, or the last one; None before the first start."""
        reader = self.reader
        return None if reader is None else reader.run

    @property
    def state(self) -> State:
        """Where it is in its life."""
        run = self.run
        state = State.NEW if run is None else run.state
        return State.STOPPED if state is State.NEW and self.was_run else state

    @property
    def is_idle(self) -> bool:
        """Whether it has no workers: it was not started, or was stopped."""
        return self.state in (State.NEW, State.STOPPED)

    def is_running(self) -> bool:
        """Return whether there is anything to come: a batch, or an error."""
        reader = self.reader
        return self.state is State.RUNNING and reader is not None and not reader.is_over

    def check_started(self, what: str) -> None:
        """Raise InvalidState unless there is a run; `what` is a verb phrase for the message."""
        if self.state is State.NEW:
            raise InvalidState(
                f"cannot {what} before start(); call start(), or use `with` around the loop"
            )
        if self.state is State.STOPPED:
            raise InvalidState(f"cannot {what} after stop(); call start() to begin anew")

    def started_reader(self, what: str) -> EpochReader:
        """Return the epoch that the loop reads; raise InvalidState unless there is a run."""
        self.check_started(what)
        assert self.reader is not None, "it was started"
        return self.reader

    # --- life cycle ---

    def check_idle(self, call: str) -> None:
        """Raise InvalidState unless there are no workers. State lock held, or the other one.

        Args:
            call: Method that was called, for the message.
        """
        if self._is_starting:
            raise InvalidState(f"{call} was called by a signal handler within start()")
        if not self.is_idle:
            raise InvalidState(
                f"{call} was called, but the enqueuer is running already; call stop() first"
            )

    def check_outside(self, call: str) -> None:
        """Raise InvalidState in code that runs while its thread waits for a batch.

        To be called before the state lock is taken: a thread that changes the workers has it, and
        waits until this one, which would wait for it, is outside.

        Args:
            call: Method that was called, for the message.
        """
        if self.locks.is_reading:
            self.check_idle(call)
            raise InvalidState(f"{call} was called by code that runs within a call of the enqueuer")

    def start(self, options: Options) -> None:
        """Start the workers, with these options from now on; see `BaseEnqueuer.start`."""
        self.check_outside("start()")
        with interrupts.held(), interrupts.taken(self.locks.state_lock):
            self.check_idle("start()")
            self.workload.check_seed()
            workers = next_workers(self.run, options)
            # A stop() may not have been completed.
            self.owned.stop(STOP_S)
            # A stop() that is asked for meanwhile waits until all workers are started.
            with self.locks.reading():
                self._start(options, workers)

    def _start(self, options: Options, workers: int) -> None:
        """Start the workers, or leave all as it was. Both locks held."""
        workload, saved, before = self.workload, self.saved, (self.reader, self.options)
        first = saved.epoch if saved.is_loaded else Epoch(0)
        self._is_starting = True
        try:
            workload.options = options
            if not saved.is_loaded:
                workload.rewind()
            run = Run(options, workers, self.owned, self.locks, self.trace, saved)
            _started.add(self)
            job = workload.job(workers, first)
            at_once = len(job.plans()) * workload.max_concurrency if workers else 1
            if options.backend_name == "thread" and (at_once > 1 or job.may_grow):
                warn_of_sharing(job.source, workload.seed.is_explicit)
            run.backend = run.start_backend(job, first)
            scaling = Scaling(run, workload) if options.is_auto else None
            self.reader = EpochReader(run, workload, first, scaling)
            for callback in self.callbacks:
                callback.begin_run()
            # The workers begin at once. An iterable may keep this waiting forever.
            self.reader.feed()
            self.saved = dataclasses.replace(saved, is_loaded=False)
            run.move(State.RUNNING)
        except BaseException:
            self.reader, workload.options = before
            is_main = threading.current_thread() is threading.main_thread()
            if interrupts.is_at_exit.is_set() and not is_main:
                # The main thread ends what was started, and this thread ends with the interpreter.
                raise SystemExit from None
            self.owned.stop(STOP_S)
            raise
        finally:
            self._is_starting = False

    def stop(self, seconds: float) -> None:
        """End the workers; see `BaseEnqueuer.stop`."""
        if not self.owned.are_running:
            return
        if self.locks.defer_stop(functools.partial(self.stop, seconds)):
            # This ends the wait of this thread.
            if self.run is not None:
                self.run.close()
            return
        with interrupts.held():
            final = None
            try:
                # Before the workers exit, as these answer.
                final = self._last_stats()
            finally:
                self._stop(seconds, final)

    def _last_stats(self) -> Stats | None:
        """Return the statistics of a run that is about to end, and record its bottleneck."""
        try:
            final = self.stats()
        except InvalidState:
            # The workers belong to another process.
            return None
        if self.trace is not None and not self.is_idle:
            bottleneck = final.bottleneck()
            about = {"kind": bottleneck.kind, "text": str(bottleneck)}
            self.trace.instant("bottleneck", about)
        return final

    def _stop(self, seconds: float, final: Stats | None) -> None:
        if (run := self.run) is not None:
            # This wakes the consumer, which then releases its lock.
            run.close()
        with interrupts.taken(self.locks.state_lock):
            try:
                if self.run is not None:
                    self._end_run(self.run, seconds, final)
            finally:
                self.owned.stop(seconds)

    def _end_run(self, run: Run, seconds: float, final: Stats | None) -> None:
        """Stop a run, and note where it ends. State lock held.

        Without the lock, a consumer could end the epoch, or a thread save a position, after the
        batches that are ready were dropped and before the position is known. A consumer that runs
        code of the user may keep the lock for longer; it takes nothing afterwards.
        """
        lock = self.locks.lock
        # Its backend may have just been replaced.
        run.close()
        run.successor = None
        with interrupts.taken(lock, max(seconds, 0.1)) as is_taken:
            if is_taken:
                self.locks.changed.notify_all()
            if not self.is_idle:
                try:
                    run.final = final
                    self.was_run = True
                    # Only now, as the consumer may have begun the next epoch.
                    reader = self.reader
                    assert reader is not None, "a run goes on"
                    self.saved = reader.end(functools.partial(self.position, reader))
                finally:
                    run.move(State.STOPPED)

    def position(self, reader: EpochReader, ready: deque[ItemTuple]) -> SavedPosition:
        """Return where a run stands.

        Args:
            reader: The epoch that its loop reads.
            ready: Items that were taken and are still to be given.
        """
        epoch, total = reader.position(ready), reader.run.total_items(len(ready))
        count, identity = reader.error_count_at(epoch), self.workload.identity()
        return SavedPosition(epoch, identity, error_count=count, total_items=total)

    # --- other workers ---

    def reconfigure(self, workers: int) -> None:
        """Go on with another number of workers; see `BaseEnqueuer.reconfigure`."""
        if self.locks.is_reading:
            raise InvalidState(
                "reconfigure() was called by code that runs while the same thread waits for a "
                "batch, or starts the workers, such as a signal handler; call it between two "
                "batches, or in another thread"
            )
        with interrupts.held(), interrupts.taken(self.locks.state_lock):
            run = self.run
            # Before the first start there are no data that should stay the same.
            if run is not None:
                run.finish_change()
                if self.state is State.FAILED:
                    raise InvalidState("cannot reconfigure after an error; call stop() first")
                if self.state is State.RUNNING and workers != run.workers:
                    job = self.workload.job_with(workers)
                    if job is not None:
                        run.replace(job, self._pass_work)
                self.workload.keep_shards()
            # From now on, `Scaling` changes nothing.
            self.workload.options = dataclasses.replace(self.options, workers=workers)
            if run is not None and self.state is State.RUNNING:
                run.end_replaced()

    def _pass_work(self, old: Backend, new: Backend) -> None:
        """Let a new backend go on where an old one was. Lock held."""
        assert self.reader is not None, "a run goes on"
        self.reader.pass_work(old, new)

    # --- what iterators need ---

    def join(self, seen: EpochReader | None = None, is_any: bool = True) -> EpochReader:
        """Return this epoch, or the next one if this one is over; start what was not started.

        Args:
            seen: An epoch that was over; None: no epoch had begun.
            is_any: Whether any epoch may be over. If not, an epoch that another thread has begun
                after `seen` is returned also if it is over.
        """
        # Code that runs within a call cannot start it, and must not wait for the lock.
        if not self.locks.is_reading:
            with interrupts.held(), interrupts.taken(self.locks.state_lock):
                if self.state is State.NEW:
                    self.start(self.options)
        self.check_started("iterate over it")
        with self.locks.reading():
            reader = self.started_reader("iterate over it")
            return self._begun(reader, retune=True) if is_any or seen is reader else reader

    def following(self, reader: EpochReader) -> EpochReader | None:
        """Begin the epoch after one; return None if there is none. For endless iterators."""
        with self.locks.reading():
            # An empty epoch would be followed by another one.
            if reader is self.reader and not reader.is_empty:
                self._begun(reader)
            # It is the same one also if it is not over, or the run is being stopped.
            is_next = reader is not self.reader and self.state is State.RUNNING
            return self.reader if is_next else None

    def _begun(self, reader: EpochReader, retune: bool = False) -> EpochReader:
        """Return an epoch, or the next one if it is over and the run goes on. Lock held."""
        run = reader.run
        while run.state is State.RUNNING and reader.is_over:
            try:
                run.meter.epoch_began()
                if retune:
                    reader.retune(is_over=True)
                following = reader.following()
                self.reader = reader = following
                reader.feed()
            except Closed:
                if not run.wait_for_change():
                    break
                # Another thread may have begun the next epoch meanwhile.
                reader = self.reader or reader
        return reader

    # --- statistics ---

    def stats(self) -> Stats:
        """Return the statistics of the run, or of the last one."""
        reader = self.reader
        if reader is not None:
            return reader.stats()
        workers, saved = self.options.first_workers, self.saved
        never = Run(self.options, workers, self.owned, self.locks, self.trace, saved)
        return never.stats(saved.epoch.number, 0)

    def make_callbacks(self, may_wait: bool = True) -> None:
        """Call the callbacks of `on_stats` that are due; log one that fails, and call it no more.

        Called before a batch is taken, so that none is lost if that fails; and without
        the lock, since another thread that a callback waits for may want it.
        """
        run = self.run
        if run is None or not run.is_news:
            return
        try:
            with self.locks.reading(-1 if may_wait else 0):
                run.is_news = False
                due = [callback for callback in self.callbacks if clock() >= callback.due_ns]
                calls = [(callback, callback.news(self.stats())) for callback in due]
        except DeadlineExpired:
            return
        for callback, stats in calls:
            try:
                callback.function(stats)
            except Exception:
                _log.exception("a callback of on_stats() failed; it is not called again")
                # Another thread in which it failed may have removed it.
                with contextlib.suppress(ValueError):
                    self.callbacks.remove(callback)

    # --- forks ---

    def leave_to_parent(self) -> None:
        """Become an enqueuer without workers, in a child forked from the process that has them."""
        if not self.owned.are_running:
            return
        if self.reader is not None:
            self.reader.leave_to_parent()
        self.locks.leave_to_parent()
        inherited = self.owned.leave_to_parent()
        if self.run is not None:
            self.run.backend, self.run.successor = inherited, None


_started: weakref.WeakSet[Core] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for core in list(_started):
        core.leave_to_parent()
    _started.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)


Batch = TypeVar("Batch")
# Numbers of the iterators, in the order in which they were made.
_turns = itertools.count()


class Batches(Iterator[Batch]):
    """An iterator over one epoch; if it `is_loop`, it warns of another loop over the same one."""

    _goes_on = False

    def __init__(self, core: Core, reader: EpochReader, is_loop: bool = False) -> None:
        self._core = core
        self._reader = reader
        self._turn = next(_turns) if is_loop else None

    def __next__(self) -> Batch:
        while (item := self._reader.take()) is None:
            self._wait()
        return item[2]  # type: ignore[return-value]  # what the generator yielded

    def _wait(self) -> None:
        core, reader = self._core, self._reader
        turn = self._turn
        if turn is not None and turn != reader.last_turn[0]:
            _take_turn(reader, turn)
        if reader.run.is_news and core.callbacks:
            core.make_callbacks()
        reader.wait(self._goes_on)


def _take_turn(reader: EpochReader, turn: int) -> None:
    """Note which iterator reads the epoch; warn if one that was made later read it before."""
    (last, thread), reader.last_turn = reader.last_turn, (turn, threading.get_ident())
    if last < turn or thread != threading.get_ident():
        return
    warn(
        "two loops of this thread read the same epoch of an enqueuer, so each gets only a part of "
        "the batches; give each loop an enqueuer of its own",
        EnqueuerWarning,
    )


class Endless(Batches[Batch]):
    """An iterator over an epoch and all that follow."""

    _goes_on = True

    def _wait(self) -> None:
        try:
            super()._wait()
        except StopIteration:
            reader = self._core.following(self._reader)
            if reader is None:
                raise
            self._reader = reader
