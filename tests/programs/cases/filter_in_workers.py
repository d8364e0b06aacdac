"""`import hdf5plugin` at the head of a program: threads read a zstd file, worker processes do not. Needs hdf5plugin."""

# needs: h5py, hdf5plugin
import os
import tempfile

import h5py
import hdf5plugin
import numpy as np

from enqueuer import GeneratorEnqueuer
from enqueuer.datasets.hdf5 import HDF5Source

with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "a.h5")
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(1000), chunks=(100,), **hdf5plugin.Zstd())
    found = {}
    for backend in ("thread", "process"):
        try:
            with GeneratorEnqueuer(
                HDF5Source(path, "x"), workers=2, backend=backend, random_seed=1
            ) as enqueuer:
                found[backend] = int(sum(batch.sum() for batch in enqueuer))
        except Exception as error:
            found[backend] = f"{type(error).__name__}: {error}"
print(found)
print(
    "ok"
    if found["thread"] == found["process"]
    else "FAIL: a file that the program reads cannot be read by its worker processes"
)
