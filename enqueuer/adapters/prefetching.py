"""The reader of loaders that work ahead of the loop.

loader -> [a thread: change, up to queue_size batches] -> convert -> the training loop

With `workers=0` of the enqueuer, the thread of the loop changes a batch when the loop asks for it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from enqueuer.adapters.loading import LoaderEpochs, Reader, is_inline
from enqueuer.common import checks
from enqueuer.enqueuers.enqueuer import core_of
from enqueuer.enqueuers.generator import GeneratorEnqueuer
from enqueuer.errors import InvalidState
from enqueuer.workers.task_loop import Raised

Batch = TypeVar("Batch")


class PrefetchReader(Reader[Batch]):
    """The reader of a loader that keeps changed batches ready, made by a thread of its own.

    After a `break`, an enqueuer continues with the next batch. So does this reader, which keeps
    the batches that were ready. Any other loader begins a new epoch, and batches of the old one
    are dropped.

    Args:
        of_reader: Arguments of `Reader`; `convert` gets each changed batch.
        change: Function that the thread calls with each batch.
        queue_size: Number of batches that are kept ready; the thread holds one more.
        running: Makes the context in which the thread reads an epoch.
    """

    def __init__(
        self,
        *of_reader: Any,
        change: Callable[[Any], Any],
        queue_size: int,
        running: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        super().__init__(*of_reader)
        queue_size = checks.positive("queue_size", queue_size)
        # The function must not know this object, which would then not end when it is dropped.
        epochs = self.epochs

        def make() -> GeneratorEnqueuer[Any]:
            # `reconfigure()` may have changed it since the last epoch.
            is_here = is_inline(epochs.loader)
            run = functools.partial(_changed, epochs, change, running, is_here)
            # An enqueuer that is the loader gives its own warning of a stall, and knows its cause.
            # After Ctrl-C, the generator function would not repeat the same batches.
            return GeneratorEnqueuer[Any](
                run() if is_here else run,
                workers=0 if is_here else 1,
                max_queue_size=queue_size,
                stall_timeout=None,
            )

        self._make = make
        # Enqueuer that runs the thread of the epoch, and number of its batches that were given.
        self._thread: GeneratorEnqueuer[Any] | None = None
        self._given = 0
        # Number of the iteration for which the thread was made.
        self._since = 0

    def prepare(self) -> None:
        """See `Reader`."""
        epochs = self.epochs
        if not epochs.keeps_position or self._given == epochs.steps:
            # The loader cannot be iterated before the thread has ended.
            self.end_reading(threading.TIMEOUT_MAX)
        if self._thread is None:
            self._thread, self._given, self._since = self._make(), 0, self.iteration
            # Any other loader draws the random numbers of an epoch when it is iterated over.
            # Libraries begin an iteration and drop it, and the thread would have drawn them by
            # then, or not.
            if epochs.keeps_position:
                self._start_thread(self._thread)

    def _start_thread(self, thread: GeneratorEnqueuer[Any]) -> None:
        self.epochs.given = self.epochs.position()
        thread.start()

    def end_reading(self, timeout: float | None) -> None:
        """See `Reader`."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop(timeout)

    def read(self, iteration: int) -> Iterator[Batch]:
        """See `Reader`."""
        thread = self._thread
        # An iteration that has not begun ends with the epoch for which it was to begin.
        if thread is not None and iteration >= self._since and not self._is_replaced(iteration):
            yield from self._batches(thread)
        if self._is_replaced(iteration):
            raise InvalidState(
                "another iteration of this loader has begun, which ended this one: a "
                f"{type(self.epochs.loader).__name__} is read once at a time; make a loader for "
                "each loop, or end the first loop before the second begins"
            )

    def _is_replaced(self, iteration: int) -> bool:
        return iteration != self.iteration and not self.epochs.keeps_position

    def _batches(self, thread: GeneratorEnqueuer[Any]) -> Iterator[Batch]:
        try:
            if core_of(thread).is_idle:
                self._start_thread(thread)
            yield from map(self._received, thread.get())
        except BaseException:
            # After a `break` the ready batches are dropped, unless the next iteration gives them.
            if thread is self._thread and not self.epochs.keeps_position:
                _close(thread)
            raise
        # Otherwise another iterator has come to the end of this epoch.
        if thread is self._thread:
            self.end_reading(None)
            self.epochs.given = None

    def _received(self, result: tuple[Any, dict[str, Any] | None]) -> Batch:
        changed, position = result
        if not isinstance(changed, Raised):
            self.epochs.given = position
            self._given += 1
            return self.converted(changed)
        self.end_reading(None)
        self.epochs.given = None
        error = changed.error
        # These variables and the traceback would be a circle.
        del result, changed
        try:
            raise error
        finally:
            del error


def _close(thread: GeneratorEnqueuer[Any]) -> None:
    """Drop the ready batches, and let the thread end after its batch, without waiting."""
    run = core_of(thread).run
    if run is not None:
        run.close()


def _changed(
    epochs: LoaderEpochs,
    change: Callable[[Any], Any],
    running: Callable[[], AbstractContextManager[Any]],
    is_here: bool,
) -> Iterator[Any]:
    """Yield changed batches of an epoch, each with the position after it, or what was raised."""
    of_epoch, of_batch = running, contextlib.nullcontext
    if is_here:
        # The state of the loop's thread must not change between batches.
        of_epoch, of_batch = of_batch, of_epoch
    try:
        with of_epoch():
            for batch in epochs:
                position = epochs.position()
                with of_batch():
                    changed = change(batch)
                # Otherwise the batch keeps its memory while the loop is busy.
                del batch
                yield changed, position
                del changed
    # As a worker's failure the error would get an origin in this thread.
    except Exception as error:
        yield Raised(error), None
