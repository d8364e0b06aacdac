"""Random batches of a Zarr array: whole chunks are read, and mixed within a few of them."""

import sys
import tempfile

import numpy as np

try:
    import zarr
except ImportError as error:
    print(f"{error}. This needs Zarr: pip install zarr", file=sys.stderr)
    sys.exit(2)

from enqueuer import GeneratorEnqueuer


# [recipe]
def batches(shard, size=32, mixed=4):
    images = zarr.open_array(path, mode="r")
    chunk = images.chunks[0]
    order = np.random.default_rng([shard.random_seed, shard.epoch]).permutation(
        images.shape[0] // chunk
    )
    chunks = shard.split(order)
    # The rows of `mixed` chunks are shuffled together, so that a batch has rows of several.
    for first in range(0, len(chunks), mixed):
        rows = np.concatenate(
            [images[c * chunk : (c + 1) * chunk] for c in chunks[first : first + mixed]]
        )
        shard.rng.shuffle(rows)
        for start in range(0, len(rows), size):
            yield rows[start : start + size]


# [end]


with tempfile.TemporaryDirectory() as path:
    array = zarr.create_array(path, shape=(960, 8, 8), chunks=(40, 8, 8), dtype="f4")
    array[:] = np.broadcast_to(np.arange(960)[:, None, None], (960, 8, 8))
    with GeneratorEnqueuer(
        batches, workers=2, shards=3, backend="process", random_seed=7
    ) as enqueuer:
        for _ in range(2):
            seen = [batch[:, 0, 0] for batch in enqueuer]
            print(f"{len(seen)} batches")

assert sorted(np.concatenate(seen)) == list(range(960))
