"""Unit: worker processes whose process identifier another process may have got."""

import contextlib
import os

import pytest
from helpers import LIMIT

from enqueuer.backends.process.handle import fork, open_pidfd


class Reaped:
    """A process that was reaped, and whose identifier another process has now."""

    pid = os.getpid()

    def exitcode(self, timeout):
        return 0

    def has_pid(self):
        return False


@pytest.fixture
def child():
    """Yield a forked child that ends at once."""
    with contextlib.closing(fork(lambda: os._exit(7))) as child:
        yield child


def test_no_pidfd_of_another_process_is_opened():
    assert open_pidfd(Reaped()) is None


def test_a_child_has_its_pid_until_its_exit_code_was_asked_for(child):
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert child.has_pid()
    if hasattr(os, "pidfd_open"):
        with contextlib.closing(open_pidfd(child)) as pidfd:
            assert pidfd.fileno() >= 0
    assert child.exitcode(LIMIT) == 7
    assert not child.has_pid()
    assert open_pidfd(child) is None
