"""Load files in parallel: a list of paths, a function for one of them, batches in a fixed order.

Each file is a task for the next free worker. If a file is broken, only this file is left out. The
result is the same for any number of threads, processes or Ray actors.
"""

import logging
import tempfile
from pathlib import Path

import numpy as np

from enqueuer import OrderedEnqueuer

# Otherwise skipped errors are logged.
logging.getLogger("enqueuer").setLevel(logging.CRITICAL)


def load(path, task):
    image = np.load(path)
    # The number is the same for this file in this epoch, in any worker.
    if task.rng.random() < 0.5:
        image = image[:, ::-1]
    return {"image": image, "name": path.stem}


def epochs(paths, **options):
    options = {"shuffle": True, "batch_size": 4, "random_seed": 7, "on_error": "skip"} | options
    with OrderedEnqueuer(paths, load, **options) as enqueuer:
        batches = [batch for _ in range(2) for batch in enqueuer]
        print(f"{len(batches)} batches, {enqueuer.error_count} errors, {options['backend']}")
    return batches


with tempfile.TemporaryDirectory() as directory:
    paths = [Path(directory, f"{i:02}.npy") for i in range(12)]
    for i, path in enumerate(paths):
        np.save(path, np.arange(64).reshape(8, 8) + i)
    # This file is broken.
    paths[5].write_bytes(b"")

    threads = epochs(paths, backend="thread", workers=2)
    processes = epochs(paths, backend="process", workers=3)

assert len(threads) == len(processes) == 6
for one, other in zip(threads, processes, strict=True):
    assert one["name"] == other["name"]
    assert np.array_equal(one["image"], other["image"])
names = [name for batch in threads for name in batch["name"]]
assert sorted(names) == sorted([p.stem for p in paths if p != paths[5]] * 2)
# Each epoch has its own order.
assert names[:11] != names[11:]
