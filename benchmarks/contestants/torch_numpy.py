"""The DataLoader of torch, with arrays that stay arrays and are pickled."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from contestants import Epochs, Setup, Tasks, torch_loader


def open(setup: Setup) -> AbstractContextManager[Any]:
    """Give the items of `setup`."""
    return torch_loader.open(setup, collate_fn=_as_it_is)


def open_tasks(tasks: Tasks) -> Epochs:
    """Give the epochs of `tasks`."""
    collate = _as_it_is if tasks.batch_size is None else np.stack
    return torch_loader.open_tasks(tasks, collate_fn=collate)


def _as_it_is(item: Any) -> Any:
    return item
