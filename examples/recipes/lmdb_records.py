"""Records of an LMDB file: each worker opens it once, when it reads its first record."""

import functools
import sys
import tempfile

import numpy as np

try:
    import lmdb
except ImportError as error:
    print(f"{error}. This needs LMDB: pip install lmdb", file=sys.stderr)
    sys.exit(2)

from enqueuer import OrderedEnqueuer


# [recipe]
@functools.cache
def database(path):
    # A worker must not use an environment that was opened before a fork: open it there.
    return lmdb.open(path, readonly=True, lock=False, readahead=False)


def load(key):
    with database(path).begin(buffers=True) as transaction:
        value = transaction.get(key)
        # A copy: the buffer is valid only until the transaction ends.
        return np.frombuffer(value, np.float32).copy()


# [end]


with tempfile.TemporaryDirectory() as path:
    keys = [f"{i:06}".encode() for i in range(256)]
    with lmdb.open(path, map_size=1 << 24) as environment, environment.begin(write=True) as writer:
        for i, key in enumerate(keys):
            writer.put(key, np.full(16, i, np.float32))
    with OrderedEnqueuer(
        keys, load, batch_size=32, shuffle=True, workers=2, backend="process", random_seed=7
    ) as enqueuer:
        for _ in range(2):
            seen = [batch[:, 0] for batch in enqueuer]
            print(f"{len(seen)} batches")

assert sorted(np.concatenate(seen)) == list(range(256))
