"""load_array: a file of numpy -> its arrays, for `FileBatches` or for `map` of an enqueuer."""

from __future__ import annotations

from typing import Any

import numpy as np

from enqueuer.datasets.files.lists import Path


def load_array(path: Path) -> Any:
    """Return the array of an `.npy` file, or a dict of the arrays of an `.npz` file.

    Raises:
        ValueError: The file is of another kind, or has pickled objects, which are never loaded.
    """
    # numpy would leave a broken file open.
    with open(path, "rb") as file:
        loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            return {name: loaded[name] for name in loaded.files}
