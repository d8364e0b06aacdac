"""What an error is reduced to for pickle, with its traceback; and its text.

reduce(error or traceback) -> what pickle needs, by tblib        text_of(), message_of()
"""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Sequence
from types import FunctionType, TracebackType
from typing import Any

from tblib import pickling_support

from enqueuer.common.text import str_of
from enqueuer.transport import tracebacks
from enqueuer.transport.culprit import name_of

# Frames of a traceback; recursion limits make pickling of some hundreds fail.
MOST_FRAMES = 50
_HEAD_FRAMES = 20

_BUILTIN_REDUCERS = (BaseException.__reduce__, OSError.__reduce__)
# Python 3.10 has no groups.
_GROUP: type | tuple[()] = getattr(builtins, "BaseExceptionGroup", ())


def reduce(obj: object) -> Any:
    """Return what pickle needs for an exception or a traceback; NotImplemented for others."""
    if isinstance(obj, TracebackType):
        return tracebacks.reduce(_cut(obj))
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
