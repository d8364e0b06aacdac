"""Keras 3: the enqueuer that `fit` reads a PyDataset with, and a pool below it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")  # nothing is computed, but it must have one
import keras
from keras.src.trainers.data_adapters.py_dataset_adapter import OrderedEnqueuer

from faults import COUNT, sources


class _Items(keras.utils.PyDataset):
    def __init__(self, fault: str) -> None:
        super().__init__(workers=1, use_multiprocessing=True)
        self._fault = fault

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return sources.item(index, self._fault)


def items(fault: str) -> Iterator[Any]:
    """Yield what a worker makes: one epoch, as `get()` has no end of its own."""
    enqueuer = OrderedEnqueuer(_Items(fault), workers=1, use_multiprocessing=True)
    enqueuer.start()
    yield from itertools.islice(enqueuer.get(), COUNT)
    enqueuer.stop()
