"""Samples of a shard -> batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def batched(
    samples: Iterable[Any], size: int, collate: Callable[[list[Any]], Any], drop_last: bool
) -> Iterator[Any]:
    """Yield batches of `size` samples; pass on None, which belongs to no batch.

    If `samples` raises, the samples of the incomplete batch are dropped.

    Args:
        samples: Samples of one shard.
        size: Number of samples in a batch.
        collate: Function that makes a batch of a list of samples.
        drop_last: Whether an incomplete last batch is left out.

    Example:
        >>> list(batched("abcde", 2, "".join, drop_last=False))
        ['ab', 'cd', 'e']
    """
    batch: list[Any] = []
    for sample in samples:
        if sample is None:
            yield None
            continue
        batch.append(sample)
        # Otherwise it would live on while the loop has its batch.
        del sample
        if len(batch) == size:
            yield _collated(batch, collate)
    if batch and not drop_last:
        yield _collated(batch, collate)


def _collated(batch: list[Any], collate: Callable[[list[Any]], Any]) -> Any:
    """Return a batch of some samples, and forget them. `collate` may keep its list."""
    samples = batch.copy()
    batch.clear()
    return collate(samples)
