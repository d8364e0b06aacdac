"""Every Python block of README.md runs as it stands, and prints what the block after it shows.

As a script, in a session, in a notebook.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import needs, needs_installed, run_script

ROOT = Path(__file__).parents[2]
LIMIT = 60.0  # seconds; each takes about one

# The path of a file with a block is the argument.
IPYTHON = """
import sys
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_cell(Path(sys.argv[1]).read_text(), store_history=True).raise_error()
"""
NOTEBOOK = """
import sys
from pathlib import Path
import nbclient, nbformat

cell = nbformat.v4.new_code_cell(Path(sys.argv[1]).read_text())
notebook = nbformat.v4.new_notebook(cells=[cell])
nbclient.NotebookClient(notebook, timeout=60).execute()
assert any(output.get("name") == "stdout" for output in cell.outputs), cell.outputs
print("ran")
"""

PAIRS = re.findall(
    r"```python\n(.*?)```\n\n```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
)
BLOCKS = [block for block, _ in PAIRS]


def test_each_block_has_its_output():
    assert len(BLOCKS) == (ROOT / "README.md").read_text().count("```python") >= 3


@pytest.mark.parametrize(("block", "output"), PAIRS, ids=range(len(PAIRS)))
def test_a_block_of_the_readme_prints_what_is_shown(block, output, tmp_path):
    for framework in re.findall(r"enqueuer\.adapters\.(\w+)", block):
        needs(framework)
    script = tmp_path / "script.py"
    script.write_text(block)
    code, out, err = run_script(script, tmp_path, LIMIT)
    assert (code, out, err) == (0, output, "")


@pytest.mark.parametrize(
    ("options", "packages"),
    [
        pytest.param(["-i", "-q"], [], id="session", marks=pytest.mark.thorough),
        pytest.param(["-c", IPYTHON], ["IPython"], id="ipython"),
        pytest.param(["-c", NOTEBOOK], ["nbclient", "ipykernel"], id="notebook"),
    ],
)
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_of_the_readme_runs_where_it_is_pasted(block, options, packages, tmp_path):
    needs_installed(*packages, *re.findall(r"enqueuer\.adapters\.(\w+)", block))
    (tmp_path / "block.py").write_text(block)
    done = subprocess.run(
        [sys.executable, *options, *([tmp_path / "block.py"] if packages else [])],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "IPYTHONDIR": str(tmp_path / "ipython"),
            "JUPYTER_PLATFORM_DIRS": "1",
        },
        input="" if packages else f"{block}\n",
        capture_output=True,
        text=True,
        timeout=100.0 if packages else LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    if not packages:
        # The session writes its prompts to stderr.
        assert re.sub(r"(>>>|\.\.\.) ", "", done.stderr).strip() == ""
