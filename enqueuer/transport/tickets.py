"""Where idle workers take their tasks from: one pair of sockets for all of them.

    consumer --- packets: token, task, ticket ---> whichever worker is free takes one, whole

A packet is taken by exactly one worker, and nobody holds a lock while taking it. What was taken
by a worker that is dead now can be told by its token: tokens only grow, and the first one that
still lies in the socket can be looked at.
"""

from __future__ import annotations

import errno
import os
import pickle
import socket
import struct
from collections.abc import Sequence

import cloudpickle

from enqueuer.messages import Ticket
from enqueuer.transport import is_portable
from enqueuer.transport.blocks import nameless_file, read_whole
from enqueuer.transport.packets import HAS_SEQPACKET, MAX_PACKET, close_in_children

HEAD = struct.Struct("=QQ")  # token, number of the task
_INLINE_BYTES = 1024  # a larger ticket goes beside the packet; macOS takes 2048 in a datagram
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class TicketOffice:
    """The consumer's side.

    Args:
        are_forked: Whether the workers have the classes of `__main__`, as forked ones do; others
            must be sent them.
    """

    def __init__(self, are_forked: bool) -> None:
        self._are_forked = are_forked
        packets = HAS_SEQPACKET and not is_portable()
        kind = socket.SOCK_SEQPACKET if packets else socket.SOCK_DGRAM
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, kind)
        for end in (self._ours, self._theirs):
            end.setblocking(False)
            close_in_children(end)

    def counter(self) -> socket.socket:
        """Return the end that a worker takes tickets from; a copy, to be closed."""
        return self._theirs.dup()

    def send(self, token: int, ticket: Ticket) -> bool:
        """Offer a ticket to all workers; return whether there was room for it."""
        data, file = self.pack(token, ticket)
        try:
            if not file:
                self._ours.send(data)
                return True
            fd = nameless_file(file)
            try:
                socket.send_fds(self._ours, [data], [fd])
            finally:
                os.close(fd)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            if error.errno != errno.ENOBUFS:  # what macOS says instead
                raise
            return False
        return True

    def pack(self, token: int, ticket: Ticket) -> tuple[bytes, bytes]:
        """Return a ticket as the bytes of a packet, and those that go beside it in a file."""
        if ticket.elements is None or self._are_forked:
            try:
                data = pickle.dumps(ticket, protocol=5)
            except Exception:
                data = cloudpickle.dumps(ticket, protocol=5)
        else:
            data = cloudpickle.dumps(ticket, protocol=5)
        head = HEAD.pack(token, ticket.number)
        return (head + data, b"") if len(data) <= _INLINE_BYTES else (head, data)

    def first(self) -> int | None:
        """Return the token of the first ticket that nobody has taken; None if there is none."""
        try:
            data = self._theirs.recv(HEAD.size, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        token: int = HEAD.unpack_from(data)[0]
        return token

    def close(self) -> None:
        """Close both ends; workers keep their copies."""
        self._ours.close()
        self._theirs.close()


def take(counter: socket.socket) -> tuple[bytes, list[int]] | None:
    """Take a ticket, if there is one: the packet, and the descriptor beside it."""
    try:
        data, fds, _, _ = socket.recv_fds(counter, MAX_PACKET, 1, socket.MSG_DONTWAIT | _CLOEXEC)
    except (BlockingIOError, ConnectionResetError):
        return None
    return (data, list(fds)) if data else None


def unpack(packet: bytes, fds: Sequence[int]) -> Ticket:
    """Return the ticket of a packet; closes the descriptors."""
    ticket: Ticket = pickle.loads(read_whole(packet[HEAD.size :], fds))
    return ticket
