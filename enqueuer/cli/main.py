"""The command line: `enqueuer demo`, `pack`, `inspect`, `bench` and `report`.

Each command has a parser and a function that prints; other modules do the work. Results go to
standard output, progress and errors to standard error. Exit codes: 0 done, 1 failed, 2 wrong
arguments, 130 interrupted by Ctrl-C, 143 ended by SIGTERM.
"""

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from enqueuer import __version__
from enqueuer.cli.arguments import USER_ERRORS, Command, in_shell
from enqueuer.cli.commands import add_bench, add_demo, add_inspect, add_pack, add_report
from enqueuer.common.text import printable

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
    # So that `with` blocks remove temporary files and workers. Only the main thread can set
    # handlers.
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminate) if is_main else None
    try:
        code: int = options.run(options)
        return code
    except USER_ERRORS as error:
        # A message may quote names from a file. Its own line breaks stay.
        lines = map(printable, in_shell(str(error)).split("\n"))
        print("enqueuer:", "\n".join(lines), file=sys.stderr)
        return 1
    except _Terminated:
        print("\nenqueuer: terminated", file=sys.stderr)
        return _TERMINATED
    except KeyboardInterrupt:
        print("\nenqueuer: interrupted", file=sys.stderr)
        return _INTERRUPTED
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="enqueuer",
        description="Run any Python generator ahead of the loop that consumes it.",
    )
    parser.add_argument("--version", action="version", version=f"enqueuer {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Command
    )
    for add in (add_demo, add_pack, add_inspect, add_report, add_bench):
        add(commands)
    return parser


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated
