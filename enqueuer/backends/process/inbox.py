"""What a worker process has sent, as the engine reads it: the messages of its channel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from enqueuer.backends.pool import Taken
from enqueuer.transport.item_receiver import ItemReceiver
from enqueuer.workers.messages import Empty, End, Failure, ItemTuple

_Head = tuple[int, bool | End | Failure | Empty]

_NOTHING: _Head = (-1, False)


class ProcessInbox:
    """See `enqueuer.backends.pool.Inbox`.

    Args:
        channel: This process's end of the channel.
        name: Name of the worker.
        read: Function that reads the packets of the channel and delivers its log records.
        room: Function that returns how many more items may wait, over all workers; None: any
            number, as tickets are the bound.
    """

    def __init__(
        self,
        channel: ItemReceiver,
        name: str,
        read: Callable[[ProcessInbox], None],
        room: Callable[[], int] | None,
    ) -> None:
        self._channel = channel
        self._name = name
        self._read = read
        self._room = room
        # Position in the ring, and the message that `head` returned there.
        self._head = _NOTHING

    @property
    def waiting(self) -> int:
        return self._channel.waiting

    def head(self) -> bool | End | Failure | Empty:
        channel = self._channel
        if channel.has_packets or channel.records:
            self._read(self)
        if not channel.has_message:
            return False
        position, message = self._head
        if position == channel.position:
            return message
        found = channel.other()
        if found is None:
            return True
        if isinstance(found, Failure):
            found = dataclasses.replace(found, worker=self._name)
        self._head = channel.position, found
        return found

    def items(self, most: int, taken: Taken) -> Iterator[ItemTuple]:
        return self._channel.items(most, taken)

    def remove(self, message: End | Failure | Empty) -> None:
        position, head = self._head
        if head is message and position == self._channel.position:
            self._channel.pass_over()
        self._head = _NOTHING

    def acknowledge(self) -> None:
        channel = self._channel
        if self._room is None:
            channel.make_room()
        elif not channel.is_acknowledged:
            channel.acknowledge()
            channel.grant(self._room())
