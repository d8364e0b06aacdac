"""Samples of a shard -> the same samples in a random order, by a buffer of some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


def shuffled(samples: Iterable[Any], size: int, draw: Callable[[], float]) -> Iterator[Any]:
    """Yield each sample once, a random one of the buffer at a time; pass on None.

    If `samples` raises, the samples of the buffer come before the error.

    Args:
        samples: Samples of one shard.
        size: Number of samples in the buffer.
        draw: Function that returns a random number from 0 to below 1.

    Example:
        >>> draws = iter([0.9, 0.0, 0.5, 0.0]).__next__
        >>> [sample for sample in shuffled("abcd", 2, draws) if sample]
        ['b', 'a', 'c', 'd']
    """
    buffer: list[Any] = []
    failure: Exception | None = None
    try:
        for sample in samples:
            if sample is not None:
                if len(buffer) == size:
                    at = int(draw() * size)
                    sample, buffer[at] = buffer[at], sample
                else:
                    buffer.append(sample)
                    # A worker can stop at each None, also while the buffer is filled.
                    sample = None
            yield sample
            del sample
    except Exception as error:
        # After the samples that were made before it.
        failure = error
    while buffer:
        at = int(draw() * len(buffer))
        buffer[at], buffer[-1] = buffer[-1], buffer[at]
        yield buffer.pop()
    try:
        if failure is not None:
            raise failure
    finally:
        # Otherwise its traceback would refer to itself.
        del failure
