"""HDF5: `pack` writes what a source yields, `HDF5Source` reads it back, `describe` looks at it."""

from enqueuer.datasets.h5inspect import Description, Summary, describe
from enqueuer.datasets.h5layout import Column
from enqueuer.datasets.h5pack import pack
from enqueuer.datasets.h5source import HDF5Source

__all__ = ["Column", "Description", "HDF5Source", "Summary", "describe", "pack"]
