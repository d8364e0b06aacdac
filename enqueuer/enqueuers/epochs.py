"""The epochs of one run, one after the other, as iterators and event loops read them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from typing import Any

from enqueuer.backends.load import Backend
from enqueuer.backends.stall import DeadlineExpired
from enqueuer.enqueuers.epoch_reader import EpochReader
from enqueuer.enqueuers.run import Run, State, check_started
from enqueuer.enqueuers.scaling import Scaling
from enqueuer.enqueuers.workload import Workload
from enqueuer.errors import Closed
from enqueuer.workers.messages import Epoch, ItemTuple


class Epochs:
    """The epochs of a run.

    Args:
        run: The run.
        workload: Workload of the run.

    Attributes:
        reader: The epoch that the loop reads; None until the first one has begun.
        scaling: Object that changes the number of workers; None if that is fixed.
    """

    def __init__(self, run: Run, workload: Workload) -> None:
        self.run = run
        self.reader: EpochReader | None = None
        self.scaling = Scaling(run, workload) if run.options.is_auto else None
        self._workload = workload

    @property
    def current(self) -> EpochReader:
        """The epoch that the loop reads, of a run that has begun one."""
        assert self.reader is not None, "the first epoch has begun"
        return self.reader

    def begin(self, epoch: Epoch) -> None:
        """Let the workers run the first epoch, or its rest, or the next, once fed. Lock held."""
        run, before = self.run, self.reader
        run.meter.go_on()
        scaling = self.scaling
        if scaling is not None:
            scaling.epoch_began = run.stats(epoch.number, 0)
        work = None if before is None else before.next_work
        if work is None:
            work = self._workload.begin(run, epoch, None if before is None else before.work)
        is_whole = before is not None or epoch.starts is None
        reader = EpochReader(run, self._workload, work, epoch.number, is_whole)
        run.failures.begin_epoch()
        if run.timeline is not None:
            run.timeline.begin(epoch.number)
        begun = epoch if before is None else Epoch(epoch.number, work.starts)
        if turns := work.order.first_turns():
            begun = dataclasses.replace(begun, turns=turns)
        run.backend.schedule.begin(begun)
        # Only now, so that an exception which strikes before has all of it done again. Workers that
        # have begun already know the number of the epoch.
        self.reader = reader

    def begin_next(self, retune: bool = False) -> None:
        """Begin the next epoch if this one is over and the run goes on. Lock of the run held."""
        while self.run.state is State.RUNNING and self.current.is_over:
            try:
                self.run.meter.go_on()
                if retune:
                    self.retune(between_epochs=True)
                self.begin(self.current.work.next_epoch())
                self.current.feed()
            except Closed:
                if not self.run.wait_for_change():
                    return

    def next_of(self, seen: EpochReader | None, is_any: bool) -> EpochReader:
        """Return this epoch, or the next one if this one is over; see `Core.join`."""
        with self.run.deferred.locked():
            check_started(self.run.state, "iterate over it")
            if is_any or seen is self.reader:
                self.begin_next(retune=True)
            return self.current

    def following(self, reader: EpochReader) -> EpochReader | None:
        """Begin the epoch after one; return None if there is none. For endless iterators."""
        with self.run.deferred.locked():
            # An empty epoch would be followed by another one.
            if reader is self.reader and not reader.is_empty:
                self.begin_next()
            # It is the same one also if it is not over, or the run is being stopped.
            is_next = reader is not self.reader and self.run.state is State.RUNNING
            return self.reader if is_next else None

    def pass_work(self, old: Backend, new: Backend) -> None:
        """Let a new backend go on where an old one was. Lock of the run held."""
        reader = self.current
        reader.work.pass_work(old, new)
        if reader.next_work is not None:
            reader.next_work.pass_work(old, new)

    def retune(self, between_epochs: bool = False) -> None:
        """Change the number of workers if that is due. Lock of the run held; may wait."""
        # Read once, as another thread may replace it by None.
        scaling = self.scaling
        if scaling is not None:
            scaling.step(self.current, self.pass_work, between_epochs)

    def drop_ready(self) -> deque[ItemTuple]:
        """Take all that is ready away from the iterators, and return it. No lock needed."""
        left, ready = deque[ItemTuple](), self.current.ready
        # Iterators take items from the left, without the lock. From the right, so that what an
        # iterator takes meanwhile comes before all that was dropped.
        with contextlib.suppress(IndexError):
            while True:
                left.appendleft(ready.pop())
        return left

    # --- batches ---

    def wait_for(self, reader: EpochReader, goes_on: bool) -> None:
        """Wait until something is ready; another thread may have taken it on return.

        Args:
            reader: The epoch that is read.
            goes_on: Whether the next epoch will be read as well, and so may begin early; it may
                also by the option `epochs`.

        Raises:
            StopIteration: The epoch is over, or the enqueuer was stopped.
        """
        run = self.run
        try:
            with run.lock:
                reader.is_next_wanted = goes_on or reader.is_followed
                if not reader.has_item(None, None if self.scaling is None else self.retune):
                    raise StopIteration
                if run.timeline is not None:
                    run.timeline.take(reader.ready)
        finally:
            if run.deferred.calls:
                run.deferred.make()

    def poll(self, reader: EpochReader) -> tuple[Any, ...]:
        """Take the next batch, if there is one; waits for nothing. For event loops.

        Raises:
            StopAsyncIteration: The epoch is over.
        """
        ready, timeline = reader.ready, self.run.timeline
        while True:
            if timeline is not None:
                timeline.take(ready)
            if ready:
                # No call and no jump, as in `Batches`.
                item = ready[0]
                del ready[0]
                return (item[2],)
            if not self.run.lock.acquire(blocking=False):
                return ()
            try:
                is_stopped = reader.run.state is State.STOPPED
                if reader.work.feed_runs_code and not (is_stopped or reader.knows_next()):
                    return ()
                if not reader.has_item(time.monotonic()):
                    raise StopAsyncIteration
            except DeadlineExpired:
                return ()
            finally:
                self.run.lock.release()
                self.run.deferred.make()

    def wait_for_event_loop(self) -> bool:
        """Wait until there is something to poll for; return False if the run was stopped meanwhile.

        Called by a thread that waits on behalf of event loops. It does not keep the enqueuer
        alive: the end of a forgotten enqueuer wakes it.
        """
        run = self.run
        with run.deferred.locked():
            reader = self.reader
            # Without a reader, this is a start() that failed in another thread.
            if reader is None or reader.knows_next() or run.state is State.STOPPED:
                return True
            try:
                failure = reader.wait_for_event_loop()
            except Closed:
                return run.wait_for_change()
            except DeadlineExpired:
                return True
            if reader.note(failure):
                self.retune()
        return True
