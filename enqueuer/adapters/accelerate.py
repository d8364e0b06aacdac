"""Hugging Face accelerate: a DataLoader whose workers stay those of an enqueuer."""

from __future__ import annotations

import warnings
from typing import Any

from enqueuer.adapters.torch import DataLoader
from enqueuer.adapters.torch.position import ranks_of
from enqueuer.common.extras import framework
from enqueuer.errors import EnqueuerWarning

torch = framework("torch", "accelerate", "2.1")
framework("accelerate", "accelerate", "1.0")


def prepare_data_loader(accelerator: Any, loader: DataLoader) -> Any:
    """Prepare a DataLoader as `accelerator.prepare` does, and keep the enqueuer's workers.

    `accelerator.prepare` makes a new DataLoader of torch's own class, whose batches are right, but
    whose workers are torch's. This function puts the enqueuer's workers back. Ranks share the
    batches, tensors go to the device, and gradient accumulation knows the end of an epoch, all by
    accelerate's own code. `accelerator.save_state()` also saves the position of the loader, and
    `load_state()` continues with the very next batch.

    Args:
        accelerator: An `accelerate.Accelerator`.
        loader: `DataLoader` of `enqueuer.adapters.torch`.

    Returns:
        accelerate's loader. It has `state_dict` and `load_state_dict`.

    Raises:
        TypeError: `loader` is another object.
        ValueError: The accelerator dispatches batches from one process to the others; then the
            workers of the other processes would do nothing.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"prepare_data_loader() takes a DataLoader of enqueuer.adapters.torch, not a "
            f"{type(loader).__name__}; pass other loaders to accelerator.prepare()"
        )
    ranks = ranks_of(loader)
    if ranks is not None and ranks[1] > 1 and accelerator.num_processes > 1:
        warnings.warn(
            f"the sampler of this DataLoader has rank {ranks[0]} of {ranks[1]}, and accelerate "
            f"divides its batches once more among {accelerator.num_processes} processes, so most "
            "samples are never used; give shuffle=True, or a sampler without ranks",
            EnqueuerWarning,
            stacklevel=2,
        )
    prepared = accelerator.prepare_data_loader(loader)
    if hasattr(prepared, "split_batches"):
        raise ValueError(
            "this accelerator dispatches the batches of one process to the others; "
            "create it with DataLoaderConfiguration(dispatch_batches=False)"
        )
    base = prepared.base_dataloader
    ours = loader.rebuilt(base.dataset, **_order_of(base))
    prepared.base_dataloader = ours
    # So accelerate saves and loads the position of the loader.
    prepared.use_stateful_dataloader = True
    prepared.dl_state_dict = ours.state_dict()
    return prepared


def _order_of(base: Any) -> dict[str, Any]:
    """Return the arguments that decide the batches of a loader that accelerate has made."""
    if isinstance(base.dataset, torch.utils.data.IterableDataset):
        return {"batch_size": base.batch_size, "drop_last": base.drop_last}
    if base.batch_sampler is None:
        return {"batch_size": None, "sampler": base.sampler}
    return {"batch_sampler": base.batch_sampler}
