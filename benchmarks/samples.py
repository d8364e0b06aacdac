"""Samples of torch datasets, as functions of an index; only torch and PIL are imported."""

from __future__ import annotations

import functools
import io
from typing import Any

import numpy as np
import torch

SIDE = 224  # of an image
_KEPT = 64  # distinct samples
_TOKENS = 2048
_ROWS, _COLUMNS = 4096, 16


@functools.cache
def _images(dtype: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (3, SIDE, SIDE)
    images = [torch.randint(0, 255, shape, generator=generator) for _ in range(_KEPT)]
    return [image.to(getattr(torch, dtype)) for image in images]


@functools.cache
def _numbers(columns: int, dtype: str) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 50_000, (_ROWS, columns)).astype(dtype)


@functools.cache
def _files() -> list[bytes]:
    """Return JPEG files of 320 x 320, about 10 kB each."""
    from PIL import Image  # only here: other rows do not need it

    rng, files = np.random.default_rng(0), []
    for _ in range(_KEPT):
        coarse = rng.integers(0, 255, (16, 16, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize((320, 320)).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def image(dtype: str, index: int) -> Any:
    """Return an image, and its label."""
    return _images(dtype)[index % _KEPT], index % 10


def tokens(index: int) -> Any:
    """Return a row of tokens, and the same row one token later."""
    row = _numbers(_TOKENS + 1, "int64")[index % _ROWS]
    return torch.from_numpy(row[:-1]), torch.from_numpy(row[1:])


def small(index: int) -> Any:
    """Return 16 numbers, and a label."""
    return _numbers(_COLUMNS, "float32")[index % _ROWS], index % 10


def jpeg(index: int) -> Any:
    """Return a decoded and resized image, and its label."""
    from PIL import Image

    with Image.open(io.BytesIO(_files()[index % _KEPT])) as opened:
        pixels = np.array(opened.convert("RGB").resize((SIDE, SIDE)))
    return torch.from_numpy(pixels).permute(2, 0, 1), index % 10
