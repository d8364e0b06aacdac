"""The demo: workers read and augment handwritten digits, and a small network learns them.

    PNG files ==> OrderedEnqueuer ==> training ==> accuracy

Then the same loop runs again without workers: the same batches, made in the training process when
they are needed. So both runs must end with the same weights.

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
from enqueuer.enqueuers.ordered import OrderedEnqueuer
from enqueuer.monitoring.progress import bar
from enqueuer.workers.shards import Task

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
        enqueued: Time of the run with workers.
        serial: Time of the run without them.
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
    """Train with workers and without them; return the measurements.

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
    # gets a core. The run without workers loses nothing by the limit.
    with (
        tempfile.TemporaryDirectory(prefix="enqueuer-demo-") as folder,
        threadpool_limits(1, user_api="blas"),
    ):
        images = write_digits(Path(folder), seed)
        held_out, train = images[:_HELD_OUT], images[_HELD_OUT:]
        steps = epochs * -(-len(train) // batch_size)
        learn = functools.partial(_train, seed, steps, batch_size)

        def made(workers: int) -> Generator[Batch, None, None]:
            enqueuer: OrderedEnqueuer[Batch] = OrderedEnqueuer(
                train,
                augmented,
                shuffle=True,
                batch_size=batch_size,
                workers=workers,
                backend=backend,
                random_seed=seed,
            )
            return _epochs(enqueuer, epochs)

        network, enqueued = learn("with workers   ", made(workers))
        twin, serial = learn("without workers", made(0))
        accuracy = network.score(*map(np.array, zip(*map(plain, held_out), strict=True)))
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


def plain(file: tuple[Path, int]) -> tuple[Floats, int]:
    """Read an image, and shrink it to the input of the network."""
    from PIL import Image

    path, label = file
    with Image.open(path) as image:
        return _pixels(image), label


def augmented(file: tuple[Path, int], task: Task) -> tuple[Floats, int]:
    """Read an image; rotate, shift and blur it, and add noise."""
    from PIL import Image, ImageFilter

    (path, label), rng = file, task.rng
    angle = rng.uniform(-_MAX_TURN, _MAX_TURN)
    right, down = (int(shift) for shift in rng.integers(-_MAX_SHIFT, _MAX_SHIFT, 2, endpoint=True))
    with Image.open(path) as image:
        moved = image.rotate(angle, Image.Resampling.BICUBIC, translate=(right, down))
    pixels = _pixels(moved.filter(ImageFilter.GaussianBlur(rng.uniform(0, 3))))
    noise = rng.standard_normal(pixels.shape, dtype=np.float32)
    return pixels + np.float32(_NOISE) * noise, label


def _pixels(image: Any) -> Floats:
    """Return a row of values from -1 to 1."""
    small = image.resize((_INPUT_SIDE, _INPUT_SIDE))
    return np.asarray(small, dtype=np.float32).ravel() / np.float32(127.5) - np.float32(1)


def _epochs(enqueuer: OrderedEnqueuer[Batch], epochs: int) -> Generator[Batch, None, None]:
    """Yield the batches of some epochs; each loop over the enqueuer is one."""
    with enqueuer:
        for _ in range(epochs):
            yield from enqueuer


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
