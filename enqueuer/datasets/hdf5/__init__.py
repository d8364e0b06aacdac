"""HDF5: `pack` writes batches, `HDF5Source` reads them, `describe` lists its datasets."""

from enqueuer.datasets.hdf5.pack import pack
from enqueuer.datasets.hdf5.rows import Column, describe
from enqueuer.datasets.hdf5.source import HDF5Source

__all__ = ["Column", "HDF5Source", "describe", "pack"]
