"""The source and the configuration of workers that are not forked: pickled once, for all.

To processes it travels in a nameless file, whose descriptor goes over each worker's channel.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import sys
import threading
from collections.abc import Callable, Iterator
from pickle import PickleBuffer
from types import CodeType, FunctionType, MethodType
from typing import Any

import cloudpickle

from enqueuer.backends.pool import NoRoom
from enqueuer.backends.process.child import ProcessConfig
from enqueuer.backends.process.shared_objects import OF_FORK, Handover
from enqueuer.common.sizes import OUT_OF_BAND_BYTES
from enqueuer.common.text import an
from enqueuer.errors import SourceNotPicklable
from enqueuer.transport.culprit import find_culprit, parts_of
from enqueuer.transport.item_codec import reduce_tensor
from enqueuer.workers.plan import OnError
from enqueuer.workers.sources import LiveSource, Source, name_of
from enqueuer.workers.tasks import TaskSource

# Held while cloudpickle pickles the main module by value, which is a global setting.
_lock = threading.Lock()

_OTHERS = "backend='thread' or backend=Processes(start_method='fork')"


def pickled_payload(
    config: ProcessConfig, source: Source | TaskSource, on_error: OnError, method: str
) -> tuple[bytes, list[PickleBuffer], Handover]:
    """Return the pickle of `config`, `source` and `on_error`, and what travels beside it.

    Returns:
        The pickle, its large buffers, and the descriptors of the objects that are shared.

    Raises:
        NoRoom: There was no descriptor left for it.
        SourceNotPicklable: One of these cannot be pickled; the message names the culprit.
        OSError: There is no room for the descriptors of shared objects.
    """
    buffers: list[PickleBuffer] = []
    shared = Handover()

    def keep_large(buffer: PickleBuffer) -> bool:
        is_small = buffer.raw().nbytes < OUT_OF_BAND_BYTES
        if not is_small:
            buffers.append(buffer)
        return is_small

    # The source has a pickle of its own: an error while that is loaded is the user's.
    where = f"a process started by {method}"
    try:
        pickled = pickled_source(source, on_error, where, _OTHERS, keep_large, shared)
        data: bytes = cloudpickle.dumps((config, shared.tracker(), pickled), protocol=5)
    except BaseException:
        shared.close()
        raise
    return data, buffers, shared


def pickled_source(
    source: Source | TaskSource,
    on_error: OnError,
    where: str,
    others: str,
    keep_large: Callable[[PickleBuffer], bool] | None = None,
    shared: Handover | None = None,
) -> bytes:
    """Return the pickle of a source and `on_error`.

    Args:
        source: Source that is to be run.
        on_error: Option of the enqueuer.
        where: Destination, in words.
        others: Options that would not send it, in words.
        keep_large: Function that pickle calls with each buffer, as `buffer_callback`.
        shared: Keeper of the descriptors of shared objects; None: these cannot be sent.

    Raises:
        NoRoom: There was no descriptor left for it.
        SourceNotPicklable: One of these cannot be pickled; the message names the culprit.
        OSError: There is no room for the descriptors of shared objects.
    """
    try:
        return _dumps((source, on_error), keep_large, shared)
    except Exception as error:
        if shared is not None and shared.error is not None:
            raise shared.error from None
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise NoRoom(
                f"{error}, while the source was pickled. Raise the limit of descriptors "
                "(`ulimit -n`), or close some"
            ) from error
        can_send = functools.partial(_can_send, shared)
        if not can_send(on_error):
            raise SourceNotPicklable(
                f"on_error={name_of(on_error)} cannot be sent to {where}: "
                f"{error}; use a function of a module, or {others}"
            ) from error
        reason = _why_not(source, where, others, can_send)
        if shared is not None and OF_FORK in str(error):
            reason += ". Make objects of multiprocessing by multiprocessing.get_context('spawn')"
        raise SourceNotPicklable(reason) from error


def _can_send(shared: Handover | None, value: object) -> bool:
    """Return whether a part of a source can be sent, by trying."""
    try:
        _dumps(value, None, None if shared is None else Handover(is_trial=True))
    except Exception:
        return False
    return True


def _dumps(
    what: object, keep_large: Callable[[PickleBuffer], bool] | None, shared: Handover | None
) -> bytes:
    """Pickle with all that the main module defines, also where that is called `__mp_main__`.

    A process that multiprocessing has spawned calls it so, and no worker could import it.
    """
    main = sys.modules["__main__"]
    file = io.BytesIO()
    pickler = _Pickler(file, 5, keep_large)
    pickler.shared = shared
    with contextlib.ExitStack() as stack:
        if shared is not None:
            stack.enter_context(shared.pickling())
        if main.__name__ == "__mp_main__":
            stack.enter_context(_lock)
            cloudpickle.register_pickle_by_value(main)
            stack.callback(cloudpickle.unregister_pickle_by_value, main)
        pickler.dump(what)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Sends cached functions that no worker can import by value, as cloudpickle does others.

    `functools.cache` and `lru_cache` make objects that pickle by name only. The worker's copy
    begins with an empty cache.

    Attributes:
        shared: What shared objects are sent with; None: they cannot be sent.
    """

    shared: Handover | None = None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, functools._lru_cache_wrapper):
            is_local = "<locals>" in value.__qualname__
            if is_local or value.__module__ in ("__main__", "__mp_main__"):
                sizes = value.cache_parameters()
                return _cached, (value.__wrapped__, sizes["maxsize"], sizes["typed"])
        if self.shared is not None:
            reduced = self.shared.reduce(value)
            if reduced is not NotImplemented:
                return reduced
            torch = sys.modules.get("torch")
            # Large arrays lie in memory that all workers map.
            if torch is not None and type(value) is torch.Tensor:
                return reduce_tensor(value)
        return super().reducer_override(value)


def _cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _why_not(
    source: Source | TaskSource, where: str, others: str, can_send: Callable[[object], bool]
) -> str:
    """Return which part of a source cannot be pickled, and what to do."""
    advice = "pass a generator function that makes its own in the worker"
    if isinstance(source, LiveSource):
        kind = type(source.iterable).__name__
        return f"a running {kind} cannot be sent to {where}; {advice}, or use {others}"
    if isinstance(source, TaskSource):
        advice = "open files and the like in map, in the worker"
        parts = {"map": source.map, "collate": source.collate}
        if source.is_sequence:
            parts["the sequence"] = source.items
    else:
        parts = {name_of(source.function): source.function}
    what, culprits = "something" if isinstance(source, TaskSource) else name_of(source.function), ""
    for part, value in parts.items():
        if not can_send(value):
            what, culprits = part, _culprits_in(part, value, can_send)
            break
    culprits = culprits or "something that it refers to"
    return (
        f"{what} cannot be sent to {where}: {culprits} cannot be pickled; {advice}, or use {others}"
    )


def _culprits_in(name: str, value: Any, can_send: Callable[[object], bool]) -> str:
    """Return which of the parts of a value, or of what a function refers to, cannot be pickled."""
    if not callable(value):
        return _with_type(*find_culprit(name, value, _references, can_send))
    found = [(step, part) for step, part in _references(value) if not can_send(part)]
    named = [find_culprit(_first(step), part, _references, can_send) for step, part in found]
    return ", ".join(dict.fromkeys(_with_type(where, part) for where, part in named))


def _first(step: str) -> str:
    """Return a step as the first one of a path."""
    return step.removeprefix(": ") if step.startswith(": ") else f"the object{step}"


def _with_type(where: str, value: object) -> str:
    name = an(f"{type(value).__module__}.{type(value).__qualname__}")
    return f"{where} ({name})"


def _references(value: object) -> Iterator[tuple[str, object]]:
    """Yield what travels with a value: with a function what its code uses, else its parts."""
    if isinstance(value, MethodType):
        yield from _references(value.__func__)
        yield ": the object", value.__self__
    elif isinstance(value, FunctionType):
        yield from _used_by(value)
    elif isinstance(value, functools.partial):
        yield ": the function of the partial", value.func
        yield from ((f": its argument {at}", part) for at, part in enumerate(value.args))
        yield from ((f": its argument {name!r}", part) for name, part in value.keywords.items())
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _references(value.__func__)
    elif isinstance(value, type):
        for name, part in vars(value).items():
            if name[:2] != "__" or isinstance(part, FunctionType):
                yield f".{name}", part
    elif not type(value).__module__.startswith("multiprocessing."):
        yield from parts_of(value)
        yield f": its class {type(value).__qualname__}", type(value)


def _used_by(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield what the code of a function, and the code within it, refers to; then its defaults."""
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        # An empty cell raises ValueError.
        with contextlib.suppress(ValueError):
            yield f": the variable {name!r}", cell.cell_contents
    for name in dict.fromkeys(_names_in(function.__code__)):
        if name in function.__globals__:
            yield f": the global {name!r}", function.__globals__[name]
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield ": a default argument", default


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        # The code of a lambda, a comprehension or an inner function.
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
