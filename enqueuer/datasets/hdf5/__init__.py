"""HDF5: `pack` writes batches, `HDF5Source` reads them, `describe` summarizes a file."""

from enqueuer.datasets.hdf5.pack import pack
from enqueuer.datasets.hdf5.rows import Column, Description, Summary, describe
from enqueuer.datasets.hdf5.source import HDF5Source

__all__ = ["Column", "Description", "HDF5Source", "Summary", "describe", "pack"]
