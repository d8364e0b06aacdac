"""The suite is tested, too: whoever breaks a promise turns the contract's tests red."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from broken import BREAKAGES

TESTS = Path(__file__).parents[1]
FILES = [TESTS / "contract" / f"test_{name}.py" for name in ("order", "end", "failure", "bound")]


_QUICK = ("drops_an_item",)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "breakage",
    [
        pytest.param(name, marks=() if name in _QUICK else pytest.mark.thorough)
        for name in BREAKAGES
    ],
)
def test_the_contract_suite_notices(breakage):
    command = [sys.executable, "-m", "pytest", "-p", "broken", "-x", "-q", "--timeout=5"]
    command += ["-p", "no:cacheprovider", "-k", "thread and not process", *map(str, FILES)]
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        env={**os.environ, "BREAK": breakage, "PYTHONPATH": paths, "ENQUEUER_TESTS": "quick"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 1, done.stdout[-3000:]
    assert "1 failed" in done.stdout or "Timeout" in done.stdout + done.stderr
