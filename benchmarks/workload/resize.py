"""Images in memory, which torch resizes and stacks; with 1, 2 and 4 workers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from workload import Epochs, Workload, mapped
from workload.mapped import Mapped, Samples

_PHOTOS = 32


def _prepare(folder: Path, items: int) -> Mapped:
    return Mapped(range(items), load, 32)


WORKLOAD = Workload(
    "resize",
    "uint8 images of 256 x 320 -> 224 x 224 by torch, stacked by 32; 2 workers or the number",
    unit="images",
    items=1600,
    batch_size=32,
    prepare=_prepare,
    size_of=len,
    why="All loaders run the same function of torch on all CPUs.",
    needs="torch",
)


@functools.cache
def _photos() -> Any:
    import torch

    rng = np.random.default_rng(0)
    return torch.from_numpy(rng.integers(0, 256, (_PHOTOS, 3, 256, 320), np.uint8))


def load(index: int) -> Any:
    """Return a resized image."""
    import torch

    image = _photos()[index % _PHOTOS][None].float()
    sizes = dict(size=(224, 224), mode="bilinear", antialias=True)
    return torch.nn.functional.interpolate(image, **sizes)[0].byte()


mapped.add(WORKLOAD)


def _enqueuer(workers: int, data: Mapped, items: int) -> Epochs:
    from enqueuer import OrderedEnqueuer

    options = dict(batch_size=32, workers=workers, backend="process")
    with OrderedEnqueuer(data.elements, load, **options) as batches:
        while True:
            yield batches


def _torch(workers: int, data: Mapped, items: int) -> Epochs:
    from torch.utils.data import DataLoader

    options = dict(num_workers=workers, persistent_workers=True)
    batches = DataLoader(Samples(data), batch_size=32, **options)
    while True:
        yield batches


for _workers in (1, 4):
    _suffix = f"{_workers} worker{'s' * (_workers > 1)}"
    WORKLOAD.contestant(f"enqueuer, {_suffix}")(functools.partial(_enqueuer, _workers))
    WORKLOAD.contestant(f"torch, {_suffix}", "torch", (Samples,))(
        functools.partial(_torch, _workers)
    )
