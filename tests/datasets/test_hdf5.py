"""HDF5: packing, reading back, and what is refused."""

import numpy as np
import pytest
from helpers import needs

h5py = needs("h5py")

from enqueuer import GeneratorEnqueuer  # noqa: E402
from enqueuer.datasets.hdf5 import HDF5Source, pack  # noqa: E402


def numbered(shard):
    """Yield batches whose rows all know their number, and random numbers of the shard."""
    for number in shard.split(range(0, 100, 5)):
        rows = np.arange(number, number + 5)
        yield {
            "row": rows,
            "x": shard.rng.random((5, 3), np.float32),
            "name": [f"ä{r}" for r in rows],
        }


def test_what_was_packed_is_read_back(tmp_path):
    path = tmp_path / "a.h5"
    assert pack(numbered, path, shards=3, backend="thread", random_seed=7) == 100
    source = HDF5Source(path, batch_size=8)
    batches = list(GeneratorEnqueuer(source, workers=2))
    assert sorted(np.concatenate([batch["row"] for batch in batches])) == list(range(100))
    for batch in batches:
        assert [f"ä{r}" for r in batch["row"]] == list(batch["name"])
