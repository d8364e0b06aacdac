"""`async for` over an enqueuer: a batch that is ready at once, else a thread that waits for it.

    the task:    poll() --> a batch
                   | ^
      nothing yet  v |
                  Notifier <-- a future of -- one thread an enqueuer: it waits, and ends

The thread waits and takes nothing: batches are taken by the thread of the event loop, with no
`await` between taking one and returning it. So a task that is cancelled loses none. It is not
one of the loop's executor, for whose threads `asyncio.run` waits at its end.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import TypeVar, cast

from enqueuer.enqueuers.core import Core

Batch = TypeVar("Batch")
T = TypeVar("T")


class Notifier:
    """Wakes the tasks that wait for an enqueuer; they may be of several event loops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The end of a thread's wait, without its error: that is for the task that began the wait.
        self._ended: Future[None] | None = None

    async def wait(self, watcher: Callable[[], None]) -> None:
        """Wait until `watcher`, run by a thread that is there already or a new one, returns."""
        with self._lock:
            watch = self._ended
            if watch is None or watch.done():
                ended: Future[None] = _running()
                watch = _started(watcher)
                watch.add_done_callback(functools.partial(_end, ended))
                # Last, as an exception of a handler may strike before: nothing would end it.
                self._ended = ended
        await asyncio.wrap_future(watch)


def _end(ended: Future[None], watch: Future[None]) -> None:
    # After an error the other tasks will ask again, and get one of their own.
    ended.set_result(None)


class AsyncBatches(AsyncIterator[Batch]):
    """An asynchronous iterator over one epoch of an enqueuer, which it keeps alive."""

    def __init__(self, core: Core, notifier: Notifier) -> None:
        self._core = core
        self._notifier = notifier
        # Read now, so that tasks that begin together share an epoch, however short it is.
        self._reader = reader = core.reader
        self._has_begun = not core.is_idle and reader is not None and not reader.is_over

    async def __anext__(self) -> Batch:
        # Other tasks run also if a batch is always ready. Before it is taken: a task may be
        # cancelled here.
        await asyncio.sleep(0)
        if not self._has_begun or self._reader is None:
            join = functools.partial(self._core.join, self._reader, is_any=False)
            self._reader = await call(self._core, join)
            self._has_begun = True
        core = self._core
        while True:
            core.make_callbacks(may_wait=False)
            if polled := self._reader.poll():
                return cast(Batch, polled[0])
            wait = self._reader.wait_for_event_loop
            # With `workers=0`, this thread itself makes the batch.
            if core.options.is_inline:
                wait()
            else:
                await self._notifier.wait(wait)


async def call(core: Core, function: Callable[[], T]) -> T:
    """Call a function that may take its time in a thread of its own; with `workers=0`, in this one.

    If the task is cancelled, the thread still runs to its end.
    """
    if core.options.is_inline:
        return function()
    return await asyncio.wrap_future(_started(function))


def _started(function: Callable[[], T]) -> Future[T]:
    """Return the outcome of a function that a thread calls."""
    future: Future[T] = _running()
    name = "enqueuer-await"
    # The context variables are those of the task.
    within = functools.partial(contextvars.copy_context().run, function)
    threading.Thread(target=_run, args=(future, within), name=name, daemon=True).start()
    return future


def _running() -> Future[T]:
    """Return a future that a task does not cancel when it is cancelled."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


def _run(future: Future[T], function: Callable[[], T]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
    finally:
        # The traceback of the error has this frame, and the future has the error.
        del future
