"""What the worker in the loop's own thread has sent, and its sender. One thread at a time is here.

turn of the worker --send_item(), send()--> [ the messages of this turn ] --items()--> the loop
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from enqueuer.backends.pool import Taken
from enqueuer.common.sizes import SAMPLED, size_of
from enqueuer.errors import Closed
from enqueuer.monitoring.meters import BYTES, Meter
from enqueuer.workers.messages import Empty, End, Failure, ItemTuple


class InlineInbox:
    """See `enqueuer.backends.pool.Inbox`.

    Attributes:
        messages: Messages that were sent and not taken; items are plain tuples.

    Example:
        >>> inbox = InlineInbox()
        >>> inbox.messages.append((0, 0, "a", None))
        >>> inbox.head(), inbox.waiting
        (True, 1)
    """

    def __init__(self) -> None:
        self.messages: deque[ItemTuple | End | Failure | Empty] = deque()

    @property
    def waiting(self) -> int:
        return sum(isinstance(message, tuple) for message in self.messages.copy())

    def head(self) -> bool | End | Failure | Empty:
        if not self.messages:
            return False
        message = self.messages[0]
        return True if isinstance(message, tuple) else message

    def items(self, most: int, taken: Taken) -> Iterator[ItemTuple]:
        messages, numbers = self.messages, taken.numbers
        for _ in range(most):
            # The inbox may have been cleared.
            if not messages or not isinstance(messages[0], tuple):
                return
            item = messages[0]
            shard, number, _value, state = item
            if state is not None:
                taken.remember(shard, number, state)
            # From here to the yield is no call and no jump, and so no signal handler runs.
            numbers[shard] = number + 1
            taken.last = shard
            del messages[0]
            yield item

    def remove(self, message: End | Failure | Empty) -> None:
        if self.messages and self.messages[0] is message:
            del self.messages[0]

    def acknowledge(self) -> None:
        """Do nothing: the worker sends nothing before the loop asks for it."""


class InlineSender:
    """The Sender of a worker in the loop's own thread.

    Args:
        name: Name of the worker, for failures.
        inbox: Inbox to which it sends its messages.

    Attributes:
        is_closed: Whether the enqueuer was stopped.
        meter: Account of the worker.
        items: Number of items that it has sent.
    """

    def __init__(self, name: str, inbox: InlineInbox) -> None:
        self.is_closed = False
        self.meter = Meter()
        self.items = 0
        self._name = name
        self._messages = inbox.messages

    def send_item(self, shard: int, number: int, value: object, state: Any = None) -> None:
        self.check()
        self.meter.words[BYTES] += size_of(value, SAMPLED)
        # It may be the iterator's own state, which changes.
        state = copy.deepcopy(state)
        self.items += 1
        self._messages.append((shard, number, value, state))

    def send(self, message: End | Failure | Empty) -> None:
        self.check()
        match message:
            case Failure(error=KeyboardInterrupt() as interrupt):
                # It came from the user's terminal to the loop, not from the generator.
                raise interrupt
            case Failure():
                message = dataclasses.replace(message, worker=self._name)
            case End(state=state):
                message = dataclasses.replace(message, state=copy.deepcopy(state))
        self._messages.append(message)

    def check(self) -> None:
        if self.is_closed:
            raise Closed("the enqueuer was stopped")

    def watch(self, waited: Callable[[int], None]) -> None:
        self.meter.waited = waited
