"""Read files ahead of the loop, in threads.

Use threads if the generator waits (for a disk, a network) or calls code that releases the GIL
(numpy, Pillow, zlib). They start at once and share memory with the loop.
"""

import tempfile
from pathlib import Path

import numpy as np

from enqueuer import GeneratorEnqueuer

with tempfile.TemporaryDirectory() as directory:
    paths = [Path(directory, f"{i:02}.npy") for i in range(12)]
    for i, path in enumerate(paths):
        np.save(path, np.full((64, 64), i, dtype="float32"))

    def batches(shard):
        for path in shard.split(paths):
            image = np.load(path)
            yield image + shard.rng.normal(size=image.shape)

    with GeneratorEnqueuer(batches, workers=3, random_seed=1) as enqueuer:
        for epoch in range(2):
            means = [round(float(batch.mean())) for batch in enqueuer]
            print(f"epoch {epoch}: {means}")
            # There are three workers, and the batches are in order.
            assert means == list(range(12))
