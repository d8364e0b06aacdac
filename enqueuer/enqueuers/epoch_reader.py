r"""One epoch as the loop reads it: wait for the workers, take what is ready, raise a failure.

    backend.wait() --> schedule.take() --> ready --> take(), by any thread
           \-> a failure: skipped and counted, or kept to be raised when `ready` is empty

The epoch after it may begin early, so that no worker is idle in between:

    the last task of this epoch is submitted, and there is room --feed()--> tasks of the next one
    each worker was told its shards of this epoch ---------------feed()--> those of the next one
    the loop has read this epoch to its end ------------------------------> `following` takes it

No reader knows the enqueuer, so an enqueuer that is forgotten while a thread waits is collected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from enqueuer.backends.engine import Backend
from enqueuer.backends.stall import DeadlineExpired, Wait
from enqueuer.common.text import warn
from enqueuer.enqueuers.run import Run, State
from enqueuer.enqueuers.scaling import Scaling
from enqueuer.enqueuers.workload import EpochWork, Workload
from enqueuer.errors import Closed, DuplicateDataWarning, EmptyEpochWarning, InvalidState
from enqueuer.monitoring.stats import Stats
from enqueuer.monitoring.trace import text_of
from enqueuer.order.messages import Epoch, Failure, ItemTuple
from enqueuer.order.position import SavedPosition


def _warn_of_twins(shard: int, other: int, takes_shard: bool) -> None:
    if takes_shard:
        cause = (
            "Are random numbers drawn from a generator that was made outside (a captured "
            "numpy.random.default_rng, say)? Draw them from shard.rng. Does each shard read the "
            "same, or a copy of a file that was opened outside? Use shard.split for its share"
        )
    else:
        cause = (
            "The generator function takes no shard, so that each shard runs all of it: let it "
            "take the shard (`def batches(shard): ...`), use shard.split for its share of the "
            "work, and draw random numbers from shard.rng"
        )
    warn(
        f"shards {shard} and {other} began with the same batches, so the data seem to come "
        f"several times. {cause}",
        DuplicateDataWarning,
    )


class Outcome(enum.Enum):
    """How a wait has ended."""

    ITEM = "an item is ready, unless another thread has taken it meanwhile"
    FAILURE = "the failure is next"
    END = "the epoch gives nothing more"
    STOPPED = "the enqueuer was stopped"


class EpochReader:
    """An epoch, or the rest of one, that the workers make and the loop reads.

    With the object, the epoch begins; `feed` lets the workers begin it. All methods need the lock
    of the run, unless they say otherwise.

    Args:
        run: The run that the epoch belongs to.
        workload: What is run.
        epoch: The epoch, or its rest.
        scaling: Object that changes the number of workers; None if that is fixed.
        before: The epoch before, of the same run, which is over; None for the first one.

    Attributes:
        ready: Items that were taken from the workers and not given to the loop. Any thread may
            take from it; only the thread that has the lock of the run adds to it.
        failure: The failure that comes after these items; None if none does.
        is_over: Whether the loop has seen the end of the epoch.
        is_followed: Whether the option `epochs` says that another epoch is read.
        is_next_wanted: Whether the next epoch may begin early, as it will be read: by the loop that
            waits, or waited last, and reads all epochs; or by the option `epochs`.
        next_work: The next epoch of the workload; None if it has not begun. All that the loop can
            see, such as the position, knows nothing of it.
    """

    def __init__(
        self,
        run: Run,
        workload: Workload,
        epoch: Epoch,
        scaling: Scaling | None,
        before: EpochReader | None = None,
    ) -> None:
        number = epoch.number
        self._scaling, self._began = scaling, None if scaling is None else run.stats(number, 0)
        work: EpochWork | None = None if before is None else before.next_work
        if work is None:
            work = workload.begin(run, epoch, None if before is None else before.work)
        self.run = run
        self.work: EpochWork = work
        self.next_work: EpochWork | None = None
        self.number = number
        self.ready: deque[ItemTuple] = deque()
        # Held by a thread that takes an item; reentrant, as a signal handler may take one, too.
        self._ready_lock = threading.RLock()
        # Where the run was ended; None before that.
        self._end: Epoch | None = None
        self.failure: Failure | None = None
        # Whether the epoch has ended, and whether the loop that waited last reads all epochs.
        self.is_over = self._goes_on = False
        epochs = run.options.epochs
        self.is_followed = self.is_next_wanted = epochs is not None and number + 1 < epochs
        # Number and thread of the iterator that waited for a batch last.
        self.last_turn = -1, 0
        self._workload = workload
        # Whether the epoch begins with its first item.
        self._is_whole = before is not None or epoch.starts is None
        self._taken_before = run.meter.taken
        self._order = work.order
        # Whether the thread that holds the lock of the run waits or takes items.
        self._is_entered = False
        run.failures.begin_epoch()
        if run.meter.trace is not None:
            run.meter.trace.instant("epoch", {"epoch": number})
        run.backend.schedule.begin(epoch if before is None else Epoch(number, work.starts))

    def following(self) -> EpochReader:
        """Begin the epoch after this one, which is over."""
        if self.run.copies is not None:
            self.run.copies.warn_of_changes()
        return EpochReader(self.run, self._workload, self._order.next_epoch(), self._scaling, self)

    def pass_work(self, old: Backend, new: Backend) -> None:
        """Let a new backend go on where an old one was."""
        self.work.pass_work(old, new)
        if self.next_work is not None:
            self.next_work.pass_work(old, new)

    def retune(self, is_over: bool = False) -> None:
        """Change the number of workers if that is due; may wait.

        Args:
            is_over: Whether the epoch is over, so that a change repeats nothing.
        """
        if self._scaling is not None:
            rerun_s = None if is_over else self._rerun_s
            self._scaling.step(self.stats, rerun_s, self.pass_work)

    def _rerun_s(self, stats: Stats) -> float | None:
        assert self._began is not None, "it is asked for `Scaling`"
        return self.work.rerun_s(stats.since(self._began))

    # --- waiting ---

    def wait(self, goes_on: bool) -> None:
        """Wait until something is ready; another thread may have taken it on return. No lock.

        Args:
            goes_on: Whether the next epoch will be read as well, and so may begin early; it may
                also by the option `epochs`.

        Raises:
            StopIteration: The epoch is over, or the enqueuer was stopped.
        """
        run = self.run
        with run.locks.reading():
            self._goes_on = goes_on
            self.is_next_wanted = goes_on or self.is_followed
            outcome = self.outcome(None)
            if outcome is Outcome.FAILURE:
                self._raise()
            if outcome is not Outcome.ITEM:
                raise StopIteration

    def wait_for_event_loop(self) -> None:
        """Wait until there is something to poll for; take nothing from `ready`. No lock.

        Called by a thread that waits on behalf of event loops. It does not keep the enqueuer
        alive: the end of a forgotten enqueuer wakes it.
        """
        with self.run.locks.reading():
            self._enter(None)
            try:
                # The end is for the event loop's thread: the source may see it.
                self._wait_for_outcome(None)
            finally:
                self._is_entered = False

    def poll(self) -> tuple[Any, ...]:
        """Take the next batch, if there is one; waits for nothing. For event loops. No lock.

        Raises:
            StopAsyncIteration: The epoch is over.
        """
        run = self.run
        while True:
            if (item := self.take()) is not None:
                return (item[2],)
            try:
                with run.locks.reading(timeout=0):
                    is_stopped = run.state is State.STOPPED
                    if self.work.feed_runs_code and not (is_stopped or self.known_outcome()):
                        return ()
                    if not self.has_item(time.monotonic()):
                        raise StopAsyncIteration
            except DeadlineExpired:
                return ()

    def take(self) -> ItemTuple | None:
        """Take the next item, if one is ready. No lock needed."""
        with self._ready_lock:
            return self.ready.popleft() if self.ready else None

    def end(self, position: Callable[[deque[ItemTuple]], SavedPosition]) -> SavedPosition:
        """Return the position of the end of the run, and give nothing behind it. No lock needed.

        Args:
            position: Function that returns the position before some items that are ready.
        """
        with self._ready_lock:
            saved = position(self.ready.copy())
            self.ready.clear()
            self._end = saved.epoch
        return saved

    def has_item(self, deadline: float | None) -> bool:
        """Wait until an item is ready; return False if there will be none.

        See `outcome`.

        Raises:
            Exception: The failure, if that is next; again and again.
        """
        outcome = self.outcome(deadline)
        if outcome is Outcome.FAILURE:
            self._raise()
        return outcome is Outcome.ITEM

    def outcome(self, deadline: float | None) -> Outcome:
        """Wait until it is known what is next; at the end of the epoch, do what is due then.

        Args:
            deadline: When to give up, by `time.monotonic()`; None: never, and the number of workers
                may be changed.

        Raises:
            DeadlineExpired: Nothing came until `deadline`.
            BatchTimeout: There is none, and nothing came for `timeout` seconds.
            InvalidState: The same thread waits already.
        """
        self._enter(deadline)
        try:
            outcome = self._wait_for_outcome(deadline)
            if outcome is Outcome.END and not self.is_over:
                self._notice_end()
        finally:
            self._is_entered = False
        return outcome

    def _enter(self, deadline: float | None) -> None:
        if self._is_entered:
            if deadline is None:
                raise InvalidState(
                    "a batch was asked for by code that runs while the same thread waits for one, "
                    "such as a signal handler; use queue.get_nowait() there"
                )
            raise DeadlineExpired("the thread waits for this batch itself")
        self._is_entered = True

    def _wait_for_outcome(self, deadline: float | None) -> Outcome:
        run, until = self.run, deadline
        # What was ready at the end of the run is in the saved position.
        if run.state is State.STOPPED:
            return Outcome.STOPPED
        long_wait: Wait | None = None
        while (outcome := self.known_outcome()) is None:
            is_late, backend = False, run.backend
            try:
                failure = self._wait(backend, until)
            except Closed:
                if not self._has_changed(backend):
                    return Outcome.STOPPED
                continue
            except DeadlineExpired:
                if deadline is not None:
                    raise
                is_late = True
            if is_late:
                # Not in the handler, or BatchTimeout would have `DeadlineExpired` as its context.
                long_wait = long_wait or Wait(run.limits, run.limits.first_s or 0.0)
                long_wait.cut(run.backend.inspect, self._order, self.number)
                until = long_wait.until
                continue
            # If the failure is skipped, the wait goes on.
            if failure is not None and until is None:
                long_wait = Wait(run.limits, 0.0)
                until = long_wait.until
            if self._note(failure) and deadline is None:
                self.retune()
        return outcome

    def _has_changed(self, backend: Backend) -> bool:
        """Wait until other workers have taken over; return False if none do, as at the end."""
        # This releases the lock, so that another consumer may enter.
        self._is_entered = False
        has_changed = self.run.wait_for_change()
        self._is_entered = True
        return has_changed or self.run.backend is not backend

    def _notice_end(self) -> None:
        self.run.meter.epoch_ended()
        self.work.end()
        if not self.taken:
            self._warn_of_nothing()
        first_items = self.work.first_items
        if first_items is not None and (twins := first_items.ended()):
            _warn_of_twins(*twins, first_items.takes_shard)
        self.is_over = True

    def _wait(self, backend: Backend, until: float | None) -> Failure | None:
        """Make room for as many items as were taken, feed the workers, and wait for them.

        Returns:
            The failure, if that is next; see `Engine.wait`, also for the errors.
        """
        try:
            backend.acknowledge()
            self.work.feed()
            if self.is_next_wanted:
                self._feed_next()
            return backend.wait(self._order, until)
        finally:
            meter = self.run.meter
            if meter.since:
                meter.resume()

    def feed(self) -> None:
        """Give the workers what they need to begin."""
        self._is_entered = True
        try:
            self.work.feed()
            if self.is_next_wanted:
                self._feed_next()
        finally:
            self._is_entered = False

    def _feed_next(self) -> None:
        """Give the workers what they need of the next epoch, if it may begin."""
        work = self.work
        if self.next_work is None and work.may_be_followed:
            self.next_work = self._workload.begin(self.run, work.order.next_epoch(), work)
        if self.next_work is not None:
            self.next_work.feed()

    def known_outcome(self) -> Outcome | None:
        """Return what comes next; None if that is not known yet."""
        if self.ready:
            return Outcome.ITEM
        if self.failure is not None:
            return Outcome.FAILURE
        return Outcome.END if self._order.is_over else None

    def _note(self, failure: Failure | None) -> bool:
        """Note what the backend has waited for: a failure, or items, which are taken.

        Returns:
            True every few milliseconds, when it is time for what is not done for each batch.
        """
        run = self.run
        backend = run.backend
        if failure is None:
            order: Any = self._order
            return not order.is_over and self._keep(backend, backend.schedule.take(order))
        if (trace := run.meter.trace) is not None:
            about = {"worker": failure.worker, "shard": failure.shard, "item": failure.number}
            about["error"] = text_of(failure.error)
            trace.instant("skipped" if failure.skipped else "error", about)
        if not run.failures.skips(failure, self.work.where, self.work.origin_of):
            self.failure = self.work.with_error(failure)
        backend.schedule.pass_over(failure)
        return False

    def _keep(self, backend: Backend, items: Sequence[ItemTuple]) -> bool:
        """Keep items of the backend; return whether it is time for what `_note` says."""
        # Another thread may take some as soon as they are ready.
        run, count, order = self.run, len(items), self._order
        if run.meter.trace is not None:
            # One at a time.
            for shard, number, *_ in items:
                run.meter.trace.take(shard, number, self.number, self.waiting())
        with self._ready_lock:
            # If stop() did not wait for this thread, most of them come again after its position.
            if (end := self._end) is not None:
                items = [item for item in items if order.is_before(item[0], item[1], end)]
            self.ready.extend(items)
        # Of several items, those behind the first one still wait.
        if count == 1:
            backend.acknowledge()
        # Every few milliseconds, or at each batch if these take longer.
        is_time = run.meter.count(count)
        if is_time:
            run.meter.look()
            run.is_news = True
        first_items = self.work.first_items
        if first_items is not None:
            for shard, _, value, _ in items:
                if twins := first_items.saw(shard, value):
                    _warn_of_twins(*twins, first_items.takes_shard)
            if first_items.done:
                self.work.first_items = None
        return is_time

    # --- what is next ---

    def _raise(self) -> NoReturn:
        """Raise the failure, each time an exception of its own."""
        run, failure = self.run, self.failure
        assert failure is not None, "it is the outcome"
        run.move(State.FAILED)
        run.meter.epoch_ended()
        origin = functools.partial(self.work.origin_of, failure)
        error, next_error = run.failures.error_of(failure, self.work.where(failure), origin)
        stored = self.failure = dataclasses.replace(failure, error=next_error)
        del failure, next_error, origin
        try:
            raise error
        finally:
            self.work.keep(stored)
            # Without this, the error and its traceback would refer to each other.
            del error

    def _warn_of_nothing(self) -> None:
        run, workload, yielded = self.run, self._workload, self._order.yielded
        is_known = run.has_warned_of_nothing or workload.may_be_empty or run.failures.has_skipped
        # By an empty epoch, `get()` sees that an iterable is over.
        if is_known or not self._is_whole or (self._goes_on and self._taken_before):
            return
        why = workload.why_empty(self._taken_before)
        if yielded:
            why = (
                f"all {yielded} of them were None, which is skipped; "
                "does the generator yield its batches, or map return its result?"
            )
        run.has_warned_of_nothing = True
        warn(f"epoch {self.number} had no batches: {why}", EmptyEpochWarning)

    @property
    def is_empty(self) -> bool:
        """Whether the epoch, which is over, had no items from its beginning to its end."""
        return self._is_whole and not self.taken

    @property
    def taken(self) -> int:
        """Number of items of this epoch that were taken from the workers. No lock needed."""
        return self.run.meter.taken - self._taken_before

    def waiting(self) -> int:
        """Return how many finished items of this epoch wait. No lock needed."""
        self._sort()
        count = self.run.backend.schedule.waiting() + len(self.ready)
        # The others count as held by the workers.
        return min(count, self.run.options.max_queue_size)

    def stats(self) -> Stats:
        """Return the statistics of the run so far. No lock needed."""
        self._sort()
        return self.run.stats(self.number, len(self.ready))

    def _sort(self) -> None:
        """Tell what has come of this epoch from what is of the next one, unless a thread waits."""
        run, order = self.run, self._order
        if self._is_entered or (tasks := run.backend.tasks) is None or not tasks.has_next_of(order):
            return
        with contextlib.suppress(DeadlineExpired), run.locks.reading(timeout=0):
            # Another thread may have replaced the backend.
            tasks = run.backend.tasks
            if tasks is not None and run.state is State.RUNNING:
                tasks.poll(order)

    # --- position ---

    def position(self, ready: deque[ItemTuple]) -> Epoch:
        """Return what has not been given to the loop: of this epoch, or all of the next one.

        Args:
            ready: Items that were taken and are still to be given.
        """
        if self.is_over:
            return self._order.next_epoch()
        return self._order.position(ready)

    def error_count_at(self, position: Epoch) -> int:
        """Return the number of errors that were skipped before a position.

        Those behind it, which the loop met while it waited, come again when a run goes on there.
        """
        failures = self.run.failures
        if position.number != self.number:
            return failures.count
        return failures.count_at(functools.partial(self._order.is_before, position=position))

    def leave_to_parent(self) -> None:
        """Give nothing in a forked child: the parent gives what is ready, so it would come twice.

        The thread that waited does not exist here.
        """
        self.ready.clear()
        self._is_entered = False
