"""Numbers as people read them."""

from __future__ import annotations


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
    """Return seconds with a unit, and two or three digits.

    Example:
        >>> duration(0), duration(0.000_012), duration(0.0123), duration(61.0), duration(7200)
        ('0 s', '12 us', '12 ms', '61 s', '120 min')
    """
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1, 1e3, "ms"), (300, 1, "s")):
        if 0 < seconds < limit:
            number = seconds * factor
            return f"{number:.1f} {unit}" if number < 9.95 else f"{number:.0f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds else "0 s"


def percent(share: float) -> str:
    """Return a share of 1 as percent; little is not nothing.

    Example:
        >>> percent(0.5), percent(0.004), percent(0.0)
        ('50 %', '0.4 %', '0 %')
    """
    return f"{share:.1%}".replace("%", " %") if 0 < share < 0.0095 else f"{share * 100:.0f} %"
