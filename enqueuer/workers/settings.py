"""What a worker in another process knows of the program, and what it takes over at an import.

    Settings.of_this_process() --> the worker: apply(), before the user's code is loaded
    Initializer -----------------> the worker: called in between
    used_values(source) ---------> the worker: warn_of_other_values(), when that is loaded

A setting of a library is applied when the worker has imported that library. No worker imports one
for its settings.

A worker imports the user's modules anew, so it does not see what the program has assigned to their
variables. Nothing is assigned there for the user: another module may have computed something from
the first value. So the values are compared, and the worker warns.

The user's code may import a library at any time, also in the middle of an item. So a finder in
front of all others has the loader of the module call a function when it has run the module, before
the import statement ends. The finder does not inherit from a class of `importlib.abc`, whose import
takes longer than to fork a worker. The import system calls its method and does not check its class.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeGuard

from enqueuer.common.objects import codes_in, referred_by
from enqueuer.errors import StartError

# For each setting: the module, the function or attribute that has it, and the function that sets
# it; "" for an attribute.
_SETTINGS = (
    ("sys", "getrecursionlimit", "setrecursionlimit"),
    ("sys", "get_int_max_str_digits", "set_int_max_str_digits"),
    ("socket", "getdefaulttimeout", "setdefaulttimeout"),
    ("csv", "field_size_limit", "field_size_limit"),
    ("decimal", "getcontext", "setcontext"),
    ("numpy", "geterrcall", "seterrcall"),
    ("numpy", "geterr", "seterr"),
    ("numpy", "get_printoptions", "set_printoptions"),
    ("torch", "get_default_dtype", "set_default_dtype"),
    ("torch", "is_grad_enabled", "set_grad_enabled"),
    ("torch", "get_deterministic_debug_mode", "set_deterministic_debug_mode"),
    ("PIL.Image", "MAX_IMAGE_PIXELS", ""),
    ("PIL.ImageFile", "LOAD_TRUNCATED_IMAGES", ""),
    ("PIL.ImageFile", "MAXBLOCK", ""),
    ("PIL.PngImagePlugin", "MAX_TEXT_CHUNK", ""),
    ("PIL.PngImagePlugin", "MAX_TEXT_MEMORY", ""),
)
# Modules that register something with a library when they are imported, and that library.
_PLUGINS = {
    "hdf5plugin": "h5py",
    "bitshuffle.h5": "h5py",
    "pillow_avif": "PIL.Image",
    "pillow_jxl": "PIL.Image",
}
_MAIN = ("__main__", "__mp_main__")


class Settings(NamedTuple):
    """Settings of a program.

    Attributes:
        values: Pickles of those of `_SETTINGS` whose modules are imported, by their places.
        filters: Filters of warnings. A category that the worker may have to import is a pair of
            its module and name; one of the main module is a pickle.
        plugins: Names of the imported modules of `_PLUGINS`.
    """

    values: dict[int, bytes]
    filters: list[tuple[Any, ...]]
    plugins: list[str]

    @classmethod
    def of_this_process(cls, dumps: Callable[[object], bytes]) -> Settings:
        """Read them.

        Args:
            dumps: Function that pickles what the main module defines as well.
        """
        values = {}
        for place, (module, name, setter) in enumerate(_SETTINGS):
            # A version may lack one, and a value may have parts that cannot be pickled.
            with contextlib.suppress(KeyError, AttributeError, TypeError, pickle.PicklingError):
                value = getattr(sys.modules[module], name)
                # A formatter or a handler may be a lambda of the program.
                values[place] = dumps(value() if setter else value)
        filters = []
        everything: list[Any] = list(warnings.filters)
        for action, message, category, module, line in everything:
            known: Any = category.__module__, category.__qualname__
            with contextlib.suppress(AttributeError, TypeError, pickle.PicklingError):
                known = dumps(category) if known[0] in _MAIN else known
                filters.append((action, message, known, module, line))
        return cls(values, filters, [name for name in _PLUGINS if name in sys.modules])

    def apply(self) -> None:
        """Set them in this process, now or when their modules are imported."""
        # This also forgets which warnings were shown. No warning can come before the next line.
        warnings.resetwarnings()
        there: Any = warnings.filters
        there[:] = [entry for entry in map(_loaded, self.filters) if entry is not None]
        for place, entry in enumerate(self.filters):
            if _loaded(entry) is None and isinstance(entry[2], tuple):
                after_import([entry[2][0]], functools.partial(self._add_filter, place))
        for place, value in self.values.items():
            on_import(_SETTINGS[place][0], functools.partial(_set, place, value))
        for name in self.plugins:
            on_import(_PLUGINS[name], functools.partial(_import, name))

    def _add_filter(self, place: int, _: str) -> None:
        """Add a filter whose category is known now, before those that it comes before."""
        there: Any = warnings.filters
        entry = _loaded(self.filters[place])
        if entry is None or entry in there:
            return
        later = (other for other in map(_loaded, self.filters[place + 1 :]) if other in there)
        other = next(later, None)
        there.insert(len(there) if other is None else there.index(other), entry)


def _loaded(entry: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return a filter with its category; None while that is not known here."""
    action, message, known, module, line = entry
    try:
        if isinstance(known, bytes):
            category = pickle.loads(known)
        else:
            category = functools.reduce(getattr, known[1].split("."), sys.modules[known[0]])
    except Exception:
        return None
    return action, message, category, module, line


def _set(place: int, pickled: bytes, _: str) -> None:
    module, name, setter = _SETTINGS[place]
    # The worker's node may have another version of the library.
    with contextlib.suppress(Exception):
        value, there = pickle.loads(pickled), sys.modules[module]
        if not setter:
            setattr(there, name, value)
        elif isinstance(value, dict):
            getattr(there, setter)(**value)
        else:
            getattr(there, setter)(value)


def _import(name: str, _: str) -> None:
    # The error comes again, and is reported, where the user's code needs the module.
    with contextlib.suppress(Exception):
        importlib.import_module(name)


# --- the initializer ---------------------------------------------------------------------------


class Initializer(NamedTuple):
    """A function of the user that each worker calls before it loads the source.

    Attributes:
        function: The function.
        arguments: Its arguments.
    """

    function: Callable[..., object]
    arguments: tuple[Any, ...]

    def __reduce__(self) -> Any:
        # Loading the pickle calls the function, before what follows it in the pickle is loaded.
        # So both share their global variables, though the source is loaded later.
        return initialize, tuple(self)

    def __call__(self) -> Callable[[], None]:
        return initialize(*self)


# Modules and names of the values that it has changed, which are meant to differ.
_initialized: set[tuple[str, ...]] = set()


def initialize(function: Callable[..., object], arguments: tuple[Any, ...]) -> Callable[[], None]:
    """Call an initializer.

    Returns:
        A function that assigns again what it has assigned to global variables. Where the source is
        loaded afterwards, its pickle brings values of the program.

    Raises:
        StartError: It has raised an exception, which is the cause.
    """
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    space: dict[str, Any] = getattr(inner, "__globals__", {})
    before = dict(space)
    saved = {name: dict(vars(m)) for name, m in list(sys.modules.items()) if _is_user(m)}
    try:
        function(*arguments)
    except BaseException as error:
        raise StartError(
            f"the initializer {getattr(inner, '__qualname__', inner)} failed in the worker with "
            f"{type(error).__name__}: {error}. Each worker calls it before it loads the source; "
            "correct it, or its initargs"
        ) from error
    for name, old in saved.items():
        now = vars(sys.modules.get(name, sys))
        _initialized.update((name, k) for k, v in old.items() if now.get(k, v) is not v)
    assigned = {k: v for k, v in space.items() if k not in before or before[k] is not v}
    return functools.partial(space.update, assigned)


# --- values of the user's modules --------------------------------------------------------------

# Of functions, objects and values, so that a start is not delayed.
_MAX_VALUES = 500
# Of a value that is compared, and of values that one warning names.
_MAX_CHARACTERS, _MAX_PARTS, _MAX_NAMED = 200, 20, 10
_WRAPPERS = (
    *(MethodType, staticmethod, classmethod, property),
    *(functools.cached_property, functools._lru_cache_wrapper),
)
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]

Place = tuple[str, ...]
"""A module, perhaps a class, object or dictionary in it, and the name or key of a value."""


def used_values(*parts: object) -> dict[Place, str]:
    """Return the values in modules of the user to which the functions of a source refer.

    Args:
        parts: Functions and objects of the source.

    Returns:
        Numbers, texts, flags, and tuples and lists of them, as text. What these functions assign
        themselves is left out.
    """
    walk = _Walk(list(parts))
    while walk.waiting and len(walk.seen) + len(walk.found) < _MAX_VALUES:
        value = walk.waiting.pop()
        if id(value) not in walk.seen:
            walk.seen[id(value)] = value
            # The user's objects may do anything when they are looked at.
            with contextlib.suppress(Exception):
                walk.look_into(value)
    return {place: text for place, text in walk.found.items() if place not in walk.assigned}


class _Walk:
    """Follows references through the user's own code.

    Attributes:
        waiting: What is still to be looked into.
        seen: What was looked into, by its address.
        found: Values, as text.
        assigned: Places of those that a function assigns.
    """

    def __init__(self, waiting: list[Any]) -> None:
        self.waiting = waiting
        self.seen: dict[int, object] = {}
        self.found: dict[Place, str] = {}
        self.assigned: set[Place] = set()

    def look_into(self, value: Any) -> None:
        """Look into a function, what wraps one, a class of the user's, or that of an object."""
        if isinstance(value, FunctionType):
            self._look_into_function(value)
        elif isinstance(value, type):
            self._look_into_class(value)
        elif isinstance(value, functools.partial):
            self.waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, _WRAPPERS):
            names = ("__func__", "__self__", "fget", "func", "__wrapped__")
            self.waiting += [getattr(value, name, None) for name in names]
        elif not _is_plain(value):
            self.waiting += [part for _, part in referred_by(value)]

    def _look_into_class(self, kind: type) -> None:
        is_user = _is_user(sys.modules.get(kind.__module__))
        if is_user or kind.__module__ in _MAIN:
            self.waiting += [*vars(kind).values(), *kind.__bases__]
        if is_user:
            functions = [part for part in vars(kind).values() if isinstance(part, FunctionType)]
            used = {name for function in functions for name in function.__code__.co_names}
            self._note((kind.__module__, *kind.__qualname__.split(".")), vars(kind), used)

    def _look_into_function(self, function: FunctionType) -> None:
        space, module = function.__globals__, function.__globals__.get("__name__", "")
        is_user = _is_user(sys.modules.get(module))
        if not is_user and module not in _MAIN:
            return
        free = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        names = set(free)
        for code in codes_in(function.__code__):
            names.update(code.co_names, (text for text in code.co_consts if type(text) is str))
            steps = zip(code.co_code[::2], code.co_code[1::2], strict=True)
            stored = [code.co_names[at] for step, at in steps if step == _STORE_GLOBAL]
            self.assigned.update((module, name) for name in stored)
        if is_user:
            self._note((module,), space, names - free.keys())
        for name in sorted(names):
            value = space.get(name, sys.modules.get(name))
            # An empty cell raises ValueError.
            with contextlib.suppress(KeyError, ValueError):
                value = free[name].cell_contents
            if _is_user(value):
                self._note((value.__name__,), vars(value), names)
            elif (name in space or name in free) and not _is_plain(value):
                self.waiting.append(value)
                homes = [] if is_user else [m for m in self._modules if vars(m).get(name) is value]
                for home in homes[:1]:
                    self._note((home.__name__, name), _space_of(value), names)

    @functools.cached_property
    def _modules(self) -> list[ModuleType]:
        return [module for module in list(sys.modules.values()) if _is_user(module)]

    def _note(self, place: Place, space: Mapping[Any, Any], names: set[str]) -> None:
        """Note the plain values with these names in a module, or in an object or class there."""
        for name in sorted(names & space.keys()):
            value = space[name]
            if _is_plain(value):
                if name[:2] != "__":
                    self.found[(*place, name)] = repr(value)
            elif len(place) == 1 and not isinstance(value, ModuleType):
                self.waiting.append(value)
                self._note((*place, name), _space_of(value), names)


# Of paths; their import takes milliseconds, and a program without them has none.
_PATHS = ("pathlib", "pathlib._local")


def _is_plain(value: object) -> bool:
    """Return whether a value is small, and its text tells it from others."""
    if type(value) in (tuple, list):
        parts: Any = value
        return len(parts) <= _MAX_PARTS and all(map(_is_plain, parts))
    if type(value) in (str, bytes):
        return len(value) <= _MAX_CHARACTERS  # type: ignore[arg-type]
    return (
        type(value) in (int, float, complex, bool, type(None)) or type(value).__module__ in _PATHS
    )


def _space_of(value: object) -> Mapping[Any, Any]:
    """Return the attributes of an object, without loading a lazy module, or a dictionary itself."""
    try:
        return value if type(value) is dict else object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


_NOT_USER = tuple(
    os.path.join(os.path.dirname(path), "") for path in (os.__file__, os.path.dirname(__file__))
)


def _is_user(module: object) -> TypeGuard[ModuleType]:
    """Return whether something is a module of the user, and not one of an installed package."""
    space = _space_of(module) if isinstance(module, ModuleType) else {}
    path = space.get("__file__")
    if not isinstance(path, str) or space.get("__name__") in _MAIN or path.startswith(_NOT_USER):
        return False
    return not any(f"{os.sep}{name}-packages{os.sep}" in path for name in ("site", "dist"))


def warn_of_other_values(values: Mapping[Place, str]) -> None:
    """Log a warning for each module whose values differ from the program's, once it is imported."""
    for module in {place[0]: None for place in values}:
        of_module = {place: text for place, text in values.items() if place[0] == module}
        on_import(module, functools.partial(_compare, of_module))


def _compare(values: Mapping[Place, str], module: str) -> None:
    differ = []
    for place, text in values.items():
        here: object = sys.modules[module]
        with contextlib.suppress(KeyError):
            for name in place[1:]:
                here = _space_of(here)[name]
            if repr(here) != text and place[:2] not in _initialized:
                differ.append(f"{'.'.join(place)} is {text} in the program and {here!r} here")
    if differ:
        logging.getLogger("enqueuer").warning(
            "%s, in a worker that has imported the module %s anew: what the program assigns to "
            "its variables does not reach such workers. Assign it in a function that you give as "
            "Processes(initializer=...), or pass it to the source as an argument",
            "; ".join(differ[:_MAX_NAMED]),
            module,
        )


def load_source(pickled: bytes, index: int, buffers: Any = ()) -> Any:
    """Load the pickle of a source and of `on_error` in a worker, after calling the initializer.

    Args:
        pickled: Pickle of these four: the initializer or None, the source, `on_error`, and the
            values that the source uses. It is dropped before the values are compared.
        index: Index of the worker. The first one compares the values for all.
        buffers: Large buffers of the pickle.
    """
    initialized, source, on_error, values = pickle.loads(pickled, buffers=buffers)
    del pickled
    if initialized is not None:
        initialized()
    if index == 0:
        warn_of_other_values(values)
    return source, on_error


# --- whose process this is, and its imports -------------------------------------------------------


def after_import(names: Collection[str], act: Callable[[str], object]) -> None:
    """Call `act` with the name of each of these modules that this process imports from now on."""
    for name in names:
        _finder.acts.setdefault(name, []).append(act)
    # A second finder for the same module would ask the first one, and that one the second.
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def on_import(name: str, act: Callable[[str], object]) -> None:
    """Call `act` with the name of a module that is imported already, else after its import."""
    if name in sys.modules:
        act(name)
    else:
        after_import([name], act)


# Whether this process is a worker, or forks some; and whether it is a fork of the program.
_is_worker = _is_fork = False


def be_worker(*, is_fork: bool = False) -> None:
    """Note that this process is no program of the user's.

    Args:
        is_fork: Whether it was forked by the program, and so has all that the program has.
    """
    global _is_worker, _is_fork
    _is_worker, _is_fork = True, is_fork


def is_fork_of_program() -> bool:
    """Return whether this process is a worker that the program has forked."""
    return _is_fork


def check_not_importing() -> None:
    """Raise StartError if this thread of a worker is importing a module, which starts workers.

    They would import that module as well, and each would start others.
    """
    frame = sys._getframe() if _is_worker else None
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "<module>" and module != "__main__":
            raise StartError(
                f"the module {module} starts worker processes while it is imported. Workers "
                "import it, too, and would start workers of their own without end; move this into "
                "a function, which the program calls"
            )
        frame = frame.f_back


class _Finder:
    def __init__(self) -> None:
        self.acts: dict[str, list[Callable[[str], object]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.acts:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._wrap(spec.loader, fullname)
        return spec

    def _wrap(self, loader: Any, name: str) -> None:
        """Have a loader act, once, when it has run the module of that name."""

        def run(module: ModuleType) -> None:
            # The loader is as it was: other code may keep it, or ask it for the source.
            del loader.exec_module
            loader.exec_module(module)
            # A spec that is never loaded leaves this to another module of the same loader.
            if module.__name__ == name:
                for act in self.acts[name]:
                    act(name)

        loader.exec_module = run


_finder = _Finder()
