"""Unit: the public names that are imported when they are first used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import enqueuer

ROOT = Path(enqueuer.__file__).parent


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'enqueuer' has no attribute 'Enqueuer'"):
        _ = enqueuer.Enqueuer


def test_a_name_of_another_module_is_answered_with_its_import():
    for place, names in enqueuer._ELSEWHERE.items():
        path = ROOT.joinpath(*place.split("."))
        files = [path / "__init__.py"] if path.is_dir() else [path.with_suffix(".py")]
        for name in names.split():
            assert name in files[0].read_text()
            with pytest.raises(AttributeError) as caught:
                getattr(enqueuer, name)
            assert str(caught.value).endswith(f"; use: from enqueuer.{place} import {name}")


def test_what_a_fork_server_imports_has_no_enqueuers():
    program = """
import sys
import enqueuer.backends.process.child, enqueuer.backends.process.fork_server
print([name for name in sys.modules if name.startswith("enqueuer.enqueuers")])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ast.literal_eval(done.stdout) == []
