"""Lists of files, found or read, and functions that load one."""

from enqueuer.datasets.files.lists import find_files, read_list
from enqueuer.datasets.files.loaders import load_array, load_audio, load_image, random_crop

__all__ = [
    "find_files",
    "load_array",
    "load_audio",
    "load_image",
    "random_crop",
    "read_list",
]
