"""Keras 3: batches for `fit`, `evaluate` and `predict`, on any of its backends.

    EnqueuerDataset:  enqueuer -> the next batch, for any index -> Keras

Keras reads batches by index, and reads some twice: it inspects the first ones for their shapes, or
to build the model, and begins with [0] again. On TensorFlow a thread reads ahead of the training.
Inspected batches are given again. `_lock` is held meanwhile.
"""

from __future__ import annotations

import collections
import sys
import threading
import weakref
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


@checks.tells_options
class EnqueuerDataset(Loader[Any], keras.utils.PyDataset):  # type: ignore[name-defined]  # Any
    """An enqueuer as a `keras.utils.PyDataset`; an epoch of Keras is an epoch of the enqueuer.

    The next epoch, and the next call, continue where the last one ended. An epoch that was ended
    early (by an exception, Ctrl-C, or `steps_per_epoch` of `fit`) is over. Then the next call
    begins the next epoch or, if `steps_per_epoch` was given here, continues with the next batch.

    Batches have the order of the enqueuer, so the results of `predict` are in order, and `shuffle`
    of `fit` has no effect.

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
        self._call: _Call | None = None
        self._follows_epochs = steps_per_epoch is None
        self._lock = threading.Lock()
        self._forget_pass()

    def _forget_pass(self) -> None:
        # The following batches, to the end of their epoch.
        self._batches: Iterator[Any] | None = None
        # Number of batches since Keras began with [0], and these batches while they are few.
        self._given = 0
        self._held: list[Any] = []
        # Batches that are given again.
        self._inspected: collections.deque[Any] = collections.deque()
        # Since the last batch: whether Keras read num_batches, and whether a call or epoch began.
        self._was_asked = self._is_new = True
        self._in_epoch = False

    @property
    def num_batches(self) -> int:
        """Number of batches in an epoch."""
        # Keras reads this before it iterates over the indices.
        self._was_asked = True
        return len(self)

    @property
    def workers(self) -> int:
        """Always 1: the enqueuer has workers, and Keras needs none of its own."""
        # Each call makes an adapter, which reads this.
        self._is_new, self._in_epoch = True, False
        # TensorFlow keeps each adapter, and so this object, as long as the program runs. Its
        # thread may continue to read for a call that was ended early.
        adapter = sys._getframe(1).f_locals.get("self")
        if getattr(adapter, "py_dataset", None) is self:
            self._call = _Call(self)
            adapter.py_dataset = self._call  # type: ignore[union-attr]
        return 1

    @property
    def use_multiprocessing(self) -> bool:
        """Always False, for the same reason."""
        return False

    def __getitem__(self, index: int) -> Any:
        """Return the next batch, for any index; Keras calls this from any thread.

        Raises:
            InvalidState: `stop()` was called after Keras began to read.
            ValueError: The loader has no batches.
        """
        return self._give(self._call)

    def _give(self, call: _Call | None) -> Any:
        with self._lock:
            if call is not self._call:
                raise InvalidState("another call of Keras has begun to read the dataset")
            if self._was_asked and (self._is_new or not self._in_epoch):
                self._begin_pass()
            self._was_asked = self._is_new = False
            if self._inspected:
                return self._inspected.popleft()
            batch = self._take()
            self._given += 1
            if self._given <= _HELD:
                self._held.append(batch)
            else:
                self._held.clear()
            return batch

    def on_epoch_begin(self) -> None:
        """Note that Keras begins an epoch."""
        self._is_new = self._in_epoch = True

    def on_epoch_end(self) -> None:
        """Note that Keras has ended an epoch, or has inspected batches."""
        with self._lock:
            if self._in_epoch and self._given - len(self._inspected) >= len(self):
                self._given = 0
            # The model was trained with these batches.
            if self._given == 0 or (self._in_epoch and not self._was_asked):
                self._held.clear()
            self._is_new, self._in_epoch = True, False

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
            self._forget_pass()
            # A call that still reads must not begin anew in the middle of an epoch.
            self._was_asked = False

    def _begin_pass(self) -> None:
        """Begin with [0]: with inspected batches, or with the next epoch. Lock held."""
        was_inspection = self._given == len(self._held)
        self._inspected = collections.deque(self._held if was_inspection else ())
        if self._inspected:
            return
        if 0 < self._given < len(self):
            self._skip()
        self._given = 0
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
            collections.deque(self._batches or (), maxlen=0)
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


class _Call:
    """The dataset for one call of Keras: the adapter of the call holds this object."""

    def __init__(self, dataset: EnqueuerDataset) -> None:
        self._dataset: Any = weakref.proxy(dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __getitem__(self, index: int) -> Any:
        return self._dataset._give(self)

    def on_epoch_begin(self) -> None:
        # Two calls may take turns: training and validation.
        self._dataset._call = self
        self._dataset.on_epoch_begin()
