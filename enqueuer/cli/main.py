"""The command line: `enqueuer demo`, `pack` and `inspect`.

Each command has a parser and a function that prints; other modules do the work. Results go to
standard output, progress and errors to standard error. Exit codes: 0 done, 1 failed, 2 wrong
arguments, 130 interrupted by Ctrl-C, 143 ended by SIGTERM.
"""

import argparse
import re
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from enqueuer import __version__
from enqueuer.cli.commands import UnusableSource, add_commands
from enqueuer.common.text import printable
from enqueuer.errors import DataFileError, FrameworkUnavailable, InvalidState, StateMismatch

# Errors that the user can fix; those of the source itself need their traceback.
_USER_ERRORS = (
    DataFileError,
    FileExistsError,
    FrameworkUnavailable,
    InvalidState,
    StateMismatch,
    UnusableSource,
)
# Messages advise options of Python, which have other names on the command line.
_SHELL_OPTIONS = {
    "keys=": "--keys ",
    "ragged=": "--ragged ",
    "batched=False": "--samples",
    "merge=True": "--merge",
    "shards=": "--shards ",
    "random_seed ": "--seed ",
}
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
    except _USER_ERRORS as error:
        # A message may quote names from a file. Its own line breaks stay.
        lines = map(printable, _in_shell(str(error)).split("\n"))
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


def _in_shell(text: str) -> str:
    """Return a message with the options of the command line in place of those of Python.

    Example:
        >>> _in_shell("pad them, or give ragged=['x', 'y']")
        'pad them, or give --ragged x,y'
    """
    for found in re.findall(r"\b(?:keys|ragged)=\[.*?\]", text):
        text = text.replace(found, re.sub(r"[\[\]']|(?<=,) ", "", found))
    for python, shell in _SHELL_OPTIONS.items():
        text = text.replace(python, shell)
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="enqueuer",
        description="Run any Python generator ahead of the loop that consumes it.",
    )
    parser.add_argument("--version", action="version", version=f"enqueuer {__version__}")
    add_commands(parser)
    return parser


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated
