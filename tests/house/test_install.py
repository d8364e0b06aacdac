"""Installing: what `pip install` makes of the project."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from helpers import needs_installed

import enqueuer

ROOT = Path(__file__).parents[2]
PACKAGE = Path(enqueuer.__file__).parent


def test_an_editable_install_is_a_path_that_type_checkers_understand(tmp_path):
    """An import hook, which setuptools would write, is found by Python alone."""
    needs_installed("setuptools")
    tree = tmp_path / "tree"
    shutil.copytree(PACKAGE, tree / "enqueuer", ignore=shutil.ignore_patterns("*.pyc"))
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


def test_the_source_archive_has_every_file(tmp_path):
    needs_installed("setuptools")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("this is no clone")
    there = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    tree = tmp_path / "tree"
    for name in there:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    build = "from setuptools import build_meta; print(build_meta.build_sdist('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tree / done.stdout.splitlines()[-1]) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert there - packed == set()
