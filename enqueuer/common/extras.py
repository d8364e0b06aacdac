"""Importing the packages that an extra installs; an error names the command to install them."""

from __future__ import annotations

import importlib
import os
import re
from typing import Any

from enqueuer.errors import FrameworkUnavailable


def framework(
    name: str, extra: str, oldest: str, module: str = "", user: str = "this adapter"
) -> Any:
    """Import a package that an extra of this one installs.

    Args:
        name: Name of the package that pip installs.
        extra: Extra of this package that installs it.
        oldest: Oldest supported version, such as "2.1".
        module: Name of the module to be imported; `name` by default.
        user: Part of this package that needs it, for the message.

    Raises:
        FrameworkUnavailable: The package is not installed, or too old; the message has the command.
    """
    module = module or name
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # The package is installed, but lacks something itself.
        if error.name != module:
            raise
        command = _command_in_clone(extra)
        or_in_clone = f", or {command}" if command else ""
        raise FrameworkUnavailable(
            f"{user} needs {name} >= {oldest}, which is not installed: "
            f"pip install '{name}>={oldest}'{or_in_clone}",
            name=module,
        ) from error
    version = getattr(imported, "__version__", oldest)
    if isinstance(version, str) and _numbers(version) < _numbers(oldest):
        raise FrameworkUnavailable(
            f"{user} needs {name} >= {oldest}, but {version} is installed: pip install -U {name}",
            name=module,
        )
    return imported


def install_command(extra: str) -> str:
    """Return the command that installs what an extra of this package needs.

    It names no extra: until this package is released, its name belongs to no one.
    """
    if command := _command_in_clone(extra):
        return command
    # Only here, as it takes long to import.
    from importlib import metadata

    try:
        lines = metadata.requires("enqueuer") or []
    except metadata.PackageNotFoundError:
        # It was copied beside a program.
        return "see the documentation"
    needed = [
        line.partition(";")[0].strip() for line in lines if re.search(rf"extra == .{extra}\W", line)
    ]
    return " ".join(["pip install", *(f"'{one}'" for one in needed)])


def _command_in_clone(extra: str) -> str:
    root = os.path.join(os.path.dirname(__file__), "..", "..")
    # Only a clone, or an unpacked source archive, has this file beside the package.
    is_clone = os.path.isfile(os.path.join(root, "setup.cfg"))
    return f"in the clone of enqueuer pip install '.[{extra}]'" if is_clone else ""


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
