"""Errors between processes: how one travels, and a message about an object that cannot travel.

    encode_error(error) -> bytes                   decode_error(bytes) -> the error
    find_culprit("item", {"x": [lock]}) -> ("item['x'][0]", lock)

An error has its traceback, causes and notes. It goes by tblib. Four of its traps are avoided:

- It is never installed, since that would change how all exceptions of the process are pickled.
- A class with an `__init__` in C keeps its arguments.
- Long tracebacks are cut in the middle.
- The worker rebuilds each error first. One that does not survive arrives as WorkerError with its
  traceback as text; a cause that does not survive is replaced in the same way.

A traceback keeps the columns that Python 3.11 and later underline (`~~~~~^^^^`). Its frames are
made as tblib makes them: by running a line of code that raises, under the other's names.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import inspect
import io
import itertools
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType, TracebackType
from typing import Any, NamedTuple

from tblib import pickling_support

from enqueuer.common.objects import attributes_of, members_of
from enqueuer.common.text import an, str_of
from enqueuer.errors import WorkerError
from enqueuer.order.messages import Empty, End, Failure
from enqueuer.workers.event_loop import NOT_AWAITED


class Place(NamedTuple):
    """The place of a frame."""

    file: str
    function: str
    line: int
    # Further lines of the expression, its first column and the last one, in bytes.
    span: tuple[int, int, int]
    # Globals from which the source is found.
    names: dict[str, Any]


def _places(tb: TracebackType | None) -> Iterator[Place]:
    while tb is not None:
        frame = tb.tb_frame
        code, known = frame.f_code, frame.f_globals
        names: dict[str, Any] = {
            name: known[name] for name in ("__file__", "__name__") if name in known
        }
        # Other programs that make code, for templates say, may give it no line.
        yield Place(code.co_filename, code.co_name, tb.tb_lineno or 0, _span_of(tb), names)
        tb = tb.tb_next


def _span_of(tb: TracebackType) -> tuple[int, int, int]:
    if sys.version_info >= (3, 11) and tb.tb_lasti >= 0:
        positions = tb.tb_frame.f_code.co_positions()
        at: Any = next(itertools.islice(positions, tb.tb_lasti // 2, None), (None,))
        # The compiler refuses columns that end before they begin.
        if at[0] == tb.tb_lineno and None not in at and (at[0], at[2]) <= (at[1], at[3]):
            return at[1] - at[0], at[2], at[3]
    # The compiler takes -1 for unknown columns.
    return 0, -1, -1


def _rebuilt(places: Sequence[Place]) -> TracebackType | None:
    """Return a traceback whose frames are in these places, the outermost first."""
    result = None
    for place in reversed(places):
        frame = _raised_at(place)
        result = TracebackType(result, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return result


def _raised_at(place: Place) -> TracebackType:
    """Return a traceback of one frame, which is in a place."""
    module: Any = ast.parse("raise Exception")
    statement = module.body[0]
    lines, *columns = place.span
    for node in (statement, statement.exc):
        node.end_lineno = 1 + lines
        node.col_offset, node.end_col_offset = columns
    code = compile(module, place.file, "exec").replace(
        co_name=place.function, co_firstlineno=place.line
    )
    if sys.version_info >= (3, 11):
        code = code.replace(co_qualname=place.function)
    try:
        exec(code, dict(place.names))
    except Exception as error:
        tb = error.__traceback__
        assert tb is not None and tb.tb_next is not None
        return tb.tb_next
    raise AssertionError("the code did not raise")


# Python 3.10 has no groups.
_GROUP: type | tuple[()] = getattr(builtins, "BaseExceptionGroup", ())

# Frames of a traceback; recursion limits make pickling of some hundreds fail.
MAX_FRAMES = 50
_HEAD_FRAMES = 20


def reduce(obj: object) -> Any:
    """Return what pickle needs for an exception or a traceback; NotImplemented for others."""
    if isinstance(obj, TracebackType):
        places = list(_places(obj))
        if len(places) > MAX_FRAMES:
            places = places[:_HEAD_FRAMES] + places[_HEAD_FRAMES - MAX_FRAMES :]
        return _rebuilt, (places,)
    if isinstance(obj, BaseException):
        # tblib loses the arguments of an `__init__` in C, unless it counts as a built-in one.
        init = type(obj).__init__
        if isinstance(init, FunctionType):
            return pickling_support.pickle_exception(obj)
        function, (kind, args, *rest), *state = pickling_support.pickle_exception(
            obj, builtin_inits=(init,)
        )
        if isinstance(obj, _GROUP):
            # The list that it was made of may have changed since.
            args = obj.message, obj.exceptions  # type: ignore[attr-defined]  # 3.10 has none
        return function, (kind, args, *rest), *state
    return NotImplemented


def text_of(error: BaseException) -> str:
    """Return an error and its traceback as text."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as trouble:
        # A `__str__` or `__repr__` of the user may fail.
        return f"(no traceback: {str_of(trouble, repr)})"


def message_of(error: BaseException) -> str:
    """Return the class of an error and its text."""
    return f"{_name_of(type(error))}: {str_of(error)}"


def encode_error(error: BaseException) -> bytes:
    """Encode an error with its traceback, causes and notes; as text if it cannot be rebuilt."""
    text, message, why = text_of(error), message_of(error), ""
    try:
        for pickler in _picklers():
            try:
                file = io.BytesIO()
                pickler(file, protocol=5).dump(error)
                data = file.getvalue()
                copy = pickle.loads(data)
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


def with_encoded_error(message: End | Failure | Empty) -> End | Failure | Empty:
    """Return a message as it can be pickled: a failure has its error as bytes."""
    if not isinstance(message, Failure):
        return message
    error: Any = encode_error(message.error)
    return dataclasses.replace(message, error=error)


def with_decoded_error(message: Any) -> Any:
    """Return a message as it was before `with_encoded_error`."""
    if not isinstance(message, Failure):
        return message
    error: Any = message.error
    return dataclasses.replace(message, error=decode_error(error))


def _load_into(loaded: list[BaseException | str], data: bytes, done: threading.Event) -> None:
    """Append an error to a list, or the reason why not; keep nothing of it in this frame."""
    try:
        loaded.append(_Unpickler(io.BytesIO(data)).load())
    except BaseException as trouble:
        loaded.append(str_of(trouble, repr))
    finally:
        done.set()


class _Unpickler(pickle.Unpickler):
    """An unpickler that imports nothing which is there.

    The loop may run while its module is imported. To import that in another thread, which pickle
    does for each class, would wait for the end of the loop.
    """

    def find_class(self, module: str, name: str) -> Any:
        try:
            return functools.reduce(getattr, name.split("."), sys.modules[module])
        except (KeyError, AttributeError):
            return super().find_class(module, name)


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
    from enqueuer.transport.definitions import Pickler

    class PicklerByValue(Pickler):
        """A pickler of errors whose classes plain pickle cannot find by name."""

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, (TracebackType, BaseException)):
                return reduce(obj)
            return super().reducer_override(obj)

    class LonePickler(PicklerByValue):
        """A pickler that sends errors which the first one refers to, as its causes, as text."""

        is_first = True

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, BaseException):
                if not self.is_first:
                    return WorkerError, (message_of(obj), text_of(obj))
                self.is_first = False
            return super().reducer_override(obj)

    return PicklerByValue, LonePickler


# --- what cannot be pickled -----------------------------------------------------------------------

# Steps into a nest; a message that names more of them is too long to help.
_DEEPEST_CULPRIT = 100


def describe_culprit(value: object, error: BaseException) -> str:
    """Return a sentence that says which part of an item cannot be pickled, and why."""
    path, part = find_culprit("item", value)
    if inspect.iscoroutine(part):
        # Without this, Python warns of it.
        part.close()
        return f"{path} is {NOT_AWAITED}"
    return (
        f"{path} is {an(_name_of(type(part)))}, which cannot be sent between processes ({error}); "
        "yield arrays and plain data, or use backend='thread', which pickles nothing"
    )


def find_culprit(
    path: str,
    value: object,
    parts: Callable[[object], Iterable[tuple[str, object]]] | None = None,
    can_send: Callable[[object], bool] | None = None,
) -> tuple[str, object]:
    """Return the smallest part of `value` that cannot be pickled, and where it is.

    Args:
        path: Name of `value`.
        value: Object that cannot be pickled.
        parts: Function that returns the parts of a value, each with the step to it, which is
            appended to the path; `parts_of` by default.
        can_send: Function that tells whether a part can be pickled; `is_picklable` by default.
    """
    # Only messages need it, and its import takes some milliseconds.
    from enqueuer.transport.definitions import is_picklable

    # A nest may contain itself.
    seen: set[int] = set()
    while len(seen) < _DEEPEST_CULPRIT:
        seen.add(id(value))
        for step, part in (parts or parts_of)(value):
            if id(part) not in seen and not (can_send or is_picklable)(part):
                path, value = path + step, part
                break
        else:
            break
    return path, value


def parts_of(value: object) -> Iterable[tuple[str, object]]:
    """Return the parts of a container, or the attributes of an object, with the step to each."""
    if isinstance(value, (dict, list, tuple)):
        members = members_of(value) or {}
        return [(f"[{key!r}]", part) for key, part in members.items()]
    if isinstance(value, (type, FunctionType)):
        return []
    return [(f".{name}", part) for name, part in attributes_of(value).items()]


def _name_of(kind: type) -> str:
    """Return the full name of a class; a built-in one without its module."""
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"
