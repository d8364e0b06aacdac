"""The demo: workers read and augment handwritten digits, and a small network learns them.

    PNG files ==> FileBatches, in each worker ==> GeneratorEnqueuer ==> training ==> accuracy

Then the same loop runs again without the enqueuer: the same batches, made in the training process
when they are needed. So both runs must end with the same weights.

The data are the digits of scikit-learn: nothing is downloaded. scikit-learn, Pillow and tqdm are
extras and imported where they are used.
"""

import contextlib
import functools
import tempfile
import time
import warnings
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from enqueuer.common.extras import framework
from enqueuer.datasets.files.batches import FileBatches
from enqueuer.enqueuers.generator import GeneratorEnqueuer
from enqueuer.monitoring.progress import bar
from enqueuer.workers.shards import Shard, Task

Floats: TypeAlias = npt.NDArray[np.float32]
Batch: TypeAlias = tuple[npt.NDArray[Any], Any]

# Pixels of an image file. The digits themselves have 8 x 8, too few to be work.
_FILE_SIDE = 128
# Pixels of the network's input.
_INPUT_SIDE = 32
# Units. With these, a training step takes about a tenth of the time of a batch.
_HIDDEN = 512
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


class Timing(NamedTuple):
    """The seconds of one training run: of all, and of the training steps in it."""

    total: float
    training: float


@dataclass(frozen=True)
class DemoResult:
    """The measurements of the demo.

    Attributes:
        images: Number of images to learn from.
        held_out: Number of images to test on.
        steps: Number of training steps.
        accuracy: Share of the held-out images that are recognised.
        enqueued: Time of the run with the enqueuer.
        serial: Time of the run without it.
    """

    images: int
    held_out: int
    steps: int
    accuracy: float
    enqueued: Timing
    serial: Timing


def run(
    workers: int, epochs: int, batch_size: int, backend: Literal["thread", "process"], seed: int
) -> DemoResult:
    """Train with the enqueuer and without it; return the measurements.

    The image files lie in a temporary directory that is removed in any case. Progress bars go to
    standard error.

    Raises:
        FrameworkUnavailable: A package of the extra is not installed.
        RuntimeError: The weights of the two runs differ, which should not happen.
    """
    framework("scikit-learn", "demo", "1.2", "sklearn", user="the demo")
    framework("Pillow", "demo", "9.2", "PIL", user="the demo")
    framework("tqdm", "demo", "4.64", user="the demo")
    # On cores that the workers keep busy, the threads of one matrix product spin until the slowest
    # gets a core. The run without the enqueuer loses nothing by the limit.
    with (
        tempfile.TemporaryDirectory(prefix="enqueuer-demo-") as folder,
        threadpool_limits(1, user_api="blas"),
    ):
        images = write_digits(Path(folder), seed)
        held_out, train = images[:_HELD_OUT], images[_HELD_OUT:]
        batches = FileBatches(train, augmented, batch_size, with_labels=True)
        steps = epochs * -(-len(train) // batch_size)
        learn = functools.partial(_train, seed, steps, batch_size)
        enqueuer = GeneratorEnqueuer(batches, workers=workers, backend=backend, random_seed=seed)
        network, enqueued = learn("with the enqueuer", _enqueued(enqueuer, epochs))
        twin, serial = learn("without it      ", _serial(batches, epochs, seed))
        (tested,) = FileBatches(held_out, plain, _HELD_OUT, with_labels=True)(Shard())
        accuracy = network.score(*tested)
    if not all(map(np.array_equal, network.coefs_, twin.coefs_)):
        raise RuntimeError("the two trainings ended with different weights")
    return DemoResult(len(train), len(held_out), steps, accuracy, enqueued, serial)


def write_digits(folder: Path, seed: int) -> list[tuple[Path, int]]:
    """Write every digit into `folder` as a PNG file; return paths and labels in random order."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = []
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / f"{number:04d}.png"
        # The values of scikit-learn are 0 to 16.
        small = Image.fromarray((pixels * 255 / 16).astype(np.uint8))
        small.resize((_FILE_SIDE, _FILE_SIDE), Image.Resampling.BICUBIC).save(path)
        images.append((path, int(label)))
    return [images[number] for number in np.random.default_rng(seed).permutation(len(images))]


def plain(path: Path) -> Floats:
    """Read an image, and shrink it to the input of the network."""
    from PIL import Image

    with Image.open(path) as image:
        return _pixels(image)


def augmented(path: Path, task: Task) -> Floats:
    """Read an image; rotate, shift and blur it, and add noise."""
    from PIL import Image, ImageFilter

    rng = task.rng
    angle = rng.uniform(-_MAX_TURN, _MAX_TURN)
    right, down = (int(shift) for shift in rng.integers(-_MAX_SHIFT, _MAX_SHIFT, 2, endpoint=True))
    with Image.open(path) as image:
        moved = image.rotate(angle, Image.Resampling.BICUBIC, translate=(right, down))
    pixels = _pixels(moved.filter(ImageFilter.GaussianBlur(rng.uniform(0, 3))))
    return pixels + np.float32(_NOISE) * rng.standard_normal(pixels.shape, dtype=np.float32)


def _pixels(image: Any) -> Floats:
    """Return a row of values from -1 to 1."""
    small = image.resize((_INPUT_SIDE, _INPUT_SIDE))
    return np.asarray(small, dtype=np.float32).ravel() / np.float32(127.5) - np.float32(1)


def _enqueued(enqueuer: GeneratorEnqueuer[Batch], epochs: int) -> Generator[Batch, None, None]:
    """Yield batches that workers make ahead; each loop over the enqueuer is an epoch."""
    with enqueuer:
        for _ in range(epochs):
            yield from enqueuer


def _serial(batches: FileBatches[Batch], epochs: int, seed: int) -> Generator[Batch, None, None]:
    """Yield the same batches in the same order, made in this process when they are needed."""
    for epoch in range(epochs):
        # Batches of files do not depend on the number of shards.
        yield from batches(Shard(0, 1, epoch, seed))


def _train(
    seed: int, steps: int, batch_size: int, title: str, batches: Generator[Batch, None, None]
) -> tuple[Any, Timing]:
    """Train a network, and measure the time."""
    from sklearn.neural_network import MLPClassifier

    rate = min(_LEARNING_RATE * batch_size, _MAX_LEARNING_RATE)
    network = MLPClassifier(
        (_HIDDEN,), solver="sgd", learning_rate_init=rate, momentum=0.9, random_state=seed
    )
    training_s, first = 0.0, time.perf_counter()
    with (
        contextlib.closing(batches),
        bar(title, steps, "step") as advance,
        _uncaught_interrupts(),
    ):
        for pixels, labels in batches:
            began = time.perf_counter()
            network.partial_fit(pixels, labels, classes=range(10))
            training_s += time.perf_counter() - began
            advance(1)
    return network, Timing(time.perf_counter() - first, training_s)


@contextlib.contextmanager
def _uncaught_interrupts() -> Iterator[None]:
    """Let Ctrl-C end the training: scikit-learn ends only the step for it, with a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Training interrupted by user")
        try:
            yield
        except UserWarning as warning:
            raise (warning.__context__ or warning) from None
