"""A folder of JPEG files of several sizes -> 224 x 224 uint8, decoded by Pillow."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np

from workload import Epochs, Workload, mapped, photos
from workload.mapped import Mapped


def _prepare(folder: Path, items: int) -> Mapped:
    paths = photos.save(folder)
    return Mapped([paths[n % len(paths)] for n in range(items)], load, 32)


WORKLOAD = Workload(
    "jpeg-folder",
    "photographs of 256 to 640 pixels -> 224 x 224 uint8; batches of 32; 2 workers",
    unit="images",
    items=640,
    batch_size=32,
    prepare=_prepare,
    size_of=len,
    why="Pillow decodes for all loaders, so that their rates are close.",
    needs="skimage",
)


def load(path: str) -> Any:
    """Return the pixels of a file."""
    from PIL import Image

    with Image.open(path) as opened:
        return np.asarray(opened.convert("RGB").resize((224, 224)))


mapped.add(WORKLOAD)


@WORKLOAD.contestant("enqueuer, load_image", is_other=True)
def _load_image(data: Mapped, items: int) -> Epochs:
    from enqueuer import OrderedEnqueuer
    from enqueuer.datasets.files import load_image

    load = functools.partial(load_image, size=224)
    options = dict(batch_size=32, workers=2, backend="process")
    with OrderedEnqueuer(data.elements, load, **options) as batches:
        while True:
            yield batches


@WORKLOAD.contestant("tf.data, own decoder", "tensorflow", is_other=True)
def _tensorflow(data: Mapped, items: int) -> Epochs:
    import tensorflow as tf

    def decode(path: Any) -> Any:
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        return tf.cast(tf.image.resize(image, (224, 224)), tf.uint8)

    dataset = tf.data.Dataset.from_tensor_slices(list(data.elements))
    dataset = dataset.map(decode, num_parallel_calls=2).batch(32).prefetch(4)
    while True:
        yield itertools.islice(dataset.as_numpy_iterator(), items)
