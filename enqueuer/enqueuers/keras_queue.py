"""The attribute `queue` of enqueuers, as Keras' enqueuers have it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from queue import Empty
from typing import Generic, TypeVar

from enqueuer.backends.stall import DeadlineExpired
from enqueuer.common import checks
from enqueuer.enqueuers.core import Core
from enqueuer.enqueuers.epoch_reader import Outcome
from enqueuer.errors import Closed, InvalidState

Batch = TypeVar("Batch")
T = TypeVar("T")


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
        reader = self._core.reader
        if reader is None or not self._core.is_running():
            return True
        try:
            outcome = self._asked(reader.outcome, time.monotonic())
        except Empty:
            return True
        return outcome not in (Outcome.ITEM, Outcome.FAILURE)

    def qsize(self) -> int:
        """Return how many finished batches wait; at least 1 if `get()` would not have to wait.

        So an error that waits to be raised counts, too, and loops that ask for nothing else see it.
        """
        reader = self._core.reader
        if reader is None or not self._core.is_running():
            return 0
        # Perhaps none has come from a worker, as the bound is small.
        return reader.waiting() or int(not self.empty())

    def _asked(self, question: Callable[[float | None], T], deadline: float | None) -> T:
        """Return the answer of the reader; raise Empty at the deadline."""
        remaining = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            # If another consumer waits for the next batch, there is none.
            with self._core.locks.reading(remaining):
                return question(deadline)
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
            if not self._asked(reader.has_item, deadline):
                core.check_started("get() from its queue")
                raise Closed("the generator has ended; iterate again for the next epoch")
            # Another thread may have begun the next epoch.
            reader = core.reader or reader

    def get_nowait(self) -> Batch:
        """Take the next batch, or raise `queue.Empty` at once."""
        return self.get(block=False)
