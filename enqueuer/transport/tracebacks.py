"""A traceback <-> plain data, with the columns that an error came from.

    worker:   reduce(tb)  -> file, function, line and columns of each frame
    consumer: rebuild(..) -> frames of code that has only these, each of which raises

The columns are those that Python 3.11 and later underline in a traceback (`~~~~~^^^^`). A frame
is made as tblib makes it: by running a line of code that raises, under the other's names.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from types import CodeType, TracebackType
from typing import Any, NamedTuple

Columns = tuple[int | None, int | None, int | None]
"""The last line, the first column and the last one, in bytes from 0; None if unknown."""

_UNKNOWN: Columns = (None, None, None)
_STUB = compile("raise Exception", "<string>", "exec")
# Units of two bytes of code that an entry of a line table describes.
_MOST_UNITS = 8
# Kinds of entries, of Objects/locations.md of CPython.
_WITHOUT_COLUMNS, _WITH_COLUMNS = 13, 14


class Place(NamedTuple):
    """The place of a frame."""

    file: str
    function: str
    line: int
    columns: Columns
    # Globals from which the source is found.
    names: dict[str, Any]


def reduce(tb: TracebackType) -> tuple[Any, tuple[Any, ...]]:
    """Reduce a traceback for pickle: to the function that rebuilds it, and its arguments."""
    return rebuild, (list(_places(tb)),)


def rebuild(places: Sequence[Place]) -> TracebackType | None:
    """Return a traceback whose frames are in these places, the outermost first."""
    result = None
    for place in reversed(places):
        frame = _raised_at(place)
        result = TracebackType(result, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return result


def _places(tb: TracebackType | None) -> Iterator[Place]:
    while tb is not None:
        frame = tb.tb_frame
        code, known = frame.f_code, frame.f_globals
        names: dict[str, Any] = {
            name: known[name] for name in ("__file__", "__name__") if name in known
        }
        yield Place(code.co_filename, code.co_name, tb.tb_lineno, _columns_of(tb), names)
        tb = tb.tb_next


def _columns_of(tb: TracebackType) -> Columns:
    if sys.version_info >= (3, 11) and tb.tb_lasti >= 0:
        positions = tb.tb_frame.f_code.co_positions()
        at = next(itertools.islice(positions, tb.tb_lasti // 2, None), None)
        if at is not None and at[0] == tb.tb_lineno:
            return at[1], at[2], at[3]
    return _UNKNOWN


def _raised_at(place: Place) -> TracebackType:
    """Return a traceback of one frame, which is in a place."""
    code = _STUB.replace(co_firstlineno=place.line, co_filename=place.file, co_name=place.function)
    if sys.version_info >= (3, 11):
        code = code.replace(
            co_qualname=place.function, co_linetable=_line_table(code, place.line, place.columns)
        )
    try:
        exec(code, dict(place.names))
    except Exception as error:
        tb = error.__traceback__
        assert tb is not None and tb.tb_next is not None
        return tb.tb_next
    raise AssertionError("the code did not raise")


def _line_table(code: CodeType, line: int, columns: Columns) -> bytes:
    """Return a line table in which all instructions have the same place."""
    last, begin, end = columns
    if last is None or begin is None or end is None or last < line:
        kind, place = _WITHOUT_COLUMNS, b"\0"
    else:
        kind = _WITH_COLUMNS
        place = b"\0" + b"".join(map(_varint, (last - line, begin + 1, end + 1)))
    left, table = len(code.co_code) // 2, b""
    while left:
        units = min(left, _MOST_UNITS)
        table += bytes([0x80 | kind << 3 | units - 1]) + place
        left -= units
    return table


def _varint(number: int) -> bytes:
    """Return a number in groups of six bits, the lowest first, with a mark at all but the last.

    Example:
        >>> list(_varint(5)), list(_varint(200))
        ([5], [72, 3])
    """
    groups = []
    while number >= 64:
        groups.append(number & 63 | 64)
        number >>= 6
    return bytes([*groups, number])
