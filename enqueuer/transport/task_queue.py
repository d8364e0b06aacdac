"""The queue from which idle workers take their tasks: one pair of sockets for all of them.

    consumer --- packets: token, task, ticket ---> a free worker takes one, whole

A packet is taken by exactly one worker, and no worker holds a lock while taking it. Tokens show
which tickets a dead worker had taken: tokens only grow, and the first one that still lies in the
socket can be read without taking it.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Mapping
from typing import Any

from enqueuer.common.descriptors import own_sockets
from enqueuer.common.text import an
from enqueuer.errors import ItemNotPicklable
from enqueuer.order.messages import Ticket
from enqueuer.transport.memory import read_whole
from enqueuer.transport.packets import Packets, pair

# Token, number of the task.
HEAD = struct.Struct("=QQ")


class TaskQueue:
    """The consumer's side of the task queue.

    Attributes:
        shows_room: Whether a poll for writing ends when there is room. Elsewhere than on Linux, a
            socket for datagrams can always be written to, it says.
    """

    def __init__(self) -> None:
        ours, self._theirs = own_sockets(pair(otherwise=socket.SOCK_DGRAM))
        self.shows_room = ours.type != socket.SOCK_DGRAM
        self._packets = Packets(ours)

    def fileno(self) -> int:
        return self._packets.fileno()

    def worker_socket(self) -> socket.socket:
        """Return a copy of the end from which a worker takes tickets; the caller closes it."""
        return self._theirs.dup()

    def send(self, token: int, number: int, body: bytes) -> bool:
        """Offer a ticket to all workers; return whether there was room for it."""
        return self._packets.send_whole(HEAD.pack(token, number), body, wait=False)

    def first(self) -> int | None:
        """Return the token of the first ticket that no worker has taken; None if there is none."""
        try:
            data = self._theirs.recv(HEAD.size, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        token: int = HEAD.unpack_from(data)[0]
        return token

    def close(self) -> None:
        """Close both ends; workers keep their copies."""
        self._packets.close()
        self._theirs.close()


def pack(ticket: Ticket, known: Mapping[str, Any] | None) -> bytes:
    """Return a ticket as bytes.

    Args:
        ticket: Ticket to be sent.
        known: Definitions that the workers have got with the source, by their ids; None if they
            are forked, and so have all of `__main__`.

    Raises:
        ItemNotPicklable: An element cannot be sent; the message names the culprit.
    """
    try:
        data = pickle.dumps(ticket, protocol=5)
        by_name = known is None or b"__main__" not in data
        # Tensors must be checked.
        if by_name and b"_rebuild_" not in data:
            return data
    except Exception:
        pass
    # As in `item_codec`.
    from enqueuer.transport.culprit import find_culprit
    from enqueuer.transport.definitions import dumps

    try:
        return dumps(ticket, known=known or {}, by_name=known is None)
    except Exception as error:
        culprit, part = find_culprit("element", (ticket.elements or ("",))[0])
        raise ItemNotPicklable(
            f"{culprit} is {an(type(part).__qualname__)}, which cannot be sent to a process "
            f"({error}); let the iterable give paths or plain data, or use backend='thread'"
        ) from error


def unpack(packet: bytes, fds: list[int]) -> Ticket:
    """Return the ticket of a packet, and close the descriptors."""
    body = packet[HEAD.size :]
    ticket: Ticket = pickle.loads(read_whole(body, fds) if fds else body)
    return ticket
