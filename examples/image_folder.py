"""Train on a folder of images: one folder per class, shuffled in each epoch, without broken files.

Worker processes load, turn and stack the images; the loop gets arrays. Each epoch has each file
exactly once, whatever the number of workers.
"""

import logging
import sys
import tempfile
from pathlib import Path

import numpy as np

try:
    from PIL import Image
except ImportError as error:
    print(f"{error}. This needs Pillow: pip install Pillow", file=sys.stderr)
    sys.exit(2)

from enqueuer import OrderedEnqueuer
from enqueuer.datasets.files import image_folder, load_image

# Otherwise the broken file is logged.
logging.getLogger("enqueuer").setLevel(logging.CRITICAL)

CLASSES = ["bright at the left", "bright at the right"]
EPOCHS, FILES, BROKEN = 4, 40, "007.png"


def write_images(folder):
    rng = np.random.default_rng(7)
    for number in range(FILES):
        label = number % 2
        pixels = 60 * rng.random((20, 16, 3)) + np.linspace(180, 0, 16)[:, None]
        path = Path(folder, CLASSES[label], f"{number:03}.png")
        path.parent.mkdir(exist_ok=True)
        pixels = pixels[:, ::-1] if label else pixels
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    next(Path(folder).rglob(BROKEN)).write_bytes(b"no image")


def load(file, task):
    path, label = file
    pixels = load_image(path, size=(8, 8)).astype(np.float32) / 255 - 0.5
    # The generator belongs to this file and this epoch. Upside down, the class is the same.
    if task.rng.random() < 0.5:
        pixels = pixels[::-1]
    return pixels, label, path


def main(folder):
    write_images(folder)
    files, classes = image_folder(folder)
    assert classes == CLASSES
    weights, losses, seen = np.zeros(8 * 8 * 3), [], []
    options = {"workers": 2, "backend": "process", "random_seed": 7}
    with OrderedEnqueuer(
        files, load, shuffle=True, batch_size=8, on_error="skip", max_errors=100, **options
    ) as enqueuer:
        for _ in range(EPOCHS):
            for images, labels, names in enqueuer:
                x = images.reshape(len(images), -1)
                guess = 1 / (1 + np.exp(-x @ weights))
                weights -= 0.02 * x.T @ (guess - labels)
                right = np.where(labels == 1, guess, 1 - guess)
                losses.append(-np.log(right).mean())
                seen += names
        print(f"{len(losses)} steps, loss {losses[0]:.2f} -> {losses[-1]:.2f}")
        print(f"{enqueuer.error_count} times a file was left out, in {EPOCHS} epochs")
        assert enqueuer.error_count == EPOCHS
    assert losses[-1] < losses[0] / 2
    assert sorted(seen) == sorted([path for path, _ in files if BROKEN not in path] * EPOCHS)


with tempfile.TemporaryDirectory() as directory:
    main(directory)
