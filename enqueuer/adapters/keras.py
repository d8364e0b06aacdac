"""Keras 3: batches for `fit`, `evaluate` and `predict`, on any of its backends.

    EnqueuerDataset:  enqueuer -> the next batch, for any index -> Keras

Keras asks for `num_batches`, and then reads each index once, in any order: this is a pass. Its
first passes are short: it inspects batches for their shapes, or to build the model. Inspected
batches are given again.

On TensorFlow threads read ahead of the training, also for a while after a call has ended early.
What they read then is refused, as the new pass is of the thread that asked for `num_batches`, or
as an index comes twice. `_lock` is held meanwhile.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from enqueuer.adapters.loading import Loader, reader_of
from enqueuer.common import checks
from enqueuer.common.extras import framework
from enqueuer.enqueuers.enqueuer import BaseEnqueuer
from enqueuer.errors import InvalidState

keras = framework("keras", "keras", "3.8")

__all__ = ["EnqueuerDataset"]

# Number of batches; Keras inspects as many.
_HELD = 2


@checks.suggests_options
class EnqueuerDataset(Loader[Any], keras.utils.PyDataset):  # type: ignore[name-defined]  # Any
    """An enqueuer as a `keras.utils.PyDataset`; an epoch of Keras is an epoch of the enqueuer.

    The next epoch, and the next call, continue where the last one ended. An epoch that was ended
    early (by an exception, Ctrl-C, or `steps_per_epoch` of `fit`) is over. Then the next call
    begins the next epoch or, if `steps_per_epoch` was given here, continues with the next batch.

    Batches have the order of the enqueuer, so the results of `predict` are in order, and `shuffle`
    of `fit` has no effect.

    Use a `with` block, or call `stop()`: TensorFlow keeps each dataset, and so the workers, as long
    as the program runs. The other backends stop them when the dataset is dropped.

    Args:
        loader: An enqueuer, or any object that can be iterated once an epoch. Its batches have a
            form of Keras: `(x,)`, `(x, y)` or `(x, y, sample_weight)`, each an array or a nest of
            arrays, or a dict of inputs.
        steps_per_epoch: Number of batches in an epoch. None, the default: `len(loader)`. A
            `GeneratorEnqueuer` has no length, and without a number Keras would never end.

    Raises:
        TypeError: The number of batches in an epoch is not known: give `steps_per_epoch`.

    Example:
        .. code-block:: python

            with EnqueuerDataset(GeneratorEnqueuer(batches), steps_per_epoch=100) as train:
                model.fit(train, epochs=3)
    """

    def __init__(self, loader: Iterable[Any], steps_per_epoch: int | None = None) -> None:
        Loader.__init__(self, loader, steps_per_epoch)
        self._owner = reader_of(self)
        self._source = self._owner.epochs
        keras.utils.PyDataset.__init__(self)
        # This raises TypeError if the length is not known.
        len(self)
        self._follows_epochs = steps_per_epoch is None
        self._lock = threading.Lock()
        # Number of passes that have begun.
        self._passes = 0
        self._forget_pass()

    def _forget_pass(self) -> None:
        # The following batches, to the end of their epoch.
        self._batches: Iterator[Any] | None = None
        # Indices that Keras has read in this pass.
        self._indices: set[int] = set()
        # Number of batches of the epoch in this pass, and these batches while they are few.
        self._delivered = 0
        self._held: list[Any] = []
        # Batches that are given again.
        self._inspected: collections.deque[Any] = collections.deque()
        # Thread that has asked for num_batches since the last batch, and so begins the next pass.
        self._asker: int | None = None
        # Thread that inspects batches; only an epoch may be read by several threads.
        self._inspector: int | None = None
        # Whether Keras has begun an epoch, and whether no pass has begun since.
        self._in_epoch = self._is_new = False

    @property
    def num_batches(self) -> int:
        """Number of batches in an epoch; Keras reads this before each pass.

        What is read next begins a pass. So use `len()` instead, which begins none.
        """
        self._asker = threading.get_ident()
        return len(self)

    def __getitem__(self, index: int) -> Any:
        """Return the next batch, for any index; Keras calls this from any thread.

        Raises:
            InvalidState: `stop()` was called after Keras began to read, or another call of Keras
                reads the dataset.
            ValueError: The loader has no batches.
        """
        number = self._passes
        with self._lock:
            reader = self._asker or self._inspector or threading.get_ident()
            if number != self._passes or reader != threading.get_ident():
                raise _two_readers()
            if self._asker is not None or not self._passes:
                self._begin_pass()
            if index in self._indices:
                raise _two_readers()
            self._indices.add(index)
            if self._inspected:
                return self._inspected.popleft()
            batch = self._take()
            self._delivered += 1
            if self._delivered <= _HELD:
                self._held.append(batch)
            else:
                self._held.clear()
            return batch

    def on_epoch_begin(self) -> None:
        """Note that Keras begins an epoch."""
        self._in_epoch = self._is_new = True

    def on_epoch_end(self) -> None:
        """Note that Keras has ended an epoch, or has inspected batches."""
        with self._lock:
            if self._in_epoch and self._delivered - len(self._inspected) >= len(self):
                self._delivered = 0
            # The model was trained with these batches.
            if self._delivered == 0 or (self._in_epoch and self._asker is None):
                self._held.clear()
            self._in_epoch = self._is_new = False

    def stop(self, timeout: float | None = None) -> None:
        """Stop the enqueuer, if this has started it; the next call begins anew.

        Args:
            timeout: As for the enqueuer's `stop`.
        """
        self._batches = None
        # This wakes a thread that waits for a batch, and holds the lock.
        super().stop(timeout)
        with self._lock:
            # The thread may have been about to start the next epoch.
            super().stop(timeout)
            # A call that still reads gets an error, and does not begin anew.
            self._forget_pass()

    def _begin_pass(self) -> None:
        """Begin with inspected batches, or with the next epoch. Lock held."""
        self._passes += 1
        self._inspector = None if self._is_new else threading.get_ident()
        self._asker, self._is_new = None, False
        self._indices.clear()
        was_inspection = self._delivered == len(self._held)
        self._inspected = collections.deque(self._held if was_inspection else ())
        if self._inspected:
            return
        if 0 < self._delivered < len(self):
            self._skip()
        self._delivered = 0
        self._held.clear()
        if self._batches is None or not self._source.keeps_position:
            self._batches = iter(())

    def _skip(self) -> None:
        """Skip the rest of an epoch that was ended early. Lock held."""
        if not self._follows_epochs or not self._source.keeps_position:
            return
        enqueuer = self._source.loader
        if not self._owner.is_started or not isinstance(enqueuer, BaseEnqueuer):
            # The enqueuer is its owner's and cannot be stopped.
            for _ in self._batches or ():
                pass
            return
        # To read the rest could take an hour.
        super().stop()
        state = {k: v for k, v in enqueuer.state_dict().items() if k not in ("states", "done")}
        enqueuer.load_state_dict({**state, "epoch": state["epoch"] + 1, "positions": None})
        self._batches = iter(())

    def _take(self) -> Any:
        """Return the next batch of this epoch, or else of the next one. Lock held."""
        # The rest of an epoch may be empty, twice.
        for _ in range(3):
            if self._batches is None:
                raise InvalidState("the dataset was stopped while Keras was reading it")
            for batch in self._batches:
                return batch
            if self._batches is not None:
                self._owner.start()
                # An iterator over `self` would keep it alive.
                self._batches = iter(self._source)
        raise ValueError("the loader has no batches")


def _two_readers() -> InvalidState:
    return InvalidState(
        "two calls of Keras read the dataset at once; if one has ended early, and its thread still "
        "reads ahead, call stop() and begin again"
    )
