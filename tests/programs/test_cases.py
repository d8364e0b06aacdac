"""Programs as users reported them, each in its own process: it prints `ok`, or what differs.

The programs are in `cases/`. A line `# needs: PACKAGE, ...` names what a program imports.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import needs_installed

CASES = sorted((Path(__file__).parent / "cases").glob("*.py"))
# Seconds. The longest starts some dozens of interpreters, perhaps beside other tests.
LIMIT = 240


@pytest.mark.thorough
@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize("case", CASES, ids=[case.stem for case in CASES])
def test_reported_program(case, tmp_path):
    found = re.search(r"^# needs: (.+)$", case.read_text(), re.MULTILINE)
    if found is not None:
        needs_installed(*found[1].split(", "))
    done = subprocess.run(
        [sys.executable, case], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT
    )
    lines = done.stdout.strip().splitlines()
    assert done.returncode == 0 and lines and lines[-1] == "ok", (done.stdout, done.stderr)
