"""Calling a function when an object is garbage, again if an exception (Ctrl-C) ends the call.

    the owner is garbage -----> first callback ----- done, or ended by an exception
                         -----> second callback ---- completes such a first call
    a later collection, exit -- complete a call that was ended twice

Python calls the callback of a weak reference once and only prints an exception that it raises, so
such a `weakref.finalize` is never completed. But Python calls each callback of an object by
itself. So there are two of them, and only a second exception can end both.

Any thread may call anything.
"""

from __future__ import annotations

import atexit
import contextvars
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

# Calls of a function that always raises; without a limit it would keep its arguments forever.
_MOST_CALLS = 4


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
                if self._calls == _MOST_CALLS:
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
    """Give up, in a forked child, the calls that are due in the parent."""
    for finalizer, references in list(pending.items()):
        # The call was that of a thread that does not exist here.
        finalizer._current.clear()
        if references[0]() is None:
            finalizer.detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
