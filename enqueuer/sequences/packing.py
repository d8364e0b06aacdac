"""Rows of one length that are packed with documents."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import DTypeLike

from enqueuer.common import checks
from enqueuer.sequences.lengths import held
from enqueuer.sequences.stages import Plans, SampleStream, SequenceStage, Window, WindowPlace
from enqueuer.workers.shards import Shard

Method = Literal["best_fit", "first_fit", "concat"]
TooLong = Literal["split", "drop"]
Boundaries = Literal["document_ids", "cu_seqlens"]
Row = dict[str, np.ndarray]

# The label of a token that has no next one; the loss of torch and others leaves it out by default.
_IGNORED = -100
# Documents that "concat" reads at once: its rows do not depend on that.
_AT_ONCE = 32


class Piece(NamedTuple):
    """A part of a document that goes into a row.

    Attributes:
        k: Place of the document in its window.
        start: Its first token of this piece.
        stop: The token behind the last one of this piece.
        window: Its window.
    """

    k: int
    start: int
    stop: int
    window: Window


def pack(
    documents: Any,
    row_length: int,
    *,
    method: Method = "best_fit",
    window: int = 1000,
    too_long: TooLong = "split",
    boundaries: Boundaries = "document_ids",
    value: int = 0,
    dtype: DTypeLike = "int64",
    rng: np.random.Generator | None = None,
    lengths: Sequence[int] | np.ndarray | None = None,
    shard: Shard | None = None,
    drop_last: bool = False,
) -> SequenceStage[Row]:
    """Pack documents of tokens into rows of one length.

    Args:
        documents: Iterable of documents, each an array or list of token numbers, or a function that
            returns one. If the function has a parameter `first_item=0`, as for
            `GeneratorEnqueuer`, no earlier document is read again on resumption. With `lengths`, a
            sequence.
        row_length: Number of tokens of a row.
        method: `"best_fit"`, the default: the documents of a window, the longest first, each in
            the fullest row that has room for it. `"first_fit"`: in their order, each in the first
            such row. `"concat"`: one document after the other, and a new row wherever one is full;
            only the last row has padding, but more documents are split.
        window: Number of documents that wait in memory, 1000 by default. Of each window, some rows
            at the end are not full, so it should have the tokens of 50 rows or more. Without effect
            on `"concat"`.
        too_long: What becomes of a document that is longer than a row: `"split"`, the default, or
            `"drop"`.
        boundaries: `"document_ids"`, the default: an entry with the number of each token's document
            in its row, from 1, and 0 for padding; tokens of the same number may attend to each
            other. `"cu_seqlens"`: an entry of int32 with the beginnings of the documents, and of
            the padding, and `row_length` at the end, as Flash Attention has it.
        value: Token of the padding, 0 by default.
        dtype: Integer dtype of the tokens, positions and labels; int64 by default.
        rng: Generator, usually `shard.rng`, from which a seed of the order of the rows is drawn
            once. None, the default: they have the order of their first documents.
        lengths: Length of each document of a sequence. Then a document is fetched only for its row.
        shard: The shard, if `documents` are those of all shards: all plan the same rows, and each
            has those that are its turn. None, the default: the rows are all for this shard.
        drop_last: With `shard`, leave out the last rows if not every shard can have one, so that
            all have the same number.

    Returns:
        An iterable of dictionaries, with `state_dict` and `load_state_dict`, which a generator
        function may return. Besides the boundaries, a row has `tokens`, `positions`, which begin
        with 0 in each document, and `labels`: the next token of the same document, or -100 where
        there is none.

    Raises:
        TypeError: An argument, or a document, has the wrong type.
        ValueError: An argument is out of its range, or a document is empty.

    Example:
        >>> from enqueuer import pack
        >>> rows = list(pack([[1, 2, 3, 4], [5, 6, 7], [8, 9]], 6))
        >>> for name, array in rows[0].items():
        ...     print(name, array)
        tokens [1 2 3 4 8 9]
        positions [0 1 2 3 0 1]
        document_ids [1 1 1 1 2 2]
        labels [   2    3    4 -100    9 -100]
    """
    size, room = checks.positive("window", window), checks.positive("row_length", row_length)
    size = _AT_ONCE if method == "concat" else size
    checks.choice("method", method, get_args(Method))
    checks.choice("too_long", too_long, get_args(TooLong))
    checks.choice("boundaries", boundaries, get_args(Boundaries))
    if np.dtype(dtype) not in (np.int32, np.int64):
        raise ValueError(
            f"dtype must be int32 or int64, as labels may be {_IGNORED}, got {dtype!r}"
        )
    if rng is not None and method == "concat":
        raise ValueError(
            "method='concat' keeps the order of the documents: leave rng out, and shuffle them"
        )
    stream = SampleStream("pack", documents, lengths, len)
    padding = held(value, np.dtype(dtype))
    planner = Rows(stream, room, method, size, too_long == "split", boundaries, padding)
    options = {"row_length": room, "method": method, "window": size, "too_long": too_long}
    return SequenceStage(planner.plans, planner.made, options, rng, shard, drop_last)


@dataclass(frozen=True)
class Rows:
    """Packed rows; a plan is the list of the pieces of a row."""

    stream: SampleStream
    length: int
    method: Method
    window: int
    splits: bool
    boundaries: Boundaries
    # The token of the padding, whose dtype is that of all arrays.
    padding: Any

    def plans(self, at: WindowPlace, seed: int | None) -> Plans:
        """Yield each row with the place behind it."""
        if self.method == "concat":
            return self._concatenated(at)
        return self.stream.plans(at, self.window, seed, self._planned)

    def _concatenated(self, at: WindowPlace) -> Plans:
        """Yield rows of one document after the other; `delivered` counts the tokens of a window."""
        row: list[Piece] = []
        room, delivered, place = self.length, at.delivered, at
        for window in self.stream.windows(at, self.window):
            first, _, source = window.place
            for piece in self._pieces(window, delivered, room):
                row.append(piece)
                size = piece.stop - piece.start
                room, delivered = room - size, delivered + size
                if not room:
                    yield WindowPlace(first, delivered, source), row
                    row, room = [], self.length
            place, delivered = WindowPlace(first, delivered, source), 0
        if row:
            yield place, row

    def _pieces(self, window: Window, skipped: int, room: int) -> Iterator[Piece]:
        """Yield the pieces of the documents of a window, none longer than the room in its row.

        Args:
            window: The window.
            skipped: Number of its first tokens that are left out.
            room: Room of the row that is filled; with other methods, of any.
        """
        for k, length in enumerate(window.lengths):
            if length > self.length and not self.splits:
                continue
            start = min(skipped, length)
            skipped -= start
            while start < length:
                stop = min(length, start + room)
                yield Piece(k, start, stop, window)
                room -= stop - start
                if not room or self.method != "concat":
                    room = self.length
                start = stop

    def _planned(self, window: Window, rng: np.random.Generator | None) -> list[list[Piece]]:
        pieces = list(self._pieces(window, 0, self.length))
        fit = best_fit if self.method == "best_fit" else first_fit
        rows = fit([piece.stop - piece.start for piece in pieces], self.length)
        # The pieces of a row have the order of the documents.
        return [[pieces[at] for at in sorted(row)] for row in rows]

    def made(self, plan: list[Piece]) -> Row:
        """Return the row of a plan."""
        dtype, whole = self.padding.dtype, self.length
        positions, ids = np.zeros(whole, dtype), np.zeros(whole, dtype)
        tokens, labels = np.full(whole, self.padding), np.full(whole, _IGNORED, dtype)
        at, begins = 0, [0]
        for number, piece in enumerate(plan, 1):
            k, start, stop, window = piece
            document = self.stream.sample(window, k)
            end = at + stop - start
            tokens[at:end] = self._tokens(document, piece)
            positions[at:end] = self._numbers[: stop - start]
            ids[at:end] = number
            labels[at : end - 1] = tokens[at + 1 : end]
            if stop < window.lengths[k]:
                # The next token of a document that is cut here is in another row.
                labels[end - 1] = self._tokens(document, Piece(k, stop, stop + 1, window))[0]
            begins.append(end)
            at = end
        if self.boundaries == "cu_seqlens":
            ids = np.array(begins if at == whole else [*begins, whole], np.int32)
        return {"tokens": tokens, "positions": positions, self.boundaries: ids, "labels": labels}

    @functools.cached_property
    def _numbers(self) -> np.ndarray:
        return np.arange(self.length)

    def _tokens(self, document: Any, piece: Piece) -> np.ndarray:
        """Return the tokens of a piece; raise TypeError or ValueError if they are none."""
        k, start, stop, window = piece
        # A dictionary has no parts.
        array = np.asarray(() if isinstance(document, dict) else document[start:stop])
        dtype = self.padding.dtype
        if array.ndim == 1 and array.dtype == dtype:
            return array
        of = f"pack(): document {window.numbers[k]}"
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise TypeError(f"{of} must be a list or array of ints, got {document!r:.50}")
        if not np.can_cast(array.dtype, dtype) and not np.array_equal(array, array.astype(dtype)):
            raise ValueError(f"{of} has tokens that {dtype} cannot hold")
        return array


def best_fit(sizes: list[int], room: int) -> list[list[int]]:
    """Return rows of pieces, by their numbers: the largest first, each where it just fits.

    Example:
        >>> best_fit([3, 5, 2, 4], 7)
        [[1, 2], [3, 0]]
    """
    rows: list[list[int]] = []
    # What is free in each row that is not full, and the row; sorted.
    free: list[tuple[int, int]] = []
    for at in np.argsort(-np.array(sizes, np.int64), kind="stable").tolist():
        size = sizes[at]
        place = bisect.bisect_left(free, (size, 0))
        if place == len(free):
            size_left, row = room, len(rows)
            rows.append([])
        else:
            size_left, row = free.pop(place)
        rows[row].append(at)
        if size_left > size:
            bisect.insort(free, (size_left - size, row))
    return rows


def first_fit(sizes: list[int], room: int) -> list[list[int]]:
    """Return rows of pieces, by their numbers: in their order, each in the first row with room.

    Example:
        >>> first_fit([3, 5, 2, 4], 7)
        [[0, 2], [1], [3]]
    """
    rows: list[list[int]] = []
    free = np.full(len(sizes), room)
    for at, size in enumerate(sizes):
        # Behind the rows that were begun, one has all of its room.
        row = int(np.argmax(free[: len(rows) + 1] >= size))
        if row == len(rows):
            rows.append([])
        rows[row].append(at)
        free[row] -= size
    return rows
