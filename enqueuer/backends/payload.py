"""The source of workers in other processes: pickled once, for all, with what it shares with them.

To processes it travels in a nameless file, whose descriptor goes over each worker's channel. Ray
sends it to actors.

    this process  a queue, lock, value, connection, shared tensor
                  --its own reducer, as for a Process--> `Handover`: duplicates of its descriptors
    the worker    Handed(place).detach() -> a descriptor of its own -> the object

A forked worker inherits these objects. For the others, multiprocessing pickles them only while it
starts a process of its own, so a `Handover` stands for such a process.
"""

from __future__ import annotations

import contextlib
import copyreg
import dis
import errno
import functools
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler
from pickle import PickleBuffer
from types import CodeType, FunctionType, MethodType
from typing import Any, ClassVar, NamedTuple

from enqueuer.backends.pool import NoRoom
from enqueuer.common.descriptors import Descriptor, close_in_children
from enqueuer.common.objects import OUT_OF_BAND_BYTES, codes_in
from enqueuer.common.text import an
from enqueuer.errors import SourceNotPicklable
from enqueuer.transport.definitions import Pickler, held_by_modules, program_of
from enqueuer.transport.errors import find_culprit, parts_of
from enqueuer.transport.item_codec import reduce_tensor
from enqueuer.workers.plan import OnError
from enqueuer.workers.settings import Initializer, Settings, used_values
from enqueuer.workers.sources import LiveSource, Source, name_of
from enqueuer.workers.tasks import TaskSource


def pickled_source(
    source: Source | TaskSource,
    on_error: OnError,
    where: str,
    ways: str,
    known: dict[str, Any],
    shared: Handover | None = None,
    initializer: Initializer | None = None,
) -> Payload:
    """Return the pickle of a source and `on_error`, for `load_source()`.

    Args:
        source: Source that is to be run.
        on_error: Option of the enqueuer.
        where: Destination, in words.
        ways: Options that would not send it, in words.
        known: Where the definitions that the workers will have are added, by their ids.
        shared: Keeper of large buffers and of the descriptors of shared objects; None: buffers are
            part of the pickle, and these objects cannot be sent.
        initializer: Function that workers call before.

    Raises:
        NoRoom: There was no descriptor left for it.
        SourceNotPicklable: One of these cannot be pickled; the message names the culprit.
        OSError: There is no room for the descriptors of shared objects.
    """
    held: Mapping[int, tuple[str, str]] = {}
    what = initializer, source, on_error, used_values(*_user_parts_of(source))
    try:
        try:
            pickled, pickler = _dump(what, shared, held)
        except Exception:
            if shared is not None and shared.error is not None:
                raise
            pickled, pickler = _dump(what, shared, held := held_by_modules())
        program = program_of(pickler)
        known.update(pickler.sent)
        return Payload(pickle.dumps(program, protocol=5), pickled)
    except Exception as error:
        if shared is not None and shared.error is not None:
            raise shared.error from None
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise NoRoom(
                f"{error}, while the source was pickled. Raise the limit of descriptors "
                "(`ulimit -n`), or close some"
            ) from error
        ways = "backend='thread'" if "CUDA" in str(error) else ways
        can_send = functools.partial(_can_send, shared, held)
        for name, value in {"on_error": on_error, "initializer": initializer}.items():
            if not can_send(value):
                function = name_of(getattr(value, "function", value))
                raise SourceNotPicklable(
                    f"{name}={function} cannot be sent to {where}: {error}; "
                    f"use a function of a module, or {ways}"
                ) from error
        raise SourceNotPicklable(_why_not(source, where, ways, can_send) + _hint(error)) from error


def _hint(error: Exception) -> str:
    """Return what else to do about an error of pickling, as a sentence more."""
    if ".detach()" in str(error):
        return f". {error}"
    if "CUDA" in str(error):
        return ". A forked process cannot use CUDA: keep models and tensors on it out of the source"
    if OF_FORK in str(error):
        return ". Make objects of multiprocessing by multiprocessing.get_context('spawn')"
    return ""


def program_settings() -> Settings:
    """Return the settings of this program for workers that are not forked."""
    return Settings.of_this_process(lambda value: _dump(value, None, {})[0])


def _user_parts_of(source: Source | TaskSource) -> list[object]:
    """Return what holds the user's functions."""
    if isinstance(source, TaskSource):
        return [source.map, source.collate, source.items]
    return [source.iterable if isinstance(source, LiveSource) else source.function]


def _can_send(shared: Handover | None, held: Mapping[int, tuple[str, str]], value: object) -> bool:
    """Return whether a part of a source can be sent, by trying."""
    try:
        _dump(value, None if shared is None else Handover(is_trial=True), held)
    except Exception:
        return False
    return True


class Payload(NamedTuple):
    """What a worker loads, first the program and then the source.

    Attributes:
        program: Pickle of the program.
        source: Pickle of the source and of `on_error`.
    """

    program: bytes
    source: bytes


def _dump(
    what: object, shared: Handover | None, held: Mapping[int, tuple[str, str]]
) -> tuple[bytes, _Pickler]:
    if shared is not None:
        # What another attempt has left.
        shared.close()
    file = io.BytesIO()
    keep = None if shared is None else shared.keep_large
    pickler = _Pickler(file, 5, keep, known={}, is_source=True, held=held)
    pickler.shared = shared
    with contextlib.nullcontext() if shared is None else shared.pickling():
        pickler.dump(what)
    return file.getvalue(), pickler


class _Pickler(Pickler):
    """A pickler of sources, with what they share with the workers.

    Attributes:
        shared: What shared objects are sent with; None: they cannot be sent.
    """

    shared: Handover | None = None

    def reducer_override(self, value: Any) -> Any:
        if self.shared is not None:
            reduced = self.shared.reduce(value)
            if reduced is not NotImplemented:
                return reduced
            torch = sys.modules.get("torch")
            # Large arrays lie in memory that all workers map.
            if torch is not None and type(value) is torch.Tensor:
                return reduce_tensor(value)
        return super().reducer_override(value)

    def can_send(self, value: object) -> bool:
        return _can_send(self.shared, {}, value)


def _why_not(
    source: Source | TaskSource, where: str, ways: str, can_send: Callable[[object], bool]
) -> str:
    """Return which part of a source cannot be pickled, and what to do."""
    advice = "pass a generator function that makes its own in the worker"
    if isinstance(source, LiveSource):
        kind = type(source.iterable).__name__
        return f"a running {kind} cannot be sent to {where}; {advice}, or use {ways}"
    if isinstance(source, TaskSource):
        advice = "open files and the like in map, in the worker"
        parts = {"map": source.map, "collate": source.collate}
        if source.is_sequence:
            parts["the sequence"] = source.items
    else:
        parts = {name_of(source.function): source.function}
    what, culprits = "something" if isinstance(source, TaskSource) else name_of(source.function), ""
    for part, value in parts.items():
        if not can_send(value):
            what, culprits = part, _culprits_in(part, value, can_send)
            break
    culprits = culprits or "something that it refers to"
    return (
        f"{what} cannot be sent to {where}: {culprits} cannot be pickled; {advice}, or use {ways}"
    )


def _culprits_in(name: str, value: Any, can_send: Callable[[object], bool]) -> str:
    """Return which of the parts of a value, or of what a function refers to, cannot be pickled."""
    if not callable(value):
        return _with_type(*find_culprit(name, value, _references, can_send))
    found = [(step, part) for step, part in _references(value) if not can_send(part)]
    named = [find_culprit(_first(step), part, _references, can_send) for step, part in found]
    return ", ".join(dict.fromkeys(_with_type(where, part) for where, part in named))


def _first(step: str) -> str:
    """Return a step as the first one of a path."""
    return step.removeprefix(": ") if step.startswith(": ") else f"the object{step}"


def _with_type(where: str, value: object) -> str:
    name = an(f"{type(value).__module__}.{type(value).__qualname__}")
    return f"{where} ({name})"


def _references(value: object) -> Iterator[tuple[str, object]]:
    """Yield what travels with a value: with a function what its code uses, else its parts."""
    if isinstance(value, MethodType):
        yield from _references(value.__func__)
        yield ": the object", value.__self__
    elif isinstance(value, FunctionType):
        yield from _used_by(value)
    elif isinstance(value, functools.partial):
        yield ": the function of the partial", value.func
        yield from ((f": its argument {at}", part) for at, part in enumerate(value.args))
        yield from ((f": its argument {name!r}", part) for name, part in value.keywords.items())
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _references(value.__func__)
    elif isinstance(value, type):
        for name, part in vars(value).items():
            if name[:2] != "__" or isinstance(part, FunctionType):
                yield f".{name}", part
    elif not type(value).__module__.startswith("multiprocessing."):
        yield from parts_of(value)
        yield f": its class {type(value).__qualname__}", type(value)


def _used_by(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield what the code of a function, and the code within it, refers to; then its defaults."""
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        # An empty cell raises ValueError.
        with contextlib.suppress(ValueError):
            yield f": the variable {name!r}", cell.cell_contents
    for name in dict.fromkeys(_names_in(function.__code__)):
        if name in function.__globals__:
            yield f": the global {name!r}", function.__globals__[name]
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield ": a default argument", default


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of the globals that code uses; `co_names` has attributes as well."""
    for inner in codes_in(code):
        for instruction in dis.get_instructions(inner):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield instruction.argval


# --- what is shared --------------------------------------------------------------------------

# multiprocessing pickles these by name, cloudpickle by value.
_BY_CLOUDPICKLE = {MethodType, type(list.append), type(int.__add__), functools.partial}
# Errors of this process, not of the object: there is no descriptor left.
_NO_ROOM = (errno.EMFILE, errno.ENFILE)

# In the errors of objects that only forked workers share; multiprocessing's has these words.
OF_FORK = "created in a fork context"

# The descriptors that this worker was given, while it loads its source.
_handed: list[int] = []


class Handed:
    """A descriptor on its way to a worker; multiprocessing calls `detach()` there.

    Args:
        place: Its place among the descriptors of the worker.
    """

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        """Return a new duplicate of the descriptor."""
        return os.dup(_handed[self._place])


class Handover:
    """Collects the descriptors of what is pickled, as multiprocessing's starting process does.

    Args:
        is_trial: Whether it is only tried if something can be pickled; nothing is duplicated.

    Attributes:
        buffers: Large buffers, which are no part of the pickle.
        descriptors: Duplicates of the descriptors, by their place.
        error: Error because of which one could not be duplicated.
    """

    # multiprocessing wants this name.
    DupFd: ClassVar[type[Handed]] = Handed

    def __init__(self, *, is_trial: bool = False) -> None:
        self.buffers: list[PickleBuffer] = []
        self.descriptors: list[Descriptor] = []
        self.error: OSError | None = None
        self._is_trial = is_trial
        # By number and file: the views of one tensor have the descriptor of their memory.
        self._places: dict[tuple[int, int, int], int] = {}
        table = ForkingPickler(io.BytesIO()).dispatch_table
        self._reducers: dict[type, Callable[[Any], Any]] = {
            kind: reduce
            for kind, reduce in table.items()
            if kind not in copyreg.dispatch_table and kind not in _BY_CLOUDPICKLE
        }

    @contextlib.contextmanager
    def pickling(self) -> Iterator[None]:
        """Let this thread pickle objects that multiprocessing shares with its children only."""
        spawning: Any = context
        before = spawning.get_spawning_popen()
        spawning.set_spawning_popen(self)
        try:
            yield
        finally:
            spawning.set_spawning_popen(before)

    def reduce(self, value: Any) -> Any:
        """Reduce an object that is shared, for pickle; return NotImplemented for any other."""
        kind = type(value)
        if kind.__module__ == "multiprocessing.synchronize":
            _check_context(value)
        reduce = self._reducers.get(kind)
        if reduce is None:
            return NotImplemented
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(
            value, (torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage)
        ):
            return self._reduce_tensor(value, torch, reduce)
        return reduce(value) if _is_shared(value) else NotImplemented

    def _reduce_tensor(self, value: Any, torch: Any, reduce: Callable[[Any], Any]) -> Any:
        """Reduce a tensor or a storage of torch if its memory is shared."""
        # torch raises for kinds of tensors that it does not share.
        try:
            # Pickle refuses a nested tensor that is transposed.
            is_nested = type(value) is torch.Tensor and value.is_nested
            if is_nested or _is_shared_tensor(value, torch):
                return reduce(value)
        except Exception:
            if self.error is not None:
                raise
        return NotImplemented

    def keep_large(self, buffer: PickleBuffer) -> bool:
        """Keep a buffer if it is large; return whether it is to be a part of the pickle."""
        is_part = self._is_trial or buffer.raw().nbytes < OUT_OF_BAND_BYTES
        if not is_part:
            self.buffers.append(buffer)
        return is_part

    def duplicate_for_child(self, fd: int) -> int:
        """Keep a duplicate of a descriptor; return its place. multiprocessing calls it."""
        if self._is_trial:
            return 0
        try:
            status = os.fstat(fd)
            key = fd, status.st_dev, status.st_ino
            if key not in self._places:
                descriptor = Descriptor(os.dup(fd))
                close_in_children(descriptor)
                self.descriptors.append(descriptor)
                self._places[key] = len(self.descriptors) - 1
        except OSError as error:
            if error.errno in _NO_ROOM:
                self.error = error
            raise
        return self._places[key]

    def close(self) -> None:
        """Close the duplicates, and forget what was kept."""
        for descriptor in self.descriptors:
            descriptor.close()
        self.descriptors.clear()
        self.buffers.clear()
        self._places.clear()


@contextlib.contextmanager
def handed(fds: Sequence[int]) -> Iterator[None]:
    """Load objects with these descriptors in a worker; they are closed afterwards."""
    _handed[:] = fds
    try:
        yield
    finally:
        _handed.clear()
        for fd in fds:
            os.close(fd)


def _check_context(value: Any) -> None:
    """Refuse a lock that has no name, as multiprocessing itself does since Python 3.11.5.

    A worker that is not forked would crash with it.
    """
    lock = getattr(value, "_semlock", None)
    if lock is not None and lock.name is None:
        raise RuntimeError(f"{type(value).__name__} was {OF_FORK}")


def _is_shared(value: Any) -> bool:
    """Return whether an object of multiprocessing is shared.

    It also registers the ctypes type of each shared value, of which other values are not shared.
    """
    ctypes = sys.modules.get("ctypes")
    if ctypes is None:
        return True
    kinds = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)
    return not isinstance(value, kinds) or hasattr(value, "_wrapper")


def _is_shared_tensor(value: Any, torch: Any) -> bool:
    if isinstance(value, torch.Tensor) and (
        value.layout is not torch.strided
        or value.is_quantized
        or value.is_conj()
        or value.is_neg()
        or (value.requires_grad and not value.is_leaf)
    ):
        return False
    # Methods of a typed storage warn that it is deprecated.
    value = getattr(value, "_untyped_storage", value)
    return bool(value.device.type == "cpu" and value.is_shared())
