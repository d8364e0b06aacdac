"""GeneratorEnqueuer and prefetch: life cycle and iteration.

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
import copy
import enum
import functools
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.context import BaseContext
from queue import Empty
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar

from enqueuer import arguments, backends
from enqueuer.backends import ESCALATION_S, Backend, BackendName, Job
from enqueuer.errors import Closed, DuplicateDataWarning, InvalidState, WorkerError
from enqueuer.merging import AsTheyCome, Order, RoundRobin
from enqueuer.messages import Failure, Item
from enqueuer.shards import Shard, fresh_seed
from enqueuer.sources import LiveSource, as_source

Batch = TypeVar("Batch")

_STOP_S = 2.0 + ESCALATION_S  # asked -> terminated in 2 s; a generator's `finally` should fit


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


class GeneratorEnqueuer(Generic[Batch]):
    """Keep the batches of a generator ready, made ahead by threads or processes.

    The same generator, `random_seed` and `shards` give the same batches in the same order, bit
    for bit, for any number of workers and any backend. A finite generator ends the iteration;
    iterating again runs it anew (an epoch) on the same workers. After a `break`, iterating
    again goes on with the next batch.

    Args:
        generator: A generator function that takes no argument or one, the `Shard`, and is
            called once a shard and epoch, in the worker; or a live iterator, which one thread
            reads, or of which each forked process goes on with its own copy.
        use_multiprocessing: Keras' name for `backend="process"`.
        wait_time: Accepted for Keras' sake and needless: nothing polls.
        random_seed: A non-negative int, from which every shard's seed derives. None, the
            default, draws one, which the attribute `random_seed` then tells.
        workers: How many threads or processes; 1 by default.
        backend: `"thread"`, the default: cheap, and enough where the work waits (files,
            network) or leaves Python (numpy, PIL); or `"process"`, for work in Python.
        shards: How many logical runs the work is split into. By default as many as workers;
            give it a number of its own, and the batches do not depend on `workers`.
        max_queue_size: The most finished batches that may wait, over all workers; 10 by
            default, as in Keras. Each worker may hold one more in hand.
        max_queue_bytes: The most bytes that may wait, over all workers; None, the default, sets
            no such bound. The bound is dealt out evenly; a batch larger than a worker's share
            stays in its hand until it is wanted.
        ordered: True, the default, takes one batch of each shard in turn; False takes whichever
            is first, which is faster when shards differ in speed, and is not repeatable.
        mp_context: How processes are started: `"fork"`, `"forkserver"`, `"spawn"` or a context
            of `multiprocessing`. By default forkserver for a function (spawn where there is
            none), since it is safe beside threads and CUDA, and fork for a live iterator, which
            nothing else can hand over.
        forward_logs: True, the default: what a worker process logs comes out of this process's
            handlers. False leaves it in the worker. `"multiprocessing-logging"` uses that
            package instead, for forked workers only.

    Raises:
        TypeError: `generator` is none of these, or an argument has the wrong type.
        ValueError: An argument is out of its range.

    Example:
        >>> def squares(shard):
        ...     for number in shard.split(range(5)):
        ...         yield number**2
        >>> with GeneratorEnqueuer(squares, workers=2) as enqueuer:
        ...     list(enqueuer)
        [0, 1, 4, 9, 16]
    """

    def __init__(
        self,
        generator: Callable[[Shard], Iterable[Batch]]
        | Callable[[], Iterable[Batch]]
        | Iterable[Batch],
        use_multiprocessing: bool = False,
        wait_time: float | None = None,
        random_seed: int | None = None,
        *,
        workers: int = 1,
        backend: BackendName | None = None,
        shards: int | None = None,
        max_queue_size: int = 10,
        max_queue_bytes: int | None = None,
        ordered: bool = True,
        mp_context: str | BaseContext | None = None,
        forward_logs: bool | str = True,
    ) -> None:
        self._source = as_source(generator)
        self._backend_name = arguments.backend_name(backend, use_multiprocessing)
        self._workers = arguments.positive("workers", workers)
        self._shards = None if shards is None else arguments.positive("shards", shards)
        self._max_queue_size = arguments.positive("max_queue_size", max_queue_size)
        self._max_queue_bytes = (
            None
            if max_queue_bytes is None
            else arguments.positive("max_queue_bytes", max_queue_bytes)
        )
        self._ordered = bool(ordered)
        self._start_method = arguments.start_method(mp_context, self._source, self._backend_name)
        self._forward_logs = arguments.forward_logs(forward_logs, self._start_method)
        self._random_seed = fresh_seed() if random_seed is None else arguments.seed(random_seed)
        if isinstance(self._source, LiveSource) and self._shards not in (None, 1):
            raise ValueError(
                f"a live iterator cannot be split into {self._shards} shards; "
                "pass the generator function itself"
            )
        self._state = State.NEW
        self._backend: Backend | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._order: Order = RoundRobin(())
        self._epoch = 0
        self._over = False
        self._ready: deque[Item] = deque()  # taken and not given away; new with each epoch
        self._failure: Failure | None = None  # what comes after them
        self._raised: _Raised | None = None
        self._lock = threading.RLock()  # one consumer at a time
        self._state_lock = threading.RLock()  # one start() or stop() at a time
        self.queue: Queue[Batch] = Queue(self)

    # --- life cycle ---

    @property
    def random_seed(self) -> int:
        """The seed, given or drawn, that the seeds of all shards derive from."""
        return self._random_seed

    def start(self, workers: int | None = None, max_queue_size: int | None = None) -> None:
        """Start the workers, which begin at once to make batches of the first epoch.

        Args:
            workers: As for the class, whose value is the default.
            max_queue_size: As for the class, whose value is the default.

        Raises:
            InvalidState: It runs already.
            StartError: The workers could not be started; none is left.
            SourceNotPicklable: The generator cannot be sent to a process that is not forked.
        """
        with self._state_lock:
            if self._state in (State.RUNNING, State.FAILED):
                raise InvalidState(
                    "start() was called, but the enqueuer is running already; call stop() first"
                )
            if workers is not None:
                self._workers = arguments.positive("workers", workers)
            if max_queue_size is not None:
                self._max_queue_size = arguments.positive("max_queue_size", max_queue_size)
            job = self._job()
            backend = backends.load(self._backend_name, job)
            backend.start()
            # A function that does not know the enqueuer, or it could never be collected.
            self._finalizer = weakref.finalize(self, backends.forget, backend, _STOP_S)
            with self._lock:
                self._backend = backend
                self._move(State.RUNNING)
                self._failure = self._raised = None
                self._begin(job.shards, 0)

    def stop(self, timeout: float | None = None) -> None:
        """End the workers: ask them, then terminate, then kill; do nothing if none run.

        May be called from any thread, also inside the loop; a consumer that waits for a batch
        ends. Batches that were made and not taken are lost. Generators are closed, so that
        their `finally` runs. After it `start()` begins anew.

        Args:
            timeout: Seconds after which the last worker is killed; 2.6 by default. A thread
                cannot be killed: one that hangs is left, with a `StopWarning`.
        """
        seconds = arguments.seconds("timeout", _STOP_S if timeout is None else timeout)
        backend = self._backend
        if backend is None:
            return
        backend.close()  # wakes the consumer, which then lets go of its lock
        with self._state_lock:
            if self._state in (State.RUNNING, State.FAILED):
                self._move(State.STOPPED)
            if self._lock.acquire(timeout=max(seconds, 0.1)):
                self._lock.release()
            self._ready.clear()
            backend.stop(seconds)
            if self._finalizer is not None:
                self._finalizer.detach()

    def is_running(self) -> bool:
        """Return whether there is anything to come: a batch, or an error.

        False before `start()`, after `stop()`, once an error was raised, and once a finite
        generator has been read to its end.
        """
        return self._state is State.RUNNING and not self._over

    def __enter__(self) -> GeneratorEnqueuer[Batch]:
        if self._state in (State.NEW, State.STOPPED):
            self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    # --- iteration ---

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the rest of this epoch, or over the next one if this one is over.

        A new enqueuer is started; it stops when it is garbage-collected, if not before.

        Raises:
            InvalidState: It was stopped.
        """
        if self._state is State.NEW:
            self.start()
        with self._lock:
            self._check_started("iterate over it")
            if self._over and self._state is State.RUNNING:
                self._begin(self._job().shards, self._epoch + 1)
            return _Batches(self, self._ready)

    def get(self) -> Iterator[Batch]:
        """Return an iterator over the rest of the running epoch, as Keras does.

        `next(enqueuer.get())`, again and again, gives one batch after the other.

        Raises:
            InvalidState: It was not started, or was stopped.
        """
        with self._lock:
            self._check_started("get() from it")
            return _Batches(self, self._ready)

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
        return f"<GeneratorEnqueuer {self._state.value} {self._workers} worker{plural}{waiting}>"

    def __reduce__(self) -> Any:
        if self._state is not State.NEW:
            raise TypeError(
                f"a {self._state.value.lower()} GeneratorEnqueuer cannot be pickled or copied, "
                "as it owns workers; pickle the generator function, or a new enqueuer"
            )
        source = self._source
        generator = source.iterable if isinstance(source, LiveSource) else source.function
        options: dict[str, Any] = dict(
            workers=self._workers,
            backend=self._backend_name,
            shards=self._shards,
            max_queue_size=self._max_queue_size,
            max_queue_bytes=self._max_queue_bytes,
            ordered=self._ordered,
            mp_context=self._start_method or None,
            forward_logs=self._forward_logs,
        )
        make = functools.partial(GeneratorEnqueuer, **options)
        return make, (generator, False, None, self._random_seed)

    # --- inside ---

    def _move(self, new: State) -> None:
        """Change state; the only method that assigns `_state` after the construction."""
        if new not in _NEXT[self._state]:
            raise InvalidState(f"cannot go from {self._state.value} to {new.value}")
        self._state = new

    def _job(self) -> Job:
        """Return what the backend is to do, as the options now say."""
        shards = self._shards or self._workers
        if isinstance(self._source, LiveSource):
            shards = 1 if self._backend_name == "thread" else self._workers
            if shards > 1:
                _warn_of_duplicates(shards)
        return Job(
            source=self._source,
            shards=shards,
            workers=self._workers,
            random_seed=self._random_seed,
            ordered=self._ordered,
            max_queue_size=self._max_queue_size,
            max_queue_bytes=self._max_queue_bytes,
            start_method=self._start_method,
            forward_logs=self._forward_logs,
        )

    def _begin(self, shards: int, epoch: int) -> None:
        """Have the workers run an epoch. Lock held."""
        assert self._backend is not None
        self._order = (RoundRobin if self._ordered else AsTheyCome)(range(shards))
        self._epoch = epoch
        self._over = False
        self._ready = deque()  # iterators that have another one are over
        self._backend.begin(epoch)

    def _check_started(self, what: str) -> None:
        if self._state is State.NEW:
            raise InvalidState(
                f"cannot {what} before start(); call start(), or use `with` around the loop"
            )
        if self._state is State.STOPPED:
            raise InvalidState(f"cannot {what} after stop(); call start() to begin anew")

    def _next(self, ready: deque[Item]) -> Batch:
        """Return the next batch; raise StopIteration at the end of the iterator's epoch."""
        with self._lock:
            if ready is not self._ready or self._state is State.STOPPED:
                raise StopIteration
            message = self._take(None)
            if message is None:
                raise StopIteration
            return self._open(message)

    def _open(self, message: Item | Failure) -> Batch:
        """Return the batch that was taken, or raise the failure, again and again. Lock held."""
        if isinstance(message, Failure):
            self._raise(message)
        batch: Batch = message.value  # type: ignore[assignment]  # what the generator yielded
        return batch

    def _take(self, deadline: float | None) -> Item | Failure | None:
        """Wait for the next item and take it; a failure stays. Lock held.

        Returns:
            None at the end of the epoch, and if the enqueuer was stopped.

        Raises:
            TimeoutError: Nothing came until `deadline`.
        """
        while self._peek(deadline):
            with contextlib.suppress(IndexError):  # iterators take without the lock
                return self._ready.popleft()
            if self._failure is not None:
                return self._failure
        return None

    def _peek(self, deadline: float | None) -> bool:
        """Wait until an item or the failure is ready; return whether one is. Lock held.

        Raises:
            TimeoutError: Nothing came until `deadline`.
        """
        assert self._backend is not None
        while not self._ready and self._failure is None and not self._order.done:
            self._backend.settle()
            try:
                self._failure = self._backend.wait(self._order, deadline)
            except Closed:
                return False
            if self._failure is None and not self._order.done:
                self._ready.extend(self._backend.take(self._order))
            if len(self._ready) == 1:  # else those behind the first one still wait
                self._backend.settle()
        self._over = not self._ready and self._failure is None
        return not self._over

    def _raise(self, failure: Failure) -> NoReturn:
        """Raise a failure, each time an exception of its own. Lock held."""
        assert self._backend is not None
        self._move(State.FAILED)
        if self._raised is None:
            where = f"in {self._backend.describe(failure.shard)}"
            where += f", shard {failure.shard}, item {failure.number}"
            self._raised = _Raised(_presentable(failure.error, where))
        raise self._raised.once_more()

    def _waiting(self) -> int:
        assert self._backend is not None
        return self._backend.waiting() + len(self._ready)


class Queue(Generic[Batch]):
    """What waits, with the names of `queue.Queue`, for code that asks an enqueuer's `queue`.

    Example:
        >>> enqueuer = GeneratorEnqueuer(iter("ab"))
        >>> enqueuer.start()
        >>> enqueuer.queue.get(), enqueuer.queue.get(timeout=5)
        ('a', 'b')
        >>> enqueuer.stop()
    """

    def __init__(self, enqueuer: GeneratorEnqueuer[Batch]) -> None:
        # weakly, or a circle would keep a forgotten enqueuer until the next collection
        self._reference = weakref.ref(enqueuer)

    def empty(self) -> bool:
        """Return whether `get()` would have to wait; False if an error waits to be raised."""
        enqueuer = self._enqueuer()
        if not enqueuer.is_running() or not enqueuer._lock.acquire(blocking=False):
            return True  # if another consumer waits for the next batch, there is none
        try:
            return not enqueuer._peek(time.monotonic())
        except TimeoutError:
            return True
        finally:
            enqueuer._lock.release()

    def qsize(self) -> int:
        """Return how many finished batches wait."""
        enqueuer = self._enqueuer()
        if not enqueuer.is_running():
            return 0
        with enqueuer._lock:
            return enqueuer._waiting()

    def get(self, block: bool = True, timeout: float | None = None) -> Batch:
        """Take the next batch.

        Args:
            block: Whether to wait for it.
            timeout: Seconds to wait at most; None, the default, waits for ever.

        Raises:
            queue.Empty: There was none in time; nothing is lost.
            Closed: There will be none: the generator has ended, or the enqueuer was stopped.
            InvalidState: It was not started.
        """
        enqueuer = self._enqueuer()
        enqueuer._check_started("get() from its queue")
        limit = None if timeout is None else arguments.seconds("timeout", timeout)
        deadline = None if limit is None else time.monotonic() + limit
        if not block:
            deadline = time.monotonic()
        left = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        if not enqueuer._lock.acquire(timeout=left):
            raise Empty
        try:
            try:
                message = enqueuer._take(deadline)
            except TimeoutError:
                raise Empty from None
            if message is None:
                enqueuer._check_started("get() from its queue")
                raise Closed("the generator has ended; iterate again for the next epoch")
            return enqueuer._open(message)
        finally:
            enqueuer._lock.release()

    def get_nowait(self) -> Batch:
        """Take the next batch, or raise `queue.Empty` at once."""
        return self.get(block=False)

    def _enqueuer(self) -> GeneratorEnqueuer[Batch]:
        enqueuer = self._reference()
        if enqueuer is None:
            raise InvalidState("the enqueuer of this queue is gone")
        return enqueuer


def prefetch(
    generator: Callable[[Shard], Iterable[Batch]] | Callable[[], Iterable[Batch]] | Iterable[Batch],
    max_queue_size: int = 2,
    **options: Any,
) -> Iterator[Batch]:
    """Iterate over one epoch of `generator`, made ahead in the background.

    The workers start with the first `next()` and are gone when the iterator ends, is closed, or
    is dropped after a `break`.

    Args:
        generator: As for `GeneratorEnqueuer`; also any iterable, such as a loader.
        max_queue_size: The most finished batches that may wait; 2 by default, which is enough
            to overlap steady work.
        **options: The other options of `GeneratorEnqueuer`.

    Raises:
        TypeError: An argument has the wrong type (at once, not at the first `next()`).
        ValueError: An argument is out of its range (likewise).

    Example:
        >>> for batch in prefetch(lambda: (n * n for n in range(3))):
        ...     print(batch)
        0
        1
        4
    """
    enqueuer = GeneratorEnqueuer(generator, max_queue_size=max_queue_size, **options)
    return _prefetched(enqueuer)


def _prefetched(enqueuer: GeneratorEnqueuer[Batch]) -> Iterator[Batch]:
    with enqueuer:
        yield from enqueuer


class _Batches(Iterator[Batch]):
    """An iterator over one epoch of an enqueuer, which it keeps alive."""

    def __init__(self, enqueuer: GeneratorEnqueuer[Batch], ready: deque[Item]) -> None:
        self._enqueuer = enqueuer
        self._ready = ready

    def __next__(self) -> Batch:
        # What is ready is taken without the lock: `popleft` is one step. It is asked for first,
        # or an error that `_next` raises would seem to come from the IndexError.
        if self._ready:
            try:
                return self._ready.popleft().value  # type: ignore[return-value]  # as in _open
            except IndexError:  # another thread was faster
                pass
        return self._enqueuer._next(self._ready)


class _Raised:
    """A failure that was raised once and will be again: each time as an exception of its own."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self._traceback = error.__traceback__
        self._used = False

    def once_more(self) -> BaseException:
        """Return the error itself, later a copy with the frames of the worker only."""
        if not self._used:
            self._used = True
            return self._error
        error = self._error
        with contextlib.suppress(Exception):  # not every class can be copied
            twin = copy.copy(error)
            if type(twin) is type(error) and str(twin) == str(error):
                twin.__cause__, twin.__context__ = error.__cause__, error.__context__
                twin.__suppress_context__ = error.__suppress_context__
                error = twin
        return error.with_traceback(self._traceback)


def _presentable(error: BaseException, where: str) -> BaseException:
    """Return what may be raised in the loop for `error`, with a note on where it came from."""
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        shown: BaseException = error
    else:
        # raised as itself it would end the loop, or the program, as if all were well
        shown = WorkerError(f"the generator raised {error!r} {where}")
        shown.__cause__ = error
    notes = [*getattr(shown, "__notes__", ()), where]
    with contextlib.suppress(Exception):  # a class with slots takes none
        shown.__notes__ = notes  # add_note() is of Python 3.11
    return shown


def _warn_of_duplicates(workers: int) -> None:
    warnings.warn(
        f"each of the {workers} processes goes on with its own copy of the same iterator, so "
        f"every batch comes {workers} times; pass the generator function itself "
        "(`def batches(shard): ...`, with shard.split for its share of the work), or workers=1",
        DuplicateDataWarning,
        stacklevel=4,
    )
