"""The messages between workers and loop.

    worker --Sender.send_item(), send()--> the inbox of the worker --> the engine, in the loop
           <--Channel.next_epoch(), next_ticket()---

The set is closed: an end and a failure are types of their own, so no value that a generator
yields can be mistaken for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Item(NamedTuple):
    """A value that a shard's generator yielded; `number` counts its `next()` calls from 0.

    `state` is the iterator's own `state_dict()` after it, if it has one.
    """

    shard: int
    number: int
    value: object
    state: Any = None


ItemTuple = tuple[int, int, object, Any]
"""An item, or a plain tuple of its values."""


@dataclass(frozen=True)
class End:
    """A shard's generator has ended.

    `state` is the `state_dict()` of an iterable that is read again in the next epoch, if it has
    one. `number` is the number of items that the generator has yielded, including None.
    """

    shard: int
    state: Any = None
    number: int = 0


@dataclass(frozen=True)
class Failure:
    """Making item `number` of `shard` failed.

    If `skipped`, the worker goes on, by the enqueuer's `on_error`; otherwise nothing more comes
    from its shards in this epoch. `worker` is the name of the worker, once it is known. For a task,
    `shard` is the place of the element in its ticket, and in the reorder buffer its index; there,
    `nth` says which failure of its task it is, from 1. If a worker died, `running` are the elements
    that it ran, as far as they are known: their places, and the numbers of their tasks.
    """

    shard: int
    number: int
    error: BaseException
    skipped: bool = False
    worker: str = ""
    nth: int = 0
    running: tuple[tuple[int, int], ...] = ()


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
    """The order to do one task. It is a tuple, since it is pickled for each task.

    Attributes:
        number: Number of the task, counted over all epochs.
        epoch: Number of the epoch, from 0.
        indices: Indices of the elements: one, or those of a batch.
        elements: The elements, if only the reader has them; None if the worker has all.
        late: Errors of what took too long in another worker, by its place; None: nothing did.
    """

    number: int
    epoch: int
    indices: tuple[int, ...]
    elements: tuple[Any, ...] | None = None
    late: Mapping[int, BaseException] | None = None


class Start(NamedTuple):
    """The start of a shard, at item `number`.

    If there is a `state` of its iterator, that is `behind` items before it; usually 0. Of the items
    before it, `left_out` gave nothing to the loop; they are not counted of shards without turns.
    """

    number: int = 0
    state: Any = None
    behind: int = 0
    left_out: int = 0


@dataclass(frozen=True)
class Epoch:
    """The order to run through the source once.

    Attributes:
        number: Number of the epoch, from 0.
        starts: Start of each shard that is still to be run, in the order of their turns; None if
            all begin with their first item. Tasks count as shard 0.
        done: Numbers of later tasks that are done already.
        share: Shards of this rank, those that have ended included, if what was left was divided
            anew; None: it has every n-th shard.
        division: The place from which on the elements were divided anew, and the later places that
            were done before; None: all elements are divided.
        left_out: Number of tasks before this position that gave nothing to the loop.
        is_awaited: Whether the loop waits for one of these shards first, of those that do not
            begin with their first item.
        late: Failure of an item that took too long in another worker: its shard goes on with it.
    """

    number: int
    starts: Mapping[int, Start] | None = None
    done: tuple[int, ...] = ()
    left_out: int = 0
    share: tuple[int, ...] | None = None
    division: tuple[int, ...] | None = None
    is_awaited: bool = True
    late: Failure | None = None

    def of_shards(self, shards: tuple[int, ...]) -> Epoch:
        """Return the order for some of the shards."""
        starts = self.starts
        if starts is None:
            return Epoch(self.number)
        behind = next((shard for shard, start in starts.items() if start.number), None)
        starts = {shard: start for shard, start in starts.items() if shard in shards}
        return Epoch(self.number, starts, is_awaited=behind in starts)
