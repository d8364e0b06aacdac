"""Unit: the public names that are imported when they are first used."""

import ast
import subprocess
import sys

import pytest

import enqueuer


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'enqueuer' has no attribute 'Enqueuer'"):
        _ = enqueuer.Enqueuer


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
