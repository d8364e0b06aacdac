"""The policy for failures of workers: skip and count them, or raise them in the loop."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable

from enqueuer.common import interrupts
from enqueuer.common.text import str_of
from enqueuer.enqueuers.replay import ATTRIBUTE, Origin
from enqueuer.errors import WorkerError
from enqueuer.workers import logs
from enqueuer.workers.messages import Failure, Reported
from enqueuer.workers.plan import OnError


class FailurePolicy:
    """Counts and skips failures, or prepares them to be raised, as the user's options say.

    Args:
        on_error: Option of this name.
        max_errors: Number of errors that may be skipped; None if that has no bound.
        count: Number of errors that were skipped before, in the run whose state was loaded.

    Attributes:
        count: Number of errors that were skipped or reported since the start, or since the start
            of the run whose state was loaded.

    Example:
        >>> policy = FailurePolicy(on_error="skip", max_errors=1)
        >>> one, two = (Failure(0, number, KeyError(number), skipped=True) for number in (3, 5))
        >>> policy.skips(one, repr), policy.skips(one, repr)  # a new worker sends it again
        (True, True)
        >>> policy.skips(two, repr), policy.count
        (False, 2)
    """

    def __init__(self, on_error: OnError, max_errors: int | None, count: int = 0) -> None:
        self.count = count
        self._on_error = on_error
        self._max_errors = max_errors
        # Of each shard of this epoch, the number of the item that was skipped last, and which of
        # its reports that was.
        self._skipped: dict[int, tuple[int, float]] = {}
        self._logged: set[str] = set()
        self._raised: _Repeatable | None = None

    def begin_epoch(self) -> None:
        """Forget what was skipped in the epoch before."""
        self._skipped = {}

    @property
    def has_skipped(self) -> bool:
        """Whether anything was skipped in this epoch."""
        return bool(self._skipped)

    def skips(self, failure: Failure, where: Callable[[Failure], str]) -> bool:
        """Count and log a failure; return False if it must be raised when its turn comes.

        Args:
            failure: Failure that came from a worker.
            where: Returns where it happened, for the log.
        """
        if not failure.skipped:
            return False
        # Reports come before the item.
        nth = failure.nth if isinstance(failure, Reported) else math.inf
        place = failure.number, nth
        if place <= self._skipped.get(failure.shard, (-1, 0)):
            # A worker that replaces another one has sent it again.
            return True
        self._skipped[failure.shard] = place
        self.count += 1
        if self._max_errors is not None and self.count > self._max_errors:
            return False
        text = "; ".join([str_of(failure.error, repr), *getattr(failure.error, "__notes__", ())])
        if isinstance(failure, Reported):
            if not failure.log or text in self._logged:
                return True
            self._logged.add(text)
        elif self._on_error != "skip":
            return True
        logs.log_error(failure.error, f"skipped {where(failure)}: {text}")
        return True

    def error_of(
        self, failure: Failure, where: str, origin: Callable[[], Origin]
    ) -> tuple[BaseException, BaseException]:
        """Return the exception to raise now, and the one to keep for the next time.

        Args:
            failure: Failure to be raised.
            where: Where it happened, for a note of the exception.
            origin: Returns what becomes an attribute of the exception; called the first time.
        """
        if self._raised is None:
            self._raised = _Repeatable(self._presentable(failure, where, origin()))
        return self._raised.once_more(), self._raised.error

    def _presentable(self, failure: Failure, where: str, origin: Origin) -> BaseException:
        """Return an exception that may be raised in the loop, with a note on its origin."""
        error = failure.error
        if isinstance(error, Exception) and not isinstance(
            error, (StopIteration, StopAsyncIteration)
        ):
            shown: BaseException = error
        else:
            # Raised as itself it would end the loop, or the program, as if all were well.
            shown = WorkerError(f"the generator raised {str_of(error, repr)} {where}")
            shown.__cause__ = error
        notes = [*getattr(shown, "__notes__", ()), where]
        if failure.skipped:
            notes.append(f"{self.count} errors are more than max_errors={self._max_errors}")
        # A class may forbid new attributes.
        with contextlib.suppress(Exception):
            # Python 3.10 has no add_note().
            shown.__notes__ = notes
            setattr(shown, ATTRIBUTE, origin)
        return shown


class _Repeatable:
    """A failure that was raised once and will be again: each time as an exception of its own."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self._traceback = error.__traceback__

    def once_more(self) -> BaseException:
        """Return the error itself, later a copy with the frames of the worker only.

        The exception that was returned is not kept: its traceback grows frames of the loop, and
        would keep alive all objects that the loop knows.
        """
        error = self.error
        # Not every class can be copied, and its methods may raise anything.
        with interrupts.held(), contextlib.suppress(BaseException):
            twin = copy.copy(error)
            if type(twin) is type(error) and str(twin) == str(error):
                twin.__cause__, twin.__context__ = error.__cause__, error.__context__
                twin.__suppress_context__ = error.__suppress_context__
                # Some packages have exceptions copied with their frames, from which all frames of
                # the loop can be reached if the worker runs in its thread.
                twin.__traceback__ = None
                self.error = twin
        return error.with_traceback(self._traceback)
