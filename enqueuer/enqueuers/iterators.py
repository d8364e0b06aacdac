"""The iterators over an enqueuer: over one epoch, or over all that follow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

from enqueuer.enqueuers.epoch_reader import EpochReader
from enqueuer.enqueuers.epochs import Epochs

Batch = TypeVar("Batch")


class Readable(Protocol):
    """What iterators need of an enqueuer, which they keep alive."""

    @property
    def epochs(self) -> Epochs | None:
        """The epochs of the run."""

    def make_callbacks(self) -> None:
        """Call the callbacks of `on_stats` that are due."""


class Batches(Iterator[Batch]):
    """An iterator over one epoch."""

    _goes_on = False

    def __init__(self, core: Readable, reader: EpochReader) -> None:
        self._core = core
        self._reader = reader
        self._ready = reader.ready

    def __next__(self) -> Batch:
        while True:
            ready = self._ready
            if ready:
                # What is ready is taken without the lock. CPython runs signal handlers, and lets
                # other threads run, on entry to a function, after a call and after a jump, and
                # here is none of these: `popleft` would be one, and the batch lost.
                item = ready[0]
                del ready[0]
                return item[2]  # type: ignore[return-value]  # what the generator yielded
            self._wait()

    def _wait(self) -> None:
        core, reader = self._core, self._reader
        if reader.run.is_news:
            core.make_callbacks()
        epochs = core.epochs
        assert epochs is not None
        epochs.wait_for(reader, self._goes_on)


class Endless(Batches[Batch]):
    """An iterator over an epoch and all that follow."""

    _goes_on = True

    def _wait(self) -> None:
        try:
            super()._wait()
        except StopIteration:
            epochs = self._core.epochs
            reader = None if epochs is None else epochs.following(self._reader)
            if reader is None:
                raise
            self._reader, self._ready = reader, reader.ready
