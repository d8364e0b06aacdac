"""What a worker process says of itself at any time: records on a page that it alone writes.

    worker: Status.meter.new() -> write(*values)        consumer: Status.meter.read() -> values

A packet would wake the loop in vain, and a loop that computes reads none. The loop also needs the
claims and the watches of a worker that hangs or was killed.

A record that is read while it is written is recognised by its checksum, in whatever order its bytes
arrive, and is read again.
"""

from __future__ import annotations

import mmap
import struct
import threading
import zlib
from collections.abc import Callable

from enqueuer.monitoring import meters
from enqueuer.transport.memory import map_shared, open_nameless
from enqueuer.workers.plan import MOST_THREADS

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
_KINDS = ((EPOCH + 1, 1), (1, MOST_THREADS), (3, 1 + 2 * MOST_THREADS))
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
