"""Text for the user: numbers and objects in words, and warnings at the user's line."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence

PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""Folder of this package; the names of all its files begin with it."""


def size(count: float) -> str:
    """Return bytes with a unit.

    Example:
        >>> size(12), size(9_633_792)
        ('12 B', '9.6 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Return a time with a suitable unit.

    Example:
        >>> duration(0), duration(0.0000123), duration(0.0456), duration(3.2), duration(3725)
        ('0 s', '12.3 us', '45.6 ms', '3.2 s', '1:02:05 h')
    """
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, remaining = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{remaining:02} min"
    return f"{minutes // 60}:{minutes % 60:02}:{remaining:02} h"


def pluralize(count: int, noun: str) -> str:
    """Return a number with a noun, in the plural if the number is not 1.

    Example:
        >>> pluralize(1, "batch"), pluralize(2, "batch"), pluralize(0, "epoch")
        ('1 batch', '2 batches', '0 epochs')
    """
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith(('tch', 's')) else 's'}"


def an(noun: str) -> str:
    """Return a noun, such as the name of a class, with the indefinite article.

    Example:
        >>> an("OrderedEnqueuer"), an("dict"), an("io.BytesIO"), an("uint8")
        ('an OrderedEnqueuer', 'a dict', 'an io.BytesIO', 'a uint8')
    """
    return f"an {noun}" if noun[:1] in set("AEIOaeio") else f"a {noun}"


def str_of(value: object, form: Callable[[object], str] = str) -> str:
    """Return the text of an object of the user, such as an error; an excuse if that fails.

    Args:
        value: The object.
        form: Function that returns the text.

    Example:
        >>> str_of(ValueError("no")), str_of(ValueError("no"), repr)
        ('no', "ValueError('no')")
    """
    try:
        return form(value)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return "(its text is not available)"


def printable(text: str) -> str:
    """Return text with all characters escaped that a terminal does not show.

    A terminal executes some of them as commands.

    Example:
        >>> printable("a b"), printable("\\x1b[2J")
        ('a b', '\\\\x1b[2J')
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def rate(per_s: float) -> str:
    """Return a number per second.

    Example:
        >>> rate(0), rate(0.0167), rate(46.53), rate(1234.5)
        ('0', '0.0167', '46.5', '1,234')
    """
    return f"{per_s:,.0f}" if per_s >= 99.95 else f"{per_s:.3g}"


def percent(share: float) -> str:
    """Return a share of 1 in percent.

    Example:
        >>> percent(0), percent(0.004), percent(0.256)
        ('0 %', '0.4 %', '26 %')
    """
    return f"{100 * share:.1f} %" if 0 < share < 0.095 else f"{100 * share:.0f} %"


def ratio(part: float, whole: float) -> float:
    """Return the ratio of a part to a whole; 0 if the whole is 0.

    Example:
        >>> ratio(1, 4), ratio(0, 0)
        (0.25, 0.0)
    """
    return part / whole if whole > 0 else 0.0


def table(
    rows: Sequence[Sequence[str]], justify: Callable[[str, int], str] = str.rjust
) -> list[str]:
    """Return a line for each row, with columns of equal width; the first one is text.

    Args:
        rows: Rows with equally many cells.
        justify: Function that pads the cells of all columns but the first.

    Example:
        >>> table([("key", "rows"), ("x", "12")])
        ['key  rows', 'x      12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            justify(cell, width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the first frame that is not ours: the user's."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
