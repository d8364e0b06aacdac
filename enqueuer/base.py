"""What every enqueuer does: life cycle, iteration, position.

    NEW --start()--> RUNNING --a failure was raised--> FAILED
                       | ^                               |
                stop() | | start()                       | stop()
                       v |                               v
                     STOPPED <---------------------------+

One consumer at a time reads (`_lock`); any number of threads may ask, and each batch goes to
one of them. The position belongs to the enqueuer and not to an iterator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import logging
import os
import threading
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from multiprocessing.context import BaseContext
from queue import Empty
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar, cast

from enqueuer import arguments, backends, interrupts, state, usage
from enqueuer.backends import ESCALATION_S, Backend, BackendName, Job
from enqueuer.bottleneck import MANY_WORKERS
from enqueuer.duplicates import FirstItems
from enqueuer.errors import Closed, EmptyEpochWarning, InvalidState, StartError
from enqueuer.failures import FailurePolicy
from enqueuer.finalizers import Finalizer
from enqueuer.formats import size
from enqueuer.merging import Order, RoundRobin
from enqueuer.messages import Epoch, Failure, Item, Start
from enqueuer.meters import LoopMeter, clock, top_of
from enqueuer.progress import Progress, Shown, bar_class
from enqueuer.replaying import Origin, origin_of
from enqueuer.shards import fresh_seed
from enqueuer.sources import Source
from enqueuer.stalls import DeadlineExpired, Wait, WaitLimits, level_of_user
from enqueuer.stats import Stats
from enqueuer.stats_callbacks import StatsCallbacks
from enqueuer.tasks import TaskSource
from enqueuer.trace import part_of
from enqueuer.tracing import Trace
from enqueuer.worker import OnError

if TYPE_CHECKING:
    from enqueuer.autoscaler import Autoscaler

_log = logging.getLogger("enqueuer")

Batch = TypeVar("Batch")
Self = TypeVar("Self", bound="BaseEnqueuer[Any]")

STOP_S = 2.0 + ESCALATION_S  # asked -> terminated in 2 s; a generator's `finally` should fit


class State(enum.Enum):
    """Where an enqueuer is in its life."""

    NEW = "NEW"
    RUNNING = "RUNNING"
    FAILED = "FAILED"
    STOPPED = "STOPPED"


_NEXT = {
    State.NEW: {State.RUNNING},
    State.RUNNING: {State.FAILED, State.STOPPED},
    State.FAILED: {State.FAILED, State.STOPPED},
    State.STOPPED: {State.RUNNING},
}


class BaseEnqueuer(ABC, Generic[Batch]):
    """What GeneratorEnqueuer and OrderedEnqueuer have in common; not to be made itself."""

    def __init__(
        self,
        source: Source | TaskSource,
        *,
        use_multiprocessing: bool,
        backend: BackendName | None,
        random_seed: int | None,
        workers: int | Literal["auto"],
        max_workers: int | None,
        max_queue_size: int,
        max_queue_bytes: int | None,
        ordered: bool,
        mp_context: str | BaseContext | None,
        threads_per_worker: int | None,
        forward_logs: bool | str,
        on_error: OnError,
        max_errors: int | None,
        max_restarts: int,
        rank: int,
        world_size: int,
        drop_last: bool,
        progress: Progress,
        stall_timeout: float | None,
        timeout: float | None,
        trace: str | os.PathLike[str] | None,
        address: str | None,
        ray_options: Mapping[str, Any] | None,
        writable: bool,
    ) -> None:
        self._backend_name = arguments.backend_name(backend, use_multiprocessing)
        self._cluster = arguments.cluster(self._backend_name, address, ray_options, writable)
        self._is_auto = workers == "auto"
        self._max_workers = arguments.max_workers(max_workers, self._is_auto)
        self._workers = arguments.workers(workers)
        self._max_queue_size = arguments.positive("max_queue_size", max_queue_size)
        self._max_queue_bytes = (
            None
            if max_queue_bytes is None
            else arguments.positive("max_queue_bytes", max_queue_bytes)
        )
        self._ordered = bool(ordered)
        self._start_method = arguments.start_method(mp_context, source, self._backend_name)
        self._threads = arguments.threads_per_worker(threads_per_worker, self._backend_name)
        self._forward_logs = arguments.forward_logs(forward_logs, self._start_method)
        self._on_error = arguments.on_error(on_error)
        self._max_errors = None if max_errors is None else arguments.count("max_errors", max_errors)
        self._failures = FailurePolicy(self._on_error, self._max_errors)
        self._max_restarts = arguments.count("max_restarts", max_restarts)
        self._rank, self._world_size = arguments.rank(rank, world_size)
        self._drop_last = bool(drop_last)
        self._progress = arguments.progress(progress)
        self._stall_timeout = arguments.wait_limit("stall_timeout", stall_timeout)
        self._timeout = arguments.wait_limit("timeout", timeout)
        self._wait_limits = WaitLimits(self._stall_timeout, self._timeout)
        self._trace_path = arguments.path("trace", trace)
        self._trace: Trace | None = None
        self._record_as(self._rank, self._world_size)
        self._seed_is_given = random_seed is not None
        self._seed_is_shared = self._seed_is_given or self._world_size == 1  # by all ranks
        self._random_seed = fresh_seed() if random_seed is None else arguments.seed(random_seed)
        self._state = State.NEW
        self._backend: Backend | None = None
        self._owner = 0  # process that has the workers
        # backends whose workers have not all ended, the one in use last, and what ends them
        self._owned: list[tuple[Backend, Finalizer]] = []
        self._order: Order = RoundRobin({})
        self._epoch = 0
        self._over = False
        self._is_whole = True  # this epoch began with its first item
        self._is_empty_told = False
        self._ready: deque[Item] = deque()  # taken and not given away; new with each epoch
        self._failure: Failure | None = None  # what comes after them
        self._at_rest = Epoch(0)  # where it stands while it does not run
        self._resumed = False  # whether that was loaded
        self._at_rest_in: dict[str, Any] | None = None  # the identity then; None: as now
        self._restarts = 0  # of backends that are gone
        self._loop_meter = LoopMeter()
        self._taken_before = 0  # this epoch, since the start
        self._final: Stats | None = None  # of a run that was ended
        self._callbacks = StatsCallbacks()
        self._is_news = False  # for some of them
        self._autoscaler: Autoscaler | None = None  # with workers="auto"
        self._epoch_began: Stats | None = None  # likewise
        self._first_items: FirstItems | None = None  # while shards are compared
        self._lock = threading.RLock()  # one consumer at a time
        self._state_lock = threading.RLock()  # one start() or stop() at a time
        # Started workers that are about to take over, and how many they are.
        self._successor: tuple[Backend, int] | None = None
        self._changed = threading.Condition(self._lock)
        self._notifier: Any = None  # of event loops, if there are some
        self.queue: Queue[Batch] = Queue(self)

    # --- life cycle ---

    @property
    def random_seed(self) -> int:
        """The seed, given or drawn, that all other seeds derive from."""
        return self._random_seed

    @property
    def error_count(self) -> int:
        """How many errors were skipped, by `on_error` or by the generator.

        Counted since the start; if a state was loaded, also those until it was saved.
        """
        return self._failures.count

    @property
    def restart_count(self) -> int:
        """How many workers died and were replaced since the start."""
        return self._restarts + (0 if self._backend is None else self._backend.restarts)

    def start(
        self,
        workers: int | Literal["auto"] | None = None,
        max_queue_size: int | None = None,
        wait_time: float | None = None,
        *,
        nb_worker: int | None = None,
        max_q_size: int | None = None,
    ) -> None:
        """Start the workers, which begin at once to make batches of the first epoch.

        If a state was loaded, they go on from there.

        Args:
            workers: As for the class, whose value is the default.
            max_queue_size: As for the class, whose value is the default.
            wait_time: Accepted for Keras' sake and needless: nothing polls.
            nb_worker: Old name of `workers`, in Keras until 2.0.5.
            max_q_size: Old name of `max_queue_size`, likewise.

        Raises:
            InvalidState: It runs already.
            TypeError: An argument was given by its old name and its new one.
            ValueError: There are several ranks, whose data depend on the seed, and it was not
                given; or an argument is out of its range.
            StartError: The workers could not be started, or Ray not be reached; none is left.
            SourceNotPicklable: The generator cannot be sent to a process that is not forked, or
                to a Ray actor.
            FrameworkUnavailable: `backend="ray"`, and Ray is not installed, or too old.
        """
        workers = arguments.either("workers", workers, "nb_worker", nb_worker)
        max_queue_size = arguments.either(
            "max_queue_size", max_queue_size, "max_q_size", max_q_size
        )
        with self._state_lock:
            if self._state in (State.RUNNING, State.FAILED):
                raise InvalidState(
                    "start() was called, but the enqueuer is running already; call stop() first"
                )
            if not self._seed_is_shared and self._needs_common_seed():
                raise ValueError(
                    f"world_size={self._world_size} needs random_seed: each rank would draw "
                    "another one and shuffle differently, so that some data would come twice and "
                    "others never; give all ranks the same"
                )
            if workers is not None:
                self._workers, self._is_auto = arguments.workers(workers), workers == "auto"
            if max_queue_size is not None:
                self._max_queue_size = arguments.positive("max_queue_size", max_queue_size)
            if not self._resumed:
                self._rewind()
            self._end_workers(STOP_S)  # of a stop() that was interrupted
            self._loop_meter = LoopMeter()
            before = self._backend, self._final
            with interrupts.held():
                backend = self._start_backend(self._job())
                try:
                    with interrupts.taken(self._lock):
                        self._final = None
                        self._backend = backend
                        self._failure = None
                        self._failures.begin_run()
                        self._callbacks.begin_run()
                        self._is_news = False
                        self._restarts = 0
                        if not self._resumed:
                            self._failures.count = 0
                        self._autoscaler = self._new_autoscaler() if self._is_auto else None
                        self._begin(self._at_rest if self._resumed else Epoch(0))
                        interrupts.check()
                        self._resumed = False
                        self._move(State.RUNNING)
                except BaseException:
                    self._backend, self._final = before
                    self._end_workers(STOP_S)
                    raise

    def stop(self, timeout: float | None = None) -> None:
        """End the workers: ask them, then terminate, then kill; do nothing if none run.

        May be called from any thread, also inside the loop; a consumer that waits for a batch
        ends. Batches that were made and not taken are lost. Generators are closed, so that
        their `finally` runs. After it `start()` begins anew.

        Args:
            timeout: Seconds after which the last worker is killed; 2.6 by default. A thread
                cannot be killed: one that hangs is left, with a `StopWarning`.

        If an exception of a signal handler (Ctrl-C) ends it, it can be called again.
        """
        seconds = arguments.seconds("timeout", STOP_S if timeout is None else timeout)
        if not self._has_workers():
            return
        final = None
        try:
            final = self._last_stats()  # before the workers exit
        finally:
            self._stop(seconds, final)

    def _last_stats(self) -> Stats | None:
        """Return the statistics of a run that is about to end, and record its bottleneck."""
        try:
            final = self.stats()
        except InvalidState:  # the workers are those of another process
            return None
        if self._trace is not None and not self._is_idle():
            bottleneck = final.bottleneck()
            measured = dict(
                items=final.items,
                waiting_us=int(1e6 * final.waiting_s),
                working_us=int(1e6 * final.working_s),
            )
            told = {"kind": bottleneck.kind, "text": str(bottleneck), **measured}
            self._trace.instant("bottleneck", told)
        return final

    def _stop(self, seconds: float, final: Stats | None) -> None:
        with interrupts.held():
            self._close()  # wakes the consumer, which then lets go of its lock
            with interrupts.taken(self._state_lock):
                self._close()  # another backend, perhaps, if it has just been replaced
                self._successor = None
                if self._lock.acquire(timeout=max(seconds, 0.1)):
                    self._changed.notify_all()
                    self._lock.release()
                try:
                    if not self._is_idle():
                        self._move(State.STOPPED)
                        self._rest(final)
                finally:
                    self._end_workers(seconds)

    def _close(self) -> None:
        if self._backend is not None:
            self._backend.close()

    def _rest(self, final: Stats | None) -> None:
        """Note where it stands after a run. State lock held."""
        self._final = final
        left: deque[Item] = deque()
        with contextlib.suppress(IndexError):  # iterators take without the lock
            while True:
                left.append(self._ready.popleft())
        self._at_rest, self._at_rest_in = self._position(left), self._identity()

    def reconfigure(self, workers: int) -> None:
        """Go on with another number of workers; nothing is lost, repeated or reordered.

        New workers are started, brought to the first batch that was not taken (as those of
        `load_state_dict` are: shards are run again up to there, unless their iterators have a
        state of their own), and take over; then the old ones are stopped. The number of shards
        stays what it is. Called on a running enqueuer, by any thread; on another one it sets
        the number for the next start. It takes the place of `workers="auto"`.

        Args:
            workers: As for the class.

        Raises:
            InvalidState: An error was raised, or the source is a live iterator in processes.
            StartError: The new workers could not be started; the old ones go on.
        """
        workers = arguments.positive("workers", workers)
        with self._state_lock, interrupts.held():
            self._finish_change()
            if self._state is State.FAILED:
                raise InvalidState("cannot reconfigure after an error; call stop() first")
            if self._state is State.RUNNING and workers != self._workers:
                self._replace_workers(workers)
            else:
                self._workers = workers
            self._autoscaler, self._is_auto = None, False
            self._end_workers(STOP_S, but=self._backend)

    def _replace_workers(self, workers: int) -> None:
        """Have others go on where these are. State lock held."""
        job = self._job_with(workers)
        if job is None:
            return
        job = dataclasses.replace(job, restarts=self.restart_count)
        with interrupts.held():
            new, old = self._start_backend(job), self._backend
            assert old is not None
            self._successor = new, workers
            old.close()  # wakes the consumer, which then waits for the change
            self._finish_change()

    def _finish_change(self) -> None:
        """Let new workers take over, if there are some. State lock held.

        The consumer may hold the lock for long: code of the user's, such as an iterable, runs
        under it. The old workers are closed and cannot go on. So if a signal handler ends this
        wait, another thread waits in its place.
        """
        if self._successor is None:
            return
        try:
            with interrupts.taken(self._lock):
                self._take_over()
        except BaseException:
            if self._successor is not None:
                name = "enqueuer-reconfigure"
                threading.Thread(target=self._finish_change_later, name=name, daemon=True).start()
            raise

    def _finish_change_later(self) -> None:
        with contextlib.suppress(Closed), self._lock:  # Closed: it is being stopped
            self._take_over()
        with self._state_lock:
            self._end_workers(STOP_S, but=self._backend)

    def _take_over(self) -> None:
        """Replace the backend by its successor, if that is still to be done. Lock held."""
        old, successor = self._backend, self._successor
        try:
            if old is not None and successor is not None:
                self._backend, self._workers = successor
                self._restarts += old.restarts
                self._loop_meter.by_worker = {}
                self._hand_over(old, self._backend)
                self._tell_of_change()
        finally:
            self._successor = None
            self._changed.notify_all()

    def __repr__(self) -> str:
        size = self._max_queue_size
        waiting = ""
        if self._state is State.RUNNING and self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(InvalidState):  # another process's
                    waiting = f", {self._waiting()}/{size} waiting"
            finally:
                self._lock.release()
        plural = "" if self._workers == 1 else "s"
        name = type(self).__name__
        return f"<{name} {self._state.value} {self._workers} worker{plural}{waiting}>"

    def _tell_of_change(self) -> None:
        if self._trace is not None:
            self._trace.instant("reconfigured", {"workers": self._workers})

    # --- statistics ---

    def stats(self) -> Stats:
        """Return what was measured since the start: how long the loop waited, and for what.

        May be called at any time, by any thread; it waits for nothing, except that Ray actors are
        asked, and have 0.3 s to answer. Measuring cannot be turned off, as it costs next to
        nothing. After `stop()` it is what was measured until then.

        Raises:
            InvalidState: The workers are processes of the one that this one was forked from.

        Example:
            >>> from enqueuer import GeneratorEnqueuer
            >>> with GeneratorEnqueuer(lambda: iter("abc")) as enqueuer:
            ...     _ = list(enqueuer)
            ...     enqueuer.stats().items
            3
        """
        if self._final is not None:
            return self._final
        backend, waits = self._backend, self._loop_meter
        now, first, since, ended = clock(), waits.first, waits.since, waits.ended
        waiting = now - since if since else 0  # just now
        waited = waits.waited + (waiting if first else 0)
        idle = waits.idle + (now - ended if ended else 0)
        return Stats(
            seconds=0.0 if backend is None else (now - waits.began) / 1e9,
            backend=self._backend_name,
            ordered=self._ordered,
            epoch=self._epoch,
            items=waits.taken - len(self._ready),
            first_batch_s=(first - waits.began) / 1e9 if first else None,
            first_wait_s=(waits.first_wait + (0 if first else waiting)) / 1e9,
            waiting_s=waited / 1e9,
            reading_s=waits.reading / 1e9,
            working_s=max(0, now - first - waited - idle) / 1e9 if first else 0.0,
            idle_s=idle / 1e9,
            waits={top_of(bucket) / 1e9: count for bucket, count in list(waits.buckets.items())},
            waited_for={worker: waited / 1e9 for worker, waited in list(waits.by_worker.items())},
            queue_size=0 if backend is None else backend.waiting() + len(self._ready),
            max_queue_size=self._max_queue_size,
            fill=tuple([((at - waits.began) / 1e9, size) for at, size in list(waits.samples)]),
            error_count=self._failures.count,
            restart_count=self.restart_count,
            cpus=self._cpus(),
            loop_cpu_s=0.0 if backend is None else time.process_time() - waits.cpu_s,
            workers=() if backend is None else tuple(backend.measures()),
        )

    def on_stats(
        self, callback: Callable[[Stats], object] | None = None, every: float = 10.0
    ) -> None:
        """Have somebody told, every few seconds, what happened since the last time.

        It is done in the loop's thread, when it takes a batch: a loop that waits tells nothing
        until it goes on. What the callback raises is logged, and it is not called again. It may
        do anything with the enqueuer, also stop it.

        Args:
            callback: Called with the statistics since the last call. None, the default: they are
                logged in a line, by the logger `enqueuer`, with level INFO.
            every: Seconds between two calls; 10 by default.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: `every` is negative.

        Example:
            >>> from enqueuer import GeneratorEnqueuer
            >>> seen = []
            >>> with GeneratorEnqueuer(lambda: iter("abc")) as enqueuer:
            ...     enqueuer.on_stats(seen.append, every=60)
            ...     _ = list(enqueuer)
            >>> seen  # it did not take a minute
            []
        """
        seconds = arguments.seconds("every", every)
        if not (callback is None or callable(callback)):
            raise TypeError(f"on_stats() calls a function with the statistics, got {callback!r}")
        self._callbacks.add(callback, seconds)

    def _make_callbacks(self, may_wait: bool = True) -> None:
        """Call the callbacks of `on_stats` that are due.

        Called before a batch is taken, so that none is lost if that is interrupted; and without
        the lock, since another thread that a callback waits for may want it.
        """
        if not self._lock.acquire(blocking=may_wait):
            return
        try:
            self._is_news = False
            calls = self._callbacks.due(self.stats)
        finally:
            self._lock.release()
        self._callbacks.make(calls)

    # --- workers="auto" ---

    def _new_autoscaler(self) -> Autoscaler:
        """Return what decides on the number of workers."""
        return self._autoscaler_for(self._most_workers(), None)

    def _autoscaler_for(self, most: int, shards: int | None) -> Autoscaler:
        from enqueuer.autoscaler import Autoscaler  # only here: most runs need none

        return Autoscaler(self._workers, most, shards, self._wait_limits.first_s)

    def _most_workers(self) -> int:
        if self._max_workers is not None:
            return self._max_workers
        if self._backend_name == "ray":
            return max(1, int(self._cpus()))  # what actors use of their machines we cannot tell
        return MANY_WORKERS  # how many help is measured: by what they compute, and their memory

    def _cpus(self) -> float:
        return usage.cpus() if self._backend is None else self._backend.cpus()

    def _retune(self, between_epochs: bool = False) -> None:
        """Add or retire workers if that is better, and due. Lock held, by who may wait."""
        autoscaler, waits = self._autoscaler, self._loop_meter
        if autoscaler is None or (
            clock() < waits.began + 1e9 * autoscaler.due_s and not between_epochs
        ):
            return
        # start(), stop() and reconfigure() take this lock before ours, and come before us
        if not self._state_lock.acquire(blocking=False):
            return
        try:
            is_changing = self._successor is not None
            if self._state is not State.RUNNING or is_changing or not self._may_change():
                return
            stats, before = self.stats(), self._workers
            workers = autoscaler.next(stats, None if between_epochs else self._again_s(stats))
            self._tell_of_limit(autoscaler)
            if workers > before:
                workers = self._fitting(workers, before, autoscaler)
            if workers == before:
                return
            waits.pause(None)  # what it takes is a wait
            try:
                self._change_workers(workers)
            except StartError as error:
                autoscaler.refused(before)
                # as text: a record may be kept, and should not keep descriptors
                _log.warning("workers='auto' stays at %d: %s", before, str(error))
            else:
                _log.info("%d -> %d workers: %s", before, self._workers, autoscaler.reason)
            finally:
                waits.resume()
        finally:
            self._state_lock.release()

    def _fitting(self, workers: int, before: int, autoscaler: Autoscaler) -> int:
        """Return for how many of `workers` there is memory; tell `autoscaler` if not for all."""
        assert self._backend is not None
        each, free = self._backend.worker_bytes(), usage.available_bytes()
        if not each or free is None:
            return workers
        most = max(before, self._most_with(usage.room_for(free, each), before))
        if most >= workers:
            return workers
        autoscaler.refused(most)
        _log.warning(
            "workers='auto' stays at %d: a worker takes %s of memory, and %s is available",
            most,
            size(each),
            size(free),
        )
        return most

    def _most_with(self, room: int, before: int) -> int:
        """Return how many workers there can be if so many more find room."""
        return room  # all are started anew, while those from before are still there

    def _may_change(self) -> bool:
        """Return whether the last change is done."""
        return True

    def _change_workers(self, workers: int) -> None:
        """Go on with another number of workers. Both locks held."""
        self._replace_workers(workers)
        self._end_workers(STOP_S, but=self._backend)

    def _again_s(self, stats: Stats) -> float | None:
        """Return how much work a change would do again; None if that is nothing to speak of."""
        return None

    def _tell_of_limit(self, autoscaler: Autoscaler) -> None:
        """Say so if the source does not allow what would help."""

    # --- position ---

    def state_dict(self) -> dict[str, Any]:
        """Return the position: what has been given to the loop, not what was made ahead.

        May be called at any time, by any thread; while another one waits for a batch, it waits,
        too. After `stop()` it tells where that was. It is small and can be written as JSON,
        unless the source's own iterators tell a state: one with `state_dict` and
        `load_state_dict` is asked after each of its items.

        Returns:
            A dict to be given to `load_state_dict` of an enqueuer with the same source.

        Example:
            >>> from enqueuer import GeneratorEnqueuer
            >>> def squares(shard):
            ...     for number in shard.split(range(6)):
            ...         yield number**2
            >>> with GeneratorEnqueuer(squares, shards=2, random_seed=7) as enqueuer:
            ...     [next(enqueuer.get()) for _ in range(3)]
            ...     state = enqueuer.state_dict()
            [0, 1, 4]
            >>> later = GeneratorEnqueuer(squares, workers=2)
            >>> later.load_state_dict(state)
            >>> with later:
            ...     list(later)
            [9, 16, 25]
        """
        with self._lock:
            running = self._state in (State.RUNNING, State.FAILED)
            if running:
                identity, epoch = self._identity(), self._position(self._ready.copy())
            else:
                identity, epoch = self._at_rest_in or self._identity(), self._at_rest
            return state.save(identity, epoch, self._failures.count, _shards_in(identity))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, at the next start.

        The number of workers and the backend may differ. What the data depend on may not; if
        `random_seed` (or `shards`) was not given to this enqueuer, the state's is taken.

        The shards are run again from their seeds, up to the next item, without sending what was
        had; an iterator with `load_state_dict` is resumed by that.

        Args:
            state_dict: What `state_dict()` of an enqueuer with the same source returned.

        Raises:
            InvalidState: The enqueuer runs; call `stop()` first.
            StateMismatch: The state is of another source shape; the message says what differs.
        """
        with self._state_lock:
            if self._state not in (State.NEW, State.STOPPED):
                raise InvalidState(
                    "load_state_dict() was called, but the enqueuer is running; load a state "
                    "before start(), or call stop() first"
                )
            fixed = self._identity()
            for name, is_given in self._given().items():
                if not is_given:
                    del fixed[name]
            epoch, error_count = state.load(state_dict, fixed)
            self._adopt(state_dict, epoch)
            self._at_rest, self._at_rest_in, self._resumed = epoch, None, True
            self._failures.count, self._seed_is_shared = error_count, True

    def replay(self, error: BaseException) -> Any:
        """Run the item that an error came from once more, here: see `enqueuer.replay`.

        Unlike that function it also takes an error that was pickled since, as it has the source.

        Args:
            error: What this enqueuer, or one with the same source, raised.
        """
        origin = origin_of(error)
        return self._again(origin)()

    def is_running(self) -> bool:
        """Return whether there is anything to come: a batch, or an error.

        False before `start()`, after `stop()`, once an error was raised, and once a finite
        generator has been read to its end.
        """
        return self._state is State.RUNNING and not self._over

    def __enter__(self: Self) -> Self:
        if self._is_idle():
            self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    async def __aenter__(self: Self) -> Self:
        """Start it if it does not run, in a thread; the event loop goes on."""
        # asyncio takes long to import, and who has no event loop need not wait for it
        from enqueuer import asynchronous

        await asynchronous.in_thread(self.__enter__)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop it, in a thread; the event loop goes on."""
        from enqueuer import asynchronous

        await asynchronous.in_thread(self.stop)

    # --- iteration ---

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the rest of this epoch, or over the next one if this one is over.

        A new enqueuer is started; it stops when it is garbage-collected, if not before.

        Raises:
            InvalidState: It was stopped.
        """
        batches = _Batches(self, self._join())
        kind = bar_class(self._progress)
        return batches if kind is None else Shown(batches, self, kind, *self._steps())

    def _steps(self) -> tuple[int, int | None]:
        """Return how many batches of the epoch were given away, and how many it has, if known."""
        with self._lock:
            return self._loop_meter.taken - len(self._ready) - self._taken_before, None

    def __aiter__(self) -> AsyncIterator[Batch]:
        """Iterate as `iter()` does, with `async for`, and without blocking the event loop.

        What is ready is given at once; else one thread, however many tasks there are, waits. It
        takes nothing: a task that is cancelled or timed out loses no batch, and whoever iterates
        next goes on with the very next one. Tasks that iterate at once share the batches.

        Raises:
            InvalidState: It was stopped.

        Example:
            >>> import asyncio
            >>> from enqueuer import GeneratorEnqueuer
            >>> async def main():
            ...     async with GeneratorEnqueuer(lambda: iter("abc")) as enqueuer:
            ...         return [batch async for batch in enqueuer]
            >>> asyncio.run(main())
            ['a', 'b', 'c']
        """
        if self._state is State.STOPPED:
            self._check_started("iterate over it")
        from enqueuer import asynchronous  # only here, as in __aenter__

        if self._notifier is None:
            self._notifier = asynchronous.Notifier()
        return asynchronous.Batches(self, self._notifier)

    def get(self) -> Iterator[Batch]:
        """Return an iterator over the rest of the running epoch, as Keras does.

        `next(enqueuer.get())`, again and again, gives one batch after the other.

        Raises:
            InvalidState: It was not started, or was stopped.
        """
        with self._lock:
            self._check_started("get() from it")
            return _Batches(self, self._ready)

    def _is_idle(self) -> bool:
        """Return whether it has no workers: it was not started, or was stopped."""
        return self._state in (State.NEW, State.STOPPED)

    def _move(self, new: State) -> None:
        """Change state; the only method that assigns `_state` after the construction."""
        if new not in _NEXT[self._state]:
            raise InvalidState(f"cannot go from {self._state.value} to {new.value}")
        self._state = new

    @abstractmethod
    def _needs_common_seed(self) -> bool:
        """Return whether what is dealt out to ranks may depend on the seed."""

    @abstractmethod
    def _job(self) -> Job:
        """Return what the backend is to do, as the options now say."""

    @abstractmethod
    def _job_with(self, workers: int) -> Job | None:
        """Return the same for another number of workers and the same data.

        Returns:
            None if they could not help.

        Raises:
            InvalidState: It cannot be done.
        """

    @abstractmethod
    def _hand_over(self, old: Backend, new: Backend) -> None:
        """Have a new backend go on where an old one was. Lock held."""

    @abstractmethod
    def _order_of(self, epoch: Epoch) -> Order:
        """Return the order of an epoch from where it begins."""

    @abstractmethod
    def _origin_of(self, failure: Failure) -> Origin:
        """Return where a failure came from."""

    @abstractmethod
    def _again(self, origin: Origin) -> Callable[[], Any]:
        """Return a function that makes an item again, in the process that calls it."""

    def _deals_out(self, length: int) -> bool:
        """Return whether `_portion` takes a `block`, and an epoch has so many batches."""
        return False

    def _out_of_order(self, parts: int) -> str:
        """Return why so many portions would not keep the order that is promised; "" if they do."""
        return ""

    def _has_kept_order(self) -> bool:
        """Return whether this epoch of a portion has kept the order of the whole."""
        return True

    def _check_repeats(self) -> None:
        """Raise ValueError if several copies would not make the same batches in one order."""
        if not self._ordered:
            raise ValueError("with ordered=False each would make the batches in another order")

    @abstractmethod
    def _portion(
        self: Self, rank: int, world_size: int, part: int = 0, parts: int = 1, block: int = 1
    ) -> Self:
        """Return a new enqueuer for one rank, or for one of `parts` that share its batches.

        Taking `block` batches of each part in turn gives the batches of the rank in their order,
        as far as `_out_of_order` and, afterwards, `_has_kept_order` of the parts say so.

        Raises:
            InvalidState: A position within an epoch was loaded.
            ValueError: There are too few shards, or they cannot be split.
        """

    @abstractmethod
    def _made_of(self: Self) -> tuple[Callable[..., Self], tuple[Any, ...]]:
        """Return what makes another enqueuer like this one, and its arguments."""

    def _handed_on(self: Self, twin: Self, world_size: int) -> Self:
        """Give a new enqueuer for a part of this one's batches what was not given as argument.

        Args:
            twin: The new one.
            world_size: How many ranks there are; workers of a DataLoader are none.
        """
        twin._seed_is_given = self._seed_is_given
        twin._seed_is_shared = self._seed_is_given or world_size == 1
        if self._resumed:
            starts = self._at_rest.starts
            if any(start.number for start in (starts or {}).values()):
                raise InvalidState(
                    f"a position within epoch {self._at_rest.number} was loaded, which cannot be "
                    "dealt out over ranks or over workers of a DataLoader; load it there: into "
                    "what is made of the enqueuer for a rank, and with workers of a DataLoader "
                    "into torchdata's StatefulDataLoader"
                )
            twin._at_rest, twin._resumed = self._at_rest, True
        return twin

    def _begin_at(self, epoch: int) -> None:
        """Have the next start begin with an epoch, as if those before it had been read."""
        self._at_rest, self._at_rest_in, self._resumed = Epoch(epoch), None, True
        self._failures.count = 0

    def _comes_next(self, epoch: int) -> bool:
        """Return whether the next iteration is this epoch, or what is left of it in a state."""
        with self._lock:
            if self._is_idle():
                return self._resumed and self._at_rest.number == epoch
            return self._over and self._epoch + 1 == epoch

    def _record_as(self, number: int, count: int) -> None:
        """Record, if that is wanted, as one of several that share the work, each to its own file.

        They may be in processes, and on machines, that do not know of each other.
        """
        if self._trace_path is not None:
            path = part_of(self._trace_path, number, count) if count > 1 else self._trace_path
            self._trace = Trace(path)

    @abstractmethod
    def _identity(self) -> dict[str, Any]:
        """Return what the data depend on."""

    @abstractmethod
    def _given(self) -> dict[str, bool]:
        """Return of what is in `_identity()` but need not be fixed whether the user fixed it."""

    @abstractmethod
    def _adopt(self, state_dict: Mapping[str, Any], epoch: Epoch) -> None:
        """Take from a state that fits what the user did not fix."""

    def _rewind(self) -> None:
        """Forget how far the source was read, as far as that can be."""

    def _feed(self) -> None:
        """Let the workers have what they need to go on. Lock held, and nothing is ready."""

    def _feeding_waits(self) -> bool:
        """Return whether `_feed` runs code of the user's, which may take its time."""
        return False

    def _following(self, ready: deque[Item]) -> deque[Item] | None:
        """Begin the epoch after the one of `ready`; return what is ready of it, None if stopped."""
        return None

    def _compare(self, first: FirstItems) -> None:
        """Compare the first items of the shards; all that is ready is new. Lock held."""

    def _why_empty(self) -> str | None:
        """Return why an epoch, which is over, had no items; None if that may be meant so."""
        if not self._is_whole or self._failures.has_skipped or not self._order.yielded:
            return None
        return (
            f"all {self._order.yielded} of them were None, which is skipped; "
            "does the generator yield its batches, or map return its result?"
        )

    def _tell_of_empty_epoch(self) -> None:
        why = self._why_empty()
        if why is None or self._is_empty_told:
            return
        self._is_empty_told = True
        warnings.warn(
            f"epoch {self._epoch} had no batches: {why}",
            EmptyEpochWarning,
            stacklevel=level_of_user(),
        )

    def _ended(self) -> None:
        """Do what is to be done between two epochs. Lock held."""

    def _options(self) -> dict[str, Any]:
        """Return what was given, but for the source, the seed and what only one class takes."""
        return dict(
            workers="auto" if self._is_auto else self._workers,
            max_workers=self._max_workers if self._is_auto else None,
            backend=self._backend_name,
            max_queue_size=self._max_queue_size,
            max_queue_bytes=self._max_queue_bytes,
            ordered=self._ordered,
            mp_context=self._start_method if self._backend_name == "process" else None,
            threads_per_worker=self._threads,
            forward_logs=self._forward_logs,
            on_error=self._on_error,
            max_errors=self._max_errors,
            max_restarts=self._max_restarts,
            rank=self._rank,
            world_size=self._world_size,
            drop_last=self._drop_last,
            stall_timeout=self._stall_timeout,
            timeout=self._timeout,
            trace=self._trace_path,
            address=self._cluster.address,
            ray_options=self._cluster.options or None,
            writable=self._cluster.writable,
        )

    def _job_of(self, source: Source | TaskSource, shards: int, own: tuple[int, ...]) -> Job:
        """Return what the backend is to do with a source, by the options."""
        return Job(
            source=source,
            shards=shards,
            own=own,
            workers=self._workers,
            random_seed=self._random_seed,
            ordered=self._ordered,
            max_queue_size=self._max_queue_size,
            max_queue_bytes=self._max_queue_bytes,
            start_method=self._start_method,
            most_workers=self._most_workers() if self._is_auto else 0,
            threads_per_worker=self._threads,
            forward_logs=self._forward_logs,
            on_error=self._on_error,
            max_restarts=self._max_restarts,
            may_grow=self._is_auto,
            longest_wait_s=self._wait_limits.first_s,
            cluster=self._cluster,
        )

    def _start_backend(self, job: Job) -> Backend:
        load = backends.load if self._trace is None else self._trace.load
        backend = load(self._backend_name, job, self._loop_meter)
        # Before it is started: if that is interrupted, and the clean-up as well, stop() ends it.
        self._own(backend)
        try:
            backend.start()
        except BaseException:
            self._end_workers(STOP_S, but=None if self._is_idle() else self._backend)
            raise
        return backend

    def _own(self, backend: Backend) -> None:
        """Have a backend ended with this enqueuer."""
        # A function that does not know the enqueuer, or it could never be collected.
        finalizer = Finalizer(self, backends.forget, backend, STOP_S)
        self._owned.append((backend, finalizer))
        self._owner = os.getpid()
        _started.add(self)

    def _has_workers(self) -> bool:
        """Return whether any are left to be ended; not after the end of the interpreter did it."""
        return any(finalizer.alive for _, finalizer in self._owned)

    def _end_workers(self, seconds: float, but: Backend | None = None) -> None:
        """End the workers of all backends but one; may be called again if that is interrupted."""
        with interrupts.held():
            for one in self._owned.copy():
                backend, finalizer = one
                if backend is not but:
                    backend.stop(seconds)
                    finalizer.detach()
                    self._owned.remove(one)

    def _leave_to_parent(self) -> None:
        """Become an enqueuer without workers, in a child forked from the process that has them.

        What is ready is not given here: the parent gives it, too, so it would come twice.
        """
        if not self._has_workers():
            return  # it was stopped
        self._ready.clear()
        parents, self._owned = self._owned, []
        owner = self._owner
        for backend, finalizer in parents:
            finalizer.detach()
            inherited = cast(Backend, backends.Inherited(owner, backend))
            self._own(inherited)
            if backend is self._backend:
                self._backend = inherited
        # A thread that does not exist here may have held them when the parent forked.
        self._lock, self._state_lock = _usable(self._lock), _usable(self._state_lock)
        self._changed = threading.Condition(self._lock)
        self._successor = None

    def _begin(self, epoch: Epoch, goes_on: bool = False) -> None:
        """Have the workers run an epoch, or the rest of one. Lock held.

        Args:
            epoch: What to run.
            goes_on: Whether the source has just been read up to there, and need load no state.
        """
        assert self._backend is not None
        order = self._order_of(epoch)
        ready = deque[Item]() if self._trace is None else self._trace.ready()
        is_whole = goes_on or epoch.starts is None
        self._loop_meter.go_on()
        taken = self._loop_meter.taken
        if self._autoscaler is not None:
            self._epoch_began = self.stats()
        self._failures.begin_epoch()
        self._backend.begin(Epoch(epoch.number) if goes_on else epoch)
        # Only now, and without a call, so that an exception which strikes before has all of it
        # done again. Workers that were told already know the number of the epoch.
        self._order, self._epoch, self._taken_before = order, epoch.number, taken
        self._ready = ready  # iterators that have another one are over
        self._is_whole = is_whole
        self._over = False

    def _position(self, ready: deque[Item]) -> Epoch:
        """Return what has not been given away: of this epoch, or all of the next one.

        Args:
            ready: What was taken and is still to be given away.
        """
        if self._over:
            return self._next_epoch()
        return Epoch(self._epoch, self._order.rest(ready), self._order.beyond(ready))

    def _next_epoch(self) -> Epoch:
        """Return the epoch after this one, which is over."""
        ends = self._order.ends
        starts = {shard: Start(0, state) for shard, state in ends.items()}
        return Epoch(self._epoch + 1, starts or None)

    def __reduce__(self) -> Any:
        loaded = self._loaded()
        return (*self._made_of(), loaded)

    def _loaded(self) -> dict[str, Any]:
        """Return the attributes that a copy of a new enqueuer has from `load_state_dict`.

        Raises:
            TypeError: It is not new.
        """
        if self._state is not State.NEW:
            raise TypeError(
                f"a {self._state.value.lower()} {type(self).__name__} cannot be pickled or copied, "
                "as it owns workers; pickle what it was made of, or a new enqueuer"
            )
        return {
            "_at_rest": self._at_rest,
            "_resumed": self._resumed,
            "_failures": self._failures.new(),
            "_progress": self._progress,
            "_seed_is_shared": self._seed_is_shared,
        }

    def _check_started(self, what: str) -> None:
        if self._state is State.NEW:
            raise InvalidState(
                f"cannot {what} before start(); call start(), or use `with` around the loop"
            )
        if self._state is State.STOPPED:
            raise InvalidState(f"cannot {what} after stop(); call start() to begin anew")

    def _wait_for(self, ready: deque[Item]) -> None:
        """Wait until something is ready; raise StopIteration at the end of the iterator's epoch.

        Another thread may have taken it when this returns.
        """
        if self._is_news:
            self._make_callbacks()
        with self._lock:
            if ready is not self._ready or self._state is State.STOPPED:
                raise StopIteration
            if not self._has_item(None):
                raise StopIteration

    def _has_begun(self) -> bool:
        return self._state in (State.RUNNING, State.FAILED) and not self._over

    def _join(self, seen: deque[Item] | None = None) -> deque[Item]:
        """Return what is ready of this epoch, or of the next one if this one is over.

        Args:
            seen: Of the epoch that was over, or had not begun; if another one has begun since,
                that is the one. None: as it is now.
        """
        with self._state_lock:
            if self._state is State.NEW:
                self.start()
        with self._lock:
            self._check_started("iterate over it")
            is_next = seen is None or seen is self._ready
            if is_next:
                self._begin_next(retune=True)
            return self._ready

    def _begin_next(self, retune: bool = False) -> None:
        """Begin the next epoch if this one is over, and the enqueuer is not stopped. Lock held."""
        while self._over and self._state is State.RUNNING:
            try:
                self._loop_meter.go_on()
                if retune:
                    self._retune(between_epochs=True)
                self._begin(self._next_epoch(), goes_on=True)
            except Closed:
                if self._successor is None:
                    return
                self._changed.wait_for(lambda: self._successor is None)

    def _poll(self, ready: deque[Item]) -> tuple[Batch, ...]:
        if self._is_news:
            self._make_callbacks(may_wait=False)
        while True:
            if ready:
                item = ready[0]  # as in _Batches
                del ready[0]
                return (item.value,)  # type: ignore[return-value]  # likewise
            if not self._lock.acquire(blocking=False):
                return ()
            try:
                if ready is not self._ready or self._state is State.STOPPED:
                    raise StopAsyncIteration
                if self._feeding_waits() and not self._knows_next():
                    return ()
                if not self._has_item(time.monotonic()):
                    raise StopAsyncIteration
            except DeadlineExpired:
                return ()
            finally:
                self._lock.release()

    def _watcher(self) -> Callable[[], bool]:
        return functools.partial(_watch, weakref.ref(self))

    def _has_item(self, deadline: float | None) -> bool:
        """Wait until an item is ready; return False if there will be none. Lock held.

        That is so at the end of the epoch, and if the enqueuer was stopped.

        Raises:
            DeadlineExpired: Nothing came until `deadline`.
            BatchTimeout: There is none, and nothing came for `timeout` seconds.
            Exception: The failure, if that is next; again and again.
        """
        has_more = self._peek(deadline)
        if has_more and not self._ready and self._failure is not None:
            self._raise(self._failure)
        return has_more

    def _peek(self, deadline: float | None) -> bool:
        """Wait until an item or the failure is ready; return whether one is. Lock held.

        Raises:
            DeadlineExpired: Nothing came until `deadline`.
            BatchTimeout: There is none, and nothing came for `timeout` seconds.
        """
        assert self._backend is not None
        until, long_wait = deadline, None
        while not self._knows_next():
            is_late, backend = False, self._backend
            try:
                backend.acknowledge()
                self._feed()
                failure = backend.wait(self._order, until)
            except Closed:
                # Another one may be there already: a signal handler has called reconfigure().
                if self._successor is None and self._backend is backend:
                    return False
                self._changed.wait_for(lambda: self._successor is None)
                continue
            except DeadlineExpired:
                if deadline is not None:
                    raise
                is_late = True
            finally:
                if self._loop_meter.since:
                    self._loop_meter.resume()
            if is_late:
                # Not in the handler, or BatchTimeout would have `DeadlineExpired` as its context.
                long_wait = long_wait or Wait(self._wait_limits, self._wait_limits.first_s or 0.0)
                long_wait.cut(self._backend, self._order, self._epoch)
                until = long_wait.until
                continue
            if failure is not None and until is None:  # if it is skipped, the wait goes on
                long_wait = Wait(self._wait_limits, 0.0)
                until = long_wait.until
            if self._found(failure) and deadline is None:
                self._retune()
        is_over = not self._ready and self._failure is None
        if is_over and not self._over:
            self._loop_meter.rest()
            self._ended()
            if self._loop_meter.taken == self._taken_before:
                self._tell_of_empty_epoch()
        self._over = is_over  # at last: if an exception strikes before, all of it is done again
        return not is_over

    def _is_other_than_item_next(self) -> bool:
        """Return whether a failure is next; notice the end of the epoch. Takes no item.

        An item that was taken would make room for another one, beyond the bound.
        """
        if not self._lock.acquire(blocking=False):
            return False  # another consumer waits, and will notice
        try:
            assert self._backend is not None
            if self._loop_meter.since:
                return False  # likewise, if this thread does, and a signal handler asks
            while not self._knows_next():
                self._backend.acknowledge()
                self._feed()
                if not self._backend.has_news(self._order):
                    return False
                try:
                    failure = self._backend.wait(self._order, time.monotonic())
                finally:
                    if self._loop_meter.since:
                        self._loop_meter.resume()
                if failure is None and not self._order.done:
                    return True  # an item that has just come
                self._found(failure)
            return self._peek(time.monotonic())
        except (DeadlineExpired, Closed):
            return False
        finally:
            self._lock.release()

    def _knows_next(self) -> bool:
        """Return whether an item, the failure or the end is what comes next. Lock held."""
        return bool(self._ready) or self._failure is not None or self._order.done

    def _found(self, failure: Failure | None) -> bool:
        """Take in what the backend has waited for. Lock held.

        Returns:
            True every few milliseconds, when it is time for what is not done for each batch.
        """
        assert self._backend is not None
        is_time = False
        if failure is not None:
            if not self._failures.skips(failure, self._where):
                self._failure = failure
            self._backend.pass_over()
        elif not self._order.done:
            self._ready.extend(self._backend.take(self._order))
            waits = self._loop_meter
            waits.left -= len(self._ready)
            if waits.left <= 0:  # that is every few milliseconds, or at each batch
                waits.sample(self._waiting() - 1)  # without the one that is about to be given
                is_time = True
                self._is_news = bool(self._callbacks)
            if self._first_items is not None:
                self._compare(self._first_items)
        if len(self._ready) == 1:  # else those behind the first one still wait
            self._backend.acknowledge()
        return is_time

    def _raise(self, failure: Failure) -> NoReturn:
        """Raise a failure, each time an exception of its own. Lock held."""
        assert self._backend is not None
        self._move(State.FAILED)
        self._loop_meter.rest()
        where, origin = self._where(failure), functools.partial(self._replayable, failure)
        error, next_error = self._failures.error_of(failure, where, origin)
        self._failure = dataclasses.replace(failure, error=next_error)
        del failure, next_error, origin
        try:
            raise error
        finally:
            del error  # or it and its traceback would be a circle

    def _replayable(self, failure: Failure) -> Origin:
        """Return where a failure came from, with what makes its item again."""
        origin = self._origin_of(failure)
        origin.again = self._again(origin)
        return origin

    def _where(self, failure: Failure) -> str:
        return f"in {failure.worker}, shard {failure.shard}, item {failure.number}"

    def _waiting(self) -> int:
        assert self._backend is not None
        return self._backend.waiting() + len(self._ready)


class Queue(Generic[Batch]):
    """What waits, with the names of `queue.Queue`, for code that asks an enqueuer's `queue`.

    Example:
        >>> from enqueuer import GeneratorEnqueuer
        >>> enqueuer = GeneratorEnqueuer(iter("ab"))
        >>> enqueuer.start()
        >>> enqueuer.queue.get(), enqueuer.queue.get(timeout=5)
        ('a', 'b')
        >>> enqueuer.stop()
    """

    def __init__(self, enqueuer: BaseEnqueuer[Batch]) -> None:
        # weakly, or a circle would keep a forgotten enqueuer until the next collection
        self._reference = weakref.ref(enqueuer)

    @property
    def maxsize(self) -> int:
        """The most finished batches that may wait."""
        return self._enqueuer()._max_queue_size

    def full(self) -> bool:
        """Return whether as many batches wait as may."""
        return self.qsize() >= self.maxsize

    def empty(self) -> bool:
        """Return whether `get()` would have to wait; False if an error waits to be raised."""
        enqueuer = self._enqueuer()
        if not enqueuer.is_running() or not enqueuer._lock.acquire(blocking=False):
            return True  # if another consumer waits for the next batch, there is none
        try:
            if enqueuer._loop_meter.since:
                return True  # likewise, if this thread does, and a signal handler asks
            return not enqueuer._peek(time.monotonic())
        except DeadlineExpired:
            return True
        finally:
            enqueuer._lock.release()

    def qsize(self) -> int:
        """Return how many finished batches wait; at least 1 if `get()` would not have to wait.

        So an error that waits to be raised counts, too, and loops that ask for nothing else see it.
        """
        enqueuer = self._enqueuer()
        if not enqueuer.is_running():
            return 0
        return enqueuer._waiting() or int(enqueuer._is_other_than_item_next())

    def get(self, block: bool = True, timeout: float | None = None) -> Batch:
        """Take the next batch.

        Args:
            block: Whether to wait for it.
            timeout: Seconds to wait at most; None, the default, waits as the loop does.

        Raises:
            queue.Empty: There was none in time; nothing is lost.
            BatchTimeout: The same, by the enqueuer's `timeout`.
            Closed: There will be none: the generator has ended, or the enqueuer was stopped.
            InvalidState: It was not started.
        """
        enqueuer = self._enqueuer()
        enqueuer._check_started("get() from its queue")
        if enqueuer._is_news:
            enqueuer._make_callbacks(may_wait=False)
        limit = None if timeout is None else arguments.seconds("timeout", timeout)
        deadline = None if limit is None else time.monotonic() + limit
        if not block:
            deadline = time.monotonic()
        while True:
            ready = enqueuer._ready
            if ready:
                item = ready[0]  # as in _Batches
                del ready[0]
                return item.value  # type: ignore[return-value]  # likewise
            left = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
            if not enqueuer._lock.acquire(timeout=left):
                raise Empty
            try:
                has_item = enqueuer._has_item(deadline)
            except DeadlineExpired:
                raise Empty from None
            finally:
                enqueuer._lock.release()
            if not has_item:
                enqueuer._check_started("get() from its queue")
                raise Closed("the generator has ended; iterate again for the next epoch")

    def get_nowait(self) -> Batch:
        """Take the next batch, or raise `queue.Empty` at once."""
        return self.get(block=False)

    def _enqueuer(self) -> BaseEnqueuer[Batch]:
        enqueuer = self._reference()
        if enqueuer is None:
            raise InvalidState("the enqueuer of this queue is gone")
        return enqueuer


class _Batches(Iterator[Batch]):
    """An iterator over one epoch of an enqueuer, which it keeps alive."""

    def __init__(self, enqueuer: BaseEnqueuer[Batch], ready: deque[Item]) -> None:
        self._enqueuer = enqueuer
        self._ready = ready

    def __next__(self) -> Batch:
        while True:
            ready = self._ready
            if ready:
                # What is ready is taken without the lock. CPython runs signal handlers, and lets
                # other threads run, on entry to a function, after a call and after a jump, and
                # here is none of these: `popleft` would be one, and the batch lost.
                item = ready[0]
                del ready[0]
                return item.value  # type: ignore[return-value]  # what the generator yielded
            self._wait()

    def _wait(self) -> None:
        self._enqueuer._wait_for(self._ready)


class Endless(_Batches[Batch]):
    """An iterator over this epoch and the following ones of an enqueuer that begins them."""

    def _wait(self) -> None:
        try:
            super()._wait()
        except StopIteration:
            ready = self._enqueuer._following(self._ready)
            if ready is None:
                raise
            self._ready = ready


_started: weakref.WeakSet[BaseEnqueuer[Any]] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for enqueuer in list(_started):
        enqueuer._leave_to_parent()
    _started.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)


def _usable(lock: threading.RLock) -> threading.RLock:
    """Return a lock if this thread can have it, else a new one."""
    if not lock.acquire(blocking=False):
        return threading.RLock()
    lock.release()
    return lock


def _shards_in(identity: Mapping[str, Any]) -> range | None:
    """Return the shards of a rank, by what its data depend on; None for tasks."""
    if "shards" not in identity:
        return None
    return range(identity["rank"], identity["shards"], identity["world_size"])


def _watch(reference: weakref.ref[BaseEnqueuer[Any]]) -> bool:
    """Wait, in a thread for event loops, until an enqueuer has something that can be polled for.

    The enqueuer may be forgotten meanwhile; its end then wakes this.

    Returns:
        False if it was stopped.
    """
    enqueuer = reference()
    if enqueuer is None:
        return False
    with enqueuer._lock:
        backend, order, waits = enqueuer._backend, enqueuer._order, enqueuer._loop_meter
        if enqueuer._knows_next() or enqueuer._is_idle() or backend is None:
            return True
        limits, epoch = enqueuer._wait_limits, enqueuer._epoch
        try:
            backend.acknowledge()
            enqueuer._feed()
            del enqueuer
            failure = _wait_within(backend, order, limits, epoch)
        except Closed:
            enqueuer = reference()
            if enqueuer is None or enqueuer._successor is None:
                return False
            enqueuer._changed.wait_for(lambda: enqueuer is None or enqueuer._successor is None)
            return True
        finally:
            if waits.since:
                waits.resume()
        enqueuer = reference()
        if enqueuer is not None and enqueuer._found(failure):
            enqueuer._retune()
    return True


def _wait_within(backend: Backend, order: Order, limits: WaitLimits, epoch: int) -> Failure | None:
    """Wait as `_peek` does for whoever has no deadline."""
    try:
        return backend.wait(order, None)
    except DeadlineExpired:
        wait = Wait(limits, limits.first_s or 0.0)
    while True:
        wait.cut(backend, order, epoch)
        with contextlib.suppress(DeadlineExpired):
            return backend.wait(order, wait.until)
