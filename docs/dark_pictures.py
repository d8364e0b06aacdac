"""Show each SVG picture of a page in two forms: one in light mode, and one in dark mode.

Pages name one file. The build writes both forms of it, with the colours of `svg.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from svg import in_dark, in_light


def show_both(app: Sphinx, doctree: nodes.document) -> None:
    """Replace each SVG image by its two forms; furo shows the one that fits."""
    if app.builder.format != "html":
        return
    folder = Path(app.doctreedir, "pictures")
    folder.mkdir(parents=True, exist_ok=True)
    for image in list(doctree.findall(nodes.image)):
        if not image["uri"].endswith(".svg"):
            continue
        name, path = app.env.relfn2path(image["uri"])
        app.env.note_dependency(name)
        picture = Path(path).read_text(encoding="utf-8")
        stem = Path(name).with_suffix("").as_posix().replace("/", "-")
        forms = []
        for mode, form in (("light", in_light), ("dark", in_dark)):
            target = folder / f"{stem}-{mode}.svg"
            target.write_text(form(picture), encoding="utf-8")
            shown = image.copy()
            shown["uri"] = f"/{os.path.relpath(target, app.srcdir)}"
            shown["classes"] = [*image["classes"], f"only-{mode}"]
            forms.append(shown)
        image.replace_self(forms)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the extension to Sphinx, before the files of pictures are collected."""
    app.connect("doctree-read", show_both, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
