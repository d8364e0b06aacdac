"""The copies of a batch: queued by a thread, taken by the loop.

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
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from enqueuer.adapters.cuda.device import Device, Event
from enqueuer.adapters.cuda.tensors import PLAIN_CLASSES, is_dense, is_plain, moved_to, moves_late
from enqueuer.adapters.pinning import StagingPool
from enqueuer.adapters.torch.loader import as_tensors
from enqueuer.common.extras import framework
from enqueuer.common.trees import tree_map

torch = framework("torch", "torch", "2.1")

# Batches whose copies may be unfinished: one runs, and the next is queued.
_MOST_COPYING = 2


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


class _Copies:
    """The copies of one batch, and the host memory that they read.

    Args:
        device: Device that the batch is copied to.
        pool: Pinned buffers.
        dtype: Dtype of floating-point tensors there; None leaves them.
        before: Stream of the thread before it changed to the copying stream.

    Attributes:
        is_whole: Whether the whole batch can be moved ahead of the loop.
    """

    def __init__(self, device: Device, pool: StagingPool, dtype: Any, before: Any) -> None:
        self.is_whole = True
        self._device = device
        self._pool = pool
        self._dtype = dtype
        self._before = before
        self._held: list[Any] = []
        self._buffers: list[Any] = []
        self._event: Event | None = None

    def move(self, leaf: Any) -> Any:
        """Queue the copy of a leaf of the batch; return the leaf on the device."""
        if isinstance(leaf, torch.Tensor):
            moved = self._moved(leaf)
            if self._dtype is not None and moved.is_floating_point():
                moved = moved.to(self._dtype)
            return moved
        if hasattr(type(leaf), "record_stream"):
            self._held.append(leaf)
            return moved_to(leaf, self._device.device)
        if moves_late(leaf):
            self.is_whole = False
        return leaf

    def _moved(self, tensor: Any) -> Any:
        device, overlaps = self._device.device, self._device.overlaps
        if tensor.device.type != "cpu":
            if tensor.device == device:
                # Only for such tensors: that stream is mostly the loop's, and has its kernels.
                self._device.follow(self._before)
            self._held.append(tensor)
            return tensor.to(device, non_blocking=overlaps)
        if not is_plain(tensor) or type(tensor) not in PLAIN_CLASSES:
            self._held.append(tensor)
            return tensor.to(device, non_blocking=overlaps, copy=True)
        source = tensor.detach()
        if overlaps and not (is_dense(source) and self._device.pins.holds(source)):
            source, buffer = self._pool.copy_of(source)
            self._buffers.append(buffer)
        self._held.append(source)
        moved = torch.empty_like(source, device=device)
        moved.copy_(source, non_blocking=overlaps)
        return moved

    def end(self) -> Event:
        """Return the moment at which all copies are done; none is queued after this."""
        self._event = event = self._device.record()
        return event

    def are_done(self) -> bool:
        """Return whether all copies are done."""
        return self._event is not None and self._event.query()

    def release(self) -> None:
        """Wait for the copies, and release the host memory."""
        if self._event is not None:
            self._event.synchronize()
        self._held.clear()
        for buffer in self._buffers:
            self._pool.give_back(buffer)


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
        self._pool = StagingPool(device.driver)
        self._copying: deque[_Copies] = deque()
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
                event = copies.end()
                self._copying.append(copies)
        self._release(_MOST_COPYING - 1)
        return Copied(moved, event, number, copies.is_whole)

    def _wait_until_used(self, number: int) -> None:
        """Wait until the GPU is done with a batch and all earlier ones."""
        while self._used and self._used[0][0] <= number:
            self._used.popleft()[1].synchronize()

    def _release(self, most: int) -> None:
        """Release the host memory of finished copies; wait until at most `most` are unfinished."""
        while self._copying and (len(self._copying) > most or self._copying[0].are_done()):
            self._copying.popleft().release()

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
