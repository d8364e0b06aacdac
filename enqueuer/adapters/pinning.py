"""Pinned host memory, from which a GPU copies by itself while the loop goes on.

    a tensor in a block of shared memory -> the block is registered with the driver, once
    any other tensor                     -> is copied into pinned memory

Registering takes about as long as copying, so it pays for what is used again and again, as
blocks are. It ends when the block is unmapped.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from typing import Any, Protocol

from enqueuer.frameworks import framework
from enqueuer.transport.blocks import Mapping, mapping_at

torch = framework("torch", "torch", "2.1")

_PORTABLE = 1  # cudaHostRegisterPortable: for all GPUs of the process

_log = logging.getLogger("enqueuer")


class Driver(Protocol):
    """What of CUDA is needed here."""

    def register(self, address: int, size: int) -> int:
        """Pin memory that is there; return 0, or the number of an error."""

    def unregister(self, address: int) -> None:
        """End that."""

    def is_pinned(self, tensor: Any) -> bool:
        """Return whether a tensor lies in pinned memory."""

    def empty(self, size: int) -> Any:
        """Return pinned memory of `size` bytes, as a tensor of uint8."""


class Cuda:
    """The driver of the GPUs, by torch."""

    def __init__(self) -> None:
        self._devices: dict[int, int] = {}  # on which a block was registered, by its address

    def register(self, address: int, size: int) -> int:
        """See `Driver`."""
        device = torch.cuda.current_device()
        code = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
        if code:
            # CUDA keeps the last error until it is asked for it, as torch does after a kernel
            with contextlib.suppress(RuntimeError):
                torch.empty(1, device="cuda").zero_()
        else:
            self._devices[address] = device
        return code

    def unregister(self, address: int) -> None:
        """See `Driver`."""
        # on that device, or a thread that uses no GPU would make itself known to the first one
        with torch.cuda.device(self._devices.pop(address)):
            torch.cuda.cudart().cudaHostUnregister(address)

    def is_pinned(self, tensor: Any) -> bool:
        """See `Driver`."""
        return bool(tensor.is_pinned())

    def empty(self, size: int) -> Any:
        """See `Driver`."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class Pins:
    """Which blocks of this process are pinned; any thread may ask.

    Args:
        driver: Of the GPU.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._registered: weakref.WeakSet[Mapping] = weakref.WeakSet()
        self._refused = False

    def holds(self, tensor: Any) -> bool:
        """Return whether a GPU can copy from a tensor of the CPU by itself.

        Its block is registered if it lies in one and is not yet.
        """
        if tensor.numel() == 0:
            return False
        block = mapping_at(tensor.data_ptr())
        if block is None:
            return self._driver.is_pinned(tensor)
        with self._lock:
            return block in self._registered or self._register_locked(block)

    def _register_locked(self, block: Mapping) -> bool:
        if self._refused:
            return False
        code = self._driver.register(block.address, len(block))
        if code:
            self._refused = True
            _log.warning(
                "a block of %.1f MB could not be registered with CUDA (error %d; is `ulimit -l` "
                "too low?): batches are copied into pinned memory first",
                len(block) / 1e6,
                code,
            )
            return False
        end = functools.partial(_unregister, self._driver, block.address, os.getpid())
        block.before_unmap = [*block.before_unmap, end]
        self._registered.add(block)
        return True


def _unregister(driver: Driver, address: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked process unmaps its copy, and has no CUDA
        driver.unregister(address)


class StagingPool:
    """Pinned buffers that are used again and again, for what does not lie in a block.

    Args:
        driver: Of the GPU.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._free: list[Any] = []  # the one given back last at the end

    def copy_of(self, tensor: Any) -> tuple[Any, Any]:
        """Return a dense copy of a tensor in a buffer of the pool, and the buffer."""
        like = torch.empty_like(tensor, device="meta")  # says how it lies in memory
        size = tensor.numel() * tensor.element_size()
        buffer = self._take(max(1, size))
        copy = torch.as_strided(buffer[:size].view(tensor.dtype), like.size(), like.stride())
        copy.copy_(tensor)
        return copy, buffer

    def give_back(self, buffer: Any) -> None:
        """Take a buffer back from which nobody copies any more."""
        self._free.append(buffer)
        del self._free[:-_MOST_FREE]

    def _take(self, size: int) -> Any:
        fitting = [b for b in self._free if size <= b.numel() <= 4 * size + _PAGE]
        if not fitting:
            return self._driver.empty(-(-size // _PAGE) * _PAGE)
        best = min(fitting, key=lambda buffer: buffer.numel())
        self._free = [buffer for buffer in self._free if buffer is not best]
        return best


def pinned_like(tensor: Any) -> Any:
    """Return pinned memory of torch's for a tensor like this one."""
    return torch.empty_like(tensor, pin_memory=True)


_PAGE = 4096
_MOST_FREE = 64
PINS = Pins(Cuda())
