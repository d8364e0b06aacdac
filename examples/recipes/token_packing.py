"""Rows of tokens for a language model: documents are packed without padding, in the workers."""

import numpy as np

from enqueuer import GeneratorEnqueuer

END = 0


# [recipe]
def batches(shard, length=128, size=16):
    """Yield int32 arrays (size, length) of documents, one after the other, each with its end."""
    order = np.random.default_rng([shard.random_seed, shard.epoch]).permutation(len(documents))
    # Tokens that do not fill a batch yet.
    waiting, count = [], 0
    for index in shard.split(order):
        document = documents[index]
        waiting += [document, [END]]
        count += len(document) + 1
        while count >= size * length:
            tokens = np.concatenate(waiting).astype(np.int32)
            yield tokens[: size * length].reshape(size, length)
            waiting, count = [tokens[size * length :]], count - size * length


# [end]


rng = np.random.default_rng(7)
documents = [rng.integers(1, 50_000, rng.integers(10, 500)) for _ in range(2000)]
runs = []
for workers in (1, 3):
    with GeneratorEnqueuer(
        batches, workers=workers, shards=4, backend="process", random_seed=7
    ) as enqueuer:
        runs.append(list(enqueuer))
        packed = sum(batch.size for batch in runs[-1])
        print(f"{workers} workers: {len(runs[-1])} batches, {packed:,} tokens")

# The same batches for any number of workers.
assert all(np.array_equal(a, b) for a, b in zip(*runs, strict=True))
total = sum(len(document) + 1 for document in documents)
# At most one incomplete batch of each shard is left out.
assert total - 4 * 16 * 128 < packed <= total
