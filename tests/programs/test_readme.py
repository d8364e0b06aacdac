"""Every Python block of README.md is a program that runs as it stands: pasted, without a guard."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import needs, run_script

ROOT = Path(__file__).parents[2]
LIMIT = 60.0  # seconds; each takes about one

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_there_are_blocks():
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_of_the_readme_runs(block, tmp_path):
    for framework in re.findall(r"enqueuer\.adapters\.(\w+)", block):
        needs(framework)
    script = tmp_path / "script.py"
    script.write_text(block)
    code, out, err = run_script(script, tmp_path, LIMIT)
    assert (code, err) == (0, "")
    assert out


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_of_the_readme_runs_where_it_is_pasted_into_a_session(block, tmp_path):
    for framework in re.findall(r"enqueuer\.adapters\.(\w+)", block):
        needs(framework)
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=f"{block}\n",
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    # The session writes its prompts to stderr.
    assert re.sub(r"(>>>|\.\.\.) ", "", done.stderr).strip() == ""
    assert done.stdout
