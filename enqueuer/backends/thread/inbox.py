"""What worker threads have sent: a buffer whose items keep their places until acknowledged.

worker --put()--> [ waiting ... ] --items()--> the loop --acknowledge()--> room for as many
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from queue import Empty as NothingYet

from enqueuer.backends.pool import Taken
from enqueuer.backends.thread.buffer import Buffer
from enqueuer.errors import Closed
from enqueuer.workers.messages import Empty, End, Failure, Item, Message


class ThreadInbox(Buffer[Message]):
    """See `enqueuer.backends.pool.Inbox`."""

    @property
    def waiting(self) -> int:
        return sum(isinstance(message, Item) for message in self.snapshot())

    def wait(self, end: float | None) -> None:
        """Wait until there is a message, until the inbox is closed, or until a time.

        Args:
            end: The time, of `time.monotonic()`; None waits forever.
        """
        with contextlib.suppress(Closed, NothingYet):
            self._wait_for_item(end)

    def head(self) -> bool | End | Failure | Empty:
        try:
            message = self._items[0][0]
        except IndexError:
            return False
        return True if isinstance(message, Item) else message

    def items(self, most: int, taken: Taken) -> Iterator[Item]:
        with self._lock:
            items, numbers = self._items, taken.numbers
            while most and items:
                item, size_bytes = items[0]
                if not isinstance(item, Item):
                    return
                shard, number = item.shard, item.number
                if item.state is not None:
                    taken.remember(shard, number, item.state)
                most -= 1
                # From here to the yield is no call and no jump, and so no signal handler runs.
                numbers[shard] = number + 1
                taken.last = shard
                del items[0]
                self._held += 1
                self._held_bytes += size_bytes
                yield item

    def remove(self, message: End | Failure | Empty) -> None:
        with self._lock:
            if self._items and self._items[0][0] is message:
                self._get_locked()

    def acknowledge(self) -> None:
        if self._held:
            with self._lock:
                # First, as an exception of a signal handler that strikes here must leave all to do.
                self._wake_putters_locked()
                self._bytes -= self._held_bytes
                self._held = self._held_bytes = 0
