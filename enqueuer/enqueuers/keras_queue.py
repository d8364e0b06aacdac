"""The attribute `queue` of enqueuers, as Keras' enqueuers have it."""

from __future__ import annotations

import time
import weakref
from queue import Empty
from typing import Generic, TypeVar

from enqueuer.backends.stall import DeadlineExpired
from enqueuer.common import checks
from enqueuer.enqueuers.core import Core
from enqueuer.enqueuers.epoch_reader import EpochReader
from enqueuer.errors import Closed, InvalidState

Batch = TypeVar("Batch")


class Queue(Generic[Batch]):
    """The batches that wait, with the methods of `queue.Queue`.

    Example:
        >>> from enqueuer import GeneratorEnqueuer
        >>> enqueuer = GeneratorEnqueuer(iter("ab"))
        >>> enqueuer.start()
        >>> enqueuer.queue.get(), enqueuer.queue.get(timeout=5)
        ('a', 'b')
        >>> enqueuer.stop()
    """

    def __init__(self, core: Core) -> None:
        # Weakly, or a queue would keep the workers of a forgotten enqueuer.
        self._reference = weakref.ref(core)

    @property
    def _core(self) -> Core:
        core = self._reference()
        if core is None:
            raise InvalidState("the enqueuer of this queue is gone")
        return core

    @property
    def maxsize(self) -> int:
        """Largest number of finished batches that wait."""
        return self._core.options.max_queue_size

    def full(self) -> bool:
        """Return whether the queue is full."""
        return self.qsize() >= self.maxsize

    def empty(self) -> bool:
        """Return False if an item, or an error, is ready; True otherwise."""
        return not self._has_next(takes=True)

    def qsize(self) -> int:
        """Return how many finished batches wait; at least 1 if `get()` would not have to wait.

        So an error that waits to be raised counts, too, and loops that ask for nothing else see it.
        """
        reader = self._core.reader
        if reader is None or not self._core.is_running():
            return 0
        # An item that was taken would make room for another one, beyond the bound.
        return reader.waiting() or int(self._has_next(takes=False))

    def _has_next(self, takes: bool) -> bool:
        """Return whether an item or an error is next; wait for nothing."""
        reader = self._core.reader
        if reader is None or not self._core.is_running():
            return False
        try:
            # If it is not taken, a worker beyond the bound does not even send it.
            return self._asked(reader, time.monotonic(), raises=False, takes=takes)
        except Empty:
            return False

    def _asked(self, reader: EpochReader, deadline: float | None, **options: bool) -> bool:
        """Return the answer of `has_item`; raise Empty at the deadline."""
        left = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            # If another consumer waits for the next batch, there is none.
            with reader.run.locks.reading(left):
                return reader.has_item(deadline, **options)
        except DeadlineExpired:
            raise Empty from None

    def get(self, block: bool = True, timeout: float | None = None) -> Batch:
        """Take the next batch.

        Args:
            block: Whether to wait for it.
            timeout: Seconds to wait at most; None, the default, waits as the loop does.

        Raises:
            queue.Empty: There was none in time; nothing is lost.
            BatchTimeout: The same, by the enqueuer's `timeout`.
            Closed: There will be none: the generator has ended, or the enqueuer was stopped.
            InvalidState: It was not started.
        """
        core = self._core
        reader = core.started_reader("get() from its queue")
        core.make_callbacks(may_wait=False)
        limit = None if timeout is None else checks.seconds("timeout", timeout)
        deadline = None if limit is None else time.monotonic() + limit
        if not block:
            deadline = time.monotonic()
        while True:
            if (item := reader.take()) is not None:
                return item[2]  # type: ignore[return-value]  # what the generator yielded
            if not self._asked(reader, deadline):
                core.check_started("get() from its queue")
                raise Closed("the generator has ended; iterate again for the next epoch")
            # Another thread may have begun the next epoch.
            reader = core.reader or reader

    def get_nowait(self) -> Batch:
        """Take the next batch, or raise `queue.Empty` at once."""
        return self.get(block=False)
