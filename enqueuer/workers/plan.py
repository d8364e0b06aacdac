"""The work of one worker: its source, its shards, its channel, and the handling of exceptions.

Channel --next_epoch(), next_ticket()--> Epoch, Ticket
Sender  --send_item(), send()----------> the inbox of the worker, in the loop
Epoch   --Plan.of()-->     the start of each shard
Failure --skip_or_end()--> sent as it is, or sent as skipped, with a replacement to be sent
Watch   --run()----------> records that the loop's process reads, with `element_timeout`
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, Protocol

from enqueuer.errors import BlockMemoryError, Closed, FrameworkUnavailable, StateMismatch
from enqueuer.monitoring.meters import clock
from enqueuer.order.messages import Empty, End, Epoch, Failure, Start, Ticket
from enqueuer.workers.shards import Shard
from enqueuer.workers.sources import Source, close
from enqueuer.workers.tasks import TaskSource

OnError = Literal["raise", "skip"] | Callable[[Exception], Any]
"""Handling of an exception: raise it, skip the item, or call a function for a replacement."""

# A worker of processes has a claim for each of its tickets, and no job waits beside so many.
MAX_THREADS = 1024
# Places of what is done for all elements of a ticket at once.
FETCHING, COLLATING = -1, -2


class Watch:
    """What the code of the user does in each thread of a worker, and since when.

    The loop's process reads the records, also of a worker that hangs, is stopped or was killed.

    Args:
        new: Function that returns, for each thread, one that writes its record: when it began what
            it runs, 0 if it runs nothing, the place, and the number.
        has_limit: Whether what runs has a time limit.

    Example:
        >>> record = []
        >>> watch = Watch(lambda: lambda *values: record.append(values))
        >>> watch.run(1, 7, lambda: record[-1][1:]), record[-1]
        ((1, 7), (0, 1, 7))
    """

    def __init__(
        self, new: Callable[[], Callable[[int, int, int], None]], has_limit: bool = True
    ) -> None:
        self._new = new
        self.has_limit = has_limit
        self._local = threading.local()

    def run(self, place: int, number: int, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the user; `place` may be the index of a shard."""
        write = self._writer()
        self._local.what = place, number
        write(clock(), place, number)
        try:
            return function(*args)
        finally:
            write(0, place, number)

    def noted(self, number: int, elements: Iterable[Any]) -> Iterator[Any]:
        """Yield the elements of a task, each of which runs until the next one is asked for."""
        write = self._writer()
        try:
            for place, element in enumerate(elements):
                self._local.what = place, number
                write(1, place, number)
                yield element
        finally:
            write(0, 0, number)

    def _writer(self) -> Callable[[int, int, int], None]:
        mine = self._local
        try:
            return mine.write  # type: ignore[no-any-return]
        except AttributeError:
            mine.write = self._new()
            return mine.write  # type: ignore[no-any-return]

    def pause(self) -> Callable[[], None]:
        """Let no time count for what this thread runs until the returned function is called."""
        write, what = self._local.write, self._local.what
        write(0, *what)
        return lambda: write(clock(), *what)


class WatchedItems(Iterator[Any]):
    """The items of a shard, each of which is watched while it is made.

    Args:
        items: The items.
        watch: Record of the worker.
        shard: Index of the shard.
        number: Number of the first one.
    """

    def __init__(self, items: Iterator[Any], watch: Watch, shard: int, number: int) -> None:
        self._items, self._watch = items, watch
        self._shard, self._number = shard, number

    def __next__(self) -> Any:
        self._number += 1
        return self._watch.run(self._shard, self._number - 1, next, self._items)

    def close(self) -> None:
        """Close the items."""
        close(self._items)


class Sender(Protocol):
    """The worker's end of a channel to the consumer."""

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        """Send an `Item`, when there is room for it. Raises Closed if the consumer left."""

    def send(self, message: End | Failure | Empty) -> None:
        """Send `message`. Raises Closed if the consumer left."""

    def check(self) -> None:
        """Raise Closed if the consumer left."""


class Channel(Sender, Protocol):
    """The worker's end with the orders of the consumer: epochs to run, or tasks to do."""

    def next_epoch(self) -> Epoch | None:
        """Wait for the next epoch; None means to exit."""

    def next_ticket(self) -> Ticket | None:
        """Wait for the next task; None means to exit."""


@dataclass(frozen=True)
class Plan:
    """The work of one worker.

    Attributes:
        source: Source that the user passed.
        shards: Indices of this worker's shards.
        count: Number of all shards.
        random_seed: Seed of the enqueuer.
        on_error: Handling of an exception of the source.
        watch: Record of what runs; None: it is not needed.
    """

    source: Source | TaskSource
    shards: tuple[int, ...]
    count: int
    random_seed: int
    on_error: OnError = "raise"
    watch: Watch | None = None

    @property
    def shard_source(self) -> Source:
        """The source, of a worker that runs shards."""
        assert not isinstance(self.source, TaskSource)
        return self.source

    def of(self, epoch: Epoch) -> dict[Shard, Start]:
        """Return the start of each of this worker's shards in an epoch."""
        starts = dict.fromkeys(self.shards, Start()) if epoch.starts is None else epoch.starts
        return {
            Shard(index, self.count, epoch.number, self.random_seed): start
            for index, start in starts.items()
        }


def may_skip(error: BaseException, on_error: OnError) -> bool:
    """Return whether an error of the user's code is skipped, and not raised."""
    # A lack of shared memory, or of a package, is no fault of the item: all later ones would be
    # skipped as well.
    is_ours = isinstance(error, (StateMismatch, BlockMemoryError, FrameworkUnavailable))
    return on_error != "raise" and isinstance(error, Exception) and not is_ours


def skip_or_end(failure: Failure, sender: Sender, on_error: OnError) -> tuple[bool, Any]:
    """Send a failure, marked as skipped if `on_error` allows that.

    Returns:
        Whether it is skipped, and the replacement that the user gives, or None.
    """
    error, replacement = failure.error, None
    if not may_skip(error, on_error):
        sender.send(failure)
        return False, None
    assert isinstance(error, Exception)
    if callable(on_error):
        try:
            replacement = on_error(error)
        except BaseException as second:
            sender.send(replace(failure, error=second))
            return False, None
    sender.send(replace(failure, skipped=True))
    return True, replacement


class Raised:
    """The outcome of an element, a sample or a batch that raised."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def reraise(self) -> NoReturn:
        """Raise the exception, and forget it: its traceback must not refer to itself."""
        error = self.error
        del self.error
        try:
            raise error
        finally:
            del error


def serve_failure(error: BaseException, shards: tuple[int, ...], channel: Any) -> None:
    """Send the error of a worker's start, and stay until the loop has read it.

    Args:
        error: Exception that loading the source raised, for example.
        shards: Indices of the worker's shards; empty for tasks.
        channel: Channel of the worker.
    """
    with contextlib.suppress(Closed):
        if not shards:
            while (ticket := channel.next_ticket()) is not None:
                channel.send(Failure(0, ticket.number, error))
            return
        channel.send(Failure(shards[0], 0, error))
        while channel.next_epoch() is not None:
            pass
