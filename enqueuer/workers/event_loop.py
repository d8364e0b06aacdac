"""The event loop of a worker, and the async generators of its shards on it.

    the worker's own thread: next() of AsyncItems --let_on()--> the shard that was sent may go on
                                                  <--take()---- the next item of the shard in turn
    the thread of the loop:  the async generators of all shards of the worker, side by side

Without a thread, as in the loop's own thread, an event loop runs only while an item is awaited, and
nothing is made ahead.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import operator
import os
import sys
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from dataclasses import replace
from queue import Empty, SimpleQueue
from types import CoroutineType, FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from enqueuer.common.interrupts import WorkerThread
from enqueuer.workers.shards import CaughtError, Shard, collect_reports
from enqueuer.workers.threads import ThreadSnapshot, set_snapshots

if TYPE_CHECKING:
    from asyncio import Task

_log = logging.getLogger("enqueuer")
T = TypeVar("T")

# Seconds between two looks whether the consumer left, while all coroutines of a worker wait. One
# that holds the event loop for so long is named.
LOOK_S = 0.1
# Seconds for coroutines to end after an exception struck within asyncio.
_LIMIT_S = 1.0
# Attributes of what awaits: its frame, and what it awaits itself.
_AWAITING = (("cr_frame", "cr_await"), ("ag_frame", "ag_await"), ("gi_frame", "gi_yieldfrom"))

NOT_AWAITED = (
    "a coroutine, which no code awaits: pass the async function itself as map (functools.partial "
    "binds further arguments); a generator that awaits must be `async def`"
)
"""What is wrong with an item that is a coroutine."""


class EventLoop:
    """An asyncio event loop, on which other threads wait for coroutines.

    Args:
        name: Name of its thread; None: it runs in the thread that waits.
        count: Number of coroutines that run at once; others wait for their turn.
        check: Function that raises Closed if the consumer left; called during long waits.

    Attributes:
        makes_ahead: Whether items of async generators are made before they are asked for.
        asyncio: The module, whose import takes longer than to fork a worker.
        thread: Its thread.
        items: Iterators over the async generators that run on it.
        last: The one of which an item was taken last.
        watch: See `Plan`; it counts no time in which a coroutine waits for its turn.

    Raises:
        OSError: The system has no descriptors for the loop.
        RuntimeError: It has no room for the thread.

    Example:
        >>> import asyncio
        >>> loop = EventLoop("loop", 2)
        >>> loop.result(asyncio.sleep(0, "done"))
        'done'
        >>> loop.close()
    """

    def __init__(
        self, name: str | None, count: int = 1, check: Callable[[], object] = list
    ) -> None:
        import asyncio

        self.makes_ahead = True
        self.asyncio = asyncio
        self.items: set[AsyncItems] = set()
        self.last: AsyncItems | None = None
        self.watch: Any = None
        self._loop = asyncio.new_event_loop()
        self._turns = asyncio.Semaphore(count)
        self._check = check
        # The coroutine that each thread waits for.
        self._awaited: dict[int, Coroutine[Any, Any, Any]] = {}
        self._is_cancelled = False
        # Seconds for what was cancelled; None: any number.
        self._limit_s: float | None = None
        self._watch = threading.Lock()
        # Numbers of calls that the loop was asked for, and that it has made.
        self._asked = self._answered = 0
        self._has_named = False
        self.thread: threading.Thread | None = None
        if name is None:
            return
        self.thread = WorkerThread(target=self._loop.run_forever, name=name, daemon=True)
        try:
            self.thread.start()
        except RuntimeError:
            self._loop.close()
            raise

    @classmethod
    def of_caller(cls) -> EventLoop:
        """Return a loop for the calling thread, which has none; close it after use."""
        import asyncio

        # As in a notebook: a thread can run one loop at a time.
        is_busy = asyncio._get_running_loop() is not None
        loop = cls("enqueuer-loop" if is_busy else None)
        loop.makes_ahead = False
        return loop

    def result(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the loop, and return its result, or raise its exception."""
        ident = threading.get_ident()
        self._awaited[ident] = coroutine
        try:
            begin = list if self.watch is None else self.watch.pause()
            value, error = self._run(self._in_turn(coroutine, begin))
        finally:
            del self._awaited[ident]
            # It has not begun if it was cancelled before its turn.
            coroutine.close()
        if error is not None:
            raise error
        return value

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self.thread is None:
            return self._run_here(self._loop.run_until_complete, coroutine)
        future = self.asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        # One thread looks for all that wait.
        while self._watch.acquire(blocking=False):
            try:
                return future.result(LOOK_S)
            except Exception:
                if future.done():
                    break
                self.look()
            finally:
                self._watch.release()
        return future.result()

    def _run_here(self, run: Callable[..., T], *args: Any) -> T:
        try:
            return run(*args)
        except BaseException:
            # Ctrl-C may have struck where asyncio had just taken a step of a task off its list.
            # That task never ends.
            self._limit_s = _LIMIT_S
            raise

    async def _in_turn(
        self, coroutine: Coroutine[Any, Any, Any], begin: Callable[[], object]
    ) -> tuple[Any, BaseException | None]:
        try:
            async with self._turns:
                begin()
                return await coroutine, None
        except BaseException as error:
            if self._is_cancelled:
                raise
            # asyncio would raise some out of the loop, which would end all other coroutines, and
            # would drop the message and the traceback of a CancelledError.
            return None, error

    # --- async generators ---

    def soon(self, function: Callable[[], object]) -> None:
        """Have the loop call a function."""
        self._asked += 1
        self._loop.call_soon_threadsafe(self._answer, function)

    def _answer(self, function: Callable[[], object]) -> None:
        self._answered += 1
        function()

    def take(self, queue: SimpleQueue[Any]) -> Any:
        """Wait for what a coroutine puts into a queue, and take it."""
        while True:
            if self.thread is None and queue.empty():
                self._run_here(self._loop.run_forever)
            with contextlib.suppress(Empty):
                return queue.get(timeout=LOOK_S)
            self._check()
            self.look()

    def put(self, queue: SimpleQueue[Any], value: object) -> None:
        """Let `take` return a value; called on the loop."""
        queue.put(value)
        if self.thread is None:
            self._loop.stop()

    def end(self, items: Iterable[AsyncItems]) -> None:
        """Cancel some async generators, all at once, and wait until their `finally` has run."""
        self._run(self._cancel(lambda: [item.task_at_end() for item in list(items)]))

    # --- where coroutines are ---

    def stack_of(self, ident: int) -> list[traceback.FrameSummary]:
        """Return where the coroutine is that a thread waits for; [] if it waits for none."""
        return _stack_of(self._awaited.get(ident))

    def snapshots(self) -> list[ThreadSnapshot]:
        """Return where the async generators are."""
        shown = (item.snapshot() for item in self.items.copy())
        return sorted(shown, key=lambda snapshot: snapshot.indices)

    def look(self) -> None:
        """Name the coroutine that holds the loop if it has not answered, the first time.

        Called by one thread at a time, after it has waited for `LOOK_S`.
        """
        if self._has_named:
            return
        if self._answered == self._asked:
            self.soon(list)
            return
        frame = None if self.thread is None else sys._current_frames().get(self.thread.ident or 0)
        stack = [] if frame is None else list(traceback.extract_stack(frame))
        # The loop calls each step of a coroutine there. Without such a call the CPUs are busy.
        calls = os.path.join(os.path.dirname(self.asyncio.__file__), "events.py")
        begins = [at for at, call in enumerate(stack, 1) if call.filename == calls]
        held = stack[begins[-1] :] if begins else []
        if not held or held[0].name == self._answer.__name__:
            return
        self._has_named = True
        _log.warning(
            "a coroutine has held its event loop for more than %g ms, and all others of this "
            "worker wait meanwhile: await it in another thread (`asyncio.to_thread`), or pass a "
            "function that is not async. It is here:\n%s",
            LOOK_S * 1e3,
            "".join(traceback.format_list([call for call in held if call.filename != __file__])),
        )

    # --- the end ---

    def cancel(self) -> None:
        """Cancel what runs, and wait until it has ended."""
        self._is_cancelled = True
        self._run(self._cancel(self.asyncio.all_tasks))

    def close(self) -> None:
        """Cancel what runs, and end the thread."""
        try:
            self.cancel()
            # Asynchronous generators that coroutines have left, and threads for blocking calls.
            self._run(self._loop.shutdown_asyncgens())
            self._run(self._loop.shutdown_default_executor())
        finally:
            if self.thread is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self.thread.join()
            self._loop.close()

    async def _cancel(self, find: Callable[[], Iterable[Task[Any]]]) -> None:
        """Cancel tasks, which are found on the loop, and wait until they have ended."""
        tasks = {*find()} - {self.asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            done, _ = await self.asyncio.wait(tasks, timeout=self._limit_s)
            # Without this, asyncio would log their exceptions.
            await self.asyncio.gather(*done, return_exceptions=True)


def _stack_of(awaited: Any) -> list[traceback.FrameSummary]:
    """Return where a coroutine or an async generator waits, through all that it awaits."""
    frames: list[tuple[FrameType, int]] = []
    # The last one awaits an object without a frame.
    while found := [names for names in _AWAITING if getattr(awaited, names[0], None) is not None]:
        frame, awaited = operator.attrgetter(*found[0])(awaited)
        # It may have ended meanwhile.
        if frame is not None:
            frames.append((frame, frame.f_lineno))
        if type(awaited).__name__ == "async_generator_asend":
            # Of a further async generator, for which it has no attribute.
            awaited = next(filter(inspect.isasyncgen, gc.get_referents(awaited)), None)
    return list(traceback.StackSummary.extract(iter(frames)))


def check_awaited(value: object) -> None:
    """Raise TypeError if an item is a coroutine, or a list of some.

    Example:
        >>> import asyncio
        >>> check_awaited([asyncio.sleep(1)])
        Traceback (most recent call last):
        TypeError: the item is a coroutine, which no code awaits: pass the async function itself...
    """
    coroutines = [
        item
        for item in (value if type(value) is list else [value])
        if isinstance(item, CoroutineType)
    ]
    for coroutine in coroutines:
        # Without this, Python warns of it.
        coroutine.close()
    if coroutines:
        raise TypeError(f"the item is {NOT_AWAITED}")


# --- the loops of workers -------------------------------------------------------------------------


class _OfThread(threading.local):
    """The event loop of the worker that a thread belongs to; coroutines do not inherit it.

    Attributes:
        loop: The event loop.
    """

    loop: EventLoop | None = None


_current = _OfThread()
# Event loops of workers of shards, by the identifiers of the workers' own threads.
_loops: dict[int, EventLoop] = {}


if hasattr(os, "register_at_fork"):
    # Those threads do not exist in a forked child.
    os.register_at_fork(after_in_child=_loops.clear)


def set_loop(loop: EventLoop | None) -> None:
    """Have `result_of` use an event loop in this thread."""
    _current.loop = loop


def result_of(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on the event loop of this worker, or on one of its own if there is none."""
    if _current.loop is not None:
        return _current.loop.result(coroutine)
    loop = EventLoop.of_caller()
    try:
        return loop.result(coroutine)
    finally:
        loop.close()


@contextlib.contextmanager
def shard_loop(check: Callable[[], object]) -> Iterator[EventLoop]:
    """Run an event loop for the shards of the worker whose own thread calls it.

    Raises:
        OSError: The system has no descriptors for the loop.
        RuntimeError: It has no room for the thread.
    """
    ident = threading.get_ident()
    loop = EventLoop(f"{threading.current_thread().name}.loop", check=check)
    _loops[ident] = loop
    set_snapshots(loop.snapshots)
    try:
        yield loop
    finally:
        set_snapshots(None)
        del _loops[ident]
        loop.close()


def loop_of(ident: int | None) -> EventLoop | None:
    """Return the event loop of a worker of shards by the identifier of its own thread, if any."""
    return None if ident is None else _loops.get(ident)


# --- async generators -----------------------------------------------------------------------------


class AsyncItems(Iterator[Any]):
    """An iterator over the items of an async generator, for a worker that runs other shards, too.

    The generator is one task, so what it enters around a `yield` it leaves in the same task. After
    an item it goes on when the worker asks for the next item of any shard: until then the item may
    not have been sent, and the generator may change it.

    Args:
        function: Function that returns the generator for a shard.
        shard: The shard, to which errors are reported with the item before which they came.
        loop: Event loop of the worker; None: one of its own, on which nothing is made ahead.
        ahead: Number of items that may be made before they are asked for.
        first: Number of items that may be so at the beginning, beyond these.
        unneeded: Number of the first items that are only counted, as they were received before.
    """

    def __init__(
        self,
        function: Callable[[Shard], AsyncGenerator[Any, None]],
        shard: Shard,
        loop: EventLoop | None,
        ahead: int = 1,
        first: int = 0,
        unneeded: int = 0,
    ) -> None:
        self._owns_loop = loop is None
        self._loop = loop = loop or EventLoop.of_caller()
        self._function = function
        self._shard = shard
        self._twin = replace(shard)
        self._reports = collect_reports(self._twin)
        # Items, or at the end an exception or None; what was reported since the item before; and
        # whether it is the end.
        self._made: SimpleQueue[tuple[Any, list[CaughtError], bool]] = SimpleQueue()
        self._unneeded = unneeded
        # Items that have been made early, for which no later one is made when they are taken.
        self._early = first + unneeded if loop.makes_ahead else 0
        self._room = loop.asyncio.Semaphore(ahead + self._early if loop.makes_ahead else 0)
        self._generator: AsyncGenerator[Any, None] | None = None
        self._is_closing = self._has_ended = False
        self._close_error: BaseException | None = None
        loop.items.add(self)
        loop.soon(self._begin)

    def __next__(self) -> Any:
        if self._has_ended:
            raise StopIteration
        loop = self._loop
        # The worker has sent what it took last.
        sent, loop.last = (loop.last if loop.makes_ahead else self), self
        if sent is not None:
            sent.let_on()
        value, reports, is_last = loop.take(self._made)
        for error, log in reports:
            self._shard.report(error, log)
        if not is_last:
            return value
        self._leave()
        if value is None:
            raise StopIteration
        try:
            raise value
        finally:
            # Without this, its traceback would refer to itself.
            del value

    def let_on(self) -> None:
        """Let the generator make one more item."""
        if self._early:
            self._early -= 1
        else:
            self._loop.soon(self._room.release)

    def close(self) -> None:
        """Cancel the generator, so that its `finally` runs; raise an exception of that."""
        if self._has_ended:
            return
        try:
            self._loop.end([self])
        finally:
            self._leave()
        error, self._close_error = self._close_error, None
        if error is not None:
            raise error

    def _leave(self) -> None:
        self._has_ended = True
        self._loop.items.discard(self)
        if self._owns_loop:
            self._loop.close()

    def snapshot(self) -> ThreadSnapshot:
        """Return where the generator is; an empty stack if its next item is made. Any thread."""
        generator: Any = self._generator
        is_running = generator is not None and generator.ag_running
        return ThreadSnapshot((self._shard.index,), _stack_of(generator) if is_running else [])

    # --- on the event loop ---

    def _begin(self) -> None:
        self._task: Task[None] = self._loop.asyncio.create_task(self._run())

    def task_at_end(self) -> Task[None]:
        """Return its task, which is to be cancelled; it makes no more items."""
        self._is_closing = True
        return self._task

    async def _run(self) -> None:
        error: BaseException | None = None
        try:
            generator = self._generator = self._function(self._twin)
            try:
                # One may have caught the exception that cancels it.
                while not self._is_closing:
                    await self._room.acquire()
                    self._put(await generator.__anext__())
            finally:
                await generator.aclose()
        except StopAsyncIteration:
            pass
        except BaseException as raised:
            error = raised
        if not self._is_closing:
            self._put(error, is_last=True)
        elif not isinstance(error, self._loop.asyncio.CancelledError):
            self._close_error = error

    def _put(self, value: Any, is_last: bool = False) -> None:
        if self._unneeded and not is_last:
            self._unneeded -= 1
            value = None
        reports = self._reports.copy()
        self._reports.clear()
        self._loop.put(self._made, (value, reports, is_last))
