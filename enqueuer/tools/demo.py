"""The demo: workers read and augment handwritten digits, and a small network learns them.

    PNG files ==> batches(shard) in each worker ==> GeneratorEnqueuer ==> training ==> accuracy

Then the same loop runs again without the enqueuer: the same generator function, shard by shard in
the training process. Both runs see the same batches, so they must end with the same weights.

The data are the digits of scikit-learn: nothing is downloaded. scikit-learn, Pillow and tqdm are
extras and imported where they are used.
"""

import contextlib
import importlib
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from enqueuer.enqueuers.generator import GeneratorEnqueuer
from enqueuer.monitoring.progress import bar
from enqueuer.workers.shards import Shard

Floats: TypeAlias = npt.NDArray[np.float32]
Integers: TypeAlias = npt.NDArray[np.int64]

_EXTRAS = {"sklearn": "scikit-learn", "PIL": "Pillow", "tqdm": "tqdm"}

# Pixels of an image file. The digits themselves have 8 x 8, too few to be work.
_FILE_SIDE = 128
# Pixels of the network's input.
_INPUT_SIDE = 32
_CLASSES = 10
# Units. With these a training step takes about 8 ms, and a batch 40 ms.
_HIDDEN = 2048
# Images, of 1797, that are not trained on.
_HELD_OUT = 360

# Degrees. With more, a 6 would resemble a 9 or a 4.
_MAX_TURN = 12.0
# Pixels of the file: half a pixel of the original digit.
_MAX_SHIFT = 8
# Standard deviation, where white is 1.
_NOISE = 0.05

# Small batches take small steps, by the rate of an image, and large ones take limited steps.
_LEARNING_RATE = 0.05 / 64
_MAX_LEARNING_RATE = 0.05
_MOMENTUM = 0.9


class LabelledImage(NamedTuple):
    """An image file and the digit that it shows."""

    path: Path
    label: int


class Batch(NamedTuple):
    """A batch of a worker, for a training step."""

    pixels: Floats  #: (images, 1024), about -1 to 1
    labels: Integers  #: (images,), 0 to 9


@dataclass(frozen=True)
class Settings:
    """The options of `python -m enqueuer demo`."""

    workers: int = 2
    epochs: int = 8
    batch_size: int = 64
    backend: Literal["thread", "process"] = "process"
    seed: int = 7


@dataclass(frozen=True)
class Timing:
    """The time of one training run, in seconds.

    Attributes:
        total: Time from before the first worker starts until the last has ended.
        training: Part of it inside training steps; the rest was waiting for batches.
    """

    total: float
    training: float


@dataclass(frozen=True)
class DemoResult:
    """The measurements of the demo.

    Attributes:
        train_images: Number of images to learn from.
        held_out_images: Number of images to test on.
        steps: Number of training steps.
        accuracy: Share of the held-out images that the run with the enqueuer recognises.
        enqueued: Time of the run with the enqueuer.
        serial: Time of the run without it.
        same_weights: Whether both runs ended with the same weights, bit for bit.
    """

    train_images: int
    held_out_images: int
    steps: int
    accuracy: float
    enqueued: Timing
    serial: Timing
    same_weights: bool

    @property
    def ratio(self) -> float:
        """How many times faster the run with the enqueuer was."""
        return self.serial.total / self.enqueued.total


def check_extras() -> None:
    """Import the packages that the demo needs beside numpy.

    Raises:
        ModuleNotFoundError: A package is not installed; the message says how to install it.
            A broken package raises its own error, which says more.
    """
    for module, package in _EXTRAS.items():
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise ModuleNotFoundError(
                f"the demo needs {package}, which is not installed: "
                "pip install '.[demo]' in the clone of enqueuer",
                name=module,
            ) from error


def run(settings: Settings) -> DemoResult:
    """Train with the enqueuer and without it; return the measurements.

    The image files lie in a temporary directory that is removed in any case. Progress bars go to
    standard error.
    """
    with tempfile.TemporaryDirectory(prefix="enqueuer-demo-") as folder:
        train, held_out = write_digits(Path(folder), settings.seed)
        batches = batches_of(train, settings.batch_size)
        steps = steps_of(train, settings)
        with _one_blas_thread():
            ahead, in_turn = _enqueued(batches, settings), _serial(batches, settings)
            pupil, enqueued = _train(ahead, settings.seed, steps, "with the enqueuer")
            twin, serial = _train(in_turn, settings.seed, steps, "without it      ")
        return DemoResult(
            train_images=len(train),
            held_out_images=len(held_out),
            steps=steps,
            accuracy=pupil.accuracy(read(held_out)),
            enqueued=enqueued,
            serial=serial,
            same_weights=pupil.same_as(twin),
        )


def _one_blas_thread() -> contextlib.AbstractContextManager[object]:
    """Limit numpy's matrix products to one thread, for both runs, and undo it afterwards.

    On cores that the workers keep busy, the threads of one product spin until the slowest gets a
    core. With 2 workers on 2 cores the training steps of the enqueued run took 5 to 6 s without
    the limit and 3 s with it. The serial run loses nothing: 9.6 to 10.6 s without, 9.6 s with it.
    """
    # scikit-learn depends on threadpoolctl.
    from threadpoolctl import threadpool_limits

    limits: contextlib.AbstractContextManager[object] = threadpool_limits(1, user_api="blas")
    return limits


def write_digits(
    folder: Path, seed: int
) -> tuple[Sequence[LabelledImage], Sequence[LabelledImage]]:
    """Write every digit into `folder` as a PNG file; return the training and the held-out ones."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = []
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / f"{number:04d}.png"
        # The values of scikit-learn are 0 to 16.
        small = Image.fromarray((pixels * 255 / 16).astype(np.uint8))
        small.resize((_FILE_SIDE, _FILE_SIDE), Image.Resampling.BICUBIC).save(path)
        images.append(LabelledImage(path, int(label)))
    shuffled = [images[number] for number in np.random.default_rng(seed).permutation(len(images))]
    return shuffled[_HELD_OUT:], shuffled[:_HELD_OUT]


def read(images: Sequence[LabelledImage]) -> Batch:
    """Read images without augmentation, in one batch, to test on."""
    from PIL import Image

    pixels = []
    for path, _ in images:
        with Image.open(path) as image:
            pixels.append(_normalised(image))
    return _batch(pixels, images)


def batches_of(
    images: Sequence[LabelledImage], batch_size: int
) -> Callable[[Shard], Iterator[Batch]]:
    """Return the generator function that reads, augments and batches `images`."""

    def batches(shard: Shard) -> Iterator[Batch]:
        share = shard.split(images)
        order = shard.rng.permutation(len(share))
        for start in range(0, len(share), batch_size):
            chosen = [share[number] for number in order[start : start + batch_size]]
            yield _batch([_augmented(path, shard.rng) for path, _ in chosen], chosen)

    return batches


def _augmented(path: Path, rng: np.random.Generator) -> Floats:
    """Read one image; rotate, shift and blur it, and add noise."""
    from PIL import Image, ImageFilter

    angle = rng.uniform(-_MAX_TURN, _MAX_TURN)
    right, down = (int(shift) for shift in rng.integers(-_MAX_SHIFT, _MAX_SHIFT, 2, endpoint=True))
    with Image.open(path) as image:
        moved = image.rotate(angle, Image.Resampling.BICUBIC, translate=(right, down))
    blurred = moved.filter(ImageFilter.GaussianBlur(rng.uniform(0, 3)))
    pixels = _normalised(blurred)
    return pixels + np.float32(_NOISE) * rng.standard_normal(pixels.shape, dtype=np.float32)


def _normalised(image: Any) -> Floats:
    """Shrink an image to the input of the network: a row of values from -1 to 1."""
    from PIL import Image

    small = image.resize((_INPUT_SIDE, _INPUT_SIDE), Image.Resampling.LANCZOS)
    return np.asarray(small, dtype=np.float32).ravel() / np.float32(127.5) - np.float32(1)


def _batch(pixels: Sequence[Floats], images: Sequence[LabelledImage]) -> Batch:
    return Batch(np.stack(pixels), np.array([image.label for image in images], dtype=np.int64))


def steps_of(images: Sequence[LabelledImage], settings: Settings) -> int:
    """Count the training steps of a whole run."""
    count = settings.workers
    shares = [len(images[index::count]) for index in range(count)]
    return settings.epochs * sum(-(-share // settings.batch_size) for share in shares)


def _enqueued(
    batches: Callable[[Shard], Iterator[Batch]], settings: Settings
) -> Generator[Batch, None, None]:
    """Yield batches that workers make ahead; each loop over the enqueuer is an epoch."""
    with GeneratorEnqueuer(
        batches,
        workers=settings.workers,
        backend=settings.backend,
        shards=settings.workers,
        random_seed=settings.seed,
    ) as enqueuer:
        for _ in range(settings.epochs):
            yield from enqueuer


def _serial(
    batches: Callable[[Shard], Iterator[Batch]], settings: Settings
) -> Generator[Batch, None, None]:
    """Yield the same batches in the same order, each made when it is needed, in this process."""
    count = settings.workers
    for epoch in range(settings.epochs):
        shards = [batches(Shard(index, count, epoch, settings.seed)) for index in range(count)]
        # One batch of each shard in turn; those that have ended are left out.
        while shards:
            for shard in list(shards):
                try:
                    yield next(shard)
                except StopIteration:
                    shards.remove(shard)


def _train(
    batches: Generator[Batch, None, None], seed: int, steps: int, title: str
) -> tuple["Network", Timing]:
    """Train a network on all batches, and measure the time."""
    network, training = Network(seed), 0.0
    first = time.perf_counter()
    with contextlib.closing(batches), bar(title, steps, "step") as advance:
        for batch in batches:
            began = time.perf_counter()
            network.learn(batch)
            training += time.perf_counter() - began
            advance(1)
    return network, Timing(time.perf_counter() - first, training)


class Network:
    """One hidden layer of rectified units and a softmax, learning by gradient and momentum."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        inputs = _INPUT_SIDE * _INPUT_SIDE
        self._weights = [
            rng.standard_normal((inputs, _HIDDEN), np.float32) * np.float32((2 / inputs) ** 0.5),
            np.zeros(_HIDDEN, np.float32),
            rng.standard_normal((_HIDDEN, _CLASSES), np.float32) * np.float32(_HIDDEN**-0.5),
            np.zeros(_CLASSES, np.float32),
        ]
        self._velocities = [np.zeros_like(weights) for weights in self._weights]

    def learn(self, batch: Batch) -> None:
        """Take one step down the gradient of the batch's mean cross-entropy."""
        rate = min(_LEARNING_RATE * len(batch.labels), _MAX_LEARNING_RATE)
        for weights, velocity, gradient in zip(
            self._weights, self._velocities, self._gradients(batch), strict=True
        ):
            velocity *= np.float32(_MOMENTUM)
            velocity -= np.float32(rate) * gradient
            weights += velocity

    def accuracy(self, batch: Batch) -> float:
        """Return the share of a batch that is recognised, from 0 to 1."""
        _, scores = self._scores(batch.pixels)
        return float(np.mean(scores.argmax(axis=1) == batch.labels))

    def same_as(self, other: "Network") -> bool:
        """Return whether both have the same weights, bit for bit."""
        return all(map(np.array_equal, self._weights, other._weights))

    def _scores(self, pixels: Floats) -> tuple[Floats, Floats]:
        first, first_bias, second, second_bias = self._weights
        hidden = np.maximum(pixels @ first + first_bias, 0)
        return hidden, hidden @ second + second_bias

    def _gradients(self, batch: Batch) -> list[Floats]:
        hidden, scores = self._scores(batch.pixels)
        # The gradient of the cross-entropy of a softmax is the softmax, less 1 for the right class.
        blame: Floats = np.exp(scores - scores.max(axis=1, keepdims=True))
        blame /= blame.sum(axis=1, keepdims=True)
        blame[np.arange(len(blame)), batch.labels] -= 1
        blame /= np.float32(len(blame))
        hidden_blame = blame @ self._weights[2].T * (hidden > 0)
        return [
            batch.pixels.T @ hidden_blame,
            hidden_blame.sum(axis=0),
            hidden.T @ blame,
            blame.sum(axis=0),
        ]
