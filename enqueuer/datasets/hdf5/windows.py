"""Which rows are shuffled among each other: pieces of a file, in windows; it reads nothing.

    edges of chunks -> pieces -> a shard's stretch of the shuffled pieces -> windows

A piece is a range of rows: (start, stop).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

Piece: TypeAlias = "tuple[int, int]"


def cut(starts: Iterable[int], first: int, stop: int) -> tuple[Piece, ...]:
    """Return the pieces between two rows.

    Example:
        >>> cut([0, 10, 20], 5, 25)
        ((5, 10), (10, 20), (20, 25))
    """
    edges = [first, *(start for start in starts if first < start < stop), stop]
    return tuple(itertools.pairwise(edges)) if stop > first else ()


def finer(count: int, pieces: Sequence[Piece]) -> list[Piece]:
    """Return about `count` pieces, as far as there are rows, by cutting pieces if they are too few.

    Of a file with few chunks each shard would have the same rows in every epoch.

    Example:
        >>> finer(4, [(0, 10), (10, 13)])
        [(0, 5), (5, 10), (10, 11), (11, 13)]
    """
    cuts = max(1, round(count / max(1, len(pieces))))
    found: list[Piece] = []
    for start, stop in pieces:
        edges = sorted({start + (stop - start) * part // cuts for part in range(cuts + 1)})
        found += itertools.pairwise(edges)
    return found


def spread(count: int, groups: int, rng: np.random.Generator) -> np.ndarray:
    """Return a random order of pieces in which each group has some of all parts of a file.

    Pieces that follow each other in the file, as many as there are groups, go to different
    groups. A file sorted by class so gives each window about the same number of pieces of each
    class; a plain permutation would give it a third of the classes not at all.

    Args:
        count: Number of pieces.
        groups: Number of groups: windows, over all shards.
        rng: Random generator of the epoch.

    Example:
        >>> spread(6, 3, np.random.default_rng(7)).reshape(3, 2) // 3
        array([[0, 1],
               [1, 0],
               [0, 1]])
    """
    rounds = np.tile(np.arange(groups), (-(-count // groups), 1))
    group_of = rng.permuted(rounds, axis=1).reshape(-1)[:count]
    return np.lexsort((rng.random(count), group_of))


def stretch(pieces: Iterable[Piece], index: int, count: int) -> Iterator[Piece]:
    """Yield a shard's stretch of consecutive pieces; shards differ by at most one row.

    The pieces at its ends may be cut, and are then read by two shards.

    Example:
        >>> list(stretch([(0, 4), (8, 12)], index=0, count=2))
        [(0, 4)]
        >>> list(stretch([(0, 4), (8, 12)], index=1, count=3))
        [(2, 4), (8, 9)]
    """
    pieces = list(pieces)
    total = _rows(pieces)
    begin, end = total * index // count, total * (index + 1) // count
    passed = 0
    for start, stop in pieces:
        low, high = max(begin - passed, 0), min(end - passed, stop - start)
        if low < high:
            yield start + low, start + high
        passed += stop - start


def windows(pieces: Iterable[Piece], rows: int) -> Iterator[list[Piece]]:
    """Yield pieces in groups with about equally many rows, at least `rows` on average.

    A smaller last group would have few pieces, which mix badly.

    Example:
        >>> list(windows([(0, 4), (4, 8), (8, 12)], rows=5))
        [[(0, 4), (4, 8)], [(8, 12)]]
        >>> list(windows([(0, 4), (4, 8), (8, 12)], rows=4))
        [[(0, 4)], [(4, 8)], [(8, 12)]]
    """
    pieces = list(pieces)
    total = _rows(pieces)
    count = max(1, total // rows)
    window: list[Piece] = []
    passed, made = 0, 0
    for start, stop in pieces:
        window.append((start, stop))
        passed += stop - start
        if passed * count >= total * (made + 1):
            yield window
            window, made = [], passed * count // total


def _rows(pieces: Iterable[Piece]) -> int:
    return sum(stop - start for start, stop in pieces)
