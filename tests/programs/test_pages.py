"""The first block of code of each page runs when it is pasted into an empty script."""

import re
import textwrap
from pathlib import Path

import pytest
from helpers import needs_installed, run_script

DOCS = Path(__file__).parents[2] / "docs"
LIMIT = 110.0  # seconds; frameworks take ten to be imported
NEEDS = {
    "howto/choose_decoder.rst": ("PIL",),
    "howto/feed_jax.rst": ("jax",),
    "howto/feed_keras.rst": ("keras", "torch"),
    "howto/feed_pytorch.rst": ("torch",),
    "howto/feed_tensorflow.rst": ("tensorflow",),
    "howto/pack_into_hdf5.rst": ("h5py",),
    "howto/read_files.rst": ("PIL",),
    "howto/train_with_accelerate.rst": ("accelerate", "torch"),
    "howto/train_with_hugging_face.rst": ("transformers", "accelerate", "torch"),
    "howto/train_with_lightning.rst": ("lightning", "torch"),
}
CODE = re.compile(
    r"^\.\. (?:code-block:: python|testcode::).*\n(?:   :.*\n)*\n(?P<code>(?:   .*\n|\n)+)"
    r"|(?P<session>^>>> .*\n(?:(?!\n).*\n)*)"
    # Each program that a page includes has a test of its own; a difference is no program.
    r"|(?P<other>^\.\. (?:literalinclude|code-block:: diff).*\n)",
    re.MULTILINE,
)


def first_block(page):
    """Return the first code of a page as a program; None if there is none."""
    found = CODE.search(page.read_text(encoding="utf-8"))
    if found is None or found["other"]:
        return None
    if found["code"]:
        return textwrap.dedent(found["code"])
    lines = found["session"].splitlines()
    return "\n".join(line[4:] for line in lines if line.startswith((">>> ", "...")))


PAGES = {
    page.relative_to(DOCS).as_posix(): code
    for page in sorted(DOCS.rglob("*.rst"))
    # `test_coming_from.py` runs all blocks of those pages; debug.rst stops in a debugger.
    if not page.name.startswith(("coming_from", "debug"))
    and (code := first_block(page)) is not None
}


def test_there_are_pages():
    assert set(NEEDS) <= set(PAGES)
    assert len(PAGES) > 20


@pytest.mark.parametrize("page", PAGES)
def test_the_first_block_of_a_page_runs(page, tmp_path):
    needs_installed(*NEEDS.get(page, ()))
    program = tmp_path / "pasted.py"
    program.write_text(PAGES[page])
    code, _, err = run_script(program, tmp_path, LIMIT, KERAS_BACKEND="torch")
    assert code == 0, err
