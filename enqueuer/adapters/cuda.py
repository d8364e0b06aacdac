"""CUDA: batches on the GPU before the loop asks for them.

loader -> [a thread: pinned memory -> the GPU, on a stream of its own] -> event -> the loop

The loop's thread calls `transform` when it takes a batch, so random numbers are drawn in the
loop's order. Its kernels run on the copying stream.

These rules keep memory from being read too early, or reused too early:

- The loop's stream waits for the event of a batch; the loop itself does not wait.
- The copying stream waits for the stream that has made a tensor on the GPU.
- The GPU memory of a batch belongs to the copying stream. It is recorded for the loop's stream, so
  it is not reused before all kernels are done that the loop has queued.
- The host memory of a batch, and its pinned buffers, are held until the event has come.
- A copy begins when the GPU is done with the batch `queue_size + 2` before. Otherwise a loop that
  only queues kernels, and waits for none, would fill the GPU with batches.

The loop may capture a CUDA graph meanwhile. So the thread relaxes its capture mode, and its calls
do not end the capture.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from enqueuer.adapters.loading import Loader, PrefetchReader
from enqueuer.adapters.pinning import PINS, StagingPool, beside_captures
from enqueuer.adapters.ranks import Ranks, TrainerNames
from enqueuer.adapters.torch.loader import as_tensors
from enqueuer.common import checks
from enqueuer.common.extras import framework
from enqueuer.common.objects import tree_map
from enqueuer.enqueuers.enqueuer import BaseEnqueuer

__all__ = ["CudaDataLoader"]

torch = framework("torch", "torch", "2.1")

# Batches beside those in the queue: the thread holds one, and the loop another one.
_NOT_QUEUED = 2
# Batches whose copies may be unfinished: one runs, and the next is queued.
_MAX_COPYING = 2

# Classes whose instances can be copied as plain memory.
PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)


def is_plain(tensor: Any) -> bool:
    """Return whether a tensor is strided memory and nothing more, whatever its class."""
    return (
        tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested)
        and not hasattr(type(tensor), "__tensor_flatten__")
    )


def plain_parts(tensor: Any) -> Iterable[Any]:
    """Return plain tensors with the memory of a tensor; a stream can be recorded for them."""
    if is_plain(tensor):
        return (tensor,)
    # Such a tensor is made of other tensors.
    if hasattr(type(tensor), "__tensor_flatten__"):
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
    return itertools.chain.from_iterable(map(plain_parts, parts))


def moves_late(leaf: Any) -> bool:
    """Return whether an object has a method `to`, and none that records a stream."""
    kind = type(leaf)
    return (
        hasattr(kind, "to")
        and not isinstance(leaf, torch.Tensor)
        and not hasattr(kind, "record_stream")
    )


def moved_to(leaf: Any, device: Any) -> Any:
    """Return an object moved to a device by its method `to`."""
    moved = leaf.to(device)
    # Some objects move themselves, and return nothing.
    return leaf if moved is None else moved


def is_dense(tensor: Any) -> bool:
    """Return whether a tensor's elements lie side by side, in any order of dimensions."""
    return bool(torch.empty_like(tensor, device="meta").stride() == tensor.stride())


class Event(Protocol):
    """A moment in a stream, as `torch.cuda.Event`."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class CudaDevice:
    """A GPU and the copying stream of one loader.

    All epochs share the stream. With a new stream for each epoch, the memory of the old ones could
    not be reused.

    Attributes:
        device: The `torch.device`.
        overlaps: Whether copies go on after they were queued. If not, each is done at once.
        pins: Host memory that is pinned, from which the device copies by itself.
    """

    overlaps = True
    pins = PINS

    def __init__(self, device: Any) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Prepare the thread that copies, for as long as it runs."""
        # A new thread starts on the first GPU, and many calls would allocate memory there.
        torch.cuda.set_device(self.device)
        with beside_captures():
            yield

    @contextlib.contextmanager
    def copying(self) -> Iterator[Any]:
        """Make the copying stream this thread's current stream; give the stream before it."""
        before = torch.cuda.current_stream(self.device)
        # The device is set first: when the stream is left, torch sets the device of the stream
        # before, and so uses that device.
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield before

    def follow(self, stream: Any) -> None:
        """Let the copying stream wait for all work that was queued on another stream."""
        self._stream.wait_stream(stream)

    def record(self) -> Event:
        """Return the moment at which all work queued on the copying stream is done."""
        return _event_of(self._stream)

    def reached(self) -> Event:
        """Return the moment at which all work that the calling thread has queued is done."""
        return _event_of(torch.cuda.current_stream(self.device))

    def receive(self, batch: Any, event: Event) -> None:
        """Let the stream of the calling thread wait for a batch, and record that it uses it."""
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


class PlainDevice:
    """The CPU, or another device, to which each copy is done at once; see `CudaDevice`."""

    overlaps = False
    # Never asked, as only copies that overlap read pinned memory.
    pins = PINS

    def __init__(self, device: Any) -> None:
        self.device = device

    def running(self) -> AbstractContextManager[Any]:
        """See `CudaDevice`."""
        return contextlib.nullcontext()

    def copying(self) -> AbstractContextManager[Any]:
        """See `CudaDevice`."""
        return contextlib.nullcontext()

    def follow(self, stream: Any) -> None:
        """See `CudaDevice`."""

    def record(self) -> Event:
        """See `CudaDevice`."""
        return _Now()

    def reached(self) -> Event:
        """See `CudaDevice`."""
        return _Now()

    def receive(self, batch: Any, event: Event) -> None:
        """See `CudaDevice`."""


Device = CudaDevice | PlainDevice


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


@dataclass(frozen=True)
class Copied:
    """A batch on its way from the thread to the loop.

    Attributes:
        batch: The nest; objects that are not moved ahead are still on the host.
        event: Moment at which the copies are done.
        number: Number of the batch, over all epochs.
        is_moved: Whether the whole batch is on the device.
    """

    batch: Any
    event: Event
    number: int
    is_moved: bool


@dataclass
class _Copies:
    """The copies of one batch, and the host memory that they read.

    Attributes:
        device: Device that the batch is copied to.
        pool: Pinned buffers.
        dtype: Dtype of floating-point tensors there; None leaves them.
        before: Stream of the thread before it changed to the copying stream.
        is_whole: Whether the whole batch can be moved ahead of the loop.
        held: What the copies read, so that it lives until they are done.
        buffers: Pinned buffers that they read.
    """

    device: Device
    pool: StagingPool
    dtype: Any
    before: Any
    is_whole: bool = True
    held: list[Any] = field(default_factory=list)
    buffers: list[Any] = field(default_factory=list)

    def move(self, leaf: Any) -> Any:
        """Queue the copy of a leaf of the batch; return the leaf on the device."""
        if isinstance(leaf, torch.Tensor):
            moved = self._moved(leaf)
            if self.dtype is not None and moved.is_floating_point():
                moved = moved.to(self.dtype)
            return moved
        if hasattr(type(leaf), "record_stream"):
            self.held.append(leaf)
            return moved_to(leaf, self.device.device)
        if moves_late(leaf):
            self.is_whole = False
        return leaf

    def _moved(self, tensor: Any) -> Any:
        device, overlaps = self.device.device, self.device.overlaps
        if tensor.device.type != "cpu":
            if tensor.device == device:
                # Only for such tensors: that stream is mostly the loop's, and has its kernels.
                self.device.follow(self.before)
            self.held.append(tensor)
            return tensor.to(device, non_blocking=overlaps)
        if not is_plain(tensor) or type(tensor) not in PLAIN_CLASSES:
            self.held.append(tensor)
            return tensor.to(device, non_blocking=overlaps, copy=True)
        source = tensor.detach()
        if overlaps and not (is_dense(source) and self.device.pins.holds(source)):
            source, buffer = self.pool.copy_of(source)
            self.buffers.append(buffer)
        self.held.append(source)
        moved = torch.empty_like(source, device=device)
        moved.copy_(source, non_blocking=overlaps)
        return moved


class Transfer:
    """The steps of the thread with a batch, and of the loop when it takes the batch.

    Args:
        device: Device that batches are copied to.
        dtype: Dtype of floating-point tensors there; None leaves them.
        transform: As for `CudaDataLoader`.
        ahead: Number of batches that may be copied after the one that the GPU works on.
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
        self._pool = StagingPool(device.pins.driver)
        # Copies that were queued, and the moments at which they are done.
        self._copying: deque[tuple[Event, _Copies]] = deque()
        self._numbers = itertools.count()
        # Numbers of batches, and the moments at which the GPU is done with each.
        self._used: deque[tuple[int, Event]] = deque()

    # called by the thread
    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Prepare the thread; wait for all copies at the end."""
        with self._device.running():
            try:
                yield
            finally:
                self._release(0)

    # called by the thread
    def __call__(self, batch: Any) -> Copied:
        """Queue the copies of a batch."""
        number = next(self._numbers)
        self._wait_until_used(number - self._ahead)
        with self._device.copying() as before:
            copies = _Copies(self._device, self._pool, self._dtype, before)
            try:
                moved = tree_map(copies.move, as_tensors(batch))
            finally:
                # Copies that were queued before an exception read the host memory as well.
                event = self._device.record()
                self._copying.append((event, copies))
        self._release(_MAX_COPYING - 1)
        return Copied(moved, event, number, copies.is_whole)

    def _wait_until_used(self, number: int) -> None:
        """Wait until the GPU is done with a batch and all earlier ones."""
        while self._used and self._used[0][0] <= number:
            self._used.popleft()[1].synchronize()

    def _release(self, limit: int) -> None:
        """Release the host memory of finished copies; wait until at most `limit` are unfinished."""
        while self._copying and (len(self._copying) > limit or self._copying[0][0].query()):
            event, copies = self._copying.popleft()
            event.synchronize()
            for buffer in copies.buffers:
                self._pool.give_back(buffer)

    # called by the loop
    def receive(self, copied: Copied) -> Any:
        """Return a batch that the loop's stream may use."""
        device, batch, event = self._device, copied.batch, copied.event
        self._used.append((copied.number - 1, device.reached()))
        if not copied.is_moved:
            # The contents of other classes are unknown, so they are moved on the loop's stream.
            batch = tree_map(
                lambda leaf: moved_to(leaf, device.device) if moves_late(leaf) else leaf, batch
            )
        if self._transform is not None:
            with device.copying() as current:
                if not copied.is_moved:
                    device.follow(current)
                batch = self._transform(batch)
                event = device.record()
        device.receive(batch, event)
        return batch


@checks.suggests_options
class CudaDataLoader(TrainerNames, Loader[Any]):
    """A loader whose batches are on the GPU already when the loop asks for them.

    A thread takes batches from `loader` while the loop's kernels run. It copies their tensors and
    arrays to the GPU on a stream of its own. Large tensors from worker processes lie in
    blocks of shared memory. They are copied straight from there, as each block is registered with
    CUDA once. Other tensors are copied through reused pinned buffers, unless they are pinned.

    One iteration is one epoch, for which `loader` is iterated once. The thread ends with the
    epoch, so no batch of the next epoch is ready when that begins. After a `break` the next
    iteration is that of the loader: an enqueuer goes on with the next batch, a DataLoader begins
    a new epoch.

    Args:
        loader: Source of the batches: an enqueuer, a torch DataLoader, a list. Tensors and numpy
            arrays in nested mappings, tuples, lists and dataclasses are moved, and keep their
            class. Objects with a method `to` are moved by it: ahead of the loop if they also have
            `record_stream`, else when the loop takes the batch. Everything else (strings,
            numbers) is left as it is, and so are tensors that are on the device already. An
            enqueuer that does not run is started by the first iteration, and stopped when this is
            dropped, or by `stop()` or a `with` block.
        device: Target of the copies: `"cuda"`, the default, `"cuda:1"`, a number, or a
            `torch.device`. To any other kind of device, such as `"cpu"` or `"mps"`, the thread
            copies without a stream, and waits for each copy.
        queue_size: Number of batches that are kept ready on the GPU; 2 by default, which is
            enough to overlap steady work. The thread holds one more, and the loop its own.
            However many kernels the loop has queued, the GPU holds no more than `queue_size + 4`.
        dtype: Dtype that floating-point tensors get on the GPU; None, the default, leaves them.
            The GPU converts them, so `float16` that becomes `float32` is half the bytes to copy.
        transform: Function of a batch on the GPU, such as one that normalises images which came
            as bytes. The loop's thread calls it when it takes the batch, on the copying stream,
            so random numbers come in the order of the loop. It may return nested mappings,
            tuples, lists and dataclasses. None, the default: the batch is left as it is.
        steps_per_epoch: Number of batches in an epoch. None, the default: as many as `loader`
            gives. Give a number for a generator without an end.
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
        checks.function("transform", transform, "of a batch")
        ahead = checks.positive("queue_size", queue_size) + _NOT_QUEUED
        transfer = Transfer(device_of(device), dtype, transform, ahead)
        ranks = Ranks(rank, world_size)
        if isinstance(loader, BaseEnqueuer):
            loader = ranks.part_of(loader)
        elif ranks.is_explicit:
            raise TypeError(
                f"rank and world_size are for an enqueuer, and the loader is {loader!r}; give "
                "them to the loader that makes its batches"
            )
        reader = functools.partial(
            PrefetchReader, change=transfer, queue_size=queue_size, running=transfer.running
        )
        super().__init__(
            loader,
            steps_per_epoch,
            convert=transfer.receive,
            check=functools.partial(ranks.check, loader),
            reader=reader,
        )
