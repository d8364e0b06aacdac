"""Batches of Parquet files: each shard reads its own row groups, in a new order each epoch."""

import sys
import tempfile
from pathlib import Path

import numpy as np

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    print(f"{error}. This needs pyarrow: pip install pyarrow", file=sys.stderr)
    sys.exit(2)

from enqueuer import GeneratorEnqueuer


# [recipe]
def batches(shard, size=64):
    groups = [(path, g) for path in files for g in range(pq.ParquetFile(path).num_row_groups)]
    # The same order for all shards; each takes its share of it.
    order = np.random.default_rng([shard.random_seed, shard.epoch]).permutation(len(groups))
    for index in shard.split(order):
        path, group = groups[index]
        table = pq.ParquetFile(path).read_row_group(group, columns=["x", "label"])
        columns = {name: table[name].to_numpy() for name in table.column_names}
        mixed = shard.rng.permutation(len(table))
        for first in range(0, len(table), size):
            rows = mixed[first : first + size]
            yield {name: column[rows] for name, column in columns.items()}


# [end]


with tempfile.TemporaryDirectory() as folder:
    files = [Path(folder, f"{i}.parquet") for i in range(3)]
    for i, path in enumerate(files):
        x = np.arange(1000 * i, 1000 * (i + 1))
        pq.write_table(pa.table({"x": x, "label": x % 10}), path, row_group_size=256)
    with GeneratorEnqueuer(
        batches, workers=2, shards=4, backend="process", random_seed=7
    ) as enqueuer:
        for _ in range(2):
            seen = [batch["x"] for batch in enqueuer]
            print(f"{len(seen)} batches of up to {len(seen[0])} rows")

assert sorted(np.concatenate(seen)) == list(range(3000))
