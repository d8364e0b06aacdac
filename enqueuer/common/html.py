"""Lines and a table as HTML, for notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence


def as_html(lines: Sequence[str], rows: Sequence[Sequence[str]], end: str) -> str:
    """Return lines, a table whose first row is its head, and a last line.

    Example:
        >>> as_html(["a < b"], [("name", "items"), ("worker 0", "3")], "end")
        '<p>a &lt; b</p><table><thead><tr><th>name</th><th>items</th></tr></thead><tbody><tr>\
<td>worker 0</td><td>3</td></tr></tbody></table><p>end</p>'
    """
    head, *body = rows
    above = "<br>".join(map(html.escape, lines))
    filled = "".join(map(_row, body))
    return (
        f"<p>{above}</p><table><thead>{_row(head, 'th')}</thead><tbody>{filled}</tbody></table>"
        f"<p>{html.escape(end)}</p>"
    )


def _row(cells: Sequence[str], tag: str = "td") -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
