"""Failures of workers: skipped and counted, or raised in the loop; and making an item again.

`Origin` says where an error came from, and runs its item once more in this process.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from enqueuer.common.text import str_of
from enqueuer.errors import InvalidState, StateMismatch, WorkerError
from enqueuer.order.messages import Failure, Reported, Ticket
from enqueuer.workers import logs
from enqueuer.workers.plan import OnError
from enqueuer.workers.shards import Seeded, Shard, Task, borrowed_globals
from enqueuer.workers.sources import LiveSource, Source, can_go_on, close, iterate
from enqueuer.workers.tasks import FETCH, TaskSource

ATTRIBUTE = "enqueuer_origin"


@dataclass
class Origin:
    """The item that an error belongs to: the attribute `enqueuer_origin` of raised errors.

    Attributes:
        random_seed: Seed of the enqueuer.
        epoch: Number of the epoch, from 0.
        item: Number of the item in its shard, or of the task in its epoch, from 0.
        shard: Index of the shard; None for a task.
        shards: Number of shards; 0 for tasks.
        worker: Name of the worker that ran it.
        element: Index of the element of the task that failed; None for a shard.
        rerun: Function that makes the item again; None after the error was pickled.
    """

    random_seed: int
    epoch: int
    item: int
    shard: int | None
    shards: int
    worker: str
    element: int | None = None
    rerun: Callable[[], Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The source that it calls need not be picklable.
        return {**self.__dict__, "rerun": None}


def replay(error: BaseException) -> Any:
    """Make the item of an error again in this process, so that a debugger can stop in it.

    The shard's generator runs in this thread from its start, with the same seeds, up to that
    item. The global random generators of this process are restored afterwards.

    Args:
        error: Exception that an enqueuer raised in this process.

    Returns:
        The item, if making it succeeds this time, for example because it could not be sent, or
        because the worker was killed.

    Raises:
        Exception: The exception of the generator, with the frames of this process.
        ValueError: The error does not come from an enqueuer, or it was pickled; in this case,
            call `replay` of an enqueuer with the same source.
        InvalidState: The error comes from a running iterator, or from reading the elements of
            tasks, which cannot be repeated.

    Example:
        >>> from enqueuer import prefetch, replay
        >>> def inverses():
        ...     for number in (2, 1, 0):
        ...         yield 1 / number
        >>> try:
        ...     for batch in prefetch(inverses): pass
        ... except ZeroDivisionError as error:
        ...     failed = error
        >>> failed.enqueuer_origin.item
        2
        >>> replay(failed)
        Traceback (most recent call last):
            ...
        ZeroDivisionError: division by zero
    """
    origin = origin_of(error)
    if origin.rerun is None:
        raise ValueError(
            "this error was pickled, and its source did not come along; call replay(error) of an "
            "enqueuer with the same source"
        )
    return origin.rerun()


def origin_of(error: BaseException) -> Origin:
    """Return the origin of an error; raise ValueError if it has none."""
    origin = getattr(error, ATTRIBUTE, None)
    if not isinstance(origin, Origin):
        raise ValueError(f"{error!r} did not come out of an enqueuer: there is nothing to replay")
    return origin


def rerun_task(
    source: TaskSource, random_seed: int, ticket: Ticket, at: int | None, seed: bool, skip: bool
) -> Any:
    """Do the task of a ticket in this process, and return its result.

    Args:
        source: Source of the elements.
        random_seed: Seed of the enqueuer that the error came from.
        ticket: Ticket of the task.
        at: Index of the element that failed.
        seed: Whether the global generators are seeded, as in a worker process.
        skip: Whether errors of other elements are skipped, as they were there.
    """
    results = []
    failed_fetch: Exception | None = None
    with _globals_of(Task(ticket.indices[0], ticket.epoch, random_seed), seed):
        try:
            elements = source.elements_of(ticket)
        except Exception as error:
            elements, failed_fetch = [FETCH] * len(ticket.indices), error
        for index, element in zip(ticket.indices, elements, strict=True):
            try:
                result = source.result(index, ticket.epoch, random_seed, element)
            except Exception:
                failed_fetch = None
                if index == at or not skip:
                    raise
                result = None
            results.append(result)
        if failed_fetch is not None and not skip:
            try:
                raise failed_fetch
            finally:
                # Without this, the error and its traceback would refer to each other.
                failed_fetch = None
        return source.item_of(ticket, results, random_seed)


def item_of(source: Source, place: tuple[int, int, int, int], number: int, seed: bool) -> Any:
    """Return item `number` of a shard, made in this process from the shard's first one on.

    Args:
        source: Source of the shard.
        place: Arguments of the `Shard`.
        number: Number of the item.
        seed: Whether the global generators are seeded, as in a worker process.
    """
    if isinstance(source, LiveSource):
        raise InvalidState(
            "a running iterator cannot be read again; pass the generator function itself"
        )
    shard = Shard(*place)
    with _globals_of(shard, seed):
        items, _ = iterate(source.open(shard))
        try:
            for at in range(number + 1):
                try:
                    item = next(items)
                except StopIteration:
                    raise StateMismatch(
                        f"shard {shard.index} ended after {at} items this time, so there is no "
                        f"item {number}: its generator does not repeat itself"
                    ) from None
                except Exception:
                    # It was skipped, if there were items after it.
                    if at == number or not can_go_on(items):
                        raise
        finally:
            close(items)
    return item


def refuse(reason: str) -> Any:
    """Raise InvalidState, in the place of an item that cannot be made again."""
    raise InvalidState(reason)


def _globals_of(place: Seeded, seed: bool) -> contextlib.AbstractContextManager[None]:
    return borrowed_globals(place) if seed else contextlib.nullcontext()


# Errors that are kept for `skipped`.
MAX_SKIPPED = 1000

_SHARD_ENDED = (
    "; if its generator raised this, it has ended: the rest of its shard is left out in this "
    "epoch, so catch the error within the generator and call shard.report(error). Another iterator "
    "ends so after 100 errors in a row"
)


class FailurePolicy:
    """Counts and skips failures, or prepares them to be raised, as the user's options say.

    Args:
        on_error: Option of this name.
        max_errors: Number of errors that may be skipped; None if that has no bound.
        count: Number of errors that were skipped before, in the run whose state was loaded.

    Attributes:
        count: Number of errors that were skipped or reported since the start, or since the start
            of the run whose state was loaded.
        skipped: The last of them: the origin and the text of each.

    Example:
        >>> policy = FailurePolicy(on_error="skip", max_errors=1)
        >>> one, two = (Failure(0, number, KeyError(number), skipped=True) for number in (3, 5))
        >>> policy.skips(one, repr, id), policy.skips(one, repr, id)  # a new worker sends it again
        (True, True)
        >>> policy.skips(two, repr, id), policy.count
        (False, 1)
    """

    def __init__(self, on_error: OnError, max_errors: int | None, count: int = 0) -> None:
        self.count = count
        self._on_error = on_error
        self._max_errors = max_errors
        self.skipped: deque[tuple[Origin, str]] = deque(maxlen=MAX_SKIPPED)
        # Of each shard of this epoch, the number of the item that was skipped last, and which of
        # its reports that was. Of each task, below 0, which of its failures that was.
        self._last: dict[int, tuple[int, float]] = {}
        # Shard and number of each error of this epoch.
        self._places: list[tuple[int, int]] = []
        # Texts of reports, and the number of the epoch, counted here, in which each was logged.
        self._logged: dict[str, int] = {}
        self._epochs = 0
        # The exception of the failure that is raised again and again, for the next time; and the
        # frames of the worker.
        self._next: BaseException | None = None
        self._traceback: TracebackType | None = None

    def begin_epoch(self) -> None:
        """Forget what was skipped in the epoch before."""
        self._last, self._places = {}, []
        self._epochs += 1

    @property
    def has_skipped(self) -> bool:
        """Whether anything was skipped in this epoch."""
        return bool(self._last)

    def count_at(self, is_before: Callable[[int, int], bool]) -> int:
        """Return the number of errors before a position.

        Args:
            is_before: Returns whether an item of this epoch comes before it.
        """
        return self.count - sum(not is_before(*place) for place in self._places)

    def skips(
        self,
        failure: Failure,
        where: Callable[[Failure], str],
        origin: Callable[[Failure], Origin],
    ) -> bool:
        """Count and log a failure; return False if it must be raised when its turn comes.

        Args:
            failure: Failure that came from a worker.
            where: Returns where it happened, for the log.
            origin: Returns the same for programs.
        """
        if not failure.skipped:
            return False
        # Reports come before the item.
        key, place = failure.shard, (failure.number, failure.nth or math.inf)
        if failure.nth and not isinstance(failure, Reported):
            key, place = ~failure.number, (0, failure.nth)
        if place <= self._last.get(key, (-1, 0)):
            # A worker that replaces another one has sent it again.
            return True
        if self._max_errors is not None and self.count >= self._max_errors:
            return False
        self._last[key] = place
        self._places.append((failure.shard, failure.number))
        self.count += 1
        text = "; ".join([str_of(failure.error, repr), *getattr(failure.error, "__notes__", ())])
        self.skipped.append((origin(failure), text))
        if isinstance(failure, Reported):
            # Once for each item; in a later epoch, the same item has the same text.
            if not failure.log or self._logged.setdefault(text, self._epochs) < self._epochs:
                return True
        elif self._on_error != "skip":
            return True
        ended = _SHARD_ENDED if failure.nth == 0 and not isinstance(failure, Reported) else ""
        logs.log_error(failure.error, f"skipped {where(failure)}: {text}{ended}")
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
        if self._next is None:
            self._next = self._presentable(failure, where, origin())
            self._traceback = self._next.__traceback__
        error, self._next = self._next, self._twin_of(self._next)
        return error.with_traceback(self._traceback), self._next

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
        # The same failure may be raised again.
        notes = [note for note in getattr(shown, "__notes__", ()) if note != where] + [where]
        if failure.skipped:
            notes.append(f"{self.count + 1} errors are more than max_errors={self._max_errors}")
        # A class may forbid new attributes.
        with contextlib.suppress(Exception):
            # Python 3.10 has no add_note().
            shown.__notes__ = notes
            setattr(shown, ATTRIBUTE, origin)
        return shown

    def _twin_of(self, error: BaseException) -> BaseException:
        """Return a copy with the frames of the worker only, or the exception if it has none.

        What was raised is not kept: its traceback grows frames of the loop, and would keep alive
        all objects that the loop knows.
        """
        # Not every class can be copied, and its methods may raise anything.
        for make in (copy.copy, _without_init):
            with contextlib.suppress(BaseException):
                twin = make(error)
                if type(twin) is type(error) and str(twin) == str(error):
                    twin.__cause__, twin.__context__ = error.__cause__, error.__context__
                    twin.__suppress_context__ = error.__suppress_context__
                    # Some packages have exceptions copied with their frames, from which all frames
                    # of the loop can be reached if the worker runs in its thread.
                    twin.__traceback__ = None
                    return twin
        return error


def _without_init(error: BaseException) -> BaseException:
    """Return a copy of an exception whose `__init__` takes other arguments than it passes on."""
    twin: BaseException = type(error).__new__(type(error), *error.args)
    vars(twin).update(vars(error))
    return twin
