"""What worker processes copy and threads share: random generators, files, data that change.

    source -> its functions, what their code uses, attributes, members -> objects, and their paths

The copies of a generator draw the same numbers, unlike the global generators, which each worker
seeds. A change of the program's own object is not seen in the copies. No code of the user runs
here, and nothing is imported.
"""

from __future__ import annotations

import contextlib
import dis
import io
import random
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

from enqueuer.common.objects import codes_in, is_library, referred_by
from enqueuer.common.text import an, warn
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
_MAX_OBJECTS = 2000
# Members by which the kind of a list is known.
_FEW = 5
# Objects whose values are compared at the beginning of each epoch.
_MAX_WATCHED = 200
# Those of `numpy.random` are one or the other.
_METHODS = BuiltinMethodType, MethodType
_LOCKS = type(threading.Lock()), type(threading.RLock())
_PLAIN = frozenset({bool, int, float, complex, str, bytes})
# Our DataLoader leaves the seeds to `worker_init_fn`; all iterators of Hugging Face begin alike.
# HDF5Source opens its files anew in each process.
_UNSEEN = ("enqueuer.adapters.", "enqueuer.datasets.hdf5.", "enqueuer.monitoring.", "datasets.")

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
        warn(
            f"each worker process gets a copy of {path} ({an(kind)}), and these copies may draw "
            f"the same random numbers; draw from {_instead(self._source)}",
            EnqueuerWarning,
        )

    def warn_of_files(self) -> None:
        """Warn if an open file is among them, whose position forked workers would share."""
        _warn_of_files(_reached(self._source), "forked worker processes")

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


def warn_of_sharing(source: Source | TaskSource, has_seed: bool) -> None:
    """Warn of what threads share that each worker should have for itself.

    Args:
        source: Source of the threads.
        has_seed: Whether the user gave a seed, and so expects that numbers come again.
    """
    reached = [*_reached(source)]
    # Of a list of files, each probably belongs to one element or shard.
    files = (step for step in reached if isinstance(step[1], io.IOBase) and "[" not in step[0])
    # With a lock, the file is probably read by one thread at a time.
    if not any(isinstance(value, _LOCKS) for _, value in reached):
        _warn_of_files(files, "threads")
    drawn = (path for path, value in reached if _is_generator(value))
    called = (f"{name} in {path}" for path, value in reached for name in _draws_of(value))
    if has_seed and (shared := next(chain(drawn, called), None)):
        warn(
            f"all threads draw from {shared}, in an order that differs between runs, so "
            f"random_seed does not repeat its numbers; draw from {_instead(source)}",
            EnqueuerWarning,
        )


def _warn_of_files(steps: Iterable[Step], workers: str) -> None:
    found = next((step for step in steps if _is_open_file(step[1])), None)
    if found is not None:
        warn(
            f"all {workers} share {found[0]} ({an(type(found[1]).__qualname__)}) and its "
            "position, so that each may get parts of what another one reads, or none. Open the "
            "file in the worker: in the generator function, or in map",
            EnqueuerWarning,
        )


def _draws_of(function: object) -> Iterator[str]:
    """Yield the methods of global random generators that code of the user names."""
    if not isinstance(function, FunctionType) or is_library(function.__module__):
        return
    generators = _global_generators()
    for code in codes_in(function.__code__):
        name, value = "", None
        for step in dis.get_instructions(code):
            if step.opname == "LOAD_GLOBAL":
                name, value = step.argval, function.__globals__.get(step.argval)
            elif isinstance(value, ModuleType) and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                name, value = f"{name}.{step.argval}", vars(value).get(step.argval)
            else:
                value = None
            if isinstance(value, _METHODS) and any(value.__self__ is one for one in generators):
                yield name


def _instead(source: Source | TaskSource) -> str:
    if isinstance(source, TaskSource):
        return "task.rng: map may take the element and its Task"
    return "shard.rng: the generator function may take its shard"


def _may_change(source: Source | TaskSource) -> bool:
    """Return whether the sequence changes itself, in each process alike."""
    return isinstance(source, TaskSource) and source.follows_epochs


def _values_of(source: Source | TaskSource) -> dict[str, Digest]:
    """Return digests of the plain values of a source that lie in memory of this process alone."""
    found: dict[str, Digest] = {}
    # An error of the user's `__len__` comes in its turn, when the elements are read.
    with contextlib.suppress(Exception):
        if isinstance(source, TaskSource) and source.is_finite:
            found["the length of the sequence"] = source.length, 0
            # The content of its elements may not be readable.
            found["the sequence"] = hash(source.sample()), 0
    for path, value in islice(_reached(source), _MAX_WATCHED):
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
    pending: deque[Step] = deque(_roots_of(source))
    # The objects are kept with their ids, which the next ones could get otherwise.
    seen: dict[int, object] = {}
    while pending and len(seen) < _MAX_OBJECTS:
        path, value = pending.popleft()
        if id(value) not in seen:
            seen[id(value)] = value
            yield path, value
            # Of a class of an extension module it may be no text.
            if not str(type(value).__module__).startswith(_UNSEEN):
                pending.extend((path + step, part) for step, part in referred_by(value))


def _is_open_file(value: Any) -> bool:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind in ("sqlite3.Connection", "h5py._hl.files.File"):
        return True
    if not kind.startswith("_io.") or not isinstance(value, io.IOBase):
        return False
    # What is only written to, such as a log, has no position that matters. Files in memory raise.
    with contextlib.suppress(OSError, ValueError):
        return value.readable() and value.fileno() > 2
    return False


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
    function: Any = getattr(type(value), name, None)
    is_users = isinstance(function, FunctionType) and not is_library(type(value).__module__)
    return MethodType(function, value) if is_users else value


def _is_generator(value: object) -> bool:
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__}
    if kinds.isdisjoint(_KINDS) or isinstance(value, random.SystemRandom):
        return False
    # The workers seed the global ones.
    known = getattr(sys.modules.get("torch"), "default_generator", None), *_global_generators()
    return not any(value is known_one for known_one in known)


def _global_generators() -> list[object]:
    drawn = random.random, getattr(sys.modules.get("numpy.random"), "random", None)
    return [method.__self__ for method in drawn if isinstance(method, _METHODS)]
