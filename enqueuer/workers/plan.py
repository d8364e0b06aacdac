"""The work of one worker: its source, its shards, and the handling of exceptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from enqueuer.workers.messages import Epoch, Start
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

    def of(self, epoch: Epoch) -> dict[Shard, Start]:
        """Return the start of each of this worker's shards in an epoch."""
        starts = dict.fromkeys(self.shards, Start()) if epoch.starts is None else epoch.starts
        return {
            Shard(index, self.count, epoch.number, self.random_seed): start
            for index, start in starts.items()
        }
