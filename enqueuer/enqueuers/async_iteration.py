"""`async for` over an enqueuer: a batch that is ready at once, else a thread that waits for it.

    the task:    poll() --> a batch
                   | ^
      nothing yet  v |
                  Notifier <-- call_soon_threadsafe -- one thread an enqueuer: watch(), and it ends

The thread waits and takes nothing: batches are taken by the thread of the event loop, with no
`await` between taking one and returning it. So a task that is cancelled loses none. It is not
one of the loop's executor, for whose threads `asyncio.run` waits at its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar, cast

from enqueuer.enqueuers.core import Core

Batch = TypeVar("Batch")
T = TypeVar("T")


class Notifier:
    """Wakes the tasks that wait for an enqueuer; they may be of several event loops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[asyncio.Future[None]] = []
        self._is_watched = False

    async def wait(self, watcher: Callable[[], None]) -> None:
        """Wait until `watcher`, run by a thread that is there already or a new one, returns."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.append(future)
            if not self._is_watched:
                _start(self._watch, watcher)
                self._is_watched = True
        await future

    def _watch(self, watcher: Callable[[], None]) -> None:
        outcome = _outcome(watcher)
        with self._lock:
            (first, *others), self._waiting = self._waiting, []
            self._is_watched = False
        _send(first, outcome)
        for future in others:
            # After an error they will ask again, and get one of their own.
            _send(future, None)


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
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    _start(_run, future, function)
    return await future


def _run(future: asyncio.Future[T], function: Callable[[], T]) -> None:
    _send(future, _outcome(function))


def _outcome(function: Callable[[], object]) -> object:
    """Return what a function returns, or the exception that it raises."""
    try:
        return function()
    except BaseException as error:
        return error


def _start(function: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=function, args=args, name="enqueuer-await", daemon=True).start()


def _send(future: asyncio.Future[Any], result: object) -> None:
    # The event loop may be closed, and then no task waits any longer.
    with contextlib.suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(_resolve, future, result)


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    # The task was cancelled.
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
