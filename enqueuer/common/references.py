"""What an object refers to: what a function's code uses, attributes, members of containers.

    parts_of(object) -> (step, part), (step, part), ...

No code of the user runs here, and nothing is imported. Code of Python, of this package and of
installed packages is not followed.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections import deque
from collections.abc import Iterator
from itertools import islice
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from enqueuer.common.trees import attributes_of

# Members of one container: the elements of a long list are alike.
_MOST_MEMBERS = 50

Step = tuple[str, object]


def parts_of(value: Any) -> Iterator[Step]:
    """Yield what belongs to an object and is copied with it, with the step to each."""
    if isinstance(value, FunctionType):
        yield from _used_by(value)
    elif isinstance(value, MethodType) and not is_library(type(value.__self__).__module__):
        # A trainer whose method loads the data has also a count of steps and a list of losses.
        yield from _used_of(value)
    elif isinstance(value, (MethodType, BuiltinMethodType)):
        yield "", getattr(value, "__func__", None)
        yield "", value.__self__
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from ((f": its argument {at}", part) for at, part in enumerate(value.args))
        yield from ((f": its argument {name!r}", part) for name, part in value.keywords.items())
    elif isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in islice(value.items(), _MOST_MEMBERS))
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{at}]", part) for at, part in enumerate(islice(value, _MOST_MEMBERS)))
    elif isinstance(value, type):
        if not is_library(value.__module__):
            yield from ((f".{name}", part) for name, part in list(vars(value).items()))
            yield from (("", base) for base in value.__bases__)
    elif isinstance(value, (staticmethod, classmethod, property)):
        yield "", value.fget if isinstance(value, property) else value.__func__
    elif not isinstance(value, ModuleType):
        yield from ((f".{name}", part) for name, part in attributes_of(value).items())
        yield "", type(value)


def _used_by(function: FunctionType) -> Iterator[Step]:
    """Yield what the code of a function uses, and the code within it; then its defaults."""
    if is_library(function.__module__):
        return
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        # An empty cell raises ValueError.
        with contextlib.suppress(ValueError):
            yield f": the variable {name!r}", cell.cell_contents
    for name, attributes in _globals_in(function.__code__):
        part = function.__globals__.get(name)
        if not isinstance(part, ModuleType):
            yield f": the global {name!r}", part
        elif not is_library(part.__name__):
            used = vars(part).keys() & attributes
            yield from ((f": {name}.{attribute}", vars(part)[attribute]) for attribute in used)
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield ": a default argument", default


def _used_of(method: MethodType) -> Iterator[Step]:
    """Yield the attributes that a method, and the methods that it calls, may use."""
    owner, left, seen = method.__self__, [method.__func__], set[str]()
    kind = owner if isinstance(owner, type) else type(owner)
    while left:
        function = left.pop()
        yield "", function
        for code in codes_in(getattr(function, "__code__", None)):
            for name in set(code.co_names) - seen:
                seen.add(name)
                own = [vars(base)[name] for base in kind.__mro__ if name in vars(base)]
                left += [getattr(one, "fget", getattr(one, "__func__", one)) for one in own]
    yield from ((f".{name}", part) for name, part in attributes_of(owner).items() if name in seen)


def codes_in(code: CodeType | None) -> Iterator[CodeType]:
    """Yield code, and that of the lambdas, comprehensions and functions within it."""
    if code is not None:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from codes_in(constant)


def _globals_in(code: CodeType) -> Iterator[tuple[str, set[str]]]:
    """Yield each global that code uses, and the names that may be its attributes."""
    for inner in codes_in(code):
        for step in dis.get_instructions(inner):
            if step.opname == "LOAD_GLOBAL":
                yield step.argval, set(inner.co_names)


def is_library(module: object) -> bool:
    """Return whether a module is one of Python, of this package, or an installed one."""
    root = str(module).partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    is_installed = "site-packages" in file or "dist-packages" in file
    return root in sys.stdlib_module_names or root == "enqueuer" or is_installed
