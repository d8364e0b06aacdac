"""The loop that every worker of shards runs, on every backend: shards -> items -> a sender.

    serve: wait for an epoch -> turns -> wait for the next one -> ... -> exit
    turns: one item of each shard in turn, until all have ended or one has failed
    ShardStream: open(shard) -> replay, unsent -> advance(): the next item -> ... -> close()

Async generators of all shards are opened before the first turn, and then run side by side.

The items leave in the order in which an ordered consumer reads them. This file knows no
backend: the sender is a thread's inbox, a process's channel or, in a test, a list.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from enqueuer.common.text import duration
from enqueuer.errors import Closed, StateMismatch
from enqueuer.order.messages import End, Epoch, Failure, Reported, Start
from enqueuer.workers.event_loop import EventLoop, shard_loop
from enqueuer.workers.plan import (
    Channel,
    OnError,
    Plan,
    Sender,
    Watch,
    WatchedItems,
    may_skip,
    serve_failure,
    skip_or_end,
)
from enqueuer.workers.shards import Shard, collect_reports, do_nothing
from enqueuer.workers.sources import (
    FunctionSource,
    LiveSource,
    Source,
    can_go_on,
    close,
    iterate,
)
from enqueuer.workers.task_loop import send_replacement

_log = logging.getLogger("enqueuer")

# Seconds for which items are made again before that is logged: less is not noticed.
_QUIET_S = 2.0

# Errors of an iterator in a row, without an item in between, after which it is not asked again: it
# may stay at its place.
_MAX_FAILURES = 100


def serve(plan: Plan, channel: Channel, enter: Callable[[Shard], None] | None = None) -> None:
    """Run one epoch after the other, until there are no more orders or the consumer left.

    Args:
        plan: Source and shards of this worker.
        channel: Source of the epochs, to which items, ends and a failure are sent.
        enter: Function that is called with a shard before its code runs; it exchanges the global
            random states.
    """
    enter = enter or do_nothing
    loop = None
    with ExitStack() as stack:
        if plan.shard_source.is_async:
            try:
                loop = stack.enter_context(shard_loop(channel.check))
            except (RuntimeError, OSError) as error:
                serve_failure(error, plan.shards, channel)
                return
        stack.enter_context(contextlib.suppress(Closed))
        last = -1
        while (epoch := channel.next_epoch()) is not None:
            # An order comes twice if an exception ends the call that sends it.
            if epoch.number > last:
                last = epoch.number
                # There is no pause between turns.
                for _ in turns(plan, epoch, channel, enter, loop=loop):
                    pass


def turns(
    plan: Plan,
    epoch: Epoch,
    sender: Sender,
    enter: Callable[[Shard], None],
    one_by_one: bool = False,
    loop: EventLoop | None = None,
) -> Iterator[None]:
    """Send what the source yields for each shard in turn, then each shard's end.

    The first exception ends the run: it is sent as a Failure. With another `on_error` it ends
    only the shard whose generator raised it. Closed, which means that the consumer left, is raised
    to the caller. In each case the generators are closed, here in the thread that ran them, so
    that their `finally` runs.

    Args:
        plan: Source and shards of this worker.
        epoch: Order with the starts of the shards.
        sender: Sender of the items.
        enter: As for `serve`.
        one_by_one: Whether to yield after each turn; otherwise nothing is yielded.
        loop: Event loop of the worker, for async generators.
    """
    with ExitStack() as stack:
        streams = _streams_of(plan, epoch, enter, loop, stack)
        if loop is not None:
            enter = do_nothing
        # Those of shards that have ended are passed over.
        following = filter(None, map(streams.get, itertools.cycle(tuple(streams))))
        has_sent = True
        while streams:
            # Without an item it is still its turn, as if that had been None.
            if has_sent:
                stream = next(following)
            enter(stream.shard)
            has_sent = True
            try:
                has_more = stream.advance(sender, alone=len(streams) == 1 and not one_by_one)
            except BaseException as error:
                # Our Closed means that the consumer left; the user's code may raise one, too.
                if isinstance(error, Closed) and not stream.in_user_code:
                    raise
                goes_on, has_sent = _send_failure(stream, error, sender, plan.on_error)
                if not goes_on:
                    return
                # A generator that raised has ended.
                has_more = not stream.in_user_code or stream.goes_on or stream.can_go_on()
                stream.number += 1
            if not has_more:
                has_sent = True
                del streams[stream.shard.index]
                sender.send(End(stream.shard.index, stream.state_at_end, stream.number))
            if one_by_one:
                yield


def _streams_of(
    plan: Plan,
    epoch: Epoch,
    enter: Callable[[Shard], None],
    loop: EventLoop | None,
    stack: ExitStack,
) -> dict[int, ShardStream]:
    """Return the streams of all shards, in the order of their turns; `stack` closes them.

    Async generators run from now on, on the event loop of the worker. Without it they share one on
    which nothing is made ahead.
    """
    starts = plan.of(epoch)
    replay = Replay(plan, starts.values(), epoch.is_awaited)
    source = plan.shard_source
    if isinstance(source, FunctionSource) and source.is_async:
        shared = loop or stack.enter_context(contextlib.closing(EventLoop.of_caller()))
        source = replace(source, loop=shared)
    late = {} if epoch.late is None else {epoch.late.shard: epoch.late}
    streams = {
        s.index: ShardStream(source, s, starts[s], replay, plan.watch, late.get(s.index))
        for s in starts
    }
    for stream in streams.values():
        stack.callback(stream.close)
    if loop is not None:
        # All at once, before they are closed one by one.
        stack.callback(lambda: loop.end(loop.items))
        for shard in itertools.islice(starts, 1):
            # They share the global generators.
            enter(shard)
        for stream in streams.values():
            stream.begin()
    return streams


def _send_failure(
    stream: ShardStream, error: BaseException, sender: Sender, on_error: OnError
) -> tuple[bool, bool]:
    """Send the failure of an item, and its replacement.

    Returns:
        Whether the error is skipped, and whether there was a replacement.
    """
    if isinstance(error, Closed):
        # Raises ours, which a wait for an async generator has raised.
        sender.check()
    if stream.is_behind and may_skip(error, on_error):
        # A replay: the loop has had the reports, the failure and the replacement.
        return True, False
    stream.send_reports(sender)
    failure = Failure(stream.shard.index, stream.number, error)
    goes_on, value = skip_or_end(failure, sender, on_error)
    if value is None:
        return goes_on, False
    return send_replacement(failure, value, sender), True


class Replay:
    """The items that a worker makes again before new ones; if that takes long, it is logged once.

    Args:
        plan: Source of all shards.
        starts: Start of each shard.
        logs: Whether it is logged; the loop waits for one worker first.

    Attributes:
        least: Number of items that are made again of a source that can begin anywhere.
    """

    def __init__(self, plan: Plan, starts: Iterable[Start], logs: bool) -> None:
        source = plan.shard_source
        # The last item may be the replacement of an error, which has ended the shard.
        self.least = int(callable(plan.on_error))
        self._total = sum(
            start.behind if start.state is not None else start.number
            for start in starts
            if start.state is not None or not source.can_begin_anywhere
        )
        self._advice = ""
        if isinstance(source, FunctionSource) and source.stage is None:
            self._advice = "; a function with the parameter first_item=0 makes none again"
        self._made = 0
        self._took_s = 0.0
        self._logs = logs

    def note(self, began: float) -> float:
        """Note that an item was made again since a time; return the time."""
        now = time.monotonic()
        self._made += 1
        self._took_s += now - began
        took_s = self._took_s
        if self._logs and took_s >= _QUIET_S:
            self._logs = False
            rest_s = took_s * (self._total / self._made - 1)
            _log.warning(
                "this worker makes %s items again that the loop has had, up to where it goes on: "
                "%s are made after %.1f s, and the rest will take about %s%s",
                *(f"{self._total:,}", f"{self._made:,}", took_s, duration(rest_s), self._advice),
            )
        return now


class ShardStream:
    """One shard's iterator and the number of its next item.

    Attributes:
        shard: Shard that is run.
        number: Number of the next item.
        in_user_code: Whether the user's code runs, or has raised.
        state_at_end: State of a running iterator at its end, if it has one.
        goes_on: Whether it is to be opened behind an item that took too long.
    """

    def __init__(
        self,
        source: Source,
        shard: Shard,
        start: Start,
        replay: Replay,
        watch: Watch | None = None,
        late: Failure | None = None,
    ) -> None:
        self.shard = shard
        self.number = 0
        self.in_user_code = False
        self.state_at_end: Any = None
        self._source = source
        self._start = start
        # None until it is open.
        self._items: Iterator[Any] | None = None
        self._replayed = replay
        self._watch = watch
        # Failure of the item with which it begins.
        self._late = late
        self.goes_on = False
        self._stateful: Any = None
        self._reports = collect_reports(shard)
        # Whether the iterator may have more after an exception.
        self._can_go_on = False
        # Number of the last item that the iterator raised for, and how many in a row.
        self._failed = -2, 0

    @property
    def is_behind(self) -> bool:
        """Whether the next item is a replay of one that the loop has received before."""
        return self.number < self._start.number

    def can_go_on(self) -> bool:
        """Return whether the iterator may have more items; call it once for each error of it."""
        last, count = self._failed
        self._failed = self.number, count + 1 if self.number == last + 1 else 1
        return self._can_go_on and count < _MAX_FAILURES - 1

    def begin(self) -> None:
        """Open an async generator, which runs from now on."""
        if self._start.state is None and self._late is None:
            self._open()

    def advance(self, sender: Sender, alone: bool) -> bool:
        """Send the next item that is not None, or all of them; return whether there may be more.

        Args:
            sender: Sender of the item.
            alone: Whether there is no other shard whose turn is next.
        """
        self.in_user_code = True
        items = self._items if self._items is not None else self._open()
        if self.number < self._start.number:
            self._replay(items, sender)
        index, number, stateful = self.shard.index, self.number, self._stateful
        reports = self._reports
        while True:
            try:
                value = next(items)
            except StopIteration:
                # The iterable of a function is dropped now, but a running iterator is read again.
                if stateful is not None and isinstance(self._source, LiveSource):
                    self.state_at_end = stateful.state_dict()
                self.in_user_code = False
                self.send_reports(sender)
                return False
            state = None if stateful is None else stateful.state_dict()
            self.in_user_code = False
            if reports:
                self.send_reports(sender)
            if value is not None:
                sender.send_item(index, number, value, state)
                self.number = number = number + 1
                if not alone:
                    return True
                # Without this, the item would live on while next() makes the following one.
                del value
            else:
                self.number = number = number + 1
                # Without this, a source that yields only None could not be stopped.
                sender.check()
            self.in_user_code = True

    def send_reports(self, sender: Sender) -> None:
        """Send what the generator has reported before the next item; called once for each item."""
        nth = 0
        # A thread of the generator may report meanwhile.
        while self._reports:
            error, log = self._reports.pop(0)
            nth += 1
            sender.send(Reported(self.shard.index, self.number, error, nth=nth, log=log))

    def _open(self) -> Iterator[Any]:
        least, first = self._replayed.least, 0
        wanted, state, behind, _ = self._start
        if self._late is not None:
            # All before it was sent, or None. A replacement may have been sent for it.
            self.number = max(self._late.number, wanted - least)
            error, self._late = self._late.error, None
            self.goes_on = self._source.can_begin_anywhere
            raise error
        if self.goes_on:
            wanted, least, self.goes_on = self.number, 0, False
        if state is None and self._source.can_begin_anywhere:
            first = max(0, wanted - least)
        try:
            opened = self._source.open(self.shard, first, wanted - first if state is None else 0)
            items, self._stateful = iterate(opened, state, not wanted)
        except StopIteration as error:
            # Unchanged, it would be mistaken for the end.
            raise RuntimeError("the generator function raised StopIteration") from error
        if state is None and self._source.can_begin_anywhere:
            self._stateful = None
        self.number = first if state is None else wanted - behind
        self._can_go_on = can_go_on(items)
        if self._watch is not None:
            items = WatchedItems(items, self._watch, self.shard.index, self.number)
        self._items = items
        return items

    def _replay(self, items: Iterator[Any], sender: Sender) -> None:
        """Run an iterator from its position, or that of its state, up to its start."""
        wanted, at = self._start.number, time.monotonic()
        while self.number < wanted:
            try:
                next(items)
            except StopIteration:
                raise StateMismatch(
                    f"shard {self.shard.index} ended after {self.number} items when it was run "
                    f"again, but {wanted} had come from it before: its generator does not repeat "
                    "itself. Draw from shard.rng only, and read the same data"
                ) from None
            self.number += 1
            at = self._replayed.note(at)
            # These reports were sent when the item was made first.
            self._reports.clear()
            self.in_user_code = False
            sender.check()
            self.in_user_code = True

    def close(self) -> None:
        """Run the generator's `finally`; an exception there is logged, not raised.

        It must not hide the first error, and after a stop no loop is left to raise it to.
        """
        try:
            close(self._items)
        except BaseException:
            _log.exception("closing the generator of shard %d failed", self.shard.index)
