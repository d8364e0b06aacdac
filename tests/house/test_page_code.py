"""The code of a page has its imports: a reader needs nothing but the page and data of their own."""

import ast
import builtins
import re
import textwrap
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(
    r"^\.\. (?:code-block:: python|testcode::)\n(?:   :.*\n)*\n(?P<block>(?:   .*\n|\n)+)"
    r"|^(?P<session> *>>> .*\n(?:(?!\n).*\n)*)",
    re.MULTILINE,
)
# What stands for the reader's own data and functions.
READERS = {
    *("batches_of_names", "dataset", "load", "path", "paths", "rank", "train", "world_size"),
}


def blocks(text: str) -> list[str]:
    """Return the Python code of a page, block by block."""
    found = []
    for match in BLOCK.finditer(text):
        if match["block"]:
            found.append(textwrap.dedent(match["block"]))
        else:
            lines = textwrap.dedent(match["session"]).splitlines()
            found.append("\n".join(line[4:] for line in lines if line.startswith((">>>", "..."))))
    return found


def unknown_names(text: str) -> set[str]:
    """Return the names that a page uses and neither imports nor defines before."""
    known, unknown = set(dir(builtins)), set()
    for code in blocks(text):
        used = set()
        for node in ast.walk(ast.parse(code)):
            match node:
                case ast.Name(ctx=ast.Load()):
                    used.add(node.id)
                case ast.Name():
                    known.add(node.id)
                case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                    known.add(node.name)
                case ast.arg():
                    known.add(node.arg)
                case ast.ExceptHandler(name=str()):
                    known.add(node.name)
                case ast.Import() | ast.ImportFrom():
                    known |= {(name.asname or name.name).split(".")[0] for name in node.names}
        unknown |= used - known
    return unknown


@pytest.mark.parametrize(
    "page", sorted(DOCS.rglob("*.rst")), ids=lambda path: path.relative_to(DOCS).as_posix()
)
def test_a_page_imports_what_its_code_uses(page):
    assert unknown_names(page.read_text(encoding="utf-8")) - READERS == set()


def test_a_name_that_is_imported_later_is_unknown():
    page = ".. code-block:: python\n\n   np.zeros(3)\n   import numpy as np\n\n>>> load(path)\n"
    assert unknown_names(f"{page}\ntext\n\n>>> prefetch([])\n") == {"load", "path", "prefetch"}
