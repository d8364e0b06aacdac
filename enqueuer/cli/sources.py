"""Importing the generator function that a command names."""

from __future__ import annotations

import importlib
import operator
import os
import sys
from typing import Any

from enqueuer.cli.user_errors import UnusableSource


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
