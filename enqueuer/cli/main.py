"""The command line: `enqueuer demo`, `pack`, `inspect`, `bench` and `report`.

Each command has a file that parses and prints; other modules do the work. Results go to standard
output, progress and errors to standard error. Exit codes: 0 done, 1 failed, 2 wrong arguments,
130 interrupted by Ctrl-C, 143 ended by SIGTERM.
"""

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from enqueuer import __version__
from enqueuer.cli.bench import add_bench
from enqueuer.cli.demo import add_demo
from enqueuer.cli.hdf5 import add_inspect, add_pack
from enqueuer.cli.report import add_report

# Shells report a death by a signal by these numbers.
_INTERRUPTED = 128 + signal.SIGINT
_TERMINATED = 128 + signal.SIGTERM


class _Terminated(KeyboardInterrupt):
    """SIGTERM arrived. Code that lets Ctrl-C through lets this through, too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        argv: The arguments without the program's name; by default those of the process.

    Raises:
        SystemExit: From argparse, after `--help`, `--version` or wrong arguments.
    """
    options = _parser().parse_args(argv)
    try:
        with _sigterm_unwinds():
            code: int = options.run(options)
            return code
    except _Terminated:
        print("\nenqueuer: terminated", file=sys.stderr)
        return _TERMINATED
    except KeyboardInterrupt:
        print("\nenqueuer: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="enqueuer",
        description="Run any Python generator ahead of the loop that consumes it.",
    )
    parser.add_argument("--version", action="version", version=f"enqueuer {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (add_demo, add_pack, add_inspect, add_report, add_bench):
        add(commands)
    return parser


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Let SIGTERM raise _Terminated, so that `with` blocks remove temporary files and workers."""
    # Only the main thread can set handlers. A program that calls main() from another thread has
    # its own.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated
