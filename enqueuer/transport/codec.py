"""An item, or an error, <-> a pickle and the large buffers beside it.

    encode(value) -> (pickle, buffers)         decode(pickle, buffers) -> value
    encode_error(error) -> bytes               decode_error(bytes) -> the error

Items: pickle protocol 5 with the large buffers out of band. Plain pickle is tried first, since
it is fast; classes and functions of `__main__`, or local ones, need cloudpickle, which brings
them back as the very same class if this process has sent them.

Errors: by tblib, which carries the frames of the traceback. Four of its traps are gone around:
it is never installed, since that would change how all exceptions of the process are pickled; a
class with an `__init__` in C keeps its arguments; long tracebacks are cut in the middle; and
each error is tried in the worker first, so that one which does not survive arrives as
WorkerError with its traceback as text; a cause that does not survive is replaced so, too.
"""

from __future__ import annotations

import builtins
import io
import pickle
import traceback
from collections.abc import Iterable, Sequence
from types import FunctionType, TracebackType
from typing import Any

import cloudpickle
from tblib import pickling_support

from enqueuer.errors import ItemNotPicklable, WorkerError

OUT_OF_BAND_BYTES = 16 * 1024  # smaller buffers are cheaper inside the pickle

_MOST_BUFFERS = 1024  # out of band; their table must fit into a packet

_DEEPEST_CULPRIT = 100  # steps into a nest; a message that names more of them helps nobody

_MOST_FRAMES = 50  # of a traceback; recursion limits make pickling of some hundreds fail
_HEAD_FRAMES = 20


def encode(value: object) -> tuple[bytes, list[memoryview]]:
    """Return `value` as a pickle and the buffers that belong beside it.

    The buffers are views of the value's own memory: use them before it changes.

    Raises:
        ItemNotPicklable: Neither pickle nor cloudpickle can; the message names the culprit.
    """
    try:
        return _dump(pickle.dumps, value)
    except Exception as first:
        try:
            return _dump(cloudpickle.dumps, value)
        except Exception as second:
            raise ItemNotPicklable(_culprit(value, first)) from second


def decode(data: bytes | memoryview, buffers: Iterable[memoryview]) -> Any:
    """Return what `encode` was given; arrays are views of `buffers`."""
    return pickle.loads(data, buffers=buffers)


def _dump(dumps: Any, value: object) -> tuple[bytes, list[memoryview]]:
    buffers: list[memoryview] = []

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < OUT_OF_BAND_BYTES or len(buffers) == _MOST_BUFFERS:
            return True
        buffers.append(view)
        return False

    return dumps(value, protocol=5, buffer_callback=keep_in_band), buffers


# --- who cannot be pickled ---------------------------------------------------------------------


def _culprit(value: object, error: BaseException) -> str:
    """Say which part of a nest cannot be pickled, and why."""
    path, part = find_culprit("item", value)
    return (
        f"{path} is a {_name_of(type(part))}, which cannot be sent between processes ({error}); "
        "yield arrays and plain data, or use backend='thread', which pickles nothing"
    )


def find_culprit(path: str, value: object) -> tuple[str, object]:
    """Return the smallest part of `value` that cannot be pickled, and where it is."""
    seen: set[int] = set()  # a nest may contain itself
    while len(seen) < _DEEPEST_CULPRIT:
        seen.add(id(value))
        for step, part in _parts(value):
            if id(part) not in seen and not is_picklable(part):
                path, value = path + step, part
                break
        else:
            break
    return path, value


def is_picklable(value: object) -> bool:
    """Tell whether cloudpickle can pickle `value`, by trying."""
    try:
        cloudpickle.dumps(value, protocol=5)
    except Exception:
        return False
    return True


def _parts(value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not isinstance(value, (type, FunctionType)):
        return [(f".{name}", part) for name, part in attributes.items()]
    return []


# --- errors ------------------------------------------------------------------------------------


def encode_error(error: BaseException) -> bytes:
    """Return `error` with its traceback, causes and notes; or as text if that cannot be."""
    text, message, why = _text_of(error), _message_of(error), ""
    for pickler in (_PlainErrorPickler, _ErrorPickler, _LoneErrorPickler):
        try:
            data = _dump_error(pickler, error)
            copy = _load_error(data)
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
    try:
        return _load_error(pickled)
    except Exception as trouble:
        return WorkerError(f"{message} (it could not be rebuilt here: {trouble!r})", text)


def _load_error(data: bytes) -> BaseException:
    error = pickle.loads(data)
    assert isinstance(error, BaseException)
    return error


def _dump_error(pickler: Any, error: BaseException) -> bytes:
    file = io.BytesIO()
    pickler(file, protocol=5).dump(error)
    return file.getvalue()


class _PlainErrorPickler(pickle.Pickler):
    """A pickler that sends exceptions and tracebacks by tblib, without installing it."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, TracebackType):
            return pickling_support.pickle_traceback(_cut(obj))
        if isinstance(obj, BaseException):
            return _reduce_error(obj)
        return NotImplemented


class _ErrorPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """The same, for classes that plain pickle cannot find by name."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (TracebackType, BaseException)):
            return _PlainErrorPickler.reducer_override(self, obj)
        return super().reducer_override(obj)


class _LoneErrorPickler(_ErrorPickler):
    """The same, but errors that the first one refers to, as its causes, travel as text."""

    _is_first = True

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException):
            if not self._is_first:
                return WorkerError, (_message_of(obj), _text_of(obj))
            self._is_first = False
        return super().reducer_override(obj)


def _reduce_error(error: BaseException) -> Any:
    """Reduce by tblib; but an `__init__` in C loses its arguments there, so call it again."""
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


_BUILTIN_REDUCERS = (BaseException.__reduce__, OSError.__reduce__)
# Python 3.10 has no groups
_GROUP: type | tuple[()] = getattr(builtins, "BaseExceptionGroup", ())


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
    except Exception as trouble:  # a __str__ or __repr__ of the user's that fails
        return f"(no traceback: {trouble!r})"


def _str_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be had)"


def _message_of(error: BaseException) -> str:
    return f"{_name_of(type(error))}: {_str_of(error)}"


def _name_of(kind: type) -> str:
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else (f"{kind.__module__}.{kind.__qualname__}")
    )
