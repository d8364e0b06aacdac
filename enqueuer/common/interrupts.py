"""Delaying signal handlers while a step must complete.

Python runs signal handlers in the main thread, between two bytecodes of the running code. A
handler that raises (Ctrl-C, an alarm, a test's time limit) can end a step anywhere: between
starting a worker and keeping its process, for example. Blocking the signals does not help:
another thread of the process takes them, and the handler still runs in the main thread. So
`held()` replaces all handlers that are written in Python by one that only notes the signal.

    held() ---- a signal: noted ---- interruptible(wait) ---- a signal: noted ---- its end
                                     handlers run: noted ones,                     noted ones
                                     and new ones at once                          are called

A step in any other thread needs no protection: no handler runs there. What is done for each batch
has none, as this takes longer than to pass a batch. The design page says by which two rules it is
safe nevertheless.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading

# That of `signal` makes an enum of each result. All signals are asked for in each `held()`.
from _signal import getsignal  # type: ignore[import-not-found]  # typeshed lacks it
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from enqueuer.common.catching import is_main_thread

P = ParamSpec("P")
T = TypeVar("T")

Handler = Callable[[int, "FrameType | None"], Any]

_SIGNALS = tuple(range(1, signal.NSIG))

# Python has no getter for what `signal.siginterrupt` sets.
sigaction = getattr(ctypes.CDLL(None), "sigaction", None) if sys.platform == "linux" else None
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
# All handlers that `_note` has ever replaced.
_handlers: dict[int, Handler] = {}
# Handlers that are still to be called, the earliest first.
noted: dict[int, Handler] = {}
# Replaced handlers after which system calls are restarted. `signal.signal` resets that.
_restarting: set[int] = set()


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Call signal handlers only after the block: one call for each kind of signal that came.

    Blocks may be nested: the outermost one counts. Outside the main thread it does nothing.
    """
    global is_held
    if is_held or not is_main_thread():
        yield
        return
    try:
        _replace_handlers()
        is_held = True
        yield
    finally:
        # From here on `_note` calls the handlers at once.
        is_held = False
        try:
            _put_handlers_back()
        except BaseException:
            # A handler that is back in its place already has raised it.
            _put_handlers_back()
            raise
        finally:
            _call_noted()


def interruptible(wait: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `wait` inside a `held()` block as if there were none: handlers may raise out of it.

    Use it for a wait that may take long, where an exception may leave the block.
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


@contextlib.contextmanager
def taken(lock: threading.RLock) -> Iterator[None]:
    """Take a lock inside a `held()` block; a signal handler may end the wait for it."""
    while not lock.acquire(blocking=False):
        interruptible(_wait_for, lock)
    try:
        yield
    finally:
        lock.release()


def _wait_for(lock: threading.RLock) -> None:
    with lock:
        pass


def check() -> None:
    """Call, inside a `held()` block, the handlers of the signals that came until now."""
    if noted:
        interruptible(lambda: None)


def _note(number: int, frame: FrameType | None) -> None:
    """Note a signal inside a `held()` block; else call the handler that this replaces."""
    if is_held:
        noted[number] = _handlers[number]
    else:
        _handlers[number](number, frame)


def _replace_handlers() -> None:
    for number in _SIGNALS:
        handler = getsignal(number)
        if callable(handler) and handler is not _note:
            _handlers[number] = handler
            if restarts(number):
                _restarting.add(number)
            # ValueError: the interpreter takes another thread for the main thread.
            with contextlib.suppress(ValueError):
                signal.signal(number, _note)
                if number in _restarting:
                    signal.siginterrupt(number, False)


def _put_handlers_back() -> None:
    # A list, as a handler may call `held()` meanwhile.
    for number, handler in list(_handlers.items()):
        if getsignal(number) is _note:
            signal.signal(number, handler)
        if number in _restarting:
            # Otherwise the user has set another one.
            if getsignal(number) is handler:
                signal.siginterrupt(number, False)
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
            handler(number, sys._getframe())
        finally:
            _call_noted()


def _forget() -> None:
    """Forget, in a forked child, the parent's block: it does not end here."""
    global is_held
    is_held = False
    noted.clear()
    _put_handlers_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
