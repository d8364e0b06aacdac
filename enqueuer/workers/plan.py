"""The work of one worker: its source, its shards, and the handling of exceptions.

Epoch   --Plan.of()-->     the start of each shard
Failure --skip_or_end()--> sent as it is, or sent as skipped, with a replacement to be sent
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from enqueuer.errors import BlockMemoryError, Closed, StateMismatch
from enqueuer.workers.messages import Epoch, Failure, Sender, Start
from enqueuer.workers.shards import Shard
from enqueuer.workers.sources import Source
from enqueuer.workers.tasks import TaskSource

OnError = Literal["raise", "skip"] | Callable[[Exception], Any]
"""Handling of an exception: raise it, skip the item, or call a function for a replacement."""


@dataclass(frozen=True)
class Plan:
    """The work of one worker.

    Attributes:
        source: Source that the user passed.
        shards: Indices of this worker's shards.
        count: Number of all shards.
        random_seed: Seed of the enqueuer.
        on_error: Handling of an exception of the source.
    """

    source: Source | TaskSource
    shards: tuple[int, ...]
    count: int
    random_seed: int
    on_error: OnError = "raise"

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
    # A lack of shared memory is no fault of the item: all later ones would be skipped as well.
    is_ours = isinstance(error, (StateMismatch, BlockMemoryError))
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
