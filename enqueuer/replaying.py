"""Where an error came from, and running that one item again in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from enqueuer.errors import InvalidState, StateMismatch
from enqueuer.messages import Ticket
from enqueuer.shards import Seeded, Shard, Task, borrowed_globals
from enqueuer.sources import LiveSource, Source, iterate
from enqueuer.tasks import FETCH, TaskSource

ATTRIBUTE = "enqueuer_origin"


@dataclass
class Origin:
    """Which item an error belongs to; an error out of an enqueuer has it as `enqueuer_origin`.

    Attributes:
        random_seed: Of the enqueuer.
        epoch: From 0.
        item: The number of the item in its shard, or of the task in its epoch, from 0.
        shard: The index of the shard; None for a task.
        shards: How many shards there are; 0 for tasks.
        worker: Who ran it, in words.
        element: The index of the task's element, at which it failed; None for a shard.
    """

    random_seed: int
    epoch: int
    item: int
    shard: int | None
    shards: int
    worker: str
    element: int | None = None
    again: Callable[[], Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "again": None}  # what it calls need not be picklable


def replay(error: BaseException) -> Any:
    """Run the item that an error came from once more, here, so that a debugger can stop in it.

    The shard's generator is run from its start in this process and thread, from the same seeds,
    up to that item. The process's own random generators are as before afterwards.

    Args:
        error: What an enqueuer raised, in this process.

    Returns:
        The item, if making it succeeds this time (it could not be sent, say, or the worker was
        killed).

    Raises:
        Exception: What making the item raises; with the frames of this process.
        ValueError: The error did not come out of an enqueuer, or it was pickled since; then
            `replay` of an enqueuer with the same source does it.
        InvalidState: It came from a live iterator, or from reading the elements of tasks, which
            cannot be done again.

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
    if origin.again is None:
        raise ValueError(
            "this error was pickled, and its source did not come along; call replay(error) of an "
            "enqueuer with the same source"
        )
    return origin.again()


def origin_of(error: BaseException) -> Origin:
    """Return where an error came from; raise ValueError if it does not say."""
    origin = getattr(error, ATTRIBUTE, None)
    if not isinstance(origin, Origin):
        raise ValueError(f"{error!r} did not come out of an enqueuer: there is nothing to replay")
    return origin


def redo(
    source: TaskSource, random_seed: int, ticket: Ticket, at: int | None, seed: bool, skip: bool
) -> Any:
    """Do the task of a ticket in this process, and return its result.

    Args:
        source: That it is a ticket for.
        random_seed: Of the enqueuer that the error came from.
        ticket: Of the task.
        at: The index of the element that failed.
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
            if result is not None:
                results.append(result)
        if failed_fetch is not None and not skip:
            try:
                raise failed_fetch
            finally:
                failed_fetch = None  # or it and its traceback would be a circle
        return results[0] if source.batch_size is None else source.collate(results)


def item_of(source: Source, make_shard: Callable[[], Shard], number: int, seed: bool) -> Any:
    """Return item `number` of a shard, made in this process from the shard's first one on.

    Args:
        source: That the shard is one of.
        make_shard: Returns the shard, with its random numbers at their start.
        number: Of the item.
        seed: Whether the global generators are seeded, as in a worker process.
    """
    if isinstance(source, LiveSource):
        raise InvalidState(
            "a live iterator cannot be run again; pass the generator function itself"
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
    """Stand for an item that cannot be made again."""
    raise InvalidState(reason)


def _globals_of(place: Seeded, seed: bool) -> contextlib.AbstractContextManager[None]:
    return borrowed_globals(place) if seed else contextlib.nullcontext()
