"""The description of an HDF5 file, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from enqueuer.common.text import size, table

if TYPE_CHECKING:
    from enqueuer.datasets.hdf5 import Column, Description, Summary

# Most characters of an attribute.
_LONGEST_VALUE = 60
_HEAD = ("key", "shape", "dtype", "chunk", "compression", "stored", "min", "mean", "max")


def table_of(found: Description) -> Iterator[str]:
    """Yield a line for each column of a file, and notes on the statistics."""
    yield from table([_HEAD, *map(_cells, found.columns, found.summaries)], str.ljust)
    columns = list(zip(found.columns, found.summaries, strict=True))
    sampled = [summary.rows for column, summary in columns if 0 < summary.rows < column.shape[0]]
    if sampled:
        yield f"statistics of {max(sampled):,} rows; --full takes all"
    for column, summary in columns:
        if summary.not_finite:
            yield f"{column.name}: {summary.not_finite:,} numbers are NaN or infinite"


def _cells(column: Column, summary: Summary) -> Sequence[str]:
    numbers = (summary.minimum, summary.mean, summary.maximum)
    return (
        column.name,
        " x ".join(map(str, column.shape)) or "-",
        column.dtype,
        str(column.chunk or "-"),
        column.compression or "-",
        size(column.stored),
        *("-" if number is None else f"{number:.4g}" for number in numbers),
    )


def attribute_lines(found: Description) -> Iterator[str]:
    """Yield a line for each attribute of a file and of its columns."""
    owners = {"": found.attributes, **found.column_attributes}
    for owner, attributes in owners.items():
        for name, value in attributes.items():
            text = str(value)
            if len(text) > _LONGEST_VALUE:
                text = text[:_LONGEST_VALUE] + "..."
            yield f"{owner}{'@' if owner else ''}{name} = {text}"


def as_dict(found: Description) -> dict[str, Any]:
    """Return a description as plain data, for JSON."""
    attributes = found.column_attributes
    return {
        "path": found.path,
        "bytes": found.bytes,
        "files": found.files,
        "outside": found.outside,
        "columns": [
            dataclasses.asdict(column)
            | {"statistics": dataclasses.asdict(summary)}
            | {"attributes": _plain_values(attributes.get(column.name, {}))}
            for column, summary in zip(found.columns, found.summaries, strict=True)
        ],
        "attributes": _plain_values(found.attributes),
    }


def _plain_values(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in attributes.items()}


def _plain(value: Any) -> Any:
    """Return the value of an attribute, or its text if JSON has nothing like it."""
    value = value.tolist() if hasattr(value, "tolist") else value
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)
    return value
