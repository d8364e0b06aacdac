"""SVG elements as text."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def element(tag: str, content: str = "", /, **attributes: str | float) -> str:
    """Return an element.

    Args:
        tag: Name of the element.
        content: Markup inside the element.
        attributes: `class_` is written as `class`, and `stroke_width` as `stroke-width`. Floats
            get one decimal, which is a tenth of a pixel.

    Example:
        >>> element("path", class_="grid", d="M0 1h5")
        '<path class="grid" d="M0 1h5"/>'
        >>> element("g", element("title", "a"), stroke_width=2, x=1 / 3)
        '<g stroke-width="2" x="0.3"><title>a</title></g>'
    """
    pairs = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{pairs}>{content}</{tag}>" if content else f"<{tag}{pairs}/>"


def text(x: float, y: float, words: str, anchor: str = "start", **attributes: str | float) -> str:
    """Return words at a place; `anchor` is `"start"`, `"middle"` or `"end"`."""
    return element("text", escape(words), x=x, y=y, text_anchor=anchor, **attributes)


def polyline(points: Iterable[tuple[float, float]], **attributes: str | float) -> str:
    """Return a line through points."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return element("polyline", points=places, fill="none", **attributes)


def _value(value: str | float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else escape(str(value))
