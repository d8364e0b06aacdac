"""The batches of indices of an epoch as they are drawn, and whether they are those of a state.

    sampler --DrawnIndices--> batches of indices, one fingerprint each
    resumed: the fingerprint at the position differs -> StateMismatch

Only random numbers that the loader finds are saved. A sampler that has others would give another
order after resuming, and the epoch would repeat some samples and miss others.
"""

from __future__ import annotations

import itertools
import operator
import zlib
from array import array
from collections.abc import Iterator
from typing import Any, NoReturn

from enqueuer.errors import StateMismatch

# Their text is the same in each process.
_PLAIN = (str, bytes, float)
_END = object()


class DrawnIndices(Iterator[Any]):
    """An iterator over batches of indices that records one number for each.

    Args:
        iterator: Iterator of torch's sampler.
        sampler: Name of the sampler, for the error.
        expected: Number of batches that were drawn before, and their fingerprint; None: the epoch
            is not resumed.

    Raises:
        StateMismatch: The batches drawn before were others; at the last of them, and from then on.

    Example:
        >>> drawn = DrawnIndices(iter([[4, 1], [3, 0]]), "Mine")
        >>> next(drawn), next(drawn)
        ([4, 1], [3, 0])
        >>> state = 1, drawn.fingerprint(1)
        >>> next(DrawnIndices(iter([[1, 4], [3, 0]]), "Mine", state))
        Traceback (most recent call last):
        enqueuer.StateMismatch: Mine gave another order than before the state was saved. ...
    """

    def __init__(
        self, iterator: Iterator[Any], sampler: str, expected: tuple[int, int] | None = None
    ) -> None:
        self._iterator = iterator
        self._sampler = sampler
        self._step, self._expected = expected or (0, 0)
        # Four bytes for each batch of the epoch.
        self._fingerprints = array("I")
        self._latest = 0

    def __next__(self) -> Any:
        fingerprints = self._fingerprints
        indices = next(self._iterator, _END)
        if indices is _END:
            # Outside of an `except`: the frames of a context would keep the enqueuer alive.
            if len(fingerprints) < self._step:
                self._fail(f"ended after {len(fingerprints)} batches, and gave {self._step}")
            raise StopIteration
        self._latest = zlib.crc32(_bytes_of(indices), self._latest)
        fingerprints.append(self._latest)
        if len(fingerprints) == self._step and self._latest != self._expected:
            self._fail("gave another order than")
        return indices

    def cut(self) -> None:
        """End the epoch here."""
        self._iterator, self._step = iter(()), 0

    def fingerprint(self, count: int) -> int:
        """Return the fingerprint of the first batches; 0 if that many were never drawn."""
        return self._fingerprints[count - 1] if 0 < count <= len(self._fingerprints) else 0

    def _fail(self, reason: str) -> NoReturn:
        message = (
            f"{self._sampler} {reason} before the state was saved. A likely cause is a random "
            "generator that the DataLoader does not find: keep it in an attribute of the "
            "sampler, or give the sampler a fixed seed, set_epoch(), or state_dict() and "
            "load_state_dict()"
        )
        # Reading on raises it again, as the epoch must not continue.
        self._iterator, self._step = map(_raise, itertools.repeat(message)), 0
        _raise(message)


def _raise(message: str) -> NoReturn:
    raise StateMismatch(message)


def _bytes_of(indices: Any) -> bytes:
    """Return the number, the first and the last of some indices as bytes.

    All of them would cost more than drawing some of them.
    """
    if type(indices) not in (list, tuple):
        return _text_of(indices).encode()
    if not indices:
        return b"0"
    return f"{len(indices)} {_text_of(indices[0])} {_text_of(indices[-1])}".encode()


def _text_of(index: Any) -> str:
    """Return an index as text; that of its type unless each process has the same text."""
    try:
        return str(operator.index(index))
    except TypeError:
        return repr(index) if isinstance(index, _PLAIN) else type(index).__name__
