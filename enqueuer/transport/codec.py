"""An item, or an error, <-> a pickle and the large buffers beside it.

    Encoder().encode(value) -> (pickle, buffers)   decode(pickle, buffers) -> value
    encode_error(error) -> bytes                   decode_error(bytes) -> the error

Items: pickle protocol 5 with the large buffers out of band. Plain pickle is tried first, since
it is fast; classes and functions of `__main__`, or local ones, need cloudpickle, which brings
them back as the very same class if this process has sent them.

Two kinds of objects are pickled in our own way. A numpy array becomes `ndarray(shape, dtype,
buffer)`, which is three to four times as fast as numpy's own way for small ones (it looks up
fewer names) and also works out of band for what numpy would copy into the pickle: datetimes and
arrays that are not contiguous, which are so copied once and not twice. A torch tensor goes as
`tensors` says. Subclasses keep their own ways.

Errors: by tblib, and their tracebacks by `tracebacks`. Four of tblib's traps are gone around: it
is never installed, since that would change how all exceptions of the process are pickled; a
class with an `__init__` in C keeps its arguments; long tracebacks are cut in the middle; and
each error is tried in the worker first, so that one which does not survive arrives as
WorkerError with its traceback as text; a cause that does not survive is replaced so, too.
"""

from __future__ import annotations

import builtins
import copyreg
import io
import pickle
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from pickle import PickleBuffer
from types import FunctionType, TracebackType
from typing import Any

import cloudpickle
import numpy as np
from tblib import pickling_support

from enqueuer.errors import ItemNotPicklable, WorkerError
from enqueuer.formats import an
from enqueuer.transport import tensors, tracebacks
from enqueuer.transport.blocks import OUT_OF_BAND_BYTES

_MOST_BUFFERS = 1024  # out of band; their table must fit into a frame

_DEEPEST_CULPRIT = 100  # steps into a nest; a message that names more of them helps nobody

_MOST_FRAMES = 50  # of a traceback; recursion limits make pickling of some hundreds fail
_HEAD_FRAMES = 20

SCALARS = frozenset({int, float, bool, str, bytes})  # need no pickler of our own

_MOST_DTYPES = 1000  # remembered; a program that makes more of them starts anew

Buffer = memoryview | np.ndarray
"""Bytes beside a pickle: contiguous ones, or an array that is not."""


class Encoder:
    """Turns items into pickles; for one thread.

    Attributes:
        arrays: The large numpy arrays that were encoded since this list was cleared.
    """

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self._chunks: list[bytes] = []
        self._buffers: list[Buffer] = []
        self._strided: dict[int, np.ndarray] = {}
        self.write = self._chunks.append
        # one pickler for all items: to make one costs as much as to pickle a small item
        self._pickler = pickle.Pickler(self, protocol=5, buffer_callback=self._keep_in_band)
        self._pickler.dispatch_table = _Reducers(self._reduce_array)

    def encode(self, value: object) -> tuple[bytes, Sequence[Buffer]]:
        """Return `value` as a pickle and the buffers that belong beside it.

        The buffers are views of the value's own memory: use them before it changes.

        Raises:
            ItemNotPicklable: Neither pickle nor cloudpickle can; the message names the culprit.
        """
        try:
            self._pickler.dump(value)
        except Exception as first:
            self._take()
            return self._by_cloudpickle(value, first), self._take()[1]
        except BaseException:
            self._take()
            raise
        return self._take()

    def _take(self) -> tuple[bytes, Sequence[Buffer]]:
        """Return what the pickler has made, and have it forget the item."""
        chunks, buffers = self._chunks, self._buffers
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._pickler.clear_memo()
        if not buffers:
            return data, ()
        self._buffers = []
        return data, buffers

    def _by_cloudpickle(self, value: object, first: Exception) -> bytes:
        try:
            data: bytes = cloudpickle.dumps(value, protocol=5, buffer_callback=self._keep_in_band)
        except Exception as second:
            raise ItemNotPicklable(_culprit(value, first)) from second
        return data

    def _keep_in_band(self, buffer: PickleBuffer) -> bool:
        """Take a buffer out of the pickle if it is large; called by the pickler."""
        view: Buffer | None = self._strided.pop(id(buffer), None) if self._strided else None
        if view is None:
            view = buffer.raw()
            if view.nbytes < OUT_OF_BAND_BYTES or len(self._buffers) == _MOST_BUFFERS:
                return True
        self._buffers.append(view)
        return False

    def _reduce_array(self, array: np.ndarray) -> Any:
        dtype = _portable_dtypes[array.dtype]
        if dtype is None:
            return array.__reduce_ex__(5)
        flags = array.flags
        is_large = array.nbytes >= OUT_OF_BAND_BYTES
        if is_large:
            self.arrays.append(array)
        elif flags.carray:  # contiguous and writable: a bytearray spares the way through a buffer
            try:
                return np.ndarray, (array.shape, dtype, bytearray(array.data))
            except ValueError:  # a datetime, for example: see _buffer_of
                pass
        if flags.c_contiguous:
            return np.ndarray, (array.shape, dtype, _buffer_of(array))
        if flags.f_contiguous:
            return np.ndarray, (array.shape, dtype, _buffer_of(array), 0, array.strides)
        if not is_large or len(self._buffers) == _MOST_BUFFERS:
            return np.ndarray, (array.shape, dtype, _buffer_of(array.copy()))
        # It is to be copied straight into its block. A buffer that pickle accepts stands for it;
        # the pickler's memo keeps that one, and so its id, for as long as this item takes.
        stand_in = PickleBuffer(bytearray())
        self._strided[id(stand_in)] = array
        return np.ndarray, (array.shape, dtype, stand_in)


def decode(data: bytes | memoryview, buffers: Iterable[memoryview]) -> Any:
    """Return what an encoder was given; arrays are views of `buffers`."""
    return pickle.loads(data, buffers=buffers)


class _Reducers(dict[type, Callable[[Any], Any]]):
    """How to pickle objects of some types; for all others it asks `copyreg`, as pickle does."""

    def __init__(self, reduce_array: Callable[[np.ndarray], Any]) -> None:
        super().__init__({np.ndarray: reduce_array, np.memmap: _reduce_memmap})

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        # told by its name, since whoever has none of these should not have to import them
        own = _BY_NAME.get((kind.__module__, kind.__qualname__))
        if own is None:
            return copyreg.dispatch_table[kind]
        self[kind] = own
        return own


class _PortableDtypes(dict[np.dtype[Any], "str | np.dtype[Any] | None"]):
    """For each dtype what says it in a pickle: a string if that is enough; None for objects."""

    def __missing__(self, dtype: np.dtype[Any]) -> str | np.dtype[Any] | None:
        if len(self) >= _MOST_DTYPES:
            self.clear()
        said: str | np.dtype[Any] | None = dtype
        if dtype.hasobject or dtype.itemsize == 0:
            said = None
        elif dtype.metadata is None and dtype.names is None and np.dtype(dtype.str) == dtype:
            said = dtype.str
        self[dtype] = said
        return said


_portable_dtypes = _PortableDtypes()


def _buffer_of(array: np.ndarray) -> PickleBuffer:
    """Return the memory of a contiguous array, whatever its dtype."""
    try:
        return PickleBuffer(array)  # type: ignore[arg-type]  # numpy tells its types of no buffer
    except (BufferError, ValueError):  # a datetime, or a dtype that numpy does not know itself
        flat = (array if array.flags.c_contiguous else array.T).reshape(-1)
        return PickleBuffer(flat.view(np.uint8))  # type: ignore[arg-type]  # the same


def _reduce_memmap(array: np.memmap[Any, Any]) -> Any:
    """A slice of a mapped file arrives as a memmap, too, but of memory."""
    return _as_memmap, (np.asarray(array),)


def _as_memmap(array: np.ndarray) -> np.ndarray:
    return array.view(np.memmap)


def _reduce_masked(array: Any) -> Any:
    if array.dtype.hasobject or array.dtype.names is not None or array.baseclass is not np.ndarray:
        return array.__reduce_ex__(5)
    mask = array._mask
    return _as_masked, (array.data, mask if mask.ndim else None, array._fill_value, array.hardmask)


def _as_masked(data: np.ndarray, mask: np.ndarray | None, fill: Any, hard: bool) -> np.ndarray:
    mask_or_none = np.ma.nomask if mask is None else mask
    array: np.ndarray = np.ma.MaskedArray(data, mask_or_none, copy=False, hard_mask=hard)
    array._fill_value = fill  # type: ignore[attr-defined]  # the setter would convert it
    return array


_BY_NAME: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("torch", "Tensor"): tensors.reduce_tensor,
    ("numpy.ma", "MaskedArray"): _reduce_masked,
    ("numpy.ma.core", "MaskedArray"): _reduce_masked,
}


# --- who cannot be pickled ---------------------------------------------------------------------


def _culprit(value: object, error: BaseException) -> str:
    """Say which part of a nest cannot be pickled, and why."""
    path, part = find_culprit("item", value)
    return (
        f"{path} is {an(_name_of(type(part)))}, which cannot be sent between processes ({error}); "
        "yield arrays and plain data, or use backend='thread', which pickles nothing"
    )


def find_culprit(
    path: str,
    value: object,
    parts: Callable[[object], Iterable[tuple[str, object]]] | None = None,
) -> tuple[str, object]:
    """Return the smallest part of `value` that cannot be pickled, and where it is.

    Args:
        path: Name of `value`.
        value: What cannot be pickled.
        parts: Returns the parts of a value and the step to each, which is appended to the path;
            None: `parts_of`.
    """
    seen: set[int] = set()  # a nest may contain itself
    while len(seen) < _DEEPEST_CULPRIT:
        seen.add(id(value))
        for step, part in (parts or parts_of)(value):
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


def parts_of(value: object) -> Iterable[tuple[str, object]]:
    """Return the parts of a container, or the attributes of an object, with the step to each."""
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
    # The frames that tblib makes are linked to those that called it, which would keep all that
    # the loop knows for as long as the error lives. So it is called where there are no others.
    loaded: list[BaseException | str] = []
    done = threading.Event()  # join() would make a thread that Python does not know known to it
    thread = threading.Thread(target=_load_into, args=(loaded, pickled, done), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # there can be no more threads
        _load_into(loaded, pickled, done)
    done.wait()
    error = loaded.pop()
    if isinstance(error, BaseException):
        return error
    return WorkerError(f"{message} (it could not be rebuilt here: {error})", text)


def _load_into(loaded: list[BaseException | str], data: bytes, done: threading.Event) -> None:
    """Put an error into a list, or else the reason; keep nothing of it in this frame."""
    try:
        loaded.append(_load_error(data))
    except BaseException as trouble:
        loaded.append(repr(trouble))
    finally:
        done.set()


def _load_error(data: bytes) -> BaseException:
    return pickle.loads(data)  # type: ignore[no-any-return]  # it was one when it was encoded


def _dump_error(pickler: Any, error: BaseException) -> bytes:
    file = io.BytesIO()
    pickler(file, protocol=5).dump(error)
    return file.getvalue()


class _PlainErrorPickler(pickle.Pickler):
    """A pickler that sends exceptions and tracebacks by tblib, without installing it."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, TracebackType):
            return tracebacks.reduce(_cut(obj))
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
