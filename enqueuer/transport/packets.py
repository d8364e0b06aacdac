"""Whole packets, and descriptors with them, over a pair of sockets.

On Linux a SOCK_SEQPACKET pair: a packet is whole or absent, even if its sender is killed in the
middle of it. Elsewhere a stream with a length before each packet, of which a killed sender can
leave only the last one incomplete, and that one is dropped.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence

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
        flags = 0 if wait else socket.MSG_DONTWAIT
        try:
            if fds:
                rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds)
                sent = self._sock.sendmsg([packet], [rights], flags)
            else:
                sent = self._sock.send(packet, flags)
        except BlockingIOError:
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
                data, ancillary, _, _ = self._sock.recvmsg(*_HOW)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # Raised once, before the last packets of a dead sender, which can still be read.
                continue
            if data:
                self._keep(data, _descriptors_in(ancillary) if ancillary else [])
            else:
                self.ended = True

    def shutdown(self) -> None:
        """End what is sent; what comes can still be read."""
        # The other end may be gone already.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket, and every descriptor that came and was not taken."""
        self._sock.close()
        for _, fds in self.received:
            for fd in fds:
                os.close(fd)
        self.received.clear()

    def _keep(self, data: bytes, fds: list[int]) -> None:
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
