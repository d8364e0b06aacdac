"""Make batches in processes, for generators that compute in Python.

No `if __name__ == "__main__":` is needed, and the generator function may be a closure.
"""

import os

import numpy as np

from enqueuer import GeneratorEnqueuer


def make(seed):
    """Return a batch, slowly: so much Python code would delay a training loop."""
    return np.array([[(seed * i * j) % 255 for i in range(64)] for j in range(64)], dtype="uint8")


def batches(shard):
    for seed in shard.split(range(16)):
        yield {"pixels": make(seed), "seed": seed, "pid": os.getpid()}


def run(workers):
    with GeneratorEnqueuer(batches, workers=workers, shards=4, backend="process") as enqueuer:
        return list(enqueuer)


one, three = run(workers=1), run(workers=3)
print("processes:", len({b["pid"] for b in one}), "and", len({b["pid"] for b in three}))
assert os.getpid() not in {b["pid"] for b in one + three}
assert [b["seed"] for b in one] == [b["seed"] for b in three] == list(range(16))
assert all((a["pixels"] == b["pixels"]).all() for a, b in zip(one, three, strict=True))
print("the same batches, whatever the number of workers")
