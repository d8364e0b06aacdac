"""Installing: what `pip install` makes of the project."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from helpers import needs_installed

ROOT = Path(__file__).parents[2]


def test_an_editable_install_is_a_path_that_type_checkers_understand(tmp_path):
    """An import hook, which setuptools would write, is found by Python alone."""
    needs_installed("setuptools")
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "enqueuer", tree / "enqueuer", ignore=shutil.ignore_patterns("*.pyc"))
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = "from setuptools import build_meta; print(build_meta.build_editable('.'))"
    done = subprocess.run(
        [sys.executable, "-c", build],
        cwd=tree,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tree / done.stdout.splitlines()[-1]) as wheel:
        hooks = [name for name in wheel.namelist() if name.startswith("__editable__")]
        assert [Path(name).suffix for name in hooks] == [".pth"]
        assert wheel.read(hooks[0]).decode().strip() == str(tree)
