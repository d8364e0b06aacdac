"""Loose files are packed into one HDF5 file, in parallel; then a torch model learns from that."""

import csv
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

from enqueuer import GeneratorEnqueuer
from enqueuer.adapters.torch import TorchLoader
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


def accuracy(model, source):
    right = [model(inputs_of(x)).argmax(1) == y for x, y in TorchLoader(GeneratorEnqueuer(source))]
    return float(torch.cat(right).float().mean())


def inputs_of(images):
    return images.flatten(1) / 16


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

        torch.manual_seed(7)
        model = torch.nn.Linear(64, 10)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        enqueuer = GeneratorEnqueuer(training, workers=2, backend="process", random_seed=7)
        with TorchLoader(enqueuer) as loader:
            for epoch in range(10):
                losses = []
                for images, labels in loader:
                    loss = torch.nn.functional.cross_entropy(model(inputs_of(images)), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                if epoch % 3 == 0:
                    print(f"epoch {epoch}: loss {np.mean(losses):.3f}")
        found = accuracy(model, held_out)
        print(f"accuracy on {len(held_out)} held-out images: {found:.3f}")

        assert found > 0.85
