"""Where idle workers take their tasks from: one pair of sockets for all of them.

    consumer --- packets: token, task, ticket ---> whichever worker is free takes one, whole

A packet is taken by exactly one worker, and nobody holds a lock while taking it. What was taken
by a worker that is dead now can be told by its token: tokens only grow, and the first one that
still lies in the socket can be looked at.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import pickle
import socket
import struct

import cloudpickle

from enqueuer.errors import ItemNotPicklable
from enqueuer.formats import an
from enqueuer.messages import Ticket
from enqueuer.transport import is_portable
from enqueuer.transport.blocks import nameless_file, read_whole
from enqueuer.transport.codec import find_culprit
from enqueuer.transport.packets import HAS_SEQPACKET, close_in_children

HEAD = struct.Struct("=QQ")  # token, number of the task
INLINE_BYTES = 1024  # a larger ticket goes beside the packet; macOS takes 2048 in a datagram
_MOST_BYTES = HEAD.size + INLINE_BYTES
_ANCILLARY = socket.CMSG_SPACE(array.array("i").itemsize)
_FLAGS = int(socket.MSG_DONTWAIT | getattr(socket, "MSG_CMSG_CLOEXEC", 0))


class TaskQueue:
    """The consumer's side."""

    def __init__(self) -> None:
        packets = HAS_SEQPACKET and not is_portable()
        kind = socket.SOCK_SEQPACKET if packets else socket.SOCK_DGRAM
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, kind)
        for end in (self._ours, self._theirs):
            end.setblocking(False)
            close_in_children(end)

    def worker_socket(self) -> socket.socket:
        """Return the end that a worker takes tickets from; a copy, to be closed."""
        return self._theirs.dup()

    def send(self, token: int, number: int, body: bytes) -> bool:
        """Offer a ticket to all workers; return whether there was room for it."""
        head = HEAD.pack(token, number)
        try:
            if len(body) <= INLINE_BYTES:
                self._ours.send(head + body)
                return True
            fd = nameless_file(body)
            try:
                socket.send_fds(self._ours, [head], [fd])
            finally:
                os.close(fd)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            if error.errno != errno.ENOBUFS:  # what macOS says instead
                raise
            return False
        return True

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


def take(task_socket: socket.socket) -> tuple[bytes, list[int]] | None:
    """Take a ticket, if there is one: the packet, and the descriptor beside it."""
    try:
        data, ancillary, _, _ = task_socket.recvmsg(_MOST_BYTES, _ANCILLARY, _FLAGS)
    except (BlockingIOError, ConnectionResetError):
        return None
    fds = array.array("i")
    for _, _, rights in ancillary:
        fds.frombytes(rights[: fds.itemsize])
    return (data, fds.tolist()) if data else None


def pack(ticket: Ticket, are_forked: bool) -> bytes:
    """Return a ticket as bytes.

    Args:
        ticket: That is to be sent.
        are_forked: Whether the workers have the classes of `__main__`, as forked ones do; others
            must be sent them.

    Raises:
        ItemNotPicklable: An element cannot be sent; the message names the culprit.
    """
    with contextlib.suppress(Exception):
        data = pickle.dumps(ticket, protocol=5)
        if are_forked or b"__main__" not in data:
            return data
    try:
        by_value: bytes = cloudpickle.dumps(ticket, protocol=5)
    except Exception as error:
        culprit, part = find_culprit("element", (ticket.elements or ("",))[0])
        raise ItemNotPicklable(
            f"{culprit} is {an(type(part).__qualname__)}, which cannot be sent to a process "
            f"({error}); let the iterable give paths or plain data, or use backend='thread'"
        ) from error
    return by_value


def unpack(packet: bytes, fds: list[int]) -> Ticket:
    """Return the ticket of a packet; closes the descriptors."""
    ticket: Ticket = pickle.loads(read_whole(packet[HEAD.size :], fds))
    return ticket
