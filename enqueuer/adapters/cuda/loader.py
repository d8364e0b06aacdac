"""The loader whose batches are on the GPU before the loop asks for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from enqueuer.adapters.cuda.device import device_of
from enqueuer.adapters.cuda.transfer import Transfer
from enqueuer.adapters.prefetching import PrefetchLoader
from enqueuer.adapters.ranks import Ranks
from enqueuer.adapters.trainer_names import TrainerNames
from enqueuer.common import checks
from enqueuer.common.extras import framework
from enqueuer.enqueuers.enqueuer import BaseEnqueuer

torch = framework("torch", "torch", "2.1")

# Batches beside those in the queue: the thread holds one, and the loop another one.
_NOT_QUEUED = 2


class CudaDataLoader(TrainerNames, PrefetchLoader[Any]):
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
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be a function of a batch or None, got {transform!r}")
        ahead = checks.positive("queue_size", queue_size) + _NOT_QUEUED
        transfer = Transfer(device_of(device), dtype, transform, ahead)
        ranks = Ranks(rank, world_size)
        if isinstance(loader, BaseEnqueuer):
            loader = ranks.part_of(loader)
        elif ranks.is_given:
            raise TypeError(
                f"rank and world_size are for an enqueuer, and the loader is {loader!r}; give "
                "them to the loader that makes its batches"
            )
        super().__init__(
            loader,
            transfer,
            queue_size,
            steps_per_epoch,
            transfer.running,
            receive=transfer.receive,
            check=functools.partial(ranks.check, loader),
        )
