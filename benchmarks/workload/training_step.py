"""A training loop on the CPU: augmented images, and a step of a small convolutional network."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from workload import Workload, mapped
from workload.mapped import Mapped

_SIDE, _IMAGES, _CLASSES = 32, 512, 10


def _prepare(folder: Path, items: int) -> Mapped:
    return Mapped(range(items), load, 64)


def _step(batch: Any) -> None:
    """Train with a batch, in the loop's process."""
    import torch

    model, optimizer = _model()
    optimizer.zero_grad()
    scores = model(torch.as_tensor(batch["x"]))
    torch.nn.functional.cross_entropy(scores, torch.as_tensor(batch["y"])).backward()
    optimizer.step()


WORKLOAD = Workload(
    "training-step",
    "32 x 32 images, cropped, flipped, with noise; a step of a network for 64; 2 workers",
    unit="images",
    items=3200,
    batch_size=64,
    prepare=_prepare,
    size_of=lambda batch: len(batch["y"]),
    why="The step of the network and the workers share two CPUs.",
    use=_step,
    needs="torch",
)


@functools.cache
def _model() -> Any:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(7)
    convolution = functools.partial(torch.nn.Conv2d, kernel_size=3, stride=2, padding=1)
    layers = [convolution(3, 16), torch.nn.ReLU(), convolution(16, 32), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(2048, _CLASSES))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


@functools.cache
def _images() -> Any:
    return np.random.default_rng(7).integers(0, 256, (_IMAGES, _SIDE + 8, _SIDE + 8, 3), np.uint8)


def load(index: int) -> Any:
    """Return an augmented image, and its label."""
    rng = np.random.default_rng(index)
    top, left = rng.integers(0, 9, 2)
    image = _images()[index % _IMAGES, top : top + _SIDE, left : left + _SIDE]
    if rng.random() < 0.5:
        image = image[:, ::-1]
    x = image.transpose(2, 0, 1).astype(np.float32) / 255
    x += rng.normal(0, 0.1, x.shape).astype(np.float32)
    return {"x": x, "y": index % _CLASSES}


mapped.add(WORKLOAD)
