"""The loop that every worker runs, whatever runs the worker: shards -> items -> a sender.

    serve: wait for an epoch -> run -> wait for the next one -> ... -> go home
    run:   one item of each shard in turn, until all have ended or one has failed

The items leave in the order in which an ordered consumer reads them. This file knows no
backend: the sender is a thread's buffer, a process's channel or, in a test, a list.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from enqueuer.errors import Closed
from enqueuer.messages import End, Failure, Orders, Sender
from enqueuer.shards import Shard
from enqueuer.sources import Source

_log = logging.getLogger("enqueuer")


@dataclass(frozen=True)
class Plan:
    """What one worker is to do.

    Attributes:
        source: What the user handed over.
        shards: The indices of this worker's shards.
        count: How many shards there are in all.
        random_seed: Of the enqueuer.
    """

    source: Source
    shards: tuple[int, ...]
    count: int
    random_seed: int

    def epoch(self, epoch: int) -> list[Shard]:
        """Return this worker's shards of an epoch."""
        return [Shard(index, self.count, epoch, self.random_seed) for index in self.shards]


def serve(
    plan: Plan, orders: Orders, sender: Sender, enter: Callable[[Shard], None] | None = None
) -> None:
    """Run one epoch after the other, until there are no more orders or the consumer left.

    Args:
        plan: The source and this worker's shards.
        orders: Where to wait for the number of the next epoch.
        sender: Where items, ends and a failure go.
        enter: Called with the shard whose code is about to run, to exchange global states.
    """
    try:
        while (epoch := orders.next_epoch()) is not None:
            run(plan.source, plan.epoch(epoch), sender, enter or _nothing)
    except Closed:
        pass


def run(
    source: Source,
    shards: Iterable[Shard],
    sender: Sender,
    enter: Callable[[Shard], None],
) -> None:
    """Send what `source` yields for each shard in turn, then each shard's end.

    The first exception ends the run: it is sent as a Failure. Closed, which says that the
    consumer left, goes up to the caller. Either way the generators are closed, here in the
    thread that ran them, so that their `finally` runs.
    """
    streams = deque(_Stream(source, shard) for shard in shards)
    with ExitStack() as stack:
        for stream in streams:
            stack.callback(stream.close)
        while streams:
            stream = streams[0]
            enter(stream.shard)
            try:
                has_more = stream.advance(sender, alone=len(streams) == 1)
            except Closed as error:
                # ours says that the consumer left; one that the user's code raised is a failure
                if not stream.in_user_code:
                    raise
                sender.send(Failure(stream.shard.index, stream.number, error))
                return
            except BaseException as error:
                sender.send(Failure(stream.shard.index, stream.number, error))
                return
            if has_more:
                streams.rotate(-1)
            else:
                streams.popleft()
                sender.send(End(stream.shard.index))


class _Stream:
    """One shard's iterator and the number of its next item."""

    def __init__(self, source: Source, shard: Shard) -> None:
        self.shard = shard
        self.number = 0
        self.in_user_code = False
        self._source = source
        self._items: Iterator[Any] | None = None

    def advance(self, sender: Sender, alone: bool) -> bool:
        """Send the next item that is not None, or all of them; return whether there may be more.

        Args:
            sender: Where to.
            alone: Whether no other shard has to have its turn.
        """
        self.in_user_code = True
        if self._items is None:
            self._items = self._open()
        index, items, number = self.shard.index, self._items, self.number
        while True:
            try:
                value = next(items)
            except StopIteration:
                return False
            self.in_user_code = False
            if value is not None:
                sender.send_item(index, number, value)
                self.number = number = number + 1
                if not alone:
                    return True
                del value  # or it lives on while next() makes the following one: twice the memory
            else:
                self.number = number = number + 1
                sender.check()  # or a source of nothing but None could not be stopped
            self.in_user_code = True

    def _open(self) -> Iterator[Any]:
        try:
            return self._source.open(self.shard)
        except StopIteration as error:
            # left as it is it would look like an end
            raise RuntimeError("the generator function raised StopIteration") from error

    def close(self) -> None:
        """Run the generator's `finally`; what goes wrong there is logged, not raised.

        It must not hide the first error, and after a stop nobody is left to raise it to.
        """
        close = getattr(self._items, "close", None)
        if close is None:
            return
        try:
            close()
        except BaseException:
            _log.exception("closing the generator of shard %d failed", self.shard.index)


def _nothing(shard: Shard) -> None:
    """Leave the global states alone: threads share them with the training loop."""
