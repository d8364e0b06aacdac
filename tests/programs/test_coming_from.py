"""The programs on the "Coming from" page run as they stand, and both halves print the same.

A program that imports a package which is not installed here is skipped.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import needs, run_script

# `tox -e frameworks` runs them with all that the pages import.
pytestmark = pytest.mark.thorough

FOLDER = Path(__file__).parents[2] / "examples" / "coming_from"
PACKAGES = ("torch", "tensorpack", "batchgenerators", "prefetch_generator")
LIMIT = 60.0  # seconds; each takes some, mostly for its imports
PROGRAMS = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.py"))}
BEFORE = [name for name in PROGRAMS if name.endswith("_before")]


def run(name, directory):
    """Run a program; return the lines that it prints, and what it complains of."""
    for module in re.findall(r"^(?:from|import) ([\w.]+)", PROGRAMS[name], re.MULTILINE):
        package, *_ = module.split(".")
        if package == "torch":
            needs("torch")
        elif find_spec(package) is None:
            pytest.skip(f"{module} is not installed")  # not imported: some have much to say
    script = directory / f"{name}.py"
    script.write_text(PROGRAMS[name])
    code, out, err = run_script(script, directory, LIMIT)
    assert code == 0, err
    return out.splitlines(), err


def test_every_package_has_both_halves_and_the_page_shows_all():
    assert {f"{package}_before" for package in PACKAGES} == set(BEFORE)
    page = (FOLDER.parents[1] / "docs" / "howto" / "coming_from.rst").read_text()
    assert set(re.findall(r"coming_from/(\w+)\.py", page)) == set(PROGRAMS)
    assert {name.replace("_before", "_after") for name in BEFORE} <= set(PROGRAMS)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in BEFORE])
def test_a_program_with_an_enqueuer_runs(name, tmp_path):
    printed, complaints = run(name, tmp_path)
    assert printed
    assert "False" not in printed  # those that compare print True
    if name.endswith("_after"):  # the others import what may have something to say itself
        assert complaints == ""


@pytest.mark.parametrize("name", BEFORE)
def test_both_halves_print_the_same(name, tmp_path):
    before, _ = run(name, tmp_path)
    after, _ = run(name.replace("_before", "_after"), tmp_path)
    chatter = re.compile(r"\x1b|\[\d{4} |Failed to import|.* cleaned-up")  # of tensorpack
    assert [line for line in before if not chatter.match(line)] == after
