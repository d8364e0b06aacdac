"""An error <-> bytes, with its traceback, causes and notes.

    encode_error(error) -> bytes                   decode_error(bytes) -> the error

Errors go by tblib, and their tracebacks by `tracebacks.py`. Four of tblib's traps are avoided:

- It is never installed, since that would change how all exceptions of the process are pickled.
- A class with an `__init__` in C keeps its arguments.
- Long tracebacks are cut in the middle.
- The worker rebuilds each error first. One that does not survive arrives as WorkerError with its
  traceback as text; a cause that does not survive is replaced in the same way.
"""

from __future__ import annotations

import builtins
import io
import pickle
import threading
import traceback
from collections.abc import Sequence
from types import FunctionType, TracebackType
from typing import Any

import cloudpickle
from tblib import pickling_support

from enqueuer.errors import WorkerError
from enqueuer.transport import tracebacks
from enqueuer.transport.culprit import name_of

# Frames of a traceback; recursion limits make pickling of some hundreds fail.
_MOST_FRAMES = 50
_HEAD_FRAMES = 20

_BUILTIN_REDUCERS = (BaseException.__reduce__, OSError.__reduce__)
# Python 3.10 has no groups.
_GROUP: type | tuple[()] = getattr(builtins, "BaseExceptionGroup", ())


def encode_error(error: BaseException) -> bytes:
    """Encode an error with its traceback, causes and notes; as text if it cannot be rebuilt."""
    text, message, why = _text_of(error), _message_of(error), ""
    for pickler in (_PlainPickler, _CloudPickler, _LonePickler):
        try:
            data = _dump(pickler, error)
            copy = _load(data)
            if type(copy) is not type(error) or str(copy) != str(error):
                raise ValueError("the error changes when it is pickled")
            return pickle.dumps((data, message, text))
        except Exception as trouble:
            why = _str_of(trouble)
    return pickle.dumps((None, f"{message} (it could not be pickled: {why})", text))


def decode_error(data: bytes) -> BaseException:
    """Return a fresh copy of the error; WorkerError if it cannot be rebuilt in this process."""
    pickled, message, text = pickle.loads(data)
    if pickled is None:
        return WorkerError(message, text)
    # The frames that tblib makes are linked to those that called it, which would keep all that
    # the loop knows for as long as the error lives. So it is called where there are no others.
    loaded: list[BaseException | str] = []
    # An event, as join() would make a thread that Python does not know known to it.
    done = threading.Event()
    thread = threading.Thread(target=_load_into, args=(loaded, pickled, done), daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # The interpreter is ending, and there can be no more threads.
        _load_into(loaded, pickled, done)
    done.wait()
    error = loaded.pop()
    if isinstance(error, BaseException):
        return error
    return WorkerError(f"{message} (it could not be rebuilt here: {error})", text)


def _load_into(loaded: list[BaseException | str], data: bytes, done: threading.Event) -> None:
    """Append an error to a list, or the reason why not; keep nothing of it in this frame."""
    try:
        loaded.append(_load(data))
    except BaseException as trouble:
        loaded.append(repr(trouble))
    finally:
        done.set()


def _load(data: bytes) -> BaseException:
    return pickle.loads(data)  # type: ignore[no-any-return]  # encode_error() has encoded one


def _dump(pickler: Any, error: BaseException) -> bytes:
    file = io.BytesIO()
    pickler(file, protocol=5).dump(error)
    return file.getvalue()


class _PlainPickler(pickle.Pickler):
    """A pickler that sends exceptions and tracebacks by tblib, without installing it."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, TracebackType):
            return tracebacks.reduce(_cut(obj))
        if isinstance(obj, BaseException):
            return _reduce_error(obj)
        return NotImplemented


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """A pickler of errors whose classes plain pickle cannot find by name."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (TracebackType, BaseException)):
            return _PlainPickler.reducer_override(self, obj)
        return super().reducer_override(obj)


class _LonePickler(_CloudPickler):
    """A pickler that sends errors which the first one refers to, as its causes, as text."""

    _is_first = True

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException):
            if not self._is_first:
                return WorkerError, (_message_of(obj), _text_of(obj))
            self._is_first = False
        return super().reducer_override(obj)


def _reduce_error(error: BaseException) -> Any:
    """Reduce an error by tblib, with the arguments of an `__init__` in C, which tblib loses."""
    own_reduce = type(error).__reduce__ not in _BUILTIN_REDUCERS
    if own_reduce or isinstance(type(error).__init__, FunctionType):
        return pickling_support.pickle_exception(error)
    reduced = error.__reduce__()
    assert isinstance(reduced, tuple)
    function, args, *state = reduced
    if isinstance(error, _GROUP):
        args = (error.message, error.exceptions)  # type: ignore[attr-defined]  # 3.10 has none
    links = (
        error.__cause__,
        error.__traceback__,
        error.__context__,
        error.__suppress_context__,
        getattr(error, "__notes__", None),
    )
    return (pickling_support.unpickle_exception, (function, args, *links), *state)


def _cut(tb: TracebackType) -> TracebackType:
    """Return `tb` with at most `_MOST_FRAMES` frames: the first and the last ones."""
    frames: list[TracebackType] = []
    here: TracebackType | None = tb
    while here is not None:
        frames.append(here)
        here = here.tb_next
    if len(frames) <= _MOST_FRAMES:
        return tb
    kept: Sequence[TracebackType] = frames[:_HEAD_FRAMES] + frames[_HEAD_FRAMES - _MOST_FRAMES :]
    result: TracebackType | None = None
    for frame in reversed(kept):
        result = TracebackType(result, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    assert result is not None
    return result


def _text_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception as trouble:
        # A `__str__` or `__repr__` of the user may fail.
        return f"(no traceback: {trouble!r})"


def _str_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text is not available)"


def _message_of(error: BaseException) -> str:
    return f"{name_of(type(error))}: {_str_of(error)}"
