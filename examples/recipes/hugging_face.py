"""Batches of a Hugging Face dataset: workers fetch the rows of a batch in one call."""

import sys

import numpy as np

try:
    import datasets
except ImportError as error:
    print(f"{error}. This needs Hugging Face datasets: pip install datasets", file=sys.stderr)
    sys.exit(2)

from enqueuer import OrderedEnqueuer

rng = np.random.default_rng(7)
rows = {"tokens": rng.integers(0, 50_000, (1000, 64), np.int32), "label": np.arange(1000)}
dataset = datasets.Dataset.from_dict(rows)

# [recipe]
# With "numpy" the columns come as arrays, without Python lists.
dataset = dataset.with_format("numpy")
with OrderedEnqueuer(
    dataset, batch_size=64, shuffle=True, workers=2, backend="process", random_seed=7
) as enqueuer:
    for epoch in range(2):
        labels = []
        for batch in enqueuer:  # {"tokens": int64 (64, 64), "label": int64 (64,)}
            labels.append(batch["label"])
        print(f"epoch {epoch}: {len(labels)} batches")
# [end]

assert sorted(np.concatenate(labels)) == list(range(1000))
# Hugging Face makes all integers int64.
assert batch["tokens"].dtype == np.int64
