"""The loop that every worker of shards runs, on every backend: shards -> items -> a sender.

    serve: wait for an epoch -> turns -> wait for the next one -> ... -> exit
    turns: one item of each shard in turn, until all have ended or one has failed

The items leave in the order in which an ordered consumer reads them. This file knows no
backend: the sender is a thread's buffer, a process's channel or, in a test, a list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

from enqueuer.errors import Closed
from enqueuer.workers.messages import End, Failure, Orders, Sender, Start
from enqueuer.workers.plan import OnError, Plan
from enqueuer.workers.shards import Shard, do_nothing
from enqueuer.workers.skipping import may_skip, send_replacement, skip_or_end
from enqueuer.workers.sources import Source
from enqueuer.workers.stream import ShardStream
from enqueuer.workers.tasks import TaskSource


def serve(
    plan: Plan, orders: Orders, sender: Sender, enter: Callable[[Shard], None] | None = None
) -> None:
    """Run one epoch after the other, until there are no more orders or the consumer left.

    Args:
        plan: Source and shards of this worker.
        orders: Source of the epochs.
        sender: Sender of items, ends and a failure.
        enter: Function that is called with a shard before its code runs; it exchanges the global
            random states.
    """
    assert not isinstance(plan.source, TaskSource)
    enter = enter or do_nothing
    try:
        last = -1
        while (epoch := orders.next_epoch()) is not None:
            # An order comes twice if an exception interrupts the consumer while it sends it.
            if epoch.number <= last:
                continue
            last = epoch.number
            # There is no pause between turns.
            deque(turns(plan.source, plan.of(epoch), sender, enter, plan.on_error), maxlen=0)
    except Closed:
        pass


def turns(
    source: Source,
    starts: Mapping[Shard, Start],
    sender: Sender,
    enter: Callable[[Shard], None],
    on_error: OnError = "raise",
    one_by_one: bool = False,
) -> Iterator[None]:
    """Send what `source` yields for each shard in turn, then each shard's end.

    The first exception ends the run: it is sent as a Failure. With another `on_error` it ends
    only the shard whose generator raised it. Closed, which means that the consumer left, is raised
    to the caller. In each case the generators are closed, here in the thread that ran them, so
    that their `finally` runs.

    Args:
        source: Source of all shards.
        starts: Start of each shard, in the order of their turns.
        sender: Sender of the items.
        enter: As for `serve`.
        on_error: Handling of an exception of the source.
        one_by_one: Whether to yield after each turn; otherwise nothing is yielded.
    """
    streams = deque(ShardStream(source, shard, start) for shard, start in starts.items())
    with ExitStack() as stack:
        for stream in streams:
            stack.callback(stream.close)
        while streams:
            stream = streams[0]
            enter(stream.shard)
            has_sent = True
            try:
                has_more = stream.advance(sender, alone=len(streams) == 1 and not one_by_one)
            except BaseException as error:
                # Our Closed means that the consumer left; the user's code may raise one, too.
                if isinstance(error, Closed) and not stream.in_user_code:
                    raise
                goes_on, has_sent = _send_failure(stream, error, sender, on_error)
                if not goes_on:
                    return
                stream.number += 1
                # A generator that raised has ended.
                has_more = not stream.in_user_code
            if not has_more:
                streams.popleft()
                sender.send(End(stream.shard.index, stream.state_at_end, stream.number))
            elif has_sent:
                # Otherwise it is still its turn, as if the item had been None.
                streams.rotate(-1)
            if one_by_one:
                yield


def _send_failure(
    stream: ShardStream, error: BaseException, sender: Sender, on_error: OnError
) -> tuple[bool, bool]:
    """Send the failure of an item, and its replacement.

    Returns:
        Whether the error is skipped, and whether there was a replacement.
    """
    if stream.is_behind and may_skip(error, on_error):
        # A replay: the loop has had the reports, the failure and the replacement.
        return True, False
    stream.send_reports(sender)
    failure = Failure(stream.shard.index, stream.number, error)
    goes_on, value = skip_or_end(failure, sender, on_error)
    if value is None:
        return goes_on, False
    return send_replacement(failure, value, sender), True
