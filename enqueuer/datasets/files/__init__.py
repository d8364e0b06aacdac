"""Lists of files -> batches: found or read, shuffled, split over shards, loaded, stacked."""

from enqueuer.datasets.files.batches import FileBatches, FileEntry, find_files, read_list
from enqueuer.datasets.files.loaders import load_array, load_audio, load_image, random_crop

__all__ = [
    "FileBatches",
    "FileEntry",
    "find_files",
    "load_array",
    "load_audio",
    "load_image",
    "random_crop",
    "read_list",
]
