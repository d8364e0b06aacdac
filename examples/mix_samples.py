"""Batches of samples from two generators: three quarters from one, shuffled with a buffer.

The batches depend on the seed and the shards, and not on the workers.
"""

import numpy as np

from enqueuer import GeneratorEnqueuer, mix


def real(shard):
    for number in shard.split(range(3000)):
        # A real program reads and decodes a file here.
        yield {"image": np.full((32, 32), number % 251, "uint8"), "is_real": True}


def synthetic(shard):
    while True:
        yield {"image": shard.rng.integers(0, 256, (32, 32), "uint8"), "is_real": False}


def run(workers, backend):
    enqueuer = GeneratorEnqueuer(
        mix({"real": real, "synthetic": synthetic}, weights={"real": 3, "synthetic": 1}),
        shards=4,
        workers=workers,
        backend=backend,
        batch_size=64,
        drop_last=True,
        shuffle_buffer=200,
        random_seed=7,
    )
    with enqueuer:
        return [(batch["image"].sum(), batch["is_real"].mean()) for batch in enqueuer]


batches = run(2, "process")
assert batches == run(1, "thread")
shares = [share for _, share in batches]
assert abs(np.mean(shares) - 0.75) < 0.01
print(f"{len(batches)} batches of 64, {np.mean(shares):.1%} of the samples real")
