"""Known lengths: samples are padded to the longest one, and divided into parts of equal cost."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from enqueuer.common import checks
from enqueuer.common.text import an
from enqueuer.workers.arrays import stack


def pad(
    batch: Sequence[Any],
    value: Any = 0,
    *,
    side: Literal["right", "left"] = "right",
    multiple_of: int = 1,
) -> Any:
    """Make arrays of one length of samples of different lengths, with a mask.

    Args:
        batch: Arrays, tensors or lists of numbers, which may differ in their first axis; or
            dictionaries with such fields.
        value: Value of the padding, 0 by default. For dictionaries it may be a dictionary of the
            values of the fields to pad, such as `{"tokens": 0, "labels": -100}`; the other fields
            are stacked. Otherwise all fields that have a length are padded.
        side: Side on which the padding is, `"right"` or `"left"`.
        multiple_of: The common length is rounded up to a multiple of this; 1 by default.

    Returns:
        The array and its mask, which is True where a sample has data; for dictionaries, one with
        the arrays of all fields, and the entry `mask`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The batch or a sample is empty, the samples do not fit each other, or their
            dtype cannot hold `value`.

    Example:
        >>> from enqueuer import pad
        >>> tokens, mask = pad([[5, 6, 7], [8]])
        >>> tokens.tolist(), mask.sum(axis=1).tolist()
        ([[5, 6, 7], [8, 0, 0]], [3, 1])
        >>> sorted(pad([{"x": [1.0], "y": 1}, {"x": [2.0, 3.0], "y": 0}], side="left"))
        ['mask', 'x', 'y']
    """
    checks.choice("side", side, ("right", "left"))
    checks.positive("multiple_of", multiple_of)
    if isinstance(batch, (str, bytes, Mapping)) or not hasattr(batch, "__getitem__"):
        raise TypeError(f"pad() needs a list of samples, got {an(type(batch).__name__)}")
    if len(batch) == 0:
        raise ValueError("pad() needs at least one sample")
    if not isinstance(batch[0], Mapping):
        return _padded(list(batch), value, side, multiple_of, "the batch")
    fields = _fields_of(batch, value)
    padded: dict[str, Any] = {}
    for name in batch[0]:
        column = [sample[name] for sample in batch]
        if name not in fields:
            padded[name] = stack(column)
            continue
        padded[name], mask = _padded(column, fields[name], side, multiple_of, repr(name))
        if not np.array_equal(padded.setdefault("mask", mask), mask):
            raise ValueError(
                f"{name!r} has other lengths than the fields before it, so no mask fits all; "
                "name the fields to pad by value={...}"
            )
    if "mask" not in padded:
        raise ValueError("pad() found no field with a length; name one or more by value={...}")
    return padded


def _fields_of(batch: Sequence[Mapping[str, Any]], value: object) -> Mapping[str, Any]:
    """Return the value for each field that is padded."""
    names = set(batch[0])
    for k, sample in enumerate(batch):
        if not isinstance(sample, Mapping) or set(sample) != names:
            raise ValueError(f"sample {k} of the batch has other fields than {sorted(names)}")
    if "mask" in names:
        raise ValueError("pad() makes the entry 'mask', and the samples have one; rename it")
    if not isinstance(value, Mapping):
        with_length = [name for name in names if _array(batch[0][name], 0, repr(name)).ndim > 0]
        return dict.fromkeys(with_length, value)
    if not set(value) <= names:
        raise ValueError(f"value is for {sorted(value)}, and the samples have {sorted(names)}")
    return value


def _array(sample: object, k: int, of: str) -> np.ndarray:
    try:
        return np.asarray(sample)
    except ValueError as error:
        raise ValueError(f"sample {k} of {of} has lists of different lengths in it") from error


def _padded(
    samples: list[Any], value: Any, side: str, multiple_of: int, of: str
) -> tuple[np.ndarray, np.ndarray]:
    rows = [_array(sample, k, of) for k, sample in enumerate(samples)]
    for k, row in enumerate(rows):
        if row.dtype.hasobject or row.dtype.kind in "US" or row.ndim == 0:
            raise TypeError(f"sample {k} of {of} must be an array or list of numbers")
        if len(row) == 0:
            raise ValueError(f"sample {k} of {of} is empty; leave it out before")
        if row.shape[1:] != rows[0].shape[1:]:
            raise ValueError(
                f"sample {k} of {of} has shape {row.shape}, and the first has {rows[0].shape}: "
                "only the first axis may differ"
            )
    lengths = np.array([len(row) for row in rows])
    longest = int(lengths.max()) + -int(lengths.max()) % multiple_of
    dtype = np.result_type(*rows)
    if dtype.kind == "f" and all(row.dtype.kind in "iu" for row in rows):
        raise TypeError(f"no dtype holds the ints of {of}, some of int64 and some of uint64")
    arrays = np.full((len(rows), longest, *rows[0].shape[1:]), held(value, dtype), dtype)
    for array, row in zip(arrays, rows, strict=True):
        start = longest - len(row) if side == "left" else 0
        array[start : start + len(row)] = row
    at = np.arange(longest)[:: -1 if side == "left" else 1]
    return arrays, at < lengths[:, None]


def held(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return a value as an element of the dtype; raise ValueError if it is another one there."""
    try:
        with np.errstate(all="ignore"):
            element = np.array(value).astype(dtype)
        # A float may be rounded, but not to infinity.
        is_rounded = dtype.kind == "f" and np.isfinite(element) == np.isfinite(value)
        if element.ndim == 0 and (is_rounded or np.array_equal(element, value, equal_nan=True)):
            return element
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"the padding value {value!r} is none that {dtype} can hold")


# --- equal cost ---


def balance(
    lengths: Sequence[int] | np.ndarray,
    ranks: int,
    *,
    cost: Callable[[np.ndarray], np.ndarray] | None = None,
    drop_last: bool = False,
) -> list[np.ndarray]:
    """Divide samples of known lengths among ranks, so that all have nearly the same cost.

    Each sample, the longest first, goes to the rank with the least cost so far. Each rank has the
    same number of samples, or one more. The largest cost of a rank is at most 5 % above the mean if
    no sample costs more than 5 % of the mean. The same lengths give the same parts, so each rank
    finds its own without asking the others.

    Args:
        lengths: Length of each sample.
        ranks: Number of parts.
        cost: Function of the array of the lengths that returns the cost of each sample, such as
            `lambda n: n * n` for attention. None, the default: the length.
        drop_last: Leave out the shortest samples that cannot be divided evenly.

    Returns:
        For each rank, the indices of its samples, sorted.

    Raises:
        TypeError: A length is no int, or another argument has the wrong type.
        ValueError: There is no length, one is not positive, or the costs do not fit.

    Example:
        >>> from enqueuer import balance
        >>> [part.tolist() for part in balance([9, 1, 2, 8, 5, 5], 2)]
        [[0, 1, 5], [2, 3, 4]]
    """
    checked = as_lengths("lengths", lengths)
    checks.positive("ranks", ranks)
    checks.flag("drop_last", drop_last)
    checks.function("cost", cost, "of the array of lengths")
    if drop_last and len(checked) < ranks:
        raise ValueError(
            f"drop_last=True leaves none of {len(checked)} samples for {ranks} ranks; give fewer "
            "ranks, or drop_last=False"
        )
    costs = checked if cost is None else np.asarray(cost(checked))
    if costs.shape != checked.shape or costs.dtype.kind not in "iuf":
        raise ValueError(
            f"cost must return a number for each of {len(checked)} lengths, got an array of shape "
            f"{costs.shape} of {costs.dtype}; it is called once with all of them"
        )
    if not np.all((costs >= 0) & np.isfinite(costs)):
        raise ValueError("cost must return finite numbers >= 0")
    order = np.argsort(-costs.astype(np.float64), kind="stable").tolist()
    each, more = divmod(len(order), ranks)
    parts: list[list[int]] = [[] for _ in range(ranks)]
    # A rank that has its number of samples comes behind those with room, and once only.
    loads = [(max(0, 1 - each), 0.0, rank) for rank in range(ranks)]
    for at in order[: len(order) - more * drop_last]:
        _, load, rank = heapq.heappop(loads)
        parts[rank].append(at)
        above = max(0, len(parts[rank]) + 1 - each)
        heapq.heappush(loads, (above, load + float(costs[at]), rank))
    return [np.array(sorted(part), np.int64) for part in parts]


def as_lengths(name: str, lengths: object) -> np.ndarray:
    """Return an array of int64; raise TypeError or ValueError unless all are ints > 0."""
    values: Any = lengths
    array = np.asarray(values)
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"{name} must be a list of at least one length, got shape {array.shape}")
    if array.dtype.kind not in "iu" or int(array.max()) >= 2**63:
        raise TypeError(f"{name} must be ints below 2**63, got an array of {array.dtype}")
    if (least := int(array.min())) < 1:
        at = int(array.argmin())
        raise ValueError(f"{name} must be >= 1, got {least} at {at}; leave empty samples out")
    return array.astype(np.int64)
