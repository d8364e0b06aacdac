"""The origin of an error, and making its item again in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from enqueuer.errors import InvalidState, StateMismatch
from enqueuer.workers.messages import Ticket
from enqueuer.workers.seeding import borrowed_globals
from enqueuer.workers.shards import Seeded, Shard, Task
from enqueuer.workers.sources import LiveSource, Source, iterate
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
                # Otherwise it and its traceback would refer to each other.
                failed_fetch = None
        return source.item_of(ticket, results, random_seed)


def item_of(source: Source, make_shard: Callable[[], Shard], number: int, seed: bool) -> Any:
    """Return item `number` of a shard, made in this process from the shard's first one on.

    Args:
        source: Source of the shard.
        make_shard: Function that returns the shard, with its random numbers at their start.
        number: Number of the item.
        seed: Whether the global generators are seeded, as in a worker process.
    """
    if isinstance(source, LiveSource):
        raise InvalidState(
            "a running iterator cannot be read again; pass the generator function itself"
        )
    shard = make_shard()
    with _globals_of(shard, seed):
        items, _ = iterate(source.open(shard))
        for at in range(number + 1):
            try:
                item = next(items)
            except StopIteration:
                raise StateMismatch(
                    f"shard {shard.index} ended after {at} items this time, so there is no item "
                    f"{number}: its generator does not repeat itself"
                ) from None
    return item


def refuse(reason: str) -> Any:
    """Raise InvalidState, in the place of an item that cannot be made again."""
    raise InvalidState(reason)


def _globals_of(place: Seeded, seed: bool) -> contextlib.AbstractContextManager[None]:
    return borrowed_globals(place) if seed else contextlib.nullcontext()
