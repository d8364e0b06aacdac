"""The directive `files`: a tree of the package, with the first sentence of each module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import enqueuer

PACKAGE = Path(enqueuer.__file__).parent
_COLUMN = 27  # of the sentences


def tree(folder: Path = PACKAGE, indent: int = 2) -> Iterator[str]:
    """Yield the lines for the folders and files in a folder."""
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_file(), path.name)):
        if path.is_dir() and (path / "__init__.py").exists():
            yield f"{' ' * indent}{path.name}/"
            yield from tree(path, indent + 2)
        elif path.suffix == ".py":
            yield f"{' ' * indent + path.name:{_COLUMN}}{_sentence(path)}".rstrip()


def _sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def setup(app):
    """Add the directive. The tests import this file where docutils is not installed."""
    from docutils import nodes
    from sphinx.util.docutils import SphinxDirective

    class Files(SphinxDirective):
        def run(self):
            text = "\n".join(["enqueuer/", *tree()])
            for path in PACKAGE.rglob("*.py"):
                self.env.note_dependency(path)
            return [nodes.literal_block(text, text, language="text")]

    app.add_directive("files", Files)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    print(*tree(), sep="\n")
