"""The ring buffer from one worker to the consumer: frames in memory that both have mapped.

    worker   --- frames: items, ends, failures --->   consumer
    worker   --- WRITTEN, SENT, ...     | words |
                                        | words |     READ, LIMIT, ... --- consumer
    worker   <-- numbers of released blocks ------- consumer

Nothing here is a system call, and there is no lock. Each word has one writer. A frame counts
once WRITTEN is beyond it, and that is stored last: a worker that is killed in the middle of a
frame leaves no half frame, and what it had written before can be read after its death.

Only sleeping needs the socket. A side that is about to sleep stores a new number in its ASLEEP
word, then checks the ring once more. A side that has written something checks whether the other
is asleep, and wakes it with a packet. A fence between the two steps, on either side, makes sure
that at least one of them sees what the other has stored.

To sleep and to be woken takes two system calls on each side and longer than many small items.
Where each process has a CPU of its own, a side looks for a moment before it sleeps (`Spin`).
"""

from __future__ import annotations

import mmap
import platform
import threading
from collections import deque
from collections.abc import Callable

from enqueuer.monitoring import meters
from enqueuer.monitoring.meters import clock
from enqueuer.transport.block_map import Lease
from enqueuer.transport.memory import map_shared, open_nameless
from enqueuer.workers.plan import WATCH_WORDS
from enqueuer.workers.task_loop import MOST_THREADS

# Nanoseconds: about as long as to sleep and to be woken.
_SPIN_NS = 50_000
_MOST_SKIPPED = 1024


class Spin:
    """Spin before the sleeps of one side.

    Args:
        is_allowed: Whether the processes of both sides have a CPU each.

    Example:
        >>> answers = iter([False, True])
        >>> Spin(True).until(lambda: next(answers)), Spin(False).until(lambda: True)
        (True, False)
    """

    def __init__(self, is_allowed: bool) -> None:
        self._is_allowed = is_allowed
        # Waits that sleep at once, and how many after the next one in vain.
        self._skipped = 0
        self._penalty = 1

    def until(self, is_over: Callable[[], bool]) -> bool:
        """Return whether a wait is over within a moment; False at once if that is not expected."""
        if not self._is_allowed:
            return False
        if self._skipped:
            self._skipped -= 1
            return False
        end = clock() + _SPIN_NS
        while not is_over():
            if clock() >= end:
                self._skipped = self._penalty
                self._penalty = min(2 * self._penalty, _MOST_SKIPPED)
                return False
        self._penalty = 1
        return True


# Words of 8 bytes. Counts are since the start. The worker's words have a cache line of their own:
# Bytes of frames that were written.
WRITTEN = 0
# Items that were sent.
SENT = 1
# Packets that were sent to the consumer: it reads the socket when there are more.
PACKETS = 2
# 0, or a number that is new with each sleep of the worker.
WORKER_ASLEEP = 3
# 1 + the number of the item that the worker holds without credit.
ASKING = 4
# Numbers of released blocks that were read.
RELEASED_READ = 5
# Twice the number of items that were sent before the epoch that the worker runs, and 1 more if the
# number of that epoch is odd.
EPOCH_AT = 7
# The consumer's words have another cache line:
# Bytes of frames that were read.
READ = 8
# Items that were taken.
TAKEN = 9
# Items that may be sent: the credits.
LIMIT = 10
# 1 + the number of the item that the consumer waits for.
WANTED = 11
# Packets that were sent to the worker: it reads the socket when there are more.
ORDERS = 12
# 0, or a number that is new with each sleep of the consumer.
CONSUMER_ASLEEP = 13
# Numbers of released blocks that were written.
RELEASED_WRITTEN = 14
# 0 if the consumer sleeps until anything comes; else 2 + twice the number of the task whose result
# it waits for, and 1 more if the worker may do the other tasks of its packet first.
AWAITED = 15
# The worker's meter has a third cache line.

_METER_AT = 128
_WORDS_BYTES = _METER_AT + 8 * meters.WORDS
# Places for numbers of 4 bytes.
_RELEASED_PLACES = 4096
_CLAIMS_AT = _WORDS_BYTES + 4 * _RELEASED_PLACES
_WATCH_AT = _CLAIMS_AT + 8 * MOST_THREADS
# Those of the worker's own thread, and of two for each coroutine.
_FRAMES_AT = _WATCH_AT + 8 * WATCH_WORDS * (1 + 2 * MOST_THREADS)

# Bytes of frames that wait; the cache of a core holds them all.
RING_BYTES = 448 * 1024
MOST_FRAME_BYTES = 64 * 1024
SIZE_BYTES = _FRAMES_AT + RING_BYTES + MOST_FRAME_BYTES

# Elsewhere a processor may let others see two stores, or do two loads, in another order.
IS_STRONG = platform.machine().lower() in {"x86_64", "amd64", "i686", "i386"}


class Ring:
    """One side's view of the ring.

    Attributes:
        words: Words above, by index.
        frames: Ring buffer of frames. A frame begins at its position modulo `RING_BYTES` and may
            continue beyond that, so that each lies in one piece; behind such a frame a new lap
            begins.
        sizes: The same memory by words of 4 bytes, for the sizes of frames.
        released: Ring buffer of the numbers of blocks that the consumer has released.
        meter: Words of the worker's meter.
        claims: Words for the tickets that the worker has taken: each is 0, or 1 + a token. A
            worker with several threads has one for each ticket that is not done; others use the
            first one, for the ticket that was taken last.
        watch: Words of the worker's `Watch`.
        fence: Full memory barrier: the other side sees what was stored before it, before anything
            is loaded after it.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        view = memoryview(memory)
        self.words = view[:_METER_AT].cast("Q")
        self.meter = view[_METER_AT:_WORDS_BYTES].cast("Q")
        self.frames = view[_FRAMES_AT:]
        self.sizes = self.frames.cast("I")
        self.released = view[_WORDS_BYTES:_CLAIMS_AT].cast("I")
        self.claims = view[_CLAIMS_AT:_WATCH_AT].cast("Q")
        self.watch = view[_WATCH_AT:_FRAMES_AT].cast("q")
        self.fence = _make_fence()

    @classmethod
    def of(cls, fd: int) -> Ring:
        """Map the memory behind a descriptor, which stays the caller's.

        Raises:
            OSError: There is no address space or no descriptor left.
        """
        return cls(map_shared(fd, SIZE_BYTES))

    def order(self) -> None:
        """Keep stores and loads before it ahead of those after it."""
        if not IS_STRONG:
            self.fence()

    def release(self, leases: deque[Lease]) -> None:
        """Report released blocks to the worker, as many as there is room for, and forget them.

        Called by the consumer only.
        """
        words = self.words
        while leases:
            written = words[RELEASED_WRITTEN]
            if written - words[RELEASED_READ] == _RELEASED_PLACES:
                return
            self.released[written % _RELEASED_PLACES] = leases[0].number
            self.order()
            # No call stands between these two, so no exception strikes there: a number that is
            # reported twice would free a block that is in use again.
            words[RELEASED_WRITTEN] = written + 1
            del leases[0]

    def take_released(self) -> list[int]:
        """Read the numbers of blocks that were released. Called by the worker only."""
        read, written = self.words[RELEASED_READ], self.words[RELEASED_WRITTEN]
        if read == written:
            return []
        self.order()
        numbers = []
        for place in range(read, written):
            numbers.append(self.released[place % _RELEASED_PLACES])
        self.words[RELEASED_READ] = written
        return numbers


def _make_fence() -> Callable[[], None]:
    """Return a function that is a full memory barrier, as far as Python can make one.

    To take a lock and to release it are atomic operations; on x86 each is a full barrier,
    elsewhere a barrier in one direction, so that a release before another taking makes a full
    one.
    """
    lock = threading.Lock()
    take, release = lock.acquire, lock.release

    def fence() -> None:
        # Only tried, as an exception between the two may have left the lock taken.
        take(False)
        release()

    def fence_twice() -> None:
        fence()
        fence()

    return fence if IS_STRONG else fence_twice


def open_ring() -> int:
    """Return a descriptor of the memory for a ring.

    Raises:
        OSError: There is no memory or no descriptor left.
    """
    return open_nameless(SIZE_BYTES)
