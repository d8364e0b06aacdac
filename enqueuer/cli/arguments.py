"""What several commands share: their arguments, the types of these, and errors in one line.

argparse puts the option's name before the error of a type. Errors that the user can fix are shown
in one line, in the words of the command line.
"""

from __future__ import annotations

import argparse
import importlib
import operator
import os
import re
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

from enqueuer.common.text import printable
from enqueuer.errors import DataFileError, FrameworkUnavailable, InvalidState, StateMismatch

FAILED = 1

# Messages advise options of Python, which have other names on the command line.
_SHELL_OPTIONS = (
    (r"\bkeys=\[(.*?)\]", r"--keys \1"),
    (r"\bkeys=", "--keys"),
    (r"\bragged=\[(.*?)\]", r"--ragged \1"),
    (r"\bbatched=False", "--samples"),
    (r"\bmerge=True", "--merge"),
    (r"\bshards=", "--shards "),
    (r"\brandom_seed (was|is)", r"--seed \1"),
    (r"\ballow_outside=False", "--refuse-outside"),
)


class UnusableSource(Exception):
    """The named source is missing, or cannot be used."""


def in_one_line(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Wrap a command so that errors that the user can fix take one line; others a traceback."""

    def wrapped(options: argparse.Namespace) -> int:
        try:
            return run(options)
        except (
            DataFileError,
            FileExistsError,
            FrameworkUnavailable,
            InvalidState,
            StateMismatch,
            UnusableSource,
        ) as error:
            # A message may quote names from a file. Its own line breaks stay.
            lines = map(printable, in_shell(str(error)).split("\n"))
            print("enqueuer:", "\n".join(lines), file=sys.stderr)
            return FAILED

    return wrapped


def in_shell(text: str) -> str:
    """Return a message with the options of the command line in place of those of Python.

    Example:
        >>> in_shell("pad them, or give ragged=['x', 'y']")
        'pad them, or give --ragged x,y'
    """
    for python, shell in _SHELL_OPTIONS:
        for found in list(re.finditer(python, text)):
            option = found.expand(shell).replace("'", "").replace(", ", ",")
            text = text.replace(found[0], option)
    return text


def load_source(module: str, name: str) -> Any:
    """Import a source, from the current directory first, as `python -m` does.

    Raises:
        UnusableSource: There is no such module, or it lacks that name.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A module that exists may lack a module that it imports.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UnusableSource(f"there is no module {module!r}, seen from {os.getcwd()}") from None
    try:
        return operator.attrgetter(name)(found)
    except AttributeError:
        raise UnusableSource(f"module {module!r} has no {name!r}") from None


# argparse has no public name for the result of add_subparsers.
Commands: TypeAlias = Any

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_LONGEST_S = 1e6


def add_command(
    commands: Commands, name: str, help: str, description: str, examples: str
) -> argparse.ArgumentParser:
    """Add a command, whose help ends with examples, and return its parser."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return command


def add_source(command: argparse.ArgumentParser, kind: str) -> None:
    """Add `MODULE:FUNCTION`, an object of this kind."""
    command.add_argument(
        "source",
        type=module_and_name,
        metavar="MODULE:FUNCTION",
        help=f"{kind}; found from the current directory",
    )


def add_number(
    command: argparse.ArgumentParser, option: str, help: str, default: int | None = None
) -> None:
    """Add an option that takes a whole number from 1 on."""
    command.add_argument(option, type=positive, default=default, metavar="N", help=help)


def add_backend(
    command: argparse.ArgumentParser, default: str | None, help: str = "kind of the workers"
) -> None:
    """Add `--backend`."""
    command.add_argument("--backend", choices=("thread", "process"), default=default, help=help)


def add_seed(command: argparse.ArgumentParser, help: str, default: int | None = None) -> None:
    """Add `--seed`."""
    command.add_argument("--seed", type=not_negative, default=default, metavar="N", help=help)


def add_flag(command: argparse.ArgumentParser, option: str, help: str) -> None:
    """Add an option that is True if it is given."""
    command.add_argument(option, action="store_true", help=help)


def add_names(
    command: argparse.ArgumentParser, option: str, help: str, default: Any = None
) -> None:
    """Add an option that takes names with commas between."""
    command.add_argument(option, type=names, default=default, metavar="A,B", help=help)


def add_progress(command: argparse.ArgumentParser) -> None:
    """Add `--quiet` for a progress bar."""
    command.add_argument(
        "--quiet",
        dest="progress",
        action="store_false",
        help="show no progress bar (default: a bar, if standard error is a terminal)",
    )


def positive(text: str) -> int:
    """Read a whole number from 1 on."""
    return _integer(text, minimum=1)


def not_negative(text: str) -> int:
    """Read a whole number from 0 on."""
    return _integer(text, minimum=0)


def _integer(text: str, minimum: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise argparse.ArgumentTypeError(f"must be a whole number >= {minimum}, got {text!r}")
    return number


def seconds(text: str) -> float:
    """Read a time, such as 20ms, 3s or 0.5."""
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text.strip()[len(number) :].strip() or "s"
    try:
        found = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        found = -1.0
    if not 0 <= found < _LONGEST_S:
        raise argparse.ArgumentTypeError(f"must be a time such as 20ms, 3s or 0.5, got {text!r}")
    return found


def names(text: str) -> tuple[str, ...]:
    """Read names with commas between."""
    found = tuple(name.strip() for name in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"must be names with commas between, got {text!r}")
    return found


def module_and_name(text: str) -> tuple[str, str]:
    """Read MODULE:FUNCTION."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise argparse.ArgumentTypeError(f"must be MODULE:FUNCTION, got {text!r}")
    is_path = module.endswith(".py") and os.path.exists(module)
    if is_path or not all(part.isidentifier() for part in module.split(".")):
        raise argparse.ArgumentTypeError(
            f"must be MODULE:FUNCTION, where MODULE is a name that Python imports, got {text!r}"
            + _advice(module, name)
        )
    return module, name


def _advice(path: str, name: str) -> str:
    """Return the argument that was meant by the path of a module, if that can be guessed."""
    folder, module = os.path.split(path.removesuffix(".py"))
    if not module.isidentifier():
        return ""
    where = f", with {folder} in PYTHONPATH or as the current directory" if folder else ""
    return f"; give {module}:{name}{where}"
