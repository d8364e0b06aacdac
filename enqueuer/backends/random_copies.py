"""Finding a random generator of which each worker process would get a copy.

    source -> its functions, what their code uses, attributes, members -> a Generator, and its path

The copies draw the same numbers, unlike the global generators, which each worker seeds. No code of
the user runs here, and nothing is imported.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from enqueuer.backends.stall import warn
from enqueuer.common.text import an
from enqueuer.common.trees import attributes_of
from enqueuer.errors import EnqueuerWarning
from enqueuer.workers.sources import FunctionSource, Source, name_of
from enqueuer.workers.tasks import TaskSource

_KINDS = frozenset(
    {
        "numpy.random._generator.Generator",
        "numpy.random.mtrand.RandomState",
        "numpy.random.bit_generator.BitGenerator",
        "random.Random",
        "torch._C.Generator",
    }
)
# Objects that are looked at. A source of many objects is not followed to its end.
_MOST_OBJECTS = 2000
# Members of one container: the elements of a long list are alike.
_MOST_MEMBERS = 50
# Our DataLoader leaves the seeds to `worker_init_fn`; all iterators of Hugging Face begin alike.
_UNSEEN = ("enqueuer.adapters.", "datasets.")

Step = tuple[str, object]


def warn_of_copies(source: Source | TaskSource) -> None:
    """Warn if each worker would get a copy of a random generator, and say where that is."""
    roots: list[Step] = []
    if isinstance(source, TaskSource):
        roots = [("map", source.map), ("collate", source.collate)]
        if source.is_sequence:
            roots.append(("the sequence", source.items))
        instead = "task.rng: map may take the element and its Task"
    elif isinstance(source, FunctionSource):
        roots = [(name_of(source.function), source.function)]
        instead = "shard.rng: the generator function may take its shard"
    found = _first_generator(roots)
    if found is not None:
        path, generator = found
        kind = f"{type(generator).__module__.partition('.')[0]} {type(generator).__qualname__}"
        warn(
            f"each worker process gets a copy of {path} ({an(kind)}), and these copies may draw "
            f"the same random numbers; draw from {instead}",
            EnqueuerWarning,
        )


def _first_generator(roots: Iterable[Step]) -> Step | None:
    """Return the path to a generator, the shortest one, and the generator."""
    left, seen = deque(roots), dict[int, object]()
    while left and len(seen) < _MOST_OBJECTS:
        path, value = left.popleft()
        if id(value) in seen:
            continue
        # Kept with its id, which the next object could get otherwise.
        seen[id(value)] = value
        if _is_generator(value):
            return path, value
        left.extend((path + step, part) for step, part in _parts_of(value))
    return None


def _is_generator(value: object) -> bool:
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__}
    if kinds.isdisjoint(_KINDS) or isinstance(value, random.SystemRandom):
        return False
    # The workers seed the global ones.
    drawn = random.random, getattr(sys.modules.get("numpy.random"), "random", None)
    known = [getattr(function, "__self__", None) for function in drawn]
    known.append(getattr(sys.modules.get("torch"), "default_generator", None))
    return not any(value is one for one in known)


def _parts_of(value: Any) -> Iterator[Step]:
    """Yield what belongs to an object and is copied with it, with the step to each."""
    kind = type(value)
    if isinstance(value, FunctionType):
        yield from _used_by(value)
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
        if not _is_library(value.__module__):
            yield from ((f".{name}", part) for name, part in list(vars(value).items()))
            yield from (("", base) for base in value.__bases__)
    elif isinstance(value, (staticmethod, classmethod, property)):
        yield "", value.fget if isinstance(value, property) else value.__func__
    elif not isinstance(value, ModuleType) and not kind.__module__.startswith(_UNSEEN):
        yield from ((f".{name}", part) for name, part in attributes_of(value).items())
        yield "", kind


def _used_by(function: FunctionType) -> Iterator[Step]:
    """Yield what the code of a function uses, and the code within it; then its defaults."""
    if _is_library(function.__module__):
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
        elif not _is_library(part.__name__):
            used = vars(part).keys() & attributes
            yield from ((f": {name}.{attribute}", vars(part)[attribute]) for attribute in used)
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield ": a default argument", default


def _globals_in(code: CodeType) -> Iterator[tuple[str, set[str]]]:
    """Yield each global that code uses, and the names that may be its attributes."""
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            yield step.argval, set(code.co_names)
    for constant in code.co_consts:
        # The code of a lambda, a comprehension or an inner function.
        if isinstance(constant, CodeType):
            yield from _globals_in(constant)


def _is_library(module: object) -> bool:
    """Return whether a module is one of Python, of this package, or an installed one."""
    root = str(module).partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    is_installed = "site-packages" in file or "dist-packages" in file
    return root in sys.stdlib_module_names or root == "enqueuer" or is_installed
