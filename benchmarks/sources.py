"""What the workers run: generator functions that make distinct items and cost next to nothing.

Whatever takes time is made by the worker, before its first item. Pickle sends an object that it
has seen once more as a mere reference; so no item comes twice before all the others have come.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

IMAGES = (64, 224, 224, 3)
LABELS = 64
PHOTOS = CLIPS = 32  # of a batch
MANY = 114  # arrays of a batch, 1 KiB each
RESUMED_COUNT = 10_000  # of a generator that is resumed
TINY_COUNT = 20_000  # distinct items, far more than any transport packs together


def ring(shape: tuple[int, ...], dtype: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield `count` batches of `shape` in turn, for ever."""
    rng = np.random.default_rng(0)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    batches = []
    for _ in range(count):
        images = np.frombuffer(bytearray(rng.bytes(size)), dtype).reshape(shape)
        batches.append({"x": images, "y": rng.integers(0, 10, LABELS)})
    yield from itertools.cycle(batches)


def fresh(shape: tuple[int, ...], dtype: str) -> Iterator[dict[str, Any]]:
    """Yield batches that are new each time, as those of a real generator are."""
    for n in itertools.count():
        yield {"x": np.full(shape, n % 256, dtype), "y": np.full(LABELS, n)}


def in_place(size: int) -> Iterator[np.ndarray]:
    """Yield arrays of `size` bytes that lie in shared memory already, and are not filled."""
    from enqueuer import empty  # only here: the peers' workers do not need it

    while True:
        yield empty((size,), "uint8")


def tiny() -> Iterator[dict[str, np.ndarray]]:
    """Yield dicts of two small arrays, for ever."""
    items = [
        {"x": np.full(8, n, np.float32), "y": np.full(1, n, np.int64)} for n in range(TINY_COUNT)
    ]
    yield from itertools.cycle(items)


def many(count: int, seconds: float) -> Iterator[list[np.ndarray]]:
    """Yield lists of `count` arrays of 114 KiB in all, after `seconds` of work in Python."""
    rng = np.random.default_rng(0)
    batches = [
        [part.copy() for part in np.split(rng.random(MANY * 256, np.float32), count)]
        for _ in range(64)
    ]
    for batch in itertools.cycle(batches):
        spin(seconds)
        yield batch


def ints() -> Iterator[int]:
    """Yield integers, each an object of its own."""
    yield from itertools.count(1 << 40)


def stamped() -> Iterator[int]:
    """Yield the time, each half millisecond; the clock is the same in all processes."""
    while True:
        time.sleep(0.0005)
        yield time.perf_counter_ns()


def made_again(seconds: float, shard: Any) -> Iterator[int]:
    """Yield numbers that take so long each, from the first one on."""
    for number in shard.split(range(RESUMED_COUNT)):
        time.sleep(seconds)
        yield number


def begun_anywhere(seconds: float, shard: Any, first_item: int = 0) -> Iterator[int]:
    """Yield the same numbers from any one on."""
    for number in shard.split(range(RESUMED_COUNT))[first_item:]:
        time.sleep(seconds)
        yield number


def name(path: str) -> int:
    """Return what takes the place of the contents of a file."""
    return len(path)


def python_work(steps: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield what takes `steps` rounds of a loop in Python, which holds the GIL."""
    for n in itertools.count():
        yield work(steps, n)


def work(steps: int, n: int) -> dict[str, np.ndarray]:
    """Return item `n` after `steps` rounds of a loop in Python."""
    total = n
    for m in range(steps):
        total += m * m % 7
    return {"x": np.array([total])}


def sleeping(seconds: float) -> Iterator[dict[str, np.ndarray]]:
    """Yield what one has to wait `seconds` for."""
    for n in itertools.count():
        yield wait(seconds, n)


def wait(seconds: float, n: int) -> dict[str, np.ndarray]:
    """Return item `n` after `seconds`."""
    time.sleep(seconds)
    return {"x": np.array([n])}


def spinning(seconds: float) -> Iterator[dict[str, np.ndarray]]:
    """Yield what takes `seconds` of work in Python."""
    for n in itertools.count():
        spin(seconds)
        yield {"x": np.array([n])}


def spin(seconds: float) -> None:
    """Be busy in Python for `seconds` of this thread's own time, which the GIL may make longer."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


# --- real transforms, in libraries that run threads of their own ---


def images_by_torch() -> Iterator[Any]:
    """Yield tensors of images that torch resizes and stacks, as `uint8`, 4.8 MB each."""
    import torch

    images = [torch.from_numpy(image).permute(2, 0, 1) for image in _photos()]
    resize = functools.partial(
        torch.nn.functional.interpolate, size=(224, 224), mode="bilinear", antialias=True
    )
    while True:
        yield torch.stack([resize(image[None].float())[0].byte() for image in images])


def images_by_cv2() -> Iterator[np.ndarray]:
    """Yield arrays of images that OpenCV blurs and resizes, 4.8 MB each."""
    import cv2

    images = _photos()
    while True:
        blurred = (cv2.GaussianBlur(image, (5, 5), 1.0) for image in images)
        yield np.stack(
            [cv2.resize(image, (224, 224), interpolation=cv2.INTER_AREA) for image in blurred]
        )


def spectrograms_by_numpy() -> Iterator[np.ndarray]:
    """Yield log-mel spectrograms of 32 clips of two seconds: windows, FFT, a matrix product."""
    rng = np.random.default_rng(0)
    clips = rng.normal(size=(CLIPS, 32_000)).astype(np.float32)
    window = np.hanning(400).astype(np.float32)
    mel = np.abs(rng.normal(size=(257, 80))).astype(np.float32)
    while True:
        frames = np.lib.stride_tricks.sliding_window_view(clips, 400, axis=1)[:, ::160] * window
        power = np.abs(np.fft.rfft(frames, 512)).astype(np.float32) ** 2
        yield np.log(power @ mel + 1e-6)


def _photos() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return list(rng.integers(0, 256, (PHOTOS, 256, 320, 3), np.uint8))


# --- functions of an index, for those that map ---


def number(n: int) -> int:
    """Return an integer that is an object of its own."""
    return n + (1 << 40)


def row(shape: tuple[int, ...], count: int, n: int) -> np.ndarray:
    """Return row `n` of an array of `count` rows that each worker has; beyond, it begins anew."""
    return _rows(shape, count)[n % count]


@functools.cache
def _rows(shape: tuple[int, ...], count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, *shape), np.uint8)


def filled(size: int, n: int) -> np.ndarray:
    """Return a new array of `size` numbers."""
    return np.full(size, n, np.float32)


def straggle(every: int, seconds: float, slow_seconds: float, n: int) -> int:
    """Return `n` after `seconds`, but one of `every` after `slow_seconds`."""
    time.sleep(slow_seconds if n % every == every // 2 else seconds)
    return n
