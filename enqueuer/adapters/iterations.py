"""What loops have taken of a loader: how an iteration begins, and how it ends."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

Batch = TypeVar("Batch")


class BatchReader(Protocol[Batch]):  # type: ignore[misc]
    """The batches of one epoch after the other."""

    def read(self) -> Iterator[Batch]:
        """Return an iterator over an epoch, or over the rest of one; start no enqueuer."""

    def stop(self, timeout: float | None) -> None:
        """End the thread that reads ahead, if there is one."""

    def restart(self) -> None:
        """Begin an iteration that was stopped before its first batch again."""


class Owner(Protocol):
    """What may stop a loader.

    Attributes:
        is_started: Whether it has started the loader.
    """

    is_started: bool

    @property
    def is_of_caller(self) -> bool:
        """Whether the caller decides when the loader stops."""

    def start(self) -> None:
        """Start the loader."""

    def stop(self, timeout: float | None = None) -> None:
        """Stop the loader."""


class Iterations:
    """The iterations of a loader, one after the other.

    Attributes:
        count: Number of batches that loops were given.
        is_entered: Whether a loop has asked for a batch of the latest iteration.
        is_left: Whether the last iteration may have been dropped between its last batch and its
            end.
    """

    def __init__(self) -> None:
        self.count = 0
        self.is_entered = self.is_left = False

    def begin(self, reader: BatchReader[Batch], has_end: Callable[[], bool]) -> Iterator[Batch]:
        """Return an iterator over the rest of an epoch, or the next one if there is no rest.

        A loop that counts its batches does not see the end of the epoch.

        Args:
            reader: Reader of the batches.
            has_end: Returns whether the loop may know where the epoch ends.
        """
        self.is_entered = False
        # The reader may begin to read ahead now, and the generator begins with the first batch.
        # `chain` is no frame that an error would keep, and holds no batch.
        return itertools.chain.from_iterable(self._parts(reader, reader.read(), has_end))

    def restart(self, reader: BatchReader[Any], owner: Owner, change: Callable[[], None]) -> None:
        """Stop a loader, unless its caller runs it, and call a function.

        An iteration that has begun, without a batch for the loop, begins again.
        """
        was_started, is_of_caller = owner.is_started, owner.is_of_caller
        if not is_of_caller:
            # This wakes a thread that reads ahead.
            owner.stop()
            # The thread may be starting the workers of a DataLoader, which is not to be changed
            # under it.
            reader.stop(threading.TIMEOUT_MAX)
        change()
        if self.is_entered or is_of_caller:
            return
        if was_started:
            owner.start()
            # Libraries begin an iteration before they load a position, and count batches. They
            # save a position before they see the end of an epoch, and begin the next one.
            self.is_left = True
        reader.restart()

    def _parts(
        self, reader: BatchReader[Batch], rest: Iterator[Batch], has_end: Callable[[], bool]
    ) -> Iterator[Iterator[Batch]]:
        self.is_entered = True
        count, was_left, self.is_left = self.count, self.is_left, False
        try:
            yield rest
            if was_left and self.count == count and has_end():
                yield reader.read()
        except GeneratorExit:
            self.is_left = True
            raise
