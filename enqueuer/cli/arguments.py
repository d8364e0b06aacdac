"""Commands, the arguments that several of them have, and the types of arguments.

argparse puts the option's name before the error of a type.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, TypeAlias

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


def svg_file(text: str) -> Path:
    """Read the path of a picture that can be written."""
    path = Path(text)
    if path.suffix.lower() != ".svg":
        raise argparse.ArgumentTypeError(f"must be a file that ends in .svg, got {text!r}")
    # It is written after minutes of measuring, so this is checked now.
    writable = path if path.exists() else path.parent
    if not path.parent.is_dir() or path.is_dir() or not os.access(writable, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot be written: {text!r}")
    return path


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
