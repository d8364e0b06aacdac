"""The messages of one actor, as the engine reads them, and the credit that it is granted."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator

from enqueuer.backends.pool import Taken
from enqueuer.backends.ray.outbox import TotalCredit
from enqueuer.monitoring.meters import clock
from enqueuer.workers import logs
from enqueuer.workers.messages import Empty, End, Failure, Item, Message

# Nanoseconds between two grants; a grant that comes later is always worth its call.
_GRANT_GAP_NS = 5_000_000


class RayInbox:
    """See `enqueuer.backends.pool.Inbox`. The thread that receives from the actor fills it.

    Args:
        lock: Lock of the pool, which guards the messages.
        records: Log records of all workers, which the loop delivers.
        credit: Credit that the actor begins with; that many items and bytes may wait here.
        grant: Function that is called when the loop has consumed the items that it took.

    Attributes:
        needs_credit: Whether the actor has an item and no credit to send it.
    """

    def __init__(
        self,
        lock: threading.RLock,
        records: deque[logging.LogRecord],
        credit: TotalCredit,
        grant: Callable[[], None],
    ) -> None:
        self.needs_credit = False
        self._lock = lock
        self._records = records
        self._quota, self._share = credit.items, credit.size
        # The last grant, and its time.
        self._credit = credit
        self._granted = clock()
        self._grant = grant
        self._messages: deque[Message] = deque()
        # Sizes of the items among the messages.
        self._sizes: deque[int] = deque()
        # Numbers of items that came, that were taken, and that are consumed; then bytes of these.
        self._received = self._taken = self._acknowledged = 0
        self._taken_bytes = self._acknowledged_bytes = 0

    @property
    def waiting(self) -> int:
        return len(self._sizes)

    def put_locked(self, messages: list[Message], sizes: list[int]) -> None:
        """Add messages, and the sizes of the items among them."""
        self._messages.extend(messages)
        self._sizes.extend(sizes)

    def count_locked(self) -> None:
        """Count an item that has arrived, also one that cannot be loaded."""
        self._received += 1
        self.needs_credit = False

    def head(self) -> bool | End | Failure | Empty:
        while self._records:
            deliver(self._records)
        try:
            message = self._messages[0]
        except IndexError:
            return False
        return True if isinstance(message, Item) else message

    def items(self, most: int, taken: Taken) -> Iterator[Item]:
        with self._lock:
            messages, sizes, numbers = self._messages, self._sizes, taken.numbers
            while most and messages:
                item = messages[0]
                if not isinstance(item, Item):
                    return
                shard, number, size = item.shard, item.number, sizes[0]
                if item.state is not None:
                    taken.remember(shard, number, item.state)
                most -= 1
                # From here to the yield is no call and no jump, and so no signal handler runs.
                del messages[0]
                del sizes[0]
                self._taken += 1
                self._taken_bytes += size
                numbers[shard] = number + 1
                taken.last = shard
                yield item

    def remove(self, message: End | Failure | Empty) -> None:
        with self._lock:
            if self._messages and self._messages[0] is message:
                self._messages.popleft()

    def acknowledge(self) -> None:
        if self._acknowledged != self._taken:
            self._acknowledged, self._acknowledged_bytes = self._taken, self._taken_bytes
            self._grant()

    def due_credit(self, wanted: bool) -> TotalCredit | None:
        """Return the credit to grant now; None if it is not worth a call.

        Args:
            wanted: Whether the loop waits for the next item, which must then come in any case.
        """
        quota, before = self._quota, self._credit
        items = self._acknowledged + quota
        size = None if self._share is None else self._acknowledged_bytes + self._share
        at_least = before.wanted
        if wanted and (quota == 0 or size is not None):
            at_least = self._received + 1
        # A call costs about as much as a packet, so a fast loop grants many small items at once. A
        # slow loop grants each item, so that its queue is full whenever it asks.
        now = clock()
        is_worth_it = 2 * (items - before.items) >= quota or now - self._granted > _GRANT_GAP_NS
        # The bytes may be used up long before the items.
        if size is not None and before.size is not None:
            is_worth_it |= 2 * (size - before.size) >= (self._share or 0)
        if at_least == before.wanted and not (is_worth_it and (items, size) != before[:2]):
            return None
        self._credit, self._granted = TotalCredit(items, size, at_least), now
        return self._credit


def deliver(records: deque[logging.LogRecord]) -> None:
    """Log the records of workers; called in the thread of the loop, and at the stop."""
    while records:
        try:
            record = records.popleft()
        except IndexError:
            # Another thread stops the workers, and delivers the records, too.
            return
        logs.deliver(record)
