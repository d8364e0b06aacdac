"""Keras 3: batches for `fit`, `evaluate` and `predict`, on any of its backends.

    EnqueuerDataset:  enqueuer -> [0], [1], ... whatever the index -> Keras

Keras asks for batches by their indices, and asks for some twice: it looks at the first ones to
learn their shapes or to build the model, and begins from [0] again. On TensorFlow it asks from a
thread, ahead of the training. What was only looked at is given again; `_lock` is held meanwhile.
"""

from __future__ import annotations

import collections
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from enqueuer.adapters.loading import Loader
from enqueuer.base import BaseEnqueuer
from enqueuer.errors import InvalidState
from enqueuer.frameworks import framework

keras = framework("keras", "keras", "3.8")

__all__ = ["EnqueuerDataset"]

_HELD = 2  # batches: as many as Keras looks at


class EnqueuerDataset(Loader[Any], keras.utils.PyDataset):  # type: ignore[name-defined]  # Any
    """An enqueuer as a `keras.utils.PyDataset`; an epoch of Keras is an epoch of the enqueuer.

    The next epoch, and the next call, go on where the last one ended. An epoch that was broken
    off (by an exception, a Ctrl-C, `steps_per_epoch` of `fit`) is over: the next call begins the
    next one, or, if `steps_per_epoch` was given here, goes on with the next batch.

    Batches come in the order of the enqueuer, so that `predict` has its results in order, and
    `shuffle` of `fit` has no effect.

    Args:
        loader: An enqueuer, or anything that can be iterated once an epoch. Its batches are what
            Keras takes: `(x,)`, `(x, y)` or `(x, y, sample_weight)`, each an array or a nest of
            arrays, or a dict of inputs.
        steps_per_epoch: How many batches an epoch has. None, the default: `len(loader)`. A
            `GeneratorEnqueuer` has no length, and Keras would never end without one.

    Raises:
        TypeError: Nobody knows how many batches an epoch has: give `steps_per_epoch`.

    Example:
        .. code-block:: python

            with EnqueuerDataset(GeneratorEnqueuer(batches), steps_per_epoch=100) as train:
                model.fit(train, epochs=3)
    """

    def __init__(self, loader: Iterable[Any], steps_per_epoch: int | None = None) -> None:
        Loader.__init__(self, loader, steps_per_epoch)
        keras.utils.PyDataset.__init__(self)
        len(self)  # raises, if nobody knows
        self._reader: _Reader | None = None
        self._follows_epochs = steps_per_epoch is None
        self._lock = threading.Lock()
        self._batches: Iterator[Any] | None  # what follows, to the end of its epoch
        self._given: int  # batches since Keras began with [0]
        self._held: list[Any]  # all of them, while they are few
        self._looked_at: collections.deque[Any]  # to be given again
        self._was_asked: bool  # for num_batches, since the last batch
        self._is_new: bool  # there was a call, or an epoch, since the last batch
        self._within: bool  # an epoch
        self._forget_pass()

    @property
    def num_batches(self) -> int:
        """How many batches an epoch has."""
        self._was_asked = True  # whoever iterates over the indices asks first
        return len(self)

    @property
    def workers(self) -> int:
        """Always 1, as the enqueuer has the workers, and Keras is to have none of its own."""
        self._is_new, self._within = True, False  # each call makes an adapter, which asks
        # TensorFlow keeps each adapter as long as the program runs, and with it this object; and
        # its thread may go on reading for a call that was broken off.
        adapter = sys._getframe(1).f_locals.get("self")
        if getattr(adapter, "py_dataset", None) is self:
            self._reader = _Reader(self)
            adapter.py_dataset = self._reader  # type: ignore[union-attr]  # it is not None
        return 1

    @property
    def use_multiprocessing(self) -> bool:
        """Always False, likewise."""
        return False

    def __getitem__(self, index: int) -> Any:
        """Return the next batch, whatever the index; called by Keras, from any thread.

        Raises:
            InvalidState: `stop()` was called since Keras began to read.
            ValueError: The loader has no batches.
        """
        return self._give(self._reader)

    def _give(self, reader: _Reader | None) -> Any:
        with self._lock:
            if reader is not self._reader:
                raise InvalidState("another call of Keras has begun to read the dataset")
            if self._was_asked and (self._is_new or not self._within):
                self._begin_pass()
            self._was_asked = self._is_new = False
            if self._looked_at:
                return self._looked_at.popleft()
            batch = self._take()
            self._given += 1
            if self._given <= _HELD:
                self._held.append(batch)
            else:
                self._held.clear()
            return batch

    def on_epoch_begin(self) -> None:
        """Called by Keras."""
        self._is_new = self._within = True

    def on_epoch_end(self) -> None:
        """Called by Keras: after an epoch, and when it has looked at batches."""
        with self._lock:
            if self._within and self._given - len(self._looked_at) >= len(self):
                self._given = 0
            if self._given == 0 or (self._within and not self._was_asked):
                self._held.clear()  # it was trained with them
            self._is_new, self._within = True, False

    def stop(self, timeout: float | None = None) -> None:
        """Stop the enqueuer, if this has started it; the next call begins anew.

        Args:
            timeout: As for the enqueuer's `stop`.
        """
        self._batches = None
        super().stop(timeout)  # wakes a thread that waits for a batch, and has the lock
        with self._lock:
            super().stop(timeout)  # it may have been about to start the next epoch
            self._forget_pass()
            self._was_asked = False  # whoever is reading is not to begin anew amid an epoch

    def _convert(self, batch: Any) -> Any:
        return batch

    def _forget_pass(self) -> None:
        self._batches = None
        self._given = 0
        self._held = []
        self._looked_at = collections.deque()
        self._was_asked = self._is_new = True
        self._within = False

    def _begin_pass(self) -> None:
        """Begin with [0]: with what was looked at, or with the next epoch. Lock held."""
        is_a_look = self._given == len(self._held)
        self._looked_at = collections.deque(self._held if is_a_look else ())
        if self._looked_at:
            return
        if 0 < self._given < len(self):
            self._skip()
        self._given = 0
        self._held.clear()
        if self._batches is None or not self._epochs.keeps_position:
            self._batches = iter(())

    def _skip(self) -> None:
        """Leave out the rest of an epoch that was broken off. Lock held."""
        if not self._follows_epochs or not self._epochs.keeps_position:
            return
        if self._finalizer is None or not isinstance(self._loader, BaseEnqueuer):
            collections.deque(self._batches or (), maxlen=0)  # its owner's: it cannot be stopped
            return
        super().stop()  # to read the rest could take an hour
        state = {k: v for k, v in self._loader.state_dict().items() if k not in ("states", "done")}
        self._loader.load_state_dict({**state, "epoch": state["epoch"] + 1, "positions": None})
        self._batches = iter(())

    def _take(self) -> Any:
        """Return the next batch of this epoch, or else of the next one. Lock held."""
        for _ in range(3):  # the rest of an epoch may be nothing, twice
            if self._batches is None:
                raise InvalidState("the dataset was stopped while Keras was reading it")
            for batch in self._batches:
                return batch
            if self._batches is not None:
                self._start()
                self._batches = iter(self._epochs)  # not of self, which it would keep alive
        raise ValueError("the loader has no batches")


class _Reader:
    """The dataset for one call of Keras, whose adapter has this in its place."""

    use_multiprocessing = False

    def __init__(self, dataset: EnqueuerDataset) -> None:
        self._dataset: Any = weakref.proxy(dataset)

    @property
    def num_batches(self) -> int:
        return self._dataset.num_batches  # type: ignore[no-any-return]  # by a weak proxy

    def __getitem__(self, index: int) -> Any:
        return self._dataset._give(self)

    def on_epoch_begin(self) -> None:
        self._dataset._reader = self  # of two that take turns: training and validation
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()
