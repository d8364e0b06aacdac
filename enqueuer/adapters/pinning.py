"""Pinned host memory, from which a GPU copies without the CPU.

    a tensor in a block of shared memory -> the block is registered with the driver, once
    any other tensor                     -> is copied into pinned memory

Registering takes about as long as copying, so it pays only for memory that is reused, as blocks
are. A registration ends when the block is unmapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from enqueuer.common.extras import framework
from enqueuer.transport.blocks import Mapping, mapping_at
from enqueuer.transport.item_codec import copy_in_thread

torch = framework("torch", "torch", "2.1")

# cudaHostRegisterPortable: memory is pinned for all GPUs of the process.
_PORTABLE = 1
# CU_STREAM_CAPTURE_MODE_RELAXED.
_RELAXED = 2
# cudaErrorStreamCaptureUnsupported and related errors.
_CAPTURE_ERRORS = range(900, 909)

_log = logging.getLogger("enqueuer")


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread register and allocate while another one captures a CUDA graph.

    By default CUDA forbids that, and both the call and the capture fail.
    """
    exchange, mode = capture_mode_exchanger(), ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.lru_cache
def capture_mode_exchanger() -> Callable[[Any], Any]:
    """Return the driver's function that sets the capture mode of the calling thread.

    The mode decides how the thread's calls affect captures of other threads.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        return driver.cuThreadExchangeStreamCaptureMode
    # ROCm has no such function, nor have drivers before 10.1.
    except (OSError, AttributeError):
        return lambda mode: None


class Cuda:
    """The driver of the GPUs, called by torch."""

    def __init__(self) -> None:
        # Device on which a block was registered, by the address of the block.
        self._devices: dict[int, int] = {}

    def register(self, address: int, size: int) -> int:
        """Pin existing memory; return 0, or the number of an error."""
        device = torch.cuda.current_device()
        code = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
        if code:
            # CUDA keeps the last error until it is read, as torch does after a kernel.
            with contextlib.suppress(RuntimeError):
                torch.empty(1, device="cuda").zero_()
        else:
            self._devices[address] = device
        return code

    def unregister(self, address: int) -> None:
        """End the pinning of memory."""
        # Without the device, a thread that uses no GPU would make a context on the first one.
        with torch.cuda.device(self._devices.pop(address)), beside_captures():
            torch.cuda.cudart().cudaHostUnregister(address)

    def is_pinned(self, tensor: Any) -> bool:
        """Return whether a tensor lies in pinned memory."""
        return bool(tensor.is_pinned())

    def empty(self, size: int) -> Any:
        """Return pinned memory of `size` bytes, as a tensor of uint8."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class Pins:
    """The blocks of this process that are pinned; any thread may call the methods.

    Args:
        driver: Cuda of the GPU.
    """

    def __init__(self, driver: Cuda) -> None:
        self.driver = driver
        self._lock = threading.Lock()
        self._registered: weakref.WeakSet[Mapping] = weakref.WeakSet()
        self._refused: weakref.WeakSet[Mapping] = weakref.WeakSet()
        self._has_warned = False

    @property
    def count(self) -> int:
        """Number of registered blocks."""
        return len(self._registered)

    def holds(self, tensor: Any) -> bool:
        """Return whether a GPU can copy from a tensor of the CPU without the CPU.

        The block of the tensor is registered first, if there is one.
        """
        if tensor.numel() == 0:
            return False
        block = mapping_at(tensor.data_ptr())
        if block is None:
            return self.driver.is_pinned(tensor)
        with self._lock:
            return block in self._registered or self._register_locked(block)

    def _register_locked(self, block: Mapping) -> bool:
        if block in self._refused:
            return False
        code = self.driver.register(block.address, len(block))
        if code:
            self._refuse_locked(block, code)
            return False
        end = functools.partial(_unregister, self.driver, block.address, os.getpid())
        block.before_unmap = [*block.before_unmap, end]
        self._registered.add(block)
        return True

    def _refuse_locked(self, block: Mapping, code: int) -> None:
        # A CUDA graph is being captured, which takes only a moment.
        if code in _CAPTURE_ERRORS:
            return
        self._refused.add(block)
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "a block of %.1f MB could not be registered with CUDA (error %d; is `ulimit -l` "
                "too low?): its batches are copied into pinned memory first",
                len(block) / 1e6,
                code,
            )


def _unregister(driver: Cuda, address: int, pid: int) -> None:
    # A forked process unmaps its copy, and has no CUDA.
    if os.getpid() == pid:
        driver.unregister(address)


class StagingPool:
    """Pinned buffers that are reused, for tensors that do not lie in a block.

    Args:
        driver: Cuda of the GPU.
    """

    def __init__(self, driver: Cuda) -> None:
        self.driver = driver
        # The buffer that was given back last is at the end.
        self._free: list[Any] = []

    def copy_of(self, tensor: Any) -> tuple[Any, Any]:
        """Return a dense copy of a tensor in a buffer of the pool, and the buffer."""
        # A tensor without memory has the strides of the copy.
        like = torch.empty_like(tensor, device="meta")
        size = tensor.numel() * tensor.element_size()
        buffer = self._take(max(1, size))
        copy = torch.as_strided(buffer[:size].view(tensor.dtype), like.size(), like.stride())
        copy_in_thread(copy, tensor)
        return copy, buffer

    def give_back(self, buffer: Any) -> None:
        """Take back a buffer whose copies are done."""
        self._free.append(buffer)
        del self._free[:-_MAX_FREE]

    def _take(self, size: int) -> Any:
        fitting = [b for b in self._free if size <= b.numel() <= 4 * size + _PAGE]
        if not fitting:
            return self.driver.empty(-(-size // _PAGE) * _PAGE)
        best = min(fitting, key=lambda buffer: buffer.numel())
        self._free = [buffer for buffer in self._free if buffer is not best]
        return best


def pinned_like(tensor: Any) -> Any:
    """Return pinned memory of torch for a tensor like this one."""
    return torch.empty_like(tensor, pin_memory=True)


_PAGE = 4096
_MAX_FREE = 64
PINS = Pins(Cuda())
