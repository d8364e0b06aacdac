"""The DataLoader of enqueuer, in the place of torch's."""

from __future__ import annotations

from contestants import Epochs, Tasks, torch_loader
from enqueuer.adapters.torch import DataLoader


def open_tasks(tasks: Tasks) -> Epochs:
    """Give the epochs of `tasks`."""
    return torch_loader.open_tasks(tasks, kind=DataLoader)
