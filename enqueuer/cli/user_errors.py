"""Errors that the user can fix are shown in one line, in the words of the command line."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

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
