"""An item of a source -> columns of rows: arrays by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from enqueuer.common.text import an


def by_name(item: Any, keys: tuple[str, ...] | None) -> dict[str, Any]:
    """Return the content of an item by names.

    Raises:
        ValueError: The item lacks a name of `keys`.
        TypeError: The item is nested.
    """
    if isinstance(item, Mapping):
        found = _of_mapping(item, keys)
    elif isinstance(item, tuple):
        found = _of_tuple(item, keys)
    elif keys is None or len(keys) == 1:
        found = {keys[0] if keys else "data": item}
    else:
        raise ValueError(
            f"the source yields one {type(item).__name__} at a time, and keys has {len(keys)} "
            "names; yield dicts or tuples"
        )
    for key, value in found.items():
        if isinstance(value, (Mapping, tuple)):
            raise TypeError(
                f"{key!r} is {an(type(value).__name__)}, and only a flat dict or tuple of arrays "
                "can be packed; give its members keys of their own"
            )
    return found


def _of_mapping(item: Mapping[Any, Any], keys: tuple[str, ...] | None) -> dict[str, Any]:
    found = {str(key): value for key, value in item.items()}
    if len(found) < len(item):
        raise ValueError(f"the source yields keys that are alike as texts: {list(item)}")
    if keys is None:
        return found
    if missing := [key for key in keys if key not in found]:
        raise ValueError(f"the source yields no {missing}, only {sorted(found)}")
    return {key: found[key] for key in keys}


def _of_tuple(item: tuple[Any, ...], keys: tuple[str, ...] | None) -> dict[str, Any]:
    names = keys or getattr(item, "_fields", None) or tuple(map(str, range(len(item))))
    if len(names) != len(item):
        raise ValueError(f"keys={list(names)} do not name the {len(item)} members of a tuple")
    return dict(zip(names, item, strict=True))


def column_of(key: str, rows: Any, is_ragged: bool) -> np.ndarray:
    """Return rows of one key as an array: of numbers, of `str`, or of arrays if `is_ragged`.

    Raises:
        TypeError: HDF5 has no type for them; the message proposes a remedy.
        ValueError: They differ in shape, or there is no axis of rows.
    """
    if np.ma.is_masked(rows):
        raise TypeError(
            f"{key!r} is masked, and HDF5 has no masks; yield .filled(...), and the mask as a "
            "key of its own"
        )
    if is_ragged:
        return _ragged(key, rows)
    if _holds(rows, bytes):
        raise TypeError(
            f"{key!r} holds bytes; yield numpy.frombuffer(..., 'uint8') of each and give "
            f"ragged=[{key!r}]"
        )
    try:
        # As a text array, each text would take the room of the longest, and numbers beside texts
        # would become texts.
        array = np.asarray(rows, object if _holds(rows, str) else None)
    except ValueError:
        _refuse_shapes(key)
    if array.ndim == 0:
        raise ValueError(
            f"{key!r} is a single {type(rows).__name__} and has no axis of rows; if the source "
            "yields one sample at a time, give batched=False"
        )
    if len(array) and not array.size:
        raise ValueError(f"the rows of {key!r} are empty, their shape is {array.shape[1:]}")
    return _storable(key, array)


def _storable(key: str, array: np.ndarray) -> np.ndarray:
    """Return an array with a dtype that HDF5 has."""
    if array.dtype.kind == "U":
        return array.astype(object)
    if array.dtype.kind in "mM":
        raise TypeError(
            f"{key!r} has dtype {array.dtype}, and HDF5 has none like it; yield .astype('int64')"
        )
    if array.dtype.kind == "O":
        if any(isinstance(row, (np.ndarray, list)) for row in array.flat):
            _refuse_shapes(key)
        others = {type(row).__name__ for row in array.flat if not isinstance(row, str)}
        if others:
            raise TypeError(
                f"{key!r} holds Python objects ({', '.join(sorted(others))}); only numbers, "
                "strings and arrays of them can be packed"
            )
    return array


def _refuse_shapes(key: str) -> NoReturn:
    raise ValueError(
        f"the rows of {key!r} differ in shape; pad them, or give ragged=[{key!r}] if they are "
        "1-D arrays of different length"
    ) from None


def _holds(rows: Any, kind: type) -> bool:
    # HDF5 has a type for numpy's bytes of fixed length.
    if isinstance(rows, np.ndarray) and rows.dtype.kind != "O":
        return False
    return isinstance(rows, kind) or (
        isinstance(rows, (list, np.ndarray)) and any(isinstance(row, kind) for row in rows)
    )


def _ragged(key: str, rows: Any) -> np.ndarray:
    # These are copies, as a source may reuse its arrays.
    arrays = [np.array(row) for row in rows]
    for array in arrays:
        if array.ndim != 1 or array.dtype.kind not in "biuf":
            raise TypeError(
                f"{key!r} is ragged, so its rows must be 1-D arrays of numbers, got shape "
                f"{array.shape} and dtype {array.dtype}; flatten them and give their shape a key "
                "of its own"
            )
    if len({array.dtype for array in arrays}) > 1:
        raise TypeError(
            f"the rows of {key!r} differ in dtype; yield arrays that all have the same (an empty "
            "list has float64)"
        )
    column = np.empty(len(arrays), object)
    # An assignment of all together would make rows of their items.
    for index, array in enumerate(arrays):
        column[index] = array
    return column
