import numpy as np

from enqueuer import GeneratorEnqueuer


def batches(shard):
    order = np.random.default_rng([shard.random_seed, shard.epoch]).permutation(len(patches))
    for start in shard.split(range(0, len(order), 4)):
        data = patches[order[start : start + 4]]
        yield {"data": data + shard.rng.normal(0, 0.1, data.shape)}


patches = np.zeros((32, 1, 8, 8))
with GeneratorEnqueuer(batches, workers=2, backend="process", random_seed=7) as enqueuer:
    for _ in range(2):
        for batch in enqueuer:
            print(batch["data"].shape)
