"""Picklers of errors that plain pickle cannot send; imported when a process has such an error."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import cloudpickle

from enqueuer.errors import WorkerError
from enqueuer.transport.error_parts import message_of, reduce, text_of


class CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """A pickler of errors whose classes plain pickle cannot find by name."""

    def reducer_override(self, obj: Any) -> Any:
        """Reduce exceptions and tracebacks by tblib, the rest as cloudpickle does."""
        if isinstance(obj, (TracebackType, BaseException)):
            return reduce(obj)
        return super().reducer_override(obj)


class LonePickler(CloudPickler):
    """A pickler that sends errors which the first one refers to, as its causes, as text."""

    _is_first = True

    def reducer_override(self, obj: Any) -> Any:
        """Reduce the first exception, and replace others by `WorkerError`."""
        if isinstance(obj, BaseException):
            if not self._is_first:
                return WorkerError, (message_of(obj), text_of(obj))
            self._is_first = False
        return super().reducer_override(obj)
