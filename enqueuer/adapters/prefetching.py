"""Loaders that work ahead of the loop.

loader -> [a thread: change, up to queue_size batches] -> receive -> the training loop

With `workers=0` of the enqueuer, the thread of the loop changes a batch when the loop asks for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from enqueuer.adapters.loading import Loader, LoaderEpochs, Ownership, is_inline
from enqueuer.common import checks
from enqueuer.enqueuers.enqueuer import core_of
from enqueuer.enqueuers.generator import GeneratorEnqueuer
from enqueuer.errors import InvalidState

Batch = TypeVar("Batch")


class PrefetchLoader(Loader[Batch]):
    """A loader that keeps changed batches ready, made by a thread of its own.

    After a `break`, an enqueuer continues with the next batch. So does this loader, which keeps
    the batches that were ready. Any other `loader` begins a new epoch, and batches of the old one
    are dropped.

    Args:
        loader: As for `Loader`.
        change: Function that the thread calls with each batch.
        queue_size: Number of batches that are kept ready; the thread holds one more.
        steps_per_epoch: As for `Loader`.
        running: Makes the context in which the thread reads an epoch.
        receive: Function that the loop's thread calls with each changed batch; the loop gets its
            result. None, the default: the loop gets the changed batch.
        check: As for `Loader`.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        change: Callable[[Any], Any],
        queue_size: int,
        steps_per_epoch: int | None = None,
        running: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        *,
        receive: Callable[[Any], Batch] | None = None,
        check: Callable[[], object] | None = None,
    ) -> None:
        queue_size = checks.positive("queue_size", queue_size)

        def reader(epochs: LoaderEpochs, ownership: Ownership) -> _PrefetchReader[Batch]:
            how = (change, running)
            if is_inline(epochs.loader):
                # The state of the loop's thread must not change between batches.
                how = functools.partial(_within, running, change), contextlib.nullcontext
            run = functools.partial(_changed, epochs, *how)
            return _PrefetchReader(epochs, ownership, run, queue_size, receive)

        super().__init__(loader, steps_per_epoch, check=check, reader=reader)


@dataclasses.dataclass(eq=False)
class _EpochAhead:
    """One epoch that a thread reads ahead.

    Attributes:
        enqueuer: Enqueuer that runs the thread.
        is_replaced: Whether another iteration has ended this one.
        is_started: Whether the thread was started.
    """

    enqueuer: GeneratorEnqueuer[Any]
    is_replaced: bool = False
    is_started: bool = False

    def close(self) -> None:
        """Drop the ready batches, and let the thread end after its batch, without waiting."""
        run = core_of(self.enqueuer).run
        if run is not None:
            run.close()


class _PrefetchReader(Generic[Batch]):
    """Read in a thread, ahead of the loop.

    Args:
        epochs: Epochs of the loader.
        ownership: Ownership of the loader, which readers keep alive.
        run: Generator function of one epoch, for the thread.
        queue_size: Number of batches that are kept ready.
        receive: As for `PrefetchLoader`.
    """

    def __init__(
        self,
        epochs: LoaderEpochs,
        ownership: Ownership,
        run: Callable[[], Iterator[Any]],
        queue_size: int,
        receive: Callable[[Any], Batch] | None,
    ) -> None:
        self._epochs = epochs
        self._ownership = ownership
        self._run = run
        self._queue_size = queue_size
        self._receive = receive
        # The current epoch, and the number of its batches that the loop was given.
        self._current: _EpochAhead | None = None
        self._given = 0
        # The run that was stopped last, for as long as it has an iterator.
        self._stopped: weakref.ref[_EpochAhead] | None = None

    def read(self) -> Iterator[Batch]:
        """See `BatchReader`."""
        epochs = self._epochs
        if not epochs.keeps_position or self._given == epochs.steps:
            if self._current is not None:
                self._current.is_replaced = not epochs.keeps_position
            # The loader cannot be iterated before the thread has ended.
            self.stop(threading.TIMEOUT_MAX)
        if self._current is None:
            self._begin(_EpochAhead(self._new_enqueuer()))
        assert self._current is not None
        return self._batches(self._current)

    def stop(self, timeout: float | None = None) -> None:
        """See `BatchReader`."""
        self._stopped = None
        if self._current is not None:
            run, self._current = self._current, None
            run.enqueuer.stop(timeout)
            self._stopped = weakref.ref(run)

    def restart(self) -> None:
        """See `BatchReader`."""
        run = None if self._stopped is None else self._stopped()
        # Otherwise no iterator is left.
        if run is not None:
            run.enqueuer, run.is_started = self._new_enqueuer(), False
            self._begin(run)

    def _new_enqueuer(self) -> GeneratorEnqueuer[Any]:
        """Return an enqueuer that runs the thread of an epoch."""
        # An enqueuer that is the loader gives its own warning of a stall, and knows its cause.
        is_here = is_inline(self._epochs.loader)
        # After an interrupt, the generator function would not repeat the same batches.
        source: Any = self._run() if is_here else self._run
        return GeneratorEnqueuer[Any](
            source,
            workers=0 if is_here else 1,
            max_queue_size=self._queue_size,
            stall_timeout=None,
        )

    def _begin(self, run: _EpochAhead) -> None:
        self._current, self._given = run, 0
        # Any other loader draws the random numbers of an epoch when it is iterated over. Libraries
        # begin an iteration and drop it, and the thread would have drawn them by then, or not.
        if self._epochs.keeps_position:
            self._start(run)

    def _start(self, run: _EpochAhead) -> None:
        self._epochs.given = self._epochs.position()
        run.is_started = True
        run.enqueuer.start()

    def _batches(self, run: _EpochAhead) -> Iterator[Batch]:
        is_left = True
        try:
            if run is self._current:
                if not run.is_started:
                    self._start(run)
                yield from map(self._received, run.enqueuer.get())
            is_left = False
        finally:
            # After a `break` the ready batches are dropped, unless the next iteration gives them.
            if is_left and run is self._current and not self._epochs.keeps_position:
                run.close()
        if run.is_replaced:
            raise InvalidState(
                "another iteration of this loader has begun, which ended this one: a "
                f"{type(self._epochs.loader).__name__} is read once at a time; make a loader for "
                "each loop, or end the first loop before the second begins"
            )
        # Otherwise another iterator has come to the end of this epoch.
        if run is self._current:
            self.stop()
            self._epochs.given = None

    def _received(self, result: tuple[Any, dict[str, Any] | None]) -> Batch:
        changed, position = result
        if not isinstance(changed, _LoaderFailed):
            self._epochs.given = position
            self._given += 1
            self._epochs.count += 1
            return changed if self._receive is None else self._receive(changed)
        self.stop()
        self._epochs.given = None
        error = changed.error
        # These variables and the traceback would be a circle.
        del result, changed
        try:
            raise error
        finally:
            del error


class _LoaderFailed:
    """An error of the loader on its way from the thread to the loop."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _within(
    running: Callable[[], AbstractContextManager[Any]], change: Callable[[Any], Any], batch: Any
) -> Any:
    with running():
        return change(batch)


def _changed(
    epochs: LoaderEpochs,
    change: Callable[[Any], Any],
    running: Callable[[], AbstractContextManager[Any]],
) -> Iterator[Any]:
    """Yield changed batches of an epoch, each with the position after it."""
    try:
        with running():
            for batch in epochs:
                position = epochs.position()
                changed = change(batch)
                # Otherwise the batch keeps its memory while the loop is busy.
                del batch
                yield changed, position
                del changed
    # As a worker's failure the error would get an origin in this thread.
    except Exception as error:
        yield _LoaderFailed(error), None
