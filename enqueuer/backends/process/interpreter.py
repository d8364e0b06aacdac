"""Fresh interpreters: their options, their program, and their start without a Ctrl-C in between."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

from enqueuer.common import interrupts

# For fresh interpreters: a set of strings then has the same order in all workers of all runs.
SAME_HASHES = {"PYTHONHASHSEED": "0"}


@contextlib.contextmanager
def silent_children() -> Iterator[None]:
    """Start children with SIGINT blocked, until they ignore it.

    Otherwise a Ctrl-C during the start prints a traceback for each child.
    """
    # A handler that raises could otherwise leave SIGINT blocked here.
    with interrupts.held():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def program(function: str, *arguments: int | list[str]) -> str:
    """Return the program of a fresh interpreter, which sets the search path to find us.

    What it imports lives as long as the interpreter does. So the garbage collector does not look
    at it, neither during the imports nor later.
    """
    written = ", ".join(map(repr, arguments))
    return (
        f"import gc, sys; collects = gc.isenabled(); gc.disable(); sys.path[:] = {sys.path!r}; "
        f"from enqueuer.backends.process.child import {function}; "
        f"gc.freeze(); collects and gc.enable(); {function}({written})"
    )


def interpreter_flags() -> list[str]:
    """Return the options that this interpreter was started with, as far as they matter."""
    flags = sys.flags
    options = ["-O"] * flags.optimize + ["-B"] * flags.dont_write_bytecode
    options += ["-I"] * flags.isolated + ["-E"] * flags.ignore_environment
    options += ["-s"] * flags.no_user_site + ["-X", "dev"] * flags.dev_mode
    return options + [f"-W{option}" for option in sys.warnoptions]
