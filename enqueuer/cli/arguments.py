"""What several commands share: their arguments, the types of these, and errors in one line.

argparse puts the option's name before the error of a type. Errors that the user can fix are shown
in one line, in the words of the command line.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import operator
import os
import re
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

from enqueuer.common.extras import install_command
from enqueuer.errors import DataFileError, FrameworkUnavailable, InvalidState, StateMismatch

# Messages advise options of Python, which have other names on the command line.
_SHELL_OPTIONS = {
    "keys=": "--keys ",
    "ragged=": "--ragged ",
    "batched=False": "--samples",
    "merge=True": "--merge",
    "shards=": "--shards ",
    "random_seed ": "--seed ",
    "allow_outside=False": "--refuse-outside",
}


class UnusableSource(Exception):
    """The named source is missing, or cannot be used."""


# Errors that the user can fix; those of the source itself need their traceback.
USER_ERRORS = (
    DataFileError,
    FileExistsError,
    FrameworkUnavailable,
    InvalidState,
    StateMismatch,
    UnusableSource,
)


def in_shell(text: str) -> str:
    """Return a message with the options of the command line in place of those of Python.

    Example:
        >>> in_shell("pad them, or give ragged=['x', 'y']")
        'pad them, or give --ragged x,y'
    """
    for found in re.findall(r"\b(?:keys|ragged)=\[.*?\]", text):
        text = text.replace(found, re.sub(r"[\[\]']|(?<=,) ", "", found))
    for python, shell in _SHELL_OPTIONS.items():
        text = text.replace(python, shell)
    return text


def load_source(module: str, name: str) -> Any:
    """Import a source, from the current directory first, as `python -m` does.

    Raises:
        UnusableSource: There is no such module, or it lacks that name.
    """
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


_EXIT_CODES = "exit codes: 0 done, 1 failed, 2 wrong arguments, 130 after Ctrl-C, 143 after SIGTERM"


class Command(argparse.ArgumentParser):
    """The parser of a command; each method adds an argument."""

    def source(self, kind: str) -> None:
        """Add `MODULE:FUNCTION`, an object of this kind."""
        text = f"{kind}; found from the current directory"
        self.add_argument("source", type=module_and_name, metavar="MODULE:FUNCTION", help=text)

    def number(self, option: str, help: str, default: int | None = None, least: int = 1) -> None:
        """Add an option that takes a whole number from `least` on."""
        read = functools.partial(whole_number, least=least)
        self.add_argument(option, type=read, default=default, metavar="N", help=help)

    def names(self, option: str, help: str, default: Any = None) -> None:
        """Add an option that takes names with commas between."""
        self.add_argument(option, type=names, default=default, metavar="A,B", help=help)

    def backend(self, default: str | None, help: str = "kind of the workers") -> None:
        """Add `--backend`."""
        self.add_argument("--backend", choices=("thread", "process"), default=default, help=help)

    def flag(self, option: str, help: str) -> None:
        """Add an option that is True if it is given."""
        self.add_argument(option, action="store_true", help=help)


# argparse has no public name for the result of add_subparsers.
Commands: TypeAlias = Any


def add_command(
    commands: Commands, run: Callable[[argparse.Namespace], int], extra: str = ""
) -> Command:
    """Add a command, and return its parser.

    Args:
        commands: The commands.
        run: Function that runs it. The command has its name, and its docstring is the help.
        extra: Extra of this package that the command needs.
    """
    # With -OO, Python has no docstrings.
    text, _, examples = (inspect.getdoc(run) or "").partition("\n\nExamples:\n")
    title = text.partition(".\n")[0]
    command: Command = commands.add_parser(
        run.__name__.strip("_"),
        help=title[:1].lower() + title[1:],
        description=f"{text}\nWhat it needs: {install_command(extra)}" if extra else text,
        epilog=(f"examples:\n{examples}\n\n" if examples else "") + _EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    return command


def whole_number(text: str, least: int) -> int:
    """Read a whole number from `least` on."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, got {text!r}")
    return number


_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_LONGEST_S = 1e6


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
    module, _, name = text.partition(":")
    parts = [*module.split("."), *name.split(".")]
    if module.endswith(".py") or not all(part.isidentifier() for part in parts):
        raise argparse.ArgumentTypeError(
            f"must be MODULE:FUNCTION, where MODULE is a name that Python imports, got {text!r}"
        )
    return module, name
