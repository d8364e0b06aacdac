"""A file that appears under its name only when everything is in it and on the disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from enqueuer.datasets.hdf5.files import guarded, h5py


@contextlib.contextmanager
def whole(path: Path, folder: Path) -> Iterator[Any]:
    """Give an `h5py.File` that appears under its name only when all is in it and on the disk.

    Args:
        path: Path of the file.
        folder: Folder for the file while it is written; on the same file system.
    """
    temporary = folder / f"{path.name}.{os.getpid()}.tmp"
    try:
        with guarded(temporary):
            file = h5py.File(temporary, "w")
        try:
            yield file
        except BaseException:
            # The first error is the one to report.
            with contextlib.suppress(Exception):
                _discard(file)
            raise
        with guarded(temporary):
            file.close()
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _discard(file: Any) -> None:
    """Close a file whose content is not needed."""
    # HDF5 writes pending data when it closes a file. If it cannot, as the disk is full, it crashes
    # when the file's memory is freed. So the data are written to /dev/null.
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, file.id.get_vfd_handle(), inheritable=False)
    os.close(nowhere)
    file.close()


def sync(path: Path) -> None:
    """Write the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
