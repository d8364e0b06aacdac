"""Loose files are packed into one HDF5 file, in parallel; then a model learns from that."""

import csv
import tempfile
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from enqueuer import GeneratorEnqueuer
from enqueuer.datasets.hdf5 import HDF5Source, pack


def write_loose_files(folder):
    """Write scikit-learn's digits as people have such data: a file an image, a list of labels."""
    digits = load_digits()
    with open(folder / "labels.csv", "w", newline="") as file:
        for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            np.save(folder / f"{number:04}.npy", image.astype("uint8"))
            csv.writer(file).writerow([f"{number:04}.npy", label])


class Digits:
    """A generator function of a shard, bound to a folder: yields one image at a time."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, shard):
        with open(self.folder / "labels.csv", newline="") as file:
            listed = list(csv.reader(file))
        # a stretch for each shard rather than every count-th, so that rows keep their order
        for name, label in np.array_split(np.array(listed), shard.count)[shard.index]:
            yield {"image": np.load(self.folder / name), "label": int(label), "name": str(name)}


def inputs_of(images):
    pixels = images.reshape(len(images), -1) / 16
    return np.concatenate([pixels, np.ones((len(pixels), 1))], axis=1)


def train(weights, images, labels):
    """One step of softmax regression; return its loss."""
    logits = inputs_of(images) @ weights
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    odds /= odds.sum(axis=1, keepdims=True)
    right = odds[np.arange(len(labels)), labels]
    odds[np.arange(len(labels)), labels] -= 1
    weights -= 0.5 * inputs_of(images).T @ odds / len(labels)
    return -np.log(right).mean()


def accuracy(weights, source):
    batches = GeneratorEnqueuer(source)
    return np.mean(np.concatenate([(inputs_of(x) @ weights).argmax(1) == y for x, y in batches]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_loose_files(folder)

        started = time.perf_counter()
        path = folder / "digits.h5"
        rows = pack(Digits(folder), path, workers=2, shards=8, batched=False, chunk_rows=64)
        print(f"packed {rows} files in {time.perf_counter() - started:.2f} s")

        keys = ("image", "label")
        training = HDF5Source(path, keys, 32, shuffle=True, rows=slice(None, 1437))
        held_out = HDF5Source(path, keys, 360, rows=slice(1437, None))

        weights = np.zeros((65, 10))
        with GeneratorEnqueuer(training, workers=2, backend="process", random_seed=7) as enqueuer:
            for epoch in range(10):
                loss = np.mean([train(weights, images, labels) for images, labels in enqueuer])
                if epoch % 3 == 0:
                    print(f"epoch {epoch}: loss {loss:.3f}")
        found = accuracy(weights, held_out)
        print(f"accuracy on {len(held_out)} held-out images: {found:.3f}")

        assert found > 0.85
