"""The words that seed a task's global generators, without a `SeedSequence` for each task.

    TaskWords().of(task) == the first halves of words_of(task)

A task takes little more time than the construction of its `SeedSequence`, whose state depends on
the index of the task only in its last two steps. So the state before these is kept for an epoch.
NumPy promises that the algorithm does not change.

Source: numpy/random/bit_generator.pyx; M. E. O'Neill, "Developing a seed_seq Alternative", 2015.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from enqueuer.workers.shards import Task

_MASK = 0xFFFFFFFF
# Words of a state.
_SIZE = 4
_LEFT, _RIGHT = 0xCA01F9DD, 0x4973F715


def _constants(first: int, factor: int) -> Iterator[tuple[int, int]]:
    """Yield the constants of one hashing after the other."""
    while True:
        following = first * factor & _MASK
        yield first, following
        first = following


def _hash(word: int, constants: tuple[int, int]) -> int:
    word = (word ^ constants[0]) * constants[1] & _MASK
    return word ^ word >> 16


def _mix(state: int, word: int) -> int:
    state = (_LEFT * state - _RIGHT * word) & _MASK
    return state ^ state >> 16


_mixing = _constants(0x43B0D7E5, 0x931E8875)
# A seed of one word takes 16 hashings, and each word of the key takes 4.
_OF_SEED = [next(_mixing) for _ in range(_SIZE * _SIZE)]
_OF_EPOCH, _OF_INDEX, _OF_KEY = ([next(_mixing) for _ in range(_SIZE)] for _ in range(3))
# The key of the words of global generators; see `words_of`.
_KEY = [_hash(1, constants) for constants in _OF_KEY]
# For each word of a state: the constants of the index, and the key as it is mixed in.
_LAST = [(*constants, _RIGHT * key & _MASK) for constants, key in zip(_OF_INDEX, _KEY, strict=True)]
_drawing = _constants(0x8B51F9DD, 0x58F38DED)
# Those of the two words of 64 bits for `random`, and of the lower half of that for `numpy.random`.
_DRAWN = list(islice(_drawing, 5))


class TaskWords:
    """The words of one task after the other; for one thread."""

    def __init__(self) -> None:
        self._epoch: tuple[int, int] | None = None
        # The state before the index, as it is mixed in.
        self._state: list[int] = []

    def of(self, task: Task) -> tuple[int, int] | None:
        """Return the seed for `random` and that for `numpy.random`; None if a number is too large.

        Example:
            >>> from enqueuer.workers.shards import words_of
            >>> task = Task(index=5, epoch=2, random_seed=7)
            >>> python, legacy = TaskWords().of(task)
            >>> words = words_of(task)
            >>> python == int(words[0]) << 64 | int(words[1])
            True
            >>> legacy == int(words[2]) & 0xFFFFFFFF
            True
        """
        seed, epoch, index = task.random_seed, task.epoch, task.index
        if self._epoch != (seed, epoch):
            if not (0 <= seed <= _MASK and 0 <= epoch <= _MASK):
                return None
            self._state = [_LEFT * word for word in _state_of(seed, epoch)]
            self._epoch = seed, epoch
        if not 0 <= index <= _MASK:
            return None
        state = []
        # As `_hash` and `_mix`, without their calls, which would take longer than the rest.
        for word, (before, after, key) in zip(self._state, _LAST, strict=True):
            hashed = (index ^ before) * after & _MASK
            word = (word - _RIGHT * (hashed ^ hashed >> 16)) & _MASK
            word = (_LEFT * (word ^ word >> 16) - key) & _MASK
            state.append(word ^ word >> 16)
        state.append(state[0])
        drawn = [
            (word ^ before) * after & _MASK
            for word, (before, after) in zip(state, _DRAWN, strict=True)
        ]
        a, b, c, d, for_numpy = [word ^ word >> 16 for word in drawn]
        return (b << 32 | a) << 64 | d << 32 | c, for_numpy


def _state_of(seed: int, epoch: int) -> list[int]:
    """Return the state of a `SeedSequence` after its seed and the epoch, the first of its key."""
    constants = iter(_OF_SEED)
    state = [_hash(word, next(constants)) for word in (seed, 0, 0, 0)]
    for source in range(_SIZE):
        for target in range(_SIZE):
            if source != target:
                state[target] = _mix(state[target], _hash(state[source], next(constants)))
    return [_mix(word, _hash(epoch, used)) for word, used in zip(state, _OF_EPOCH, strict=True)]
