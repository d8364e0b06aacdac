"""Catching what the called code has raised, and nothing else.

A signal handler may raise any exception between two bytecodes of any code: the `TimeoutError` of
an alarm, for example, which is an `OSError`. To `except OSError` it looks like an error of the
system call there, and would be lost.

    except OSError:                takes the exception of a handler for one of the system
    except raised_here(OSError):   lets the exception of a handler pass
"""

from __future__ import annotations

import contextlib
import sys
import threading
from types import TracebackType
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def raised_here(*kinds: type[E]) -> tuple[type[E], ...]:
    """Return what an `except` clause is to catch; nothing if a signal handler has raised it.

    Args:
        kinds: Classes of the exceptions that the code in the `try` block may raise itself.

    Example:
        >>> def handler(number, frame):
        ...     raise TimeoutError("of a handler")
        >>> def interrupted():
        ...     handler(14, sys._getframe())
        >>> try:
        ...     open("/nowhere")
        ... except raised_here(OSError):
        ...     print("no such file")
        no such file
        >>> try:
        ...     interrupted()
        ... except raised_here(OSError):
        ...     print("no such file")
        Traceback (most recent call last):
        TimeoutError: of a handler
    """
    error = sys.exc_info()[1]
    return () if error is not None and _is_of_handler(error) else kinds


class suppressed(contextlib.suppress):
    """As `contextlib.suppress`, but the exceptions of signal handlers pass."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        is_suppressed = super().__exit__(kind, error, traceback) is True
        return is_suppressed and error is not None and not _is_of_handler(error)


def is_main_thread() -> bool:
    """Return whether this is the thread in which Python runs signal handlers."""
    return threading.get_ident() == threading.main_thread().ident


def _is_of_handler(error: BaseException) -> bool:
    """Return whether a handler has raised an exception: it is called with the frame it struck."""
    if not is_main_thread():
        return False
    # That of Ctrl-C is written in C and has no frame.
    if isinstance(error, KeyboardInterrupt):
        return True
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        before, at = at.tb_frame, at.tb_next
        for value in at.tb_frame.f_locals.values():
            # A tuple, if the handler takes `*args`.
            if value is before or (type(value) is tuple and any(one is before for one in value)):
                return True
    return False
