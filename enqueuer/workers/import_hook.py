"""Calling a function when a module has been imported, in a worker process or an actor.

A setting of a library can be changed only once the library is imported, and the user's code may
import it at any time, also in the middle of an item. So a finder in front of all others wraps the
loader of the module. The wrapper runs the loader and then calls the function, before the import
statement ends.

The classes do not inherit from those of `importlib.abc`, whose import takes longer than to fork a
worker. The import system calls their methods and does not check their classes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from importlib.abc import Loader


def after_import(names: Collection[str], act: Callable[[str], None]) -> None:
    """Call `act` with the name of each of these modules that this process imports from now on."""
    sys.meta_path.insert(0, _Finder(names, act))


class _Finder:
    def __init__(self, names: Collection[str], act: Callable[[str], None]) -> None:
        self._names = frozenset(names)
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = cast("Loader", _Loader(spec.loader, self._act))
                return spec
        return None


class _Loader:
    def __init__(self, loader: Loader, act: Callable[[str], None]) -> None:
        self._loader = loader
        self._act = act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module may ask its loader for data, and other code may ask for the source.
        module.__loader__ = self._loader
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._act(module.__name__)
