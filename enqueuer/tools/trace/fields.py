"""The fields of an event in a trace, each checked: a trace may come from a crash, or from anyone.

The functions raise TypeError and ValueError for a field that makes no sense.
"""

from __future__ import annotations

from typing import Any

from enqueuer.common.text import pluralize, printable

# Microseconds that a clock can show that began when the machine was started: ten years. One event
# with a wrong time would make all others too small to be seen.
_LATEST_US = 10 * 366 * 86_400 * 1_000_000
# Largest value of any other number.
_LARGEST = 1 << 53
# Most characters of an error or a name.
_LONGEST_TEXT = 1000


def time_us(value: Any) -> int:
    """Return a time in microseconds."""
    return whole_number(value, _LATEST_US)


def whole_number(value: Any, most: int = _LARGEST) -> int:
    """Return a whole number from 0 to `most`."""
    if type(value) is not int:
        raise TypeError("not a whole number")
    if not 0 <= value <= most:
        raise ValueError("out of its range")
    return value


def shown_text(value: Any) -> str:
    """Return a text whose control characters are escaped."""
    if not isinstance(value, (str, int, float, type(None))):
        raise TypeError("not a text")
    return printable(str(value)[:_LONGEST_TEXT])


def setting(value: Any) -> str | int | float | None:
    """Return a setting of an enqueuer: a text or a number."""
    if value is None or isinstance(value, float):
        return value
    return shown_text(value) if isinstance(value, str) else whole_number(int(value))


def event_text(name: str, args: dict[str, Any]) -> str:
    """Describe an event in words."""
    values = {key: shown_text(value) for key, value in args.items()}
    match name:
        case "epoch":
            return f"epoch {values.get('epoch')} began"
        case "error" | "skipped":
            where = [f"{key} {values[key]}" for key in ("shard", "item") if key in values]
            return f"{values.get('error')} in {values.get('worker')}, {', '.join(where)}"
        case "restart":
            return f"a worker was replaced (restart {values.get('restarts')})"
        case "reconfigured":
            return f"from here on {pluralize(whole_number(args.get('workers', 0)), 'worker')}"
        case _:
            return "the file was as large as it may be; nothing more was recorded"
