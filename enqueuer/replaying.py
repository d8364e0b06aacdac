"""Where an error came from, and running that one item again in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from enqueuer.errors import InvalidState, StateMismatch
from enqueuer.shards import Shard, Task, borrowed_globals
from enqueuer.sources import LiveSource, Source, iterate
from enqueuer.tasks import TaskSource

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
        InvalidState: It came from a live iterator, which cannot be run again.

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
        ZeroDivisionError: float division by zero
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


GONE = object()
"""Stands for the element of an iterable that nobody has any more."""


def result_of(source: TaskSource, task: Task, element: Any, seed_globals: bool) -> Any:
    """Return the result of a task, done in this process."""
    if element is GONE:
        raise InvalidState(
            "the element came from an iterable and is gone; replay(error) must be called in the "
            "process and before the stop()"
        )
    with borrowed_globals(task) if seed_globals else contextlib.nullcontext():
        return source.result(task, element)


def item_of(source: Source, shard: Shard, number: int, seed_globals: bool) -> Any:
    """Return item `number` of a shard, made in this process from the shard's first one on."""
    if isinstance(source, LiveSource):
        raise InvalidState(
            "a live iterator cannot be run again; pass the generator function itself"
        )
    with borrowed_globals(shard) if seed_globals else contextlib.nullcontext():
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
