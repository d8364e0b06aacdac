"""Objects that a source shares with its workers: those of multiprocessing, and shared tensors.

    this process  a queue, lock, value, connection, shared tensor
                  --its own reducer, as for a Process--> `Handover`: duplicates of its descriptors
    the worker    Handed(place).detach() -> a descriptor of its own -> the object

A forked worker inherits these objects. For the others, multiprocessing pickles them only while it
starts a process of its own, so a `Handover` stands for such a process.
"""

from __future__ import annotations

import contextlib
import copyreg
import errno
import functools
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler
from types import MethodType
from typing import Any, ClassVar

from enqueuer.common.descriptors import Descriptor, close_in_children

# multiprocessing pickles these by name, cloudpickle by value.
_BY_CLOUDPICKLE = {MethodType, type(list.append), type(int.__add__), functools.partial}
# Errors of this process, not of the object: there is no descriptor left.
_NO_ROOM = (errno.EMFILE, errno.ENFILE)

# In the errors of objects that only forked workers share; multiprocessing's has these words.
OF_FORK = "created in a fork context"

# Attribute of the resource tracker, which multiprocessing sets in its own children.
_TRACKER_FD = "_fd"

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
        descriptors: Duplicates of the descriptors, by their place.
        error: Error because of which one could not be duplicated.
    """

    # multiprocessing wants this name.
    DupFd: ClassVar[type[Handed]] = Handed

    def __init__(self, *, is_trial: bool = False) -> None:
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

    def tracker(self) -> int | None:
        """Return the place of multiprocessing's resource tracker; None if none runs.

        A worker with a tracker of its own would unlink, at its end, all `SharedMemory` that it
        has opened.
        """
        module: Any = sys.modules.get("multiprocessing.resource_tracker")
        fd = None if module is None else getattr(module._resource_tracker, _TRACKER_FD)
        try:
            return None if fd is None else self.duplicate_for_child(fd)
        except OSError:
            # The program may have closed it.
            if self.error is not None:
                raise
            return None

    def close(self) -> None:
        """Close the duplicates."""
        for descriptor in self.descriptors:
            descriptor.close()
        self.descriptors.clear()


@contextlib.contextmanager
def handed(fds: Sequence[int], tracker: int | None) -> Iterator[None]:
    """Load objects with these descriptors in a worker; they are closed afterwards.

    Args:
        fds: The descriptors.
        tracker: Place of the resource tracker's, which the worker keeps; None: there is none.
    """
    _handed[:] = fds
    if tracker is not None:
        module: Any = importlib.import_module("multiprocessing.resource_tracker")
        setattr(module._resource_tracker, _TRACKER_FD, os.dup(fds[tracker]))
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
