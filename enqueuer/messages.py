"""What travels from a worker to the consumer, and the two ends it travels between.

    worker --Sender.send(message)--> road --Receiver.receive()--> consumer

The set is closed: an end and a failure are types of their own, so that no value which a
generator yields can ever be taken for one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)  # frozen, it would take twice as long to make one
class Item:
    """What a shard's generator yielded; `number` counts its `next()` calls from 0."""

    shard: int
    number: int
    value: object


@dataclass(frozen=True)
class End:
    """A shard's generator has come to its end."""

    shard: int


@dataclass(frozen=True)
class Failure:
    """Making item `number` of `shard` failed; nothing more comes from this worker."""

    shard: int
    number: int
    error: BaseException


@dataclass(frozen=True)
class Record:
    """What a worker logged."""

    record: logging.LogRecord


Message = Item | End | Failure


class Sender(Protocol):
    """A worker's end of its road."""

    def send_item(self, shard: int, number: int, value: object) -> None:
        """Hand over an `Item`, when there is room for it. Raises Closed if the consumer left."""

    def send(self, message: End | Failure) -> None:
        """Hand over `message`. Raises Closed if the consumer left."""

    def check(self) -> None:
        """Raise Closed if the consumer left."""


class Orders(Protocol):
    """Where a worker learns what to do next."""

    def next_epoch(self) -> int | None:
        """Wait for the next epoch's number; None means to go home."""
