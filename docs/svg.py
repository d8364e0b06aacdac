"""SVG elements as text."""

from __future__ import annotations

import re
from html import escape

# The colours of pictures, and those that stand for them on a dark page.
DARK = {
    "#fff": "#131416",
    "#222": "#d4d7dc",
    "#ddd": "#33373d",
    "#999": "#777d85",
    "#767676": "#9aa0a8",
    "#b8b8b8": "#5a5f66",
    "#0072b2": "#3f9bd8",
    "#d55e00": "#f08a3c",
    "#eef3fa": "#1d2b3d",
    "#fdf3e1": "#3b301c",
}
_COLOUR = re.compile(r"(?<=\")#[0-9a-f]{3,8}(?=\")")
_IN_DARK_MODE = "@media (prefers-color-scheme: dark)"


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


def in_light(picture: str) -> str:
    """Return a picture for light pages, whatever the browser prefers."""
    return picture.replace(_IN_DARK_MODE, "@media not all")


def in_dark(picture: str) -> str:
    """Return a picture for dark pages: each colour in an attribute becomes that of `DARK`.

    A picture with a style of its own for dark mode gets that style.

    Raises:
        ValueError: The picture has a colour that is not in `DARK`.

    Example:
        >>> in_dark(element("rect", fill="#fff", stroke="#222"))
        '<rect fill="#131416" stroke="#d4d7dc"/>'
    """
    return _COLOUR.sub(_dark, picture.replace(_IN_DARK_MODE, "@media all"))


def _dark(colour: re.Match[str]) -> str:
    found = DARK.get(colour[0])
    if found is None:
        raise ValueError(f"{colour[0]} has no colour in DARK that stands for it on a dark page")
    return found


def _value(value: str | float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else escape(str(value))
