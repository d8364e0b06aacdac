"""The code of each page runs when it is pasted, block by block, into an empty script."""

import re
import textwrap
from pathlib import Path

import pytest
from helpers import needs_installed, run_script

# `tox -e frameworks` runs them with all that the pages import.
pytestmark = pytest.mark.thorough

DOCS = Path(__file__).parents[2] / "docs"
LIMIT = 110.0  # seconds; frameworks take ten to be imported
NEEDS = {
    "howto/feed_jax.rst": ("jax",),
    "howto/feed_keras.rst": ("keras", "torch"),
    "howto/feed_pytorch.rst": ("torch",),
    "howto/feed_tensorflow.rst": ("tensorflow",),
    "howto/map_in_parallel.rst": ("h5py",),
    "howto/pack_into_hdf5.rst": ("h5py",),
    "howto/read_files.rst": ("PIL",),
    "howto/scale_with_ray.rst": ("ray",),
    "howto/train_on_several_gpus.rst": ("torch",),
    "howto/train_with_trainers.rst": ("torch",),
    "howto/what_workers_see.rst": ("h5py",),
}
# How many blocks run; the next one needs a debugger, a cluster, or another package.
RUN = {
    "howto/find_a_failure.rst": 5,
    "howto/scale_with_ray.rst": 1,
    "howto/watch_a_run.rst": 3,
}
# Files of the reader, and for Ray a cluster of the test's own.
PREPARED = {
    "howto/feed_tensorflow.rst": """
        from pathlib import Path
        import numpy as np

        for number in range(40):
            np.save(f"{number}.npy", np.full((8, 8), number))
        Path("train.txt").write_text("".join(f"{n}.npy {n % 2}\\n" for n in range(40)))
    """,
    "howto/read_files.rst": """
        from pathlib import Path
        import numpy as np

        for number in range(6):
            path = Path("data", "ab"[number % 2], f"{number}.npy")
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, np.full((2, 3), number))
    """,
    "howto/scale_with_ray.rst": """
        import ray

        ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    """,
}
BLOCK = re.compile(
    r"^\.\. (?:code-block:: python|testcode::).*\n(?:   :.*\n)*\n(?P<code>(?:   .*\n|\n)+)"
    r"|(?P<session>^ *>>> .*\n(?:(?!\n).*\n)*)",
    re.MULTILINE,
)


def blocks_of(page):
    """Return the blocks of a page as programs, without sessions that show an error."""
    blocks = []
    for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
        if found["code"]:
            blocks.append(textwrap.dedent(found["code"]))
        elif "Traceback" not in found["session"]:
            lines = textwrap.dedent(found["session"]).splitlines()
            blocks.append("\n".join(line[4:] for line in lines if line.startswith((">>> ", "..."))))
    return blocks


PAGES = {
    name: blocks[: RUN.get(name)]
    for page in sorted(DOCS.rglob("*.rst"))
    # `test_coming_from.py` runs the blocks of that page.
    if page.name != "coming_from.rst"
    if (blocks := blocks_of(page)) and (name := page.relative_to(DOCS).as_posix())
}


def test_there_are_pages():
    assert {*NEEDS, *RUN, *PREPARED} <= set(PAGES)
    assert len(PAGES) > 15
    assert sum(map(len, PAGES.values())) > 80


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_one_after_the_other(page, tmp_path):
    needs_installed(*NEEDS.get(page, ()))
    program = tmp_path / "pasted.py"
    program.write_text("\n".join([textwrap.dedent(PREPARED.get(page, "")), *PAGES[page]]))
    code, _, err = run_script(program, tmp_path, LIMIT, KERAS_BACKEND="torch")
    assert code == 0, err
