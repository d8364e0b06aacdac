"""The device that batches are copied to, with its streams and events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from enqueuer.adapters.cuda.tensors import plain_parts
from enqueuer.adapters.pinning import PINS, Cuda, Driver, Pins, beside_captures
from enqueuer.common.extras import framework
from enqueuer.common.trees import tree_map

torch = framework("torch", "torch", "2.1")


class Event(Protocol):
    """A moment in a stream, as `torch.cuda.Event`."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Device(Protocol):
    """The device that batches are copied to, and its streams.

    Attributes:
        device: The `torch.device`.
        overlaps: Whether copies go on after they were queued. If not, each is done at once.
        pins: Host memory that is pinned, from which the device copies by itself.
        driver: Driver that pins memory.
    """

    device: Any
    overlaps: bool
    pins: Pins
    driver: Driver

    def running(self) -> AbstractContextManager[Any]:
        """Prepare the thread that copies, for as long as it runs."""

    def copying(self) -> AbstractContextManager[Any]:
        """Make the copying stream this thread's current stream; give the stream before it."""

    def follow(self, stream: Any) -> None:
        """Let the copying stream wait for all work that was queued on another stream."""

    def record(self) -> Event:
        """Return the moment at which all work queued on the copying stream is done."""

    def reached(self) -> Event:
        """Return the moment at which all work that the calling thread has queued is done."""

    def receive(self, batch: Any, event: Event) -> None:
        """Let the stream of the calling thread wait for a batch, and record that it uses it."""


class CudaDevice:
    """A GPU and the copying stream of one loader.

    All epochs share the stream. With a new stream for each epoch, the memory of the old ones could
    not be reused.
    """

    overlaps = True

    def __init__(self, device: Any) -> None:
        self.device = device
        self.pins = PINS
        self.driver: Driver = Cuda()
        self._stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """See `Device`."""
        # A new thread starts on the first GPU, and many calls would allocate memory there.
        torch.cuda.set_device(self.device)
        with beside_captures():
            yield

    @contextlib.contextmanager
    def copying(self) -> Iterator[Any]:
        """See `Device`."""
        before = torch.cuda.current_stream(self.device)
        # The device is set first: when the stream is left, torch sets the device of the stream
        # before, and so uses that device.
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield before

    def follow(self, stream: Any) -> None:
        """See `Device`."""
        self._stream.wait_stream(stream)

    def record(self) -> Event:
        """See `Device`."""
        return _event_of(self._stream)

    def reached(self) -> Event:
        """See `Device`."""
        return _event_of(torch.cuda.current_stream(self.device))

    def receive(self, batch: Any, event: Event) -> None:
        """See `Device`."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)

        def record(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                for plain in plain_parts(leaf):
                    if plain.device == self.device:
                        plain.record_stream(current)
            elif hasattr(type(leaf), "record_stream"):
                leaf.record_stream(current)
            return leaf

        tree_map(record, batch)


def _event_of(stream: Any) -> Event:
    # Without `blocking` a wait for the event keeps a CPU busy.
    event: Event = torch.cuda.Event(blocking=True)
    stream.record_event(event)
    return event


class _Now:
    """The event of a copy that was done at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class _NoDriver:
    """The driver of a device without streams: it pins nothing."""

    def register(self, address: int, size: int) -> int:
        return 0

    def unregister(self, address: int) -> None:
        pass

    def is_pinned(self, tensor: Any) -> bool:
        return False

    def empty(self, size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8)


class PlainDevice:
    """The CPU, or another device, to which each copy is done at once."""

    overlaps = False

    def __init__(self, device: Any) -> None:
        self.device = device
        self.driver: Driver = _NoDriver()
        self.pins = Pins(self.driver)

    def running(self) -> AbstractContextManager[Any]:
        """See `Device`."""
        return contextlib.nullcontext()

    def copying(self) -> AbstractContextManager[Any]:
        """See `Device`."""
        return contextlib.nullcontext()

    def follow(self, stream: Any) -> None:
        """See `Device`."""

    def record(self) -> Event:
        """See `Device`."""
        return _Now()

    def reached(self) -> Event:
        """See `Device`."""
        return _Now()

    def receive(self, batch: Any, event: Event) -> None:
        """See `Device`."""


def device_of(device: Any) -> Device:
    """Return the device for an argument.

    Raises:
        RuntimeError: torch finds no such device.
    """
    chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if chosen.type != "cuda":
        return PlainDevice(chosen)
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"device={str(device)!r} was asked for, but torch finds no GPU (torch "
            f"{torch.__version__}); give device='cpu' to run without one"
        )
    # Each thread has a current GPU of its own.
    if chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return CudaDevice(chosen)
