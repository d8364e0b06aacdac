"""The DataLoader of torch, with a map-style dataset."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader, Dataset

from faults import COUNT, sources


class _Items(Dataset):
    def __init__(self, fault: str) -> None:
        self._fault = fault

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return sources.item(index, self._fault)


def items(fault: str) -> Iterable[Any]:
    """Return what a worker makes."""
    return DataLoader(_Items(fault), batch_size=None, num_workers=1)
