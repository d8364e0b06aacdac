"""The program's classes and functions in its workers: sent by value once, and named afterwards.

    the program   Pickler --a definition, by value, with its id--> the worker makes it, once
    either side   Pickler --the id of what both have-------------> the other side's own object

A definition is a class or a function that a worker cannot import: of the main module, of one that
was loaded from a path, or within a function. What arrives under an id that this process knows is
its own object, and is not written to. In a worker, definitions stand in a module of the same name
as in the program, so that plain pickle finds those of `__main__` by name on both sides. It comes
first everywhere, as it is fast; this pickler is for what it refuses.

Any thread may call anything.
"""

from __future__ import annotations

import collections
import contextvars
import functools
import importlib
import importlib.machinery
import io
import linecache
import marshal
import os
import pickle
import re
import struct
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping
from enum import Enum
from pickle import PickleBuffer
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    ModuleType,
)
from typing import Any, NamedTuple

import cloudpickle

from enqueuer.common.objects import check_graph, referred_by
from enqueuer.workers.settings import is_fork_of_program

# Reentrant, as the garbage collector may run under it, and loading what is left does.
_lock = threading.RLock()
_by_id: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_ids: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
# Ids of definitions whose state has not been set yet.
_unfinished: set[str] = set()
# Those that came last with items or elements: a stream of objects of one class makes it once.
_recent: collections.deque[Any] = collections.deque(maxlen=256)

received: dict[str, Any] = {}
"""In a worker, the definitions that came with its source: the program has them, too."""


# --- the program that workers see ------------------------------------------------------------


class Program(NamedTuple):
    """What goes to a worker before its source.

    Attributes:
        main: Attributes of the main module that are no definitions, such as `__file__`.
        deferred: Pickle of the definitions of the main module that the source does not refer to;
            files that the worker reads may do so.
        names: Names of these definitions.
        lines: Source lines of code that has no file, such as that of a notebook, by the name of
            the file in its tracebacks.
    """

    main: dict[str, Any]
    deferred: bytes
    names: frozenset[str]
    lines: dict[str, list[str]]

    def install(self) -> None:
        """Make this process's main module the program's."""
        global _program
        _program = self
        # Other code may run in the one that was there, as Ray's does.
        sys.modules["__main__"] = sys.modules[self.main["__name__"]] = _Main("__main__")
        vars(sys.modules["__main__"]).update(self.main)
        for file, lines in self.lines.items():
            linecache.cache[file] = sum(map(len, lines)), None, lines, file


# Of a worker.
_program = Program({}, b"", frozenset(), {})


class _Main(ModuleType):
    """The main module of a worker; it loads what the source did not need when that is wanted."""

    def __getattr__(self, name: str) -> Any:
        if name in _program.names:
            _load_deferred()
            if name in vars(self):
                return vars(self)[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def _load_deferred() -> None:
    global _program
    with _lock:
        deferred, main = _program.deferred, vars(sys.modules["__main__"])
        _program = _program._replace(deferred=b"", names=frozenset())
        # What functions of the source have set must stay.
        before = dict(main)
        for data in pickle.loads(deferred) if deferred else ():
            main.update(pickle.loads(data))
        main.update(before)


def program_of(pickler: Pickler) -> Program:
    """Return what workers need of this program besides a source.

    Args:
        pickler: Pickler of the source; what it has sent becomes more.
    """
    if _program.names:
        # This is a worker itself.
        _load_deferred()
    main = sys.modules["__main__"]
    values = {name: vars(main)[name] for name in _ATTRIBUTES if name in vars(main)}
    values["__name__"] = main.__name__
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        # Its loader may not be picklable; multiprocessing wants the name.
        values["__spec__"] = importlib.machinery.ModuleSpec(spec.name, None, origin=spec.origin)
    unsent = {
        name: value
        for name, value in list(vars(main).items())
        if isinstance(value, _DEFINITIONS)
        and (value.__module__, value.__qualname__) == (main.__name__, name)
        and _ids.get(value) not in pickler.sent
    }
    pickles = _pickles_of(unsent, pickler)
    lines = {file: found for file, found in pickler.lines.items() if found}
    return Program(values, pickle.dumps(pickles) if pickles else b"", frozenset(unsent), lines)


_ATTRIBUTES = ("__file__", "__package__", "__doc__", "__path__")
_DEFINITIONS = (type, FunctionType, functools._lru_cache_wrapper)
# Code and small values; a definition with more has data of its own.
_MAX_DEFERRED_BYTES = 1 << 18
# Each that fails may have pickled all the others, so a start would take seconds.
_MAX_FAILED = 10


def _pickles_of(definitions: Mapping[str, Any], pickler: Pickler) -> list[bytes]:
    """Return definitions of the main module as pickles; as few as possible, without what fails."""
    if not definitions:
        return []
    file = io.BytesIO()
    tried = Pickler(file, known=pickler.sent, is_deferred=True)
    try:
        tried.dump(dict(definitions))
    except Exception:
        is_sent = False
    else:
        is_sent = file.tell() <= _MAX_DEFERRED_BYTES
    if is_sent:
        pickler.sent.update(tried.sent)
        return [file.getvalue()]
    if len(definitions) == 1:
        return []
    pickles: list[bytes] = []
    failed, names = 0, list(definitions)
    while names and failed < _MAX_FAILED:
        found = _pickles_of({names[-1]: definitions[names.pop()]}, pickler)
        pickles += found
        failed += not found
    return pickles


def _module_of(name: str) -> ModuleType:
    """Return the module of a worker that has the definitions of the program's one."""
    module = sys.modules.get(name)
    if module is None:
        module = sys.modules[name] = ModuleType(name)
    return module


# --- by value, and by id ----------------------------------------------------------------------


def _id_of(definition: Any) -> str:
    """Return the id of a definition, which it gets here if it has none."""
    with _lock:
        found = _ids.get(definition)
        if found is None:
            found = uuid.uuid4().hex
            _ids[definition], _by_id[found] = found, definition
        return found


def _find(key: str) -> Any:
    found = _by_id.get(key)
    if found is None and _program.deferred:
        _load_deferred()
        found = _by_id.get(key)
    if found is None:
        raise pickle.UnpicklingError(
            "it refers to a class or function of the program that is gone by now"
        )
    return found


def _receive(
    key: str, place: tuple[str, str] | None, make: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    """Return the definition of an id; make it if this process does not know it.

    Args:
        key: Its id.
        place: Module and name of one that came with the source; the module is empty if it does not
            stand in one. None for what came later.
        make: Function that makes it.
        args: Arguments of that function.
    """
    found = _by_id.get(key)
    if found is not None:
        return found
    found = make(*args)
    with _lock:
        _unfinished.add(key)
        _ids[found], _by_id[key] = key, found
    if place is None:
        _recent.append(found)
        return found
    received[key] = found
    module, name = place
    if module:
        setattr(_module_of(module), name, found)
    return found


def _finish(definition: Any, state: tuple[str, Callable[..., Any], Any]) -> None:
    """Set the state of a definition if it was made just now."""
    key, set_state, arguments = state
    # If the state could not be loaded, the next message brings it again.
    if key in _unfinished:
        set_state(definition, arguments)
        with _lock:
            _unfinished.discard(key)


def _is_in(module: ModuleType | None, definition: Any) -> bool:
    """Return whether a module has a definition under its own name."""
    found: Any = module
    for name in definition.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is definition


class _Globals:
    """Stands for the globals of a module of the program; arrives as those of the worker's one."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __reduce__(self) -> Any:
        return _globals_of, (self._module,)


def _globals_of(name: str) -> dict[str, Any]:
    return vars(_module_of(name))


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles what plain pickle refuses: definitions, and some kinds of objects.

    Args:
        file: File to which it writes.
        buffer_callback: As for `pickle.Pickler`.
        known: Definitions that the other side has, by their ids; None, in a worker: those that
            the program has.
        by_name: Whether the other side also has all definitions that stand in a module.
        is_source: Whether a source is pickled: its definitions stay in the worker, and share the
            globals of their module.
        is_deferred: Whether these are the definitions that the source does not need; of their
            globals, only plain values go with them.
        held: What importable modules hold, by its id: the module and the name there. An object of
            these that cannot be pickled goes by that name.

    Attributes:
        sent: Definitions that were pickled by value, by their ids.
        lines: Source lines of code without a file, by the name of the file in its tracebacks.
    """

    def __init__(
        self,
        file: Any,
        protocol: int = 5,
        buffer_callback: Callable[[PickleBuffer], Any] | None = None,
        *,
        known: Mapping[str, Any] | None = None,
        by_name: bool = False,
        is_source: bool = False,
        is_deferred: bool = False,
        held: Mapping[int, tuple[str, str]] | None = None,
    ) -> None:
        super().__init__(file, protocol=protocol, buffer_callback=buffer_callback)
        self.sent: dict[str, Any] = {}
        self.lines: dict[str, list[str]] = {}
        if known is None:
            known, by_name = (_by_id, True) if is_fork_of_program() else (received, False)
        self._known = known
        self._by_name = by_name
        self._stays = is_source or is_deferred
        self._is_deferred = is_deferred
        self._held = held or {}
        # By the name of a module, whether workers can import it.
        self._importable: dict[str, bool] = {}
        self._registered: list[ModuleType] = []

    def dump(self, value: Any) -> None:
        try:
            super().dump(value)
        except pickle.PicklingError as error:
            # Python's own words are known better than cloudpickle's.
            if isinstance(error.__cause__, RecursionError):
                raise error.__cause__ from None
            raise
        finally:
            for module in self._registered:
                cloudpickle.unregister_pickle_by_value(module)
            self._registered.clear()

    def reducer_override(self, value: Any) -> Any:
        check_graph(value)
        if isinstance(value, (type, FunctionType)):
            return self._reduce_definition(value)
        kind = type(value)
        if kind is CodeType:
            return self._reduce_code(value)
        if issubclass(kind, ModuleType):
            if kind is not ModuleType and self._can_import(value):
                # cloudpickle does not know it for a module: `torch.backends.cudnn`, lazy ones.
                return importlib.import_module, (value.__name__,)
            if kind is ModuleType and not self._can_import(value):
                return _module_of, (value.__name__,), _contents_of(value), None, None, _fill
        if self._held and id(value) in self._held and not self.can_send(value):
            return _named, self._held[id(value)]
        reduce = _REDUCERS.get(kind) or _BY_NAME.get((kind.__module__, kind.__qualname__))
        if reduce is None and isinstance(value, _BASES):
            reduce = next(_REDUCERS[base] for base in _BASES if isinstance(value, base))
        if reduce is None and self._stays and kind.__reduce__ is not object.__reduce__:
            return NotImplemented if kind in self.dispatch_table else self._reduce_named(value)
        return NotImplemented if reduce is None else reduce(value)

    def _reduce_named(self, value: Any) -> Any:
        """Reduce an object that says where it stands: a sentinel, or a `typing.NewType`."""
        module = sys.modules.get(str(getattr(value, "__module__", None)))
        if not isinstance(module, ModuleType) or self._can_import(module):
            return NotImplemented
        name = value.__reduce_ex__(5)
        if not isinstance(name, str) or "." in name or not hasattr(value, "__dict__"):
            return name
        made = _made_at, (type(value), module.__name__, name)
        return *made, dict(vars(value)), None, None, _fill

    def can_send(self, value: object) -> bool:
        """Return whether a value can be pickled as it is, by trying."""
        return is_picklable(value)

    def _reduce_definition(self, value: Any) -> Any:
        key = _ids.get(value)
        if key in self._known:
            return _find, (key,)
        self._share_globals(value)
        module = sys.modules.get(str(value.__module__))
        can_import = not isinstance(module, ModuleType) or self._can_import(module)
        if self._by_name and not can_import and _is_in(module, value):
            return NotImplemented
        reduced = super().reducer_override(value)
        if reduced is NotImplemented or len(reduced) != _BY_VALUE:
            return reduced
        make, args, state, *_, set_state = reduced
        slots = vars(value).get("__slots__") if isinstance(value, type) else None
        if slots and len(args) == _OF_CLASS:
            # A class that has been made gets no slots any more.
            args[_ATTRIBUTES_OF_CLASS]["__slots__"] = slots
        if isinstance(value, FunctionType) and (self._is_deferred or self._held):
            names = state[1]["__globals__"]
            state[1]["__globals__"] = dict(filter(None, map(self._global, names.items())))
        key = _id_of(value)
        self.sent[key] = value
        place, name = ("", "") if self._stays else None, value.__qualname__
        if self._stays and not can_import and "." not in name and _is_in(module, value):
            place = value.__module__, name
        return _receive, (key, place, make, args), (key, set_state, state), None, None, _finish

    def _share_globals(self, value: Any) -> None:
        """Have a function that a worker cannot import share the globals of its module there."""
        if self._stays and isinstance(value, FunctionType):
            known = value.__globals__
            module = sys.modules.get(str(known.get("__name__")))
            if module is None or vars(module) is not known or id(known) in self.globals_ref:
                return
            if not self._can_import(module):
                self.globals_ref[id(known)] = _Globals(module.__name__)

    def _global(self, item: tuple[str, Any]) -> tuple[str, Any] | None:
        """Return a global of a function as it travels; None if it stays here."""
        name, value = item
        if self._is_deferred and not _is_plain(value):
            return None
        # Pickle does not ask us about containers.
        is_held = isinstance(value, (dict, list, set)) and id(value) in self._held
        if is_held and not self.can_send(value):
            value = _Held(*self._held[id(value)])
        return name, value

    def _can_import(self, module: ModuleType) -> bool:
        """Return whether workers can import a module; have pickle send it by value if not."""
        name = module.__name__
        if name not in self._importable:
            self._importable[name] = can = _is_found(module)
            known = cloudpickle.list_registry_pickle_by_value()
            if not can and name != "__main__" and name in sys.modules and name not in known:
                cloudpickle.register_pickle_by_value(module)
                self._registered.append(module)
        return self._importable[name]

    def _reduce_code(self, code: CodeType) -> Any:
        """Reduce code as Python's own files have it, with the name of its file."""
        file = code.co_filename
        if file not in self.lines and not os.path.exists(file):
            self.lines[file] = linecache.getlines(file)
        try:
            return marshal.loads, (marshal.dumps(code),)
        except ValueError:
            # Its constants are none that a compiler makes.
            return super().reducer_override(code)


# The main module; multiprocessing calls that of its own processes otherwise.
_MAIN = ("__main__", "__mp_main__")
# Items in what cloudpickle returns for what it sends by value; among these, arguments of the
# function that makes a class, and the place of the attributes with which it is made.
_BY_VALUE = 6
_OF_CLASS, _ATTRIBUTES_OF_CLASS = 6, 3
# What definitions that the source does not need may bring along.
_PLAIN = (
    *(int, float, complex, str, bytes, bool, type(None), re.Pattern, os.PathLike, Enum),
    *(ModuleType, type, FunctionType, BuiltinFunctionType, MethodDescriptorType),
)
# Members of a container of these.
_MAX_MEMBERS = 100


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        value = (*value, *value.values())
    if isinstance(value, (tuple, list, set, frozenset)):
        return len(value) <= _MAX_MEMBERS and all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def dumps(
    value: object,
    known: Mapping[str, Any] | None = None,
    *,
    by_name: bool = False,
    buffer_callback: Callable[[PickleBuffer], Any] | None = None,
) -> bytes:
    """Pickle a value with the definitions that the other side lacks.

    Args:
        value: Value that plain pickle may refuse.
        known: As for `Pickler`.
        by_name: As for `Pickler`.
        buffer_callback: As for `pickle.Pickler`.

    Example:
        >>> pickle.loads(dumps(lambda: 7))()
        7
    """
    file = io.BytesIO()
    Pickler(file, buffer_callback=buffer_callback, known=known, by_name=by_name).dump(value)
    return file.getvalue()


def announce(value: object) -> None:
    """Give ids to the local definitions that a value refers to, before workers are forked.

    These know what has an id by then.
    """
    seen: set[int] = set()
    waiting: collections.deque[Any] = collections.deque([value])
    while waiting and len(seen) < _MAX_PARTS:
        part = waiting.popleft()
        if id(part) not in seen:
            seen.add(id(part))
            if isinstance(part, (type, FunctionType)) and "<locals>" in part.__qualname__:
                _id_of(part)
            waiting.extend(other for _, other in referred_by(part))


# Objects that are looked at for local definitions; those of a usual source are some dozens.
_MAX_PARTS = 10_000


def is_picklable(value: object) -> bool:
    """Return whether a value can be pickled, by trying."""
    try:
        dumps(value, buffer_callback=lambda _: False)
    except Exception:
        return False
    return True


def _is_found(module: ModuleType) -> bool:
    """Return whether a fresh interpreter with this one's path finds a module where it is."""
    name, spec = module.__name__, getattr(module, "__spec__", None)
    if getattr(spec, "origin", None) == "built-in":
        # `_io` calls itself `io`.
        return True
    if name in _MAIN or sys.modules.get(name) is not module:
        return False
    file = getattr(module, "__file__", None)
    parent, _, last = name.rpartition(".")
    if file is None:
        # Part of Python, a folder without a file, or made by the package that it belongs to.
        return spec is not None or bool(parent)
    if parent and parent in sys.modules:
        if not _is_found(sys.modules[parent]):
            return False
        places = getattr(sys.modules[parent], "__path__", [])
    else:
        places = sys.path
    folder, base = os.path.split(file)
    if base.partition(".")[0] == "__init__":
        folder, base = os.path.split(folder)
    if folder in places and base.partition(".")[0] == last:
        return True
    for finder in sys.meta_path:
        # Editable installations and archives have finders of their own.
        spec = finder.find_spec(name, list(places) if parent else None)
        if spec is not None:
            return bool(spec.origin == file)
    return bool(parent)


def held_by_modules() -> dict[int, tuple[str, str]]:
    """Return what importable modules hold, by its id: the name of the module, and that in it."""
    held: dict[int, tuple[str, str]] = {}
    for name, module in list(sys.modules.items()):
        if name in _MAIN or not isinstance(module, ModuleType):
            continue
        found = {
            id(value): (name, tried)
            for tried, value in list(vars(module).items())
            # Not `isinstance()`: a proxy's `__class__` may warn or raise.
            if not issubclass(type(value), _PLAIN)
        }
        if found and _is_found(module):
            held = found | held
    return held


class _Held:
    """Stands for an object that a module holds."""

    def __init__(self, module: str, name: str) -> None:
        self._place = module, name

    def __reduce__(self) -> Any:
        return _named, self._place


def _named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _made_at(kind: Any, module: str, name: str) -> Any:
    space = vars(_module_of(module))
    if type(space.get(name)) is not kind:
        space[name] = object.__new__(kind)
    return space[name]


def _contents_of(module: ModuleType) -> dict[str, Any]:
    left_out = ("__builtins__", "__loader__", "__spec__", "__cached__")
    return {name: value for name, value in vars(module).items() if name not in left_out}


def _fill(found: Any, contents: dict[str, Any]) -> None:
    for name, value in contents.items():
        vars(found).setdefault(name, value)


# --- kinds of objects that pickle refuses ------------------------------------------------------


def _reduce_cached(function: Any) -> Any:
    """Reduce a cached function that no worker can import; its copy begins with an empty cache."""
    if "<locals>" not in function.__qualname__ and function.__module__ not in _MAIN:
        return NotImplemented
    sizes = function.cache_parameters()
    return _cached, (function.__wrapped__, sizes["maxsize"], sizes["typed"])


def _cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _reduce_local(local: threading.local) -> Any:
    return _object_of, (type(local), dict(vars(local)))


def _object_of(kind: Any, attributes: dict[str, Any]) -> Any:
    found = kind.__new__(kind)
    vars(found).update(attributes)
    return found


def _reduce_cached_property(value: Any) -> Any:
    # Before Python 3.12 it has a lock.
    attributes = {name: part for name, part in vars(value).items() if name != "lock"}
    return _cached_property, (type(value), attributes)


def _cached_property(kind: type, attributes: dict[str, Any]) -> Any:
    found = _object_of(kind, attributes)
    if sys.version_info < (3, 12):
        found.lock = threading.RLock()
    return found


def _reduce_weak(value: Any) -> Any:
    return type(value), (dict(value),)


def _reduce_context_variable(variable: contextvars.ContextVar[Any]) -> Any:
    try:
        return _context_variable, (variable.name, variable.get())
    except LookupError:
        return _context_variable, (variable.name,)


def _context_variable(name: str, *default: Any) -> contextvars.ContextVar[Any]:
    arguments: Any = {"default": default[0]} if default else {}
    return contextvars.ContextVar(name, **arguments)


def _reduce_flags(flags: Any) -> Any:
    """Reduce the flags of absl: a script defines its own, which a worker would lack."""
    found = {name: (type(flags[name]), vars(flags[name])) for name in flags}
    return _flags_of, (flags is sys.modules["absl.flags"].FLAGS, found, flags.is_parsed())


def _flags_of(are_all: bool, found: dict[str, tuple[type, dict[str, Any]]], parsed: bool) -> Any:
    absl = importlib.import_module("absl.flags")
    flags = absl.FLAGS if are_all else absl.FlagValues()
    for name, (kind, attributes) in found.items():
        if name in flags:
            vars(flags[name]).update(attributes)
        else:
            flags[name] = _object_of(kind, attributes)
    if parsed:
        flags.mark_as_parsed()
    return flags


# By module and name, as the program may not have imported them.
_BY_NAME = {("absl.flags._flagvalues", "FlagValues"): _reduce_flags}

_REDUCERS: dict[type, Callable[[Any], Any]] = {
    functools._lru_cache_wrapper: _reduce_cached,
    threading.local: _reduce_local,
    functools.cached_property: _reduce_cached_property,
    weakref.WeakKeyDictionary: _reduce_weak,
    weakref.WeakValueDictionary: _reduce_weak,
    struct.Struct: lambda value: (struct.Struct, (value.format,)),
    contextvars.ContextVar: _reduce_context_variable,
}
# Those that programs derive classes from.
_BASES = (threading.local, functools.cached_property)
