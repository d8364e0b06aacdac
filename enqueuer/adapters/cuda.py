"""Batches on the GPU before the loop asks for them.

    loader -> [a thread: pinned memory -> the GPU, on a stream of its own] -> event -> the loop

The loop's thread calls `transform` when it takes a batch, so random numbers are drawn in the
loop's order. Its kernels run on the copying stream.

What keeps memory from being used too early or too late:

- The loop's stream waits for the event of a batch, not the loop.
- The copying stream waits for the stream that has made what is on the GPU already.
- The memory of a batch on the GPU belongs to the copying stream; it is recorded for the loop's
  stream, so that it is not used again before the loop's kernels that were queued are done.
- The host's memory is held until the event has come.
- A pinned buffer is used again only after that, too.
- A copy begins when the GPU is done with the batch `queue_size + 2` before. Otherwise a loop that
  only queues kernels, and waits for none, would fill the GPU with batches.

A CUDA graph may be captured meanwhile: the thread tells CUDA that its calls are not of a capture.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from enqueuer import arguments
from enqueuer.adapters.loading import PrefetchLoader, tree_map
from enqueuer.adapters.pinning import PINS, Cuda, Driver, Pins, StagingPool, beside_captures
from enqueuer.adapters.ranks import Ranks
from enqueuer.adapters.torch.loader import as_tensors
from enqueuer.base import BaseEnqueuer
from enqueuer.frameworks import framework

torch = framework("torch", "torch", "2.1")

__all__ = ["CudaDataLoader"]

_MOST_COPYING = 2  # batches whose copies are not known to be done: one runs, the next is queued
_NOT_QUEUED = 2  # batches beside those in the queue: one in the thread's hand, one in the loop's


class CudaDataLoader(PrefetchLoader[Any]):
    """A loader whose batches are on the GPU already when the loop asks for them.

    A thread takes batches from `loader`, and copies their tensors and arrays to the GPU on a
    stream of its own, while the loop's kernels run. Tensors that lie in a block of shared memory,
    as large ones from worker processes do, are copied straight from there: the block is
    registered with CUDA once. Others go through pinned buffers, which are used again, unless
    they are pinned already.

    One iteration is one epoch, for which `loader` is iterated once. The thread ends with the
    epoch, so the next one begins with empty hands. After a `break` it does what
    the loader does: an enqueuer goes on with the next batch, a DataLoader begins a new epoch.

    Args:
        loader: What gives batches: an enqueuer, a torch DataLoader, a list. Tensors and numpy
            arrays in nested mappings, tuples, lists and dataclasses are moved, and keep their
            class. So are objects with a method `to`, by that: ahead of the loop if they have
            `record_stream`, too, and otherwise when the loop takes the batch. Everything else
            (strings, numbers) stays what it is, and so do tensors that are there already. An
            enqueuer that does not run is started by the first iteration, and stopped when this is
            dropped, or by `stop()` or a `with` block.
        device: Where to: `"cuda"`, the default, `"cuda:1"`, a number, a `torch.device`. To any
            other kind of device, such as `"cpu"` or `"mps"`, the thread copies without a stream,
            and waits for each copy.
        queue_size: How many batches are kept ready on the GPU; 2 by default, which is enough to
            overlap steady work. The thread holds one more, and the loop its own. However many
            kernels the loop has queued, the GPU holds no more than `queue_size + 4`.
        dtype: What tensors of floating-point numbers become, on the GPU; None, the default,
            leaves them. Half of the bytes are then computed there, and not sent.
        transform: Called with each batch on the GPU when the loop takes it: to normalise images
            that came as bytes, for example. The loop's thread calls it, on the copying stream,
            so random numbers come in the order of the loop. It returns a nest of the same kinds.
            None, the default: nothing.
        steps_per_epoch: How many batches an epoch has. None, the default: as many as `loader`
            gives. A number serves a generator without an end.
        rank: Rank of this process among those that train together, for an enqueuer. By default
            that of `torch.distributed`, as for `TorchLoader`.
        world_size: Number of ranks; goes with `rank`.

    Raises:
        RuntimeError: torch finds no such device.
        InvalidState: As for `TorchLoader`.
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
        steps_per_epoch: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype or None, got {dtype!r}")
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be a function of a batch or None, got {transform!r}")
        ahead = arguments.positive("queue_size", queue_size) + _NOT_QUEUED
        self._transfer = _Transfer(_device(device), dtype, transform, ahead)
        self._ranks = Ranks(rank, world_size)
        if isinstance(loader, BaseEnqueuer):
            loader = self._ranks.part_of(loader)
        elif self._ranks.is_given:
            raise TypeError(
                f"rank and world_size are for an enqueuer, and the loader is {loader!r}; give "
                "them to what makes its batches"
            )
        transfer = self._transfer
        super().__init__(loader, transfer, queue_size, steps_per_epoch, transfer.running)

    @property
    def dataset(self) -> Any:
        """The dataset of the loader."""
        return self._loader.dataset  # type: ignore[attr-defined]  # a DataLoader has one

    @property
    def sampler(self) -> Any:
        """The sampler of the loader."""
        return self._loader.sampler  # type: ignore[attr-defined]  # as above

    def _start(self) -> None:
        self._ranks.check(self._loader)
        super()._start()

    def _receive(self, changed: Any) -> Any:
        return self._transfer.receive(changed)


class Event(Protocol):
    """A moment in a stream."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Device(Protocol):
    """Where batches go, and how.

    Attributes:
        device: torch's.
        overlaps: Whether copies go on after they were queued, or are done there and then.
        pins: Which memory of the host the device copies from by itself.
        driver: Pins memory.
    """

    device: Any
    overlaps: bool
    pins: Pins
    driver: Driver

    def running(self) -> AbstractContextManager[Any]:
        """Prepare the thread that copies, for as long as it runs."""

    def copying(self) -> AbstractContextManager[Any]:
        """Have what follows in this thread happen on the copying stream; give the one before."""

    def follow(self, stream: Any) -> None:
        """Have the copying stream wait for all that was queued on another one."""

    def record(self) -> Event:
        """Return the moment at which all that was queued on the copying stream is done."""

    def reached(self) -> Event:
        """Return the moment at which all that the calling thread has queued is done."""

    def hand_over(self, batch: Any, event: Event) -> None:
        """Have the stream of the calling thread wait for a batch, and use it."""


class CudaDevice:
    """A GPU, and the stream of one loader: a new one each epoch would strand its memory."""

    overlaps = True

    def __init__(self, device: Any) -> None:
        self.device = device
        self.pins = PINS
        self.driver: Driver = Cuda()
        self._stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """See `Device`."""
        # A new thread is on the first GPU, and many calls give memory there to who makes them.
        torch.cuda.set_device(self.device)
        with beside_captures():
            yield

    @contextlib.contextmanager
    def copying(self) -> Iterator[Any]:
        """See `Device`."""
        before = torch.cuda.current_stream(self.device)
        # The device first: at its end, a stream sets the device of the one before, and so uses it.
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

    def hand_over(self, batch: Any, event: Event) -> None:
        """See `Device`."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)

        def record(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                for plain in _plain_parts(leaf):
                    if plain.device == self.device:
                        plain.record_stream(current)
            elif hasattr(type(leaf), "record_stream"):
                leaf.record_stream(current)
            return leaf

        tree_map(record, batch)


def _event_of(stream: Any) -> Event:
    event: Event = torch.cuda.Event(blocking=True)  # else who waits for it keeps a CPU busy
    stream.record_event(event)
    return event


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


@dataclass(frozen=True)
class _Copied:
    """A batch on its way from the thread to the loop.

    Attributes:
        batch: The nest; what is not moved ahead is still on the host.
        event: When the copies are done.
        number: Of the batch, over all epochs.
        is_moved: Whether the whole batch is on the device.
    """

    batch: Any
    event: Event
    number: int
    is_moved: bool


class _Transfer:
    """What the thread does with a batch, and what the loop does when it takes it.

    Args:
        device: Where batches go.
        dtype: Of floating-point numbers there; None leaves them.
        transform: As for `CudaDataLoader`.
        ahead: How many batches after the one that the GPU works at may be copied.
    """

    def __init__(
        self,
        device: Device,
        dtype: Any,
        transform: Callable[[Any], Any] | None,
        ahead: int,
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._transform = transform
        self._ahead = ahead
        self._pool = StagingPool(device.driver)
        self._copying: deque[tuple[Event, list[Any], list[Any]]] = deque()
        self._numbers = itertools.count()
        self._used: deque[tuple[int, Event]] = deque()  # when the loop was done with a batch

    # called by the thread
    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Prepare the thread; wait for all copies at the end."""
        with self._device.running():
            try:
                yield
            finally:
                self._let_go(0)

    # called by the thread
    def __call__(self, batch: Any) -> _Copied:
        """Queue the copies of a batch."""
        number = next(self._numbers)
        self._wait_until_used(number - self._ahead)
        held: list[Any] = []
        buffers: list[Any] = []
        late: list[Any] = []
        with self._device.copying() as before:

            def move(leaf: Any) -> Any:
                if isinstance(leaf, torch.Tensor):
                    return self._move(leaf, before, held, buffers)
                if hasattr(type(leaf), "record_stream"):
                    held.append(leaf)
                    return _moved(leaf, self._device.device)
                if _is_late(leaf):
                    late.append(leaf)
                return leaf

            try:
                moved = tree_map(move, as_tensors(batch))
            finally:  # copies that were queued go on, whatever is raised
                event = self._device.record()
                self._copying.append((event, held, buffers))
        self._let_go(_MOST_COPYING - 1)
        return _Copied(moved, event, number, not late)

    # called by the loop
    def receive(self, copied: _Copied) -> Any:
        """Return a batch that the loop's stream may use."""
        device, batch, event = self._device, copied.batch, copied.event
        self._used.append((copied.number - 1, device.reached()))
        if not copied.is_moved:
            # What other classes hold is not known, so it is made on the loop's own stream.
            batch = tree_map(
                lambda leaf: _moved(leaf, device.device) if _is_late(leaf) else leaf, batch
            )
        if self._transform is not None:
            with device.copying() as current:
                if not copied.is_moved:
                    device.follow(current)
                batch = self._transform(batch)
                event = device.record()
        device.hand_over(batch, event)
        return batch

    def _wait_until_used(self, number: int) -> None:
        """Wait until the GPU is done with a batch, and with all before."""
        while self._used and self._used[0][0] <= number:
            self._used.popleft()[1].synchronize()

    def _move(self, leaf: Any, before: Any, held: list[Any], buffers: list[Any]) -> Any:
        device, overlaps = self._device.device, self._device.overlaps
        if leaf.device.type != "cpu":
            if leaf.device == device:
                # not for each batch: that stream is mostly the loop's, with the loop's kernels
                self._device.follow(before)
            held.append(leaf)
            moved = leaf.to(device, non_blocking=overlaps)
        elif not _is_plain(leaf) or type(leaf) not in _PLAIN:
            held.append(leaf)
            moved = leaf.to(device, non_blocking=overlaps, copy=True)
        else:
            source = leaf.detach()
            if overlaps and not (_is_dense(source) and self._device.pins.holds(source)):
                source, buffer = self._pool.copy_of(source)
                buffers.append(buffer)
            held.append(source)
            moved = torch.empty_like(source, device=device)
            moved.copy_(source, non_blocking=overlaps)
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


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_plain(tensor: Any) -> bool:
    """Tell whether a tensor is strided memory and nothing more; it may be of another class."""
    return (
        tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested)
        and not hasattr(type(tensor), "__tensor_flatten__")
    )


def _plain_parts(tensor: Any) -> Iterable[Any]:
    """Return plain tensors that have the memory of a tensor, of which a stream can be told."""
    if _is_plain(tensor):
        return (tensor,)
    if hasattr(type(tensor), "__tensor_flatten__"):  # it is made of others
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        plain = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return (plain.set_(tensor.untyped_storage()),)
    return itertools.chain.from_iterable(map(_plain_parts, parts))


def _is_late(leaf: Any) -> bool:
    """Tell whether an object moves itself, and knows nothing of streams."""
    kind = type(leaf)
    return (
        hasattr(kind, "to")
        and not isinstance(leaf, torch.Tensor)
        and not hasattr(kind, "record_stream")
    )


def _moved(leaf: Any, device: Any) -> Any:
    moved = leaf.to(device)
    return leaf if moved is None else moved  # some move themselves, and return nothing


def _is_dense(tensor: Any) -> bool:
    """Tell whether a tensor's elements lie side by side, in whatever order of dimensions."""
    return bool(torch.empty_like(tensor, device="meta").stride() == tensor.stride())
