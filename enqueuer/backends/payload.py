"""What a worker that was not forked must be handed: pickled once, for all of them.

To processes it travels in a nameless file, whose descriptor goes over each worker's channel.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import cloudpickle

from enqueuer.backends.bootstrap import Setup
from enqueuer.errors import SourceNotPicklable
from enqueuer.sources import LiveSource, Source, name_of
from enqueuer.tasks import TaskSource
from enqueuer.transport.blocks import nameless_file
from enqueuer.transport.codec import find_culprit, is_picklable
from enqueuer.transport.packets import Descriptor
from enqueuer.worker import OnError

_lock = threading.Lock()  # of what cloudpickle is told

_OTHERS = "backend='thread' or mp_context='fork'"


def write_payload(
    setup: Setup, source: Source | TaskSource, on_error: OnError, method: str
) -> Descriptor:
    """Return a nameless file that holds `setup`, `source` and `on_error`.

    Raises:
        SourceNotPicklable: One of these cannot be pickled; the message names the culprit.
        OSError: There is no room for it.
    """
    # on its own, so that what fails to load in the worker is known to be the user's
    pickled = pickled_source(source, on_error, f"a process started by {method}", _OTHERS)
    data = cloudpickle.dumps((setup, pickled), protocol=5)
    return Descriptor(nameless_file(data))


def pickled_source(
    source: Source | TaskSource, on_error: OnError, where: str, others: str
) -> bytes:
    """Return the pickle of a source and `on_error`.

    Args:
        source: What is to be run.
        on_error: Of the enqueuer.
        where: What it is sent to, in words.
        others: The options that would not send it, in words.

    Raises:
        SourceNotPicklable: One of these cannot be pickled; the message names the culprit.
    """
    try:
        return _by_value((source, on_error))
    except Exception as error:
        if not is_picklable(on_error):
            raise SourceNotPicklable(
                f"on_error={name_of(on_error)} cannot be sent to {where}: "
                f"{error}; use a function of a module, or {others}"
            ) from error
        raise SourceNotPicklable(why_not(source, where, others)) from error


def _by_value(what: object) -> bytes:
    """Pickle with all that the main module defines, also where that is called `__mp_main__`.

    A process that multiprocessing has spawned calls it so, and no worker could import it.
    """
    main = sys.modules["__main__"]
    if main.__name__ != "__mp_main__":
        return cloudpickle.dumps(what, protocol=5)  # type: ignore[no-any-return]
    with _lock:
        cloudpickle.register_pickle_by_value(main)
        try:
            return cloudpickle.dumps(what, protocol=5)  # type: ignore[no-any-return]
        finally:
            cloudpickle.unregister_pickle_by_value(main)


def why_not(source: Source | TaskSource, where: str, others: str) -> str:
    """Say which part of a source cannot be pickled, and what to do."""
    advice = f"pass a generator function that makes its own in the worker, or use {others}"
    if isinstance(source, TaskSource):
        return _why_no_tasks(source, where, others)
    if isinstance(source, LiveSource):
        kind = type(source.iterable).__name__
        return f"a live {kind} cannot be sent to {where}; {advice}"
    culprits = _culprits(source.function)
    what = ", ".join(culprits) or "something that it refers to"
    return (
        f"{name_of(source.function)} cannot be sent to {where}: {what} cannot be pickled; {advice}"
    )


def _why_no_tasks(source: TaskSource, where: str, others: str) -> str:
    parts = {"map": source.map, "collate": source.collate}
    if source.is_sequence:
        parts["the sequence"] = source.items
    for part, value in parts.items():
        if not is_picklable(value):
            culprits = (
                ", ".join(_culprits(value)) if callable(value) else _with_type(*_named(part, value))
            )
            break
    else:
        part, culprits = "something", "something that it refers to"
    return (
        f"{part} cannot be sent to {where}: {culprits} cannot be pickled; "
        f"open files and the like in map, in the worker, or use {others}"
    )


def _culprits(function: Callable[..., Any]) -> list[str]:
    """Say which of the things that a function refers to cannot be pickled."""
    found = _found_in(function)
    return [_with_type(where, value) for where, value in found if not is_picklable(value)]


def _with_type(where: str, value: object) -> str:
    return f"{where} (a {type(value).__module__}.{type(value).__qualname__})"


def _found_in(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a function refers to: closure, globals, defaults, or the parts of an object."""
    target = getattr(function, "__func__", function)
    if isinstance(target, FunctionType):
        names, cells = target.__code__.co_freevars, target.__closure__ or ()
        for name, cell in zip(names, cells, strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                yield _named(f"the variable {name!r}", cell.cell_contents)
        for name in target.__code__.co_names:
            if name in target.__globals__:
                yield f"the global {name!r}", target.__globals__[name]
        for default in (*(target.__defaults__ or ()), *(target.__kwdefaults__ or {}).values()):
            yield "a default argument", default
    if target is not function or not isinstance(target, FunctionType):
        yield _named("the object", getattr(function, "__self__", function))


def _named(where: str, value: object) -> tuple[str, object]:
    if is_picklable(value):
        return where, value
    return find_culprit(where, value)
