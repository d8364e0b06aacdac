"""Whole packets, and descriptors with them, over a pair of sockets.

On Linux a SOCK_SEQPACKET pair: a packet is whole or absent, even if its sender is killed in the
middle of it. Elsewhere a stream with a length before each packet, of which a killed sender can
leave only the last one incomplete, and that one is dropped.

The loop that takes packets from the kernel and keeps them runs inside `deque.extend`, in C: in one
step, so that no packet is lost by an exception (Ctrl-C).
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from itertools import repeat, starmap, takewhile
from operator import itemgetter

from enqueuer.common.catching import raised_here, suppressed
from enqueuer.common.descriptors import is_portable
from enqueuer.transport.memory import nameless_file
from enqueuer.transport.protocol import INLINE_BYTES

# Bytes; well below the buffer of a socket, usually 208 KiB.
MAX_PACKET = 64 * 1024
HAS_SEQPACKET = hasattr(socket, "SOCK_SEQPACKET") and hasattr(os, "pidfd_open")

# Descriptors that come with one packet.
_MOST_FDS = 5
_ANCILLARY = socket.CMSG_SPACE(_MOST_FDS * array.array("i").itemsize)
_FLAGS = socket.MSG_DONTWAIT | getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_HOW = MAX_PACKET, _ANCILLARY, _FLAGS
# In a stream, before each packet: its length, and the number of descriptors that belong to it.
_HEAD = struct.Struct("<IB")
_has_data = itemgetter(0)


def pair(
    kind: int | None = None, otherwise: int = socket.SOCK_STREAM
) -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets.

    Args:
        kind: Type of the sockets; None for whole packets, if there are sockets of that type.
        otherwise: Type of the sockets if there are none.
    """
    if kind is None:
        has_packets = HAS_SEQPACKET and not is_portable()
        kind = socket.SOCK_SEQPACKET if has_packets else otherwise
    ends = socket.socketpair(socket.AF_UNIX, kind)
    for end in ends:
        # Otherwise the program's `socket.setdefaulttimeout()` would hold for them.
        end.setblocking(True)
    return ends


class Packets:
    """One end of a pair of sockets.

    Args:
        sock: Socket of this end.

    Attributes:
        received: Packets that have come, the oldest first: data and descriptors.
        ended: Whether the other end is closed and all that it sent is in `received`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.is_stream = sock.type == socket.SOCK_STREAM
        # What comes until the end, without waiting; each is read when it is asked for.
        self._coming = takewhile(_has_data, starmap(sock.recvmsg, repeat(_HOW)))
        self._raw: deque[tuple[bytes, list[tuple[int, int, bytes]], int, object]] = deque()
        self._bytes = bytearray()
        self._fds: deque[int] = deque()
        self.received: deque[tuple[bytes, list[int]]] = deque()
        self.ended = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, data: bytes, fds: Sequence[int] = (), *, wait: bool = True) -> bool:
        """Send one packet; return whether it was sent, which without `wait` may fail.

        Raises:
            OSError: The other end is gone (BrokenPipeError, ConnectionResetError).
        """
        # A stream needs the lengths, and does not keep descriptors with a byte.
        packet = _HEAD.pack(len(data), len(fds)) + data if self.is_stream else data
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else ()
        try:
            sent = self._sock.sendmsg([packet], rights, 0 if wait else socket.MSG_DONTWAIT)
        except raised_here(BlockingIOError):
            return False
        if sent < len(packet):
            # The rest of a packet must follow in a stream. The other end reads before it sends, so
            # this cannot wait forever.
            self._sock.sendall(packet[sent:])
        return True

    def send_whole(
        self, head: bytes, data: bytes, fds: Sequence[int] = (), *, wait: bool = True
    ) -> bool:
        """Send one packet, as `send`; large data in a file beside it, see `read_whole`.

        Raises:
            BlockMemoryError: There is no room for the file, or no descriptor left.
            OSError: As for `send`.
        """
        if len(data) <= INLINE_BYTES:
            return self.send(head + data, fds, wait=wait)
        fd = nameless_file(data)
        try:
            return self.send(head, (fd,), wait=wait)
        finally:
            os.close(fd)

    def drain(self) -> None:
        """Move all that has come into `received`; wait for nothing."""
        while not self.ended:
            try:
                # Nothing but C runs between the system call and the deque, see the file's head.
                self._raw.extend(self._coming)
                self.ended = True
            except BlockingIOError as error:
                # This is the usual end, and so without the call of `raised_here`.
                if error.__traceback__ is None or error.__traceback__.tb_next is None:
                    break
                raise
            except raised_here(ConnectionResetError):
                # Raised once, before the last packets of a dead sender, which can still be read.
                continue
        while self._raw:
            first = self._raw[0]
            self._unpack(*first)
            # The calls above may run this method.
            if self._raw and self._raw[0] is first:
                del self._raw[0]

    def shutdown(self) -> None:
        """End what is sent; what comes can still be read."""
        # The other end may be gone already.
        with suppressed(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket, and every descriptor that came and was not taken."""
        self._sock.close()
        for _, fds in self.received:
            for fd in fds:
                os.close(fd)
        self.received.clear()

    def _unpack(
        self, data: bytes, ancillary: list[tuple[int, int, bytes]], flags: int, _: object
    ) -> None:
        fds = _descriptors_in(ancillary)
        if not self.is_stream:
            self.received.append((data, fds))
            return
        self._fds.extend(fds)
        self._bytes += data
        while len(self._bytes) >= _HEAD.size:
            length, count = _HEAD.unpack_from(self._bytes)
            end = _HEAD.size + length
            if len(self._bytes) < end:
                return
            fds = [self._fds.popleft() for _ in range(min(count, len(self._fds)))]
            self.received.append((bytes(self._bytes[_HEAD.size : end]), fds))
            del self._bytes[:end]


def take(sock: socket.socket) -> tuple[bytes, list[int]] | None:
    """Take a packet with its descriptors, if there is one, off the socket of several workers."""
    try:
        data, ancillary, _, _ = sock.recvmsg(*_HOW)
    except (BlockingIOError, ConnectionResetError):
        return None
    return (data, _descriptors_in(ancillary)) if data else None


def _descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
    return fds.tolist()


def send_descriptors(packets: Packets, fds: Sequence[int]) -> None:
    """Send any number of descriptors, in packets of their own."""
    for start in range(0, len(fds), _MOST_FDS):
        packets.send(b"+", fds[start : start + _MOST_FDS])


def packets_of(count: int) -> int:
    """Return the number of packets with which `send_descriptors` sends so many descriptors."""
    return -(-count // _MOST_FDS)
