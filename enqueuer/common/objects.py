"""Looking into a batch, or any object of the user: its members, its size, what it refers to.

    members_of(nest)          -> members by key, index or name; None of a leaf
    with_members(nest, ...)   -> a nest of the same class with other members
    tree_map(function, nest)  -> function of each leaf
    attributes_of(value)      -> values in the `__dict__` and the slots of an object
    size_of(batch)            -> the bytes of arrays, tensors, texts and numbers in it
    referred_by(value)        -> (step, part), ...: also what the code of a function uses

Containers are mappings, tuples, named tuples, lists and dataclasses. Sets are leaves here, as
their members have no places.

`size_of` is for batches that are passed as objects; those of worker processes are measured by
their packets. It is called for every item and must run no code of a container's class, so it
knows only built-in containers and attributes. `referred_by` runs no code of the user either, and
does not follow code of Python, of this package and of installed packages.

The TensorFlow adapter walks in its own way: it follows `tf.nest`, for which a list is a tensor.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import dis
import functools
import sys
import types
from collections import UserDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

# --- containers -----------------------------------------------------------------------------------


def members_of(nest: object) -> Mapping[Any, Any] | None:
    """Return the members of a container by key, index or field name; None of a leaf.

    Fields of a dataclass that its `__init__` does not take are left out.

    Example:
        >>> members_of(["a", "b"]), members_of("ab")
        ({0: 'a', 1: 'b'}, None)
    """
    if isinstance(nest, Mapping):
        return nest
    if isinstance(nest, (tuple, list)):
        return dict(enumerate(nest))
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        fields = dataclasses.fields(nest)
        return {field.name: getattr(nest, field.name) for field in fields if field.init}
    return None


def with_members(nest: Any, members: Mapping[Any, Any]) -> Any:
    """Return a container of the same class as `nest` with other members.

    Args:
        nest: Container to be imitated; it is not changed.
        members: New members, by the same keys, indices or names as `members_of(nest)`.

    Example:
        >>> with_members((1, 2), {0: "a", 1: "b"})
        ('a', 'b')
    """
    if isinstance(nest, Mapping):
        return _with_items(nest, dict(members))
    if isinstance(nest, (tuple, list)):
        kind: Any = type(nest)
        return kind(*members.values()) if hasattr(nest, "_fields") else kind(members.values())
    return dataclasses.replace(nest, **members)


def columns_of(nests: Sequence[Any]) -> dict[Any, list[Any]] | None:
    """Return, for each member of the first container, a list of that member of all containers.

    Args:
        nests: Containers of the same structure, at least one; or leaves.

    Returns:
        The members by key, index or name; None if the first one is a leaf.

    Raises:
        ValueError: Tuples or lists differ in length.
        KeyError: A mapping lacks a key of the first one.

    Example:
        >>> columns_of([{"x": 1}, {"x": 2}])
        {'x': [1, 2]}
    """
    first = nests[0]
    if isinstance(first, Mapping):
        return {key: [nest[key] for nest in nests] for key in first}
    if isinstance(first, (tuple, list)):
        return dict(enumerate(map(list, zip(*nests, strict=True))))
    names = members_of(first)
    if names is None:
        return None
    return {name: [getattr(nest, name) for nest in nests] for name in names}


def tree_map(function: Callable[[Any], Any], nest: Any) -> Any:
    """Return a nest of the same structure with `function` of each leaf.

    An object that moves itself to a GPU is a leaf.

    Example:
        >>> tree_map(str, {"x": (1, 2), "y": [3]})
        {'x': ('1', '2'), 'y': ['3']}
    """
    members = None if _moves_itself(nest) else members_of(nest)
    if members is None:
        return function(nest)
    mapped = {key: tree_map(function, member) for key, member in members.items()}
    return with_members(nest, mapped)


def _moves_itself(nest: Any) -> bool:
    """Return whether a nest must not be taken apart.

    A TensorDict or a graph of PyTorch Geometric knows of streams. A PackedSequence is a tuple of
    which one part must stay on the CPU.
    """
    kind = type(nest)
    return hasattr(kind, "record_stream") or (
        isinstance(nest, (tuple, list)) and hasattr(kind, "to")
    )


def _with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return `items` in a mapping of the same class; in a dict if that is impossible."""
    if type(mapping) is dict:
        return items
    if isinstance(mapping, (dict, UserDict)):
        # A copy keeps the factory of a defaultdict, for example. Some classes forbid update().
        twin = copy.copy(mapping)
        for key, value in items.items():
            twin[key] = value
        return twin
    # A copy of another class may share its values with the original.
    kind: Any = type(mapping)
    try:
        rebuilt = kind(items)
    except Exception:
        # An archive that numpy has opened, for example, cannot be made from a dict.
        return items
    return rebuilt if isinstance(rebuilt, Mapping) else items


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the values in the `__dict__` and the slots of an object, by name.

    Properties are not read, so no code of the object's class runs.

    Example:
        >>> attributes_of(types.SimpleNamespace(x=1))
        {'x': 1}
    """
    attributes = getattr(value, "__dict__", None)
    found = dict(attributes) if isinstance(attributes, dict) else {}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            # Python mangles a name that begins with two underscores.
            is_private = name.startswith("__") and not name.endswith("__")
            key = f"_{kind.__name__.lstrip('_')}{name}" if is_private else name
            slot = vars(kind).get(key)
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    found[key] = slot.__get__(value)
                except AttributeError:
                    # The slot was not set.
                    continue
    return found


# --- sizes ----------------------------------------------------------------------------------------

# Smaller buffers are cheaper inside the pickle of an item than beside it.
OUT_OF_BAND_BYTES = 16 * 1024

# Objects that are counted for an estimate.
SAMPLED = 256

# Objects that are counted: more would take longer than most batches.
_MAX_OBJECTS = 100_000
_NUMBER_BYTES = 8
_NUMBERS = frozenset({int, float, bool})
_TEXTS = frozenset({str, bytes, bytearray})
_SERIES = frozenset({tuple, list, set, frozenset, deque})
# Members of a container; so few take no longer one by one.
_FEW = 32
# These refer to code, which is no part of a batch.
_CODE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)
# Bytes of a pixel in each band of PIL's modes; 1 in all others.
_WIDE_MODES = {"I": 4, "F": 4, "I;16": 2, "I;16L": 2, "I;16B": 2}

# Libraries whose arrays are in memory.
_IN_MEMORY = {"numpy", "torch", "pandas", "pyarrow"}


def is_in_memory(array: object) -> bool:
    """Return whether numpy can show an array without reading a file or copying it from a GPU."""
    libraries = {kind.__module__.partition(".")[0] for kind in type(array).__mro__}
    return not libraries.isdisjoint(_IN_MEMORY)


def is_plain_tensor(tensor: Any) -> bool:
    """Return whether a tensor of torch is plain memory of the CPU."""
    return (
        tensor.layout is sys.modules["torch"].strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
    )


def tensor_class() -> Any:
    """Return the class of torch's tensors; an empty tuple if the program has not imported it."""
    # Another thread may be importing torch, which then has no tensors yet.
    return getattr(sys.modules.get("torch"), "Tensor", ())


def check_graph(value: object) -> None:
    """Refuse a tensor that autograd has computed; as a pickle it would silently be a leaf.

    Raises:
        RuntimeError: It requires grad and is no leaf; torch's own pickler raises so, too.
    """
    if isinstance(value, tensor_class()) and value.requires_grad and not value.is_leaf:
        raise RuntimeError(
            "a non-leaf tensor that requires_grad has a graph, which cannot leave its process: "
            "give tensor.detach(), or compute it under torch.no_grad()"
        )


def size_of(value: object, limit: int = _MAX_OBJECTS) -> int:
    """Return the approximate size of a batch in bytes, with all that it contains.

    Objects with `nbytes` (arrays, tensors), byte strings, texts, numbers and PIL images count: in
    dicts, tuples, lists and sets, and in the attributes of other objects, such as dataclasses.
    An object that is referred to twice counts once. Nothing is copied, and only built-in
    containers are iterated over.

    Args:
        value: Batch of any structure.
        limit: Largest number of objects that are counted; the rest of a larger nest is left out.

    Example:
        >>> import numpy as np
        >>> size_of({"x": np.zeros((4, 8)), "label": [1, 2, 3, 4], "name": "abc"})
        291
    """
    total = 0
    pending: list[Any] = [value]
    # The objects are kept with their ids, since a new object could get the id of a freed one.
    seen: dict[int, object] = {}
    while pending and limit > 0:
        limit -= 1
        part = pending.pop()
        if id(part) in seen:
            continue
        seen[id(part)] = part
        # The most common types come first, and exact types, since this may run for each batch.
        kind = type(part)
        if kind is dict:
            pending += part.values()
        elif kind in _NUMBERS:
            total += _NUMBER_BYTES
        elif kind in _TEXTS:
            total += len(part)
        elif kind in _SERIES:
            nbytes = _plain_bytes(part) if len(part) > _FEW else None
            if nbytes is None:
                pending += part
            else:
                total += nbytes
        else:
            nbytes = _whole_bytes(part)
            if nbytes is None:
                pending += _counted_in(part)
            else:
                total += nbytes
    return total


def _plain_bytes(series: Collection[Any]) -> int | None:
    """Return the bytes of a series of numbers or texts, which may be long; else None."""
    kinds = set(map(type, series))
    if kinds <= _NUMBERS:
        return _NUMBER_BYTES * len(series)
    return sum(map(len, series)) if kinds <= _TEXTS else None


def _whole_bytes(part: Any) -> int | None:
    """Return the bytes of an array or an image; None for an object with parts."""
    try:
        nbytes = part.nbytes
    except Exception:
        # A sparse tensor has none, and raises an error of its own.
        return _pixels(part)
    return nbytes if isinstance(nbytes, int) and not _holds_objects(part) else None


def _holds_objects(part: Any) -> bool:
    """Return whether this is an array of references, as collating unequal batches makes them."""
    return getattr(getattr(part, "dtype", None), "hasobject", False) and hasattr(part, "ravel")


def _pixels(part: Any) -> int | None:
    """Return the bytes of a PIL image, to whose pixels no attribute leads; else None."""
    image = getattr(sys.modules.get("PIL.Image"), "Image", None)
    if image is None or not isinstance(part, image):
        return None
    width, height = part.size
    return int(width * height * len(part.getbands()) * _WIDE_MODES.get(part.mode, 1))


def _counted_in(part: Any) -> Iterable[Any]:
    if isinstance(part, _CODE):
        return ()
    parts: list[Any] = []
    if isinstance(part, dict):
        parts += dict.values(part)
    elif isinstance(part, types.MappingProxyType):
        parts += part.values()
    elif isinstance(part, (tuple, list, set, frozenset, deque)):
        parts += part
    elif _holds_objects(part):
        parts += part.ravel().tolist()
    elif isinstance(part, tensor_class()) and part.layout is sys.modules["torch"].sparse_coo:
        parts += (part._indices(), part._values())
    parts += attributes_of(part).values()
    return parts


# --- references -----------------------------------------------------------------------------------

# Members of one container: the elements of a long list are alike.
_MAX_MEMBERS = 50

_Step = tuple[str, object]


def referred_by(value: Any) -> Iterator[_Step]:
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
        yield from ((f"[{key!r}]", part) for key, part in islice(value.items(), _MAX_MEMBERS))
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{at}]", part) for at, part in enumerate(islice(value, _MAX_MEMBERS)))
    elif isinstance(value, type):
        if not is_library(value.__module__):
            yield from ((f".{name}", part) for name, part in list(vars(value).items()))
            yield from (("", base) for base in value.__bases__)
    elif isinstance(value, (staticmethod, classmethod, property)):
        yield "", value.fget if isinstance(value, property) else value.__func__
    elif not isinstance(value, ModuleType):
        yield from ((f".{name}", part) for name, part in attributes_of(value).items())
        yield "", type(value)


def _used_by(function: FunctionType) -> Iterator[_Step]:
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


def _used_of(method: MethodType) -> Iterator[_Step]:
    """Yield the attributes that a method, and the methods that it calls, may use."""
    owner, pending, seen = method.__self__, [method.__func__], set[str]()
    kind = owner if isinstance(owner, type) else type(owner)
    while pending:
        function = pending.pop()
        yield "", function
        for code in codes_in(getattr(function, "__code__", None)):
            for name in set(code.co_names) - seen:
                seen.add(name)
                items = [vars(base)[name] for base in kind.__mro__ if name in vars(base)]
                pending += [
                    getattr(item, "fget", getattr(item, "__func__", item)) for item in items
                ]
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
