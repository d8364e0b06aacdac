"""An error <-> bytes, with its traceback, causes and notes.

    encode_error(error) -> bytes                   decode_error(bytes) -> the error

Errors go by tblib. Four of its traps are avoided:

- It is never installed, since that would change how all exceptions of the process are pickled.
- A class with an `__init__` in C keeps its arguments.
- Long tracebacks are cut in the middle.
- The worker rebuilds each error first. One that does not survive arrives as WorkerError with its
  traceback as text; a cause that does not survive is replaced in the same way.

A traceback keeps the columns that Python 3.11 and later underline (`~~~~~^^^^`). Its frames are
made as tblib makes them: by running a line of code that raises, under the other's names.
"""

from __future__ import annotations

import builtins
import functools
import io
import itertools
import pickle
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType, TracebackType
from typing import Any, NamedTuple

from tblib import pickling_support

from enqueuer.common.text import str_of
from enqueuer.errors import WorkerError
from enqueuer.transport.culprit import name_of

Columns = tuple[int | None, int | None, int | None]
"""The last line, the first column and the last one, in bytes from 0; None if unknown."""

_UNKNOWN: Columns = (None, None, None)
_STUB = compile("raise Exception", "<string>", "exec")
# Units of two bytes of code that an entry of a line table describes.
_MOST_UNITS = 8
# Kinds of entries, of Objects/locations.md of CPython.
_WITHOUT_COLUMNS, _WITH_COLUMNS = 13, 14


class Place(NamedTuple):
    """The place of a frame."""

    file: str
    function: str
    line: int
    columns: Columns
    # Globals from which the source is found.
    names: dict[str, Any]


def reduce_traceback(tb: TracebackType) -> tuple[Any, tuple[Any, ...]]:
    """Reduce a traceback for pickle: to the function that rebuilds it, and its arguments."""
    return rebuilt, (list(_places(tb)),)


def rebuilt(places: Sequence[Place]) -> TracebackType | None:
    """Return a traceback whose frames are in these places, the outermost first."""
    result = None
    for place in reversed(places):
        frame = _raised_at(place)
        result = TracebackType(result, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return result


def _places(tb: TracebackType | None) -> Iterator[Place]:
    while tb is not None:
        frame = tb.tb_frame
        code, known = frame.f_code, frame.f_globals
        names: dict[str, Any] = {
            name: known[name] for name in ("__file__", "__name__") if name in known
        }
        yield Place(code.co_filename, code.co_name, tb.tb_lineno, _columns_of(tb), names)
        tb = tb.tb_next


def _columns_of(tb: TracebackType) -> Columns:
    if sys.version_info >= (3, 11) and tb.tb_lasti >= 0:
        positions = tb.tb_frame.f_code.co_positions()
        at = next(itertools.islice(positions, tb.tb_lasti // 2, None), None)
        if at is not None and at[0] == tb.tb_lineno:
            return at[1], at[2], at[3]
    return _UNKNOWN


def _raised_at(place: Place) -> TracebackType:
    """Return a traceback of one frame, which is in a place."""
    code = _STUB.replace(co_firstlineno=place.line, co_filename=place.file, co_name=place.function)
    if sys.version_info >= (3, 11):
        code = code.replace(
            co_qualname=place.function, co_linetable=_line_table(code, place.line, place.columns)
        )
    try:
        exec(code, dict(place.names))
    except Exception as error:
        tb = error.__traceback__
        assert tb is not None and tb.tb_next is not None
        return tb.tb_next
    raise AssertionError("the code did not raise")


def _line_table(code: CodeType, line: int, columns: Columns) -> bytes:
    """Return a line table in which all instructions have the same place."""
    last, begin, end = columns
    if last is None or begin is None or end is None or last < line:
        kind, place = _WITHOUT_COLUMNS, b"\0"
    else:
        kind = _WITH_COLUMNS
        place = b"\0" + b"".join(map(_varint, (last - line, begin + 1, end + 1)))
    left, table = len(code.co_code) // 2, b""
    while left:
        units = min(left, _MOST_UNITS)
        table += bytes([0x80 | kind << 3 | units - 1]) + place
        left -= units
    return table


def _varint(number: int) -> bytes:
    """Return a number in groups of six bits, the lowest first, with a mark at all but the last.

    Example:
        >>> list(_varint(5)), list(_varint(200))
        ([5], [72, 3])
    """
    groups = []
    while number >= 64:
        groups.append(number & 63 | 64)
        number >>= 6
    return bytes([*groups, number])


# Frames of a traceback; recursion limits make pickling of some hundreds fail.
MOST_FRAMES = 50
_HEAD_FRAMES = 20

_BUILTIN_REDUCERS = (BaseException.__reduce__, OSError.__reduce__)
# Python 3.10 has no groups.
_GROUP: type | tuple[()] = getattr(builtins, "BaseExceptionGroup", ())


def reduce(obj: object) -> Any:
    """Return what pickle needs for an exception or a traceback; NotImplemented for others."""
    if isinstance(obj, TracebackType):
        return reduce_traceback(_cut(obj))
    if isinstance(obj, BaseException):
        return _reduce_error(obj)
    return NotImplemented


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
    """Return `tb` with at most `MOST_FRAMES` frames: the first and the last ones."""
    frames: list[TracebackType] = []
    here: TracebackType | None = tb
    while here is not None:
        frames.append(here)
        here = here.tb_next
    if len(frames) <= MOST_FRAMES:
        return tb
    kept: Sequence[TracebackType] = frames[:_HEAD_FRAMES] + frames[_HEAD_FRAMES - MOST_FRAMES :]
    result: TracebackType | None = None
    for frame in reversed(kept):
        result = TracebackType(result, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    assert result is not None
    return result


def text_of(error: BaseException) -> str:
    """Return an error and its traceback as text."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as trouble:
        # A `__str__` or `__repr__` of the user may fail.
        return f"(no traceback: {str_of(trouble, repr)})"


def message_of(error: BaseException) -> str:
    """Return the class of an error and its text."""
    return f"{name_of(type(error))}: {str_of(error)}"


def encode_error(error: BaseException) -> bytes:
    """Encode an error with its traceback, causes and notes; as text if it cannot be rebuilt."""
    text, message, why = text_of(error), message_of(error), ""
    try:
        for pickler in _picklers():
            try:
                data = _dump(pickler, error)
                copy = _load(data)
                if type(copy) is not type(error) or str(copy) != str(error):
                    raise ValueError("the error changes when it is pickled")
                return pickle.dumps((data, message, text))
            # Methods of the user may raise anything, also what would end the worker.
            except BaseException as trouble:
                why = str_of(trouble)
    except (ImportError, OSError, MemoryError) as trouble:
        # A process without descriptors or memory cannot import cloudpickle.
        why = f"{why}; {str_of(trouble)}"
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
        loaded.append(str_of(trouble, repr))
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
        return reduce(obj)


def _picklers() -> Iterator[Any]:
    """Yield the picklers that may send an error, the one that should be tried first."""
    yield _PlainPickler
    # Few errors need cloudpickle, whose import takes some milliseconds.
    yield from _picklers_by_value()


@functools.cache
def _picklers_by_value() -> tuple[Any, Any]:
    import cloudpickle

    class CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
        """A pickler of errors whose classes plain pickle cannot find by name."""

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, (TracebackType, BaseException)):
                return reduce(obj)
            return super().reducer_override(obj)

    class LonePickler(CloudPickler):
        """A pickler that sends errors which the first one refers to, as its causes, as text."""

        is_first = True

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, BaseException):
                if not self.is_first:
                    return WorkerError, (message_of(obj), text_of(obj))
                self.is_first = False
            return super().reducer_override(obj)

    return CloudPickler, LonePickler
