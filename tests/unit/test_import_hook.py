"""Acting after an import: at its end, once, and without a trace in the module."""

import importlib
import importlib.resources
import sys
from importlib.machinery import SourceFileLoader

import pytest

from enqueuer.workers.settings import after_import


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "late_package").mkdir()
    (tmp_path / "late_package" / "__init__.py").write_text(
        "import late_package.part\ndone = True\n"
    )
    (tmp_path / "late_package" / "part.py").write_text("")
    (tmp_path / "late_package" / "data.txt").write_text("data")
    (tmp_path / "late_broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "late_package"
    for name in ("late_package", "late_package.part", "late_broken"):
        sys.modules.pop(name, None)


def test_it_acts_once_when_the_module_is_complete(package):
    seen = []
    after_import({package}, lambda name: seen.append((name, sys.modules[name].done)))
    import json  # noqa: F401  # another one

    assert seen == []
    importlib.import_module("late_package.part")
    importlib.import_module(package)
    assert seen == [(package, True)]


def test_the_module_has_its_own_loader_and_data(package):
    after_import({package}, lambda name: None)
    module = importlib.import_module(package)
    assert type(module.__loader__) is type(module.__spec__.loader) is SourceFileLoader
    assert importlib.resources.files(package).joinpath("data.txt").read_text() == "data"


def test_modules_that_are_missing_or_fail_do_so_as_ever(package):
    after_import({"late_missing", "late_broken"}, pytest.fail)
    with pytest.raises(ModuleNotFoundError, match="late_missing"):
        importlib.import_module("late_missing")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("late_broken")
