"""What each worker process gets a copy of: random generators, and data that the program changes.

    source -> its functions, what their code uses, attributes, members -> objects, and their paths

The copies of a generator draw the same numbers, unlike the global generators, which each worker
seeds. A change of the program's own object is not seen in the copies. No code of the user runs
here, and nothing is imported.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import random
import sys
from collections import deque
from collections.abc import Iterator
from itertools import islice
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from enqueuer.backends.stall import warn
from enqueuer.common.text import an
from enqueuer.common.trees import attributes_of
from enqueuer.errors import EnqueuerWarning
from enqueuer.monitoring.duplicates import Digest, digest
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
# Members by which the kind of a list is known.
_FEW = 5
# Members of one container: the elements of a long list are alike.
_MOST_MEMBERS = 50
# Objects whose values are compared at the beginning of each epoch.
_MOST_WATCHED = 200
_PLAIN = frozenset({bool, int, float, complex, str, bytes})
# Our DataLoader leaves the seeds to `worker_init_fn`; all iterators of Hugging Face begin alike.
_UNSEEN = ("enqueuer.adapters.", "enqueuer.monitoring.", "datasets.")

Step = tuple[str, object]


class Copies:
    """The objects of a source that its worker processes copy when they start.

    Args:
        source: Source of the workers.
    """

    def __init__(self, source: Source | TaskSource) -> None:
        self._source = source
        # Digests of plain values, by their paths.
        self._values = {} if _may_change(source) else _values_of(source)

    def warn_of_generators(self) -> None:
        """Warn if a random generator is among them, and say where."""
        found = next((step for step in _reached(self._source) if _is_generator(step[1])), None)
        if found is None:
            return
        path, generator = found
        kind = f"{type(generator).__module__.partition('.')[0]} {type(generator).__qualname__}"
        instead = "shard.rng: the generator function may take its shard"
        if isinstance(self._source, TaskSource):
            instead = "task.rng: map may take the element and its Task"
        warn(
            f"each worker process gets a copy of {path} ({an(kind)}), and these copies may draw "
            f"the same random numbers; draw from {instead}",
            EnqueuerWarning,
        )

    def warn_of_changes(self) -> None:
        """Warn, once, if the program has changed one of them since the workers started."""
        if not self._values:
            return
        now = _values_of(self._source)
        changed = [path for path, seen in self._values.items() if now.get(path, seen) != seen]
        if changed:
            self._values = {}
            warn(
                f"{changed[0]} was changed since the workers started, and these do not see it: "
                "each process has a copy of its own. Call stop() and start() after a change, or "
                "use backend='thread'; a sequence may change itself in on_epoch_begin()",
                EnqueuerWarning,
            )


def _may_change(source: Source | TaskSource) -> bool:
    """Return whether the sequence changes itself, in each process alike."""
    return isinstance(source, TaskSource) and source.follows_epochs


def _values_of(source: Source | TaskSource) -> dict[str, Digest]:
    """Return digests of the plain values of a source that lie in memory of this process alone."""
    found: dict[str, Digest] = {}
    if isinstance(source, TaskSource) and source.is_finite:
        found["the length of the sequence"] = source.length, 0
    for path, value in islice(_reached(source), _MOST_WATCHED):
        if _is_plain(value) or (_is_array(value) and _owns_memory(value)):
            seen = digest(value)
            if seen is not None:
                found[path] = seen
    return found


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number or a text, or a list of them; a dict may be a cache."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, islice(value, _FEW)))
    return type(value) in _PLAIN


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _owns_memory(array: Any) -> bool:
    """Return whether an array lies neither in a file nor in shared memory."""
    while _is_array(array.base):
        array = array.base
    return array.base is None


def _reached(source: Source | TaskSource) -> Iterator[Step]:
    """Yield each object that travels with a source, and the shortest path to it."""
    left: deque[Step] = deque(_roots_of(source))
    # The objects are kept with their ids, which the next ones could get otherwise.
    seen: dict[int, object] = {}
    while left and len(seen) < _MOST_OBJECTS:
        path, value = left.popleft()
        if id(value) not in seen:
            seen[id(value)] = value
            yield path, value
            left.extend((path + step, part) for step, part in _parts_of(value))


def _roots_of(source: Source | TaskSource) -> Iterator[Step]:
    if isinstance(source, TaskSource):
        yield "map", _method_of(source.map, "__call__")
        yield "collate", _method_of(source.collate, "__call__")
        if source.is_sequence:
            yield "the sequence", _method_of(source.items, "__getitem__")
            if isinstance(many := _method_of(source.items, "__getitems__"), MethodType):
                yield "the sequence", many
    elif isinstance(source, FunctionSource):
        yield name_of(source.function), _method_of(source.function, "__call__")


def _method_of(value: Any, name: str) -> Any:
    """Return a method of an object if a function of its class is that, otherwise the object."""
    function = getattr(type(value), name, None)
    is_users = isinstance(function, FunctionType) and not _is_library(type(value).__module__)
    return MethodType(function, value) if is_users else value


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
    elif isinstance(value, MethodType) and not _is_library(type(value.__self__).__module__):
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


def _used_of(method: MethodType) -> Iterator[Step]:
    """Yield the attributes that a method, and the methods that it calls, may use."""
    owner, seen, left = method.__self__, set(), [method.__func__]
    kind = owner if isinstance(owner, type) else type(owner)
    while left:
        function = left.pop()
        yield "", function
        for code in _codes_in(getattr(function, "__code__", None)):
            for name in set(code.co_names) - seen:
                seen.add(name)
                own = [vars(base)[name] for base in kind.__mro__ if name in vars(base)]
                left += [getattr(one, "fget", getattr(one, "__func__", one)) for one in own]
    yield from ((f".{name}", part) for name, part in attributes_of(owner).items() if name in seen)


def _codes_in(code: CodeType | None) -> Iterator[CodeType]:
    if code is not None:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from _codes_in(constant)


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
