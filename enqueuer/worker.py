"""The loop that every worker runs, whatever runs the worker: shards -> items -> a sender.

    serve: wait for an epoch -> run -> wait for the next one -> ... -> go home
    run:   one item of each shard in turn, until all have ended or one has failed

The items leave in the order in which an ordered consumer reads them. This file knows no
backend: the sender is a thread's buffer, a process's channel or, in a test, a list.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from enqueuer.errors import Closed, StateMismatch
from enqueuer.messages import End, Epoch, Failure, Orders, Sender, Start
from enqueuer.shards import Shard
from enqueuer.sources import Source, Stateful, iterate

_log = logging.getLogger("enqueuer")

OnError = Literal["raise", "skip"] | Callable[[Exception], Any]
"""What to do about an exception: end, leave its place empty, or ask for something in its place."""


@dataclass(frozen=True)
class Plan:
    """What one worker is to do.

    Attributes:
        source: What the user handed over.
        shards: The indices of this worker's shards.
        count: How many shards there are in all.
        random_seed: Of the enqueuer.
        on_error: What to do about an exception of the source's.
    """

    source: Source
    shards: tuple[int, ...]
    count: int
    random_seed: int
    on_error: OnError = "raise"

    def of(self, epoch: Epoch) -> dict[Shard, Start]:
        """Return where this worker's shards begin in an epoch."""
        starts = dict.fromkeys(self.shards, Start()) if epoch.starts is None else epoch.starts
        return {
            Shard(index, self.count, epoch.number, self.random_seed): start
            for index, start in starts.items()
        }


def serve(
    plan: Plan, orders: Orders, sender: Sender, enter: Callable[[Shard], None] | None = None
) -> None:
    """Run one epoch after the other, until there are no more orders or the consumer left.

    Args:
        plan: The source and this worker's shards.
        orders: Where to wait for the next epoch.
        sender: Where items, ends and a failure go.
        enter: Called with the shard whose code is about to run, to exchange global states.
    """
    try:
        while (epoch := orders.next_epoch()) is not None:
            run(plan.source, plan.of(epoch), sender, enter or _nothing, plan.on_error)
    except Closed:
        pass


def run(
    source: Source,
    starts: Mapping[Shard, Start],
    sender: Sender,
    enter: Callable[[Shard], None],
    on_error: OnError = "raise",
) -> None:
    """Send what `source` yields for each shard in turn, then each shard's end.

    The first exception ends the run: it is sent as a Failure. With another `on_error` it ends
    only the shard whose generator it came from. Closed, which says that the consumer left, goes
    up to the caller. Either way the generators are closed, here in the thread that ran them, so
    that their `finally` runs.
    """
    streams = deque(_Stream(source, shard, start) for shard, start in starts.items())
    with ExitStack() as stack:
        for stream in streams:
            stack.callback(stream.close)
        while streams:
            stream = streams[0]
            enter(stream.shard)
            try:
                has_more = stream.advance(sender, alone=len(streams) == 1)
            except BaseException as error:
                # our Closed says that the consumer left; the user's code may raise one, too
                if isinstance(error, Closed) and not stream.in_user_code:
                    raise
                failure = Failure(stream.shard.index, stream.number, error)
                if not _may_skip(error, on_error):
                    sender.send(failure)
                    return
                stands_in = _stand_in(failure, error, sender, on_error, stream.is_behind)
                if stands_in is None:
                    return
                stream.number += 1
                has_more = not stream.in_user_code  # it is over if it raised
                if has_more and not stands_in:
                    continue  # nothing came of its turn, as if the item had been None
            if has_more:
                streams.rotate(-1)
            else:
                streams.popleft()
                sender.send(End(stream.shard.index))


def _may_skip(error: BaseException, on_error: OnError) -> TypeGuard[Exception]:
    if on_error == "raise" or not isinstance(error, Exception):
        return False
    return not isinstance(error, StateMismatch)


def _stand_in(
    failure: Failure, error: Exception, sender: Sender, on_error: OnError, had: bool
) -> bool | None:
    """Report an error that is skipped, and put in its place what the user gives for it.

    Nothing is put there if something was `had` of that place before.

    Returns:
        Whether there was anything; None if that failed in its turn, which ends the run.
    """
    replacement = None
    if callable(on_error):
        try:
            replacement = on_error(error)
        except BaseException as second:
            sender.send(Failure(failure.shard, failure.number, second))
            return None
    sender.send(Failure(failure.shard, failure.number, error, skipped=True))
    if replacement is None or had:
        return False
    try:
        sender.send_item(failure.shard, failure.number, replacement)
    except Closed:
        raise
    except BaseException as second:
        sender.send(Failure(failure.shard, failure.number, second))
        return None
    return True


class _Stream:
    """One shard's iterator and the number of its next item."""

    def __init__(self, source: Source, shard: Shard, start: Start) -> None:
        self.shard = shard
        self.number = 0
        self.in_user_code = False
        self._source = source
        self._start = start
        self._items: Iterator[Any] | None = None
        self._stateful: Stateful | None = None

    @property
    def is_behind(self) -> bool:
        """Whether it is being run again, and the item that is next had come before."""
        return self.number < self._start.number

    def advance(self, sender: Sender, alone: bool) -> bool:
        """Send the next item that is not None, or all of them; return whether there may be more.

        Args:
            sender: Where to.
            alone: Whether no other shard has to have its turn.
        """
        self.in_user_code = True
        if self._items is None:
            self._items = self._open()
            self._replay(self._items, sender)
        index, items, number, stateful = self.shard.index, self._items, self.number, self._stateful
        while True:
            try:
                value = next(items)
            except StopIteration:
                return False
            state = None if stateful is None else stateful.state_dict()
            self.in_user_code = False
            if value is not None:
                sender.send_item(index, number, value, state)
                self.number = number = number + 1
                if not alone:
                    return True
                del value  # or it lives on while next() makes the following one: twice the memory
            else:
                self.number = number = number + 1
                sender.check()  # or a source of nothing but None could not be stopped
            self.in_user_code = True

    def _open(self) -> Iterator[Any]:
        wanted, state, behind = self._start
        try:
            items, self._stateful = iterate(self._source.open(self.shard), state)
        except StopIteration as error:
            # left as it is it would look like an end
            raise RuntimeError("the generator function raised StopIteration") from error
        if state is not None:
            self.number = wanted - behind
        return items

    def _replay(self, items: Iterator[Any], sender: Sender) -> None:
        """Run an iterator from where it is, or what its state says, up to where it is to start."""
        wanted = self._start.number
        while self.number < wanted:
            try:
                next(items)
            except StopIteration:
                raise StateMismatch(
                    f"shard {self.shard.index} ended after {self.number} items when it was run "
                    f"again, but {wanted} had come of it before: its generator does not repeat "
                    "itself. Draw from shard.rng only, and read the same data"
                ) from None
            self.number += 1
            self.in_user_code = False
            sender.check()
            self.in_user_code = True

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
