"""Installing: what `pip install` makes of the project."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from helpers import needs_installed

import enqueuer

ROOT = Path(__file__).parents[2]
PACKAGE = Path(enqueuer.__file__).parent


def copy_package(folder):
    shutil.copytree(PACKAGE, folder / "enqueuer", ignore=shutil.ignore_patterns("*.pyc"))


def built(tree, what):
    """Return the path of what setuptools builds of a tree."""
    done = subprocess.run(
        [sys.executable, "-c", f"from setuptools import build_meta; print(build_meta.{what}('.'))"],
        cwd=tree,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return tree / done.stdout.splitlines()[-1]


@pytest.fixture
def tree(tmp_path):
    """What a wheel is built of."""
    needs_installed("setuptools")
    tree = tmp_path / "tree"
    copy_package(tree)
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


def test_an_editable_install_is_a_path_that_type_checkers_understand(tree):
    """An import hook, which setuptools would write, is found by Python alone."""
    with zipfile.ZipFile(built(tree, "build_editable")) as wheel:
        hooks = [name for name in wheel.namelist() if name.startswith("__editable__")]
        assert [Path(name).suffix for name in hooks] == [".pth"]
        assert wheel.read(hooks[0]).decode().strip() == str(tree)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("files", "command"),
    [
        # Until there is a release, anybody may register a package of that name.
        ((), ""),
        (("setup.cfg",), ", or in the clone of enqueuer pip install '.[torch]'"),
    ],
    ids=["wheel", "clone"],
)
def test_a_missing_extra_names_the_command_that_works_where_it_is(files, command, tmp_path):
    copy_package(tmp_path)
    for name in files:
        (tmp_path / name).touch()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.modules['torch'] = None\n"
            "from enqueuer.adapters.torch import TorchLoader",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stderr.endswith(f"pip install 'torch>=2.1'{command}\n")


def test_the_metadata_of_a_release_are_complete(tree):
    """An index shows the license, the addresses, and README without its folder."""
    if int(version("setuptools").partition(".")[0]) < 77:
        pytest.skip("setuptools before 77 does not know license expressions")
    folder = built(tree, "prepare_metadata_for_build_wheel")
    text = (folder / "METADATA").read_text(encoding="utf-8")
    metadata = email.message_from_string(text)
    assert metadata["Version"] == enqueuer.__version__
    assert metadata["License-Expression"] == "MIT"
    names = {value.partition(",")[0] for value in metadata.get_all("Project-URL")}
    assert names == {"Documentation", "Source", "Changelog", "Issues"}
    shown = metadata.get_payload()
    links = re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", shown)
    assert len(links) > 20
    assert [a or b for a, b in links if not (a or b).startswith("https://")] == []


@pytest.mark.thorough
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
    with tarfile.open(built(tree, "build_sdist")) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert there - packed == set()
