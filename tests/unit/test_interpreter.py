"""Unit: the programs of fresh interpreters."""

import subprocess
import sys

import pytest
from helpers import LIMIT

from enqueuer.backends.process.fork_server import program


@pytest.mark.thorough
@pytest.mark.parametrize("before", ["enable", "disable"])
def test_the_garbage_collector_is_as_before_and_leaves_what_was_imported_alone(before):
    """A site or an environment may have disabled it."""
    started = program("_reset_signals")
    code = f"import gc; gc.{before}(); {started}; print(gc.isenabled(), gc.get_freeze_count() > 0)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert done.stdout.split() == [str(before == "enable"), "True"]
