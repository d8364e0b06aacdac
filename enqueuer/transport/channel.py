"""What crosses between worker processes and the consumer: packets on sockets, and pages of memory.

    worker (ItemSender)                                           consumer (ItemReceiver)
      ITEM STATED ARRAYS MESSAGE  ---------------------------->  head(), take()
      READY BLOCK DROP RECORD ASK  --------------------------->  blocks, records
      orders, credit           <----------- EPOCH TASK STOP CREDIT
      Status.meter.new() -> write(*values)  --- its page ----->  Status.meter.read() -> values
    a free worker takes one, whole  <---- token, task, ticket    TaskQueue, one for all workers

Each socket of a worker has one writer on each side, and no lock is shared, so a worker that is
killed leaves no other process waiting. Only an `End` is an end.

Packets are those of a SOCK_SEQPACKET pair on Linux: a packet is whole or absent, even if its sender
is killed in the middle of it. Elsewhere a stream with a length before each packet, of which a
killed sender can leave only the last one incomplete, and that one is dropped.

A credit is the right to send one more item. The consumer's arithmetic for one worker: credits
granted + items that wait <= its quota; and one more for the item that the consumer waits for,
since that one does not wait. With a bound on bytes the worker itself keeps the account, since
only it knows the size of the item that it is about to send.

The page says what a worker does, in records that it alone writes. A packet would wake the loop in
vain, and a loop that computes reads none. The loop also needs the claims and the watches of a
worker that hangs or was killed. A record that is read while it is written is recognised by its
checksum, in whatever order its bytes arrive, and is read again.

The queue of tickets is one pair of sockets. A packet of it is taken by exactly one worker, and no
worker holds a lock while taking it. Tokens show which tickets a dead worker had taken: tokens only
grow, and the first one that still lies in the socket can be read without taking it.
"""

from __future__ import annotations

import array
import contextlib
import enum
import mmap
import os
import pickle
import socket
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from enqueuer.common.descriptors import is_portable, owned_sockets
from enqueuer.common.text import an
from enqueuer.errors import ItemNotPicklable
from enqueuer.monitoring import meters
from enqueuer.order.messages import Ticket
from enqueuer.transport.memory import map_shared, nameless_file, open_nameless, read_whole
from enqueuer.workers.plan import MAX_THREADS


class Kind(enum.IntEnum):
    """Kinds of packets: with a frame, from the worker, and to it."""

    ITEM = 1
    # An item, in a pair with the state of its iterator after it.
    STATED = 2
    # An item of small arrays, behind their layout.
    ARRAYS = 3
    # What is no item: an end, a failure, or a task without a result.
    MESSAGE = 4

    READY = 10
    BLOCK = 11
    DROP = 12
    RECORD = 13
    # The worker has an item and no credit for it.
    ASK = 14

    EPOCH = 20
    STOP = 21
    # A ticket for this worker alone.
    TASK = 22
    # What the worker may send, and the blocks that it may use again.
    CREDIT = 23


# A frame is this head, a table of the segments that lie in blocks, and the pickle if it is small.
# The head: size of the table, shard, number of the item.
FRAME = struct.Struct("=IIQ")
# Number of the block, and of its use; offset in it, size.
SEGMENT = struct.Struct("=IQQQ")
# Numbers of items: those that may be sent, those that were taken, and 1 + that of the one that the
# consumer waits for. Blocks that were released follow.
CREDIT = struct.Struct("=QQQ")
# Number of the block, and of its use.
RELEASED = struct.Struct("=IQ")
# Items that a worker of tasks may send: their tickets are the bound.
NO_LIMIT = 1 << 62
# Kind of the packet, its number in the sequence.
PACKET = struct.Struct("=BQ")
NUMBER = struct.Struct("=Q")

# A larger pickle goes into a block, and other data into a file beside its packet.
INLINE_BYTES = 16 * 1024


class Credit(NamedTuple):
    """The credit with which a worker begins, and the rules for more.

    Attributes:
        items: Number of its items that may wait.
        waiting_bytes: Largest number of bytes of its items that may wait, or None.
        ask: Whether the worker reports that it has an item and no credit.
    """

    items: int
    waiting_bytes: int | None
    ask: bool


# --- packets --------------------------------------------------------------------------------------

# Bytes; well below the buffer of a socket, usually 208 KiB.
MAX_PACKET = 64 * 1024
HAS_SEQPACKET = hasattr(socket, "SOCK_SEQPACKET") and hasattr(os, "pidfd_open")

# Descriptors that come with one packet.
_MAX_FDS = 5
_ANCILLARY = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
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
        # Without this, the program's `socket.setdefaulttimeout()` would hold for them.
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
    for start in range(0, len(fds), _MAX_FDS):
        packets.send(b"+", fds[start : start + _MAX_FDS])


def packets_of(count: int) -> int:
    """Return the number of packets with which `send_descriptors` sends so many descriptors."""
    return -(-count // _MAX_FDS)


# --- the page -------------------------------------------------------------------------------------

# Behind the words of its meter: number of items that were sent, the same before the epoch that the
# worker runs, and the number of that epoch.
SENT, SENT_BEFORE, EPOCH = range(meters.WORDS, meters.WORDS + 3)
# Readings of a record, until the last one that was whole counts: its writer may be stopped or dead.
_TRIES = 100
_CHECK = struct.Struct("=I")


class Records:
    """Records of one kind, each of so many whole numbers.

    Args:
        memory: Their place on the page, all 0.
        fields: Numbers in a record.

    Example:
        >>> records = Records(memoryview(bytearray(60)), 2)
        >>> first, second = records.new(), records.new()
        >>> first(1, 2), second(3, 4), first(5, 6), records.read()
        (None, None, None, [(5, 6), (3, 4)])
    """

    def __init__(self, memory: memoryview, fields: int) -> None:
        self._memory, self._fields = memory, fields
        self._numbers = struct.Struct(f"={fields}q")
        self._size = self._numbers.size + _CHECK.size
        self._nothing = bytes(self._size)
        # Places in use; counted by the worker.
        self._used = 0
        self._lock = threading.Lock()
        # The records that were read last; kept by the consumer.
        self._known: dict[int, tuple[int, ...]] = {}

    @staticmethod
    def bytes_of(fields: int, count: int) -> int:
        """Return the size of so many records."""
        return count * (8 * fields + _CHECK.size)

    def new(self) -> Callable[..., None]:
        """Return a function that writes a record of its own. Called by the worker, in any thread.

        The record is one of zeros until then: the consumer reads up to the first unused place.
        """
        memory, pack, fields = self._memory, self._numbers.pack, self._fields

        def write(*values: int) -> None:
            data = pack(*values)
            memory[begin:end] = data + _CHECK.pack(zlib.crc32(data))

        with self._lock:
            begin = self._used * self._size
            end = begin + self._size
            write(*[0] * fields)
            self._used += 1
        return write

    def read(self) -> list[tuple[int, ...]]:
        """Return all records that are in use. Called by the consumer, in any thread."""
        found = []
        for begin in range(0, len(self._memory) - self._size + 1, self._size):
            record = self._read(begin)
            if record is None:
                break
            found.append(record)
        return found

    def _read(self, begin: int) -> tuple[int, ...] | None:
        for _ in range(_TRIES):
            data = bytes(self._memory[begin : begin + self._size])
            if data == self._nothing:
                return None
            numbers, check = data[: -_CHECK.size], data[-_CHECK.size :]
            if _CHECK.pack(zlib.crc32(numbers)) == check:
                self._known[begin] = self._numbers.unpack(numbers)
                break
        return self._known.get(begin)


# Kinds of records: their numbers, and most of them. Each ticket that a worker has needs a claim,
# and a watch is that of the worker's own thread, or of one of two threads for each coroutine.
_KINDS = ((EPOCH + 1, 1), (1, MAX_THREADS), (3, 1 + 2 * MAX_THREADS))
_SIZES = [Records.bytes_of(*kind) for kind in _KINDS]


class Status:
    """One side's view of the page.

    Attributes:
        meter: One record: the words of the worker's meter, and SENT, SENT_BEFORE and EPOCH.
        claims: Of each ticket that the worker has taken: 0, or 1 + its token. A worker with several
            threads has one for each ticket that is not done; others use the first one, for the
            ticket that was taken last.
        watches: Of each thread: when it began what it runs, 0 if it runs nothing; then the shard,
            or the place of the element in its ticket, and the number of the item, or of the task.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        view, parts = memoryview(memory), []
        for (fields, _), size in zip(_KINDS, _SIZES, strict=True):
            parts.append(Records(view[:size], fields))
            view = view[size:]
        self.meter, self.claims, self.watches = parts

    @classmethod
    def of(cls, fd: int) -> Status:
        """Map the page behind a descriptor, which stays the caller's.

        Raises:
            OSError: There is no address space or no descriptor left.
        """
        return cls(map_shared(fd, sum(_SIZES)))


def open_status() -> int:
    """Return a descriptor of a new page.

    Raises:
        OSError: There is no memory or no descriptor left.
    """
    return open_nameless(sum(_SIZES))


# --- the queue of tickets -------------------------------------------------------------------------

# Token, number of the task.
TICKET = struct.Struct("=QQ")


class TaskQueue:
    """The consumer's side of the task queue.

    Attributes:
        shows_room: Whether a poll for writing ends when there is room. Elsewhere than on Linux, a
            socket for datagrams can always be written to, it says.
    """

    def __init__(self) -> None:
        ours, self._theirs = owned_sockets(pair(otherwise=socket.SOCK_DGRAM))
        self.shows_room = ours.type != socket.SOCK_DGRAM
        self._packets = Packets(ours)

    def fileno(self) -> int:
        return self._packets.fileno()

    def worker_socket(self) -> socket.socket:
        """Return a copy of the end from which a worker takes tickets; the caller closes it."""
        return self._theirs.dup()

    def send(self, token: int, number: int, body: bytes) -> bool:
        """Offer a ticket to all workers; return whether there was room for it."""
        return self._packets.send_whole(TICKET.pack(token, number), body, wait=False)

    def first(self) -> int | None:
        """Return the token of the first ticket that no worker has taken; None if there is none."""
        try:
            data = self._theirs.recv(TICKET.size, socket.MSG_PEEK)
        except BlockingIOError:
            return None
        token: int = TICKET.unpack_from(data)[0]
        return token

    def close(self) -> None:
        """Close both ends; workers keep their copies."""
        self._packets.close()
        self._theirs.close()


def pack_ticket(ticket: Ticket, known: Mapping[str, Any] | None) -> bytes:
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
    # Most programs never need them, and their import takes some milliseconds.
    from enqueuer.transport.definitions import dumps
    from enqueuer.transport.errors import find_culprit

    try:
        return dumps(ticket, known=known or {}, by_name=known is None)
    except Exception as error:
        culprit, part = find_culprit("element", (ticket.elements or ("",))[0])
        raise ItemNotPicklable(
            f"{culprit} is {an(type(part).__qualname__)}, which cannot be sent to a process "
            f"({error}); let the iterable give paths or plain data, or use backend='thread'"
        ) from error


def unpack_ticket(packet: bytes, fds: list[int]) -> Ticket:
    """Return the ticket of a packet, and close the descriptors."""
    body = packet[TICKET.size :]
    ticket: Ticket = pickle.loads(read_whole(body, fds) if fds else body)
    return ticket
