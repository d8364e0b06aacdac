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

import io
import pickle
import threading
from collections.abc import Iterator
from typing import Any

from enqueuer.common.text import str_of
from enqueuer.errors import WorkerError
from enqueuer.transport.error_parts import message_of, reduce, text_of


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
    from enqueuer.transport import errors_by_value

    yield errors_by_value.CloudPickler
    yield errors_by_value.LonePickler
