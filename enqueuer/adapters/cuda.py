"""Batches on the GPU before the loop asks for them.

    loader -> [a thread: pinned memory -> the GPU, on a stream of its own] -> event -> the loop

What keeps memory from being used too early or too late:

- The loop's stream waits for the event of a batch, not the loop.
- The copying stream waits for the stream that has made what is on the GPU already.
- The memory of a batch on the GPU belongs to the copying stream; it is recorded for the loop's
  stream, so that it is not used again before the loop's kernels that were queued are done.
- The host's memory is held until the event has come.
- A pinned buffer is used again only after that, too.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from enqueuer.adapters.loading import Ahead, mapped
from enqueuer.adapters.pinning import PINS, Cuda, Driver, Pins, StagingPool
from enqueuer.adapters.torch import as_tensors
from enqueuer.frameworks import framework

torch = framework("torch", "torch", "2.1")

__all__ = ["CudaDataLoader"]

_MOST_COPYING = 2  # batches whose copies are not known to be done: one runs, the next is queued


class CudaDataLoader(Ahead[Any]):
    """A loader whose batches are on the GPU already when the loop asks for them.

    A thread takes batches from `loader`, and copies their tensors and arrays to the GPU on a
    stream of its own, while the loop's kernels run. Tensors that lie in a block of shared memory,
    as large ones from worker processes do, are copied straight from there: the block is
    registered with CUDA once. Others go through pinned buffers, which are used again, unless
    they are pinned already.

    One iteration is one epoch, for which `loader` is iterated once. After a `break` it does what
    the loader does: an enqueuer goes on with the next batch, a DataLoader begins a new epoch.

    Args:
        loader: What gives batches: an enqueuer, a torch DataLoader, a list. Tensors and numpy
            arrays in nested dicts, tuples, lists and dataclasses are moved; what else there is
            (strings, numbers) stays what it is, and so do tensors that are there already. An
            enqueuer that does not run is started by the first iteration, and stopped when this is
            dropped, or by `stop()` or a `with` block.
        device: Where to: `"cuda"`, the default, `"cuda:1"`, a number, a `torch.device`. With
            `"cpu"` the same code runs without streams, for tests and machines without a GPU:
            tensors are copied, and the memory of the host is let go.
        queue_size: How many batches are kept ready on the GPU; 2 by default, which is enough to
            overlap steady work. The thread holds one more, and the loop its own.
        dtype: What tensors of floating-point numbers become, on the GPU; None, the default,
            leaves them. Half of the bytes are then computed there, and not sent.
        transform: Called with each batch when it is on the GPU, on the copying stream: to
            normalise images that came as bytes, for example. It returns a nest of the same
            kinds. None, the default: nothing.

    Raises:
        RuntimeError: torch finds no such device.
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range.

    Example:
        >>> import numpy as np
        >>> from enqueuer import GeneratorEnqueuer
        >>> def batches(shard):
        ...     for number in shard.split(range(2)):
        ...         yield {"x": np.full(2, number, "uint8"), "name": str(number)}
        >>> def normalise(batch):
        ...     return {**batch, "x": batch["x"].float() / 255}
        >>> for batch in CudaDataLoader(GeneratorEnqueuer(batches), "cpu", transform=normalise):
        ...     print(batch)
        {'x': tensor([0., 0.]), 'name': '0'}
        {'x': tensor([0.0039, 0.0039]), 'name': '1'}
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: Any = "cuda",
        queue_size: int = 2,
        *,
        dtype: Any = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype or None, got {dtype!r}")
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be a function of a batch or None, got {transform!r}")
        self._device = _device(device)
        transfer = _Transfer(self._device, dtype, transform)
        super().__init__(loader, transfer, queue_size, finish=transfer.finish)

    @property
    def dataset(self) -> Any:
        """The dataset of the loader."""
        return self._loader.dataset  # type: ignore[attr-defined]  # a DataLoader has one

    @property
    def sampler(self) -> Any:
        """The sampler of the loader."""
        return self._loader.sampler  # type: ignore[attr-defined]  # as above

    def _receive(self, changed: Any) -> Any:
        batch, event = changed
        self._device.hand_over(batch, event)
        return batch


class Event(Protocol):
    """A moment in a stream."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Device(Protocol):
    """Where batches go, and how."""

    device: Any
    pins: Pins
    driver: Driver

    def copying(self) -> AbstractContextManager[Any]:
        """Have what follows in this thread happen on the copying stream."""

    def follow(self) -> None:
        """Have the copying stream wait for what the thread had queued before, on its own."""

    def record(self) -> Event:
        """Return the moment at which all that was queued on the copying stream is done."""

    def hand_over(self, batch: Any, event: Event) -> None:
        """Have the stream of the calling thread wait for a batch, and use it."""


class CudaDevice:
    """A GPU, and the stream of one loader: a new one each epoch would strand its memory."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.pins = PINS
        self.driver: Driver = Cuda()
        self._stream = torch.cuda.Stream(device)
        self._before = self._stream  # what was current in the thread that copies

    def copying(self) -> AbstractContextManager[Any]:
        """See `Device`."""
        self._before = torch.cuda.current_stream(self.device)
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return stream

    def follow(self) -> None:
        """See `Device`."""
        self._stream.wait_stream(self._before)

    def record(self) -> Event:
        """See `Device`."""
        event: Event = self._stream.record_event()
        return event

    def hand_over(self, batch: Any, event: Event) -> None:
        """See `Device`."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)

        def record(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.device == self.device:
                leaf.record_stream(current)
            return leaf

        mapped(record, batch)


class _Now:
    """The event of what does not wait."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _NoDriver:
    """What a device without streams needs of a driver: nothing is pinned, and nothing need be."""

    def register(self, address: int, size: int) -> int:
        return 0

    def unregister(self, address: int) -> None:
        pass

    def is_pinned(self, tensor: Any) -> bool:
        return False

    def empty(self, size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8)


class PlainDevice:
    """The CPU, or another device, to which is copied there and then."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.driver: Driver = _NoDriver()
        self.pins = Pins(self.driver)

    def copying(self) -> AbstractContextManager[Any]:
        """See `Device`."""
        return contextlib.nullcontext()

    def follow(self) -> None:
        """See `Device`."""

    def record(self) -> Event:
        """See `Device`."""
        return _Now()

    def hand_over(self, batch: Any, event: Event) -> None:
        """See `Device`."""


def _device(device: Any) -> Device:
    chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if chosen.type != "cuda":
        return PlainDevice(chosen)
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"device={str(device)!r} was asked for, but torch finds no GPU (torch "
            f"{torch.__version__}); give device='cpu' to run without one"
        )
    if chosen.index is None:  # which one that is depends on the thread
        chosen = torch.device("cuda", torch.cuda.current_device())
    return CudaDevice(chosen)


class _Transfer:
    """What the thread does with a batch; returns it on the device, and when it will be there."""

    def __init__(self, device: Device, dtype: Any, transform: Callable[[Any], Any] | None) -> None:
        self._device = device
        self._dtype = dtype
        self._transform = transform
        self._pool = StagingPool(device.driver)
        self._copying: deque[tuple[Event, list[Any], list[Any]]] = deque()

    def __call__(self, batch: Any) -> tuple[Any, Event]:
        held: list[Any] = []
        buffers: list[Any] = []
        with self._device.copying():
            try:
                moved = mapped(lambda leaf: self._move(leaf, held, buffers), as_tensors(batch))
                if self._transform is not None:
                    moved = self._transform(moved)
            finally:  # copies that were queued go on, whatever is raised
                event = self._device.record()
                self._copying.append((event, held, buffers))
        self._let_go(_MOST_COPYING - 1)
        return moved, event

    def finish(self) -> None:
        """Wait for all copies."""
        self._let_go(0)

    def _move(self, leaf: Any, held: list[Any], buffers: list[Any]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        device = self._device.device
        if leaf.layout is not torch.strided or leaf.is_quantized or leaf.device.type != "cpu":
            if leaf.device == device and leaf.device.type != "cpu":
                # not for each batch: that stream is mostly the loop's, with the loop's kernels
                self._device.follow()
            held.append(leaf)
            moved = leaf.to(device, non_blocking=leaf.device.type != "cpu")
        else:
            source = leaf.detach()
            if not (_is_dense(source) and self._device.pins.holds(source)):
                source, buffer = self._pool.copy_of(source)
                buffers.append(buffer)
            held.append(source)
            moved = torch.empty_like(source, device=device)
            moved.copy_(source, non_blocking=True)
        if self._dtype is not None and moved.is_floating_point():
            moved = moved.to(self._dtype)
        return moved

    def _let_go(self, most: int) -> None:
        """Let go of the host's memory where copies are done; wait until at most `most` are not."""
        while self._copying and (len(self._copying) > most or self._copying[0][0].query()):
            event, held, buffers = self._copying.popleft()
            event.synchronize()
            held.clear()
            for buffer in buffers:
                self._pool.give_back(buffer)


def _is_dense(tensor: Any) -> bool:
    """Tell whether a tensor's elements lie side by side, in whatever order of dimensions."""
    return bool(torch.empty_like(tensor, device="meta").stride() == tensor.stride())
