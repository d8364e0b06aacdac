"""What completes although an interrupt may strike anywhere: steps, and calls at garbage collection.

Python runs signal handlers in the main thread, at almost any place of the running code. A
handler that raises (Ctrl-C, an alarm, a test's time limit) can end a step anywhere: between
starting a worker and keeping its process, for example. Blocking the signals does not help:
another thread of the process takes them, and the handler still runs in the main thread. So
`held()` replaces all handlers that are written in Python by one that only notes the signal.

    held() ---- a signal: noted ---- interruptible(wait) ---- a signal: noted ---- its end
                                     handlers run: noted ones,                     noted ones
                                     and new ones at once                          are called

The start, the end and the change of workers, and the taking of their items, run within `held()`
(see `enqueuers/run.py`); what may take long, such as a wait or code of the user, is
`interruptible` there. A step in any other thread needs no protection: no handler runs there.

No block surrounds what the garbage collector calls. Python calls the callback of a weak reference
once and only prints an exception that it raises, so such a `weakref.finalize` is never completed.
But Python calls each callback of an object by itself. So a `Finalizer` has two of them, and only a
second exception can end both. Any thread may call it.

    the owner is garbage -----> first callback ----- done, or ended by an exception
                         -----> second callback ---- completes such a first call
    a later collection, exit -- complete a call that was ended twice
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import functools
import operator
import os
import signal
import sys
import threading
import time
import weakref

# Those of `signal` make enums of their results, and take ten times as long.
from _signal import getsignal, siginterrupt  # type: ignore[import-not-found]  # typeshed lacks it
from _signal import signal as set_handler
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ParamSpec, TypeVar

# --- steps ----------------------------------------------------------------------------------------

P = ParamSpec("P")
T = TypeVar("T")

Handler = Callable[[int, "FrameType | None"], Any]

_SIGNALS = tuple(range(1, signal.NSIG))

# Python has no getter for what `signal.siginterrupt` sets. `CDLL` would release the GIL each time.
sigaction = getattr(ctypes.PyDLL(None), "sigaction", None) if sys.platform == "linux" else None
_SA_RESTART = 0x10000000


class _SigAction(ctypes.Structure):
    """The `struct sigaction` of glibc and musl."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_char * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


# Only the main thread changes these.
is_held = False
# Whether a block has begun and not ended, also while it is interruptible.
_is_open = False
# The exception of a handler that ended an `interruptible` call of the present `held()` block.
_raised: BaseException | None = None
# The handlers of all signals before the last block, and in it; and those with their numbers that
# are written in Python.
_seen: list[Any] = []
_replaced: list[Any] = []
_written_in_python: list[tuple[int, Handler]] = []
# All handlers that `_note` has ever replaced.
_handlers: dict[int, Handler] = {}
# Handlers that are still to be called, the earliest first.
noted: dict[int, Handler] = {}
# Replaced handlers after which system calls are restarted. `signal.signal` resets that.
_restarting: set[int] = set()


def is_main_thread() -> bool:
    """Return whether this is the thread in which Python runs signal handlers."""
    return threading.get_ident() == threading.main_thread().ident


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Call signal handlers only after the block: one call for each kind of signal that came.

    Blocks may be nested: the outermost one counts. Outside the main thread it does nothing.
    """
    global is_held, _is_open, _raised
    if is_held or not is_main_thread():
        yield
        return
    # Within an `interruptible` call handlers stay replaced, or `is_of_handler` would not know what
    # they raise.
    is_inner = _is_open
    try:
        _is_open = True
        _replace_handlers()
        is_held = True
        yield
    finally:
        # From here on `_note` calls the handlers at once.
        is_held = False
        try:
            if not is_inner:
                _put_handlers_back()
        except BaseException:
            # A handler that is back in its place already has raised it.
            _put_handlers_back()
            raise
        finally:
            _is_open = is_inner
            try:
                _call_noted()
            finally:
                if not is_inner:
                    # Its traceback would keep what it refers to.
                    _raised = None


def interruptible(wait: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `wait` inside a `held()` block as if there were none: handlers may raise out of it.

    Use it for a wait that may take long, and for code of the user, where an exception may leave
    the block. `is_of_handler` tells such an exception from one that `wait` itself has raised.
    """
    global is_held
    if not is_held or not is_main_thread():
        return wait(*args, **kwargs)
    try:
        is_held = False
        _call_noted()
        return wait(*args, **kwargs)
    finally:
        try:
            # A handler, or the garbage collector, may have called `held()`, which puts them back.
            _replace_handlers()
        finally:
            is_held = True


def is_of_handler(error: BaseException) -> bool:
    """Return whether a signal handler has raised this in an `interruptible` call, not its code."""
    return error is _raised and is_main_thread()


@contextlib.contextmanager
def taken(lock: threading.RLock, timeout: float = -1) -> Iterator[bool]:
    """Take a lock inside a `held()` block; a signal handler may end the wait for it.

    Args:
        lock: The lock.
        timeout: Seconds to wait at most; -1, the default: without a limit.

    Yields:
        Whether it was taken in time.
    """
    is_taken, end = lock.acquire(blocking=False), time.monotonic() + timeout
    while not is_taken and (timeout < 0 or time.monotonic() < end):
        try:
            remaining = -1 if timeout < 0 else max(0.0, end - time.monotonic())
            interruptible(lock.acquire, timeout=remaining)
        finally:
            # A handler may have struck before it was acquired, or after.
            with contextlib.suppress(RuntimeError):
                lock.release()
        is_taken = lock.acquire(blocking=False)
    try:
        yield is_taken
    finally:
        if is_taken:
            lock.release()


def handler_of(number: int) -> Any:
    """Return the handler of a signal that the user has set, also inside a `held()` block."""
    handler = signal.getsignal(number)
    return _handlers[number] if handler is _note else handler


def check() -> None:
    """Call, inside a `held()` block, the handlers of the signals that came until now."""
    if noted:
        interruptible(lambda: None)


def _note(number: int, frame: FrameType | None) -> None:
    """Note a signal inside a `held()` block; else call the handler that this replaces."""
    if is_held:
        noted[number] = _handlers[number]
    else:
        _call(_handlers[number], number, frame)


def _call(handler: Handler, number: int, frame: FrameType | None) -> None:
    global _raised
    try:
        handler(number, frame)
    except BaseException as error:
        _raised = error
        raise


def _replace_handlers() -> None:
    global _seen, _replaced, _written_in_python
    seen = [*map(getsignal, _SIGNALS)]
    if _are_same(seen, _replaced):
        return
    # They seldom change, and to look at each takes half of the time.
    if not _are_same(seen, _seen):
        pairs = zip(_SIGNALS, seen, strict=True)
        python = [pair for pair in pairs if callable(pair[1]) and pair[1] is not _note]
        replaced = [_note if callable(handler) else handler for handler in seen]
        _written_in_python, _replaced, _seen = python, replaced, seen
    for number, handler in _written_in_python:
        _handlers[number] = handler
        if restarts(number):
            _restarting.add(number)
        # ValueError: the interpreter takes another thread for the main thread.
        with contextlib.suppress(ValueError):
            set_handler(number, _note)
            if number in _restarting:
                siginterrupt(number, False)


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _put_handlers_back() -> None:
    # A list, as a handler may call `held()` meanwhile.
    for number, handler in list(_handlers.items()):
        if getsignal(number) is _note:
            set_handler(number, handler)
        if number in _restarting:
            # Unless the user has set another handler.
            if getsignal(number) is handler:
                siginterrupt(number, False)
            _restarting.discard(number)


def restarts(number: int) -> bool:
    """Return whether system calls that a signal interrupts are restarted; False if unknown."""
    action = _SigAction()
    if sigaction is None or sigaction(number, None, ctypes.byref(action)):
        return False
    return bool(action.flags & _SA_RESTART)


def _call_noted() -> None:
    if noted:
        number = next(iter(noted))
        handler = noted.pop(number)
        try:
            _call(handler, number, sys._getframe())
        finally:
            _call_noted()


# --- finalizers -----------------------------------------------------------------------------------

# Calls of a function that always raises; without a limit it would keep its arguments forever.
_MAX_CALLS = 4


class WorkerThread(threading.Thread):
    """A thread that runs a worker, or its elements. It stops no worker in a finalizer.

    It has the context variables of the code that starts it, as a plain generator would have, such
    as those of `decimal.localcontext` and `numpy.errstate`.
    """

    def start(self) -> None:
        """Start the thread."""
        self._of_starter = contextvars.copy_context()
        super().start()

    def run(self) -> None:
        """Call the function."""
        self._of_starter.run(super().run)


# Set when the interpreter ends. Daemonic threads still run then.
is_at_exit = threading.Event()
# Finalizers whose function has not returned yet, and the references whose callbacks they are.
pending: dict[Finalizer, tuple[weakref.ref[Any], ...]] = {}


class Finalizer:
    """Call a function once its owner is garbage, or at exit.

    If an exception ends the call, the function is called again. So it must be able to continue
    where it was.

    Args:
        owner: Object to wait for; the function and its arguments must not refer to it.
        function: Function to be called, in any thread.
        args: Arguments of the function.
    """

    def __init__(self, owner: object, function: Callable[..., object], *args: Any) -> None:
        self._function = function
        self._args = args
        self._calls = 0
        # The call that is under way.
        self._current: dict[str, object] = {}
        _register_exit()
        pending[self] = weakref.ref(owner, self), weakref.ref(owner, self)

    @property
    def alive(self) -> bool:
        """Whether the function is still to be called."""
        return self in pending

    def detach(self) -> None:
        """Give up the call."""
        pending.pop(self, None)

    def __call__(self, reference: weakref.ref[Any]) -> None:
        """Call the function as the callback of a reference, and those that were missed."""
        self.call()
        for finalizer, references in list(pending.items()):
            if references[0]() is None:
                finalizer.call()

    def call(self) -> None:
        """Call the function, unless it has returned or is being called."""
        call = object()
        try:
            # Only one thread claims the call, and inside the block, so that no claim is left over.
            if self in pending and self._current.setdefault("call", call) is call:
                self._calls += 1
                self._function(*self._args)
                self.detach()
        finally:
            if self._current.get("call") is call:
                self._current.clear()
                if self._calls == _MAX_CALLS:
                    self.detach()


def call_first_at_exit() -> None:
    """Call pending functions before those that others have registered for the exit until now."""
    atexit.unregister(_call_all)
    atexit.register(_call_all)


_register_exit = functools.cache(call_first_at_exit)


def _call_all() -> None:
    """Call all functions at the end of the interpreter, the newest first."""
    is_at_exit.set()
    for finalizer in reversed(list(pending)):
        try:
            finalizer.call()
        except Exception:
            sys.excepthook(*sys.exc_info())
    # The operating system frees the resources of later finalizers.
    pending.clear()


def _forget() -> None:
    """Forget, in a forked child, the parent's block, and the calls that are due in the parent."""
    global is_held, _is_open
    # The block does not end here.
    is_held = _is_open = False
    noted.clear()
    _put_handlers_back()
    for finalizer, references in list(pending.items()):
        # The call was that of a thread that does not exist here.
        finalizer._current.clear()
        if references[0]() is None:
            finalizer.detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
