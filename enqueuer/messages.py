"""What travels from a worker to the consumer, and the two ends it travels between.

    worker --Sender.send(message)--> ring --Backend.wait(), take()--> consumer

The set is closed: an end and a failure are types of their own, so that no value which a
generator yields can ever be taken for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(slots=True)  # frozen, it would take twice as long to make one
class Item:
    """What a shard's generator yielded; `number` counts its `next()` calls from 0.

    `state` is what the iterator's own `state_dict()` said after it, if it has one.
    """

    shard: int
    number: int
    value: object
    state: Any = None


@dataclass(frozen=True)
class End:
    """A shard's generator has come to its end.

    `state` is what an iterable that is read again in the next epoch said of itself then, if it
    says anything. `number` is how many items the generator has yielded, those of None included.
    """

    shard: int
    state: Any = None
    number: int = 0


@dataclass(frozen=True)
class Failure:
    """Making item `number` of `shard` failed.

    If `skipped`, the worker goes on, as it was told to; otherwise nothing more comes of its
    shards. `worker` says who it was, once that is known. Of a task, `shard` is the place of the
    element in its ticket, and in the reorder buffer its index.
    """

    shard: int
    number: int
    error: BaseException
    skipped: bool = False
    worker: str = ""


@dataclass(frozen=True)
class Reported(Failure):
    """The generator has caught an error itself, before it made item `number`, and goes on.

    It is the `nth` of this item, from 1; `log` says whether it is to be logged.
    """

    skipped: bool = True
    nth: int = 1
    log: bool = True


@dataclass(frozen=True)
class Empty:
    """Task `number` was done and has no result."""

    number: int


Message = Item | End | Failure | Empty


class Ticket(NamedTuple):
    """The right, and the duty, to do one task; a tuple, since it is pickled for each.

    Attributes:
        number: Of the task, counted over all epochs.
        epoch: From 0.
        indices: Of the elements that it is about; one, or those of a batch.
        elements: They themselves, if only the reader has them; None if the worker has all.
    """

    number: int
    epoch: int
    indices: tuple[int, ...]
    elements: tuple[Any, ...] | None = None


class Start(NamedTuple):
    """Where a shard begins: at item `number`.

    If there is its iterator's own `state`, that is so many items `behind` it; usually none.
    """

    number: int = 0
    state: Any = None
    behind: int = 0


@dataclass(frozen=True)
class Epoch:
    """The order to run through the source once.

    Attributes:
        number: From 0.
        starts: The shards that are still to be run, in the order of their turns, and where each
            begins; None: all, from their first item. Tasks count as shard 0.
        done: Later tasks that are done already.
    """

    number: int
    starts: Mapping[int, Start] | None = None
    done: tuple[int, ...] = ()

    def part(self, shards: tuple[int, ...]) -> Epoch:
        """Return what of it is for some of the shards."""
        if self.starts is None:
            return self
        return Epoch(self.number, {s: at for s, at in self.starts.items() if s in shards})


class Sender(Protocol):
    """A worker's end of what takes its messages to the consumer."""

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        """Hand over an `Item`, when there is room for it. Raises Closed if the consumer left."""

    def send(self, message: End | Failure | Empty) -> None:
        """Hand over `message`. Raises Closed if the consumer left."""

    def check(self) -> None:
        """Raise Closed if the consumer left."""

    def watch(self, waited: Callable[[int], None]) -> None:
        """Have `waited` called after each wait, with its begin by `time.monotonic_ns`."""


class Orders(Protocol):
    """Where a worker learns what to do next."""

    def next_epoch(self) -> Epoch | None:
        """Wait for the next epoch; None means to exit."""


class Tickets(Protocol):
    """Where a worker takes its tasks from."""

    def next_ticket(self) -> Ticket | None:
        """Wait for the next task; None means to exit."""
