"""Samples of WebDataset tar files: each shard of the enqueuer reads its own files."""

import io
import random
import sys
import tempfile
from pathlib import Path

import numpy as np

try:
    import webdataset
except ImportError as error:
    print(f"{error}. This needs WebDataset: pip install webdataset", file=sys.stderr)
    sys.exit(2)

from enqueuer import GeneratorEnqueuer


def write(path, first):
    """Write 20 samples: an array and a number."""
    with webdataset.TarWriter(str(path)) as tar:
        for key in range(first, first + 20):
            array = io.BytesIO()
            np.save(array, np.full((8, 8), key, np.float32))
            tar.write(
                {"__key__": f"{key:06}", "npy": array.getvalue(), "cls": str(key % 10).encode()}
            )


# [recipe]
def batches(shard):
    # The files in a new order each epoch; this shard reads its share of them.
    order = np.random.default_rng([shard.random_seed, shard.epoch]).permutation(len(files))
    samples = webdataset.WebDataset(
        [str(files[i]) for i in shard.split(order)],
        shardshuffle=False,
        nodesplitter=None,
        workersplitter=None,
        empty_check=False,
    )
    shuffled = samples.decode().shuffle(100, rng=random.Random(shard.seed))
    yield from shuffled.to_tuple("npy", "cls").batched(16)


# [end]


with tempfile.TemporaryDirectory() as folder:
    files = [Path(folder, f"{i:04}.tar") for i in range(6)]
    for i, file in enumerate(files):
        write(file, 20 * i)
    with GeneratorEnqueuer(
        batches, workers=2, shards=3, backend="process", random_seed=7
    ) as enqueuer:
        for _ in range(2):
            seen = [images[:, 0, 0] for images, labels in enqueuer]
            print(f"{len(seen)} batches")

assert sorted(np.concatenate(seen)) == list(range(120))
