"""Pack single files into one HDF5 file, in parallel; then train a model on it.

The model uses torch, or a few lines of numpy if torch is not installed.
"""

import csv
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

try:
    from sklearn.datasets import load_digits

    from enqueuer.datasets.hdf5 import HDF5Source, pack
except ImportError as error:
    print(f"{error}. This needs: pip install h5py tqdm scikit-learn", file=sys.stderr)
    sys.exit(2)

from enqueuer import GeneratorEnqueuer

try:
    import torch

    from enqueuer.adapters.torch import TorchLoader
except ImportError:
    torch = None

EPOCHS = 10


def write_loose_files(folder):
    """Write scikit-learn's digits as one file per image and a list of labels."""
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
        # Each shard has consecutive rows, not every count-th, so that the rows keep their order.
        for name, label in np.array_split(np.array(listed), shard.count)[shard.index]:
            yield {"image": np.load(self.folder / name), "label": int(label), "name": str(name)}


def with_torch(enqueuer, held_out):
    """Train a linear layer; return its predictions for the held-out images."""
    torch.manual_seed(7)
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with TorchLoader(enqueuer) as loader:
        for epoch in range(EPOCHS):
            losses = []
            for images, labels in loader:
                loss = torch.nn.functional.cross_entropy(model(inputs_of(images)), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            print(f"epoch {epoch}: loss {np.mean(losses):.3f}")
    return model(inputs_of(torch.from_numpy(held_out))).argmax(1).numpy()


def with_numpy(enqueuer, held_out):
    """Do the same by hand."""
    weights = np.zeros((64, 10))
    with enqueuer:
        for epoch in range(EPOCHS):
            losses = []
            for images, labels in enqueuer:
                x = inputs_of(images)
                chances = np.exp(x @ weights)
                chances /= chances.sum(axis=1, keepdims=True)
                losses += (-np.log(chances[np.arange(len(x)), labels])).tolist()
                weights -= 0.01 * x.T @ (chances - np.eye(10)[labels])
            print(f"epoch {epoch}: loss {np.mean(losses):.3f}")
    return (inputs_of(held_out) @ weights).argmax(1)


def inputs_of(images):
    return images.reshape(len(images), 64) / 16


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
        images, labels = HDF5Source(path, keys, rows=slice(1437, None))[:]
        enqueuer = GeneratorEnqueuer(training, workers=2, backend="process", random_seed=7)
        found = (with_numpy if torch is None else with_torch)(enqueuer, images)
        accuracy = np.mean(found == labels)
        print(f"accuracy on {len(labels)} held-out images: {accuracy:.3f}")

        assert accuracy > 0.85
